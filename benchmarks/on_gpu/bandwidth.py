"""The share of a copy's bandwidth that each kernel reaches, over what it has to move: each input read, each result
written once. The copy runs in turn with the kernels, in the same rounds.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch
import traffic
from on_mixes.cold_passes import passes_side_by_side

from on_gpu.kernel_checks import Check, Inputs
from rewire.bench import harness
from rewire.kernels.handwritten import gates, projection, writes
from rewire.kernels.sums.spec import MixSpec

#: Runs forward; what it returns runs backward.
Run = Callable[[], Callable[[], object]]
#: A run, and the bytes that forward and backward have to move; 0: there is none.
Case = tuple[Run, int, int]

WIDTHS = (1024, 4096)
#: What topologies use most, by name; those of the goals first.
SPECS = {
    **{f"sum of {n}": MixSpec(n) for n in (2, 4, 8, 16, 32, 64)},
    **{f"sum of {n}, one added": MixSpec(n, added=1) for n in (1, 8)},
    **{f"sum of {n}, per channel": MixSpec(n, "channel") for n in (2, 8, 32)},
    **{f"sum of {n}, per token": MixSpec(n, "none", True) for n in (2, 8, 32)},
    **{f"sum of {n}, RMSNorm": MixSpec(n, added=1, norm="rms", keep_mix=True) for n in (1, 8)},
    "4 sums of 16": MixSpec(16, outputs=4),
    "sum of 4, begun": MixSpec(4, added=1, accumulate=True),
    "gather 16 for 1": MixSpec(16, probe=True),
    "gather 16 for 4": MixSpec(16, outputs=4, probe=True),
    "gather 16 for 4, per channel": MixSpec(16, "channel", outputs=4, probe=True),
    "4 sums of 16, per token": MixSpec(16, "none", True, outputs=4),
    "gather 16 for 4, per token": MixSpec(16, "none", True, outputs=4, probe=True),
    "queries, keys, values of 12": MixSpec(12, "channel", True, outputs=3),
    "4 streams": MixSpec(5, "none", True, outputs=4),
    "4 streams and a read": MixSpec(5, outputs=5),
}


def cases() -> dict[str, Callable[[int, int, torch.device], Case]]:
    """By name, what makes a case of some rows and a width on a device, in bfloat16."""
    return {
        **{name: functools.partial(_mix, spec) for name, spec in SPECS.items()},
        **{f"projection to {columns}": functools.partial(_projection, columns) for columns in (8, 24, 96)},
        "read of 4 streams, sent back": _read,
        "projection of 4 streams to 24": functools.partial(_projection, 24, streams=4),
        "write of 4 streams, projected to 6": _write,
        "gates of 4 streams": functools.partial(_gates, 0),
        "gates of 4 streams, Sinkhorn": functools.partial(_gates, 20),
    }


def measure(name: str, device: torch.device, small: bool) -> dict[str, Any]:
    """Shares of copy bandwidth by width, and their medians."""
    make, rounds = cases()[name], 2 if small else 20
    size, rows = (1 << 20, 5) if small else (1 << 28, 16384)
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> Callable[[], object]:
        target.copy_(source)
        return lambda: target.copy_(source)

    found = []
    for width in (64,) if small else WIDTHS:
        run, *floors = make(rows, width, device)
        passes = passes_side_by_side({"copy": copy, name: run}, rounds, device)
        row: dict[str, Any] = {"rows": rows, "width": width}
        for which, floor in zip(("forward", "backward"), floors, strict=True):
            if floor:
                row[which] = _share(getattr(passes[name], which), getattr(passes["copy"], which), floor, 2 * size)
        found.append(row)
    medians = {
        which: statistics.median(shares)
        for which in ("forward", "backward")
        if (shares := [row[which]["share of copy"] for row in found if which in row])
    }
    return {"shapes": found, "median share of copy": medians}


def _share(ours: harness.Timing, copy: harness.Timing, floor: int, copied: int) -> dict[str, Any]:
    return {
        "microseconds": 1e6 * ours.median,
        "quartiles": [1e6 * x for x in ours.quartiles],
        "share of copy": floor / ours.median / (copied / copy.median),
        "copy bytes per second": copied / copy.median,
        "floor bytes": floor,
        "late": ours.late,
    }


def _mix(spec: MixSpec, rows: int, width: int, device: torch.device) -> Case:
    inputs = Inputs.of(Check(spec, rows, width, torch.bfloat16), device)

    def run() -> Callable[[], object]:
        found = inputs.forward()
        return (lambda: None) if spec.probe else lambda: inputs.backward(found)

    forward = traffic.bytes_floor(spec, rows, width, 2)
    return run, forward, 0 if spec.probe else traffic.bytes_floor(spec, rows, width, 2, backward=True)


def _projection(columns: int, rows: int, width: int, device: torch.device, streams: int = 1) -> Case:
    """Of a state, or of a token's streams side by side; backward adds what is carried."""
    width *= streams
    x = torch.randn(rows, width, device=device).bfloat16()
    weight, grad = torch.randn(columns, width, device=device).T, torch.randn(rows, columns, device=device)

    def run() -> Callable[[], object]:
        scores, inverse = projection.forward(x, weight, 1e-6)
        return lambda: projection.backward([grad], x, weight, scores, inverse, x)

    factors = weight.nbytes + grad.nbytes + 4 * rows
    return run, x.nbytes + factors, 3 * x.nbytes + 2 * weight.nbytes + 2 * grad.nbytes + 4 * rows


