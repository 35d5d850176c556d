"""Runs the generated kernels on tensors [..., D]: rows, tiles, outputs, chains of kernels. No autograd."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rewire.kernels import cache
from rewire.kernels.generator import source
from rewire.kernels.spec import FAN_IN, MAX_NORM_WIDTH, MixSpec

#: Programs among which a kernel that sums over rows is divided, about: a few for each processor of a large GPU. Fixed,
#: so that results do not depend on the device.
PROGRAMS = 1024
#: Times the width: rows further apart are copied.
MAX_ROW_STRIDE = 256


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
    _check(spec, inputs, weights, scores)
    _count("sources", sources, spec.sources)
    _count("added", added, spec.outputs * spec.added)
    _count("accumulators", accumulators, spec.outputs * spec.accumulate)
    _count("probe", probes, spec.outputs * spec.probe)
    _count("norm_weight", _given(norm_weight), int(spec.scaled))
    _count("norm_bias", _given(norm_bias), int(spec.shifted))
    _check_stacked(stacked, 0 if spec.norm else spec.outputs, "mixes without a norm")
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
    terms = _Terms.of(spec, sources, weights, scores)
    like = _rows(inputs[0])
    shared = _strided("probes", tuple(map(_rows, probes))) if probes else {}
    running = tuple(map(_rows, accumulators))
    mixes, whole = _empty(like, [dtype] * spec.outputs * spec.mixed, stacked)
    steps: list[Mixed] = []
    for part, step in spec.chunks():
        arguments = terms[part].arguments() | shared
        if step.accumulate:
            arguments |= _strided("accumulators", running)
        if step.added:
            arguments |= _strided("added", tuple(map(_rows, added)))
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

    Raises:
        TypeError, ValueError: as in `mix_forward`.
    """
    _check(spec, (*grads, *sources, *mixes, *grad_mixes), weights, scores)
    _count("sources", sources, spec.sources)
    _count("grads", grads, spec.outputs)
    _count("mixes", mixes, spec.outputs if spec.norm else 0)
    _count("rstd", _given(rstd), int(spec.norm is not None))
    _count("norm_weight", _given(norm_weight), int(spec.scaled))
    if grad_mixes:
        _count("grad_mixes", grad_mixes, spec.outputs if spec.norm else 0)
    _check_stacked(stacked, spec.sources, "gradients of sources")
    if len({x.dtype for x in sources[:stacked]}) > 1:
        raise ValueError("Sources whose gradients are stacked have to be of one dtype.")
    shape, dtype = grads[0].shape, grads[0].dtype
    terms = _Terms.of(spec, sources, weights, scores)
    upstream = tuple(map(_rows, grads))
    grad_sources, whole = _empty(upstream[0], [x.dtype for x in sources], stacked)
    one = spec.outputs == 1
    if rstd is None:
        found = dataclasses.replace(
            _plain_backward(spec, upstream, terms, grad_sources), added=upstream[0] if one else None
        )
        return _shaped(found, grad_sources, whole, shape)
    normed = dataclasses.replace(spec, keep_mix=bool(grad_mixes), accumulate=False)
    arguments = [
        {"rstd": rstd[o]}
        | ({} if norm_weight is None else {"norm_weight": norm_weight})
        | _strided("grad_normed", upstream[o])
        | _strided("mix", _rows(mixes[o]))
        | (_strided("grad_mix", _rows(grad_mixes[o])) if grad_mixes else {})
        for o in range(spec.outputs)
    ]
    narrow = shape[-1] <= MAX_NORM_WIDTH // 2
    if one and spec.weights != "channel" and spec.sources <= FAN_IN and narrow:
        normed = dataclasses.replace(normed, added=min(spec.added, 1))
        found = _backward_step(normed, upstream[0], terms, arguments[0], grad_sources, dtype)
        return _shaped(found, grad_sources, whole, shape)
    # Registers cannot hold whole rows and all those sums: the norm comes first, its gradient in float32.
    alone = _norm_alone(spec, bool(grad_mixes))
    inner = [
        _backward_step(alone, g, _Terms((), None, ()), a, (), torch.float32)
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


@dataclasses.dataclass(frozen=True, eq=False)
class _Terms:
    """The weighted part of a mix, flattened to rows.

    Attributes:
        sources: [rows, D].
        weights: float32 [outputs, N] or [outputs, N, D].
        scores: for each output N of float32 [rows].
    """

    sources: tuple[Tensor, ...]
    weights: Tensor | None
    scores: tuple[tuple[Tensor, ...], ...]

    @classmethod
    def of(cls, spec: MixSpec, sources: Sequence[Tensor], weights: Tensor | None, scores: Sequence[Tensor]) -> _Terms:
        flat = [s.squeeze(-1) for s in map(_rows, scores)]
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
            arguments |= _strided("scores", tuple(s for scores in self.scores for s in scores))
        return arguments


def _forward_step(
    spec: MixSpec, like: Tensor, arguments: Mapping[str, Any], mixes: Sequence[Tensor], dtype: torch.dtype
) -> Mixed:
    """One forward kernel, which fills ``mixes``; everything is [rows, D]. ``dtype`` is that of what is normed."""
    rows, cols = like.shape
    grid = _Grid.of(spec, like, sums=spec.probe)
    outputs: dict[str, Any] = _dot_partials(spec, grid, like) if spec.probe else {}
    if spec.mixed:
        outputs |= _strided("mixes", tuple(mixes))
    if spec.norm:
        (outputs["normed"],), _ = _empty(like, [dtype])
        outputs["rstd"] = torch.empty(rows, dtype=torch.float32, device=like.device)
    _launch(Launch(spec, False, grid, {**arguments, **outputs, "rows": rows, "COLS": cols}), like.device)
    if spec.norm:
        return Mixed((), (outputs["normed"],), outputs["rstd"][None])
    return Mixed(
        (), weight_dots=_total(outputs.get("weight_partials")), score_dots=_scores(outputs.get("score_partials"))
    )


def _plain_backward(spec: MixSpec, grads: Sequence[Tensor], terms: _Terms, grad_sources: Sequence[Tensor]) -> Gradients:
    """Backward without a norm, in as many kernels as the fan-in asks for; everything is [rows, D]."""
    most = spec.fan_in(dots=spec.has_dots)
    plain = dataclasses.replace(spec.without_norm(), probe=False, accumulate=False, added=0)
    arguments = _strided("grads", tuple(grads))
    steps = []
    for first in range(0, spec.sources, most):
        part = slice(first, min(first + most, spec.sources))
        step = dataclasses.replace(plain, sources=part.stop - first)
        steps.append(_backward_step(step, grads[0], terms[part], arguments, grad_sources[part], torch.float32))
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
    terms: _Terms,
    arguments: Mapping[str, Any],
    grad_sources: Sequence[Tensor],
    dtype: torch.dtype,
) -> Gradients:
    """One backward kernel, which fills ``grad_sources``; everything is [rows, D].

    ``dtype`` is that of the added branches' gradient.
    """
    rows, cols = like.shape
    grid = _Grid.of(spec, like, sums=True)
    outputs: dict[str, Any] = _dot_partials(spec, grid, like)
    if spec.sources:
        outputs |= _strided("grad_sources", tuple(grad_sources))
    if spec.norm and spec.added:
        (outputs["grad_added"],), _ = _empty(like, [dtype])
    for name in ["weight"] * spec.scaled + ["bias"] * spec.shifted:
        partials = torch.empty(grid.row_programs, cols, dtype=torch.float32, device=like.device)
        outputs[f"norm_{name}_partials"] = partials
    inputs = terms.arguments() if spec.has_dots else {}
    _launch(Launch(spec, True, grid, {**inputs, **arguments, **outputs, "rows": rows, "COLS": cols}), like.device)
    return Gradients(
        sources=(),
        weights=_total(outputs.get("weight_partials")),
        scores=_scores(outputs.get("score_partials")),
        added=outputs.get("grad_added"),
        norm_weight=_total(outputs.get("norm_weight_partials")),
        norm_bias=_total(outputs.get("norm_bias_partials")),
    )


