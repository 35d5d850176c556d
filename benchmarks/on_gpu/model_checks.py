"""Small Llamas, one for each family of topologies: with kernels against plain torch on the same device.

Both get the same weights and tokens. The logits and every gradient have to agree in float32; in bfloat16, they have to
be about as near to the float32 model as plain torch's.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from unittest import mock

import torch
from torch import Tensor, nn

import rewire
from rewire.kernels import switch
from rewire.kernels.kernel import Kernel, Launch, taken
from rewire.kernels.sums.spec import MixSpec

#: Largest relative difference of the logits, or of a gradient. The sums differ in their order only.
TOLERANCE = 3e-4
#: In bfloat16: how many times as far from float32 kernels may be as plain torch, and what never counts. Triton's
#: interpreter rounds toward zero.
FURTHER, NEGLIGIBLE = {"cuda": 1.5, "cpu": 3.0}, 2e-3


@dataclasses.dataclass(frozen=True)
class ModelCheck:
    """A topology in a Llama.

    Attributes:
        topology: its name.
        layers: of the Llama.
        kinds: of kernels that have to run: see `_kinds`.
        dtype: of its parameters.
    """

    topology: str
    layers: int
    kinds: frozenset[str]
    dtype: torch.dtype = torch.float32

    @property
    def name(self) -> str:
        return f"{self.topology}, {self.layers} layers, {str(self.dtype).removeprefix('torch.')}"


def checks(small: bool) -> list[ModelCheck]:
    """The first and those of reads that attend are deep enough for depth blocking, in every case."""
    few = 2 if small else 4
    deep = [("ancre-ingoing", 9 if small else 14, "norm, several, gathered")]
    deep += [("denseformer", few if small else 14, "gathered" if small else "several, gathered")]
    deep += [("attnres", 5 if small else 7, "scores, norm, several, gathered")]
    deep += [("grn-v3", few if small else 14, "scores, channel, norm" if small else "scores, channel, norm, several")]
    others = [
        ("grn-v1", "gathered"),
        ("dca", "scores, channel, several"),
        ("muddformer", "scores, several"),
        ("hc-static", "several"),
        ("hc-dynamic", "scores, several"),
        ("mhc", "scores, several"),
        ("frac-hc", "scores, several"),
        ("laurel-pa", "norm"),
        ("layerscale", "channel"),
        ("residual", "norm"),
    ]
    rows = [*deep, *((name, few, kinds) for name, kinds in others)]
    return [
        ModelCheck(name, layers, frozenset(kinds.split(", ")), dtype)
        for dtype in (torch.float32, torch.bfloat16)
        for name, layers, kinds in rows
    ]


def run(check: ModelCheck, device: torch.device, seed: int, small: bool) -> float:
    """The check.

    Returns:
        The largest relative difference as a share of the tolerance, 0 to 1.

    Raises:
        AssertionError: a result differs, or a kind of kernel did not run.
    """
    width, tokens = (32, (1, 6)) if small else (256, (2, 128))
    model = small_llama(check.topology, check.layers, width, seed).to(device, check.dtype)
    ids = torch.randint(97, tokens, device=device)
    with _noted() as started:
        fused = step(model, ids)
    specs = [one.code.made_for.spec for one in started if one.code.made_for]
    ran = {kind for spec in specs for kind in _kinds(spec)}
    assert check.kinds <= ran, f"no kernel with {', '.join(sorted(check.kinds - ran))} ran"
    with _noted() as started, mock.patch.object(switch, "ON", False):  # as REWIRE_KERNELS=off
        plain = step(model, ids)
        exact = step(copy.deepcopy(model).float(), ids) if check.dtype != torch.float32 else plain
    assert not started, "kernels ran where they are switched off"
    if check.dtype == torch.float32:
        share, worst = difference(fused, plain)
    else:
        (ours, worst), (theirs, _) = difference(fused, exact), difference(plain, exact)
        share = ours / (FURTHER[device.type] * theirs + NEGLIGIBLE / TOLERANCE)
    assert share <= 1, f"{worst}: the difference is {share:.3g} times what is allowed"
    return share


def difference(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest relative difference as a share of the tolerance, and of what it is.

    Gradients that are next to nothing are held against the others.
    """
    assert found.keys() == wanted.keys(), f"gradients of {sorted(found.keys() ^ wanted.keys())} are missing in one"
    largest = max(float(x.float().norm()) for x in wanted.values())
    shares = {
        name: float((found[name].float() - x.float()).norm()) / max(float(x.float().norm()), 1e-3 * largest) / TOLERANCE
        for name, x in wanted.items()
    }
    worst = max(shares, key=lambda name: shares[name] if shares[name] == shares[name] else float("inf"))  # NaN is worst
    return (shares[worst] if shares[worst] == shares[worst] else float("inf")), worst


def small_llama(topology: str, layers: int, width: int, seed: int) -> nn.Module:
    """A rewired Llama with connections that are not at their start, float32, on the CPU."""
    from transformers import LlamaConfig, LlamaForCausalLM  # takes seconds, which other jobs need not wait for

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=97,
        use_cache=False,
    )
    model = rewire.compile(LlamaForCausalLM(config), topology, start="paper", validate=False)
    with torch.no_grad():
        for connection in rewire.connections(model).values():
            for name, weights in connection.named_parameters():  # away from zeros, whose gradients vanish
                weights.add_(0.02 / connection.stored_in[name] * torch.randn_like(weights))
    return model


def step(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
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
        started.append(kernel.launch([taken(tensors, at) for at in kernel.used]))
        start(kernel, tensors)

    start = Kernel.__call__
    with mock.patch.object(Kernel, "__call__", note):
        yield started
