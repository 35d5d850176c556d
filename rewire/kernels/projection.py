"""Projections of states to a few numbers for each token, as Triton kernels: ``x @ W``, or ``rms_norm(x) @ W``.

A state is read once, in its own dtype; sums are float32. With ``r = (mean(x^2) + eps)^(-1/2)``, one number for each
row, ``rms_norm(x) @ W`` is ``r (x @ W)``: nothing of the size of a state is made, or kept for backward.
"""
# ruff: noqa: N803  (constants of a kernel are written in capitals)
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rewire.kernels.arguments import Layout, layout, row_stride
from rewire.kernels.grid import PROGRAMS, Code, Kernel
from rewire.kernels.launch import MOST_PLANS

#: Of matrix products in the kernels: as exact as float32, by three products of tensor cores where there are such.
PRECISION = "tf32x3" if torch.version.hip is None else "ieee"
#: Columns of the weight that one kernel takes.
MOST = 128
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


class _Plan(NamedTuple):
    """What is done for tensors of given layouts.

    Attributes:
        copied: whether the rows of x are, and those of what is carried.
        programs: how many leave partial sums.
        kernel: of a list of tensors, in the order of its parameters.
    """

    copied: tuple[bool, bool]
    programs: int
    kernel: Kernel


def forward(x: Tensor, weight: Tensor, eps: float | None) -> tuple[Tensor, Tensor]:
    """``x @ weight``, [..., K], each of the K contiguous; and, with eps, ``r`` [rows], float32.

    Args:
        x: [..., D], float32, bfloat16 or float16.
        weight: float32 [D, K].
        eps: of the norm; None: x is not normed.
    """
    if weight.shape[1] > MOST:
        found = [forward(x, columns, eps) for columns in weight.split(MOST, dim=1)]
        return torch.cat([scores.movedim(-1, 0) for scores, _ in found]).movedim(0, -1), found[0][1]
    plan = _plan_forward(layout(x), layout(weight), eps)
    lead, most = x.shape[:-1], weight.shape[1]
    scores = torch.empty(most, *lead, dtype=torch.float32, device=x.device)
    inverse = torch.empty(lead.numel() * (eps is not None), dtype=torch.float32, device=x.device)
    plan.kernel((x.contiguous() if plan.copied[0] else x, weight, scores, inverse))
    return scores.movedim(0, -1), inverse


@functools.lru_cache(MOST_PLANS)
def _plan_forward(x: Layout, weight: Layout, eps: float | None) -> _Plan:
    (rows, cols, stride), most = _rows(x), weight.shape[1]
    numbers = {
        "x_stride": cols if stride is None else stride,
        "weight_strides": weight.strides,
        "rows": rows,
        "K": most,
        "eps": eps or 0.0,
    }
    constants = {"NORMED": eps is not None} | _constants(FORWARD, cols, most)
    programs = -(-rows // constants["BLOCK_ROWS"])
    code = Code(lambda: project_forward, (programs, 1, 1), constants)
    places = {"x": 0, "weight": 1, "scores": 2, "inverse": 3}
    return _Plan((stride is None, False), programs, Kernel(code, x.device, places, numbers))


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
    if weight.shape[1] > MOST:
        of_weight = []
        for g, columns, known in zip(grad.split(MOST, -1), weight.split(MOST, 1), scores.split(MOST, -1), strict=True):
            carried, found = backward(g, x, columns, known, inverse, carried)
            of_weight.append(found)
        assert carried is not None
        return carried, torch.cat(of_weight)
    rows, most, cols = x.shape[:-1].numel(), weight.shape[1], x.shape[-1]
    given, normed = grad.reshape(rows, most), inverse.numel() > 0
    # As forward made them; saved tensors may come back with other strides (`save_on_cpu`).
    by_column = scores.reshape(rows, most).t().contiguous() if normed else inverse
    joined = None if carried is None else layout(carried)
    plan = _plan_backward(layout(x), layout(weight), given.stride(), normed, joined)
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    partials = torch.empty(plan.programs, most, cols, dtype=torch.float32, device=x.device)
    of_x, of_carried = plan.copied
    plain, added = x.contiguous() if of_x else x, x if carried is None else carried
    added = added.contiguous() if of_carried else added
    plan.kernel((given, by_column, inverse, plain, weight, added, grad_x, partials))
    return grad_x, partials[0] if plan.programs == 1 else partials.sum(0)


@functools.lru_cache(MOST_PLANS)
def _plan_backward(x: Layout, weight: Layout, grad: tuple[int, int], normed: bool, carried: Layout | None) -> _Plan:
    """``grad`` has the strides of [rows, K]."""
    (rows, cols, stride), most = _rows(x), weight.shape[1]
    constants = {"NORMED": normed, "CARRIED": carried is not None} | _constants(BACKWARD, cols, most)
    col_programs = -(-cols // constants["BLOCK_COLS"])
    programs = min(-(-rows // constants["BLOCK_ROWS"]), max(1, PROGRAMS // col_programs))
    numbers: dict[str, Any] = {"grad_row_stride": grad[0], "grad_stride": grad[1], "rows": rows, "K": most}
    numbers |= {"x_stride": cols if stride is None else stride, "weight_strides": weight.strides}
    along = cols if carried is None else row_stride(carried.shape, carried.strides)
    numbers["carried_stride"] = cols if along is None else along
    names = ("grad", "scores", "inverse", "x", "weight", "carried", "grad_x", "weight_partials")
    places = {name: place for place, name in enumerate(names)}
    code = Code(lambda: project_backward, (programs, col_programs, 1), constants, backward=True)
    return _Plan((stride is None, along is None), programs, Kernel(code, x.device, places, numbers))


def _rows(x: Layout) -> tuple[int, int, int | None]:
    """Rows, columns, and the elements between rows; None if they are not even."""
    return math.prod(x.shape[:-1]), x.shape[-1], row_stride(x.shape, x.strides)


def _constants(tiles: dict[int, tuple[int, int, int]], cols: int, most: int) -> dict[str, Any]:
    columns = max(16, 1 << (most - 1).bit_length())  # the next power of two that a matrix product takes
    block_rows, block_cols, warps = tiles[columns]
    sizes = {"BLOCK_ROWS": block_rows, "BLOCK_COLS": block_cols, "BLOCK_K": columns}
    return {"COLS": cols, "PRECISION": PRECISION, "num_warps": warps, "enable_fp_fusion": True} | sizes
