"""The weighted sum of states from which topologies are built.

It has three lowerings: generated Triton kernels (`operators`), hand-written sums and gradients for CPUs (`plain`), and
plain torch with autograd, which torch.compile fuses on a CPU.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rewire.kernels import operators, switch
from rewire.kernels.cpu import plain
from rewire.kernels.sums.spec import MAX_ADDED, NormKind
from rewire.mixes.again import remember_sums, sparing
from rewire.mixes.autograd import by_product, by_torch, gradients, left_to_autograd, under_transforms
from rewire.mixes.norms import Norm, norm_of, normed
from rewire.mixes.traced import by_operator, whole_in_graphs


def mix(
    sources: Sequence[Tensor],
    weights: Sequence[Tensor | float] | Tensor | None,
    added: Sequence[Tensor] = (),
    scores: Sequence[Tensor] | None = None,
) -> Tensor:
    """``sum_i (w_i + s_i) x_i + sum_k f_k``, accumulated in float32 (float64 for float64) and rounded once.

    The forward holds one accumulator and no weighted copy of a source; backward needs only the sources, which the
    topology keeps anyway.

    Args:
        sources: tensors x_i of one shape [..., D], any floating dtype; at least one.
        weights: one float32 tensor per source, a scalar [] or one per channel [D], or a number (a constant, for which
            backward does not need the source); or all in one tensor [N] or [N, D]. None: only scores count.
        added: tensors f_k that broadcast to the sources' shape, added with weight one (branch outputs).
        scores: weights per token, one float32 tensor [..., 1] per source.

    Returns:
        [..., D] in the dtype that plain adds of sources and added would have.

    Raises:
        ValueError: the numbers of sources and weights differ, or are 0.
    """
    return pending_mix(sources, weights, added, scores).value()


def pending_mix(
    sources: Sequence[Tensor],
    weights: Sequence[Tensor | float] | Tensor | None,
    added: Sequence[Tensor] = (),
    scores: Sequence[Tensor] | None = None,
) -> Mix:
    """`mix`, to be computed later: topologies return it where a norm may follow, so that one kernel computes both."""
    factors, scores = () if weights is None else weights, scores or ()
    if not sources or len(factors) not in (0, len(sources)) or len(scores) not in (0, len(sources)):
        raise ValueError(
            f"mix needs one weight per source, got {len(sources)} sources, {len(factors)} weights and "
            f"{len(scores)} scores."
        )
    if not isinstance(weights, Tensor) and len({getattr(w, "shape", None) for w in factors}) == 1:
        weights = torch.stack(list(weights)) if isinstance(factors[0], Tensor) else weights  # type: ignore[arg-type]
    return Mix(tuple(sources), weights, tuple(scores), tuple(added))


@dataclasses.dataclass(eq=False, slots=True)  # not frozen: this makes __init__ three times as fast
class Mix:
    """A weighted sum that has not been computed yet.

    Attributes:
        sources, weights, scores, added: as in `mix`.
        claims: tensors with arbitrary values that get the sum's gradient, in place of sources and weights: see
            `claimed`.
        accumulator: with claims, a part of the sum that was computed before, float32 [..., D].
        attended: with claims, data of the softmax if the weights are one.
        tallies: with ``attended``, tensors [3, ...] with arbitrary values whose gradients are the tallies.
        again: for a sum of only ``added``, whether backward recomputes it, as these are kept anyway.
    """

    sources: tuple[Tensor, ...] = ()
    weights: Sequence[Tensor | float] | Tensor | None = None
    scores: tuple[Tensor, ...] = ()
    added: tuple[Tensor, ...] = ()
    claims: tuple[Tensor, ...] = ()
    accumulator: Tensor | None = None
    attended: Attended | None = None
    tallies: tuple[Tensor, ...] = ()
    again: bool = False

    def value(self) -> Tensor:
        """The sum, [..., D]."""
        if not (self.sources or self.claims):
            total = self.added[0]
            for f in self.added[1:]:
                total = total + f
            if self.again:
                with sparing(total):
                    remember_sums([total], self.added, (), _added)
            return total
        if len(self.claims) == 0:
            product = _product(self.sources, self.weights, self.scores, self.added)
            if product is not None:
                return product
        if self._left_to_autograd():
            return _by_autograd(self.sources, self.weights, self.scores, self.added)
        computed: Tensor = self._computed(None)
        return computed

    def normed(
        self, module: Callable[[Tensor], Tensor], alone: Callable[[Tensor], Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """The sum, and the output of the norm ``module`` for it: in one kernel if possible, else by ``alone``."""
        norm = fused(module, self._like)
        if norm is None or self._left_to_autograd():
            total = self.value()
            return total, module(total) if alone is None else alone(total)
        both: tuple[Tensor, Tensor] = self._computed(norm)
        return both

    def _computed(self, norm: Norm | None) -> Any:
        shape, added = self._like.shape, self.added
        if len(added) > MAX_ADDED:
            added = (*added[: MAX_ADDED - 1], functools.reduce(torch.add, added[MAX_ADDED - 1 :]))
        added = tuple([f if f.shape == shape else f.expand(shape) for f in added])
        if by_operator():
            return self._in_graph(norm, added)
        scale = () if norm is None else (norm.weight,) if norm.bias is None else (norm.weight, norm.bias)
        kind = None if norm is None else (norm.kind, norm.eps)
        assert self.weights is None or isinstance(self.weights, Tensor)  # sums with numbers are left to autograd
        if len(self.claims) > 0:
            given = _Terms((), (), self.scores, added, self.claims, scale, self.tallies)
            fixed = _Fixed(kind, self.sources, self.weights, self.accumulator, self.attended)
        else:
            weights = () if self.weights is None else (self.weights,)
            given = _Terms(self.sources, weights, self.scores, added, (), scale, ())
            fixed = _Fixed(kind, again=self.again)
        with sparing(self._like):
            return _Sum.apply(tuple([len(terms) for terms in given]), fixed, *[x for terms in given for x in terms])

    def _in_graph(self, norm: Norm | None, added: Sequence[Tensor]) -> Any:
        """`_computed` while Dynamo traces; ``added`` are the terms to use in place of the attribute."""
        assert self.weights is None or isinstance(self.weights, Tensor)
        terms = self.sources, self.weights, self.scores, added, self.claims, self.accumulator
        statistics, states, scores, columns, scaled = self.attended or (None, (), (), (), False)
        of_norm = norm or (None, None, None, 0.0)
        found = mix_of(*terms, statistics, states, scores, columns, scaled, self.tallies, self.again, *of_norm)
        return found[0] if norm is None else (found[0], found[1])

    @property
    def _like(self) -> Tensor:
        return (self.claims or self.sources or self.added)[0]  # not the accumulator: that is float32

    def _left_to_autograd(self) -> bool:
        """Whether the lowerings with hand-written gradients do not support the sum, or do not pay for it."""
        if len(self.claims) > 0:  # the history has decided (len: Dynamo cannot trace a tuple's truth value here)
            return False
        return (
            left_to_autograd(self._like, len(self.sources))
            or not isinstance(self.weights, (Tensor, type(None)))
            or any(x.shape != self.sources[0].shape for x in self.sources)
            or any(s.shape != (*self._like.shape[:-1], 1) for s in self.scores)
        )


def fused(module: Callable[[Tensor], Tensor], x: Tensor) -> Norm | None:
    """The norm ``module`` for kernels, if the kernel that computes a sum like ``x`` can compute it, too."""
    return norm_of(module, x) if switch.uses_kernels(x) and operators.fits_norm(x) else None


class Attended(NamedTuple):
    """Data for the tallies of a `Mix` whose weights are a softmax: see `attended`.

    Attributes:
        statistics: m_t and d_t, [2, ...].
        states: x_i, detached.
        scores: each state's scores for all of its reads, n of [..., m], with their autograd graph.
        columns: index of s_ti among the scores of each state.
        scaled: whether the weights of n states add up to n, not to 1.
    """

    statistics: Tensor
    states: tuple[Tensor, ...]
    scores: tuple[Tensor, ...]
    columns: Sequence[int]
    scaled: bool

    def tally(self, grad: Tensor, total: Tensor, statistics: Tensor) -> Tensor:
        """``(m_t, d_t, e_t)``, [3, ...], from the read's gradient and value, [..., D]."""
        count = len(self.states) if self.scaled else 1
        if by_torch(grad):  # d_t depends on the scores
            statistics = self._softmax()[1]
        elif switch.uses_kernels(grad):
            return operators.tally(grad, total, statistics, count)
        mean = (grad.to(statistics.dtype) * total).sum(-1) / count
        return torch.cat([statistics, mean.unsqueeze(0)])

    def again(self) -> tuple[Tensor, Tensor]:
        """Recompute the read's value and its statistics, if the value was written to after the read."""
        shares, statistics = self._softmax()
        return Mix(self.states, None, shares.unsqueeze(-1).unbind()).value(), statistics

    def _softmax(self) -> tuple[Tensor, Tensor]:
        own = [scores.select(-1, k) for scores, k in zip(self.scores, self.columns, strict=True)]
        return softmax(torch.stack(own), self.scaled)


