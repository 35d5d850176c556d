"""The kernels as PyTorch operators, ``torch.ops.rewire.*``: functional, and opaque to torch.compile.

They are not differentiable: the functions in `mix` and `claimed` know which gradients are needed, and in which order
they are cheap. With ``TRITON_INTERPRET=1`` they run on a CPU.

In all of them sources, added branches and gradients are [..., D] of one shape; weights are float32, [N] or, per
channel, [N, D]; scores are float32 [..., 1], one for each source or none; accumulators are float32 [..., D].

An operator is declared once: its schema comes from its signature, and the decorator gets its fake implementation.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from rewire.kernels.cpu import plain
from rewire.kernels.kernel import WithoutMemory, noting
from rewire.kernels.sums.launch import GradientInputs, Mixed, MixInputs
from rewire.kernels.sums.launch import mix_backward as launch_backward
from rewire.kernels.sums.launch import mix_forward as launch_forward
from rewire.kernels.sums.spec import MAX_NORM_WIDTH, Weights, spec_of
from rewire.kernels.switch import listened, uses_kernels
from rewire.torch_internals import spare_inductor_a_description

#: Most columns of a hidden layer that kernels compute.
MOST_HIDDEN = 128
#: Most streams, and products of each, for which one kernel writes the streams and projects them.
MOST_WRITTEN, MOST_PRODUCTS = 4, 8

_Function = TypeVar("_Function", bound=Callable[..., Any])


def fits_norm(x: Tensor) -> bool:
    """Whether a kernel can hold the rows of ``x`` [..., D] for a norm."""
    return x.dim() > 0 and 0 < x.shape[-1] <= MAX_NORM_WIDTH


def _operator(results: Callable[..., Any]) -> Callable[[_Function], _Function]:
    """Register a function as ``torch.ops.rewire.<its name>``.

    This uses the low-level API, as ``torch.library.custom_op`` costs twice as much per call for lists of tensors. The
    returned function goes through the dispatcher only if something listens, as that costs as much as a launch.

    Args:
        results: makes results of the right shapes and dtypes, from those parameters of the function, by name, on which
            they depend.
    """

    def register(function: _Function) -> _Function:
        name, signature = f"rewire::{function.__name__}", inspect.signature(function)
        asked = tuple(inspect.signature(results).parameters)

        def fake(*args: object, **kwargs: object) -> object:
            if noting() and not listened():  # for a compiled graph on the meta device
                return function(*args, **kwargs)
            spare_inductor_a_description(operator)
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            return results(**{parameter: given.arguments[parameter] for parameter in asked})

        torch.library.define(name, torch.library.infer_schema(function, mutates_args=()))
        torch.library.impl(name, "CompositeExplicitAutograd")(function)
        torch.library.register_fake(name)(fake)
        operator = getattr(torch.ops.rewire, function.__name__).default

        @functools.wraps(function)
        def call(*args: object) -> object:
            by_dispatcher = listened()
            try:
                return operator(*args) if by_dispatcher else function(*args)
            except WithoutMemory:  # the dispatcher unwraps such tensors
                if by_dispatcher:
                    raise
                return operator(*args)

        return call  # type: ignore[return-value]

    return register


def _like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A contiguous tensor, as `launch` allocates it."""
    return x.new_empty(x.shape, dtype=dtype)


def _float(x: Tensor, *shape: int) -> Tensor:
    return x.new_empty(shape, dtype=torch.float32)


# Sums.


