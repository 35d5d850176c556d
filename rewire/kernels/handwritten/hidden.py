"""Weights per token of a hidden layer, ``gelu(h) @ W + b``, as Triton kernels: see `tokens.read_off_hidden`.

``h`` is a projection of the states, column by column. Only ``h`` is kept for backward.
"""
# ruff: noqa: N803  (constants of a kernel are written in capitals)
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rewire.kernels.arguments import Metadata, metadata
from rewire.kernels.handwritten import projection, totals
from rewire.kernels.handwritten.projection import PRECISION
from rewire.kernels.kernel import MOST_KEPT, PROGRAMS, Kernel, by_hand

#: Columns of the weight -> rows of a tile, columns of h in it, and warps, such that registers hold it.
FORWARD = {16: (64, 16, 4), 32: (64, 32, 4), 64: (32, 32, 4), 128: (32, 32, 8)}
BACKWARD = {16: (16, 16, 4), 32: (16, 16, 4), 64: (16, 16, 8), 128: (16, 16, 8)}


@triton.jit
def _normal(x):
    """The normal distribution function of ``x``: ``gelu(x)`` is x times that."""
    return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit(do_not_specialize=["rows", "K"])
def hidden_forward(
    hidden,  # float32 [K, rows]
    weight,  # float32 [K, K]
    static,  # float32 [K]
    scores,  # float32 [K, rows]
    rows,
    K,
    PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ALL_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]  # [BLOCK_ROWS, 1]
    m = tl.arange(0, ALL_K)[None, :]
    total = tl.zeros([BLOCK_ROWS, ALL_K], tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        known = (row < rows) & (k[None, :] < K)
        h = tl.load(hidden + (k[None, :].to(tl.int64) * rows + row), mask=known, other=0.0)
        w = tl.load(weight + (k[:, None] * K + m), mask=(k[:, None] < K) & (m < K), other=0.0)
        total = tl.dot(h * _normal(h), w, total, input_precision=PRECISION)
    total += tl.load(static + m, mask=m < K, other=0.0)
    tl.store(scores + (m.to(tl.int64) * rows + row), total, mask=(row < rows) & (m < K))


@triton.jit(do_not_specialize=["rows", "K", "grad_row_stride", "grad_stride"])
def hidden_backward(
    grad,  # float32 [rows, K]
    grad_row_stride,
    grad_stride,
    hidden,  # float32 [K, rows]
    weight,  # float32 [K, K]
    grad_hidden,  # float32 [K, rows]
    weight_partials,  # float32 [row programs, K, K]
    static_partials,  # float32 [row programs, K]
    rows,
    K,
    PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ALL_K: tl.constexpr,
):
    """``dh = (g W^T) gelu'(h)``, ``dW = gelu(h)^T g`` and ``db = sum g``; each program has some columns of h."""
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    m = tl.arange(0, ALL_K)
    w = tl.load(weight + (k[None, :] * K + m[:, None]), mask=(k[None, :] < K) & (m[:, None] < K), other=0.0)  # W^T
    of_weight = tl.zeros([BLOCK_K, ALL_K], tl.float32)
    of_static = tl.zeros([ALL_K], tl.float32)
    for first in range(tl.program_id(0) * BLOCK_ROWS, rows, tl.num_programs(0) * BLOCK_ROWS):
        row = first + tl.arange(0, BLOCK_ROWS).to(tl.int64)[:, None]  # [BLOCK_ROWS, 1]
        known = (row < rows) & (m[None, :] < K)
        g = tl.load(grad + (row * grad_row_stride + m[None, :] * grad_stride), mask=known, other=0.0)
        place, inside = k[None, :].to(tl.int64) * rows + row, (row < rows) & (k[None, :] < K)
        h = tl.load(hidden + place, mask=inside, other=0.0)
        share = _normal(h)
        slope = share + h * tl.exp(-0.5 * h * h) * 0.3989422804014327
        tl.store(grad_hidden + place, tl.dot(g, w, input_precision=PRECISION) * slope, mask=inside)
        of_weight = tl.dot(tl.trans(h * share), g, of_weight, input_precision=PRECISION)
        of_static += tl.sum(g, 0)
    program = tl.program_id(0).to(tl.int64)
    square = k[:, None] * K + m[None, :]
    tl.store(weight_partials + (program * K * K + square), of_weight, mask=(k[:, None] < K) & (m[None, :] < K))
    tl.store(static_partials + (program * K + m), of_static, mask=(m < K) & (tl.program_id(1) == 0))


def forward(hidden: Tensor, weight: Tensor, static: Tensor) -> Tensor:
    """`operators.hidden`; each column of the result is contiguous."""
    by_column = _by_column(hidden)
    scores = torch.empty_like(by_column)
    kernel, _ = _fitted(metadata(by_column), (), False)
    kernel((by_column, weight.contiguous(), static.contiguous(), scores))
    return scores.movedim(0, -1)


def backward(
    grad: Tensor,
    x: Tensor,
    read: Tensor,
    weight: Tensor,
    hidden: Tensor,
    inverse: Tensor,
    carried: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`operators.hidden_backward`, with ``hidden`` and ``inverse`` from `projection.forward`."""
    by_column, most = _by_column(hidden), hidden.shape[-1]
    given = grad.reshape(-1, most)
    kernel, programs = _fitted(metadata(by_column), given.stride(), True)
    of_hidden = torch.empty_like(by_column)
    of_weight, of_static = (by_column.new_empty(programs, *shape) for shape in ((most, most), (most,)))
    kernel((given, by_column, weight.contiguous(), of_hidden, of_weight, of_static))
    of_x, of_read = projection.backward_in_parts([of_hidden.movedim(0, -1)], x, read, hidden, inverse, carried)
    of_read, of_weight, of_static = totals.added_up((of_read, of_weight, of_static))
    return of_x, of_read, of_weight, of_static


def _by_column(hidden: Tensor) -> Tensor:
    """``hidden`` as [K, ...], contiguous; saved tensors may come back with other strides (`save_on_cpu`)."""
    return hidden.movedim(-1, 0).contiguous()


@functools.lru_cache(MOST_KEPT)
def _fitted(hidden: Metadata, grad: tuple[int, ...], backward: bool) -> tuple[Kernel, int]:
    """The kernel, which takes tensors in the order of its parameters, and its number of programs; ``grad``: strides."""
    most, rows = hidden.shape[0], math.prod(hidden.shape[1:])
    columns = max(16, 1 << (most - 1).bit_length())  # the next power of two that tl.dot supports
    block_rows, block_columns, warps = (BACKWARD if backward else FORWARD)[columns]
    constants: dict[str, Any] = {
        "BLOCK_ROWS": block_rows,
        "BLOCK_K": block_columns,
        "ALL_K": columns,
        "num_warps": warps,
    }
    constants |= {"PRECISION": PRECISION, "enable_fp_fusion": True}
    programs, numbers = -(-rows // block_rows), {"rows": rows, "K": most}
    if backward:
        programs = min(programs, PROGRAMS // 8)  # each leaves K x K partial sums
        numbers |= {"grad_row_stride": grad[0], "grad_stride": grad[1]}
    by_column = -(-most // block_columns) if backward else 1
    jit = hidden_backward if backward else hidden_forward
    return by_hand(jit, (programs, by_column), hidden.device, numbers, constants), programs
