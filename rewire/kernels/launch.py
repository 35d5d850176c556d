"""Runs the generated kernels on tensors [..., D]: rows, tiles, outputs, chains of kernels. No autograd."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rewire.kernels import cache
from rewire.kernels.generator import source
from rewire.kernels.spec import FAN_IN, MAX_NORM_WIDTH, MixSpec

#: Programs among which a kernel that sums over rows is divided, about: a few for each processor of a large GPU. Fixed,
#: so that results do not depend on the device.
PROGRAMS = 1024


@dataclasses.dataclass(frozen=True, eq=False)
class Mixed:
    """What `mix_forward` computed.

    Attributes:
        mixes: [..., D] for each output; empty if a norm follows and the spec does not keep the mix.
        normed: [..., D] for each output, with a norm.
        rstd: float32 [outputs, rows], 1 / sqrt(mean square or variance + eps), for backward.
        weight_dots: float32 [1, N] or [1, N, D], <x_k, probe>; None without a probe, or without weights.
        score_dots: float32 [..., 1] for each source, with a probe and scores.
    """

    mixes: tuple[Tensor, ...]
    normed: tuple[Tensor, ...] = ()
    rstd: Tensor | None = None
    weight_dots: Tensor | None = None
    score_dots: tuple[Tensor, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Gradients:
    """What `mix_backward` computed.

    Attributes:
        sources: [..., D] in the dtype of each source.
        weights: float32 [outputs, N] or [outputs, N, D]; None without weights.
        scores: float32 [..., 1], outputs times N, those of the first output first.
        added: [..., D], the gradient of each added branch (and of an accumulator); None for three outputs.
        norm_weight: float32 [D], with a norm.
        norm_bias: float32 [D], with a LayerNorm.
    """

    sources: tuple[Tensor, ...]
    weights: Tensor | None
    scores: tuple[Tensor, ...]
    added: Tensor | None
    norm_weight: Tensor | None = None
    norm_bias: Tensor | None = None


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
    probe: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Mixed:
    """The mixes of `spec`, accumulated in float32 and rounded once.

    Args:
        spec: what is computed.
        sources: [..., D], float32, bfloat16 or float16, of one shape; rows may be strided.
        weights: float32 [N] or [N, D]; [3, N] or [3, N, D] for three outputs.
        scores: float32 [..., 1], outputs times N, those of the first output first.
        added: [..., D].
        accumulators: float32 [..., D], one for each output.
        norm_weight, norm_bias: [D].
        eps: of the norm.
        probe: [..., D].
        dtype: of the results; by default what plain adds of sources and added would have.

    Raises:
        TypeError: a dtype that the kernels do not accumulate exactly enough (float64), or do not know.
        ValueError: shapes or arguments do not fit the spec.
    """
    inputs = (*sources, *added, *accumulators)
    _check(spec, inputs, weights, scores)
    _count("sources", sources, spec.sources)
    _count("added", added, spec.added)
    _count("accumulators", accumulators, spec.outputs * spec.accumulate)
    _count("probe", () if probe is None else (probe,), int(spec.probe))
    _count("norm_weight", () if norm_weight is None else (norm_weight,), int(spec.norm is not None))
    _count("norm_bias", () if norm_bias is None else (norm_bias,), int(spec.norm == "layer"))
    shape = inputs[0].shape
    dtype = dtype or functools.reduce(torch.promote_types, [x.dtype for x in (*sources, *added)] or [torch.float32])
    norm = {"norm_weight": norm_weight, "norm_bias": norm_bias, "eps": eps}
    if spec.norm and spec.outputs > 1:
        # Registers cannot hold whole rows of three mixes: the norm comes in kernels of its own, from float32.
        plain = dataclasses.replace(spec, norm=None, keep_mix=False)
        total = mix_forward(plain, sources, weights, scores, accumulators=accumulators, dtype=torch.float32).mixes
        single = MixSpec(0, "none", added=1, norm=spec.norm, keep_mix=spec.keep_mix)
        normed = [mix_forward(single, (), added=(x,), dtype=dtype, **norm) for x in total]  # type: ignore[arg-type]
        return Mixed(
            mixes=tuple(x for one in normed for x in one.mixes),
            normed=tuple(x for one in normed for x in one.normed),
            rstd=torch.cat([one.rstd for one in normed if one.rstd is not None]),
        )
    terms = _Terms.of(spec, sources, weights, scores)
    running = tuple(_rows(x).contiguous() for x in accumulators)
    shared = {} if probe is None else _strided("probe", _rows(probe))
    steps: list[Mixed] = []
    for part, step in spec.chunks():
        arguments = terms[part].arguments() | shared
        if step.accumulate:
            arguments["accumulators"] = running
        if step.added:
            arguments |= _strided("added", tuple(map(_rows, added)))
        if step.norm:
            arguments |= {name: x for name, x in norm.items() if x is not None}
        steps.append(
            _forward_step(step, _rows(inputs[0]), arguments, dtype if part.stop == spec.sources else torch.float32)
        )
        running = steps[-1].mixes
    found = [step.weight_dots for step in steps if step.weight_dots is not None]
    return Mixed(
        mixes=tuple(x.view(shape) for x in steps[-1].mixes),
        normed=tuple(x.view(shape) for x in steps[-1].normed),
        rstd=steps[-1].rstd,
        weight_dots=torch.cat(found, 1) if found else None,
        score_dots=tuple(x.view(*shape[:-1], 1) for step in steps for x in step.score_dots),
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
) -> Gradients:
    """Every gradient of the mixes of `spec`.

    Args:
        spec: as in forward; a probe is ignored.
        grads: [..., D] for each output, the gradients of what is normed if there is a norm, else of the mixes.
        sources, weights, scores, norm_weight: as in forward.
        mixes: with a norm, the mixes as forward returned them. Forward has to keep them (``keep_mix``), as the plain
            network keeps what a norm reads.
        rstd: with a norm, as forward returned it.
        grad_mixes: with a norm, gradients of the mixes themselves; none if only the norm reads them.

    Raises:
        TypeError, ValueError: as in `mix_forward`.
    """
    _check(spec, (*grads, *sources, *mixes, *grad_mixes), weights, scores)
    _count("sources", sources, spec.sources)
    _count("grads", grads, spec.outputs)
    _count("mixes", mixes, spec.outputs if spec.norm else 0)
    _count("rstd", () if rstd is None else (rstd,), int(spec.norm is not None))
    _count("norm_weight", () if norm_weight is None else (norm_weight,), int(spec.norm is not None))
    if grad_mixes:
        _count("grad_mixes", grad_mixes, spec.outputs if spec.norm else 0)
    shape, dtype = grads[0].shape, grads[0].dtype
    terms = _Terms.of(spec, sources, weights, scores)
    upstream = tuple(map(_rows, grads))
    if rstd is None or norm_weight is None:
        found = _plain_backward(spec, upstream, terms)
        return _shaped(dataclasses.replace(found, added=upstream[0] if spec.outputs == 1 else None), shape)
    outer = dataclasses.replace(spec, keep_mix=bool(grad_mixes), accumulate=False)
    arguments = [
        {"rstd": rstd[o], "norm_weight": norm_weight}
        | _strided("grad_normed", upstream[o])
        | _strided("mix", _rows(mixes[o]))
        | (_strided("grad_mix", _rows(grad_mixes[o])) if grad_mixes else {})
        for o in range(spec.outputs)
    ]
    narrow = shape[-1] <= MAX_NORM_WIDTH // 2
    if spec.outputs == 1 and spec.weights != "channel" and spec.sources <= FAN_IN and narrow:
        outer = dataclasses.replace(outer, added=min(outer.added, 1))
        return _shaped(_backward_step(outer, upstream[0], terms, arguments[0], dtype), shape)
    # Registers cannot hold whole rows and all those sums: the norm comes first, its gradient in float32.
    norm = MixSpec(0, "none", added=1, norm=spec.norm, keep_mix=bool(grad_mixes))
    inner = [
        _backward_step(norm, g, _Terms((), None, ()), a, torch.float32)
        for g, a in zip(upstream, arguments, strict=True)
    ]
    middle = [step.added for step in inner if step.added is not None]
    found = _plain_backward(spec, middle, terms)
    return _shaped(
        dataclasses.replace(
            found,
            added=middle[0].to(dtype) if spec.outputs == 1 else None,
            norm_weight=_sum([step.norm_weight for step in inner]),
            norm_bias=_sum([step.norm_bias for step in inner]),
        ),
        shape,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Terms:
    """The weighted part of a mix, flattened to rows.

    Attributes:
        sources: [rows, D].
        weights: float32 [outputs, N] or [outputs, N, D].
        scores: for each output N of float32 [rows], all of one stride.
    """

    sources: tuple[Tensor, ...]
    weights: Tensor | None
    scores: tuple[tuple[Tensor, ...], ...]

    @classmethod
    def of(cls, spec: MixSpec, sources: Sequence[Tensor], weights: Tensor | None, scores: Sequence[Tensor]) -> _Terms:
        flat = [s.reshape(-1) for s in scores]
        if len({s.stride() for s in flat}) > 1:
            flat = [s.contiguous() for s in flat]
        by_output = tuple(_by_output(flat, spec.outputs)) if scores else ()
        if weights is not None and weights.dim() == (1 if spec.weights == "scalar" else 2):
            weights = weights[None]
        return cls(tuple(map(_rows, sources)), weights, by_output)

    def __getitem__(self, part: slice) -> _Terms:
        weights = None if self.weights is None else self.weights[:, part]
        return _Terms(self.sources[part], weights, tuple(scores[part] for scores in self.scores))

    def arguments(self) -> dict[str, Any]:
        """What `_source_parameters` of the generator declares."""
        arguments = _strided("sources", self.sources) if self.sources else {}
        if self.weights is not None:
            arguments["weights"] = self.weights.contiguous()
        if self.scores:
            flat = tuple(s for scores in self.scores for s in scores)
            arguments |= {"scores": flat, "score_stride": flat[0].stride(0)}
        return arguments


def _forward_step(spec: MixSpec, like: Tensor, arguments: Mapping[str, Any], dtype: torch.dtype) -> Mixed:
    """One forward kernel; everything is [rows, D]."""
    rows, cols = like.shape
    grid = _Grid.of(spec, like, sums=spec.probe)
    empty = functools.partial(torch.empty, device=like.device)
    outputs: dict[str, Any] = _dot_partials(spec, grid, rows, cols, like.device) if spec.probe else {}
    if spec.mixed:
        outputs["mixes"] = tuple(empty(rows, cols, dtype=dtype) for _ in range(spec.outputs))
    if spec.norm:
        outputs |= {"normed": empty(rows, cols, dtype=dtype), "rstd": empty(rows, dtype=torch.float32)}
    _launch(spec, False, grid, like.device, {**arguments, **outputs, "rows": rows, "COLS": cols})
    weight_dots, score_dots = _summed_dots(outputs)
    if spec.norm:
        return Mixed(outputs.get("mixes", ()), (outputs["normed"],), outputs["rstd"][None])
    return Mixed(outputs["mixes"], weight_dots=weight_dots, score_dots=score_dots)


def _plain_backward(spec: MixSpec, grads: Sequence[Tensor], terms: _Terms) -> Gradients:
    """Backward without a norm, in as many kernels as the fan-in asks for; everything is [rows, D]."""
    most = FAN_IN // spec.outputs  # sums over rows for each pair of a source and an output
    plain = dataclasses.replace(spec, norm=None, keep_mix=False, probe=False, accumulate=False, added=0)
    steps = []
    for first in range(0, spec.sources, most):
        part = slice(first, min(first + most, spec.sources))
        step = dataclasses.replace(plain, sources=part.stop - first)
        steps.append(_backward_step(step, grads[0], terms[part], _strided("grads", tuple(grads)), torch.float32))
    found = [step.weights for step in steps if step.weights is not None]
    parts = [_by_output(step.scores, spec.outputs) for step in steps]
    return Gradients(
        sources=tuple(x for step in steps for x in step.sources),
        weights=torch.cat(found, 1) if found else None,
        scores=tuple(x for o in range(spec.outputs) for part in parts for x in part[o]),
        added=None,
    )


def _by_output(scores: Sequence[Tensor], outputs: int) -> list[tuple[Tensor, ...]]:
    """outputs times N scores as N of each output."""
    n = len(scores) // outputs
    return [tuple(scores[o * n : (o + 1) * n]) for o in range(outputs)]


def _backward_step(
    spec: MixSpec, like: Tensor, terms: _Terms, arguments: Mapping[str, Any], dtype: torch.dtype
) -> Gradients:
    """One backward kernel; everything is [rows, D]. ``dtype`` is that of the added branches' gradient."""
    rows, cols = like.shape
    grid = _Grid.of(spec, like, sums=True)
    empty = functools.partial(torch.empty, device=like.device)
    outputs: dict[str, Any] = _dot_partials(spec, grid, rows, cols, like.device)
    if spec.sources:
        outputs["grad_sources"] = tuple(empty(rows, cols, dtype=x.dtype) for x in terms.sources)
    if spec.norm and spec.added:
        outputs["grad_added"] = empty(rows, cols, dtype=dtype)
    for name in {None: (), "rms": ("weight",), "layer": ("weight", "bias")}[spec.norm]:
        outputs[f"norm_{name}_partials"] = empty(grid.row_programs, cols, dtype=torch.float32)
    inputs = terms.arguments() if spec.weights != "none" or spec.scores else {}
    _launch(spec, True, grid, like.device, {**inputs, **arguments, **outputs, "rows": rows, "COLS": cols})
    weights, scores = _summed_dots(outputs)
    return Gradients(
        sources=outputs.get("grad_sources", ()),
        weights=weights,
        scores=scores,
        added=outputs.get("grad_added"),
        norm_weight=outputs["norm_weight_partials"].sum(0) if spec.norm else None,
        norm_bias=outputs["norm_bias_partials"].sum(0) if spec.norm == "layer" else None,
    )