def _forward(
    inputs: MixInputs,
    outputs: int = 0,
    dtype: torch.dtype | None = None,
    norm: str | None = None,
    eps: float = 0.0,
    apart: int = 0,
) -> Mixed:
    """Launch the kernels of mixes.

    Args:
        outputs: number of outputs; 0: one, whose weights have no dimension for outputs.
        norm: "rms" or "layer", for one output.
        apart: if the first source is a stack, the number of last results that are not stacked.
    """
    sources, weights, scores, added, accumulators, probes, _, bias, means, stacks = inputs
    many, biased = outputs or 1, norm is None or bias is not None
    terms = len(sources) if not stacks else _count(inputs), _kind(weights, outputs), len(scores) > 0
    more = len(probes) > 0, len(accumulators) > 0, biased, False, means is not None
    spec = spec_of(*terms, len(added) // many, many, norm, norm is not None, *more)
    return launch_forward(spec, inputs, dtype, eps, (many - apart) * stacks)


def _backward(inputs: GradientInputs, outputs: int = 0, norm: str | None = None, biased: bool = True) -> list[Tensor]:
    """Launch the kernels of the mixes' gradients.

    Returns:
        Gradients of added branches and of the norm, if there is one; of sources, weights and scores.
    """
    sources, normed, kind = _count(inputs), norm is not None, _kind(inputs.weights, outputs)
    scored, carried = len(inputs.scores) > 0, len(inputs.carried) > 0
    spec = spec_of(sources, kind, scored, int(normed), outputs or 1, norm, normed, False, False, biased, carried)
    found = launch_backward(spec, inputs, sources - len(inputs.sources) + 1 if inputs.stacks else 0)
    weights, scores = found.weights, found.scores
    if outputs == 0:
        weights, scores = None if weights is None else weights[0], None if scores is None else scores.squeeze(-2)
    of_norm = [found.added, found.norm_weight, found.norm_bias] if normed else ()
    in_turn = (*of_norm, found.stacked, *found.apart, weights, scores)
    return [x for x in in_turn if x is not None]


def _kind(weights: Tensor | None, outputs: int) -> Weights:
    return "none" if weights is None else "scalar" if weights.dim() == 1 + (outputs > 0) else "channel"


def _count(inputs: MixInputs | GradientInputs) -> int:
    """Number of sources, where the first may be a stack of several."""
    return len(inputs.sources) + (inputs.sources[0].shape[-2] - 1 if inputs.stacks else 0)


def _maybe(x: Tensor | None) -> tuple[Tensor, ...]:
    return () if x is None else (x,)


def _mix_like(
    sources: Sequence[Tensor], added: Sequence[Tensor], accumulator: Tensor | None, dtype: torch.dtype
) -> Tensor:
    return _like([*sources, *added, *_maybe(accumulator)][0], dtype)


@_operator(_mix_like)
def mix(
    sources: Sequence[Tensor],
    weights: Tensor | None,
    scores: Sequence[Tensor],
    added: Sequence[Tensor],
    accumulator: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """``accumulator + sum_k (w_k + s_k) x_k + sum_j f_j``, in ``dtype``."""
    first = accumulator if accumulator is not None else [*sources, *added][0]
    if accumulator is None and first.is_cpu and not uses_kernels(first):
        return plain.combine(sources, weights, added, scores).to(dtype).contiguous()
    return _forward(MixInputs(sources, weights, scores, added, _maybe(accumulator)), dtype=dtype).apart[0]


def _mix_norm_like(
    sources: Sequence[Tensor], added: Sequence[Tensor], accumulator: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    result = _mix_like(sources, added, accumulator, dtype)
    return result, torch.empty_like(result), _float(result, result.numel() // result.shape[-1])


@_operator(_mix_norm_like)
def mix_norm(
    sources: Sequence[Tensor],
    weights: Tensor | None,
    scores: Sequence[Tensor],
    added: Sequence[Tensor],
    accumulator: Tensor | None,
    dtype: torch.dtype,
    norm: str,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`mix`, its RMSNorm ("rms") or LayerNorm ("layer"), and the norm's statistic for backward, float32 [rows]."""
    inputs = MixInputs(sources, weights, scores, added, _maybe(accumulator), (), norm_weight, norm_bias)
    done = _forward(inputs, dtype=dtype, norm=norm, eps=eps)
    assert done.normed is not None
    assert done.rstd is not None
    return done.apart[0], done.normed, done.rstd


def _mix_backward_like(sources: Sequence[Tensor], weights: Tensor | None, scores: Sequence[Tensor]) -> list[Tensor]:
    of_scores = [_float(scores[0], *scores[0].shape[:-1], len(scores))] if scores else []
    return [*map(_like, sources), *map(_like, _maybe(weights)), *of_scores]


@_operator(_mix_backward_like)
def mix_backward(
    grad: Tensor, sources: Sequence[Tensor], weights: Tensor | None, scores: Sequence[Tensor]
) -> list[Tensor]:
    """Gradients of `mix`: of the N sources, of the weights if given, of the scores in one tensor [..., N]."""
    return _backward(GradientInputs((grad,), sources, weights, scores))


def _mix_norm_backward_like(
    grad: Tensor,
    norm_weight: Tensor,
    biased: bool,
    sources: Sequence[Tensor],
    weights: Tensor | None,
    scores: Sequence[Tensor],
) -> list[Tensor]:
    of_norm = [_float(norm_weight, *norm_weight.shape) for _ in range(1 + biased)]
    return [_like(grad), *of_norm, *_mix_backward_like(sources, weights, scores)]


@_operator(_mix_norm_backward_like)
def mix_norm_backward(
    grad: Tensor,
    grad_mix: Tensor | None,
    mixed: Tensor,
    rstd: Tensor,
    norm: str,
    norm_weight: Tensor,
    biased: bool,
    sources: Sequence[Tensor],
    weights: Tensor | None,
    scores: Sequence[Tensor],
) -> list[Tensor]:
    """Gradients of `mix_norm`: of the mix (and so of added branches), the norm's weight, its bias if it is ``biased``,
    then those of `mix_backward`.

    ``grad`` is the gradient of the normed mix, ``grad_mix`` that of the mix itself, if that was used.
    """
    of_norm = (mixed,), rstd, _maybe(grad_mix), norm_weight
    return _backward(GradientInputs((grad,), sources, weights, scores, *of_norm), norm=norm, biased=biased)


def _mixes_like(
    sources: Sequence[Tensor],
    weights: Tensor | None,
    scores: Sequence[Tensor],
    probes: Sequence[Tensor],
    dtype: torch.dtype | None,
    stacks: bool,
    apart: int,
) -> list[Tensor]:
    first, outputs = sources[0], _outputs(weights, scores, probes)
    (*lead, cols), dtype = first.shape, dtype or functools.reduce(torch.promote_types, [x.dtype for x in sources])
    lead = lead[: len(lead) - stacks]
    stack = [first.new_empty((*lead, outputs - apart, cols), dtype=dtype)] if stacks else []
    states = [first.new_empty((*lead, cols), dtype=dtype) for _ in range(apart if stacks else outputs)]
    pairs = (outputs, len(sources))
    of_weights = [_float(first, *pairs, *weights.shape[2:])] if probes and weights is not None else []
    return [*stack, *states, *of_weights, *([_float(first, *lead, *pairs)] if probes and scores else [])]


def _outputs(weights: Tensor | None, scores: Sequence[Tensor], probes: Sequence[Tensor] = ()) -> int:
    """Number of results of `mixes`; scores are one table or, in a list of several, [..., M] of each source."""
    return len(probes) or (scores[0].shape[-1 if len(scores) > 1 else -2] if weights is None else weights.shape[0])


@_operator(_mixes_like)
def mixes(
    sources: Sequence[Tensor],
    weights: Tensor | None,
    scores: Sequence[Tensor],
    added: Sequence[Tensor],
    probes: Sequence[Tensor],
    dtype: torch.dtype | None,
    stacks: bool = False,
    apart: int = 0,
) -> list[Tensor]:
    """M mixes in one pass over N sources, ``y_m = sum_n (w_mn + s_mn) x_n + sum_j a_mj``; with probes p_m also the dot
    products ``<x_n, p_m>``.

    It also computes backward: with the mixes' gradients as sources and the states that they read as probes, it returns
    the gradients of the states, of the weights and of the scores.

    Args:
        weights: [M, N] or [M, N, D].
        scores: one table [..., M, N]; or for each source [..., M]; or, with probes, for each probe [..., N].
        added: any number for one mix, or one for each.
        dtype: dtype of the mixes; None: that of plain adds.
        stacks: whether the first source is [..., n, D], and counts as n. Then the mixes come in one tensor, too, [...,
            M - apart, D], except the last ``apart``, fewer than M.

    Returns:
        The mixes; with probes and weights, dot products in their shape; with probes and scores, those [..., M, N].
    """
    if probes and weights is not None and not scores and probes[0].is_cpu and not uses_kernels(probes[0]):
        dx, dots = plain.combine_with_dots(sources, probes, weights, added)
        return [*[x.contiguous() for x in dx], dots.contiguous()]
    inputs = MixInputs(sources, weights, scores, added, (), probes, stacks=stacks)
    done = _forward(inputs, _outputs(weights, scores, probes), dtype, apart=apart)
    return [*_maybe(done.stacked), *done.apart, *_maybe(done.weight_dots), *_maybe(done.score_dots)]


@_operator(
    lambda sources, weights, scores: [*map(_like, sources), *map(_like, _maybe(weights)), *map(_like, scores)],
)
def mixes_backward(
    grads: Sequence[Tensor],
    sources: Sequence[Tensor],
    weights: Tensor | None,
    scores: Sequence[Tensor],
    carried: Sequence[Tensor],
    stacks: bool,
) -> list[Tensor]:
    """Gradients of `mixes` without probes, whose scores are a table: of the sources, of the weights, of the scores.

    ``grads`` are as `mixes` returns the mixes. ``carried``, one for each source or none, is added to their gradients.
    """
    inputs = GradientInputs(grads, sources, weights, scores, carried=carried, stacks=stacks)
    return _backward(inputs, _outputs(weights, scores))


def _gather_attended_like(states: Sequence[Tensor], scores: Sequence[Tensor]) -> list[Tensor]:
    *lead, reads = scores[0].shape
    return [*map(_like, states), _float(scores[0], *lead, len(scores), reads)]


@_operator(_gather_attended_like)
def gather_attended(
    grads: Sequence[Tensor],
    states: Sequence[Tensor],
    scores: Sequence[Tensor],
    tallies: Sequence[Tensor],
    added: Sequence[Tensor],
) -> list[Tensor]:
    """Gradients of M states that N attending reads read, and of their scores, [..., M, N].

    Scores are M of [..., N], tallies N of [3, ...]. ``added`` are gradients of other uses: any number for a single
    state, or one for each.
    """
    from rewire.kernels.handwritten import softmax  # only where there is Triton

    shares, means = softmax.shares(scores, tallies)
    table = shares.movedim((0, 1), (-2, -1))
    done = _forward(MixInputs(grads, None, (table,), added, (), states, means=means), len(states), states[0].dtype)
    return [*done.apart, *_maybe(done.score_dots)]


# Streams of hyper-connections.


def _write_like(streams: Tensor, branches: Sequence[Tensor], weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    written = _like(streams, functools.reduce(torch.promote_types, [x.dtype for x in (streams, *branches)]))
    products = _float(streams, weight.shape[1], *streams.shape[:-1])
    return written, products.movedim(0, -1), _float(streams, products[0].numel())


@_operator(_write_like)
def write_and_project(
    streams: Tensor, branches: Sequence[Tensor], table: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`mixes` of streams [..., n, D] and branches [..., D], with ``table`` [..., n, n + branches] as scores; and the
    `project` of the new streams.
    """
    from rewire.kernels.handwritten import writes

    dtype = functools.reduce(torch.promote_types, [x.dtype for x in (streams, *branches)])
    return writes.forward(streams, branches, table, weight, eps, dtype)


@_operator(
    lambda streams, branches, table, weight: [
        *map(_like, (streams, *branches, table)),
        _float(weight, weight.shape[1], weight.shape[0]),
    ]
)
def write_and_project_backward(
    grad: Tensor,
    carried: Tensor | None,
    of_read: Tensor | None,
    factors: Tensor | None,
    written: Tensor,
    products: Tensor,
    inverse: Tensor,
    streams: Tensor,
    branches: Sequence[Tensor],
    table: Tensor,
    weight: Tensor,
) -> list[Tensor]:
    """Gradients of `write_and_project`: of the streams, of each branch, of the table, of the weight, [K, D].

    ``grad`` is the gradient of the products, ``carried`` that of the new streams; ``of_read`` and ``factors`` are as in
    `project_backward`.
    """
    from rewire.kernels.handwritten import projection, writes

    read = None if of_read is None or factors is None else projection.Read(of_read, factors)
    of_streams, of_branches, *sums = writes.backward(
        grad, carried, read, written, products, inverse, streams, branches, table, weight
    )
    return [of_streams, *of_branches, *sums]


# Values per token.


def _project_like(x: Tensor, weight: Tensor, eps: float | None) -> tuple[Tensor, Tensor]:
    scores = _float(x, weight.shape[1], *x.shape[:-1]).movedim(0, -1)
    return scores, _float(x, x.numel() // x.shape[-1] * (eps is not None))


@_operator(_project_like)
def project(x: Tensor, weight: Tensor, eps: float | None, clamped: bool = False) -> tuple[Tensor, Tensor]:
    """``x @ weight``, [..., K], or with eps ``rms_norm(x) @ weight``, and the norm's factor, [rows]; weight [D, K].

    With ``clamped``, negative scores become -0, by which backward recognises them.
    """
    from rewire.kernels.handwritten import projection  # only where there is Triton

    return projection.forward(x, weight, eps, clamped)


@_operator(lambda x, weight: (_like(x), _float(weight, weight.shape[1], weight.shape[0])))
def project_backward(
    grads: Sequence[Tensor],
    x: Tensor,
    weight: Tensor,
    scores: Tensor,
    inverse: Tensor,
    carried: Tensor | None,
    of_read: Tensor | None = None,
    factors: Tensor | None = None,
    clamped: bool = False,
) -> tuple[Tensor, Tensor]:
    """Gradients of `project`: of x, to which ``carried`` is added, and of the weight, [K, D].

    ``grads`` are [..., K], or two tensors for the first scores and the others. If x holds streams, [..., n, D] or
    concatenated [..., n D], the gradient of a read ``sum_i m_i x_i`` is added, too: ``of_read`` [..., 1, D] times the
    ``factors`` m, float32 [..., n, 1].
    """
    from rewire.kernels.handwritten import projection

    read = None if of_read is None or factors is None else projection.Read(of_read, factors)
    return projection.backward(grads, x, weight, scores, inverse, carried, read, clamped)


@_operator(lambda hidden: _like(hidden.movedim(-1, 0)).movedim(0, -1))
def hidden(hidden: Tensor, weight: Tensor, static: Tensor) -> Tensor:
    """``gelu(h) @ W + b``, float32 [..., K], for a hidden layer h from `project`; W [K, K], b [K]."""
    from rewire.kernels.handwritten import hidden as kernels

    return kernels.forward(hidden, weight, static)


@_operator(
    lambda x, weight: (_like(x), _float(weight, len(weight), x.shape[-1]), _like(weight), _float(weight, len(weight)))
)
def hidden_backward(
    grad: Tensor, x: Tensor, read: Tensor, weight: Tensor, hidden: Tensor, inverse: Tensor, carried: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of ``hidden(project(x, read))``: of x, plus ``carried``, of read, [K, D], of W and of b."""
    from rewire.kernels.handwritten import hidden as kernels

    return kernels.backward(grad, x, read, weight, hidden, inverse, carried)


@_operator(lambda streams: _float(streams, *streams.shape[:-1], 1))
def products(grad: Tensor, streams: Tensor) -> Tensor:
    """``<grad, streams_i>``, float32 [..., n, 1], for the gradient [..., 1, D] of a read and streams [..., n, D]."""
    from rewire.kernels.handwritten import projection

    return projection.products(grad, streams)


def _gates_like(products: Tensor, n: int, iterations: int) -> tuple[Tensor, Tensor]:
    lead = products.shape[: -1 if iterations else -2]
    return products.new_empty((*lead, n, 1)), products.new_empty((*lead, n, n + 1)).mT


@_operator(_gates_like)
def gates(
    products: Tensor, static: Tensor, scale: Tensor, n: int, iterations: int, eps: float, magnitude: float
) -> tuple[Tensor, Tensor]:
    """The gates with which units of hyper-connections read, [..., n, 1], and write, [..., n + 1, n]: see `gating`.

    Args:
        products: float32 [..., n, n + 2] or, with iterations, [..., 2 n + n n].
        static: in the shape of one token's products.
        scale: [n + 2] or [2 n + n n].
        iterations: of Sinkhorn-Knopp; 0: the tanh form of gates.
        eps, magnitude: as in `ManifoldHyperConnections`.
    """
    from rewire.kernels.handwritten import gates  # only where there is Triton

    return gates.forward(products, static, scale, n, iterations, eps, magnitude)


@_operator(
    lambda products, static: (
        torch.empty_like(products),
        static.new_empty((1 + static.numel() // static.shape[-1], static.shape[-1])),
    )
)
def gates_backward(
    of_read: Tensor,
    of_write: Tensor,
    products: Tensor,
    static: Tensor,
    scale: Tensor,
    iterations: int,
    eps: float,
    magnitude: float,
) -> tuple[Tensor, Tensor]:
    """Gradients of `gates`: of the products; of the static values and, in one more row, the scale, [n + 1, n + 2] or
    [2, 2 n + n n].
    """
    from rewire.kernels.handwritten import gates

    return gates.backward(of_read, of_write, products, static, scale, iterations, eps, magnitude)


# The softmax of attending reads.


@_operator(lambda statistics: statistics.new_empty((3, *statistics.shape[1:])))
def tally(grad: Tensor, total: Tensor, statistics: Tensor, count: int) -> Tensor:
    """``statistics``, float32 [2, ...], and ``<total, grad> / count``, [...], in one tensor."""
    from rewire.kernels.handwritten import softmax

    return softmax.tally(grad, total, statistics, count)


def _softmax_like(scores: Sequence[Tensor], begun: Tensor | None) -> tuple[Tensor, Tensor]:
    like = scores[0] if begun is None else begun[0]
    return like.new_empty((len(scores) + (begun is not None), *like.shape)), like.new_empty((2, *like.shape))


@_operator(_softmax_like)
def softmax(scores: Sequence[Tensor], begun: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
    """Weights that add up to ``count``, [n, ...], from n scores, float32 [...]; and statistics for `tally`, [2, ...].

    ``begun`` are the statistics of earlier scores, from a call with ``count=0``, which does not divide numerators: the
    largest score and the sum. These scores count as one more state, the first.
    """
    from rewire.kernels.handwritten import softmax

    return softmax.forward(scores, begun, count)
