"""Memory that topologies add: a Llama of 32 layers, one training step, with and without activation checkpointing.

    python benchmarks/memory.py [--out FILE]
    python benchmarks/memory.py --plain [--layers N] [--layer-norms] [--out FILE]

Counted are the bytes of all tensors that live at once, at their most: every operator's results are followed until they
are freed, in forward and backward. The plain model's peak is subtracted, and the rest is told in hidden states, what
one layer's checkpoint keeps. Weights and their gradients are small beside these. Layers are units (block granularity).
Gradients of sums are computed by hand, as those of states of usual sizes are, and once more by autograd, as in blocks
that are compiled. *Boundary* is what the stream holds between the last two layers, which
would cross a boundary of pipeline stages there.

With ``--plain`` nothing is checkpointed, and *kept* is what lives between forward and backward. Few bytes for each
token (gates, scores) count as they are: the width is 512 there, so that they do not stand for more than they are.
Norms are those of transformers, several operations, or with ``--layer-norms`` single ones that keep their input alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import weakref
from pathlib import Path
from typing import Any

with contextlib.suppress(ModuleNotFoundError):  # where torchvision's operators do not match torch's build
    import torchvision_stub  # noqa: F401

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

import rewire
from rewire.kernels.cpu import plain
from rewire.mixes.history import History
from rewire.runtime.stream import Stream
from rewire.topologies.base import Start

LAYERS, WIDTH, TOKENS = 32, 128, 512
GROUPS: list[dict[str, Any]] = [{}, {"block": 4}, {"block": 8}]
#: Topology with options.
TOPOLOGIES: list[tuple[str, dict[str, Any]]] = [
    *((name, options) for name in ("ancre-ingoing", "denseformer") for options in GROUPS),
    *((name, options) for name in ("grn-v1", "grn-v2", "grn-v3", "dca") for options in (*GROUPS, {"last": 4})),
    *((name, options) for name in ("attnres", "muddformer") for options in GROUPS),
    *((name, {}) for name in ("hc-static", "hc-dynamic", "hc-gated", "mhc", "frac-hc", "multi-gate", "two-lanes")),
    *((name, {}) for name in ("ancre-cascaded", "x0-lambdas", "unet", "rezero", "layerscale", "variance-gate", "gpas")),
    *((name, {}) for name in ("ddl", "orthogonal", "review", "laurel-rw", "laurel-lr", "laurel-pa")),
]


#: Topology with options, without checkpointing.
KEPT: list[tuple[str, dict[str, Any]]] = [
    *((f"ancre-{way}", {}) for way in ("ingoing", "outgoing", "none", "constant", "cascaded")),
    *((name, {}) for name in ("denseformer", "x0-lambdas", "unet", "fixed-scale", "rezero", "skipinit", "layerscale")),
    *((name, {}) for name in ("residual-scale", "variance-gate", "gpas", "ddl", "orthogonal", "review")),
    *((name, o) for name in ("laurel-lr", "laurel-pa") for o in ({}, {"total": 2.0})),
    *((name, {}) for name in ("laurel-rw", "grn-v1", "grn-v2")),
    *((name, {"block": 4}) for name in ("ancre-ingoing", "denseformer", "grn-v1")),
    *((name, o) for name in ("grn-v3", "dca", "muddformer", "attnres") for o in ({}, {"block": 4})),
    *(("attnres", {"qkv": True}), ("muddformer", {"norms": True})),
    *((name, {}) for name in ("hc-static", "hc-dynamic", "hc-gated", "mhc", "frac-hc", "multi-gate", "two-lanes")),
]


class Peak(TorchDispatchMode):
    """Counts the bytes of the tensors made inside that live at once.

    Attributes:
        bytes, most: now, and at their most.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(x.untyped_storage()) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(result):
            if isinstance(x, Tensor) and id(x.untyped_storage()) not in given:
                self._made(x.untyped_storage())
        return result

    def _made(self, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        self.bytes += size
        self.most = max(self.most, self.bytes)
        weakref.finalize(storage, self._freed, size)

    def _freed(self, size: int) -> None:
        self.bytes -= size


def llama(
    layers: int = LAYERS, width: int = WIDTH, checkpointed: bool = True, layer_norms: bool = False
) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        vocab_size=16,
        max_position_embeddings=TOKENS,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).train()
    for layer in model.model.layers if layer_norms else ():
        layer.input_layernorm, layer.post_attention_layernorm = nn.LayerNorm(width), nn.LayerNorm(width)
    if not checkpointed:
        return model
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def peak(model: nn.Module) -> float:
    """Of one training step, in hidden states."""
    step(model)  # what is made once is there, and gradients of weights are
    with Peak() as counted:
        step(model)
    return counted.most / (TOKENS * WIDTH * 4)


