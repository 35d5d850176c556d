"""The kernels as PyTorch operators, ``torch.ops.rewire.*``: functional, and opaque to torch.compile.

They have no autograd of their own: the functions in `mix` and `history` know which gradients are wanted, and in which
order they are cheap. With ``TRITON_INTERPRET=1`` they run on a CPU.

In all of them sources, added branches and gradients are [..., D] of one shape; weights are float32, [N] or, per
channel, [N, D]; scores are float32 [..., 1], one for each source or none; accumulators are float32 [..., D].
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from rewire.kernels.kernel import WithoutMemory
from rewire.kernels.sums.launch import GradientInputs, Gradients, MixInputs
from rewire.kernels.sums.launch import mix_backward as launch_backward
from rewire.kernels.sums.launch import mix_forward as launch_forward
from rewire.kernels.sums.spec import MAX_NORM_WIDTH, MixSpec, Norm, Weights, spec_of
from rewire.kernels.switch import listened

#: Columns of a hidden layer up to which kernels compute it.
MOST_HIDDEN = 128
#: Streams and products of each up to which one kernel writes the streams and makes the products.
MOST_WRITTEN, MOST_PRODUCTS = 4, 32

_Function = TypeVar("_Function", bound=Callable[..., Any])


def fits_norm(x: Tensor) -> bool:
    """Whether a kernel can hold the rows of ``x`` [..., D] for a norm."""
    return x.dim() > 0 and 0 < x.shape[-1] <= MAX_NORM_WIDTH


def _operator(schema: str, fake: Callable[..., Any]) -> Callable[[_Function], _Function]:
    """Register a function as ``torch.ops.rewire.<its name>``; ``fake`` makes outputs of the right shape and dtype.

    The low-level way: ``torch.library.custom_op`` costs twice as much per call for lists of tensors. What is returned
    goes through the dispatcher only where somebody listens: it costs as much as a launch.
    """

    def register(function: _Function) -> _Function:
        name = f"rewire::{function.__name__}"
        torch.library.define(name, schema)
        torch.library.impl(name, "CompositeExplicitAutograd")(function)
        torch.library.register_fake(name)(fake)
        operator: Any = getattr(torch.ops.rewire, function.__name__).default

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            by_dispatcher = listened()
            try:
                return operator(*args) if by_dispatcher else function(*args)
            except WithoutMemory:  # the dispatcher asks such tensors for those that they stand for
                if by_dispatcher:
                    raise
                return operator(*args)

        return call  # type: ignore[return-value]

    return register


def _like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What `launch` allocates: contiguous."""
    return x.new_empty(x.shape, dtype=dtype)


def _kind(weights: Tensor | None, dims: int = 1) -> Weights:
    """Of weights that have as many dimensions where they are numbers."""
    return "none" if weights is None else "scalar" if weights.dim() == dims else "channel"


def _mix_fake(sources: Any, weights: Any, scores: Any, added: Any, accumulator: Any, dtype: torch.dtype) -> Tensor:
    return _like([*sources, *added, accumulator][0], dtype)


