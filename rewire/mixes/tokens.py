"""Projections of tokens, from which input-dependent connection weights are computed: in float32, even under autocast.

On GPUs a projection is one kernel each for forward and backward (`projection`); elsewhere torch's matrix products.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rewire.kernels import operators, switch
from rewire.kernels.cpu import plain
from rewire.kernels.cpu import sinkhorn as sinkhorn_cpu
from rewire.mixes.again import spared
from rewire.mixes.autograd import by_product, by_torch, gradients, left_to_autograd, under_transforms
from rewire.mixes.claims import added_up, by_read, claim_on
from rewire.mixes.traced import whole_in_graphs


def outside_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A context without autocast, which does nothing if autocast is off.

    The meta device has no autocast, and torch.export cannot load an empty region, such as a frozen topology's. Dynamo
    of torch 2.11 cannot trace the check whether a device has autocast.
    """
    kind = device.type
    there = kind != "meta" if torch.compiler.is_compiling() else torch.amp.is_autocast_available(kind)
    on = there and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if on else contextlib.nullcontext()


def project(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight`` in float32 (float64 for float64), outside autocast.

    Args:
        x: [..., D], any floating dtype.
        weight: float32 [D, K].

    Returns:
        [..., K], float32 or float64.
    """
    return read_off(x, weight)[0]


def project_normed(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """``project(rms_norm(x, eps), weight)``."""
    return read_off(x, weight, eps)[0]


@spared
def read_off(x: Tensor, weight: Tensor, eps: float | None = None, clamped: bool = False) -> tuple[Tensor, Tensor]:
    """`project`, or with ``eps`` `project_normed`; and ``x`` for the next read.

    With ``clamped``, negative scores become zero, with derivative 1 at zero: relu's is 0 there, and weights that start
    at zero would never learn. Gradients of later reads of ``x`` are added in the same backward pass over memory.
    """
    if x.dim() > 1 and by_product(x):  # nothing is kept
        return plain.project(x, weight, eps, clamped)[0], x
    with outside_autocast(x.device):
        # However small x is: autograd would call more operations, each way.
        if x.dim() > 1 and weight.shape[1] > 0 and not left_to_autograd(x, math.inf):
            if not (torch.is_grad_enabled() or by_kernels(x, weight)):  # nothing is kept
                return plain.project(x, weight, eps, clamped)[0], x
            scores, x = read_off_at_once(x, weight, eps, clamped, 0, None)
            return scores, x
        return by_autograd(x, weight, eps, clamped), x


def read_off_apart(
    x: Tensor, weight: Tensor, first: int, eps: float | None = None, clamped: bool = False
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """`read_off`, which also returns the first scores and the others as separate tensors with separate gradients.

    Args:
        x, weight, eps, clamped: as in `read_off`.
        first: number of first scores; if it is none or all, all scores are returned three times.
    """
    alone = not 0 < first < weight.shape[1]
    if alone or x.dim() < 2 or torch.compiler.is_compiling() or left_to_autograd(x, math.inf):
        scores, x = read_off(x, weight, eps, clamped)
        parts = (scores, scores) if alone else scores.split([first, weight.shape[1] - first], -1)
        return (scores, *parts), x
    with outside_autocast(x.device):
        scores, x, near, later = read_off_at_once(x, weight, eps, clamped, first, None)
    return (scores, near, later), x


def read_off_hidden(x: Tensor, weight: Tensor, out: Tensor, static: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``gelu(rms_norm(x) @ weight) @ out + static``; and ``x`` for the next read.

    Args:
        x: [..., D].
        weight: float32 [D, K].
        out: float32 [K, K].
        static: float32 [K].
        eps: epsilon of the norm.

    Returns:
        float32 or float64 [..., K], and [..., D].
    """
    known = x.dim() > 1 and len(out) <= operators.MOST_HIDDEN and by_kernels(x, weight)
    if known and not left_to_autograd(x, math.inf):
        with outside_autocast(x.device):
            return read_off_hidden_at_once(x, weight, out, static, eps)
    hidden, x = read_off(x, weight, eps)
    return project(F.gelu(hidden), out) + static, x


@whole_in_graphs
def read_off_hidden_at_once(
    x: Tensor, weight: Tensor, out: Tensor, static: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`read_off_hidden` by kernels."""
    scores, x = _ReadOffHidden.apply(x, weight, out, static, eps)
    return scores, x


class _ReadOffHidden(torch.autograd.Function):
    """`read_off_hidden_at_once`; saves ``x``, the hidden layer, and one number per row for the norm."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, out: Tensor, static: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        ctx.eps = eps
        hidden, inverse = operators.project(x, weight, eps)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, out, static, hidden, inverse)
        return operators.hidden(hidden, out, static), x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, carried: Tensor | None) -> Any:
        x, weight, out, static, hidden, inverse = ctx.saved_tensors
        if grad is None:
            return carried, None, None, None, None
        if by_torch(grad):

            def again(x: Tensor, weight: Tensor, out: Tensor, static: Tensor) -> Tensor:
                return project(F.gelu(by_autograd(x, weight, ctx.eps)), out) + static

            of_x, *others = gradients(again, (x, weight, out, static), grad)
            return added_up([of_x, carried]), *others, None
        of_x, of_weight, *others = operators.hidden_backward(grad, x, weight, out, hidden, inverse, carried)
        return of_x, of_weight.T, *others, None


