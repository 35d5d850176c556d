"""Gates of hyper-connections as Triton kernels: weights of reads and writes, from a few values per token.

A value is ``z = b + a s``, with b the same for all tokens, a scale a, and s the projection of a token's streams; or
``b + a tanh(s)``. In the first case a token has n values for the read and n for the write, which become sigmoids, and
n n for a matrix, which Sinkhorn-Knopp makes doubly stochastic, with all iterations in registers. The formulas are those
of `rewire.topologies.mhc`, `rewire.topologies.hyper` and `rewire.topologies.manifolds`.

Backward runs the iterations again, keeps the logarithms of all sums, n numbers for each half of an iteration, and
reverses them one by one.
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
from rewire.kernels.kernel import MOST_KEPT, Kernel, by_hand

#: Arguments that change from call to call, or may be unaligned.
_ANY = {"do_not_specialize": ["tokens"], "do_not_specialize_on_alignment": ["static", "scale"]}


# The tanh form: n + 2 values for each stream i, its A_m, A_r and B.


@triton.jit
def _tanh(x):
    """tanh; near zero by its series, where ``1 - 2 / (exp(2 x) + 1)`` would cancel."""
    square = x * x
    series = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0)))
    return tl.where(square < 0.01, series, 1.0 - 2.0 / (tl.exp(2.0 * tl.minimum(x, 20.0)) + 1.0))


@triton.jit
def _place(i, k, N: tl.constexpr):
    """Offset of column k of stream i in a token's table: row j, column i for A_r; column n for B."""
    return tl.where(k <= N, (k - 1) * (N + 1) + i, i * (N + 1) + N)


@triton.jit(**_ANY)
def tanh_forward(
    products,  # float32 [tokens, N, N + 2]
    strides,
    static,  # float32 [N, N + 2]
    scale,  # float32 [N + 2]
    read,  # float32 [tokens, N]
    table,  # float32 [tokens, N, N + 1]
    tokens,
    N: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None, None]
    i, k = tl.arange(0, SIZE)[None, :, None], tl.arange(0, COLUMNS)[None, None, :]
    known = (i < N) & (k < N + 2)
    inside = (token < tokens) & known
    s = tl.load(products + (token * strides[0] + i * strides[1] + k * strides[2]), mask=inside, other=0.0)
    a = tl.load(scale + k, mask=k < N + 2, other=0.0)
    values = tl.load(static + (i * (N + 2) + k), mask=known, other=0.0) + a * _tanh(s)
    tl.store(read + (token * N + i + 0 * k), values, mask=inside & (k == 0))
    tl.store(table + (token * (N * (N + 1)) + _place(i, k, N)), values, mask=inside & (k > 0))


@triton.jit(**_ANY)
def tanh_backward(
    products,  # float32 [tokens, N, N + 2]
    strides,
    static,  # float32 [N, N + 2]
    scale,  # float32 [N + 2]
    grad_read,  # float32 [tokens, N]
    grad_table,  # float32 [tokens, N, N + 1]
    grad_products,  # float32, as products
    grad_strides,
    partials,  # float32 [programs, N + 1, N + 2]: sums for the static values and for the scale
    tokens,
    N: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None, None]
    i, k = tl.arange(0, SIZE)[None, :, None], tl.arange(0, COLUMNS)[None, None, :]
    inside = (token < tokens) & (i < N) & (k < N + 2)
    place = token * strides[0] + i * strides[1] + k * strides[2]
    t = _tanh(tl.load(products + place, mask=inside, other=0.0))
    g = tl.load(grad_read + (token * N + i + 0 * k), mask=inside & (k == 0), other=0.0)
    g += tl.load(grad_table + (token * (N * (N + 1)) + _place(i, k, N)), mask=inside & (k > 0), other=0.0)
    a = tl.load(scale + k, mask=k < N + 2, other=0.0)
    place = token * grad_strides[0] + i * grad_strides[1] + k * grad_strides[2]
    tl.store(grad_products + place, a * g * (1.0 - t * t), mask=inside)
    whole = partials + tl.program_id(0).to(tl.int64) * ((N + 1) * (N + 2))
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, COLUMNS)
    known = (row < N) & (column[None, :] < N + 2)
    tl.store(whole + (row * (N + 2) + column[None, :]), tl.sum(g, 0), mask=known)
    tl.store(whole + (N * (N + 2) + column), tl.sum(tl.sum(g * t, 0), 0), mask=column < N + 2)


# The sigmoid form: n values for the read, n for the write, and the logits of a matrix, row by row.


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-tl.maximum(x, -80.0)))  # the exponential would overflow


@triton.jit
def _log_sum(x, floor, dim: tl.constexpr, FLOORED: tl.constexpr):
    """Logarithm of (the sum of ``exp(x)`` along a dimension, plus eps = ``exp(floor)``)."""
    largest = tl.max(x, dim, keep_dims=True)
    total = tl.log(tl.sum(tl.exp(x - largest), dim, keep_dims=True)) + largest
    return _log_add(total, floor) if FLOORED else total


