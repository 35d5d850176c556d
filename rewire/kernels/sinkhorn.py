"""Sinkhorn-Knopp of small matrices as Triton kernels: all iterations of a matrix in registers, one kernel each way.

The formulas are those of `rewire.topologies.manifolds.sinkhorn`. Backward runs the iterations again, keeps the log
of each sum, n numbers for half an iteration, and undoes them one by one.
"""
# ruff: noqa: N803  (constants of a kernel are written in capitals)
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from rewire.kernels.arguments import Layout, layout
from rewire.kernels.grid import Code, Kernel
from rewire.kernels.launch import MOST_PLANS

#: Sizes up to which a few matrices fit into the registers of a program.
MOST, MOST_ITERATIONS = 8, 64


@triton.jit
def _log_sum(x, floor, dim: tl.constexpr, FLOORED: tl.constexpr):
    """Logarithm of the sum of ``exp(x)`` along a dimension, plus eps = ``exp(floor)``."""
    largest = tl.max(x, dim, keep_dims=True)
    total = tl.log(tl.sum(tl.exp(x - largest), dim, keep_dims=True)) + largest
    return _log_add(total, floor) if FLOORED else total


@triton.jit
def _log_add(x, floor):
    largest = tl.maximum(x, floor)
    return largest + tl.log(tl.exp(x - largest) + tl.exp(floor - largest))


@triton.jit
def _load(logits, matrix, strides, count, N: tl.constexpr, SIZE: tl.constexpr):
    """[BLOCK, SIZE, SIZE]."""
    row = tl.arange(0, SIZE)[None, :, None]
    col = tl.arange(0, SIZE)[None, None, :]
    place = matrix * strides[0] + row * strides[1] + col * strides[2]
    real = (row < N) & (col < N)
    return _real(tl.load(logits + place, mask=(matrix < count) & real, other=0.0), N, SIZE)


@triton.jit
def _real(x, N: tl.constexpr, SIZE: tl.constexpr):
    """Rows and columns beyond N are logarithms of nothing; not of zero, as no infinity may be taken from another."""
    row, col = tl.arange(0, SIZE)[None, :, None], tl.arange(0, SIZE)[None, None, :]
    return tl.where((row < N) & (col < N), x, -1e30) if N < SIZE else x


@triton.jit(do_not_specialize=["count"])
def sinkhorn_forward(
    logits,  # float32, matrices of any strides
    strides,
    result,  # float32 [count, N, N]
    count,
    floor,
    N: tl.constexpr,
    ITERATIONS: tl.constexpr,
    FLOORED: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    matrix = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None, None]
    x = _load(logits, matrix, strides, count, N, SIZE)
    x -= _log_sum(x, floor, 1, False)
    if FLOORED:
        x = _log_add(x, floor)
    x = _real(x, N, SIZE)
    x = _real(x - _log_sum(x, floor, 2, FLOORED), N, SIZE)
    for _ in range(ITERATIONS - 1):
        x = _real(x - _log_sum(x, floor, 1, FLOORED), N, SIZE)
        x = _real(x - _log_sum(x, floor, 2, FLOORED), N, SIZE)
    row, col = tl.arange(0, SIZE)[None, :, None], tl.arange(0, SIZE)[None, None, :]
    tl.store(result + (matrix * N + row) * N + col, tl.exp(x), mask=(matrix < count) & (row < N) & (col < N))


