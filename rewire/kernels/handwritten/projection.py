"""Projections of states to a few numbers for each token, as Triton kernels: ``x @ W``, or ``rms_norm(x) @ W``.

A state is read once, in its own dtype; sums are float32. With ``r = (mean(x^2) + eps)^(-1/2)``, one number for each
row, ``rms_norm(x) @ W`` is ``r (x @ W)``: nothing of the size of a state is made, or kept for backward.
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

from rewire.kernels.arguments import Metadata, metadata, row_stride, stream_strides
from rewire.kernels.kernel import MOST_KEPT, PROGRAMS, Code, Fitted, Kernel

#: Of matrix products in the kernels: as exact as float32, by three products of tensor cores where there are such.
PRECISION = "tf32x3" if torch.version.hip is None else "ieee"
#: Columns of the weight that one kernel takes.
MOST = 128
#: Rows and columns of a tile, and warps, by the columns of the weight: what registers hold.
FORWARD = {16: (64, 32, 4), 32: (64, 32, 4), 64: (64, 32, 8), 128: (64, 32, 8)}
BACKWARD = {16: (32, 64, 4), 32: (32, 64, 4), 64: (16, 32, 8), 128: (16, 32, 8)}
#: Rows and columns of a tile of the products of a read's gradient.
TILE = (16, 256)


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
    CLAMPED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """CLAMPED, scores below zero are stored as the zero that has a sign: backward can tell it from others."""
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
    if CLAMPED:
        sign = (total.to(tl.int32, bitcast=True) & -2147483648).to(tl.float32, bitcast=True)  # -0.0 would be 0.0
        total = tl.where(total < 0.0, sign, total + 0.0)
    tl.store(scores + (k.to(tl.int64) * rows + row), total, mask=(row < rows) & (k < K))


_STRIDES = ["grad_row_stride", "grad_stride", "later_row_stride", "later_stride", "factor_stride", "stream_stride"]


@triton.jit(do_not_specialize=["rows", "K", "FIRST", *_STRIDES])
def project_backward(
    grad,  # float32 [rows, FIRST]
    grad_row_stride,
    grad_stride,
    later,  # float32 [rows, K - FIRST], if APART
    later_row_stride,
    later_stride,
    FIRST,
    scores,  # float32 [K, rows], if NORMED or CLAMPED
    inverse,  # float32 [rows], if NORMED
    x,  # [rows, cols]
    x_stride: tl.constexpr,
    weight,  # float32 [cols, K]
    weight_strides: tl.constexpr,
    carried,  # [rows, cols], if CARRIED
    carried_stride: tl.constexpr,
    grad_read,  # [tokens, WIDTH], if READ
    grad_read_stride: tl.constexpr,
    factors,  # float32 [tokens, streams], if READ
    factor_stride,
    stream_stride,
    grad_x,  # [rows, cols], contiguous
    weight_partials,  # float32 [row programs, K, cols]
    rows,
    K,
    COLS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKEN_ROWS: tl.constexpr,
    NORMED: tl.constexpr,
    CLAMPED: tl.constexpr,
    APART: tl.constexpr,
    CARRIED: tl.constexpr,
    READ: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """``dx = r g W^T - r^2 (sum_k g_k s_k) / D x`` for scores ``s = r x W``, and ``dW = x^T (r g)``.

    Not NORMED, r is 1 and the second term is not there. CLAMPED, g is 0 where s was below zero. APART, g comes in two
    tensors. READ, x are streams of tokens: each in a row of its own, or those of a token side by side in one row; and
    ``m_i dr`` is added for a read ``sum_i m_i x_i`` of a token.
    """
    col = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]  # [1, BLOCK_COLS]
    k = tl.arange(0, BLOCK_K)
    place = col * weight_strides[0] + k[:, None] * weight_strides[1]
    w = tl.load(weight + place, mask=(col < COLS) & (k[:, None] < K), other=0.0)  # [BLOCK_K, BLOCK_COLS]
    given, row_stride = grad + k[None, :] * grad_stride, grad_row_stride  # [1, BLOCK_K]
    if APART:
        is_later = k[None, :] >= FIRST
        given = tl.where(is_later, later + (k[None, :] - FIRST) * later_stride, given)
        row_stride = tl.where(is_later, later_row_stride, row_stride)
    total = tl.zeros([BLOCK_K, BLOCK_COLS], tl.float32)
    for first in range(tl.program_id(0) * BLOCK_ROWS, rows, tl.num_programs(0) * BLOCK_ROWS):
        row = first + tl.arange(0, BLOCK_ROWS).to(tl.int64)[:, None]  # [BLOCK_ROWS, 1]
        inside = (row < rows) & (col < COLS)
        known = (row < rows) & (k[None, :] < K)
        g = tl.load(given + row * row_stride, mask=known, other=0.0)
        values = tl.load(x + (row * x_stride + col), mask=inside, other=0.0).to(tl.float32)
        if CARRIED:
            dx = tl.load(carried + (row * carried_stride + col), mask=inside, other=0.0).to(tl.float32)
        else:
            dx = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
        if READ:
            token = row // TOKEN_ROWS
            dr = tl.load(grad_read + (token * grad_read_stride + col % WIDTH), mask=inside, other=0.0).to(tl.float32)
            # One stream for the tile, where there is no other in it
            of_tile = tl.program_id(1) * BLOCK_COLS if WIDTH == COLS or WIDTH % BLOCK_COLS == 0 else col
            factor = token * factor_stride + (row % TOKEN_ROWS + of_tile // WIDTH) * stream_stride
            dx += tl.load(factors + factor, mask=(row < rows) & (of_tile < COLS), other=0.0) * dr
        if NORMED or CLAMPED:
            s = tl.load(scores + (k[None, :].to(tl.int64) * rows + row), mask=known, other=0.0)
        if CLAMPED:
            g = tl.where(s.to(tl.int32, bitcast=True) < 0, 0.0, g)
        if NORMED:
            r = tl.load(inverse + row, mask=row < rows, other=0.0)
            dx -= values * (r * r * tl.sum(g * s, 1, keep_dims=True) * (1.0 / COLS))
            g *= r
        dx = tl.dot(g, w, dx, input_precision=PRECISION)
        tl.store(grad_x + (row * COLS + col), dx, mask=inside)
        total = tl.dot(tl.trans(g), values, total, input_precision=PRECISION)
    place = (tl.program_id(0).to(tl.int64) * K + k[:, None]) * COLS + col
    tl.store(weight_partials + place, total, mask=(col < COLS) & (k[:, None] < K))


@triton.jit(do_not_specialize=["tokens"])
def products_of_read(
    grad,  # [tokens, cols]
    grad_stride: tl.constexpr,
    streams,  # [tokens, N, cols]
    strides: tl.constexpr,
    result,  # float32 [tokens, N]
    tokens,
    N: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]  # [BLOCK_ROWS, 1]
    for stream in tl.static_range(N):  # the gradient comes from the cache after the first
        total = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
        for first in range(0, COLS, BLOCK_COLS):
            col = first + tl.arange(0, BLOCK_COLS)[None, :]
            inside = (token < tokens) & (col < COLS)
            g = tl.load(grad + (token * grad_stride + col), mask=inside, other=0.0).to(tl.float32)
            place = token * strides[0] + (stream * strides[1] + col)
            total += g * tl.load(streams + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(result + (token * N + stream), tl.sum(total, 1, keep_dims=True), mask=token < tokens)


def forward(x: Tensor, weight: Tensor, eps: float | None, clamped: bool = False) -> tuple[Tensor, Tensor]:
    """``x @ weight``, [..., K], each of the K contiguous; and, with eps, ``r`` [rows], float32.

    Args:
        x: [..., D], float32, bfloat16 or float16.
        weight: float32 [D, K].
        eps: of the norm; None: x is not normed.
        clamped: whether what is below zero becomes -0.
    """
    if weight.shape[1] > MOST:
        found = [forward(x, columns, eps, clamped) for columns in weight.split(MOST, dim=1)]
        return torch.cat([scores.movedim(-1, 0) for scores, _ in found]).movedim(0, -1), found[0][1]
    fitted = _fitted_forward(metadata(x), metadata(weight), eps, clamped)
    lead, most = x.shape[:-1], weight.shape[1]
    scores = torch.empty(most, *lead, dtype=torch.float32, device=x.device)
    inverse = torch.empty(lead.numel() * (eps is not None), dtype=torch.float32, device=x.device)
    fitted.kernel((*fitted.even(x), weight, scores, inverse))
    return scores.movedim(0, -1), inverse


@functools.lru_cache(MOST_KEPT)
def _fitted_forward(x: Metadata, weight: Metadata, eps: float | None, clamped: bool) -> Fitted:
    (rows, cols, stride), most = _rows(x), weight.shape[1]
    numbers = {
        "x_stride": cols if stride is None else stride,
        "weight_strides": weight.strides,
        "rows": rows,
        "K": most,
        "eps": eps or 0.0,
    }
    constants = {"NORMED": eps is not None, "CLAMPED": clamped} | _constants(FORWARD, cols, most)
    programs = -(-rows // constants["BLOCK_ROWS"])
    code = Code(lambda: project_forward, (programs, 1, 1), constants)
    places = {"x": 0, "weight": 1, "scores": 2, "inverse": 3}
    return Fitted(Kernel(code, x.device, places, numbers), (stride is None,))


class Read(NamedTuple):
    """What a read ``r = sum_i m_i x_i`` of n streams of each token sends back.

    Attributes:
        grad: of r, [..., 1, D].
        factors: m, float32 [..., n, 1].
    """

    grad: Tensor
    factors: Tensor


def backward(
    grads: Sequence[Tensor],
    x: Tensor,
    weight: Tensor,
    scores: Tensor,
    inverse: Tensor,
    carried: Tensor | None,
    read: Read | None = None,
    clamped: bool = False,
) -> tuple[Tensor, Tensor]:
    """Gradients of x, in its dtype, and of the weight, [K, D], of `forward`.

    Args:
        grads: float32 [..., K], or those of the first columns and of the others.
        x, weight: as in forward.
        scores, inverse: as forward returned them.
        carried: [..., D], what is added to the gradient of x.
        read: of x as streams [..., n, D], or [..., n D]; its part of their gradient is added, too.
        clamped: as in forward.
    """
    if weight.shape[1] > MOST:
        of_weight, grad = [], grads[0] if len(grads) == 1 else torch.cat(list(grads), -1)
        for g, columns, known in zip(grad.split(MOST, -1), weight.split(MOST, 1), scores.split(MOST, -1), strict=True):
            carried, found = backward([g], x, columns, known, inverse, carried, read, clamped)
            of_weight.append(found)
            read = None  # it is in what is carried
        assert carried is not None
        return carried, torch.cat(of_weight)
    of_x, partials = backward_in_parts(grads, x, weight, scores, inverse, carried, read, clamped)
    return of_x, partials[0] if len(partials) == 1 else partials.sum(0)


def backward_in_parts(
    grads: Sequence[Tensor],
    x: Tensor,
    weight: Tensor,
    scores: Tensor,
    inverse: Tensor,
    carried: Tensor | None,
    read: Read | None = None,
    clamped: bool = False,
) -> tuple[Tensor, Tensor]:
    """`backward` of at most `MOST` columns; that of the weight in parts to be added up, [parts, K, D]."""
    rows, most, cols = x.shape[:-1].numel(), weight.shape[1], x.shape[-1]
    if torch.version.hip is not None and len(grads) > 1:  # where a pointer cannot be one of two
        grads = [torch.cat(list(grads), -1)]
    given, normed = [grad.reshape(rows, grad.shape[-1]) for grad in grads], inverse.numel() > 0
    # As forward made them; saved tensors may come back with other strides (`save_on_cpu`).
    by_column = scores.reshape(rows, most).t().contiguous() if normed or clamped else inverse
    factors = None if read is None else read.factors.reshape(-1, read.factors.shape[-2])
    joined = [None if t is None else metadata(t) for t in (carried, read and read.grad, factors)]
    fitted = _fitted_backward(metadata(x), metadata(weight), tuple(map(metadata, given)), normed, clamped, *joined)
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    partials = torch.empty(fitted.programs[0], most, cols, dtype=torch.float32, device=x.device)
    states = (x, inverse if carried is None else carried, inverse if read is None else read.grad)
    even = fitted.even(*states)
    factors = inverse if factors is None else factors
    fitted.kernel((given[0], given[-1], by_column, inverse, *even, weight, factors, grad_x, partials))
    return grad_x, partials


@functools.lru_cache(MOST_KEPT)
def _fitted_backward(
    x: Metadata,
    weight: Metadata,
    grads: tuple[Metadata, ...],
    normed: bool,
    clamped: bool,
    carried: Metadata | None,
    grad_read: Metadata | None,
    factors: Metadata | None,
) -> Fitted:
    """``grads`` are [rows, columns], ``factors`` [tokens, streams]."""
    (rows, cols, stride), most = _rows(x), weight.shape[1]
    given = {"APART": len(grads) > 1, "CARRIED": carried is not None, "READ": grad_read is not None}
    constants = {"NORMED": normed, "CLAMPED": clamped} | given | _constants(BACKWARD, cols, most)
    col_programs = -(-cols // constants["BLOCK_COLS"])
    programs = min(-(-rows // constants["BLOCK_ROWS"]), max(1, PROGRAMS // col_programs))
    numbers: dict[str, Any] = {"rows": rows, "K": most, "FIRST": grads[0].shape[1]}
    numbers["grad_row_stride"], numbers["grad_stride"] = grads[0].strides
    numbers["later_row_stride"], numbers["later_stride"] = grads[-1].strides
    numbers |= {"x_stride": cols if stride is None else stride, "weight_strides": weight.strides}
    along = [cols if t is None else row_stride(t.shape, t.strides) for t in (carried, grad_read)]
    width, token_rows = cols, 1
    if grad_read is not None and factors is not None:
        width = grad_read.shape[-1]
        token_rows = rows // factors.shape[0]
    even = [t.shape[-1] if t and step is None else step for t, step in zip((carried, grad_read), along, strict=True)]
    numbers |= {"carried_stride": even[0], "grad_read_stride": even[1], "WIDTH": width, "TOKEN_ROWS": token_rows}
    numbers["factor_stride"], numbers["stream_stride"] = (0, 0) if factors is None else factors.strides
    given_names = ("grad", "later", "scores", "inverse", "x", "carried", "grad_read", "weight", "factors")
    names = (*given_names, "grad_x", "weight_partials")
    places = {name: place for place, name in enumerate(names)}
    code = Code(lambda: project_backward, (programs, col_programs, 1), constants)
    copied = stride is None, along[0] is None, along[1] is None
    return Fitted(Kernel(code, x.device, places, numbers), copied, (programs, col_programs))


def products(grad: Tensor, streams: Tensor) -> Tensor:
    """``<grad, streams_i>``, float32 [..., n, 1].

    Args:
        grad: of a read, [..., 1, D].
        streams: [..., n, D].
    """
    fitted = _fitted_products(metadata(grad), metadata(streams))
    result = torch.empty(*streams.shape[:-1], 1, dtype=torch.float32, device=streams.device)
    fitted.kernel((*fitted.even(grad, streams), result))
    return result


@functools.lru_cache(MOST_KEPT)
def _fitted_products(grad: Metadata, streams: Metadata) -> Fitted:
    *lead, n, cols = streams.shape
    of_grad, strides = row_stride(grad.shape, grad.strides), stream_strides(streams)
    numbers = {
        "grad_stride": cols if of_grad is None else of_grad,
        "strides": strides or (n * cols, cols),
        "tokens": math.prod(lead),
    }
    rows, columns = TILE
    constants = {"N": n, "COLS": cols, "BLOCK_ROWS": rows, "BLOCK_COLS": columns, "num_warps": 4}
    code = Code(lambda: products_of_read, (-(-math.prod(lead) // rows), 1, 1), constants)
    kernel = Kernel(code, streams.device, {"grad": 0, "streams": 1, "result": 2}, numbers)
    return Fitted(kernel, (of_grad is None, strides is None))


def _rows(x: Metadata) -> tuple[int, int, int | None]:
    """Rows, columns, and the elements between rows; None if they are not even."""
    return math.prod(x.shape[:-1]), x.shape[-1], row_stride(x.shape, x.strides)


def _constants(tiles: dict[int, tuple[int, int, int]], cols: int, most: int) -> dict[str, Any]:
    columns = max(16, 1 << (most - 1).bit_length())  # the next power of two that a matrix product takes
    block_rows, block_cols, warps = tiles[columns]
    sizes = {"BLOCK_ROWS": block_rows, "BLOCK_COLS": block_cols, "BLOCK_K": columns}
    return {"COLS": cols, "PRECISION": PRECISION, "num_warps": warps, "enable_fp_fusion": True} | sizes