@_operator(
    "(Tensor[] sources, Tensor? weights, Tensor[] scores, Tensor[] added, Tensor? accumulator, ScalarType dtype)"
    " -> Tensor",
    _mix_fake,
)
def mix(
    sources: Sequence[Tensor],
    weights: Tensor | None,
    scores: Sequence[Tensor],
    added: Sequence[Tensor],
    accumulator: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """``accumulator + sum_k (w_k + s_k) x_k + sum_j f_j``, in ``dtype``."""
    running = () if accumulator is None else (accumulator,)
    spec = spec_of(len(sources), _kind(weights), bool(scores), len(added), accumulate=bool(running))
    return launch_forward(spec, MixInputs(sources, weights, scores, added, running), dtype).apart[0]


def _mix_norm_fake(sources: Any, weights: Any, scores: Any, added: Any, accumulator: Any, dtype: Any, *_: Any) -> Any:
    result = _mix_fake(sources, weights, scores, added, accumulator, dtype)
    rows = result.numel() // result.shape[-1]
    return result, torch.empty_like(result), result.new_empty(rows, dtype=torch.float32)


@_operator(
    "(Tensor[] sources, Tensor? weights, Tensor[] scores, Tensor[] added, Tensor? accumulator, ScalarType dtype,"
    " str norm, Tensor norm_weight, Tensor? norm_bias, float eps) -> (Tensor, Tensor, Tensor)",
    _mix_norm_fake,
)
def mix_norm(
    sources: Sequence[Tensor],
    weights: Tensor | None,
    scores: Sequence[Tensor],
    added: Sequence[Tensor],
    accumulator: Tensor | None,
    dtype: torch.dtype,
    norm: Norm,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`mix`, its RMSNorm ("rms") or LayerNorm ("layer"), and what backward needs of the norm, float32 [rows]."""
    running = () if accumulator is None else (accumulator,)
    extra: dict[str, Any] = {"norm": norm, "norm_bias": norm_bias is not None, "accumulate": bool(running)}
    spec = spec_of(len(sources), _kind(weights), bool(scores), len(added), keep_mix=True, **extra)
    inputs = MixInputs(sources, weights, scores, added, running, norm_weight=norm_weight, norm_bias=norm_bias)
    done = launch_forward(spec, inputs, dtype, eps)
    assert done.normed is not None
    assert done.rstd is not None
    return done.apart[0], done.normed, done.rstd


def _mix_backward_fake(grad: Any, sources: Any, weights: Any, scores: Any) -> list[Tensor]:
    dots = [] if weights is None else [_like(weights, weights.dtype)]
    of_scores = [scores[0].new_empty((*scores[0].shape[:-1], len(scores)))] if scores else []
    return [*(_like(x, x.dtype) for x in sources), *dots, *of_scores]


@_operator("(Tensor grad, Tensor[] sources, Tensor? weights, Tensor[] scores) -> Tensor[]", _mix_backward_fake)
def mix_backward(
    grad: Tensor, sources: Sequence[Tensor], weights: Tensor | None, scores: Sequence[Tensor]
) -> list[Tensor]:
    """Gradients of `mix`: N of the sources, that of the weights if given, those of the scores in one [..., N]."""
    spec = spec_of(len(sources), _kind(weights), bool(scores))
    return _of_terms(launch_backward(spec, GradientInputs((grad,), sources, weights, scores)))


def _of_terms(found: Gradients) -> list[Tensor]:
    of_weights = [] if found.weights is None else [found.weights[0]]
    return [*found.apart, *of_weights, *([] if found.scores is None else [found.scores.squeeze(-2)])]


def _mix_norm_backward_fake(
    grad: Any, grad_mix: Any, mixed: Any, rstd: Any, norm: Any, scale: Any, biased: Any, *terms: Any
) -> list[Tensor]:
    by_channel = [_like(scale, torch.float32) for _ in range(1 + biased)]
    return [_like(grad, grad.dtype), *by_channel, *_mix_backward_fake(grad, *terms)]


@_operator(
    "(Tensor grad, Tensor? grad_mix, Tensor mixed, Tensor rstd, str norm, Tensor norm_weight, bool biased,"
    " Tensor[] sources, Tensor? weights, Tensor[] scores) -> Tensor[]",
    _mix_norm_backward_fake,
)
def mix_norm_backward(
    grad: Tensor,
    grad_mix: Tensor | None,
    mixed: Tensor,
    rstd: Tensor,
    norm: Norm,
    norm_weight: Tensor,
    biased: bool,
    sources: Sequence[Tensor],
    weights: Tensor | None,
    scores: Sequence[Tensor],
) -> list[Tensor]:
    """Gradients of `mix_norm`: of the mix (and so of what was added), the norm's weight, its bias if it is ``biased``,
    then those of `mix_backward`.

    ``grad`` is the gradient of the normed mix, ``grad_mix`` that of the mix itself, if it was used, too.
    """
    spec = spec_of(len(sources), _kind(weights), bool(scores), added=1, norm=norm, keep_mix=True, norm_bias=biased)
    used = () if grad_mix is None else (grad_mix,)
    found = launch_backward(spec, GradientInputs((grad,), sources, weights, scores, (mixed,), rstd, used, norm_weight))
    by_channel = [x for x in (found.norm_weight, found.norm_bias) if x is not None]
    assert found.added is not None
    return [found.added, *by_channel, *_of_terms(found)]


def _mixes_fake(sources: Any, weights: Any, scores: Any = None) -> list[Tensor]:
    outputs = len(weights) if scores is None else scores.shape[-2]
    return [_like(sources[0], torch.float32) for _ in range(outputs)]


@_operator("(Tensor[] sources, Tensor? weights, Tensor? scores=None) -> Tensor[]", _mixes_fake)
def mixes(sources: Sequence[Tensor], weights: Tensor | None, scores: Tensor | None = None) -> list[Tensor]:
    """M float32 mixes in one pass over the sources; weights [M, N] or [M, N, D], scores [..., M, N]."""
    spec = _spec_of_several(len(sources), weights, scores)
    return list(launch_forward(spec, MixInputs(sources, weights, _maybe(scores)), torch.float32).apart)


def _gather_fake(grads: Any, states: Any, weights: Any, added: Any, scores: Any) -> list[Tensor]:
    dots = [] if weights is None else [_like(weights, weights.dtype)]
    if scores:
        *lead, reads = scores[0].shape
        dots.append(scores[0].new_empty((*lead, len(scores), reads)))
    return [*(_like(x, states[0].dtype) for x in states), *dots]


@_operator(
    "(Tensor[] grads, Tensor[] states, Tensor? weights, Tensor[] added, Tensor[] scores) -> Tensor[]", _gather_fake
)
def gather(
    grads: Sequence[Tensor],
    states: Sequence[Tensor],
    weights: Tensor | None,
    added: Sequence[Tensor],
    scores: Sequence[Tensor],
) -> list[Tensor]:
    """What N mixes send back to M states that they read: ``dx_m = sum_n w_mn g_n + sum_j a_j``, ``dw_mn = <x_m, g_n>``.

    Weights are [M, N] or [M, N, D]; those per token, scores, M of [..., N]. One of both may be missing. Gradients a_j
    that came other ways are any number for a single state, or one for each. Returns gradients of the states, of the
    weights, of the scores, [..., M, N].
    """
    kind, outputs = _kind(weights, 2), len(states)
    spec = spec_of(len(grads), kind, len(scores) > 0, added=len(added) // outputs, outputs=outputs, probe=True)
    done = launch_forward(spec, MixInputs(grads, weights, scores, added, probes=states), states[0].dtype)
    return [*done.apart, *(dots for dots in (done.weight_dots, done.score_dots) if dots is not None)]


def _several_fake(streams: Any, sources: Any, weights: Any, scores: Any, apart: int = 0) -> list[Tensor]:
    outputs = len(weights) if scores is None else scores.shape[-2]
    given = [*sources, *([] if streams is None else [streams])]
    dtype = functools.reduce(torch.promote_types, [x.dtype for x in given])
    if streams is None:
        return [_like(sources[0], dtype) for _ in range(outputs)]
    *lead, _, cols = streams.shape
    stack = streams.new_empty((*lead, outputs - apart, cols), dtype=dtype)
    return [stack, *(streams.new_empty((*lead, cols), dtype=dtype) for _ in range(apart))]


@_operator(
    "(Tensor? streams, Tensor[] sources, Tensor? weights, Tensor? scores, int apart=0) -> Tensor[]", _several_fake
)
def several(
    streams: Tensor | None,
    sources: Sequence[Tensor],
    weights: Tensor | None,
    scores: Tensor | None,
    apart: int = 0,
) -> list[Tensor]:
    """M mixes of the same N sources, in one pass over them.

    The first sources may come in one tensor, ``streams`` [..., n, D]: then the mixes do, too, [..., M - apart, D], but
    for the last ``apart``, fewer than M. Weights are [M, N] or [M, N, D], scores [..., M, N].
    """
    stacks, given = streams is not None, sources if streams is None else [streams, *sources]
    spec = _spec_of_several(len(sources) + _count(streams), weights, scores)
    inputs = MixInputs(given, weights, _maybe(scores), stacks=stacks)
    done = launch_forward(spec, inputs, stacked=(spec.outputs - apart) * stacks)
    return list(done.apart) if done.stacked is None else [done.stacked, *done.apart]


@_operator(
    "(Tensor[] sources, Tensor weights, Tensor[] scores) -> Tensor[]",
    lambda sources, weights, _: [_like(sources[0], sources[0].dtype) for _ in weights],
)
def ways(sources: Sequence[Tensor], weights: Tensor, scores: Sequence[Tensor]) -> list[Tensor]:
    """`several` of M mixes, with scores that lie apart: of each source, [..., M]."""
    spec = spec_of(len(sources), _kind(weights, 2), True, outputs=len(weights))
    return list(launch_forward(spec, MixInputs(sources, weights, scores)).apart)


def _several_backward_fake(
    grads: Any, streams: Any, sources: Any, weights: Any, scores: Any, carried: Any
) -> list[Tensor]:
    first = [] if streams is None else [_like(streams, streams.dtype)]
    dots = [_like(x, x.dtype) for x in (weights, scores) if x is not None]
    return [*first, *(_like(x, x.dtype) for x in sources), *dots]


@_operator(
    "(Tensor[] grads, Tensor? streams, Tensor[] sources, Tensor? weights, Tensor? scores, Tensor[] carried)"
    " -> Tensor[]",
    _several_backward_fake,
)
def several_backward(
    grads: Sequence[Tensor],
    streams: Tensor | None,
    sources: Sequence[Tensor],
    weights: Tensor | None,
    scores: Tensor | None,
    carried: Sequence[Tensor],
) -> list[Tensor]:
    """Gradients of `several`: of the streams, if given, of the sources, of the weights, of the scores.

    ``grads`` are as `several` returns mixes. ``carried``, one for each tensor of streams and sources or none, is added
    to their gradients.
    """
    n, stacks, given = _count(streams), streams is not None, sources if streams is None else [streams, *sources]
    spec = _spec_of_several(n + len(sources), weights, scores, carried=len(carried) > 0)
    inputs = GradientInputs(grads, given, weights, _maybe(scores), carried=carried, stacks=stacks)
    found = launch_backward(spec, inputs, n)
    first = [] if found.stacked is None else [found.stacked]
    dots = [x for x in (found.weights, found.scores) if x is not None]
    return [*first, *found.apart, *dots]


def _maybe(scores: Tensor | None) -> Any:
    return () if scores is None else scores


def _count(streams: Tensor | None) -> int:
    return 0 if streams is None else streams.shape[-2]


def _spec_of_several(sources: int, weights: Tensor | None, scores: Tensor | None, carried: bool = False) -> MixSpec:
    outputs = weights.shape[0] if weights is not None else scores.shape[-2]  # type: ignore[union-attr]
    return spec_of(sources, _kind(weights, 2), scores is not None, outputs=outputs, carried=carried)


def _write_fake(streams: Any, branches: Any, table: Any, weight: Any, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    (*lead, n, width), (channels, most) = streams.shape, weight.shape
    written = _like(streams, functools.reduce(torch.promote_types, [x.dtype for x in (streams, *branches)]))
    rows = lead if channels > width else [*lead, n]
    products = streams.new_empty((most, *rows), dtype=torch.float32)
    return written, products.movedim(0, -1), streams.new_empty(products[0].numel(), dtype=torch.float32)


@_operator(
    "(Tensor streams, Tensor[] branches, Tensor table, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)",
    _write_fake,
)
def write_and_project(
    streams: Tensor, branches: Sequence[Tensor], table: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`several` of streams [..., n, D] and branches [..., D], with ``table`` [..., n, n + branches] for scores; and
    what `project` returns of the new streams, or of those of a token side by side, if the weight is [n D, K].
    """
    from rewire.kernels.handwritten import writes

    dtype = functools.reduce(torch.promote_types, [x.dtype for x in (streams, *branches)])
    return writes.forward(streams, branches, table, weight, eps, dtype)


def _write_backward_fake(
    grad: Any, carried: Any, of_read: Any, factors: Any, written: Any, products: Any, inverse: Any, *terms: Any
) -> list[Tensor]:
    streams, branches, table, weight = terms
    sums = _like(table, table.dtype), weight.new_empty((weight.shape[1], weight.shape[0]))
    return [_like(streams, streams.dtype), *(_like(f, f.dtype) for f in branches), *sums]


@_operator(
    "(Tensor grad, Tensor? carried, Tensor? of_read, Tensor? factors, Tensor written, Tensor products, Tensor inverse,"
    " Tensor streams, Tensor[] branches, Tensor table, Tensor weight) -> Tensor[]",
    _write_backward_fake,
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
    """Gradients of `write_and_project`: of the streams, of each branch, of the table, of the weight, [K, channels].

    ``grad`` is that of the products, ``carried`` that of the new streams; what a read of these sends back is as in
    `project_backward`.
    """
    from rewire.kernels.handwritten import projection, writes

    read = None if of_read is None or factors is None else projection.Read(of_read, factors)
    of_streams, of_branches, *sums = writes.backward(
        grad, carried, read, written, products, inverse, streams, branches, table, weight
    )
    return [of_streams, *of_branches, *sums]


def _project_fake(x: Any, weight: Any, eps: float | None, clamped: bool = False) -> tuple[Tensor, Tensor]:
    scores = x.new_empty((weight.shape[1], *x.shape[:-1]), dtype=torch.float32).movedim(0, -1)
    return scores, x.new_empty(x.numel() // x.shape[-1] * (eps is not None), dtype=torch.float32)


@_operator("(Tensor x, Tensor weight, float? eps, bool clamped=False) -> (Tensor, Tensor)", _project_fake)
def project(x: Tensor, weight: Tensor, eps: float | None, clamped: bool = False) -> tuple[Tensor, Tensor]:
    """``x @ weight``, [..., K], or with eps that of ``rms_norm(x)``, and the norm's factor for each row.

    ``clamped``, what is below zero becomes -0, by which backward knows it.
    """
    from rewire.kernels.handwritten import projection  # only where there is Triton

    return projection.forward(x, weight, eps, clamped)


@_operator(
    "(Tensor[] grads, Tensor x, Tensor weight, Tensor scores, Tensor inverse, Tensor? carried, Tensor? of_read=None,"
    " Tensor? factors=None, bool clamped=False) -> (Tensor, Tensor)",
    lambda grads, x, weight, *_: (_like(x, x.dtype), weight.new_empty((weight.shape[1], weight.shape[0]))),
)
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

    Those of the scores are [..., K] or, of the first and of the others, two. Of streams x, [..., n, D] or side by side
    [..., n D], also the part of a read ``sum_i m_i x_i`` is added: its gradient ``of_read`` [..., 1, D] times the
    ``factors`` m, float32 [..., n, 1].
    """
    from rewire.kernels.handwritten import projection

    read = None if of_read is None or factors is None else projection.Read(of_read, factors)
    return projection.backward(grads, x, weight, scores, inverse, carried, read, clamped)


@_operator(
    "(Tensor hidden, Tensor weight, Tensor static) -> Tensor",
    lambda hidden, *_: torch.empty_like(hidden.movedim(-1, 0), memory_format=torch.contiguous_format).movedim(0, -1),
)
def hidden(hidden: Tensor, weight: Tensor, static: Tensor) -> Tensor:
    """``gelu(h) @ W + b``, float32 [..., K], of a hidden layer h as `project` returns it; W [K, K], b [K]."""
    from rewire.kernels.handwritten import hidden as kernels

    return kernels.forward(hidden, weight, static)


def _hidden_backward_fake(grad: Any, x: Any, read: Any, weight: Any, *_: Any) -> tuple[Tensor, ...]:
    most = weight.shape[0]
    return _like(x, x.dtype), *(weight.new_empty(shape) for shape in ((most, x.shape[-1]), (most, most), (most,)))


@_operator(
    "(Tensor grad, Tensor x, Tensor read, Tensor weight, Tensor hidden, Tensor inverse, Tensor? carried)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _hidden_backward_fake,
)
def hidden_backward(
    grad: Tensor, x: Tensor, read: Tensor, weight: Tensor, hidden: Tensor, inverse: Tensor, carried: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `hidden` of ``project(x, read)``: of x, with what is ``carried``, of read, [K, D], of W and b."""
    from rewire.kernels.handwritten import hidden as kernels

    return kernels.backward(grad, x, read, weight, hidden, inverse, carried)


@_operator(
    "(Tensor grad, Tensor streams) -> Tensor",
    lambda grad, streams: streams.new_empty((*streams.shape[:-1], 1), dtype=torch.float32),
)
def products(grad: Tensor, streams: Tensor) -> Tensor:
    """``<grad, streams_i>``, float32 [..., n, 1], of the gradient [..., 1, D] of a read and streams [..., n, D]."""
    from rewire.kernels.handwritten import projection

    return projection.products(grad, streams)


def _gates_fake(products: Any, static: Any, scale: Any, n: int, iterations: int, *_: Any) -> tuple[Tensor, Tensor]:
    lead = products.shape[: -1 if iterations else -2]
    return products.new_empty((*lead, n, 1)), products.new_empty((*lead, n, n + 1)).mT


@_operator(
    "(Tensor products, Tensor static, Tensor scale, int n, int iterations, float eps, float magnitude)"
    " -> (Tensor, Tensor)",
    _gates_fake,
)
def gates(
    products: Tensor, static: Tensor, scale: Tensor, n: int, iterations: int, eps: float, magnitude: float
) -> tuple[Tensor, Tensor]:
    """What units of hyper-connections read, [..., n, 1], and write, [..., n + 1, n], with: see `gating`."""
    from rewire.kernels.handwritten import gates  # only where there is Triton

    return gates.forward(products, static, scale, n, iterations, eps, magnitude)


def _gates_backward_fake(of_read: Any, of_write: Any, products: Any, static: Any, *_: Any) -> tuple[Tensor, Tensor]:
    values = static.shape[-1]
    return torch.empty_like(products), static.new_empty((1 + static.numel() // values, values))


@_operator(
    "(Tensor of_read, Tensor of_write, Tensor products, Tensor static, Tensor scale, int iterations, float eps,"
    " float magnitude) -> (Tensor, Tensor)",
    _gates_backward_fake,
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
    """Gradients of `gates`: of the products; of the static values and, in one more row, the scale."""
    from rewire.kernels.handwritten import gates

    return gates.backward(of_read, of_write, products, static, scale, iterations, eps, magnitude)


@_operator(
    "(Tensor grad, Tensor total, Tensor statistics, int count) -> Tensor",
    lambda grad, total, statistics, count: statistics.new_empty((3, *statistics.shape[1:])),
)
def tally(grad: Tensor, total: Tensor, statistics: Tensor, count: int) -> Tensor:
    """``statistics``, float32 [2, ...], and ``<total, grad> / count``, [...], in one tensor."""
    from rewire.kernels.handwritten import softmax

    return softmax.tally(grad, total, statistics, count)


def _softmax_fake(scores: Any, begun: Any, count: int) -> tuple[Tensor, Tensor]:
    like = scores[0] if begun is None else begun[0]
    return like.new_empty((len(scores) + (begun is not None), *like.shape)), like.new_empty((2, *like.shape))


@_operator("(Tensor[] scores, Tensor? begun, int count) -> (Tensor, Tensor)", _softmax_fake)
def softmax(scores: Sequence[Tensor], begun: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
    """Weights that add up to ``count``, [n, ...], of n scores, float32 [...]; and what `tally` takes of them, [2, ...].

    Of scores that were seen before, ``begun`` is what came of them with ``count=0``: numerators that are not divided,
    and their largest score and sum. They weigh as one more state, the first.
    """
    from rewire.kernels.handwritten import softmax

    return softmax.forward(scores, begun, count)


def _gather_attended_fake(grads: Any, states: Any, scores: Any, tallies: Any, added: Any) -> list[Tensor]:
    *lead, reads = scores[0].shape
    return [*(_like(x, x.dtype) for x in states), scores[0].new_empty((*lead, len(scores), reads))]


@_operator(
    "(Tensor[] grads, Tensor[] states, Tensor[] scores, Tensor[] tallies, Tensor[] added) -> Tensor[]",
    _gather_attended_fake,
)
def gather_attended(
    grads: Sequence[Tensor],
    states: Sequence[Tensor],
    scores: Sequence[Tensor],
    tallies: Sequence[Tensor],
    added: Sequence[Tensor],
) -> list[Tensor]:
    """`gather` of M states, whose scores in N reads are M of [..., N], and the reads' tallies N of [3, ...].

    Gradients that came other ways are any number for a single state, or one for each.

    Returns gradients of the states, and of their scores, [..., M, N].
    """
    from rewire.kernels.handwritten import softmax

    shares, means = softmax.shares(scores, tallies)
    extra = len(added) // len(states)
    spec = spec_of(len(grads), "none", True, added=extra, outputs=len(states), probe=True, attended=True)
    inputs = MixInputs(grads, None, shares.movedim((0, 1), (-2, -1)), added, probes=states, means=means)
    done = launch_forward(spec, inputs, states[0].dtype)
    assert done.score_dots is not None
    return [*done.apart, done.score_dots]
