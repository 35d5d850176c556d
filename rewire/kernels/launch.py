"""Runs the generated kernels on tensors [..., D]: outputs, chains of kernels, sums in two steps. No autograd."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rewire.kernels.arguments import Terms, as_rows, by_output, check_count, check_stacked, check_terms, given, strided
from rewire.kernels.grid import Grid, Launch, start
from rewire.kernels.spec import DOTS_FAN_IN, MAX_NORM_WIDTH, MixSpec


@dataclasses.dataclass(frozen=True, eq=False)
class Mixed:
    """What `mix_forward` computed.

    Attributes:
        mixes: [..., D] for each output; empty if a norm follows and the spec does not keep the mix.
        normed: [..., D] for each output, with a norm.
        rstd: float32 [outputs, rows], 1 / sqrt(mean square or variance + eps), for backward.
        weight_dots: float32 [outputs, N] or [outputs, N, D], <x_k, p_o>; None without probes, or without weights.
        score_dots: float32 [..., 1], with probes and scores; outputs times N, those of the first output first.
        stacked: [..., stacked, D], the tensor that the first mixes are views of; None if none were to be stacked.
    """

    mixes: tuple[Tensor, ...]
    normed: tuple[Tensor, ...] = ()
    rstd: Tensor | None = None
    weight_dots: Tensor | None = None
    score_dots: tuple[Tensor, ...] = ()
    stacked: Tensor | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Gradients:
    """What `mix_backward` computed.

    Attributes:
        sources: [..., D] in the dtype of each source.
        weights: float32 [outputs, N] or [outputs, N, D]; None without weights.
        scores: float32 [..., 1], outputs times N, those of the first output first.
        added: [..., D], the gradient of each added branch (and of an accumulator); None for several outputs, where it
            is that of the output.
        norm_weight: float32 [D], with a norm that has a weight.
        norm_bias: float32 [D], with a norm that has a bias.
        stacked: [..., stacked, D], the tensor that the first of ``sources`` are views of; None if none were to be
            stacked.
    """

    sources: tuple[Tensor, ...]
    weights: Tensor | None
    scores: tuple[Tensor, ...]
    added: Tensor | None
    norm_weight: Tensor | None = None
    norm_bias: Tensor | None = None
    stacked: Tensor | None = None


def mix_forward(
    spec: MixSpec,
    sources: Sequence[Tensor],
    weights: Tensor | None = None,
    scores: Sequence[Tensor] = (),
    added: Sequence[Tensor] = (),
    *,
    accumulators: Sequence[Tensor] = (),
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 1e-6,
    probe: Tensor | Sequence[Tensor] | None = None,
    dtype: torch.dtype | None = None,
    stacked: int = 0,
) -> Mixed:
    """The mixes of `spec`, accumulated in float32 and rounded once.

    Args:
        spec: what is computed.
        sources: [..., D], float32, bfloat16 or float16, of one shape; rows may be strided, each in its own way.
        weights: float32 [outputs, N] or [outputs, N, D]; the first dimension may be missing for one output.
        scores: float32 [..., 1], outputs times N, those of the first output first.
        added: [..., D], outputs times ``spec.added``, those of the first output first.
        accumulators: float32 [..., D], one for each output.
        norm_weight, norm_bias: [D].
        eps: of the norm.
        probe: [..., D], one for each output.
        dtype: of the results; by default what plain adds of sources and added would have.
        stacked: how many mixes, from the first on, are to be views of one new tensor [..., stacked, D]. Not with a
            norm.

    Raises:
        TypeError: a dtype that the kernels do not accumulate exactly enough (float64), or do not know.
        ValueError: shapes or arguments do not fit the spec.
    """
    probes = () if probe is None else (probe,) if isinstance(probe, Tensor) else tuple(probe)
    inputs = (*sources, *added, *accumulators, *probes)
    check_terms(spec, inputs, weights, scores)
    check_count("sources", sources, spec.sources)
    check_count("added", added, spec.outputs * spec.added)
    check_count("accumulators", accumulators, spec.outputs * spec.accumulate)
    check_count("probe", probes, spec.outputs * spec.probe)
    check_count("norm_weight", given(norm_weight), int(spec.scaled))
    check_count("norm_bias", given(norm_bias), int(spec.shifted))
    check_stacked(stacked, 0 if spec.norm else spec.outputs, "mixes without a norm")
    shape = inputs[0].shape
    dtype = dtype or functools.reduce(torch.promote_types, [x.dtype for x in (*sources, *added)] or [torch.float32])
    norm = {"norm_weight": norm_weight, "norm_bias": norm_bias, "eps": eps}
    if spec.norm and spec.outputs > 1:
        # Registers cannot hold whole rows of several mixes: the norm comes in kernels of its own, from float32.
        plain = mix_forward(
            spec.without_norm(), sources, weights, scores, accumulators=accumulators, dtype=torch.float32
        )
        single = _norm_alone(spec, spec.keep_mix)
        normed = [mix_forward(single, (), added=(x,), dtype=dtype, **norm) for x in plain.mixes]  # type: ignore[arg-type]
        return Mixed(
            mixes=tuple(x for one in normed for x in one.mixes),
            normed=tuple(x for one in normed for x in one.normed),
            rstd=torch.cat([one.rstd for one in normed if one.rstd is not None]),
        )
    terms = Terms.of(spec, sources, weights, scores)
    like = as_rows(inputs[0])
    shared = strided("probes", tuple(map(as_rows, probes))) if probes else {}
    running = tuple(map(as_rows, accumulators))
    mixes, whole = _empty(like, [dtype] * spec.outputs * spec.mixed, stacked)
    steps: list[Mixed] = []
    for part, step in spec.chunks():
        arguments = terms[part].arguments() | shared
        if step.accumulate:
            arguments |= strided("accumulators", running)
        if step.added:
            arguments |= strided("added", tuple(map(as_rows, added)))
        if step.norm:
            arguments |= {name: x for name, x in norm.items() if x is not None}
        running = mixes if part.stop == spec.sources else _empty(like, [torch.float32] * spec.outputs)[0]
        steps.append(_forward_step(step, like, arguments, running, dtype))
    found = [step.weight_dots for step in steps if step.weight_dots is not None]
    return Mixed(
        mixes=tuple(x.view(shape) for x in mixes),
        normed=tuple(x.view(shape) for x in steps[-1].normed),
        rstd=steps[-1].rstd,
        weight_dots=torch.cat(found, 1) if found else None,
        score_dots=tuple(x.view(*shape[:-1], 1) for x in _joined([step.score_dots for step in steps], spec.outputs)),
        stacked=_unflattened(whole, shape),
    )


def mix_backward(
    spec: MixSpec,
    grads: Sequence[Tensor],
    sources: Sequence[Tensor],
    weights: Tensor | None = None,
    scores: Sequence[Tensor] = (),
    *,
    mixes: Sequence[Tensor] = (),
    rstd: Tensor | None = None,
    grad_mixes: Sequence[Tensor] = (),
    norm_weight: Tensor | None = None,
    stacked: int = 0,
    carried: Sequence[Tensor] = (),
) -> Gradients:
    """Every gradient of the mixes of `spec`.

    Args:
        spec: as in forward; probes are ignored.
        grads: [..., D] for each output, the gradients of what is normed if there is a norm, else of the mixes.
        sources, weights, scores, norm_weight: as in forward.
        mixes: with a norm, the mixes as forward returned them. Forward has to keep them (``keep_mix``), as the plain
            network keeps what a norm reads.
        rstd: with a norm, as forward returned it.
        grad_mixes: with a norm, gradients of the mixes themselves; none if only the norm reads them.
        stacked: how many gradients of sources, from the first on, are to be views of one new tensor [..., stacked, D],
            as the sources may be. They have to be of one dtype.
        carried: [..., D] for each source if the spec says so, what is added to its gradient.

    Raises:
        TypeError, ValueError: as in `mix_forward`.
    """
    check_terms(spec, (*grads, *sources, *mixes, *grad_mixes, *carried), weights, scores)
    check_count("sources", sources, spec.sources)
    check_count("grads", grads, spec.outputs)
    check_count("mixes", mixes, spec.outputs if spec.norm else 0)
    check_count("carried", carried, spec.sources * spec.carried)
    check_count("rstd", given(rstd), int(spec.norm is not None))
    check_count("norm_weight", given(norm_weight), int(spec.scaled))
    if grad_mixes:
        check_count("grad_mixes", grad_mixes, spec.outputs if spec.norm else 0)
    check_stacked(stacked, spec.sources, "gradients of sources")
    if len({x.dtype for x in sources[:stacked]}) > 1:
        raise ValueError("Sources whose gradients are stacked have to be of one dtype.")
    shape, dtype = grads[0].shape, grads[0].dtype
    terms = Terms.of(spec, sources, weights, scores)
    upstream = tuple(map(as_rows, grads))
    grad_sources, whole = _empty(upstream[0], [x.dtype for x in sources], stacked)
    one = spec.outputs == 1
    if rstd is None:
        found = dataclasses.replace(
            _plain_backward(spec, upstream, terms, grad_sources, tuple(map(as_rows, carried))),
            added=upstream[0] if one else None,
        )
        return _shaped(found, grad_sources, whole, shape)
    normed = dataclasses.replace(spec, keep_mix=bool(grad_mixes), accumulate=False)
    arguments = [
        {"rstd": rstd[o]}
        | ({} if norm_weight is None else {"norm_weight": norm_weight})
        | strided("grad_normed", upstream[o])
        | strided("mix", as_rows(mixes[o]))
        | (strided("grad_mix", as_rows(grad_mixes[o])) if grad_mixes else {})
        for o in range(spec.outputs)
    ]
    few = spec.weights != "channel" and spec.sources <= DOTS_FAN_IN and shape[-1] <= MAX_NORM_WIDTH // 2
    if one and (few or not spec.sources):
        normed = dataclasses.replace(normed, added=min(spec.added, 1))
        found = _backward_step(normed, upstream[0], terms, arguments[0], grad_sources, dtype)
        return _shaped(found, grad_sources, whole, shape)
    # Registers cannot hold whole rows and all those sums: the norm comes first, its gradient in float32.
    alone = _norm_alone(spec, bool(grad_mixes))
    inner = [
        _backward_step(alone, g, Terms((), None, ()), a, (), torch.float32)
        for g, a in zip(upstream, arguments, strict=True)
    ]
    middle = [step.added for step in inner if step.added is not None]
    found = dataclasses.replace(
        _plain_backward(spec, middle, terms, grad_sources),
        added=middle[0].to(dtype) if one else None,
        norm_weight=_sum([step.norm_weight for step in inner]),
        norm_bias=_sum([step.norm_bias for step in inner]),
    )
    return _shaped(found, grad_sources, whole, shape)


def _norm_alone(spec: MixSpec, keep_mix: bool) -> MixSpec:
    """The norm of `spec` on what another kernel has mixed."""
    unweighted = {"sources": 0, "weights": "none", "scores": False, "accumulate": False}
    return dataclasses.replace(spec, **unweighted, added=1, outputs=1, keep_mix=keep_mix)  # type: ignore[arg-type]


def _forward_step(
    spec: MixSpec, like: Tensor, arguments: Mapping[str, Any], mixes: Sequence[Tensor], dtype: torch.dtype
) -> Mixed:
    """One forward kernel, which fills ``mixes``; everything is [rows, D]. ``dtype`` is that of what is normed."""
    rows, cols = like.shape
    grid = Grid.of(spec, like, sums=spec.probe)
    outputs: dict[str, Any] = _dot_partials(spec, grid, like) if spec.probe else {}
    if spec.mixed:
        outputs |= strided("mixes", tuple(mixes))
    if spec.norm:
        (outputs["normed"],), _ = _empty(like, [dtype])
        outputs["rstd"] = torch.empty(rows, dtype=torch.float32, device=like.device)
    start(Launch(spec, False, grid, {**arguments, **outputs, "rows": rows, "COLS": cols}), like.device)
    if spec.norm:
        return Mixed((), (outputs["normed"],), outputs["rstd"][None])
    return Mixed(
        (), weight_dots=_total(outputs.get("weight_partials")), score_dots=_scores(outputs.get("score_partials"))
    )


def _plain_backward(
    spec: MixSpec,
    grads: Sequence[Tensor],
    terms: Terms,
    grad_sources: Sequence[Tensor],
    carried: Sequence[Tensor] = (),
) -> Gradients:
    """Backward without a norm, in as many kernels as the fan-in asks for; everything is [rows, D]."""
    most = spec.fan_in(dots=spec.has_dots)
    plain = dataclasses.replace(spec.without_norm(), probe=False, accumulate=False, added=0)
    arguments = strided("grads", tuple(grads))
    steps = []
    for first in range(0, spec.sources, most):
        part = slice(first, min(first + most, spec.sources))
        step = dataclasses.replace(plain, sources=part.stop - first)
        more = strided("carried", tuple(carried[part])) if carried else {}
        steps.append(_backward_step(step, grads[0], terms[part], arguments | more, grad_sources[part], torch.float32))
    found = [step.weights for step in steps if step.weights is not None]
    return Gradients(
        sources=(),
        weights=torch.cat(found, 1) if found else None,
        scores=_joined([step.scores for step in steps], spec.outputs),
        added=None,
    )


def _backward_step(
    spec: MixSpec,
    like: Tensor,
    terms: Terms,
    arguments: Mapping[str, Any],
    grad_sources: Sequence[Tensor],
    dtype: torch.dtype,
) -> Gradients:
    """One backward kernel, which fills ``grad_sources``; everything is [rows, D].

    ``dtype`` is that of the added branches' gradient.
    """
    rows, cols = like.shape
    grid = Grid.of(spec, like, sums=True)
    outputs: dict[str, Any] = _dot_partials(spec, grid, like)
    if spec.sources:
        outputs |= strided("grad_sources", tuple(grad_sources))
    if spec.norm and spec.added:
        (outputs["grad_added"],), _ = _empty(like, [dtype])
    for name in ["weight"] * spec.scaled + ["bias"] * spec.shifted:
        partials = torch.empty(grid.row_programs, cols, dtype=torch.float32, device=like.device)
        outputs[f"norm_{name}_partials"] = partials
    inputs = terms.arguments() if spec.has_dots else {}
    start(Launch(spec, True, grid, {**inputs, **arguments, **outputs, "rows": rows, "COLS": cols}), like.device)
    return Gradients(
        sources=(),
        weights=_total(outputs.get("weight_partials")),
        scores=_scores(outputs.get("score_partials")),
        added=outputs.get("grad_added"),
        norm_weight=_total(outputs.get("norm_weight_partials")),
        norm_bias=_total(outputs.get("norm_bias_partials")),
    )


def _joined(parts: Sequence[Sequence[Tensor]], outputs: int) -> tuple[Tensor, ...]:
    """Scores of several kernels, each outputs times its sources, as outputs times N."""
    by_part = [by_output(part, outputs) for part in parts]
    return tuple(x for o in range(outputs) for part in by_part for x in part[o])


def _empty(like: Tensor, dtypes: Sequence[torch.dtype], stacked: int = 0) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """[rows, D] for each dtype, and [rows, stacked, D] that the first ``stacked`` of them are views of."""
    rows, cols = like.shape
    whole = torch.empty(rows, stacked, cols, dtype=dtypes[0], device=like.device) if stacked else None
    views = () if whole is None else whole.unbind(1)
    return (*views, *(torch.empty(rows, cols, dtype=dtype, device=like.device) for dtype in dtypes[stacked:])), whole


def _dot_partials(spec: MixSpec, grid: Grid, like: Tensor) -> dict[str, Tensor]:
    """float32 sums that programs leave behind, as `_dot_parameters` of the generator declares them."""
    rows, cols = like.shape
    shapes: dict[str, tuple[int, ...]] = {}
    if spec.weights == "scalar":
        shapes["weight_partials"] = (grid.row_programs * grid.col_programs, spec.outputs, spec.sources)
    if spec.weights == "channel":
        shapes["weight_partials"] = (grid.row_programs, spec.outputs, spec.sources, cols)
    if spec.scores:
        shapes["score_partials"] = (grid.col_programs, rows, spec.pairs)
    return {name: torch.empty(shape, dtype=torch.float32, device=like.device) for name, shape in shapes.items()}


def _total(partials: Tensor | None) -> Tensor | None:
    """The second step of a sum: over the programs, in a fixed order."""
    if partials is None:
        return None
    return partials[0] if len(partials) == 1 else partials.sum(0)


def _scores(partials: Tensor | None) -> tuple[Tensor, ...]:
    """The same for [programs, rows, pairs], as one contiguous [rows] for each pair."""
    if partials is None:
        return ()
    _, rows, pairs = partials.shape
    total = torch.empty(pairs, rows, dtype=torch.float32, device=partials.device)
    torch.sum(partials, 0, out=total.t())
    return total.unbind()


def _shaped(found: Gradients, sources: Sequence[Tensor], whole: Tensor | None, shape: torch.Size) -> Gradients:
    return dataclasses.replace(
        found,
        sources=tuple(x.view(shape) for x in sources),
        scores=tuple(x.view(*shape[:-1], 1) for x in found.scores),
        added=None if found.added is None else found.added.view(shape),
        stacked=_unflattened(whole, shape),
    )


def _unflattened(whole: Tensor | None, shape: torch.Size) -> Tensor | None:
    """[rows, n, D] as [..., n, D]."""
    return None if whole is None else whole.view(*shape[:-1], *whole.shape[1:])


def _sum(parts: Sequence[Tensor | None]) -> Tensor | None:
    """In order; None if there is none."""
    given = [x for x in parts if x is not None]
    return functools.reduce(torch.add, given) if given else None
