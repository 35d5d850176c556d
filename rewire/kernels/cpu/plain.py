"""Mixes and their gradients in plain torch, without autograd: what eager mode runs without a kernel.

The compiled loop of `native` gets the tensors that it supports. In torch a sum is accumulated for a block of rows at a
time: the accumulator stays in the cache while the sources are read, and copies for another dtype or stride are no
larger than a block.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rewire.kernels.cpu import native

#: Elements of a block per thread. Smaller blocks cost more in calls than they save in the cache.
PER_THREAD = 1 << 18
#: Elements that a sum has to read for hand-written gradients to pay. Below, their calls cost more than the passes over
#: memory that they save, and `mix` leaves the sum to autograd.
WORTHWHILE = 1 << 18


@torch.no_grad()
def combine(
    sources: Sequence[Tensor], weights: Tensor | None, added: Sequence[Tensor] = (), scores: Sequence[Tensor] = ()
) -> Tensor:
    """``sum_k (w_k + s_k) x_k + sum_j f_j``, accumulated in float32 (float64 for float64) and rounded once.

    Shapes broadcast: sources [..., 1, D] with scores [..., M, 1] give [..., M, D].

    Args:
        sources: N tensors x_k [..., D] of any strides and floating dtypes.
        weights: float32 [N] or, per channel, [N, D]; None: only scores count.
        added: tensors f_j [..., D].
        scores: weights per token, none or N tensors [..., 1].

    Returns:
        A new tensor [..., D] in the dtype that plain adds of sources and added would have.
    """
    compiled = _in_one_pass(sources, weights, added, scores)
    if compiled is not None:
        return compiled[0]
    sources, added, scores = _of_one_shape(sources, added, scores)
    tensors = (*sources, *added)
    result = torch.empty_like(tensors[0], dtype=functools.reduce(torch.promote_types, [x.dtype for x in tensors]))
    factors = () if weights is None else _factors(weights, scalar=weights.dim() == 1)
    if scores and weights is not None and weights.dim() == 1:  # w + s is small, and saves a pass over the sources
        precision = torch.promote_types(result.dtype, torch.float32)
        scores, factors = [s.to(precision) + w for s, w in zip(scores, factors, strict=True)], ()
    for (out,), xs, fs, ss in _blocks([result], sources, added, scores):
        total = _Total(out, fs)
        for x, factor in (*zip(xs, factors, strict=False), *zip(xs, ss, strict=False)):
            total.add(x, factor)
        total.store()
    return result


@torch.no_grad()
def combine_with_dots(
    grads: Sequence[Tensor], states: Sequence[Tensor], weights: Tensor, added: Sequence[Tensor] = ()
) -> tuple[list[Tensor], Tensor]:
    """Gradients of M states that n mixes read: ``dx_m = sum_t w_mt g_t + sum_j a_j``, ``dw_mt = <x_m, g_t>``.

    Each gradient is added, and multiplied by the states, while it is in the cache. With n = 1 this is the backward of
    one mix of M sources.

    Args:
        grads: n gradients g_t [..., D] of the mixes; at least one.
        states: M tensors x_m [..., D], of one dtype.
        weights: float32 [M, n] or, per channel, [M, n, D].
        added: gradients a_j [..., D] of other uses: any number for a single state; else one for each, or none.

    Returns:
        The gradients of the states, in their dtype; those of the weights, in the shape of ``weights``, float32 (float64
        for float64 states).
    """
    to_all, to_each = (added, ()) if len(states) == 1 else ((), added)
    compiled = native.sums(grads, weights, weights.dim() == 3, to_all, states, carried=to_each)
    if compiled is not None:
        return compiled[:-1], compiled[-1]
    results, dots = [torch.empty_like(x) for x in states], []
    factors = _factors(weights, scalar=weights.dim() == 2)
    as_factor, product = (_flat, torch.dot) if weights.dim() == 2 else (_rows, _by_channel)
    for outs, xs, gs, fs in _blocks(results, states, grads, added):
        totals = [_Total(out, fs if len(outs) == 1 else fs[m : m + 1]) for m, out in enumerate(outs)]
        xs = [as_factor(x.to(total.dtype)) for x, total in zip(xs, totals, strict=True)]
        for t, g in enumerate(gs):
            g = _converted(g, totals[0].dtype)
            y = as_factor(g)
            for x, total, row in zip(xs, totals, factors, strict=True):
                total.add(g, row[t])
                dots.append(product(x, y))
        for total in totals:
            total.store()
    by_block = torch.stack(dots).view(-1, *reversed(weights.shape[:2]), *weights.shape[2:])
    total_dots = by_block[0] if len(by_block) == 1 else by_block.sum(0)
    return results, total_dots.transpose(0, 1)


@torch.no_grad()
def combine_with_token_dots(
    grads: Sequence[Tensor],
    states: Sequence[Tensor],
    weights: Tensor | None,
    scores: Tensor,
    added: Sequence[Tensor] = (),
) -> tuple[list[Tensor], Tensor | None, Tensor]:
    """`combine_with_dots` for mixes that also have weights per token.

    Args:
        grads, states: as in `combine_with_dots`.
        added: any number for a single state; else one for each, or none.
        weights: float32 [M, n] or [M, n, D]; None: zero.
        scores: weights per token, [..., M, n].

    Returns:
        The gradients of the states; those of the weights, if given; those of the scores, in their dtype.
    """
    per_channel = weights is not None and weights.dim() == 3
    to_all, to_each = (added, ()) if len(states) == 1 else ((), added)
    compiled = native.sums(grads, weights, per_channel, to_all, states, scores, to_each)
    if compiled is not None:
        *by_channel, by_token = compiled[len(states) :]
        of_weights = by_channel[0] if per_channel else native.over_tokens(by_token, 2)
        return compiled[: len(states)], None if weights is None else of_weights.to(weights.dtype), by_token
    dx, of_channels, of_tokens = list[Tensor](), list[Tensor](), list[Tensor]()
    for m, x in enumerate(states):
        row = None if weights is None else weights[m]
        carried = added if len(states) == 1 else added[m : m + 1]
        dx.append(combine(grads, row, carried, scores[..., m, :].split(1, -1)).to(x.dtype))
        for g in grads:  # one at a time, as a product is as large as a state
            product = g.to(torch.promote_types(g.dtype, scores.dtype)) * x
            of_tokens.append(product.sum(-1))
            if weights is not None:
                of_channels.append(native.over_tokens(product, 1) if per_channel else of_tokens[-1].sum())
    of_all = None if weights is None else torch.stack(of_channels).view(weights.shape).to(weights.dtype)
    return dx, of_all, torch.stack(of_tokens, -1).view(scores.shape)


@torch.no_grad()
def combine_backward(
    grad: Tensor, sources: Sequence[Tensor], weights: Tensor | None, scores: Sequence[Tensor]
) -> list[Tensor]:
    """Gradients of `combine` (N sources, the weights if given, the scores), all of one shape or scores [..., 1]."""
    columns = None if weights is None else weights.unsqueeze(1)
    if not scores:
        assert columns is not None
        dx, dots = combine_with_dots([grad], sources, columns)
        return [*dx, dots.squeeze(1)]
    dx, of_weights, of_scores = combine_with_token_dots([grad], sources, columns, torch.stack(list(scores), -2))
    return [*dx, *([] if of_weights is None else [of_weights.squeeze(1)]), *of_scores.unbind(-2)]


@functools.lru_cache(4096)
def constants(numbers: tuple[float, ...], dtype: torch.dtype) -> Tensor:
    """Numbers as a tensor [n] on the CPU; cached, as in decoding each token needs those of all sums again."""
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=dtype, device="cpu")


def project(x: Tensor, weight: Tensor, eps: float | None, clamped: bool = False) -> tuple[Tensor, Tensor]:
    """`operators.project` without gradients; the norm's factor is [..., 1]."""
    if x.dtype != weight.dtype:
        precision = torch.promote_types(x.dtype, weight.dtype)
        x, weight = x.to(precision), weight.to(precision)
    found = x @ weight
    if eps is None:
        inverse = x.new_empty(0)
    else:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        # A GPU's tensors come here without kernels; on a CPU, in decoding, each call counts.
        least = constants((eps,), norm.dtype) if x.is_cpu else norm.new_full((), eps)
        inverse = torch.rsqrt(torch.addcmul(least, norm, norm, value=1 / x.shape[-1]))
        found = found * inverse  # not in place: selective checkpointing may keep the product
    return torch.where(found < 0, -0.0, found + 0.0) if clamped else found, inverse