def softmax(scores: Tensor, scaled: bool) -> tuple[Tensor, Tensor]:
    """Weights of n states, [n, ...], from their scores [n, ...]; and m_t and d_t, [2, ...].

    If all scores are equal, weights that add up to n are exactly 1.
    """
    largest = scores.detach().amax(0)
    numerators = (scores - largest).exp()
    # In this order: n / n is exactly 1, n * (1 / n) is not.
    divisor = numerators.sum(0) / (len(scores) if scaled else 1)
    return numerators / divisor, torch.stack([largest, divisor])


def _by_autograd(
    sources: Sequence[Tensor],
    weights: Sequence[Tensor | float] | Tensor | None,
    scores: Sequence[Tensor],
    added: Sequence[Tensor],
) -> Tensor:
    """The sum in plain torch operations."""
    dtype = _plain_dtype(*sources, *added)
    factors = [] if weights is None else list(weights.unbind() if isinstance(weights, Tensor) else weights)
    terms = [*zip(sources, factors, strict=False), *zip(sources, scores, strict=False)]
    precision = torch.promote_types(dtype, torch.float32)
    if torch.compiler.is_compiling():  # in the form that Inductor fuses best, forward and backward
        (x, w), *others = terms
        total = x.to(precision) * w
        for term in [*[x.to(precision) * w for x, w in others], *added]:
            total = total + term
        return total.to(dtype)
    # A weight of shape [1] takes part in type promotion (of shape [] it would not): a bfloat16 source times
    # it is float32, with no float32 copy of the source kept for backward.
    seen = switch.listened() or under_transforms()
    addcmul, add = (torch.addcmul, torch.add) if seen else (Tensor.addcmul_, Tensor.add_)
    result = _scaled(*terms[0], precision)
    for source, weight in terms[1:]:
        if isinstance(weight, Tensor):
            result = addcmul(result, source, _dimensional(weight))
        else:
            result = add(result, source, alpha=weight)
    for branch in added:
        result = add(result, branch)
    return result.to(dtype)