def step(model: nn.Module) -> None:
    loss_of(model, TOKENS).backward()


def loss_of(model: nn.Module, tokens: int) -> Tensor:
    loss: Tensor = model(input_ids=torch.arange(tokens)[None] % 16).logits.square().mean()
    return loss


def kept(model: nn.Module, tokens: int) -> tuple[float, float]:
    """What lives between forward and backward, and the peak, in hidden states: what twice the tokens have more."""
    loss_of(model, tokens).backward()  # what is made once is there, and gradients of weights are
    few, many = lives(model, tokens), lives(model, 2 * tokens)
    state = tokens * model.config.hidden_size * 4  # type: ignore[union-attr, operator]
    between, most = ((more - less) / state for less, more in zip(few, many, strict=True))
    return between, most


def lives(model: nn.Module, tokens: int) -> tuple[int, int]:
    """Bytes that live between forward and backward, and at most."""
    with Peak() as counted:
        loss = loss_of(model, tokens)
        between = counted.bytes
        loss.backward()
    return between, counted.most


def without_checkpointing(
    layers: int, layer_norms: bool, width: int = 512, tokens: int = 64
) -> tuple[float, list[dict[str, Any]]]:
    """What the plain model keeps, and what topologies keep more."""
    before, most = kept(llama(layers, width, False, layer_norms), tokens)
    rows = []
    for name, options in track(KEPT, "measuring"):
        # At the paper's start: a preserving one may leave out what is yet to be learned.
        model = llama(layers, width, False, layer_norms)
        rewired = rewire.compile(model, name, validate=False, start="paper", **options)
        more, peak = kept(rewired, tokens)
        rows.append({"topology": name, "options": options, "kept": more - before, "extra peak": peak - most})
    return before, rows


def boundary(model: nn.Module) -> float:
    """What the stream holds between the last two layers, in hidden states."""
    held: list[Stream] = []
    layers: Any = model.model.layers  # type: ignore[union-attr]
    # By the class: a rewired block's own method would show the hook a tensor.
    hook = nn.Module.register_forward_hook(layers[-2], lambda module, args, output: held.append(output))
    with torch.no_grad():
        model(input_ids=torch.arange(TOKENS)[None] % 16)
    hook.remove()
    tensors = [x for s in held[0].states for x in (s.states if isinstance(s, History) else (s,))]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values()) / (TOKENS * WIDTH * 4)


def measure(name: str, options: dict[str, Any], plain_peak: float, start: Start = "paper") -> dict[str, Any]:
    model = rewired(name, options, start)
    return {
        "topology": name,
        "options": options,
        "extra peak": peak(model) - plain_peak,
        "boundary": boundary(model),
    }


def rewired(name: str, options: dict[str, Any], start: Start = "paper") -> Any:
    return rewire.compile(llama(), name, granularity="block", validate=False, start=start, **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/memory.json"))
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--layer-norms", action="store_true")
    parser.add_argument("--layers", type=int, default=LAYERS)
    arguments = parser.parse_args()
    plain.WORTHWHILE = 0  # elements from which on sums are computed by hand
    if arguments.plain:
        lives, rows = without_checkpointing(arguments.layers, arguments.layer_norms)
        table = Table("topology", "kept", "extra peak")
        for row in rows:
            more = [f"{row[key]:+.1f} ({row[key] / lives:+.0%})" for key in ("kept", "extra peak")]
            table.add_row(label_of(row), *more)
        Console(width=120).print(f"the plain model keeps {lives:.1f}", table)
        write(
            arguments.out,
            {"layers": arguments.layers, "layer norms": arguments.layer_norms, "plain": lives, "rows": rows},
        )
        return
    plain_peak = peak(llama())
    rows = [measure(*entry, plain_peak) for entry in track(TOPOLOGIES, "measuring")]
    plain.WORTHWHILE = sys.maxsize
    for row in track(rows, "with autograd's sums"):
        row["with autograd's sums"] = peak(rewired(row["topology"], row["options"])) - plain_peak
    table = Table("topology", *(columns := ("extra peak", "with autograd's sums", "boundary")))
    for row in rows:
        table.add_row(label_of(row), *(f"{row[column]:.1f}" for column in columns))
    Console(width=120).print(table)
    result = {
        "model": f"Llama, {LAYERS} layers, width {WIDTH}, {TOKENS} tokens, float32, checkpointed, on a CPU",
        "command": "python benchmarks/memory.py",
        "unit": "one hidden state of all tokens",
        "peak of the plain model": plain_peak,
        "rows": rows,
    }
    write(arguments.out, result)


def label_of(row: dict[str, Any]) -> str:
    return " ".join([row["topology"], *(f"{key}={value}" for key, value in row["options"].items())])


def write(out: Path, result: dict[str, Any]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