def _read(rows: int, width: int, device: torch.device) -> Case:
    """Products of a read's gradient with the streams, as if they were forward; and the projection's backward."""
    streams = torch.randn(rows, 4, width, device=device).bfloat16()
    grad, carried = torch.randn(rows, 1, width, device=device).bfloat16(), torch.randn_like(streams)
    weight, factors = torch.randn(width, 6, device=device), torch.randn(rows, 4, 1, device=device)
    scores, inverse = projection.forward(streams, weight, 1e-6)

    def run() -> Callable[[], object]:
        projection.products(grad, streams)
        read = projection.Read(grad, factors)
        return lambda: projection.backward([scores], streams, weight, scores, inverse, carried, read)

    small = 2 * scores.nbytes + inverse.nbytes + factors.nbytes + 2 * weight.nbytes
    return run, streams.nbytes + grad.nbytes + factors.nbytes, 3 * streams.nbytes + grad.nbytes + small


def _write(rows: int, width: int, device: torch.device) -> Case:
    """Of each stream 6 products."""
    streams = torch.randn(rows, 4, width, device=device).bfloat16()
    branch, table = torch.randn(rows, width, device=device).bfloat16(), torch.randn(rows, 4, 5, device=device)
    weight = torch.randn(6, width, device=device).T
    terms, read = (streams, [branch], table, weight), projection.Read(branch[:, None], table[..., :1])

    def run() -> Callable[[], object]:
        known = writes.forward(*terms, 1e-6, torch.bfloat16)
        return lambda: writes.backward(known[1], streams, read, *known, *terms)

    states, small = 2 * streams.nbytes + branch.nbytes, table.nbytes + weight.nbytes + 4 * rows * 24
    return run, states + small, 2 * states + branch.nbytes + 2 * small


def _gates(iterations: int, rows: int, width: int, device: torch.device) -> Case:
    """Of as many tokens as a state has 16 channels; the arithmetic of iterations counts, too."""
    tokens, lead = rows * max(1, width // 16), () if iterations else (4,)
    columns = 24 if iterations else 6
    products = torch.randn(columns, tokens, *lead, device=device).movedim(0, -1)
    static, scale = torch.randn(*lead, columns, device=device), torch.randn(columns, device=device)

    def run() -> Callable[[], object]:
        read, write = gates.forward(products, static, scale, 4, iterations, 0.0, 2.0)
        given = read, write, products, static, scale, iterations, 0.0, 2.0
        return lambda: gates.backward(*given)

    return run, 2 * products.nbytes, 3 * products.nbytes