def _product(
    sources: Sequence[Tensor], weights: object, scores: Sequence[Tensor], added: Sequence[Tensor]
) -> Tensor | None:
    """The sum as one matrix product and plain adds, if it has few elements and this is as exact."""
    x = sources[0]
    if not by_product(x):
        return None
    shape, dtype = x.shape, x.dtype
    for other in sources:
        if other.shape != shape or other.dtype != dtype:
            return None
    for f in added:
        if f.dtype != dtype and torch.promote_types(dtype, f.dtype) != dtype:
            return None
    if isinstance(weights, (list, tuple)) and len(weights) > 3 and all(type(w) is float for w in weights):
        weights = plain.constants(tuple(weights), dtype)
    if weights is not None and not (isinstance(weights, Tensor) and weights.dim() in (1, 2)):
        return None
    if any(s.shape != (*shape[:-1], 1) for s in scores):
        return None
    if weights is not None and weights.dim() == 2:  # one per channel
        factors = torch.stack(tuple(scores), -2) + weights if scores else weights
        product = (torch.stack(tuple(sources), -2) * factors).sum(-2, dtype=dtype)
    elif scores:
        table = torch.cat(tuple(scores), -1)
        product = summed_by_product(sources, table if weights is None else table + weights)
    else:
        assert weights is not None
        product = torch.stack(tuple(sources), -1) @ (weights if weights.dtype == dtype else weights.to(dtype))
    return functools.reduce(Tensor.add_, added, product)


def summed_by_product(sources: Sequence[Tensor], table: Tensor) -> Tensor:
    """``sum_i table[..., i] x_i`` as one matrix product."""
    stacked = torch.stack(tuple(sources), -2)
    return (table.to(stacked.dtype).unsqueeze(-2) @ stacked).squeeze(-2)


def _plain_dtype(*tensors: Tensor) -> torch.dtype:
    """The dtype of a plain add of these tensors."""
    dtype = tensors[0].dtype
    for x in tensors[1:]:
        dtype = dtype if x.dtype == dtype else torch.promote_types(dtype, x.dtype)
    return dtype


def _scaled(source: Tensor, weight: Tensor | float, precision: torch.dtype) -> Tensor:
    if isinstance(weight, Tensor):
        return source * _dimensional(weight.to(precision))
    return source.to(precision) * weight


def _dimensional(weight: Tensor) -> Tensor:
    return weight.reshape(1) if weight.dim() == 0 else weight


