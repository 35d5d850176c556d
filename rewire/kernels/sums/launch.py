"""Runs the generated kernels on tensors [..., D], without autograd.

The steps for tensors of given shapes, strides and dtypes are a `routine.Routine`. Routines are cached, so that nothing
is checked or computed twice.
"""

from __future__ import annotations

import itertools
import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rewire.kernels.arguments import metadata
from rewire.kernels.kernel import MOST_KEPT
from rewire.kernels.sums import routine
from rewire.kernels.sums.routine import Routine
from rewire.kernels.sums.spec import MixSpec
from rewire.torch_internals import tensor_guards


class MixInputs(NamedTuple):
    """The inputs of `mix_forward`.

    Attributes:
        sources: [..., D], float32, bfloat16 or float16, of one shape; each may have its own row stride.
        weights: float32 [outputs, N] or [outputs, N, D]; the first dimension may be missing for one output.
        scores: float32, one tensor [..., outputs, N]; or [..., 1], outputs times N, ordered by output; or for each
            source [..., outputs]; or for each probe [..., N].
        added: [..., D], outputs times ``spec.added``, ordered by output.
        accumulators: float32 [..., D], one for each output.
        probes: [..., D], one for each output.
        norm_weight, norm_bias: [D].
        means: float32 [N, ...], if scores are a softmax; these are then one tensor [..., outputs, N] in which each
            [...] is contiguous and follows the previous one.
        stacks: whether the first source is a stack [..., n, D] of n.
    """

    sources: Sequence[Tensor] = ()
    weights: Tensor | None = None
    scores: Sequence[Tensor] = ()
    added: Sequence[Tensor] = ()
    accumulators: Sequence[Tensor] = ()
    probes: Sequence[Tensor] = ()
    norm_weight: Tensor | None = None
    norm_bias: Tensor | None = None
    means: Tensor | None = None
    stacks: bool = False

    def groups(self) -> tuple[Sequence[Tensor], ...]:
        """Each field as a sequence."""
        sources, weights, scores, added, accumulators, probes, scale, bias, means, _ = self
        return (
            sources,
            () if weights is None else (weights,),
            scores,
            added,
            accumulators,
            probes,
            () if scale is None else (scale,),
            () if bias is None else (bias,),
            () if means is None else (means,),
        )


class Mixed(NamedTuple):
    """The results of `mix_forward`.

    Attributes:
        apart: [..., D] for each output that is not stacked; empty if a norm follows and the spec does not keep the mix.
        normed: [..., D], with a norm.
        rstd: float32 [rows], 1 / sqrt(mean square or variance + eps), for backward.
        weight_dots: float32 [outputs, N] or [outputs, N, D], <x_k, p_o>; None without probes, or without weights.
        score_dots: float32 [..., outputs, N], with probes and scores; gradients of logits if scores are a softmax.
        stacked: [..., stacked, D], the first mixes; None if none were to be stacked.
    """

    apart: tuple[Tensor, ...]
    normed: Tensor | None = None
    rstd: Tensor | None = None
    weight_dots: Tensor | None = None
    score_dots: Tensor | None = None
    stacked: Tensor | None = None

    @property
    def mixes(self) -> tuple[Tensor, ...]:
        """The mixes, [..., D] for each output."""
        return self.apart if self.stacked is None else (*self.stacked.unbind(-2), *self.apart)


class GradientInputs(NamedTuple):
    """The inputs of `mix_backward`.

    Attributes:
        grads: [..., D] for each output, the gradients of the norm if there is one, else of the mixes.
        sources, weights, scores, norm_weight: as in `MixInputs`.
        mixes: with a norm, the mix as forward returned it, which has to keep it (``keep_mix``), as the plain network
            keeps the input of a norm.
        rstd: with a norm, as forward returned it.
        grad_mixes: with a norm, the gradient of the mix itself; empty if only the norm reads it.
        carried: [..., D] for each source if the spec says so, a gradient that is added to the source's.
        stacks: whether the first of grads, of sources and of carried is a stack [..., n, D] of n.
    """

    grads: Sequence[Tensor]
    sources: Sequence[Tensor] = ()
    weights: Tensor | None = None
    scores: Sequence[Tensor] = ()
    mixes: Sequence[Tensor] = ()
    rstd: Tensor | None = None
    grad_mixes: Sequence[Tensor] = ()
    norm_weight: Tensor | None = None
    carried: Sequence[Tensor] = ()
    stacks: bool = False

    def groups(self) -> tuple[Sequence[Tensor], ...]:
        """Each field as a sequence."""
        grads, sources, weights, scores, mixes, rstd, grad_mixes, scale, carried, _ = self
        return (
            grads,
            sources,
            () if weights is None else (weights,),
            scores,
            mixes,
            () if rstd is None else (rstd,),
            grad_mixes,
            () if scale is None else (scale,),
            carried,
        )


