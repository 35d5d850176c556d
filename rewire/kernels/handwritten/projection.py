"""Projections of states to a few numbers per token, as Triton kernels: ``rms_norm(x) @ W``, or ``x @ W``.

A state is read once, in its own dtype; sums are float32. With ``r = (mean(x^2) + eps)^(-1/2)``, one number for each
row, ``rms_norm(x) @ W`` is ``r (x @ W)``: nothing as large as a state is made, or kept for backward. ``x @ W`` uses the
same kernels, and divides by r: separate kernels, without r and with scores clamped inside, gave bfloat16 gradients on
an H100 (Triton 3.6) that differed from those of Triton's interpreter.
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
from rewire.kernels.kernel import MOST_KEPT, PROGRAMS, Fitted, by_hand
from rewire.kernels.switch import INTERPRETED

#: Precision of matrix products in the kernels: that of float32, by three tensor-core products where there are any.
PRECISION = "tf32x3" if torch.version.hip is None else "ieee"
#: The dtype in which bfloat16 matrices are multiplied: the interpreter cannot multiply bfloat16.
OPERAND = tl.float32 if INTERPRETED else tl.bfloat16
#: Most columns of the weight for one kernel.
MOST = 128
#: Columns of the weight -> rows and columns of a tile, warps, and pipeline stages: the fastest of
#: ``benchmarks/on_gpu/tiles.py`` on an H200 that fit into the shared memory of smaller GPUs.
FORWARD = {16: (64, 64, 4, 4), 32: (64, 64, 4, 3), 64: (64, 32, 4, 4), 128: (64, 32, 4, 3)}
BACKWARD = {16: (16, 256, 4, 1), 32: (32, 128, 4, 1), 64: (32, 128, 4, 1), 128: (16, 128, 4, 1)}
WEIGHTS = {16: (32, 64, 4, 4), 32: (32, 128, 4, 3), 64: (32, 128, 4, 3), 128: (32, 128, 8, 3)}
#: Rows and columns of a tile in `products`.
TILE = (16, 256)


@triton.jit
def _halves(x, OPERAND: tl.constexpr):
    """A float32 as the sum of two bfloat16, with 16 of its 24 bits."""
    high = x.to(tl.bfloat16)
    return high.to(OPERAND), (x - high.to(tl.float32)).to(tl.bfloat16).to(OPERAND)


@triton.jit
def _thirds(x, OPERAND: tl.constexpr):
    """A float32 as the sum of three bfloat16, with all of its 24 bits."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high.to(OPERAND), middle.to(OPERAND), (rest - middle.to(tl.float32)).to(tl.bfloat16).to(OPERAND)


@triton.jit
def _dot(a, b, total, PRECISION: tl.constexpr, OPERAND: tl.constexpr):
    """``total + a b`` of float32 matrices; if one is bfloat16, the other is split into such a sum, and the product is
    as exact at half the cost.
    """
    if a.dtype == tl.bfloat16:
        high, middle, low = _thirds(b, OPERAND)
        a = a.to(OPERAND)
        return tl.dot(a, high, tl.dot(a, middle, tl.dot(a, low, total)))
    elif b.dtype == tl.bfloat16:
        high, middle, low = _thirds(a, OPERAND)
        b = b.to(OPERAND)
        return tl.dot(high, b, tl.dot(middle, b, tl.dot(low, b, total)))
    else:
        return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def _dot_halves(a, b, total, OPERAND: tl.constexpr):
    """``total + a b`` of float32 matrices, exact enough for a result that is rounded to bfloat16."""
    high, low = _halves(a, OPERAND)
    first, second = _halves(b, OPERAND)
    return tl.dot(high, first, tl.dot(high, second, tl.dot(low, first, total)))