class _Terms(NamedTuple):
    """The arguments of `_Sum` that have gradients, in their order; `_in_turn` splits them again.

    Attributes:
        sources, scores, added, claims, tallies: as in `Mix`.
        weights: all in one tensor, or none.
        norm: the norm's weight, and its bias if it has one.
    """

    sources: Sequence[Tensor]
    weights: Sequence[Tensor]
    scores: Sequence[Tensor]
    added: Sequence[Tensor]
    claims: Sequence[Tensor]
    norm: Sequence[Tensor]
    tallies: Sequence[Tensor]


class _Fixed(NamedTuple):
    """The arguments of `_Sum` without gradients, in one object: autograd has fewer tensors to check.

    Attributes:
        norm: kind and eps of the norm.
        sources, weights, accumulator, attended: as in a `Mix` with claims.
        again: as in `Mix`.
    """

    norm: tuple[NormKind, float] | None
    sources: Sequence[Tensor] = ()
    weights: Tensor | None = None
    accumulator: Tensor | None = None
    attended: Attended | None = None
    again: bool = False


class _Sum(torch.autograd.Function):
    """The sum of a `Mix`, and its norm, with hand-written gradients.

    It saves the sources, and with a norm also the sum and one number per row.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:  # in one: see `claims._Claims`
        counts, fixed, *tensors = given
        sources, weights, scores, added, claims, scale, _ = _in_turn(counts, tensors)
        norm, constants, weight, accumulator, ctx.attended, again = fixed
        ctx.counts, ctx.norm = counts, norm
        statistics = () if ctx.attended is None else (ctx.attended.statistics,)
        sources, weight = constants or sources, weights[0] if weights else weight
        dtype = _plain_dtype(*(claims or sources), *added)  # not of the accumulator: that is float32
        ctx.set_materialize_grads(False)
        # Gradients of sources, weights or scores: all need the sources.
        ctx.weighted = True in ctx.needs_input_grad[2 : 2 + sum(counts[:3])]
        kept = (*sources, *weights, *scores) if ctx.weighted else ()
        if norm is not None:
            (kind, eps), bias = norm, scale[1] if len(scale) > 1 else None
            total, after, rstd = operators.mix_norm(
                sources, weight, scores, added, accumulator, dtype, kind, scale[0], bias, eps
            )
            if again:
                remember_sums([total], added, (), functools.partial(_added, dtype=dtype), ctx)
            elif not added and accumulator is None:
                remember_sums([total], sources, (weight, *scores), functools.partial(_again, dtype), ctx)
            ctx.save_for_backward(*kept, *scale, total, rstd, *statistics)
            return total, after
        if switch.opaque((claims or sources or added)[0]):
            total = operators.mix(sources, weight, scores, added, accumulator, dtype)
        else:
            total = plain.combine(sources, weight, added, scores)
        if not added and accumulator is None:
            remember_sums([total], sources, (weight, *scores), functools.partial(_again, dtype), ctx)
        if kept or statistics:
            ctx.save_for_backward(*kept, *([total] if statistics else []), *statistics)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_normed: Tensor | None = None) -> tuple[Any, ...]:
        n, w, s, added, claims, scale, tallies = ctx.counts
        given = grad if grad_normed is None else grad_normed
        kept, saved = ctx.weighted, _saved(ctx, given)
        sources, weights, scores, rest = _in_turn((n * kept, w * kept, s * kept, len(saved)), saved)
        if tallies:
            *rest, statistics = rest
            value = rest[-1 if ctx.norm is None else -2]
        (weight,) = weights or (None,)
        total = grad
        of_norm: Sequence[Tensor | None] = [None] * scale
        of_terms: Sequence[Tensor | None] = [None] * (n + w + s)
        if by_torch(given):
            total, of_norm, found = _differentiable(ctx.norm, grad, grad_normed, sources, weight, scores, rest)
            of_terms = found if kept else of_terms
        elif grad_normed is not None:
            norm_weight, total_saved, rstd = rest[0], *rest[-2:]
            total, *found = operators.mix_norm_backward(
                grad_normed, grad, total_saved, rstd, ctx.norm[0], norm_weight, scale > 1, sources, weight, scores
            )
            of_norm, of_terms = found[:scale], _by_score(found[scale:], s) if kept else of_terms
        elif grad is not None and kept and switch.uses_kernels(grad):
            of_terms = _by_score(operators.mix_backward(grad, sources, weight, scores), s)
        elif grad is not None and kept:
            of_terms = plain.combine_backward(grad, sources, weight, scores)
        of_tally = ctx.attended.tally(total, value, statistics) if tallies and total is not None else None
        return (None, None, *of_terms, *[total] * added, *[total] * claims, *of_norm, *[of_tally] * tallies)


@whole_in_graphs
def mix_of(
    sources: Sequence[Tensor],
    weights: Tensor | None,
    scores: Sequence[Tensor],
    added: Sequence[Tensor],
    claims: Sequence[Tensor],
    accumulator: Tensor | None,
    statistics: Tensor | None,
    states: Sequence[Tensor],
    of_states: Sequence[Tensor],
    columns: Sequence[int],
    scaled: bool,
    tallies: Sequence[Tensor],
    again: bool,
    norm: str | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
) -> list[Tensor]:
    """The sum of a `Mix`, whose attributes these are, and its `Norm`, if there is one."""
    attended = None if statistics is None else Attended(statistics, tuple(states), tuple(of_states), columns, scaled)
    of_tokens = tuple(scores), tuple(added), tuple(claims)
    pending = Mix(tuple(sources), weights, *of_tokens, accumulator, attended, tuple(tallies), again)
    if norm_weight is None:
        return [pending._computed(None)]
    kind: Any = norm
    return list(pending._computed(Norm(kind, norm_weight, norm_bias, eps)))


@torch.no_grad()
def _again(dtype: torch.dtype, sources: Sequence[Tensor], weight: Tensor | None, *scores: Tensor) -> tuple[Tensor]:
    """The sum of a `_Sum` without ``added`` terms, to recompute it."""
    if switch.opaque(sources[0]):
        return (operators.mix(sources, weight, scores, (), None, dtype),)
    return (plain.combine(sources, weight, (), scores),)


@torch.no_grad()
def _added(terms: Sequence[Tensor], dtype: torch.dtype | None = None) -> tuple[Tensor]:
    """The sum of terms without weights; with ``dtype``, as kernels compute it."""
    return (functools.reduce(torch.add, terms) if dtype is None else operators.mix((), None, (), terms, None, dtype),)


def _saved(ctx: Any, grad: Tensor | None) -> Any:
    """The saved tensors of `_Sum`. To be called once: a checkpoint unpacks each tensor only once."""
    only_values = not (by_torch(grad) or torch.compiler.is_compiling())
    if ctx.attended is None or ctx.norm is not None or not only_values:
        return ctx.saved_tensors
    try:
        return ctx.saved_tensors
    except RuntimeError:  # only this sum saves its value, which may be written to after the read
        return ctx.attended.again()


def _by_score(found: Sequence[Tensor], scores: int) -> list[Tensor]:
    """Gradients with one tensor for each score, from those of operators, which have all scores in one."""
    return [*found[:-1], *found[-1].split(1, -1)] if scores else list(found)


def _differentiable(
    kind: tuple[NormKind, float] | None,
    grad: Tensor | None,
    grad_normed: Tensor | None,
    sources: Sequence[Tensor],
    weight: Tensor | None,
    scores: Sequence[Tensor],
    rest: Sequence[Tensor],
) -> tuple[Tensor | None, list[Any], list[Any]]:
    """Gradients of `_Sum` by differentiable operations: of the sum, of the norm's parameters, of the terms."""
    of_norm: list[Any] = []
    if kind is not None:
        *scale, total, _ = rest
        grad, of_norm = through_norm(kind, grad, grad_normed, total, scale)
    terms = [*sources, *([] if weight is None else [weight]), *scores]
    if grad is None or not terms:
        return grad, of_norm, [None] * len(terms)

    def total_of(*terms: Tensor) -> Tensor:
        xs, weights, by_token = _in_turn((len(sources), int(weight is not None), len(scores)), terms)
        return _by_autograd(xs, weights[0] if weights else None, by_token, ())

    return grad, of_norm, gradients(total_of, terms, grad)


def through_norm(
    kind: tuple[NormKind, float],
    grad: Tensor | None,
    grad_normed: Tensor | None,
    total: Tensor,
    scale: Sequence[Tensor],
) -> tuple[Tensor | None, list[Any]]:
    """Gradients of a sum and of its norm's parameters, from those of sum and norm, by differentiable operations."""
    if grad_normed is None:
        return grad, [None] * len(scale)

    def again(total: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
        return normed(total, Norm(kind[0], scale, bias, kind[1]))

    back, *of_norm = gradients(again, (total, *scale), grad_normed)
    return back if grad is None else grad + back, of_norm


def _in_turn(counts: Sequence[int], tensors: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    """``tensors`` split into consecutive groups of ``counts`` elements."""
    found, first = [], 0
    for count in counts:
        found.append(tensors[first : first + count])
        first += count
    return found