class Gradients(NamedTuple):
    """The results of `mix_backward`.

    Attributes:
        apart: [..., D] for each source whose gradient is not stacked, in its dtype.
        weights: float32 [outputs, N] or [outputs, N, D]; None without weights.
        scores: float32 [..., outputs, N]; None without scores.
        added: [..., D], the gradient of each added branch (and of an accumulator); None for several outputs, where it
            equals the output's gradient, and for a stack.
        norm_weight: float32 [D], with a norm.
        norm_bias: float32 [D], with a norm that has a bias.
        stacked: [..., stacked, D], the gradients of the first sources; None if none were to be stacked.
    """

    apart: tuple[Tensor, ...]
    weights: Tensor | None = None
    scores: Tensor | None = None
    added: Tensor | None = None
    norm_weight: Tensor | None = None
    norm_bias: Tensor | None = None
    stacked: Tensor | None = None

    @property
    def sources(self) -> tuple[Tensor, ...]:
        """The gradients of the sources, [..., D] each."""
        return self.apart if self.stacked is None else (*self.stacked.unbind(-2), *self.apart)


def mix_forward(
    spec: MixSpec,
    inputs: MixInputs,
    dtype: torch.dtype | None = None,
    eps: float = 1e-6,
    stacked: int = 0,
) -> Mixed:
    """The mixes of `spec`, accumulated in float32 and rounded once.

    Args:
        dtype: dtype of the results; by default that of plain adds of sources and added.
        eps: epsilon of the norm.
        stacked: how many of the first mixes are views of one new tensor [..., stacked, D]. Not with a norm.

    Raises:
        TypeError: a dtype that the kernels do not accumulate exactly enough (float64), or do not support.
        ValueError: shapes or arguments do not fit the spec.
    """
    apart, others = _run(routine.forward, spec, inputs, (dtype, eps, stacked))
    return Mixed(apart, **others)


def mix_backward(spec: MixSpec, inputs: GradientInputs, stacked: int = 0) -> Gradients:
    """All gradients of the mixes of `spec`, whose probes are ignored.

    Args:
        stacked: how many of the first sources' gradients are views of one new tensor [..., stacked, D], as the sources
            may be. They have to have one dtype.

    Raises:
        TypeError, ValueError: as in `mix_forward`.
    """
    apart, others = _run(routine.backward, spec, inputs, (stacked,))
    return Gradients(apart, **others)


# Routines.


class _Known(NamedTuple):
    """A routine, and a test whether it is for given tensors."""

    routine: Routine
    alike: Callable[..., bool]


#: Routines by question and metadata of the tensors; by question alone, the one that was used last.
_routines: dict[Any, _Known] = {}
_sizes = operator.attrgetter("shape", "dtype", "device")
_lock = threading.Lock()  # for threads that make routines; look-ups do not need it


def _run(
    make: Callable[..., Routine], spec: MixSpec, inputs: MixInputs | GradientInputs, options: tuple[object, ...]
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """The results of the routine for these tensors."""
    groups = inputs.groups()
    tensors = list(itertools.chain.from_iterable(groups))
    question = (make, spec, options, inputs.stacks, tuple(map(len, groups)))
    known = last = _routines.get(question)
    if known is None or not known.alike(*tensors):
        # One call for all tensors is twice as fast as a `Metadata` for each.
        key = question, tuple(map(_sizes, tensors)), tuple(map(Tensor.stride, tensors))
        known = _routines.get(key)
        if known is None:
            by_field = {name: [metadata(x) for x in group] for name, group in zip(inputs._fields, groups, strict=False)}
            made = make(spec, routine.given(by_field, inputs.stacks, spec.probe), *options)
            known = _Known(made, _alike(tensors))
            _keep(key, known)
        if known is not last:
            _keep(question, known)
    return known.routine(tensors)


def _alike(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A test in C++, four times as fast as a key, whether tensors have the metadata of these. It may say no
    unnecessarily, if one tensor is given twice or requires gradients where another did not.
    """
    return tensor_guards(tensors) or (lambda *_: False)


def _keep(key: object, known: _Known) -> None:
    """Cache a routine; the oldest are dropped when there are too many."""
    with _lock:
        _routines.pop(key, None)
        while len(_routines) >= MOST_KEPT:
            del _routines[next(iter(_routines))]
        _routines[key] = known