@whole_in_graphs
def read_off_at_once(
    x: Tensor, weight: Tensor, eps: float | None, clamped: bool, first: int, shape: Sequence[int] | None
) -> list[Tensor]:
    """`read_off`, whose gradients come in one pass over memory.

    With ``first``, also the first scores and the others; with the ``shape`` of a read [..., 1, D] of streams, a claim
    on them.
    """
    return list(_ReadOff.apply(x, weight, eps, clamped, first, shape))


class _ReadOff(torch.autograd.Function):
    """`read_off_at_once`; saves ``x``, with a norm the scores and one number per row, and clamped scores."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        eps: float | None,
        clamped: bool,
        first: int,
        shape: Sequence[int] | None,
    ) -> tuple[Tensor, ...]:
        ctx.eps, ctx.clamped, ctx.first, ctx.by_kernels = eps, clamped, first, by_kernels(x, weight)
        forward = operators.project if ctx.by_kernels else plain.project
        scores, inverse = forward(x, weight, eps, clamped)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, *((scores, inverse) if clamped or eps is not None else ()))
        apart = scores.split([first, weight.shape[1] - first], -1) if first else ()
        return scores, x.view_as(x), *apart, *(() if shape is None else claim_on(x, scores, shape))

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, carried: Tensor | None, *others: Tensor | None) -> Any:
        x, weight, *kept = ctx.saved_tensors
        apart, read = (others[:2], others[2:]) if ctx.first else ((), others)
        grads = _of_scores(grad, apart, ctx.first, weight.shape[1])
        if not grads or by_torch(grads[0]):
            parts, of_weight = [carried, by_read(x, *read)], None
            if grads:
                again = functools.partial(by_autograd, eps=ctx.eps, clamped=ctx.clamped)
                of_x, of_weight = gradients(again, (x, weight), _side_by_side(grads))
                parts.append(of_x)
            return added_up(parts), of_weight, None, None, None, None
        scores, inverse = kept or (grads[0], weight.new_empty(0))
        given = x, weight, scores, inverse, carried
        if ctx.by_kernels:
            of_read, factors = read or (None, None)
            of_x, of_weight = operators.project_backward(grads, *given, of_read, factors, ctx.clamped)
        else:
            of_x, of_weight = plain.project_backward(_side_by_side(grads), *given, ctx.clamped)
        return of_x, of_weight.T, None, None, None, None


def _of_scores(grad: Tensor | None, apart: Sequence[Tensor | None], first: int, count: int) -> list[Tensor]:
    """Gradients of ``count`` scores: one tensor for all, or for the ``first`` ones and for the others; or none."""
    known = [part for part in apart if part is not None]
    if grad is None and len(known) == len(apart):
        return known
    if known:
        sizes, like = (first, count - first), known[0]
        parts = [
            like.new_zeros((*like.shape[:-1], n)) if part is None else part
            for n, part in zip(sizes, apart, strict=True)
        ]
        grad = added_up([grad, torch.cat(parts, -1)])
    return [] if grad is None else [grad]


def _side_by_side(grads: Sequence[Tensor]) -> Tensor:
    return grads[0] if len(grads) == 1 else torch.cat(list(grads), -1)


def by_autograd(x: Tensor, weight: Tensor, eps: float | None, clamped: bool = False) -> Tensor:
    """`project`, or with ``eps`` `project_normed`, by differentiable operations."""
    scores: Tensor
    if torch.compiler.is_dynamo_compiling() or under_transforms():  # torch.compile itself chooses what to keep
        scores = _Project.forward(x, weight) if eps is None else _ProjectNormed.forward(x, weight, eps)
    else:
        scores = _Project.apply(x, weight) if eps is None else _ProjectNormed.apply(x, weight, eps)
    return at_least_zero(scores) if clamped else scores


def at_least_zero(scores: Tensor) -> Tensor:
    """``relu(scores)`` with derivative 1 at 0, where those of relu and, since torch 2.14, of ``clamp`` are 0.

    All scores start at 0, and would stay there.
    """
    return torch.where(scores < 0, 0, scores)


def by_kernels(x: Tensor, weight: Tensor) -> bool:
    """Whether a kernel computes `project`."""
    return weight.dtype == torch.float32 and x.numel() > 0 and switch.uses_kernels(x)


class _Project(torch.autograd.Function):
    """`project`; saves ``x``, and not a float32 copy of it: every read projects every state."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        precision = torch.promote_types(x.dtype, weight.dtype)
        return x.to(precision) @ weight.to(precision)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad_x = (grad @ weight.to(grad.dtype).T).to(x.dtype)
        grad_weight = x.to(grad.dtype).reshape(-1, x.shape[-1]).T @ grad.reshape(-1, grad.shape[-1])
        return grad_x, grad_weight.to(weight.dtype)


