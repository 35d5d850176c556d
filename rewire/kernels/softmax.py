"""The softmax of reads that attend, and what its gradients need, as Triton kernels: see `attended` for the formulas."""
# ruff: noqa: N803  (constants of a kernel are written in capitals)
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from rewire.kernels.arguments import Layout, layout, row_stride
from rewire.kernels.grid import Code, Kernel
from rewire.kernels.launch import MOST_PLANS

#: Rows of a program that holds a few numbers for each, and elements of these.
ROWS, ELEMENTS = 128, 2048
#: Rows of a program that holds one number for each.
ROWS_OF_STATE = 256
#: Rows and columns of a tile of states.
TILE = (16, 128)


@triton.jit(do_not_specialize=["rows", "N", "count"])
def softmax_forward(
    scores,  # float32 [N, rows]
    shares,  # float32 [N, rows]
    statistics,  # float32 [2, rows]
    rows,
    N,
    count,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    state = tl.arange(0, SIZE)[:, None]
    inside = (state < N) & (row < rows)
    s = tl.load(scores + state.to(tl.int64) * rows + row, mask=inside, other=0.0)
    s = tl.where(state < N, s, float("-inf"))
    largest = tl.max(s, 0, keep_dims=True)  # [1, BLOCK]
    e = tl.exp(s - largest)
    divisor = tl.div_rn(tl.sum(e, 0, keep_dims=True), tl.zeros([1, BLOCK], tl.float32) + count)
    tl.store(shares + state.to(tl.int64) * rows + row, tl.div_rn(e, divisor + tl.zeros_like(e)), mask=inside)
    tl.store(statistics + row, largest, mask=row < rows)
    tl.store(statistics + rows + row, divisor, mask=row < rows)


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
    scores,  # float32 [N, rows]
    tallies,  # float32 [N, 3, rows]
    shares,  # float32 [N, rows]
    rows,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    read = tl.program_id(1).to(tl.int64)
    inside = row < rows
    s = tl.load(scores + (read * rows + row), mask=inside, other=0.0)
    largest = tl.load(tallies + (3 * read * rows + row), mask=inside, other=0.0)
    divisor = tl.load(tallies + ((3 * read + 1) * rows + row), mask=inside, other=1.0)
    tl.store(shares + (read * rows + row), tl.div_rn(tl.exp(s - largest), divisor), mask=inside)


@triton.jit(do_not_specialize=["rows", "N"])
def score_gradients_kernel(
    dots,  # float32 [rows, N]
    shares,  # float32 [N, rows]
    tallies,  # float32 [N, 3, rows]
    result,  # float32 [rows, N]
    rows,
    N,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    read = tl.program_id(1).to(tl.int64)
    inside = row < rows
    share = tl.load(shares + (read * rows + row), mask=inside, other=0.0)
    mean = tl.load(tallies + ((3 * read + 2) * rows + row), mask=inside, other=0.0)
    dot = tl.load(dots + (row * N + read), mask=inside, other=0.0)
    tl.store(result + (row * N + read), share * (dot - mean), mask=inside)


def forward(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Weights ``e_i / (sum_j e_j / count)`` with ``e_i = exp(s_i - m)``; and m and what e is divided by.

    Args:
        scores: float32 [n, ...], contiguous.
        count: what the weights add up to.

    Returns:
        float32 [n, ...] and [2, ...].
    """
    shares, statistics = torch.empty_like(scores), scores.new_empty((2, *scores.shape[1:]))
    _plan_forward(layout(scores), count)((scores, shares, statistics))
    return shares, statistics


@functools.lru_cache(MOST_PLANS)
def _plan_forward(scores: Layout, count: int) -> Kernel:
    n, rows = scores.shape[0], math.prod(scores.shape[1:])
    size = 1 << (n - 1).bit_length()
    block = max(1, min(ROWS, ELEMENTS // size))
    code = Code(lambda: softmax_forward, (-(-rows // block), 1, 1), {"SIZE": size, "BLOCK": block, "num_warps": 4})
    places = {"scores": 0, "shares": 1, "statistics": 2}
    return Kernel(code, scores.device, places, {"rows": rows, "N": n, "count": count})


def tally(grad: Tensor, total: Tensor, statistics: Tensor, count: int) -> Tensor:
    """``statistics`` and ``<total, grad> / count``, float32 [3, ...].

    Args:
        grad, total: [..., D], float32, bfloat16 or float16.
        statistics: float32 [2, ...].
        count: what the products are divided by.
    """
    result = statistics.new_empty((3, *statistics.shape[1:]))
    kernel, of_grad, of_total = _plan_tally(layout(grad), layout(total), count)
    tensors = (grad.contiguous() if of_grad else grad, total.contiguous() if of_total else total)
    kernel((*tensors, statistics.contiguous(), result))
    return result


@functools.lru_cache(MOST_PLANS)
def _plan_tally(grad: Layout, total: Layout, count: int) -> tuple[Kernel, bool, bool]:
    """The kernel, and whether gradients and values have to be copied, their rows not being even."""
    rows, cols = math.prod(grad.shape[:-1]), grad.shape[-1]
    strides = [row_stride(x.shape, x.strides) for x in (grad, total)]
    along = [cols if stride is None else stride for stride in strides]
    numbers = {"grad_stride": along[0], "total_stride": along[1], "rows": rows, "count": count}
    constants = {"COLS": cols, "BLOCK_ROWS": TILE[0], "BLOCK_COLS": TILE[1], "num_warps": 4}
    code = Code(lambda: tally_kernel, (-(-rows // TILE[0]), 1, 1), constants, backward=True)
    places = {"grad": 0, "total": 1, "statistics": 2, "result": 3}
    return Kernel(code, grad.device, places, numbers), strides[0] is None, strides[1] is None


def shares(scores: Tensor, tallies: Tensor) -> Tensor:
    """A state's weights in m reads, [m, ...].

    Args:
        scores: float32 [m, ...], contiguous.
        tallies: float32 [m, 3, ...], contiguous.
    """
    result = torch.empty_like(scores)
    _plan_of_state(layout(scores), False)((scores, tallies, result))
    return result


def score_gradients(dots: Tensor, weights: Tensor, tallies: Tensor) -> Tensor:
    """``a_i (<x, g_i> - e_i)``, float32 [..., m].

    Args:
        dots: ``<x, g_i>``, float32 [..., m], contiguous.
        weights: a, float32 [m, ...], contiguous.
        tallies: float32 [m, 3, ...], contiguous.
    """
    result = torch.empty_like(dots)
    _plan_of_state(layout(weights), True)((dots, weights, tallies, result))
    return result


@functools.lru_cache(MOST_PLANS)
def _plan_of_state(scores: Layout, gradients: bool) -> Kernel:
    reads, rows = scores.shape[0], math.prod(scores.shape[1:])
    jit, places, numbers = shares_kernel, {"scores": 0, "tallies": 1, "shares": 2}, {"rows": rows}
    if gradients:
        jit, places = score_gradients_kernel, {"dots": 0, "shares": 1, "tallies": 2, "result": 3}
        numbers["N"] = reads
    programs = (-(-rows // ROWS_OF_STATE), reads, 1)
    code = Code(lambda: jit, programs, {"BLOCK": ROWS_OF_STATE, "num_warps": 4}, backward=True)
    return Kernel(code, scores.device, places, numbers)