def _dot_partials(spec: MixSpec, grid: _Grid, rows: int, cols: int, device: torch.device) -> dict[str, Tensor]:
    """float32 sums that programs leave behind, as `_dot_parameters` of the generator declares them."""
    shapes: dict[str, tuple[int, ...]] = {}
    if spec.weights == "scalar":
        shapes["weight_partials"] = (grid.row_programs * grid.col_programs, spec.outputs, spec.sources)
    if spec.weights == "channel":
        shapes["weight_partials"] = (grid.row_programs, spec.outputs, spec.sources, cols)
    if spec.scores:
        shapes["score_partials"] = (grid.col_programs, spec.factors, rows)
    return {name: torch.empty(shape, dtype=torch.float32, device=device) for name, shape in shapes.items()}


def _summed_dots(outputs: Mapping[str, Any]) -> tuple[Tensor | None, tuple[Tensor, ...]]:
    """The second step of the sums: over programs, in a fixed order."""
    weights, scores = outputs.get("weight_partials"), outputs.get("score_partials")
    total = None if weights is None else weights.sum(0)
    if scores is None:
        return total, ()
    return total, (scores[0] if len(scores) == 1 else scores.sum(0)).unbind()


@dataclasses.dataclass(frozen=True)
class _Grid:
    """How rows and columns are divided.

    Attributes:
        row_programs, col_programs: the grid.
        block_rows, block_cols: the tile that a program holds at a time.
        warps: of a program.
    """

    row_programs: int
    col_programs: int
    block_rows: int
    block_cols: int
    warps: int

    @classmethod
    def of(cls, spec: MixSpec, like: Tensor, sums: bool) -> _Grid:
        """Tiles that registers hold: see `_tile`. Kernels that sum over rows get few programs, which loop."""
        rows, cols = like.shape
        block_rows, block_cols, warps = _tile(spec, cols, sums, like.dtype.itemsize)
        row_programs, col_programs = -(-rows // block_rows), -(-cols // block_cols)
        if sums:
            row_programs = min(row_programs, max(1, PROGRAMS // max(1, col_programs)))
        return cls(row_programs, col_programs, block_rows, block_cols, warps)


def _tile(spec: MixSpec, cols: int, sums: bool, itemsize: int) -> tuple[int, int, int]:
    """Rows, columns and warps of a tile.

    Each thread loads 16 bytes of a tensor at once; half of that in bfloat16 where it also holds sums per channel for
    every source. A warp holds whole rows of the tile, so that sums along them stay in the warp. With a norm the rows of
    the tile are whole, with up to 16 elements per thread.
    """
    width = max(16, 1 << (cols - 1).bit_length()) if cols else 16  # the next power of two
    if spec.norm:
        warps = min(16, max(4, width // 512))
        return max(1, 512 // width), width, warps
    elements = 4 if sums and spec.weights == "channel" else 16 // itemsize
    block_cols = min(width, 32 * elements)
    return 128 * elements // block_cols, block_cols, 4


def _launch(spec: MixSpec, backward: bool, grid: _Grid, device: torch.device, arguments: Mapping[str, Any]) -> None:
    if not grid.row_programs * grid.col_programs:
        return  # no elements
    # Triton launches on the current device.
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        kernel(spec, backward)[(grid.row_programs, grid.col_programs)](**arguments, **constants(grid))


@functools.cache
def kernel(spec: MixSpec, backward: bool) -> Any:
    """The decorated kernel; its source is generated and imported once per process."""
    module = cache.load(source(spec, backward))
    return module.mix_backward if backward else module.mix_forward


def constants(grid: _Grid) -> dict[str, Any]:
    """Arguments of a kernel that are fixed when it is compiled, and options of the compiler."""
    return {
        "BLOCK_ROWS": grid.block_rows,
        "BLOCK_COLS": grid.block_cols,
        "num_warps": grid.warps,
        "enable_fp_fusion": True,  # said explicitly: the default of Triton is about to change
    }


def _rows(x: Tensor) -> Tensor:
    """[..., D] as [rows, D] with stride 1 along the last dimension: a view wherever the strides allow it."""
    flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return flat if flat.stride(1) == 1 or flat.shape[1] == 1 else flat.contiguous()


def _strided(name: str, x: Tensor | Sequence[Tensor]) -> dict[str, Any]:
    """[rows, D] tensors and their row stride, as arguments. Several have to share it: one address, then, serves all."""
    if isinstance(x, Tensor):
        return {name: x, f"{name}_stride": x.stride(0)}
    if len({t.stride(0) for t in x}) > 1:
        x = [t.contiguous() for t in x]
    return {name: tuple(x), f"{name.removesuffix('s')}_stride": x[0].stride(0)}


def _shaped(found: Gradients, shape: torch.Size) -> Gradients:
    return dataclasses.replace(
        found,
        sources=tuple(x.view(shape) for x in found.sources),
        scores=tuple(x.view(*shape[:-1], 1) for x in found.scores),
        added=None if found.added is None else found.added.view(shape),
    )


def _sum(parts: Sequence[Tensor | None]) -> Tensor | None:
    """In order; None if there is none."""
    given = [x for x in parts if x is not None]
    return functools.reduce(torch.add, given) if given else None


def _check(spec: MixSpec, states: Sequence[Tensor], weights: Tensor | None, scores: Sequence[Tensor]) -> None:
    wrong = sorted({str(x.dtype) for x in states} - {"torch.float32", "torch.bfloat16", "torch.float16"})
    if wrong:
        raise TypeError(f"The kernels mix float32, bfloat16 and float16, in float32; got {', '.join(wrong)}.")
    if any(x.dtype != torch.float32 for x in (*scores, *(() if weights is None else (weights,)))):
        raise TypeError("Weights and scores of a mix have to be float32.")
    shapes = {tuple(x.shape) for x in states}
    if len(shapes) > 1:
        raise ValueError(f"The tensors of a mix have to be of one shape, got {', '.join(map(str, sorted(shapes)))}.")
    (shape,) = shapes
    if spec.norm and shape[-1] > MAX_NORM_WIDTH:
        raise ValueError(f"A fused norm holds rows of at most {MAX_NORM_WIDTH} channels, got {shape[-1]}.")
    _count("scores", scores, spec.factors if spec.scores else 0)
    _count("weights", () if weights is None else (weights,), int(spec.weights != "none"))
    expected = (spec.outputs, spec.sources, *shape[-1:][: spec.weights == "channel"])
    if weights is not None and tuple(weights.shape) not in (expected, expected[1:] if spec.outputs == 1 else expected):
        raise ValueError(f"Weights of {spec} have to be {list(expected)}, got {list(weights.shape)}.")
    if any(s.shape != (*shape[:-1], 1) for s in scores):
        raise ValueError(f"Scores of a mix of {list(shape)} have to be {[*shape[:-1], 1]}.")


def _count(name: str, given: Sequence[Any], wanted: int) -> None:
    if len(given) != wanted:
        raise ValueError(f"{name}: the spec asks for {wanted}, got {len(given)}.")