class _ProjectNormed(torch.autograd.Function):
    """`project_normed`; neither saves nor recomputes a float32 copy of ``x`` or its norm.

    With ``n = x r`` and ``r = (mean(x^2) + eps)^(-1/2)``, ``dx = r dn - r^3 mean(x dn) x``.
    """

    @staticmethod
    def forward(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        precise = x.to(torch.promote_types(x.dtype, weight.dtype))  # once: gradients are added before they are rounded
        return (precise @ weight.to(precise.dtype)) * inverse_rms(precise, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
        *tensors, ctx.eps = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        like, w, r = x.to(grad.dtype), weight.to(grad.dtype), inverse_rms(x, ctx.eps).to(grad.dtype)
        along = (grad * (like @ w)).sum(-1, keepdim=True) / x.shape[-1]  # mean(x dn)
        scaled = r * grad
        grad_x = (scaled @ w.T).addcmul_(like, -(r**3) * along)
        grad_weight = like.reshape(-1, x.shape[-1]).T @ scaled.reshape(-1, grad.shape[-1])
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


def compiled_sinkhorn(logits: Tensor) -> Any:
    """The module with the compiled loop of Sinkhorn-Knopp, if it takes such matrices; else None."""
    return sinkhorn_cpu if sinkhorn_cpu.fits(logits) else None


def rms_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """``x / sqrt(mean(x^2) + eps)`` over the last dimension, without a learned scale, in float32 or better.

    Args:
        x: [..., D], any floating dtype.
        eps: keeps an all-zero x at zero.

    Returns:
        [..., D], float32 or float64.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * inverse_rms(x, eps)


def inverse_rms(x: Tensor, eps: float = 1e-6) -> Tensor:
    """``1 / sqrt(mean(x^2) + eps)``, the factor of `rms_norm`: [..., 1], float32 or float64."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
