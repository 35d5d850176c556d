"""The second step of sums over programs: one Triton kernel adds up the partial sums that other kernels left.

Partial sums are contiguous, [parts, ...]. They are added in an order that depends only on sizes.
"""
# ruff: noqa: N803  (constants of a kernel are written in capitals)
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rewire.kernels.arguments import Metadata, metadata
from rewire.kernels.kernel import MOST_KEPT, At, Code, Kernel

#: Elements of a tile, and the most sums in it.
TILE, MOST_SUMS = 2048, 128


@triton.jit
def _one_tile(partials, result, parts, size, run, step, first, TOGETHER: tl.constexpr, SUMS: tl.constexpr):
    """One tile of the sums of partials [parts, size], from ``first`` on."""
    place = first + tl.arange(0, SUMS)
    inside = (place >= 0) & (place < size)
    total = tl.zeros([TOGETHER, SUMS], tl.float32)
    for start in range(0, parts, TOGETHER):
        part = start + tl.arange(0, TOGETHER)[:, None]
        known = (part < parts) & inside[None, :]
        total += tl.load(partials + (part.to(tl.int64) * size + place[None, :]), mask=known, other=0.0)
    tl.store(result + (place // run * step + place % run), tl.sum(total, 0), mask=inside)


@triton.jit
def add_up(
    partials,  # for each of several sums, float32 [parts, size]
    results,  # for each, a pointer to the first total
    parts,
    sizes,
    runs,  # for each, number of contiguous totals ..
    steps,  # .. and the distance from one run to the next
    TOGETHER: tl.constexpr,  # parts in a tile
    SUMS: tl.constexpr,  # sums in a tile
):
    program = tl.program_id(0).to(tl.int64)
    for n in tl.static_range(len(SUMS)):
        first, programs = program * SUMS[n], tl.cdiv(sizes[n], SUMS[n])
        if (program >= 0) & (program < programs):
            of_each = (partials[n], results[n], parts[n], sizes[n], runs[n], steps[n])
            _one_tile(*of_each, first, TOGETHER[n], SUMS[n])
        program -= programs


class Sums(NamedTuple):
    """The partial sums of one kernel, and where their totals go.

    Attributes:
        partials: place of the partial sums, float32 [parts, ...].
        result: place of the first total.
        parts: number of programs.
        size: number of totals.
        run: number of contiguous totals in the result.
        step: distance from one run to the next.
    """

    partials: At
    result: At
    parts: int
    size: int
    run: int
    step: int


def kernel(sums: Sequence[Sums], device: torch.device) -> Kernel:
    """The kernel that makes all of these sums."""
    tiles = tuple([_tile(one.parts, one.size) for one in sums])
    programs = sum(-(-one.size // tile[1]) for one, tile in zip(sums, tiles, strict=True))
    places = {"partials": tuple(one.partials for one in sums), "results": tuple(one.result for one in sums)}
    _, _, *numbers = zip(*sums, strict=True)
    named: dict[str, Any] = dict(zip(("parts", "sizes", "runs", "steps"), numbers, strict=True))
    together, at_once = zip(*tiles, strict=True)
    code = Code(lambda: add_up, (programs, 1, 1), {"TOGETHER": together, "SUMS": at_once, "num_warps": 4})
    return Kernel(code, device, places, named)


def added_up(partials: Sequence[Tensor]) -> list[Tensor]:
    """The sum of each over its first dimension, float32 [...]; inputs are float32 [parts, ...] and contiguous."""
    results = [x.new_empty(x.shape[1:]) for x in partials]
    _fitted(tuple([metadata(x) for x in partials]))((*partials, *results))
    return results


@functools.lru_cache(MOST_KEPT)
def _fitted(partials: tuple[Metadata, ...]) -> Kernel:
    sizes = [math.prod(x.shape[1:]) for x in partials]
    return kernel(
        [
            Sums(n, len(sizes) + n, x.shape[0], size, size, 0)
            for n, (x, size) in enumerate(zip(partials, sizes, strict=True))
        ],
        partials[0].device,
    )


def _tile(parts: int, size: int) -> tuple[int, int]:
    """Numbers of parts and of sums in a tile: as many sums as there are, then as many parts as fit."""
    sums = min(_power(size), MOST_SUMS)
    along = min(_power(parts), TILE // sums)
    return along, min(_power(size), TILE // along)


def _power(n: int) -> int:
    """The next power of two."""
    return 1 << max(0, n - 1).bit_length()
