"""The softmax of attending reads, and statistics for its gradients, as Triton kernels: `attended` has the formulas."""
# ruff: noqa: N803  (constants of a kernel are written in capitals)
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from rewire.kernels.arguments import Metadata, metadata, row_stride
from rewire.kernels.kernel import MOST_KEPT, Fitted, Kernel, by_hand

#: Rows of a program that holds a few numbers for each row; the most numbers that a program holds.
ROWS, HELD = 128, 8192
#: Rows and columns of a tile of states.
TILE = (16, 128)


@triton.jit
def _one_of(tensors, which, N: tl.constexpr):
    """Pointers to the chosen tensors, selected as integers, as AMD's GPUs cannot choose among pointers."""
    address = which.to(tl.int64) * 0
    for i in tl.static_range(N):
        address = tl.where(which == i, tensors[i].to(tl.int64), address)
    return address.to(tl.pointer_type(tl.float32))


@triton.jit(do_not_specialize=["n", "rows", "begun_stride", "count"])
def softmax_forward(
    scores,  # N x float32 [rows], the first n of which are read
    n,
    begun,  # float32 [2, rows]: largest earlier score, sum of earlier numerators
    begun_stride,
    shares,  # float32 [BEGUN + n, rows]
    statistics,  # float32 [2, rows]
    rows,
    count,
    N: tl.constexpr,
    BEGUN: tl.constexpr,
    DIVIDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    i = tl.arange(0, N)[:, None]
    inside = row < rows
    known = (i < n) & inside[None, :]
    s = tl.load(_one_of(scores, i, N) + row[None, :], mask=known, other=0.0)  # [N, BLOCK]
    s = tl.where(i < n, s, float("-inf"))
    largest = tl.max(s, 0)
    if BEGUN:
        before = tl.load(begun + row, mask=inside, other=0.0)
        largest = tl.maximum(largest, before)
    e = tl.exp(s - largest[None, :])
    divisor = tl.sum(e, 0)
    if BEGUN:
        factor = tl.exp(before - largest)
        divisor += factor * tl.load(begun + (begun_stride.to(tl.int64) + row), mask=inside, other=1.0)
    if DIVIDED:
        divisor = tl.div_rn(divisor, tl.zeros([BLOCK], tl.float32) + count)
        e = tl.div_rn(e, tl.broadcast_to(divisor[None, :], [N, BLOCK]))
    if BEGUN:
        tl.store(shares + row, tl.div_rn(factor, divisor) if DIVIDED else factor, mask=inside)
    tl.store(shares + ((BEGUN + i) * rows.to(tl.int64) + row[None, :]), e, mask=known)
    tl.store(statistics + row, largest, mask=inside)
    tl.store(statistics + (rows + row), divisor, mask=inside)


@triton.jit(do_not_specialize=["rows", "count"])
def tally_kernel(
    grad,  # [rows, cols]
    grad_stride: tl.constexpr,
    total,  # [rows, cols]
    total_stride: tl.constexpr,
    statistics,  # float32 [2, rows]
    result,  # float32 [3, rows]
    rows,
    count,
    COLS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]  # [BLOCK_ROWS, 1]
    products = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    for first in range(0, COLS, BLOCK_COLS):
        col = first + tl.arange(0, BLOCK_COLS)[None, :]
        inside = (row < rows) & (col < COLS)
        g = tl.load(grad + (row * grad_stride + col), mask=inside, other=0.0).to(tl.float32)
        value = tl.load(total + (row * total_stride + col), mask=inside, other=0.0).to(tl.float32)
        products += g * value
    for part in tl.static_range(2):
        known = tl.load(statistics + (part * rows + row), mask=row < rows)
        tl.store(result + (part * rows + row), known, mask=row < rows)
    tl.store(result + (2 * rows + row), tl.sum(products, 1, keep_dims=True) / count, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def shares_kernel(
    scores,  # M x float32 [reads, rows]
    tallies,  # N x float32 [3, rows], of which the first are the reads'
    shares,  # float32 [M + 1, reads, rows]: shares of each state, then the tallies' means e
    rows,
    M: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    read, reads = tl.program_id(1), tl.num_programs(1)
    tally = _one_of(tallies, read, N)
    largest = tl.load(tally + row, mask=inside, other=0.0)
    divisor = tl.load(tally + (rows.to(tl.int64) + row), mask=inside, other=1.0)
    for state in tl.static_range(M):
        s = tl.load(scores[state] + (read * rows.to(tl.int64) + row), mask=inside, other=0.0)
        place = shares + ((state * reads + read) * rows.to(tl.int64) + row)
        tl.store(place, tl.div_rn(tl.exp(s - largest), divisor), mask=inside)
    mean = tl.load(tally + (2 * rows.to(tl.int64) + row), mask=inside, other=0.0)
    tl.store(shares + ((M * reads + read) * rows.to(tl.int64) + row), mean, mask=inside)


def forward(scores: Sequence[Tensor], begun: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
    """`operators.softmax`: ``e_i / d`` with ``e_i = exp(s_i - m)`` and ``d = sum_j e_j / count``; and m and d."""
    given = [s.contiguous() for s in scores]
    like = given[0] if begun is None else begun[0]
    shares = like.new_empty((len(given) + (begun is not None), *like.shape))
    statistics = like.new_empty((2, *like.shape))
    fitted = _fitted_forward(metadata(shares), None if begun is None else begun.stride(0), count)
    fitted((*_filled_up(given, statistics), statistics if begun is None else begun, shares, statistics))
    return shares, statistics


def _filled_up(tensors: Sequence[Tensor], other: Tensor) -> list[Tensor]:
    """The tensors, padded by ``other`` to a power of two, so that few kernels are needed; padding is not read."""
    missing = _power(len(tensors)) - len(tensors)
    return [*tensors, *[other.view(-1)[:1]] * missing] if missing else [*tensors]


def _power(n: int) -> int:
    """The next power of two, at least 4."""
    return 1 << max(2, (n - 1).bit_length())


@functools.lru_cache(MOST_KEPT)
def _fitted_forward(shares: Metadata, begun: int | None, count: int) -> Kernel:
    """The kernel of `forward` for tensors like these; ``begun`` is the stride of its rows."""
    n, rows = shares.shape[0] - (begun is not None), math.prod(shares.shape[1:])
    most = _power(n)
    block = max(16, min(ROWS, HELD // most))
    constants = {"N": most, "BEGUN": begun is not None, "DIVIDED": count > 0, "BLOCK": block, "num_warps": 4}
    numbers = {"n": n, "rows": rows, "begun_stride": begun or 0, "count": max(1, count)}
    return by_hand(softmax_forward, (-(-rows // block),), shares.device, numbers, constants, scores=most)


def tally(grad: Tensor, total: Tensor, statistics: Tensor, count: int) -> Tensor:
    """`operators.tally`."""
    result = statistics.new_empty((3, *statistics.shape[1:]))
    fitted = _fitted_tally(metadata(grad), metadata(total), count)
    fitted.kernel((*fitted.even(grad, total), statistics.contiguous(), result))
    return result


@functools.lru_cache(MOST_KEPT)
def _fitted_tally(grad: Metadata, total: Metadata, count: int) -> Fitted:
    rows, cols = math.prod(grad.shape[:-1]), grad.shape[-1]
    strides = [row_stride(x.shape, x.strides) for x in (grad, total)]
    along = [cols if stride is None else stride for stride in strides]
    numbers = {"grad_stride": along[0], "total_stride": along[1], "rows": rows, "count": count}
    constants = {"COLS": cols, "BLOCK_ROWS": TILE[0], "BLOCK_COLS": TILE[1], "num_warps": 4}
    copied = tuple([stride is None for stride in strides])
    return Fitted(by_hand(tally_kernel, (-(-rows // TILE[0]),), grad.device, numbers, constants), copied)


def shares(scores: Sequence[Tensor], tallies: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """``a_mi = exp(s_mi - m_i) / d_i`` of M states in N reads, float32 [M, N, ...]; and the reads' e_i, [N, ...].

    Args:
        scores: M of float32 [..., N].
        tallies: N of float32 [3, ...]: m, d and e.
    """
    given = [s.movedim(-1, 0).contiguous() for s in scores]
    result = given[0].new_empty((len(given) + 1, *given[0].shape))
    of_reads = _filled_up([t.contiguous() for t in tallies], result)
    _fitted_shares(metadata(result))((*given, *of_reads, result))
    return result[:-1], result[-1]


@functools.lru_cache(MOST_KEPT)
def _fitted_shares(shares: Metadata) -> Kernel:
    states, reads, rows = shares.shape[0] - 1, shares.shape[1], math.prod(shares.shape[2:])
    most = _power(reads)
    constants = {"M": states, "N": most, "BLOCK": ROWS, "num_warps": 4}
    several = {"scores": states, "tallies": most}
    return by_hand(shares_kernel, (-(-rows // ROWS), reads), shares.device, {"rows": rows}, constants, **several)