@torch.no_grad()
def project_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    scores: Tensor,
    inverse: Tensor,
    carried: Tensor | None,
    clamped: bool = False,
) -> tuple[Tensor, Tensor]:
    """`operators.project_backward`.

    For scores ``s = r x W``: ``dx = r g W^T - r^2 mean(g s) x``, where the mean is the sum over s divided by D. g is 0
    for clamped scores.
    """
    rows, precision = x.reshape(-1, x.shape[-1]).to(grad.dtype), grad.dtype
    given, weight = grad.reshape(-1, grad.shape[-1]), weight.to(precision)
    factor = None
    if clamped:
        given = torch.where(scores.reshape(given.shape).signbit(), 0.0, given)
    if inverse.numel() > 0:
        r = inverse.reshape(-1, 1)
        factor = r.square() * (given * scores.reshape(given.shape)).sum(1, keepdim=True) / -rows.shape[1]
        given = given * r
    if carried is None:
        found = given @ weight.T
    else:
        found = torch.addmm(carried.reshape(rows.shape).to(precision), given, weight.T)
    if factor is not None:
        found.addcmul_(rows, factor)
    return found.view(x.shape).to(x.dtype), given.T @ rows


def _in_one_pass(
    terms: Sequence[Tensor],
    weights: Tensor | None,
    added: Sequence[Tensor],
    scores: Sequence[Tensor],
) -> list[Tensor] | None:
    """`native.sums` with one result, and scores [..., 1] for each term."""
    if any(score.shape != (*terms[0].shape[:-1], 1) for score in scores):
        return None
    table = torch.stack(list(scores), -1) if scores else None  # [..., 1, N]
    return native.sums(terms, weights, weights is not None and weights.dim() == 2, added, scores=table)