@triton.jit
def _log_add(x, floor):
    largest = tl.maximum(x, floor)
    return largest + tl.log(tl.exp(x - largest) + tl.exp(floor - largest))


@triton.jit
def _real(x, N: tl.constexpr, SIZE: tl.constexpr):
    """``x`` with large negative logarithms in the padding beyond N; not -inf, as differences would be NaN."""
    row, col = tl.arange(0, SIZE)[None, :, None], tl.arange(0, SIZE)[None, None, :]
    return tl.where((row < N) & (col < N), x, -1e30) if N < SIZE else x


@triton.jit
def _loaded(products, static, scale, column, strides, token, inside):
    """The products of a tile of tokens and columns, their scales, and the values."""
    s = tl.load(products + (token * strides[0] + column * strides[1]), mask=inside, other=0.0)
    a = tl.load(scale + (column + 0 * token), mask=inside, other=0.0)
    return s, a, tl.load(static + (column + 0 * token), mask=inside, other=0.0) + a * s


@triton.jit(**_ANY)
def sinkhorn_forward(
    products,  # float32 [tokens, 2 N + N N]
    strides,
    static,  # float32 [2 N + N N]
    scale,  # float32 [2 N + N N]
    read,  # float32 [tokens, N]
    table,  # float32 [tokens, N, N + 1]
    tokens,
    eps,
    floor,
    magnitude,
    N: tl.constexpr,
    ITERATIONS: tl.constexpr,
    FLOORED: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    token, i = first + tl.arange(0, BLOCK)[:, None], tl.arange(0, SIZE)[None, :]
    inside = (token < tokens) & (i < N)
    of_token = table + token * (N * (N + 1))
    _, _, z = _loaded(products, static, scale, i, strides, token, inside)
    tl.store(read + (token * N + i), _sigmoid(z) + eps, mask=inside)
    _, _, z = _loaded(products, static, scale, N + i, strides, token, inside)
    tl.store(of_token + (i * (N + 1) + N), magnitude * _sigmoid(z), mask=inside)

    token = first + tl.arange(0, BLOCK)[:, None, None]
    row, col = tl.arange(0, SIZE)[None, :, None], tl.arange(0, SIZE)[None, None, :]
    inside = (token < tokens) & (row < N) & (col < N)
    _, _, x = _loaded(products, static, scale, 2 * N + row * N + col, strides, token, inside)
    x = _real(x, N, SIZE)
    x -= _log_sum(x, floor, 1, False)
    if FLOORED:
        x = _log_add(x, floor)
    x = _real(x, N, SIZE)
    x = _real(x - _log_sum(x, floor, 2, FLOORED), N, SIZE)
    for _ in range(ITERATIONS - 1):
        x = _real(x - _log_sum(x, floor, 1, FLOORED), N, SIZE)
        x = _real(x - _log_sum(x, floor, 2, FLOORED), N, SIZE)
    tl.store(table + (token * (N * (N + 1)) + row * (N + 1) + col), tl.exp(x), mask=inside)


@triton.jit(**_ANY)
def sinkhorn_backward(
    products,  # float32 [tokens, 2 N + N N]
    strides,
    static,  # float32 [2 N + N N]
    scale,  # float32 [2 N + N N]
    grad_read,  # float32 [tokens, N]
    grad_table,  # float32 [tokens, N, N + 1]
    grad_products,  # float32, as products
    grad_strides,
    partials,  # float32 [programs, 2, 2 N + N N]: sums for the static values and for the scale
    tokens,
    floor,
    magnitude,
    N: tl.constexpr,
    ITERATIONS: tl.constexpr,
    FLOORED: tl.constexpr,
    SIZE: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    columns: tl.constexpr = 2 * N + N * N
    partials += tl.program_id(0).to(tl.int64) * (2 * columns)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    token, i = first + tl.arange(0, BLOCK)[:, None], tl.arange(0, SIZE)[None, :]
    inside = (token < tokens) & (i < N)
    for part in tl.static_range(2):  # the read, then the write
        column = part * N + i
        s, a, z = _loaded(products, static, scale, column, strides, token, inside)
        if part == 0:
            g = tl.load(grad_read + (token * N + i), mask=inside, other=0.0)
        else:
            g = magnitude * tl.load(grad_table + ((token * N + i) * (N + 1) + N), mask=inside, other=0.0)
        share = _sigmoid(z)
        g *= share * (1.0 - share)
        tl.store(grad_products + (token * grad_strides[0] + column * grad_strides[1]), a * g, mask=inside)
        tl.store(partials + column, tl.sum(g, 0, keep_dims=True), mask=i < N)
        tl.store(partials + columns + column, tl.sum(g * s, 0, keep_dims=True), mask=i < N)

    token = first + tl.arange(0, BLOCK)[:, None, None]
    row, col = tl.arange(0, SIZE)[None, :, None], tl.arange(0, SIZE)[None, None, :]
    known = (row < N) & (col < N)
    inside, column = (token < tokens) & known, 2 * N + row * N + col
    s, a, x = _loaded(products, static, scale, column, strides, token, inside)
    x = _real(x, N, SIZE)
    first_step = _real(x - _log_sum(x, floor, 1, False), N, SIZE)
    x = first_step
    if FLOORED:
        x = _real(_log_add(first_step, floor), N, SIZE)
    padded = x
    # The logarithms that each half of an iteration subtracts; entry t is for iteration t.
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
    place = (token * N + row) * (N + 1) + col
    g = tl.load(grad_table + place, mask=inside, other=0.0) * tl.exp(x)
    for back in range(ITERATIONS):
        t = ITERATIONS - 1 - back
        g -= tl.exp(x) * tl.sum(g, 2, keep_dims=True)
        x += tl.permute(tl.sum(tl.where(step == t, of_rows, 0.0), 1, keep_dims=True), (0, 2, 1))
        if t > 0:
            g -= tl.exp(x) * tl.sum(g, 1, keep_dims=True)
            x += tl.sum(tl.where(step == t, of_columns, 0.0), 1, keep_dims=True)
    if FLOORED:
        g *= tl.exp(first_step - padded)
    g -= tl.exp(first_step) * tl.sum(g, 1, keep_dims=True)
    tl.store(grad_products + (token * grad_strides[0] + column * grad_strides[1]), a * g, mask=inside)
    tl.store(partials + column, tl.sum(g, 0, keep_dims=True), mask=known)
    tl.store(partials + columns + column, tl.sum(g * s, 0, keep_dims=True), mask=known)


def forward(
    products: Tensor, static: Tensor, scale: Tensor, n: int, iterations: int, eps: float, magnitude: float
) -> tuple[Tensor, Tensor]:
    """`operators.gates`."""
    lead = products.shape[: -1 if iterations else -2]
    by_token = products.reshape(-1, *products.shape[len(lead) :])
    read = torch.empty(*lead, n, 1, dtype=torch.float32, device=products.device)
    table = torch.empty(*lead, n, n + 1, dtype=torch.float32, device=products.device)
    kernel, *_ = _fitted(metadata(by_token), n, iterations, eps, magnitude, False)
    kernel((by_token, static.contiguous(), scale.contiguous(), read, table))
    return read, table.mT


def backward(
    grad_read: Tensor,
    grad_write: Tensor,
    products: Tensor,
    static: Tensor,
    scale: Tensor,
    iterations: int,
    eps: float,
    magnitude: float,
) -> tuple[Tensor, Tensor]:
    """`operators.gates_backward`."""
    by_token, columns = products.reshape(-1, *products.shape[-1 if iterations else -2 :]), scale.shape[0]
    kernel, programs, strides = _fitted(metadata(by_token), grad_read.shape[-2], iterations, eps, magnitude, True)
    found = torch.empty_strided(by_token.shape, strides, dtype=torch.float32, device=products.device)
    partials = torch.empty(programs, 1 + static.numel() // columns, columns, dtype=torch.float32, device=found.device)
    given = (by_token, static.contiguous(), scale.contiguous(), grad_read.contiguous(), grad_write.mT.contiguous())
    kernel((*given, found, partials))
    return found.view(products.shape), partials[0] if programs == 1 else partials.sum(0)


@functools.lru_cache(MOST_KEPT)
def _fitted(
    products: Metadata, n: int, iterations: int, eps: float, magnitude: float, backward: bool
) -> tuple[Kernel, int, tuple[int, ...]]:
    """The kernel for products of all tokens, which takes tensors in the order of its parameters; its number of
    programs; and the strides of the products' gradient.
    """
    tokens, size = products.shape[0], 1 << (n - 1).bit_length()
    numbers: dict[str, Any] = {"strides": products.strides, "tokens": tokens, "N": n}
    strides = _dense(products)
    numbers |= {"grad_strides": strides} if backward else {}
    constants: dict[str, Any] = {"SIZE": size, "num_warps": 4}
    if iterations:
        floor, steps = math.log(eps) if eps > 0 else 0.0, 1 << (iterations - 1).bit_length()
        numbers |= {"floor": floor, "magnitude": magnitude, "ITERATIONS": iterations}
        numbers |= {} if backward else {"eps": eps}
        constants["num_warps"] = warps = 4 if size <= 4 else 1  # a larger matrix's sums would cross several warps
        block = max(1, min(64, 512 * warps // (size * (steps if backward else size))))
        constants |= {"FLOORED": eps > 0, "BLOCK": block} | ({"STEPS": steps} if backward else {})
        jit = sinkhorn_backward if backward else sinkhorn_forward
    else:
        columns = 1 << (n + 1).bit_length()
        block = max(1, 2048 // (size * columns))
        constants |= {"COLUMNS": columns, "BLOCK": block}
        jit = tanh_backward if backward else tanh_forward
    programs = -(-tokens // block)
    return by_hand(jit, (programs,), products.device, numbers, constants), programs, strides


def _dense(x: Metadata) -> tuple[int, ...]:
    """Strides of a dense tensor whose dimensions have the memory order of those of ``x``."""
    strides, step = [0] * len(x.shape), 1
    for dim in sorted(range(len(x.shape)), key=lambda dim: (x.strides[dim], -dim)):
        strides[dim], step = step, step * max(1, x.shape[dim])
    return tuple(strides)
