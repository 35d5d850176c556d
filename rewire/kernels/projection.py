"""Projections of states to a few numbers for each token, as Triton kernels: ``x @ W``, or ``rms_norm(x) @ W``.

A state is read once, in its own dtype; sums are float32. With ``r = (mean(x^2) + eps)^(-1/2)``, one number for each
row, ``rms_norm(x) @ W`` is ``r (x @ W)``: nothing of the size of a state is made, or kept for backward.
"""
# ruff: noqa: N803  (constants of a kernel are written in capitals)
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rewire.kernels import grid
from rewire.kernels.arguments import as_rows

#: Of matrix products in the kernels: as exact as float32, by three products of tensor cores where there are such.
PRECISION = "tf32x3" if torch.version.hip is None else "ieee"
#: Rows and columns of a tile, and warps, by the columns of the weight: what registers hold.
FORWARD = {16: (64, 32, 4), 32: (64, 32, 4), 64: (64, 32, 8), 128: (64, 32, 8)}
BACKWARD = {16: (32, 64, 4), 32: (32, 64, 4), 64: (16, 32, 8), 128: (16, 32, 8)}


@triton.jit(do_not_specialize=["rows", "K"])
def project_forward(
    x,  # [rows, cols]
    x_stride: tl.constexpr,
    weight,  # float32 [cols, K]
    weight_strides: tl.constexpr,
    scores,  # float32 [K, rows]
    inverse,  # float32 [rows], if NORMED
    rows,
    K,
    eps,
    COLS: tl.constexpr,
    NORMED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]  # [BLOCK_ROWS, 1]
    k = tl.arange(0, BLOCK_K)[None, :]
    total = tl.zeros([BLOCK_ROWS, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    for first in range(0, COLS, BLOCK_COLS):
        col = first + tl.arange(0, BLOCK_COLS)
        inside = (row < rows) & (col[None, :] < COLS)
        values = tl.load(x + (row * x_stride + col[None, :]), mask=inside, other=0.0).to(tl.float32)
        place = col[:, None] * weight_strides[0] + k * weight_strides[1]
        w = tl.load(weight + place, mask=(col[:, None] < COLS) & (k < K), other=0.0)
        total = tl.dot(values, w, total, input_precision=PRECISION)
        if NORMED:
            squares += values * values
    if NORMED:
        r = tl.rsqrt(tl.sum(squares, 1, keep_dims=True) / COLS + eps)  # [BLOCK_ROWS, 1]
        tl.store(inverse + row, r, mask=row < rows)
        total *= r
    tl.store(scores + (k.to(tl.int64) * rows + row), total, mask=(row < rows) & (k < K))


@triton.jit(do_not_specialize=["rows", "K", "grad_row_stride", "grad_stride"])
def project_backward(
    grad,  # float32 [rows, K]
    grad_row_stride,
    grad_stride,
    scores,  # float32 [K, rows], if NORMED
    inverse,  # float32 [rows], if NORMED
    x,  # [rows, cols]
    x_stride: tl.constexpr,
    weight,  # float32 [cols, K]
    weight_strides: tl.constexpr,
    carried,  # [rows, cols], if CARRIED
    carried_stride: tl.constexpr,
    grad_x,  # [rows, cols], contiguous
    weight_partials,  # float32 [row programs, K, cols]
    rows,
    K,
    COLS: tl.constexpr,
    NORMED: tl.constexpr,
    CARRIED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """``dx = r g W^T - r^2 (sum_k g_k s_k) / D x`` for scores ``s = r x W``, and ``dW = x^T (r g)``.

    Not NORMED, r is 1 and the second term is not there.
    """
    col = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]  # [1, BLOCK_COLS]
    k = tl.arange(0, BLOCK_K)
    place = col * weight_strides[0] + k[:, None] * weight_strides[1]
    w = tl.load(weight + place, mask=(col < COLS) & (k[:, None] < K), other=0.0)  # [BLOCK_K, BLOCK_COLS]
    total = tl.zeros([BLOCK_K, BLOCK_COLS], tl.float32)
    for first in range(tl.program_id(0) * BLOCK_ROWS, rows, tl.num_programs(0) * BLOCK_ROWS):
        row = first + tl.arange(0, BLOCK_ROWS).to(tl.int64)[:, None]  # [BLOCK_ROWS, 1]
        inside = (row < rows) & (col < COLS)
        known = (row < rows) & (k[None, :] < K)
        g = tl.load(grad + (row * grad_row_stride + k[None, :] * grad_stride), mask=known, other=0.0)
        values = tl.load(x + (row * x_stride + col), mask=inside, other=0.0).to(tl.float32)
        if CARRIED:
            dx = tl.load(carried + (row * carried_stride + col), mask=inside, other=0.0).to(tl.float32)
        else:
            dx = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
        if NORMED:
            s = tl.load(scores + (k[None, :].to(tl.int64) * rows + row), mask=known, other=0.0)
            r = tl.load(inverse + row, mask=row < rows, other=0.0)
            dx -= values * (r * r * tl.sum(g * s, 1, keep_dims=True) * (1.0 / COLS))
            g *= r
        dx = tl.dot(g, w, dx, input_precision=PRECISION)
        tl.store(grad_x + (row * COLS + col), dx, mask=inside)
        total = tl.dot(tl.trans(g), values, total, input_precision=PRECISION)
    place = (tl.program_id(0).to(tl.int64) * K + k[:, None]) * COLS + col
    tl.store(weight_partials + place, total, mask=(col < COLS) & (k[:, None] < K))


def forward(x: Tensor, weight: Tensor, eps: float | None) -> tuple[Tensor, Tensor]:
    """``x @ weight``, [..., K], each of the K contiguous; and, with eps, ``r`` [rows], float32.

    Args:
        x: [..., D], float32, bfloat16 or float16.
        weight: float32 [D, K], K up to 128.
        eps: of the norm; None: x is not normed.
    """
    flat, most = as_rows(x), weight.shape[1]
    rows, cols = flat.shape
    scores = torch.empty(most, rows, dtype=torch.float32, device=x.device)
    inverse = torch.empty(rows * (eps is not None), dtype=torch.float32, device=x.device)
    arguments = {"x": flat, "weight": weight, "scores": scores, "inverse": inverse}
    numbers = {
        "x_stride": flat.stride(0),
        "weight_strides": weight.stride(),
        "rows": rows,
        "K": most,
        "eps": eps or 0.0,
    }
    constants = {"NORMED": eps is not None} | _constants(FORWARD, cols, most)
    programs = (-(-rows // constants["BLOCK_ROWS"]), 1)
    grid.run(project_forward, programs, x.device, grid.Launch(None, False, None, arguments | numbers), constants)
    return scores.t().view(*x.shape[:-1], most), inverse


def backward(
    grad: Tensor, x: Tensor, weight: Tensor, scores: Tensor, inverse: Tensor, carried: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients of x, in its dtype, and of the weight, [K, D], of `forward`.

    Args:
        grad: float32 [..., K].
        x, weight: as in forward.
        scores, inverse: as forward returned them.
        carried: [..., D], what is added to the gradient of x.
    """
    flat, most = as_rows(x), weight.shape[1]
    rows, cols = flat.shape
    given = grad.reshape(rows, most)
    normed, added = inverse.numel() > 0, flat if carried is None else as_rows(carried)
    constants = {"NORMED": normed, "CARRIED": carried is not None} | _constants(BACKWARD, cols, most)
    programs = -(-cols // constants["BLOCK_COLS"])
    row_programs = min(-(-rows // constants["BLOCK_ROWS"]), max(1, grid.PROGRAMS // programs))
    grad_x = torch.empty(rows, cols, dtype=x.dtype, device=x.device)
    partials = torch.empty(row_programs, most, cols, dtype=torch.float32, device=x.device)
    arguments = {"grad": given, "x": flat, "weight": weight, "grad_x": grad_x, "weight_partials": partials}
    arguments |= {"scores": scores.reshape(rows, most).t() if normed else inverse, "inverse": inverse, "carried": added}
    numbers: dict[str, Any] = {
        "grad_row_stride": given.stride(0),
        "grad_stride": given.stride(1),
        "x_stride": flat.stride(0),
    }
    numbers |= {"weight_strides": weight.stride(), "carried_stride": added.stride(0), "rows": rows, "K": most}
    launch = grid.Launch(None, True, None, arguments | numbers)
    grid.run(project_backward, (row_programs, programs), x.device, launch, constants)
    return grad_x.view(x.shape), partials.sum(0)


def _constants(tiles: dict[int, tuple[int, int, int]], cols: int, most: int) -> dict[str, Any]:
    columns = max(16, 1 << (most - 1).bit_length())  # the next power of two that a matrix product takes
    block_rows, block_cols, warps = tiles[columns]
    sizes = {"BLOCK_ROWS": block_rows, "BLOCK_COLS": block_cols, "BLOCK_K": columns}
    return {"COLS": cols, "PRECISION": PRECISION, "num_warps": warps, "enable_fp_fusion": True} | sizes