class _Total:
    """The sum over one block, in float32 or float64.

    Args:
        out: the block of the result; it serves as the accumulator if it has that dtype.
        added: tensors with which the sum starts.
    """

    def __init__(self, out: Tensor, added: Sequence[Tensor]) -> None:
        self.dtype = torch.promote_types(out.dtype, torch.float32)
        self._out = out
        self._accumulator = out if out.dtype == self.dtype else torch.empty_like(out, dtype=self.dtype)
        self._value = added[0].to(self.dtype) if added else None  # saves a pass that fills the accumulator
        for f in added[1:]:
            self.add(f, 1.0)

    def add(self, x: Tensor, factor: float | Tensor) -> None:
        """Add ``factor x``."""
        x, value, accumulator = _converted(x, self.dtype), self._value, self._accumulator
        # Use the returned tensor: selective checkpointing may return another one than the accumulator.
        if value is None:
            self._value = torch.mul(x, factor, out=accumulator)
        elif isinstance(factor, Tensor):
            self._value = torch.addcmul(value, x, factor, out=accumulator)
        else:
            self._value = torch.add(value, x, alpha=factor, out=accumulator)

    def store(self) -> None:
        if self._value is not None and self._value is not self._out:
            self._out.copy_(self._value)


def _factors(weights: Tensor, scalar: bool) -> Any:
    """The weights as nested lists or tensors. Numbers are faster, unless reading them would synchronise a device."""
    return weights.tolist() if scalar and weights.device.type == "cpu" else weights


def _converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.to(dtype)  # the test costs less than a call of ``to``


def _flat(x: Tensor) -> Tensor:
    return x.flatten()


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _by_channel(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(0)


def _of_one_shape(
    sources: Sequence[Tensor], added: Sequence[Tensor], scores: Sequence[Tensor]
) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
    """All arguments broadcast: tensors to [..., D], scores to [..., 1]."""
    shapes = {x.shape for x in (*sources, *added)}
    if len(shapes) == 1 and not scores:
        return sources, added, scores
    shape = torch.broadcast_shapes(*shapes, *[s.shape for s in scores])
    rows = (*shape[:-1], 1)
    return [x.expand(shape) for x in sources], [f.expand(shape) for f in added], [s.expand(rows) for s in scores]


def _blocks(*groups: Sequence[Tensor]) -> Iterator[Sequence[Sequence[Tensor]]]:
    """Blocks of the same rows of all tensors [..., D] or [..., 1], as views, in their groups."""
    first, limit = groups[0][0], PER_THREAD * torch.get_num_threads()
    if first.numel() <= limit or first.dim() < 2:
        yield groups
        return
    tensors = [x for group in groups for x in group]
    if all(x.is_contiguous() for x in tensors):
        tensors = [x.flatten(0, -2) for x in tensors]
    rows = max(1, limit * len(tensors[0]) // first.numel())
    for block in zip(*[x.split(rows) for x in tensors], strict=True):
        pieces = iter(block)
        yield [[next(pieces) for _ in group] for group in groups]