def _by_output(scores: Sequence[Tensor], outputs: int) -> list[tuple[Tensor, ...]]:
    """outputs times N scores as N of each output."""
    n = len(scores) // outputs
    return [tuple(scores[o * n : (o + 1) * n]) for o in range(outputs)]


def _joined(parts: Sequence[Sequence[Tensor]], outputs: int) -> tuple[Tensor, ...]:
    """Scores of several kernels, each outputs times its sources, as outputs times N."""
    by_part = [_by_output(part, outputs) for part in parts]
    return tuple(x for o in range(outputs) for part in by_part for x in part[o])


def _empty(like: Tensor, dtypes: Sequence[torch.dtype], stacked: int = 0) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """[rows, D] for each dtype, and [rows, stacked, D] that the first ``stacked`` of them are views of."""
    rows, cols = like.shape
    whole = torch.empty(rows, stacked, cols, dtype=dtypes[0], device=like.device) if stacked else None
    views = () if whole is None else whole.unbind(1)
    return (*views, *(torch.empty(rows, cols, dtype=dtype, device=like.device) for dtype in dtypes[stacked:])), whole


def _dot_partials(spec: MixSpec, grid: _Grid, like: Tensor) -> dict[str, Tensor]:
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
    every source, or 6 or more mixes, gradients and probes. A warp holds whole rows of the tile, so that sums along
    them stay in the warp. With a norm the rows of the tile are whole; in backward, which holds several at once, more
    warps share them.
    """
    width = max(16, 1 << (cols - 1).bit_length()) if cols else 16  # the next power of two
    if spec.norm:
        warps = min(16, max(4, width // (256 if sums else 512)))
        return max(1, 512 // width), width, warps
    many = spec.outputs * (1 + spec.probe) >= 6
    elements = 4 if many or (sums and spec.weights == "channel") else 16 // itemsize
    block_cols = min(width, 32 * elements)
    return 128 * elements // block_cols, block_cols, 4


class Launch(NamedTuple):
    """One kernel, and what it is started with."""

    spec: MixSpec
    backward: bool
    grid: _Grid
    arguments: dict[str, Any]


#: Where launches on tensors without storage are noted.
_planned: contextvars.ContextVar[list[Launch]] = contextvars.ContextVar("planned")


def _launch(launch: Launch, device: torch.device) -> None:
    if device.type == "meta":
        _planned.get([]).append(launch)
        return
    grid = (launch.grid.row_programs, launch.grid.col_programs)
    if not math.prod(grid):
        return  # no elements
    # Triton launches on the current device.
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        kernel(launch.spec, launch.backward)[grid](**launch.arguments, **constants(launch.grid))


def plan(
    spec: MixSpec, rows: int, cols: int, dtype: torch.dtype, backward: bool = False, out: torch.dtype | None = None
) -> list[Launch]:
    """The kernels that `mix_forward` or `mix_backward` would launch for [rows, cols], on tensors without storage.

    Args:
        spec: what is computed.
        rows, cols: sizes.
        dtype: of the states.
        backward: the kernels of the gradients; where a norm follows and the mix is kept, it has a gradient, too.
        out: of the mixes and their gradients; by default that of the states.
    """

    def empty(*shape: int, dtype: torch.dtype | None = dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    n, o = spec.sources, spec.outputs
    weight_shape = (o, n, cols) if spec.weights == "channel" else (o, n)
    weights = None if spec.weights == "none" else empty(*weight_shape, dtype=torch.float32)
    states, of_outputs = [empty(rows, cols)] * n, [empty(rows, cols, dtype=out or dtype)] * o
    scores = [empty(rows, 1, dtype=torch.float32)] * (spec.pairs * spec.scores)
    norm_weight = empty(cols) if spec.scaled else None
    launches: list[Launch] = []
    token = _planned.set(launches)
    try:
        if backward:
            mix_backward(
                spec,
                of_outputs,
                states,
                weights,
                scores,
                mixes=of_outputs if spec.norm else (),
                rstd=empty(o, rows, dtype=torch.float32) if spec.norm else None,
                grad_mixes=of_outputs if spec.keep_mix else (),
                norm_weight=norm_weight,
            )
        else:
            mix_forward(
                spec,
                states,
                weights,
                scores,
                [empty(rows, cols)] * (o * spec.added),
                accumulators=[empty(rows, cols, dtype=torch.float32)] * (o * spec.accumulate),
                norm_weight=norm_weight,
                norm_bias=empty(cols) if spec.shifted else None,
                probe=[empty(rows, cols)] * (o * spec.probe),
                dtype=out or dtype,
            )
    finally:
        _planned.reset(token)
    return launches


def bytes_moved(
    spec: MixSpec, rows: int, cols: int, itemsize: int, backward: bool = False, out_itemsize: int | None = None
) -> int:
    """Bytes that the kernels of a mix and the second step of their sums read and write: see `plan`.

    Args:
        spec, rows, cols, backward: as for `plan`.
        itemsize: of the states, 2 or 4.
        out_itemsize: of the mixes and their gradients; by default that of the states.
    """
    dtypes = {2: torch.bfloat16, 4: torch.float32}
    total = 0
    for launch in plan(spec, rows, cols, dtypes[itemsize], backward, dtypes[out_itemsize or itemsize]):
        for name, argument in launch.arguments.items():
            tensors = argument if isinstance(argument, tuple) else (argument,)
            total += sum(x.nbytes for x in tensors if isinstance(x, Tensor))
            if name.endswith("_partials") and (len(argument) > 1 or name == "score_partials"):
                total += argument.nbytes + argument[0].nbytes  # the second step
    return total


def bytes_floor(
    spec: MixSpec, rows: int, cols: int, itemsize: int, backward: bool = False, out_itemsize: int | None = None
) -> int:
    """Bytes of all that a mix is computed from and of all that it returns, each counted once.

    Args as for `bytes_moved`.
    """
    n, o, out = spec.sources, spec.outputs, out_itemsize or itemsize
    per_pair = {"none": 0, "scalar": 4, "channel": 4 * cols}[spec.weights] + 4 * rows * spec.scores
    factors = spec.pairs * per_pair
    rstd = 4 * rows * o if spec.norm else 0
    if backward:
        states = n * (1 + spec.has_dots) * itemsize
        grads = o * (1 + (spec.norm is not None) + spec.keep_mix) * out  # with a norm, the mix is read, too
        added = out if spec.norm and spec.added else 0
        norm = cols * (spec.scaled * (itemsize + 4) + spec.shifted * 4)
        return rows * cols * (states + grads + added) + 2 * factors + rstd + norm
    states = n + o * (spec.added + spec.probe)
    results = o * (spec.mixed + (spec.norm is not None))
    norm = cols * (spec.scaled + spec.shifted) * itemsize
    values = states * itemsize + results * out + 4 * o * spec.accumulate
    return rows * cols * values + factors * (1 + spec.probe) + rstd + norm


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
    """[..., D] as [rows, D] with stride 1 along the last dimension: a view wherever the strides allow it.

    Strides are compiled in. Those of one token of each sequence, which change with the number of tokens, must not be.
    """
    flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    dense = flat.stride(1) == 1 or flat.shape[1] == 1
    return flat if dense and _row_stride(flat) <= MAX_ROW_STRIDE * flat.shape[1] else flat.contiguous()


def _strided(name: str, x: Tensor | Sequence[Tensor]) -> dict[str, Any]:
    """[rows, D] tensors, or scores [rows], and their row strides, as arguments."""
    if isinstance(x, Tensor):
        return {name: x, f"{name}_stride": _row_stride(x)}
    singular = {"mixes": "mix"}.get(name, name.removesuffix("s"))
    return {name: tuple(x), f"{singular}_strides": tuple(map(_row_stride, x))}


def _row_stride(x: Tensor) -> int:
    return x.stride(0) if len(x) > 1 else math.prod(x.shape[1:])  # of one row, it could be any


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
    _count("scores", scores, spec.pairs if spec.scores else 0)
    _count("weights", () if weights is None else (weights,), int(spec.weights != "none"))
    expected = (spec.outputs, spec.sources, *shape[-1:][: spec.weights == "channel"])
    if weights is not None and tuple(weights.shape) not in (expected, expected[1:] if spec.outputs == 1 else expected):
        raise ValueError(f"Weights of {spec} have to be {list(expected)}, got {list(weights.shape)}.")
    if any(s.shape != (*shape[:-1], 1) for s in scores):
        raise ValueError(f"Scores of a mix of {list(shape)} have to be {[*shape[:-1], 1]}.")


def _count(name: str, given: Sequence[Any], wanted: int) -> None:
    if len(given) != wanted:
        raise ValueError(f"{name}: the spec asks for {wanted}, got {len(given)}.")


def _given(x: Tensor | None) -> tuple[Tensor, ...]:
    return () if x is None else (x,)


def _check_stacked(stacked: int, most: int, what: str) -> None:
    if not 0 <= stacked <= most:
        raise ValueError(f"stacked={stacked}: there are {most} {what}.")