@triton.jit(do_not_specialize=["rows", "K"])
def project_forward(
    x,  # [rows, cols]
    x_stride: tl.constexpr,
    weight,  # float32 [cols, K]
    weight_strides: tl.constexpr,
    scores,  # float32 [K, rows]
    inverse,  # float32 [rows]
    rows,
    K,
    eps,
    COLS: tl.constexpr,
    PRECISION: tl.constexpr,
    OPERAND: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]  # [BLOCK_ROWS, 1]
    k = tl.arange(0, BLOCK_K)[None, :]
    total = tl.zeros([BLOCK_ROWS, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    for first in tl.range(0, COLS, BLOCK_COLS, num_stages=STAGES):
        col = first + tl.arange(0, BLOCK_COLS)
        inside = (row < rows) & (col[None, :] < COLS)
        values = tl.load(x + (row * x_stride + col[None, :]), mask=inside, other=0.0)
        place = col[:, None] * weight_strides[0] + k * weight_strides[1]
        w = tl.load(weight + place, mask=(col[:, None] < COLS) & (k < K), other=0.0)
        total = _dot(values if values.dtype == tl.bfloat16 else values.to(tl.float32), w, total, PRECISION, OPERAND)
        squares += values.to(tl.float32) * values.to(tl.float32)
    r = tl.rsqrt(tl.sum(squares, 1, keep_dims=True) / COLS + eps)  # [BLOCK_ROWS, 1]
    tl.store(inverse + row, r, mask=row < rows)
    total *= r
    tl.store(scores + (k.to(tl.int64) * rows + row), total, mask=(row < rows) & (k < K))


_STRIDES = ["grad_row_stride", "grad_stride", "later_row_stride", "later_stride"]


@triton.jit
def _gradient(
    grad,
    grad_row_stride,
    grad_stride,
    later,
    later_row_stride,
    later_stride,
    row,
    k,
    rows,
    K,
    FIRST,
    APART: tl.constexpr,
):
    """The gradient of scores at the rows and columns k of a tile or its transpose; with APART it is in two tensors."""
    given, row_stride, known = grad + k * grad_stride, grad_row_stride, (row < rows) & (k < K)
    if APART:
        is_later = k >= FIRST
        given = tl.where(is_later, later + (k - FIRST) * later_stride, given)
        row_stride = tl.where(is_later, later_row_stride, row_stride)
    return tl.load(given + row * row_stride, mask=known, other=0.0)


@triton.jit(do_not_specialize=["rows", "K", "FIRST", "factor_stride", "stream_stride", *_STRIDES])
def project_backward(
    grad,  # float32 [rows, FIRST]
    grad_row_stride,
    grad_stride,
    later,  # float32 [rows, K - FIRST], if APART
    later_row_stride,
    later_stride,
    scores,  # float32 [K, rows]
    inverse,  # float32 [rows]
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
    rows,
    K,
    FIRST,
    COLS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKEN_ROWS: tl.constexpr,
    APART: tl.constexpr,
    CARRIED: tl.constexpr,
    READ: tl.constexpr,
    PRECISION: tl.constexpr,
    OPERAND: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """``dx = r g W^T - r^2 (sum_k g_k s_k) / D x`` for scores ``s = r x W``.

    With READ, x holds streams of tokens, one per row or all streams of a token in one row, and ``m_i dr`` is added for
    a token's read ``sum_i m_i x_i``.
    """
    col = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]  # [1, BLOCK_COLS]
    k = tl.arange(0, BLOCK_K)
    place = col * weight_strides[0] + k[:, None] * weight_strides[1]
    w = tl.load(weight + place, mask=(col < COLS) & (k[:, None] < K), other=0.0)  # [BLOCK_K, BLOCK_COLS]
    step = tl.num_programs(0) * BLOCK_ROWS
    for first in tl.range(tl.program_id(0) * BLOCK_ROWS, rows, step, num_stages=STAGES):
        row = first + tl.arange(0, BLOCK_ROWS).to(tl.int64)[:, None]  # [BLOCK_ROWS, 1]
        inside = (row < rows) & (col < COLS)
        strides = grad, grad_row_stride, grad_stride, later, later_row_stride, later_stride
        g = _gradient(*strides, row, k[None, :], rows, K, FIRST, APART)
        dx = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
        if CARRIED:
            dx = tl.load(carried + (row * carried_stride + col), mask=inside, other=0.0).to(tl.float32)
        if READ:
            token = row // TOKEN_ROWS
            dr = tl.load(grad_read + (token * grad_read_stride + col % WIDTH), mask=inside, other=0.0).to(tl.float32)
            # A scalar, if the tile has only one stream
            of_tile = tl.program_id(1) * BLOCK_COLS if WIDTH == COLS or WIDTH % BLOCK_COLS == 0 else col
            factor = token * factor_stride + (row % TOKEN_ROWS + of_tile // WIDTH) * stream_stride
            dx += tl.load(factors + factor, mask=(row < rows) & (of_tile < COLS), other=0.0) * dr
        known = (row < rows) & (k[None, :] < K)
        s = tl.load(scores + (k[None, :].to(tl.int64) * rows + row), mask=known, other=0.0)
        r = tl.load(inverse + row, mask=row < rows, other=0.0)
        values = tl.load(x + (row * x_stride + col), mask=inside, other=0.0).to(tl.float32)
        dx -= values * (r * r * tl.sum(g * s, 1, keep_dims=True) * (1.0 / COLS))
        g *= r
        # Starts from zero: loaded values would have to be moved to the layout of the product.
        total = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
        if grad_x.dtype.element_ty == tl.bfloat16:
            dx += _dot_halves(g, w, total, OPERAND)
        else:
            dx += tl.dot(g, w, total, input_precision=PRECISION)
        tl.store(grad_x + (row * COLS + col), dx, mask=inside)


@triton.jit(do_not_specialize=["rows", "K", "FIRST", *_STRIDES])
def project_weights(
    grad,  # these as in `project_backward`
    grad_row_stride,
    grad_stride,
    later,
    later_row_stride,
    later_stride,
    inverse,
    x,
    x_stride: tl.constexpr,
    partials,  # float32 [row programs, K, cols]
    rows,
    K,
    FIRST,
    COLS: tl.constexpr,
    APART: tl.constexpr,
    PRECISION: tl.constexpr,
    OPERAND: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """``dW = x^T (r g)``, for the same scores."""
    col = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]  # [1, BLOCK_COLS]
    k = tl.arange(0, BLOCK_K)[:, None]
    total = tl.zeros([BLOCK_K, BLOCK_COLS], tl.float32)
    step = tl.num_programs(0) * BLOCK_ROWS
    for first in tl.range(tl.program_id(0) * BLOCK_ROWS, rows, step, num_stages=STAGES):
        row = first + tl.arange(0, BLOCK_ROWS).to(tl.int64)
        strides = grad, grad_row_stride, grad_stride, later, later_row_stride, later_stride
        g = _gradient(*strides, row[None, :], k, rows, K, FIRST, APART)  # [BLOCK_K, BLOCK_ROWS]
        g *= tl.load(inverse + row, mask=row < rows, other=0.0)[None, :]
        inside = (row[:, None] < rows) & (col < COLS)
        values = tl.load(x + (row[:, None] * x_stride + col), mask=inside, other=0.0)
        total = _dot(g, values if values.dtype == tl.bfloat16 else values.to(tl.float32), total, PRECISION, OPERAND)
    place = (tl.program_id(0).to(tl.int64) * K + k) * COLS + col
    tl.store(partials + place, total, mask=(col < COLS) & (k < K))


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
    for stream in tl.static_range(N):  # after the first, the gradient comes from the cache
        total = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
        for first in range(0, COLS, BLOCK_COLS):
            col = first + tl.arange(0, BLOCK_COLS)[None, :]
            inside = (token < tokens) & (col < COLS)
            g = tl.load(grad + (token * grad_stride + col), mask=inside, other=0.0).to(tl.float32)
            place = token * strides[0] + (stream * strides[1] + col)
            total += g * tl.load(streams + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(result + (token * N + stream), tl.sum(total, 1, keep_dims=True), mask=token < tokens)


def forward(x: Tensor, weight: Tensor, eps: float | None, clamped: bool = False) -> tuple[Tensor, Tensor]:
    """`operators.project`; each column of the scores is contiguous."""
    if weight.shape[1] > MOST:
        found = [forward(x, columns, eps, clamped) for columns in weight.split(MOST, dim=1)]
        return torch.cat([scores.movedim(-1, 0) for scores, _ in found]).movedim(0, -1), found[0][1]
    fitted = _fitted_forward(metadata(x), metadata(weight), 1e-6 if eps is None else eps)
    lead, most = x.shape[:-1], weight.shape[1]
    scores = torch.empty(most, *lead, dtype=torch.float32, device=x.device)
    inverse = torch.empty(lead.numel(), dtype=torch.float32, device=x.device)
    fitted.kernel((*fitted.even(x), weight, scores, inverse))
    if eps is None:  # undo r, whatever eps it used
        scores, inverse = scores.div_(inverse.view(lead)), inverse[:0]
    if clamped:
        scores = torch.where(scores < 0, -0.0, scores)  # unclamped sums start at 0, and so are never -0
    return scores.movedim(0, -1), inverse


@functools.lru_cache(MOST_KEPT)
def _fitted_forward(x: Metadata, weight: Metadata, eps: float) -> Fitted:
    (rows, cols, stride), most = _rows(x), weight.shape[1]
    numbers = {
        "x_stride": cols if stride is None else stride,
        "weight_strides": weight.strides,
        "rows": rows,
        "K": most,
        "eps": eps,
    }
    constants = _constants(FORWARD, cols, most)
    programs = (-(-rows // constants["BLOCK_ROWS"]),)
    return Fitted(by_hand(project_forward, programs, x.device, numbers, constants), (stride is None,))


class Read(NamedTuple):
    """The gradient of a read ``r = sum_i m_i x_i`` of each token's n streams, and its factors.

    Attributes:
        grad: gradient of r, [..., 1, D].
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
    """`operators.project_backward`, for tensors as `forward` takes and returns them."""
    if weight.shape[1] > MOST:
        of_weight, grad = [], grads[0] if len(grads) == 1 else torch.cat(list(grads), -1)
        for g, columns, known in zip(grad.split(MOST, -1), weight.split(MOST, 1), scores.split(MOST, -1), strict=True):
            carried, found = backward([g], x, columns, known, inverse, carried, read, clamped)
            of_weight.append(found)
            read = None  # it is part of carried now
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
    """`backward` for at most `MOST` columns; the weight's gradient in parts to be added up, [parts, K, D]."""
    rows, most, cols = x.shape[:-1].numel(), weight.shape[1], x.shape[-1]
    if torch.version.hip is not None and len(grads) > 1:  # AMD's GPUs cannot choose between pointers
        grads = [torch.cat(list(grads), -1)]
    if clamped:
        of_each = scores.split([grad.shape[-1] for grad in grads], -1)
        grads = [torch.where(part.signbit(), 0.0, grad) for part, grad in zip(of_each, grads, strict=True)]
    given = [grad.reshape(rows, grad.shape[-1]) for grad in grads]
    # As forward made them; saved tensors may come back with other strides (`save_on_cpu`).
    inverse = inverse.contiguous()
    if inverse.numel():
        by_column = scores.reshape(rows, most).t().contiguous()
    else:  # with r = 1 and scores of 0, the norm's second term is 0
        inverse, by_column = inverse.new_ones(rows), inverse.new_zeros(most, rows)
    factors = None if read is None else read.factors.reshape(-1, read.factors.shape[-2])
    joined = [None if t is None else metadata(t) for t in (carried, read and read.grad, factors)]
    shapes = metadata(x), tuple(map(metadata, given))
    of_states, of_weight = _fitted_backward(*shapes, metadata(weight), *joined), _fitted_weights(*shapes)
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    partials = torch.empty(of_weight.programs[0], most, cols, dtype=torch.float32, device=x.device)
    states = (x, inverse if carried is None else carried, inverse if read is None else read.grad)
    values, *even = of_states.even(*states)
    factors = inverse if factors is None else factors
    of_states.kernel((given[0], given[-1], by_column, inverse, values, weight, *even, factors, grad_x))
    of_weight.kernel((given[0], given[-1], inverse, values, partials))
    return grad_x, partials


_Grads = tuple[Metadata, ...]  # [rows, columns]


@functools.lru_cache(MOST_KEPT)
def _fitted_backward(
    x: Metadata,
    grads: _Grads,
    weight: Metadata,
    carried: Metadata | None,
    grad_read: Metadata | None,
    factors: Metadata | None,
) -> Fitted:
    """The kernel of `project_backward` for tensors like these; ``factors`` are [tokens, streams]."""
    (rows, cols, stride), most = _rows(x), weight.shape[1]
    constants = _constants(BACKWARD, cols, most) | {"CARRIED": carried is not None, "READ": grad_read is not None}
    constants["APART"] = len(grads) > 1
    programs = _programs(rows, cols, constants)
    numbers = _numbers(x, grads) | {"weight_strides": weight.strides}
    along = [cols if t is None else row_stride(t.shape, t.strides) for t in (carried, grad_read)]
    width, token_rows = cols, 1
    if grad_read is not None and factors is not None:
        width = grad_read.shape[-1]
        token_rows = rows // factors.shape[0]
    even = [t.shape[-1] if t and step is None else step for t, step in zip((carried, grad_read), along, strict=True)]
    numbers |= {"carried_stride": even[0], "grad_read_stride": even[1], "WIDTH": width, "TOKEN_ROWS": token_rows}
    numbers["factor_stride"], numbers["stream_stride"] = (0, 0) if factors is None else factors.strides
    copied = stride is None, along[0] is None, along[1] is None
    return Fitted(by_hand(project_backward, programs, x.device, numbers, constants), copied, programs)


@functools.lru_cache(MOST_KEPT)
def _fitted_weights(x: Metadata, grads: _Grads) -> Fitted:
    rows, cols, _ = _rows(x)
    constants = _constants(WEIGHTS, cols, sum(grad.shape[1] for grad in grads))
    constants["APART"] = len(grads) > 1
    programs = _programs(rows, cols, constants)
    return Fitted(by_hand(project_weights, programs, x.device, _numbers(x, grads), constants), (), programs)


def _numbers(x: Metadata, grads: _Grads) -> dict[str, Any]:
    """The arguments of both backward kernels other than tensors."""
    rows, cols, stride = _rows(x)
    numbers: dict[str, Any] = {"rows": rows, "K": sum(grad.shape[1] for grad in grads), "FIRST": grads[0].shape[1]}
    numbers["grad_row_stride"], numbers["grad_stride"] = grads[0].strides
    numbers["later_row_stride"], numbers["later_stride"] = grads[-1].strides
    return numbers | {"x_stride": cols if stride is None else stride}


def _programs(rows: int, cols: int, constants: dict[str, Any]) -> tuple[int, int]:
    """Number of programs that share the rows, and that share the columns."""
    of_cols = -(-cols // constants["BLOCK_COLS"])
    return min(-(-rows // constants["BLOCK_ROWS"]), max(1, PROGRAMS // of_cols)), of_cols


def products(grad: Tensor, streams: Tensor) -> Tensor:
    """`operators.products`."""
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
    kernel = by_hand(products_of_read, (-(-math.prod(lead) // rows),), streams.device, numbers, constants)
    return Fitted(kernel, (of_grad is None, strides is None))


def _rows(x: Metadata) -> tuple[int, int, int | None]:
    """Number of rows, of columns, and the row stride, None if rows are not evenly spaced."""
    return math.prod(x.shape[:-1]), x.shape[-1], row_stride(x.shape, x.strides)


def _constants(tiles: dict[int, tuple[int, int, int, int]], cols: int, most: int) -> dict[str, Any]:
    columns = max(16, 1 << (most - 1).bit_length())  # the next power of two that tl.dot supports
    block_rows, block_cols, warps, stages = tiles[columns]
    sizes = {"BLOCK_ROWS": block_rows, "BLOCK_COLS": block_cols, "BLOCK_K": columns, "STAGES": stages}
    return {
        "COLS": cols,
        "PRECISION": PRECISION,
        "OPERAND": OPERAND,
        "num_warps": warps,
        "enable_fp_fusion": True,
    } | sizes
