"""Passes over memory and launches that connections cost, counted on tensors without storage: no GPU is needed.

    python benchmarks/passes.py [--json FILE] [topology ..]

A *pass* is one read or write of one hidden state of all tokens. What is counted is what eager mode would run on a GPU:
kernels, with all that they read and write, and operations of torch, each a launch that reads its inputs and writes its
results (views and allocations cost nothing). Branches cost nothing here: they are tensors without contents.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
import traffic
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rewire.kernels.kernel import Launch, noted
from rewire.mixes.again import UnitsLeft
from rewire.topologies.base import Dims, QKVInputs, Topology, materialize
from rewire.topologies.registry import make_topology

ROWS, COLS, DTYPE = 16384, 2048, torch.bfloat16

#: Topologies, and units of a trunk of 24 blocks.
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "ancre-ingoing": ("ancre-ingoing", {}, 24),
    "denseformer": ("denseformer", {}, 24),
    "grn-v1": ("grn-v1", {}, 24),
    "grn-v2": ("grn-v2", {}, 24),
    "grn-v3": ("grn-v3", {}, 24),
    "dca": ("dca", {}, 24),
    "muddformer": ("muddformer", {}, 24),
    "attnres": ("attnres", {}, 48),
    "attnres, block=6": ("attnres", {"block": 6}, 48),
    "hc-static": ("hc-static", {}, 48),
    "hc-dynamic": ("hc-dynamic", {}, 48),
    "mhc": ("mhc", {}, 48),
    "frac-hc": ("frac-hc", {}, 48),
}


class Count(NamedTuple):
    """Of one direction, for each unit."""

    kernel_passes: float
    torch_passes: float
    launches: float


class Counter(TorchDispatchMode):
    """Counts launches of torch and the bytes that they move."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.launches = 0
        self.by_name: dict[str, list[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "rewire":  # what it does is seen, not the operator itself
            with self:
                return func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        results = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        written = [x for x in results if all(x is not y for y in inputs)]
        known = {storage(x) for x in inputs}
        # A view, an allocation, a number
        free = (
            not (inputs and results)
            or "empty" in func.__name__
            or (written and all(storage(x) in known for x in written))
        )
        if not free:
            moved = sum({storage(x): bytes_of(x) for x in (*inputs, *results)}.values())
            self.bytes, self.launches = self.bytes + moved, self.launches + 1
            seen = self.by_name.setdefault(func.__name__, [0, 0])
            seen[0], seen[1] = seen[0] + moved, seen[1] + 1
        return result


def storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def bytes_of(x: Tensor) -> int:
    """Of what a view shows; an expanded dimension is read once."""
    elements = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        elements *= size if stride else 1
    return elements * x.itemsize


class Branch(torch.autograd.Function):
    """A branch that costs nothing, of what it reads."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.inputs = len(inputs)
        return torch.empty_like(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(grad) for _ in range(ctx.inputs))


def run(topology: Topology[Any], weights: Any, dims: Dims, x: Tensor) -> Tensor:
    """The trunk's output."""
    states = topology.start(x, weights)
    for t in range(1, dims.depth + 1):
        value, states = topology.read(states, weights, t)
        seen = (value.q, value.k, value.v, value.residual) if isinstance(value, QKVInputs) else (materialize(value),)
        seen = tuple({id(x): x for x in seen}.values())  # what a block reads twice it does in the plain model, too
        with UnitsLeft(dims.depth - t):
            states = topology.write(states, weights, t, Branch.apply(*seen))
    return topology.finish(states, weights, dims)


def dims_of(topology: Topology[Any], depth: int, width: int) -> Dims:
    """Of a trunk whose units all begin with an attention, where the topology asks."""
    return Dims(depth, width, frozenset(range(1, depth + 1) if topology.reads_qkv else ()))


def measure(topology: Topology[Any], depth: int) -> dict[str, Any]:
    """Forward, backward and what is saved between them, for each unit; the learned weights are made once a step.

    With the operations of torch by name, and the launches of kernels.
    """
    dims = dims_of(topology, depth, COLS)
    start = "preserve"
    topology = topology.for_start(start)
    parameters = {name: value.to("meta").requires_grad_() for name, value in topology.parameters(dims, start).items()}
    x = torch.empty(1, ROWS, COLS, dtype=DTYPE, device="meta", requires_grad=True)
    kept: dict[int, Tensor] = {}
    counts = {}
    with noted():  # on the meta device, as on a GPU
        weights = topology.weights(parameters, dims)
    with (
        noted() as launches,
        Counter() as counter,
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(storage(t), t) is None or t, lambda t: t),
    ):
        out = run(topology, weights, dims, x)
    kernels = launches
    counts["forward"], names = count(launches, counter, depth), {"forward": counter.by_name}
    saved = sum(t.untyped_storage().nbytes() for t in kept.values() if t.numel() >= ROWS)
    with noted() as launches, Counter() as counter:
        out.backward(torch.empty_like(out))
    counts["backward"], names["backward"] = count(launches, counter, depth), counter.by_name
    found = {way: one._asdict() for way, one in counts.items()} | {"saved": saved / state() / depth}
    return found | {"names": names, "kernels": kernels + launches}


def count(launches: list[Launch], counter: Counter, depth: int) -> Count:
    moved = sum(traffic.bytes_of_kernel(one) for one in launches)  # second steps are torch's, and seen there
    kernels = len(launches)
    return Count(moved / state() / depth, counter.bytes / state() / depth, (counter.launches + kernels) / depth)


def state() -> int:
    return ROWS * COLS * DTYPE.itemsize


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("topologies", nargs="*", default=list(CASES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--names", action="store_true", help="print the operations of torch that cost most")
    arguments = parser.parse_args()
    found = {}
    for case in arguments.topologies:
        name, options, depth = CASES[case]
        found[case] = {"units": depth, **measure(make_topology(name, options), depth)}
    table = Table("topology", "units", "forward: kernels + torch", "backward", "launches", "saved")
    for case, one in found.items():
        names, _ = one.pop("names"), one.pop("kernels")
        ways = one["forward"], one["backward"]
        table.add_row(
            case, str(one["units"]), *(f"{way['kernel_passes']:.1f} + {way['torch_passes']:.1f}" for way in ways),
            " / ".join(f"{way['launches']:.1f}" for way in ways), f"{one['saved']:.2f}",
        )  # fmt: skip
        if arguments.names:
            for way, by_name in names.items():
                for name, (moved, times) in sorted(by_name.items(), key=lambda item: -item[1][0])[:12]:
                    print(f"{case} {way}: {name} {moved / state() / one['units']:.2f} {times / one['units']:.1f}")
    Console(width=120).print(table)
    if arguments.json:
        sizes = {"rows": ROWS, "cols": COLS, "dtype": str(DTYPE), "torch": torch.__version__}
        arguments.json.write_text(json.dumps(sizes | {"topologies": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
