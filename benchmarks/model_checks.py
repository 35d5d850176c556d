"""Small Llamas, one for each family of topologies: with kernels against plain torch on the same device; used by gpu.py.

Both get the same weights and tokens. The logits and every gradient have to agree, in float32.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import rewire
from rewire.kernels import operators
from rewire.kernels.grid import Kernel, Launch
from rewire.kernels.spec import MixSpec

#: Largest relative difference of the logits, or of a gradient. The sums differ in their order only.
TOLERANCE = 3e-4


@dataclasses.dataclass(frozen=True)
class ModelCheck:
    """A topology in a Llama.

    Attributes:
        topology: its name.
        layers: of the Llama.
        kinds: of kernels that have to run: see `_kinds`.
    """

    topology: str
    layers: int
    kinds: frozenset[str]

    @property
    def name(self) -> str:
        return f"model: {self.topology}, {self.layers} layers"


def checks(small: bool) -> list[ModelCheck]:
    """The first is deep enough for depth blocking, in every case."""
    few = 2 if small else 4
    deep = [("ancre-ingoing", 9 if small else 14, "norm, several, gathered")]
    deep += [("denseformer", few if small else 14, "gathered" if small else "several, gathered")]
    others = [
        ("grn-v1", "gathered"),
        ("grn-v3", "scores, channel, norm"),
        ("dca", "scores, channel, several"),
        ("muddformer", "scores, several"),
        ("attnres", "scores"),
        ("hc-static", "several"),
        ("hc-dynamic", "scores, several"),
        ("mhc", "scores, several"),
        ("frac-hc", "scores, several"),
        ("laurel-pa", "norm"),
        ("layerscale", "channel"),
        ("residual", "norm"),
    ]
    rows = [*deep, *((name, few, kinds) for name, kinds in others)]
    return [ModelCheck(name, layers, frozenset(kinds.split(", "))) for name, layers, kinds in rows]


def run(check: ModelCheck, device: torch.device, seed: int, small: bool) -> float:
    """The check.

    Returns:
        The largest relative difference as a share of the tolerance, 0 to 1.

    Raises:
        AssertionError: a result differs, or a kind of kernel did not run.
    """
    torch.manual_seed(seed)
    width, tokens = (32, (1, 6)) if small else (256, (2, 128))
    model = _model(check, width).to(device)
    ids = torch.randint(97, tokens, device=device)
    with _noted() as started:
        fused = _results(model, ids)
    ran = {kind for one in started for kind in _kinds(one.spec)}
    assert check.kinds <= ran, f"no kernel with {', '.join(sorted(check.kinds - ran))} ran"
    with _noted() as started, mock.patch.object(operators, "SWITCHED_ON", False):  # as REWIRE_KERNELS=off
        plain = _results(model, ids)
    assert not started, "kernels ran where they are switched off"
    largest = max(float(x.norm()) for x in plain.values())
    # Gradients that are next to nothing are held against the others.
    shares = {
        name: float((fused[name] - x).norm()) / max(float(x.norm()), 1e-3 * largest) / TOLERANCE
        for name, x in plain.items()
    }
    worst = max(shares, key=shares.__getitem__)
    assert shares[worst] <= 1, f"{worst}: the difference is {shares[worst]:.3g} times what is allowed"
    return shares[worst]


def _model(check: ModelCheck, width: int) -> nn.Module:
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=check.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=97,
        use_cache=False,
    )
    model = rewire.compile(LlamaForCausalLM(config), check.topology, start="paper", validate=False)
    with torch.no_grad():
        for connection in rewire.connections(model).values():
            for weights in connection.parameters():
                weights.add_(0.02 * torch.randn_like(weights))  # away from zeros, whose gradients vanish
    return model


def _results(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """Logits, and the gradient of every parameter."""
    model.zero_grad()
    output = model(input_ids=ids, labels=ids)
    output.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": output.logits.detach(), **gradients}


def _kinds(spec: MixSpec) -> set[str]:
    kinds = {
        "norm": spec.norm is not None,
        "several": spec.outputs > 1 and not spec.probe,
        "gathered": spec.probe,
        "scores": spec.scores,
        "channel": spec.weights == "channel",
    }
    return {kind for kind, holds in kinds.items() if holds}


@contextlib.contextmanager
def _noted() -> Iterator[list[Launch]]:
    """The kernels that are started."""
    started: list[Launch] = []

    def note(kernel: Kernel, tensors: Sequence[Tensor]) -> None:
        started.append(kernel.launch(kernel.pick(tensors)))
        start(kernel, tensors)

    start = Kernel.__call__
    with mock.patch.object(Kernel, "__call__", note):
        yield started
