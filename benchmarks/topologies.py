"""What each topology costs on a 12-layer Llama: weights, states held, bytes moved, time.

    python benchmarks/topologies.py [--out FILE] [--repeats N]

Bytes are counted, not estimated: every operator that a topology runs in one forward. *Eager* is what those operators
read and write one after the other. *Floor* is what one fused kernel for each read, write and output would move: each
tensor from outside once, each result once. Both are per token, in units of one hidden state (width times four bytes).
Where a unit is a whole block, the adds between its branches are not operations of the topology and do not count; the
sum of its branches does.
A training step (forward, backward) is timed in turn with one of the plain residual network; the ratio is that of the
fastest of each, as other programs on the machine only make steps slower.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

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
from rewire.mixes.history import History
from rewire.runtime.stream import Stream
from rewire.topologies.base import materialize

LAYERS, WIDTH, BATCH, LENGTH = 12, 256, 4, 128
TOKENS = BATCH * LENGTH
#: Topology with options; None is the model as it was.
TOPOLOGIES: list[tuple[str, dict[str, Any]]] = [
    ("residual", {}),
    ("ancre-ingoing", {}),
    ("ancre-outgoing", {}),
    ("denseformer", {}),
    ("denseformer", {"dilation": 4, "period": 5}),
    ("grn-v1", {}),
    ("grn-v2", {}),
    ("grn-v3", {}),
    ("grn-v3", {"last": 2}),
    ("dca", {}),
    ("dca", {"last": 2}),
    ("hc-static", {}),
    ("hc-dynamic", {}),
    ("frac-hc", {}),
    ("mhc", {}),
    ("laurel-rw", {}),
    ("laurel-lr", {}),
    ("laurel-pa", {}),
    ("rezero", {}),
    ("layerscale", {}),
    ("attnres", {}),
    ("attnres", {"block": 4}),
    ("muddformer", {}),
    ("hc-gated", {}),
    ("ddl", {}),
    ("variance-gate", {}),
    ("residual-scale", {}),
    ("x0-lambdas", {}),
    ("unet", {}),
]
OPERATIONS = ("read", "write", "merge", "push", "finish")


def llama(vocabulary: int = 1000) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=688,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=vocabulary,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


class Traffic(TorchDispatchMode):
    """Bytes that operators move while one operation of a topology runs."""

    def __init__(self) -> None:
        super().__init__()
        self.eager = self.floor = 0
        self.made: dict[int, Any] = {}  # storages made inside, kept alive so that addresses stay unique
        self.read: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        out = func(*args, **kwargs)
        if func.is_view:
            return out
        kwargs.pop("out", None)  # is written, not read
        moves = "empty" not in str(func)
        for tensor in _tensors((args, kwargs)) * moves:
            self.eager += _bytes(tensor)
            key = tensor.untyped_storage().data_ptr()
            if key not in self.made and key not in self.read:
                self.read.add(key)
                self.floor += _bytes(tensor)
        for tensor in _tensors(out):
            self.eager += moves * _bytes(tensor)
            self.made.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return out

    def returned(self, result: Any) -> None:
        """Count what the operation hands on, if it was made inside."""
        keys = {t.untyped_storage().data_ptr(): t for t in _tensors(result)}
        self.floor += sum(_bytes(tensor) for key, tensor in keys.items() if key in self.made)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _bytes(tensor: Tensor) -> int:
    """Bytes behind a tensor; an expanded one is read from the cache."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


@contextlib.contextmanager
def counted(topology: rewire.Topology) -> Iterator[list[Traffic]]:
    """Count the traffic of each operation of ``topology``."""
    counts: list[Traffic] = []
    running: list[str] = []

    def wrapped(name: str) -> Callable[..., Any]:
        original = getattr(type(topology), name)

        def operation(*args: Any, **kwargs: Any) -> Any:
            if running:  # write calls merge and push
                return original(*args, **kwargs)
            running.append(name)
            with Traffic() as traffic:
                result = _computed(original(*args, **kwargs))
            traffic.returned(_plain(result))
            counts.append(traffic)
            running.pop()
            return result

        return operation

    with contextlib.ExitStack() as stack:
        for name in (name for name in OPERATIONS if hasattr(topology, name)):
            stack.enter_context(mock.patch.object(type(topology), name, wrapped(name)))
        yield counts


def _computed(result: Any) -> Any:
    """What an operation returns, with the sums that were left for later."""
    return tuple(map(_computed, result)) if type(result) is tuple else materialize(result)


def _plain(result: Any) -> Any:
    """What is in a result, as containers that pytrees know."""
    if isinstance(result, History):
        return result.states
    if isinstance(result, rewire.QKVInputs):
        return dict(vars(result))
    return tuple(map(_plain, result)) if isinstance(result, tuple) else result


def states_held(model: nn.Module, ids: Tensor) -> float:
    """Most bytes in the states between two blocks, in hidden states."""
    held: list[int] = []

    def hook(_module: nn.Module, _args: Any, output: Any) -> None:
        stream = output[0] if isinstance(output, tuple) else output
        if isinstance(stream, Stream):
            storages = {
                t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(_plain(stream.states))
            }
            held.append(sum(storages.values()))

    layers: Any = model.model.layers  # type: ignore[union-attr]
    # By the class: a rewired block's own method would show the hook tensors.
    handles = [nn.Module.register_forward_hook(layer, hook) for layer in layers]
    with torch.no_grad():
        model(ids)
    for handle in handles:
        handle.remove()
    return max(held) / (TOKENS * WIDTH * 4)


def step_time(model: nn.Module, ids: Tensor) -> float:
    model.zero_grad()
    start = time.perf_counter()
    model(ids, labels=ids).loss.backward()
    return time.perf_counter() - start


def measure(name: str, options: dict[str, Any], plain: nn.Module, ids: Tensor, repeats: int) -> dict[str, Any]:
    model = rewire.compile(plain, name, start="paper", validate=False, **options)
    (connection,) = rewire.connections(model).values()
    with counted(connection.layout.topology) as counts, torch.no_grad():
        model(ids)
    state = TOKENS * WIDTH * 4
    turns = [(step_time(model, ids), step_time(plain, ids)) for _ in range(repeats + 1)][1:]
    return {
        "topology": name,
        "options": options,
        "units": connection.layout.dims.depth,
        "parameters": sum(parameter.numel() for parameter in connection.parameters()),
        "states held": states_held(model, ids),
        "eager": sum(count.eager for count in counts) / state,
        "floor": sum(count.floor for count in counts) / state,
        "step": min(a for a, _ in turns) / min(b for _, b in turns),
    }


def show(rows: list[dict[str, Any]]) -> None:
    table = Table("topology", "units", "parameters", "states held", "moved, eager", "moved, floor", "step / plain")
    for row in rows:
        options = ", ".join(f"{key}={value}" for key, value in row["options"].items())
        label = f"{row['topology']} ({options})" if options else row["topology"]
        numbers = (f"{row[key]:.1f}" for key in ("states held", "eager", "floor"))
        table.add_row(label, str(row["units"]), f"{row['parameters']:,}", *numbers, f"{row['step']:.2f}")
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/topologies.json"))
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    plain = llama()
    ids = torch.randint(1000, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    rows = [measure(*entry, plain, ids, arguments.repeats) for entry in track(TOPOLOGIES, "measuring")]
    show(rows)
    result = {
        "model": f"Llama, {LAYERS} layers, width {WIDTH}, {BATCH} x {LENGTH} tokens, float32",
        "unit of states held and moved": "one hidden state of all tokens",
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}",
        "rows": rows,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
