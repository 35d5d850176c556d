"""Writes of hyper-connections together with the projection of the new streams, as one Triton kernel each way.

The next unit's gates come from a projection of the streams that this unit writes, `projection.forward`. The kernel
computes it while it has the new streams in registers, where backward also keeps their gradient.
"""
# ruff: noqa: N803, N806  (constants of a kernel are written in capitals; Triton knows no starred tuples)
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
from rewire.kernels.handwritten.projection import Read
from rewire.kernels.handwritten.totals import added_up
from rewire.kernels.kernel import MOST_KEPT, PROGRAMS, Fitted, by_hand

#: Rows and columns of a tile, warps, and pipeline stages: each row is in one warp, so that sums along it need no
#: barrier. Chosen as those of projections.
FORWARD = (8, 128, 8, 3)
BACKWARD = (4, 128, 2, 1)
#: Elements of a row that a thread holds in these tiles.
VECTOR = 4


@triton.jit
def _within(x, VECTOR: tl.constexpr):
    """Sums of the neighbours along a row that one thread holds: [rows, columns / VECTOR]."""
    return tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // VECTOR, VECTOR]), 2)


@triton.jit(do_not_specialize=["tokens"])
def write_forward(
    streams,  # [tokens, N, WIDTH]
    stream_strides: tl.constexpr,
    branches,  # for each branch [tokens, WIDTH]
    branch_strides: tl.constexpr,
    table,  # float32 [tokens, N, N + branches]
    weight,  # float32 [WIDTH, K]
    weight_strides: tl.constexpr,
    written,  # [tokens, N, WIDTH]
    products,  # float32 [K, tokens N]
    inverse,  # float32 [tokens N]
    tokens,
    eps,
    K: tl.constexpr,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    STAGES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """``H'_j = sum_i t_ji H_i + sum_b t_jb f_b``, and ``r (H' W)`` of each stream."""
    TERMS: tl.constexpr = N + len(branch_strides)
    token = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]  # [BLOCK_ROWS, 1]
    factors, sums, squares = (), (), ()
    for pair in tl.static_range(N * TERMS):
        factors += (tl.load(table + (token * (N * TERMS) + pair), mask=token < tokens, other=0.0),)
    for _ in tl.static_range(N):
        squares += (tl.zeros([BLOCK_ROWS, BLOCK_COLS // VECTOR], tl.float32),)
    for _ in tl.static_range(N * K):
        sums += (tl.zeros([BLOCK_ROWS, BLOCK_COLS // VECTOR], tl.float32),)
    for first in tl.range(0, WIDTH, BLOCK_COLS, num_stages=STAGES):
        col = first + tl.arange(0, BLOCK_COLS)[None, :]
        inside = (token < tokens) & (col < WIDTH)
        xs, ys, of_squares, of_products = (), (), (), ()
        for i in tl.static_range(N):
            place = token * stream_strides[0] + (i * stream_strides[1] + col)
            xs += (tl.load(streams + place, mask=inside, other=0.0).to(tl.float32),)
        for b in tl.static_range(len(branch_strides)):
            place = token * branch_strides[b] + col
            xs += (tl.load(branches[b] + place, mask=inside, other=0.0).to(tl.float32),)
        for j in tl.static_range(N):
            y = factors[j * TERMS] * xs[0]
            for i in tl.static_range(1, TERMS):
                y += factors[j * TERMS + i] * xs[i]
            rounded = y.to(written.dtype.element_ty)
            tl.store(written + (token * (N * WIDTH) + (j * WIDTH + col)), rounded, mask=inside)
            ys += (rounded.to(tl.float32),)  # rounded, as backward will read it
        for j in tl.static_range(N):
            of_squares += (squares[j] + _within(ys[j] * ys[j], VECTOR),)
        for k in tl.static_range(K):
            place = col * weight_strides[0] + k * weight_strides[1]
            w = tl.load(weight + place, mask=col < WIDTH, other=0.0)
            for j in tl.static_range(N):
                of_products += (sums[k * N + j] + _within(ys[j] * w, VECTOR),)
        squares, sums = of_squares, of_products
    for j in tl.static_range(N):
        row = token * N + j
        r = tl.rsqrt(tl.sum(squares[j], 1, keep_dims=True) / WIDTH + eps)
        tl.store(inverse + row, r, mask=token < tokens)
        for k in tl.static_range(K):
            total = tl.sum(sums[k * N + j], 1, keep_dims=True)
            tl.store(products + (k * tokens.to(tl.int64) * N + row), total * r, mask=token < tokens)


_STRIDES = ["grad_row_stride", "grad_stride", "factor_stride", "factor_step"]


@triton.jit(do_not_specialize=["tokens", *_STRIDES])
def write_backward(
    carried,  # [tokens, N, WIDTH], if CARRIED
    carried_strides: tl.constexpr,
    grad_read,  # [tokens, WIDTH], if READ
    grad_read_stride: tl.constexpr,
    factors,  # float32 [tokens, N], if READ
    factor_stride,
    factor_step,
    grad,  # float32 [tokens N, K]
    grad_row_stride,
    grad_stride,
    products,  # float32 [K, tokens N]
    inverse,  # float32 [tokens N]
    written,  # [tokens, N, WIDTH], contiguous
    weight,  # float32 [WIDTH, K]
    weight_strides: tl.constexpr,
    streams,  # [tokens, N, WIDTH]
    stream_strides: tl.constexpr,
    branches,  # for each branch [tokens, WIDTH]
    branch_strides: tl.constexpr,
    table,  # float32 [tokens, N, N + branches]
    grad_streams,  # [tokens, N, WIDTH]
    grad_branches,  # for each branch [tokens, WIDTH]
    table_partials,  # float32 [column programs, tokens, N, N + branches]
    weight_partials,  # float32 [row programs, K, WIDTH]
    tokens,
    K: tl.constexpr,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    CARRIED: tl.constexpr,
    READ: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The gradient of H', ``d_j = c_j + m_j dr + r g W^T - r^2 (sum_k g_k s_k) / D H'_j``, from those of the streams
    (c), of a read ``sum_j m_j H'_j`` and of products s; and ``dH_i = sum_j t_ji d_j``, ``dt_ji = <H_i, d_j>``.
    """
    TERMS: tl.constexpr = N + len(branch_strides)
    col = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]  # [1, BLOCK_COLS]
    pair, rows = tl.arange(0, PAIRS)[None, :], tokens.to(tl.int64) * N
    totals = ()
    for _ in tl.static_range(K):
        totals += (tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32),)
    step = tl.num_programs(0) * BLOCK_ROWS
    for first in tl.range(tl.program_id(0) * BLOCK_ROWS, tokens, step, num_stages=STAGES):
        token = first + tl.arange(0, BLOCK_ROWS).to(tl.int64)[:, None]  # [BLOCK_ROWS, 1]
        there = token < tokens
        inside = there & (col < WIDTH)
        gs, shares = (), ()
        for j in tl.static_range(N):
            row = token * N + j
            r = tl.load(inverse + row, mask=there, other=0.0)
            dot = tl.zeros([BLOCK_ROWS, 1], tl.float32)
            for k in tl.static_range(K):
                g = tl.load(grad + (row * grad_row_stride + k * grad_stride), mask=there, other=0.0)
                dot += g * tl.load(products + (k * rows + row), mask=there, other=0.0)
                gs += (g * r,)
            shares += (r * r * dot * (1.0 / WIDTH),)
        if READ:
            dr = tl.load(grad_read + (token * grad_read_stride + col), mask=inside, other=0.0).to(tl.float32)
        ds = ()
        for j in tl.static_range(N):
            x = tl.load(written + (token * (N * WIDTH) + (j * WIDTH + col)), mask=inside, other=0.0).to(tl.float32)
            d = -x * shares[j]
            if CARRIED:
                place = token * carried_strides[0] + (j * carried_strides[1] + col)
                d += tl.load(carried + place, mask=inside, other=0.0).to(tl.float32)
            if READ:
                d += tl.load(factors + (token * factor_stride + j * factor_step), mask=there, other=0.0) * dr
            new = ()
            for k in tl.static_range(K):
                place, g = col * weight_strides[0] + k * weight_strides[1], gs[j * K + k]
                d += g * tl.load(weight + place, mask=col < WIDTH, other=0.0)
                new += (totals[k] + g * x,)
            totals = new
            ds += (d,)
        dots = tl.zeros([BLOCK_ROWS, PAIRS], tl.float32)  # stored together, as each store waits for the warps
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
                dots = tl.where(pair == j * TERMS + i, tl.sum(x * ds[j], 1, keep_dims=True), dots)
            if i < N:
                tl.store(grad_streams + (token * (N * WIDTH) + (i * WIDTH + col)), dx, mask=inside)
            else:
                tl.store(grad_branches[i - N] + (token * WIDTH + col), dx, mask=inside)
        place = (tl.program_id(1).to(tl.int64) * tokens + token) * (N * TERMS) + pair
        tl.store(table_partials + place, dots, mask=there & (pair < N * TERMS))
    for k in tl.static_range(K):
        place = (tl.program_id(0).to(tl.int64) * K + k) * WIDTH + col
        tl.store(weight_partials + place, tl.sum(totals[k], 0, keep_dims=True), mask=col < WIDTH)


def forward(
    streams: Tensor, branches: Sequence[Tensor], table: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """`operators.write_and_project`, with new streams in ``dtype``."""
    fitted = _fitted_forward(metadata(streams), tuple(map(metadata, branches)), metadata(weight), eps)
    most, rows = weight.shape[1], streams.shape[:-1]
    written = torch.empty(streams.shape, dtype=dtype, device=streams.device)
    products = torch.empty(most, *rows, dtype=torch.float32, device=streams.device)
    inverse = torch.empty(rows.numel(), dtype=torch.float32, device=streams.device)
    fitted.kernel((*fitted.even(streams, *branches), table.contiguous(), weight, written, products, inverse))
    return written, products.movedim(0, -1), inverse


@functools.lru_cache(MOST_KEPT)
def _fitted_forward(streams: Metadata, branches: tuple[Metadata, ...], weight: Metadata, eps: float) -> Fitted:
    copied, numbers = _terms(streams, branches)
    numbers |= {"weight_strides": weight.strides, "eps": eps}
    constants = _constants(FORWARD, streams, weight) | {"VECTOR": VECTOR}
    programs = -(-numbers["tokens"] // constants["BLOCK_ROWS"])
    kernel = by_hand(write_forward, (programs,), streams.device, numbers, constants, branches=len(branches))
    return Fitted(kernel, copied, (programs, 1))


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
    """`operators.write_and_project_backward`, for tensors as `forward` takes and returns them."""
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
    """The kernel of `write_backward` for tensors like these; ``grad`` is [rows, K], ``factors`` [tokens, n]."""
    copied, numbers = _terms(streams, branches)
    n, width = streams.shape[-2:]
    constants = _constants(BACKWARD, streams, weight)
    constants["PAIRS"] = triton.next_power_of_2(n * (n + len(branches)))
    constants |= {"CARRIED": carried is not None, "READ": grad_read is not None}
    of_carried = None if carried is None else stream_strides(carried)
    of_read = None if grad_read is None else row_stride(grad_read.shape, grad_read.strides)
    numbers |= {"weight_strides": weight.strides}
    numbers |= {"carried_strides": of_carried or (n * width, width)}
    numbers |= {"grad_read_stride": width if of_read is None else of_read}
    numbers["grad_row_stride"], numbers["grad_stride"] = grad.strides
    numbers["factor_stride"], numbers["factor_step"] = (0, 0) if factors is None else factors.strides
    col_programs = -(-width // constants["BLOCK_COLS"])
    programs = min(-(-numbers["tokens"] // constants["BLOCK_ROWS"]), max(1, PROGRAMS // col_programs)), col_programs
    copied += (carried is not None and of_carried is None, grad_read is not None and of_read is None)
    several = {"branches": len(branches), "grad_branches": len(branches)}
    return Fitted(by_hand(write_backward, programs, streams.device, numbers, constants, **several), copied, programs)


def _terms(streams: Metadata, branches: tuple[Metadata, ...]) -> tuple[tuple[bool, ...], dict[str, Any]]:
    """Which of streams and branches have to be copied; and the kernels' arguments for strides and sizes."""
    *lead, n, width = streams.shape
    strides, of_branches = stream_strides(streams), [row_stride(x.shape, x.strides) for x in branches]
    numbers = {
        "stream_strides": strides or (n * width, width),
        "branch_strides": tuple([width if stride is None else stride for stride in of_branches]),
        "tokens": math.prod(lead),
    }
    return (strides is None, *(stride is None for stride in of_branches)), numbers


def _constants(tile: tuple[int, int, int, int], streams: Metadata, weight: Metadata) -> dict[str, Any]:
    (n, width), (rows, cols, warps, stages) = streams.shape[-2:], tile
    constants = {"N": n, "K": weight.shape[1], "WIDTH": width, "STAGES": stages}
    return constants | {"BLOCK_ROWS": rows, "BLOCK_COLS": cols, "num_warps": warps, "enable_fp_fusion": True}
