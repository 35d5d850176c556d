"""Writes of hyper-connections, and what is read off the new streams, as one Triton kernel each way.

The next unit's gates are made of products of the streams that this one writes, `projection.forward`. While a kernel
has the new streams in registers it makes these, too; and backward hands on the new streams' gradient in registers.
"""
# ruff: noqa: N803, N806, RUF005  (constants of a kernel are written in capitals; Triton knows no starred tuples)
# mypy: disable-error-code="no-untyped-def, assignment, misc"

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rewire.kernels.arguments import Metadata, metadata, row_stride, stream_strides
from rewire.kernels.handwritten.projection import PRECISION, Read
from rewire.kernels.handwritten.totals import added_up
from rewire.kernels.kernel import MOST_KEPT, PROGRAMS, Code, Fitted, Kernel

#: Rows and columns of a tile, warps, and stages of loads: what registers and shared memory hold for up to
#: `operators.MOST_WRITTEN` streams and `operators.MOST_PRODUCTS` products. Forward by the bytes of an element.
FORWARD = {2: (64, 32, 8, 3), 4: (32, 16, 4, 3)}
BACKWARD = (16, 64, 8, 2)
BACKWARD_ON_AMD = (16, 32, 4, 2)  # where exact matrix products take more registers


@triton.jit(do_not_specialize=["tokens", "K"])
def write_forward(
    streams,  # [tokens, N, WIDTH]
    stream_strides: tl.constexpr,
    branches,  # of each [tokens, WIDTH]
    branch_strides: tl.constexpr,
    table,  # float32 [tokens, N, N + branches]
    weight,  # float32 [WIDTH, K] if EACH, else [N WIDTH, K]
    weight_strides: tl.constexpr,
    written,  # [tokens, N, WIDTH]
    products,  # float32 [K, rows]: of tokens or, if EACH, of their streams
    inverse,  # float32 [rows]
    tokens,
    K,
    eps,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    EACH: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """``H'_j = sum_i t_ji H_i + sum_b t_jb f_b``, and ``r (H' W)`` of each stream, or of a token's side by side."""
    OF_TOKEN: tl.constexpr = N if EACH else 1  # rows of products
    TERMS: tl.constexpr = N + len(branch_strides)
    token = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]  # [BLOCK_ROWS, 1]
    k = tl.arange(0, BLOCK_K)[None, :]
    sums, squares = (), ()
    for _ in tl.static_range(OF_TOKEN):
        sums += (tl.zeros([BLOCK_ROWS, BLOCK_K], tl.float32),)
        squares += (tl.zeros([BLOCK_ROWS, 1], tl.float32),)
    for first in range(0, WIDTH, BLOCK_COLS):
        col = first + tl.arange(0, BLOCK_COLS)
        inside = (token < tokens) & (col[None, :] < WIDTH)
        xs = ()
        for i in tl.static_range(N):
            place = token * stream_strides[0] + (i * stream_strides[1] + col[None, :])
            xs += (tl.load(streams + place, mask=inside, other=0.0).to(tl.float32),)
        for b in tl.static_range(len(branch_strides)):
            place = token * branch_strides[b] + col[None, :]
            xs += (tl.load(branches[b] + place, mask=inside, other=0.0).to(tl.float32),)
        for j in tl.static_range(N):
            factors = table + (token * (N * TERMS) + j * TERMS)
            y = tl.load(factors, mask=token < tokens, other=0.0) * xs[0]
            for i in tl.static_range(1, TERMS):
                y += tl.load(factors + i, mask=token < tokens, other=0.0) * xs[i]
            rounded = y.to(written.dtype.element_ty)
            tl.store(written + (token * (N * WIDTH) + (j * WIDTH + col[None, :])), rounded, mask=inside)
            y = rounded.to(tl.float32)  # as who reads it from memory has it
            row = col[:, None] if EACH else j * WIDTH + col[:, None]
            place = row * weight_strides[0] + k * weight_strides[1]
            w = tl.load(weight + place, mask=(col[:, None] < WIDTH) & (k < K), other=0.0)
            total = tl.dot(y, w, sums[j if EACH else 0], input_precision=PRECISION)
            square = squares[j if EACH else 0] + tl.sum(y * y, 1, keep_dims=True)
            sums = sums[: j if EACH else 0] + (total,) + sums[(j if EACH else 0) + 1 :]
            squares = squares[: j if EACH else 0] + (square,) + squares[(j if EACH else 0) + 1 :]
    for j in tl.static_range(OF_TOKEN):
        row = token * OF_TOKEN + j
        r = tl.rsqrt(squares[j] / (N * WIDTH // OF_TOKEN) + eps)
        tl.store(inverse + row, r, mask=token < tokens)
        place = k.to(tl.int64) * (tokens * OF_TOKEN) + row
        tl.store(products + place, sums[j] * r, mask=(token < tokens) & (k < K))


_STRIDES = ["grad_row_stride", "grad_stride", "factor_stride", "factor_step"]


@triton.jit(do_not_specialize=["tokens", "K", *_STRIDES])
def write_backward(
    carried,  # [tokens, N, WIDTH], if CARRIED
    carried_strides: tl.constexpr,
    grad_read,  # [tokens, WIDTH], if READ
    grad_read_stride: tl.constexpr,
    factors,  # float32 [tokens, N], if READ
    factor_stride,
    factor_step,
    grad,  # float32 [rows, K]
    grad_row_stride,
    grad_stride,
    products,  # float32 [K, rows]
    inverse,  # float32 [rows]
    written,  # [tokens, N, WIDTH], contiguous
    weight,  # float32 [WIDTH, K] if EACH, else [N WIDTH, K]
    weight_strides: tl.constexpr,
    streams,  # [tokens, N, WIDTH]
    stream_strides: tl.constexpr,
    branches,  # of each [tokens, WIDTH]
    branch_strides: tl.constexpr,
    table,  # float32 [tokens, N, N + branches]
    grad_streams,  # [tokens, N, WIDTH]
    grad_branches,  # of each [tokens, WIDTH]
    table_partials,  # float32 [column programs, tokens, N, N + branches]
    weight_partials,  # float32 [row programs, K, WIDTH or N WIDTH]
    tokens,
    K,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    EACH: tl.constexpr,
    CARRIED: tl.constexpr,
    READ: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The gradient of H', ``d_j = c_j + m_j dr + r g W^T - r^2 (sum_k g_k s_k) / D H'_j``, of what came for the streams
    (c), for a read ``sum_j m_j H'_j`` and for products s; and ``dH_i = sum_j t_ji d_j``, ``dt_ji = <H_i, d_j>``.
    """
    OF_TOKEN: tl.constexpr = N if EACH else 1
    TERMS: tl.constexpr = N + len(branch_strides)
    SHARE: tl.constexpr = OF_TOKEN / (N * WIDTH)
    col = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]  # [1, BLOCK_COLS]
    k = tl.arange(0, BLOCK_K)
    totals = ()
    for _ in tl.static_range(1 if EACH else N):
        totals += (tl.zeros([BLOCK_K, BLOCK_COLS], tl.float32),)
    for first in range(tl.program_id(0) * BLOCK_ROWS, tokens, tl.num_programs(0) * BLOCK_ROWS):
        token = first + tl.arange(0, BLOCK_ROWS).to(tl.int64)[:, None]  # [BLOCK_ROWS, 1]
        there = token < tokens
        inside = there & (col < WIDTH)
        if READ:
            dr = tl.load(grad_read + (token * grad_read_stride + col), mask=inside, other=0.0).to(tl.float32)
        ds = ()
        for j in tl.static_range(N):
            row = token * OF_TOKEN + (j if EACH else 0)
            known = there & (k[None, :] < K)
            g = tl.load(grad + (row * grad_row_stride + k[None, :] * grad_stride), mask=known, other=0.0)
            place = k[None, :].to(tl.int64) * (tokens * OF_TOKEN) + row
            s = tl.load(products + place, mask=known, other=0.0)
            r = tl.load(inverse + row, mask=there, other=0.0)
            x = tl.load(written + (token * (N * WIDTH) + (j * WIDTH + col)), mask=inside, other=0.0).to(tl.float32)
            d = -x * (r * r * tl.sum(g * s, 1, keep_dims=True) * SHARE)
            if CARRIED:
                place = token * carried_strides[0] + (j * carried_strides[1] + col)
                d += tl.load(carried + place, mask=inside, other=0.0).to(tl.float32)
            if READ:
                d += tl.load(factors + (token * factor_stride + j * factor_step), mask=there, other=0.0) * dr
            g *= r
            place = (col if EACH else j * WIDTH + col) * weight_strides[0] + k[:, None] * weight_strides[1]
            w = tl.load(weight + place, mask=(col < WIDTH) & (k[:, None] < K), other=0.0)
            ds += (tl.dot(g, w, d, input_precision=PRECISION),)
            total = tl.dot(tl.trans(g), x, totals[0 if EACH else j], input_precision=PRECISION)
            totals = totals[: 0 if EACH else j] + (total,) + totals[(0 if EACH else j) + 1 :]
        partials = table_partials + (tl.program_id(1).to(tl.int64) * tokens + token) * (N * TERMS)
        for i in tl.static_range(TERMS):
            if i < N:
                place = token * stream_strides[0] + (i * stream_strides[1] + col)
                x = tl.load(streams + place, mask=inside, other=0.0).to(tl.float32)
            else:
                place = token * branch_strides[i - N] + col
                x = tl.load(branches[i - N] + place, mask=inside, other=0.0).to(tl.float32)
            dx = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
            for j in tl.static_range(N):
                dx += tl.load(table + (token * (N * TERMS) + (j * TERMS + i)), mask=there, other=0.0) * ds[j]
                tl.store(partials + (j * TERMS + i), tl.sum(x * ds[j], 1, keep_dims=True), mask=there)
            if i < N:
                tl.store(grad_streams + (token * (N * WIDTH) + (i * WIDTH + col)), dx, mask=inside)
            else:
                tl.store(grad_branches[i - N] + (token * WIDTH + col), dx, mask=inside)
    for j in tl.static_range(1 if EACH else N):
        row = tl.program_id(0).to(tl.int64) * K + k[:, None]
        place = row * (WIDTH if EACH else N * WIDTH) + (j * WIDTH + col)
        tl.store(weight_partials + place, totals[j], mask=(col < WIDTH) & (k[:, None] < K))


def forward(
    streams: Tensor, branches: Sequence[Tensor], table: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """New streams [..., n, D], in that dtype; and of these what `projection.forward` returns.

    Args:
        streams: [..., n, D].
        branches: of each [..., D].
        table: float32 [..., n, n + branches], what each new stream takes of the streams and of the branches.
        weight: float32, of each stream [D, K] or of a token's side by side [n D, K].
        eps: of the norm.
    """
    fitted = _fitted_forward(metadata(streams), tuple(map(metadata, branches)), metadata(weight), eps, dtype.itemsize)
    (*lead, n, width), (channels, most) = streams.shape, weight.shape
    rows = (*lead, n) if channels == width else lead
    written = torch.empty(streams.shape, dtype=dtype, device=streams.device)
    products = torch.empty(most, *rows, dtype=torch.float32, device=streams.device)
    inverse = torch.empty(math.prod(rows), dtype=torch.float32, device=streams.device)
    fitted.kernel((*fitted.even(streams, *branches), table.contiguous(), weight, written, products, inverse))
    return written, products.movedim(0, -1), inverse


@functools.lru_cache(MOST_KEPT)
def _fitted_forward(
    streams: Metadata, branches: tuple[Metadata, ...], weight: Metadata, eps: float, itemsize: int
) -> Fitted:
    copied, numbers = _terms(streams, branches)
    numbers |= {"weight_strides": weight.strides, "K": weight.shape[1], "eps": eps}
    constants = _constants(FORWARD[itemsize], streams, weight)
    programs = -(-numbers["tokens"] // constants["BLOCK_ROWS"])
    code = Code(lambda: write_forward, (programs, 1, 1), constants)
    places = _places(len(branches), "streams", "branches", "table", "weight", "written", "products", "inverse")
    return Fitted(Kernel(code, streams.device, places, numbers), copied, (programs, 1))


def backward(
    grad: Tensor,
    carried: Tensor | None,
    read: Read | None,
    written: Tensor,
    products: Tensor,
    inverse: Tensor,
    streams: Tensor,
    branches: Sequence[Tensor],
    table: Tensor,
    weight: Tensor,
) -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
    """Gradients of the streams, of the branches, of the table, and of the weight, [K, D] or [K, n D].

    Args:
        grad: of the products.
        carried: of the new streams, [..., n, D].
        read: of a read of the new streams.
        written, products, inverse: as `forward` returned them.
        streams, branches, table, weight: as there.
    """
    most, n, table = weight.shape[1], streams.shape[-2], table.contiguous()
    # As forward made them; saved tensors may come back with other strides (`save_on_cpu`).
    known = [x.contiguous() for x in (products.reshape(-1, most).t(), inverse, written)]
    by_row, factors = grad.reshape(-1, most), inverse if read is None else read.factors.reshape(-1, n)
    joined = [None if x is None else metadata(x) for x in (carried, read and read.grad, read and factors)]
    fitted = _fitted_backward(
        metadata(streams), tuple(map(metadata, branches)), metadata(weight), metadata(by_row), *joined
    )
    *states, of_written, of_read = fitted.even(
        streams, *branches, inverse if carried is None else carried, inverse if read is None else read.grad
    )
    of_streams, *of_branches = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (streams, *branches))
    floats: dict[str, Any] = {"dtype": torch.float32, "device": streams.device}
    of_table = torch.empty(fitted.programs[1], *table.shape, **floats)
    of_weight = torch.empty(fitted.programs[0], most, weight.shape[0], **floats)
    results = (of_streams, *of_branches, of_table, of_weight)
    fitted.kernel((of_written, of_read, factors, by_row, *known, weight, *states, table, *results))
    of_table, of_weight = added_up((of_table, of_weight))
    return of_streams, of_branches, of_table, of_weight


@functools.lru_cache(MOST_KEPT)
def _fitted_backward(
    streams: Metadata,
    branches: tuple[Metadata, ...],
    weight: Metadata,
    grad: Metadata,
    carried: Metadata | None,
    grad_read: Metadata | None,
    factors: Metadata | None,
) -> Fitted:
    """``grad`` is [rows, K], ``factors`` [tokens, n]."""
    copied, numbers = _terms(streams, branches)
    n, width = streams.shape[-2:]
    constants = _constants(BACKWARD if torch.version.hip is None else BACKWARD_ON_AMD, streams, weight)
    constants |= {"CARRIED": carried is not None, "READ": grad_read is not None}
    of_carried = None if carried is None else stream_strides(carried)
    of_read = None if grad_read is None else row_stride(grad_read.shape, grad_read.strides)
    numbers |= {"weight_strides": weight.strides, "K": weight.shape[1]}
    numbers |= {"carried_strides": of_carried or (n * width, width)}
    numbers |= {"grad_read_stride": width if of_read is None else of_read}
    numbers["grad_row_stride"], numbers["grad_stride"] = grad.strides
    numbers["factor_stride"], numbers["factor_step"] = (0, 0) if factors is None else factors.strides
    col_programs = -(-width // constants["BLOCK_COLS"])
    programs = min(-(-numbers["tokens"] // constants["BLOCK_ROWS"]), max(1, PROGRAMS // col_programs)), col_programs
    names = ("carried", "grad_read", "factors", "grad", "products", "inverse", "written", "weight")
    names += ("streams", "branches", "table", "grad_streams", "grad_branches", "table_partials", "weight_partials")
    code = Code(lambda: write_backward, (*programs, 1), constants)
    copied += (carried is not None and of_carried is None, grad_read is not None and of_read is None)
    return Fitted(Kernel(code, streams.device, _places(len(branches), *names), numbers), copied, programs)


def _terms(streams: Metadata, branches: tuple[Metadata, ...]) -> tuple[tuple[bool, ...], dict[str, Any]]:
    """Which of streams and branches have to be copied; and strides and sizes as the kernels know them."""
    *lead, n, width = streams.shape
    strides, of_branches = stream_strides(streams), [row_stride(x.shape, x.strides) for x in branches]
    numbers = {
        "stream_strides": strides or (n * width, width),
        "branch_strides": tuple([width if stride is None else stride for stride in of_branches]),
        "tokens": math.prod(lead),
    }
    return (strides is None, *(stride is None for stride in of_branches)), numbers


def _constants(tile: tuple[int, int, int, int], streams: Metadata, weight: Metadata) -> dict[str, Any]:
    (n, width), (channels, most) = streams.shape[-2:], weight.shape
    rows, cols, warps, stages = tile
    constants = {"N": n, "WIDTH": width, "EACH": channels == width, "PRECISION": PRECISION}
    constants |= {"BLOCK_ROWS": rows, "BLOCK_COLS": cols, "BLOCK_K": max(16, 1 << (most - 1).bit_length())}
    return constants | {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}


def _places(branches: int, *names: str) -> dict[str, Any]:
    """Where a kernel's tensors are in a list, in this order, of branches that many."""
    places: dict[str, Any] = {}
    first = 0
    for name in names:
        several = name in ("branches", "grad_branches")
        places[name] = tuple(range(first, first + branches)) if several else first
        first += branches if several else 1
    return places
