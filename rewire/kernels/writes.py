"""A write of hyper-connections and what is read off the new streams, as one Triton kernel.

The next unit's gates are made of products of the streams that this one writes. The kernel has those in registers: it
saves `projection.forward` its pass over them.
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

from rewire.kernels.arguments import Layout, layout, row_stride
from rewire.kernels.grid import MOST_PLANS, Code, Kernel
from rewire.kernels.projection import PRECISION

#: Rows and columns of a tile, and warps, by the bytes of an element: what registers and shared memory hold for up to
#: `operators.MOST_WRITTEN` streams and `operators.MOST_PRODUCTS` products.
TILES = {2: (64, 32, 8), 4: (32, 16, 4)}


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
            at: tl.constexpr = j if EACH else 0
            total = tl.dot(y, w, sums[at], input_precision=PRECISION)
            square = squares[at] + tl.sum(y * y, 1, keep_dims=True)
            sums = sums[:at] + (total,) + sums[at + 1 :]
            squares = squares[:at] + (square,) + squares[at + 1 :]
    for j in tl.static_range(OF_TOKEN):
        row = token * OF_TOKEN + j
        r = tl.rsqrt(squares[j] / (N * WIDTH // OF_TOKEN) + eps)
        tl.store(inverse + row, r, mask=token < tokens)
        place = k.to(tl.int64) * (tokens * OF_TOKEN) + row
        tl.store(products + place, sums[j] * r, mask=(token < tokens) & (k < K))


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
    kernel, copied = _plan(layout(streams), tuple(map(layout, branches)), layout(weight), eps, dtype.itemsize)
    (*lead, n, width), (channels, most) = streams.shape, weight.shape
    rows = lead if channels > width else [*lead, n]
    numbers = {"dtype": torch.float32, "device": streams.device}
    written = torch.empty(streams.shape, dtype=dtype, device=streams.device)
    products = torch.empty(most, *rows, **numbers)  # type: ignore[call-overload]
    inverse = torch.empty(math.prod(rows), **numbers)  # type: ignore[call-overload]
    states = [x.contiguous() if copy else x for x, copy in zip((streams, *branches), copied, strict=True)]
    kernel((*states, table.contiguous(), weight, written, products, inverse))
    return written, products.movedim(0, -1), inverse


@functools.lru_cache(MOST_PLANS)
def _plan(
    streams: Layout, branches: tuple[Layout, ...], weight: Layout, eps: float, itemsize: int
) -> tuple[Kernel, tuple[bool, ...]]:
    """The kernel, and whether streams and branches have to be copied, their rows not being even."""
    (*lead, n, width), (*along, step, last) = streams.shape, streams.strides
    (channels, most), tokens = weight.shape, math.prod(lead)
    of_tokens = row_stride((*lead, width), (*along, last))
    even = of_tokens is not None and row_stride((n, width), (step, last)) is not None
    of_branches = [row_stride(x.shape, x.strides) for x in branches]
    numbers: dict[str, Any] = {
        "stream_strides": (of_tokens, step) if even else (n * width, width),
        "branch_strides": tuple([width if stride is None else stride for stride in of_branches]),
        "weight_strides": weight.strides,
        "tokens": tokens,
        "K": most,
        "eps": eps,
    }
    rows, cols, warps = TILES[itemsize]
    constants = {"N": n, "WIDTH": width, "EACH": channels == width, "PRECISION": PRECISION}
    constants |= {"BLOCK_ROWS": rows, "BLOCK_COLS": cols, "BLOCK_K": max(16, 1 << (most - 1).bit_length())}
    constants |= {"num_warps": warps, "enable_fp_fusion": True}
    code = Code(lambda: write_forward, (-(-tokens // rows), 1, 1), constants)
    first, *others = range(1 + len(branches), 6 + len(branches))
    places: dict[str, Any] = {"streams": 0, "branches": tuple(range(1, first)), "table": first}
    places |= dict(zip(("weight", "written", "products", "inverse"), others, strict=True))
    return Kernel(code, streams.device, places, numbers), (not even, *(stride is None for stride in of_branches))