@triton.jit(do_not_specialize=["count"])
def sinkhorn_backward(
    logits,  # float32, matrices of any strides
    strides,
    grad,  # float32 [count, N, N]
    grad_logits,  # float32 [count, N, N]
    count,
    floor,
    N: tl.constexpr,
    ITERATIONS: tl.constexpr,
    FLOORED: tl.constexpr,
    SIZE: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    matrix = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None, None]
    row, col = tl.arange(0, SIZE)[None, :, None], tl.arange(0, SIZE)[None, None, :]
    inside = (matrix < count) & (row < N) & (col < N)
    x = _load(logits, matrix, strides, count, N, SIZE)
    columns = _real(x - _log_sum(x, floor, 1, False), N, SIZE)
    x = columns
    if FLOORED:
        x = _real(_log_add(columns, floor), N, SIZE)
    padded = x
    # What each half of an iteration took away: of iteration t, entry t.
    step = tl.arange(0, STEPS)[None, :, None]
    of_rows = tl.zeros([BLOCK, STEPS, SIZE], tl.float32)
    of_columns = tl.zeros([BLOCK, STEPS, SIZE], tl.float32)
    for t in range(ITERATIONS):
        if t > 0:
            total = _log_sum(x, floor, 1, FLOORED)  # [BLOCK, 1, SIZE]
            of_columns = tl.where(step == t, total, of_columns)
            x = _real(x - total, N, SIZE)
        total = _log_sum(x, floor, 2, FLOORED)  # [BLOCK, SIZE, 1]
        of_rows = tl.where(step == t, tl.permute(total, (0, 2, 1)), of_rows)
        x = _real(x - total, N, SIZE)
    place = (matrix * N + row) * N + col
    g = tl.load(grad + place, mask=inside, other=0.0) * tl.exp(x)
    for back in range(ITERATIONS):
        t = ITERATIONS - 1 - back
        g -= tl.exp(x) * tl.sum(g, 2, keep_dims=True)
        x += tl.permute(tl.sum(tl.where(step == t, of_rows, 0.0), 1, keep_dims=True), (0, 2, 1))
        if t > 0:
            g -= tl.exp(x) * tl.sum(g, 1, keep_dims=True)
            x += tl.sum(tl.where(step == t, of_columns, 0.0), 1, keep_dims=True)
    if FLOORED:
        g *= tl.exp(columns - padded)
    g -= tl.exp(columns) * tl.sum(g, 1, keep_dims=True)
    tl.store(grad_logits + place, g, mask=inside)


def fits(logits: Tensor, iterations: int) -> bool:
    """Whether the kernels take such matrices."""
    return logits.dtype == torch.float32 and logits.shape[-1] <= MOST and iterations <= MOST_ITERATIONS


def forward(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """`manifolds.sinkhorn` of float32 [..., n, n]."""
    flat = logits.reshape(-1, *logits.shape[-2:])
    result = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    _plan(layout(flat), iterations, eps, False)((flat, result))
    return result


def backward(grad: Tensor, logits: Tensor, iterations: int, eps: float) -> Tensor:
    """The gradient of the logits from that of the result."""
    flat = logits.reshape(-1, *logits.shape[-2:])
    result = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    _plan(layout(flat), iterations, eps, True)((flat, result, grad.contiguous()))
    return result


@functools.lru_cache(MOST_PLANS)
def _plan(flat: Layout, iterations: int, eps: float, backward: bool) -> Kernel:
    """The kernel for logits [count, n, n], of a list of these, the result, and in backward its gradient."""
    count, n, _ = flat.shape
    size, steps = 1 << (n - 1).bit_length(), 1 << (iterations - 1).bit_length()
    block = max(1, min(64, 4096 // (2 * size * (steps if backward else size))))
    numbers = {
        "strides": flat.strides,
        "count": count,
        "floor": math.log(eps) if eps > 0 else 0.0,
        "N": n,
        "ITERATIONS": iterations,
    }
    constants = {"FLOORED": eps > 0, "SIZE": size, "BLOCK": block, "num_warps": 4}
    programs = (-(-count // block), 1, 1)
    if backward:
        code = Code(lambda: sinkhorn_backward, programs, constants | {"STEPS": steps}, backward=True)
        return Kernel(code, flat.device, {"logits": 0, "grad_logits": 1, "grad": 2}, numbers)
    return Kernel(Code(lambda: sinkhorn_forward, programs, constants), flat.device, {"logits": 0, "result": 1}, numbers)
