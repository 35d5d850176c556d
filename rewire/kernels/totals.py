"""The second step of sums over programs: one Triton kernel adds up all that the programs of others left.

Partial sums lie one behind the other, [parts, ...]. They are added in an order that depends on sizes only.
"""
# ruff: noqa: N803  (constants of a kernel are written in capitals)
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rewire.kernels.arguments import Layout, layout
from rewire.kernels.grid import At, Code, Kernel
from rewire.kernels.launch import MOST_PLANS

#: Elements of a tile, and sums of it at the most.
TILE, MOST_SUMS = 2048, 128


@triton.jit
def add_up(
    partials,  # of each, float32 [parts, size]
    results,  # of each, where the first sum goes
    parts,
    sizes,
    runs,  # of each: sums that follow each other in the result ..
    steps,  # .. and how far it is from one run to the next
    TILES: tl.constexpr,
):
    program = tl.program_id(0)
    for n in tl.static_range(len(TILES)):
        place = program * TILES[n][1] + tl.arange(0, TILES[n][1])
        inside = (place >= 0) & (place < sizes[n])
        if tl.max(inside.to(tl.int32), 0) > 0:
            total = tl.zeros([TILES[n][0], TILES[n][1]], tl.float32)
            for first in range(0, parts[n], TILES[n][0]):
                part = first + tl.arange(0, TILES[n][0])[:, None]
                known = (part < parts[n]) & inside[None, :]
                total += tl.load(partials[n] + (part.to(tl.int64) * sizes[n] + place[None, :]), mask=known, other=0.0)
            found = place.to(tl.int64)
            tl.store(results[n] + (found // runs[n] * steps[n] + found % runs[n]), tl.sum(total, 0), mask=inside)
        program -= tl.cdiv(sizes[n], TILES[n][1])


class Sums(NamedTuple):
    """What one kernel left.

    Attributes:
        partials: where they are, float32 [parts, ...].
        result: where the first sum goes.
        parts: of how many programs.
        size: sums.
        run: how many of them follow each other in the result.
        step: from one run to the next.
    """

    partials: At
    result: At
    parts: int
    size: int
    run: int
    step: int


def kernel(sums: Sequence[Sums], device: torch.device) -> Kernel:
    """What makes all of them."""
    tiles = tuple([_tile(one.parts, one.size) for one in sums])
    programs = sum(-(-one.size // tile[1]) for one, tile in zip(sums, tiles, strict=True))
    places = {"partials": tuple(one.partials for one in sums), "results": tuple(one.result for one in sums)}
    _, _, *numbers = zip(*sums, strict=True)
    named: dict[str, Any] = dict(zip(("parts", "sizes", "runs", "steps"), numbers, strict=True))
    code = Code(lambda: add_up, (programs, 1, 1), {"TILES": tiles, "num_warps": 4})
    return Kernel(code, device, places, named)


def added_up(partials: Sequence[Tensor]) -> list[Tensor]:
    """Each summed over its first dimension, float32 [...]; they are float32 [parts, ...] and contiguous."""
    results = [x.new_empty(x.shape[1:]) for x in partials]
    _plan(tuple([layout(x) for x in partials]))((*partials, *results))
    return results


@functools.lru_cache(MOST_PLANS)
def _plan(partials: tuple[Layout, ...]) -> Kernel:
    sizes = [x.shape[1:].numel() for x in partials]
    return kernel(
        [
            Sums(n, len(sizes) + n, x.shape[0], size, size, 0)
            for n, (x, size) in enumerate(zip(partials, sizes, strict=True))
        ],
        partials[0].device,
    )


def _tile(parts: int, size: int) -> tuple[int, int]:
    """Parts and sums of a tile: as many sums as there are, and of each as many parts as go with them."""
    sums = min(_power(size), MOST_SUMS)
    along = min(_power(parts), TILE // sums)
    return along, min(_power(size), TILE // along)


def _power(n: int) -> int:
    """The next power of two."""
    return 1 << max(0, n - 1).bit_length()
