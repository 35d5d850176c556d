"""The second step of sums over programs: one Triton kernel adds up all that the programs of others left.

Partial sums lie one behind the other, [parts, ...]. They are added in an order that depends on sizes only.
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

#: Elements of a tile, and sums of it at the most.
TILE, MOST_SUMS = 2048, 128


@triton.jit
def _one_tile(partials, result, parts, size, run, step, first, TOGETHER: tl.constexpr, SUMS: tl.constexpr):
    """Of partials [parts, size] the sums from ``first`` on."""
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
    partials,  # of each, float32 [parts, size]
    results,  # of each, where the first sum goes
    parts,
    sizes,
    runs,  # of each: sums that follow each other in the result ..
    steps,  # .. and how far it is from one run to the next
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
    together, at_once = zip(*tiles, strict=True)
    code = Code(lambda: add_up, (programs, 1, 1), {"TOGETHER": together, "SUMS": at_once, "num_warps": 4})
    return Kernel(code, device, places, named)


def added_up(partials: Sequence[Tensor]) -> list[Tensor]:
    """Each summed over its first dimension, float32 [...]; they are float32 [parts, ...] and contiguous."""
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
    """Parts and sums of a tile: as many sums as there are, and of each as many parts as go with them."""
    sums = min(_power(size), MOST_SUMS)
    along = min(_power(parts), TILE // sums)
    return along, min(_power(size), TILE // along)


def _power(n: int) -> int:
    """The next power of two."""
    return 1 << max(0, n - 1).bit_length()
