"""A `Routine`, the kernels of a mix and their arguments, made once for tensors of given metadata.

A routine works on a list of tensors: first the inputs, then those that its steps make, one by one. A kernel's arguments
are places in this list.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from rewire.kernels.arguments import Metadata, row_stride
from rewire.kernels.kernel import At, Kernel, Part, taken
from rewire.kernels.sums.checks import check_backward, check_forward
from rewire.kernels.sums.grid import Grid
from rewire.kernels.sums.spec import DOTS_FAN_IN, MAX_NORM_WIDTH, MixSpec

if TYPE_CHECKING:
    from rewire.kernels.handwritten.totals import Sums

Places = tuple[At, ...]
#: Arguments of a kernel: the place of a tensor, or places of several.
Arguments = dict[str, At | Places]
#: Inputs by field: the metadata and the place of each tensor.
Given = Mapping[str, Sequence[tuple[Metadata, At]]]

#: Arguments that have their own row strides -> the kernels' parameter for these.
STRIDES = {
    "sources": "source_strides",
    "scores": "score_strides",
    "added": "added_strides",
    "accumulators": "accumulator_strides",
    "probes": "probe_strides",
    "mixes": "mix_strides",
    "grads": "grad_strides",
    "mix": "mix_stride",
    "grad_normed": "grad_normed_stride",
    "grad_mix": "grad_mix_stride",
    "carried": "carried_strides",
    "grad_sources": "grad_source_strides",
}
#: Arguments that have to be contiguous.
DENSE = ("weights", "norm_weight", "norm_bias", "rstd", "means")


class Routine:
    """Steps, and the places of their results.

    Attributes:
        steps: run in order; each takes the list of tensors, and may append to it.
        states: places of the results [..., D] that are separate tensors.
        others: names and places of the other results.
    """

    __slots__ = ("others", "states", "steps")

    def __init__(
        self, steps: Sequence[Callable[[list[Tensor]], None]], states: Places, others: Mapping[str, int]
    ) -> None:
        self.steps, self.others = tuple(steps), tuple(others.items())
        self.states = [at for at in states if isinstance(at, int)]

    def __call__(self, tensors: list[Tensor]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """The results for these inputs."""
        for step in self.steps:
            step(tensors)
        return tuple([tensors[i] for i in self.states]), {name: tensors[i] for name, i in self.others}


def forward(spec: MixSpec, given: Given, dtype: torch.dtype | None, eps: float, stacked: int) -> Routine:
    """The routine of `launch.mix_forward`.

    Args:
        given: the inputs, by field of `launch.MixInputs`.
    """
    check_forward(spec, _metadata(given), stacked)
    make = _Builder(spec, given)
    if spec.attended and make.rows and not _one_behind_the_other(given["scores"], make.rows):
        raise ValueError("Scores of what is attended have to be one tensor, each of all rows in one piece, in turn.")
    states = [x.dtype for name in ("sources", "added") for x, _ in given[name]]
    dtype = dtype or functools.reduce(torch.promote_types, states or [torch.float32])
    mixes = make.states([dtype] * spec.outputs * spec.mixed, stacked)
    norm: Arguments = {name: make.at[name][0] for name in ("norm_weight", "norm_bias") if make.at[name]}
    running = make.at["accumulators"]
    for part, step in spec.chunks():
        arguments = make.terms(part, step)
        arguments |= {"accumulators": running} if step.accumulate else {}
        arguments |= {"added": make.at["added"]} if step.added else {}
        arguments |= {"probes": make.at["probes"]} if step.probe else {}
        arguments |= {"means": make.means(part)} if step.attended else {}
        if step.mixed:
            running = mixes if part.stop == spec.sources else make.states([torch.float32] * spec.outputs)
            arguments["mixes"] = running
        if step.norm:
            made = {"normed": make.state(dtype), "rstd": make.floats(make.rows)}
            arguments |= norm | made
            make.results |= made
        make.kernel(step, False, arguments, eps=eps)
    make.results |= make.sums({"weight_partials": "weight_dots", "score_partials": "score_dots"})
    return Routine(make.steps, mixes, make.results)


def backward(spec: MixSpec, given: Given, stacked: int) -> Routine:
    """The routine of `launch.mix_backward`.

    Args:
        given: the inputs, by field of `launch.GradientInputs`.
    """
    check_backward(spec, _metadata(given), stacked)
    make = _Builder(spec, given)
    sources = make.states([x.dtype for x, _ in given["sources"]], stacked)
    grads = make.at["grads"]
    if spec.norm is None:
        make.plain_backward(grads, sources, make.itemsize)
        return make.gradients(sources, grads[0] if spec.outputs == 1 else None)
    used = len(make.at["grad_mixes"]) > 0
    norm: Arguments = {"rstd": make.at["rstd"][0], "grad_normed": grads[0], "mix": make.at["mixes"][0]}
    norm |= {"norm_weight": make.at["norm_weight"][0]}
    norm |= {"grad_mix": make.at["grad_mixes"][0]} if used else {}
    few = spec.weights != "channel" and spec.sources <= DOTS_FAN_IN and make.cols <= MAX_NORM_WIDTH // 2
    if few or not spec.sources:
        step = dataclasses.replace(spec, keep_mix=used, accumulate=False, added=min(spec.added, 1))
        added = make.state(given["grads"][0][0].dtype) if step.added else None
        arguments = make.terms(slice(0, spec.sources), step) if spec.has_dots else {}
        arguments |= norm | ({} if added is None else {"grad_added": added})
        make.kernel(step, True, arguments | ({"grad_sources": sources} if sources else {}))
        return make.gradients(sources, added)
    # Registers cannot hold whole rows and all these sums: the norm's backward comes first, with a float32 gradient.
    unweighted: dict[str, Any] = {"sources": 0, "weights": "none", "scores": False, "accumulate": False}
    alone = dataclasses.replace(spec, **unweighted, added=1, keep_mix=used)
    middle = make.state(torch.float32)
    make.kernel(alone, True, norm | {"grad_added": middle})
    make.plain_backward((middle,), sources, torch.float32.itemsize)
    return make.gradients(sources, make.converted(middle, given["grads"][0][0].dtype))


def given(groups: Mapping[str, Sequence[Metadata]], stacks: bool, probed: bool) -> Given:
    """Number the tensors, by field.

    Args:
        stacks: whether the first of sources, grads and carried is a stack [..., n, D] of n.
        probed: whether scores, if not in one tensor [..., outputs, N], are [..., N] for each probe, not [..., outputs]
            for each source.
    """
    found: dict[str, list[tuple[Metadata, At]]] = {}
    like = next(tensors[0] for tensors in groups.values() if tensors)
    lead, number = len(like.shape) - 1 - stacks, 0
    for name, tensors in groups.items():
        found[name] = []
        if name == "scores":
            table = len(tensors) == 1 and len(tensors[0].shape) == lead + 2
            found[name] = _of_table(tensors[0], number) if table else _of_columns(tensors, number, probed)
            number += len(tensors)
            continue
        for place, x in enumerate(tensors, start=number):
            if stacks and place == number and name in ("sources", "grads", "carried"):
                found[name] += _of_stack(x, place)
            else:
                found[name].append((x, place))
        number += len(tensors)
    return found


def _of_stack(stack: Metadata, place: int) -> list[tuple[Metadata, At]]:
    (*lead, n, cols), (*along, step, last) = stack.shape, stack.strides
    part = stack._replace(shape=(*lead, cols), strides=(*along, last))
    itemsize = stack.dtype.itemsize
    return [(part, Part(place, i * step * itemsize, lambda x, i=i: x.select(-2, i))) for i in range(n)]  # type: ignore[misc]


def _of_table(table: Metadata, place: int) -> list[tuple[Metadata, At]]:
    (*lead, outputs, n), (*along, down, right) = table.shape, table.strides
    part = table._replace(shape=(*lead, 1), strides=(*along, right))
    return [
        (part, Part(place, (m * down + k * right) * table.dtype.itemsize, lambda x, m=m, k=k: x[..., m, k : k + 1]))  # type: ignore[misc]
        for m in range(outputs)
        for k in range(n)
    ]


def _of_columns(tensors: Sequence[Metadata], place: int, by_tensor: bool) -> list[tuple[Metadata, At]]:
    """Columns of tensors [..., M]: all of the first tensor, then of the second, ..; or the first column of each, ..

    Tensors with one column are not split.
    """
    of_each: list[list[tuple[Metadata, At]]] = []
    for at, x in enumerate(tensors, start=place):
        (*lead, columns), (*along, right) = x.shape, x.strides
        part, size = x._replace(shape=(*lead, 1), strides=(*along, right)), x.dtype.itemsize
        of_each.append(
            [(part, Part(at, k * right * size, functools.partial(_narrowed, -1, k, 1))) for k in range(columns)]
            if columns > 1
            else [(part, at)]
        )
    return list(itertools.chain(*(of_each if by_tensor else zip(*of_each, strict=True))))


def _metadata(given: Given) -> dict[str, list[Metadata]]:
    return {name: [x for x, _ in tensors] for name, tensors in given.items()}


class _Builder:
    """Builds a routine.

    Attributes:
        at: places of the inputs, by name.
        rows, cols: sizes of each state.
        partials: by parameter, the partial sums that programs leave, for each kernel of a chain.
        results: by field, the places of results so far.
    """

    def __init__(self, spec: MixSpec, given: Given) -> None:
        self.spec, self.at = spec, dict[str, Places]()
        of_states = given.get("grads") or [*given["sources"], *given["added"], *given["accumulators"]]
        like, _ = of_states[0]
        self.shape, self.device = like.shape, like.device
        self.rows, self.cols = math.prod(like.shape[:-1]), like.shape[-1]
        self.itemsize = min(x.dtype.itemsize for x, _ in of_states)  # an accumulator may be float32
        self.count = len({at if isinstance(at, int) else at.place for of in given.values() for _, at in of})
        self.strides: dict[At, int] = {}
        self.steps: list[Callable[[list[Tensor]], None]] = []
        self.partials: dict[str, list[_Partial]] = {}
        self.results: dict[str, int] = {}
        for name, tensors in given.items():
            self.at[name] = tuple([self._given(name in DENSE, x, at) for x, at in tensors])

    def _given(self, dense: bool, x: Metadata, at: At) -> At:
        """The place of a tensor, or of a copy if its rows are not evenly spaced."""
        stride = _dense(x) if dense else row_stride(x.shape, x.strides)
        if stride is None:
            return self._made(x.shape[-1], functools.partial(_contiguous, at))
        self.strides[at] = stride
        return at

    def gradients(self, sources: Places, added: At | None) -> Routine:
        """The finished routine for gradients."""
        names = ("weight_partials", "score_partials", "norm_weight_partials", "norm_bias_partials")
        found = self.sums(dict(zip(names, ("weights", "scores", "norm_weight", "norm_bias"), strict=True)))
        return Routine(self.steps, sources, self.results | found | ({"added": added} if isinstance(added, int) else {}))

    def sums(self, names: Mapping[str, str]) -> dict[str, int]:
        """Add the second step of sums, over programs in a fixed order; returns places by the names of results.

        In a chain of kernels, each leaves the sums of its sources, which are concatenated.
        """
        left = {name: self.partials[name] for name in names if name in self.partials}
        found = {names[name]: of[0].place for name, of in left.items() if len(of) == 1 and of[0].parts == 1}
        left = {name: of for name, of in left.items() if names[name] not in found}
        if [len(of) for of in left.values()] == [1]:  # torch takes less host time
            ((name, (one,)),) = left.items()
            return found | {names[name]: self._made(0, functools.partial(_added_up, one.place))}
        together: list[Sums] = []
        for name, of in left.items():
            found[names[name]] = place = self.floats(*_side_by_side(name, [one.shape for one in of]))
            together += _into(name, of, place)
        if together:
            from rewire.kernels.handwritten import totals  # only where there is Triton

            self.steps.append(totals.kernel(together, self.device))
        return found

    # New tensors: each method returns their place.

    def _made(self, stride: int, step: Callable[[list[Tensor]], None]) -> int:
        self.steps.append(step)
        place, self.count = self.count, self.count + 1
        self.strides[place] = stride
        return place

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> Callable[[list[Tensor]], None]:
        strides = [math.prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape))]
        return functools.partial(_empty, tuple(shape), tuple(strides), dtype, self.device)

    def floats(self, *shape: int) -> int:
        return self._made(0, self._empty(shape, torch.float32))

    def converted(self, place: int, dtype: torch.dtype) -> int:
        return place if dtype == torch.float32 else self._made(self.cols, functools.partial(_to, place, dtype))

    def state(self, dtype: torch.dtype) -> int:
        return self._made(self.cols, self._empty(self.shape, dtype))

    def states(self, dtypes: Sequence[torch.dtype], stacked: int = 0) -> Places:
        """A state for each dtype, where the first ``stacked`` are views of one tensor."""
        views: Places = ()
        if stacked:
            shape = (*self.shape[:-1], stacked, self.cols)
            whole = self.results["stacked"] = self._made(0, self._empty(shape, dtypes[0]))
            x = Metadata(shape, (0,) * (len(shape) - 2) + (self.cols, 1), dtypes[0], self.device)
            views = tuple([at for _, at in _of_stack(x, whole)])
            self.strides |= dict.fromkeys(views, stacked * self.cols)
        return (*views, *map(self.state, dtypes[stacked:]))

    def weights(self, part: slice) -> At:
        """Weights of some of the sources; in a table, the part from the first of them on."""
        (place,), n = self.at["weights"], part.stop - part.start
        if n == self.spec.sources:
            return place
        assert isinstance(place, int)
        dim, size = (-2, self.cols) if self.spec.weights == "channel" else (-1, 1)
        return Part(place, 4 * part.start * size, functools.partial(_narrowed, dim, part.start, n))

    def means(self, part: slice) -> At:
        """Means of some of the sources, from float32 [N, rows]."""
        (place,), first = self.at["means"], part.start
        assert isinstance(place, int)
        return Part(place, 4 * first * self.rows, functools.partial(_narrowed, 0, first, part.stop - first))

    # Kernels.

    def terms(self, part: slice, step: MixSpec) -> Arguments:
        """Some of the sources, with their weights and scores if the step reads them."""
        scores, n = self.at["scores"], self.spec.sources
        of_each = [scores[o * n : (o + 1) * n][part] for o in range(step.outputs * step.reads_scores)]
        found: Arguments = {"sources": self.at["sources"][part]} if step.sources else {}
        found |= {"weights": self.weights(part)} if step.reads_weights else {}
        return found | ({"scores": tuple(place for places in of_each for place in places)} if of_each else {})

    def plain_backward(self, grads: Places, sources: Places, itemsize: int) -> None:
        """Backward without a norm, in as many kernels as the fan-in needs, for gradients of that itemsize."""
        plain = dataclasses.replace(self.spec.without_norm(), accumulate=False, added=0)
        plain = dataclasses.replace(plain, probe=False, attended=False, dots_only=False)
        most = self.spec.fan_in(dots=self.spec.has_dots)
        for first in range(0, self.spec.sources, most):
            part = slice(first, min(first + most, self.spec.sources))
            step = dataclasses.replace(plain, sources=part.stop - part.start)
            arguments = self.terms(part, step) if plain.has_dots else {}
            arguments |= {"carried": self.at["carried"][part]} if plain.carried else {}
            self.kernel(step, True, arguments | {"grads": grads, "grad_sources": sources[part]}, itemsize)

    def kernel(
        self, spec: MixSpec, backward: bool, arguments: Arguments, itemsize: int = 0, eps: float | None = None
    ) -> None:
        """Add a step that launches a kernel, and allocate its partial sums over rows."""
        grid = Grid.of(spec, backward, self.rows, self.cols, itemsize or self.itemsize)
        if backward or spec.probe:
            for name, shape in self._sums(spec, backward).items():
                parts = grid.parts(name)
                arguments[name] = place = self.floats(*(() if parts == 1 else (parts,)), *shape)
                self.partials.setdefault(name, []).append(_Partial(place, parts, shape))
        strides = {
            STRIDES[name]: self.strides[at] if isinstance(at, (int, Part)) else tuple(self.strides[i] for i in at)
            for name, at in arguments.items()
            if name in STRIDES
        }
        numbers: dict[str, Any] = {**strides, "rows": self.rows, "COLS": self.cols}
        numbers |= {"eps": float(eps)} if eps is not None and spec.norm else {}
        numbers |= {"weight_stride": self.spec.sources} if "weights" in arguments and spec.outputs > 1 else {}
        self.steps.append(Kernel(grid.code(), self.device, arguments, numbers))

    def _sums(self, spec: MixSpec, backward: bool) -> dict[str, tuple[int, ...]]:
        """Shapes of the float32 sums that a kernel makes, as `_dot_parameters` of the generator declares them."""
        pairs, normed = (spec.outputs, spec.sources), backward and spec.norm is not None
        shapes = {
            "weight_partials": {"none": (), "scalar": pairs, "channel": (*pairs, self.cols)}[spec.weights],
            "score_partials": (*self.shape[:-1], *pairs) if spec.scores else (),
            "norm_weight_partials": (self.cols,) if normed else (),
            "norm_bias_partials": (self.cols,) if normed and spec.shifted else (),
        }
        return {name: shape for name, shape in shapes.items() if shape}


def _one_behind_the_other(scores: Sequence[tuple[Metadata, At]], rows: int) -> bool:
    """Whether scores [..., 1] are consecutive parts of one tensor, each with contiguous rows."""
    (x, first), *_ = scores
    if len(scores) == 1 and isinstance(first, int):
        return _dense(x) is not None
    return isinstance(first, Part) and all(
        isinstance(at, Part)
        and at.place == first.place
        and at.offset == first.offset + 4 * n * rows
        and _dense(x) is not None
        for n, (x, at) in enumerate(scores)
    )


class _Partial(NamedTuple):
    """Partial sums of a kernel: their place, the number of programs, and the shape of the sums."""

    place: int
    parts: int
    shape: tuple[int, ...]


def _along(name: str) -> int:
    """The dimension of the sources in sums."""
    return -1 if name == "score_partials" else 1


def _side_by_side(name: str, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of sums of these shapes, concatenated along the sources."""
    if len(shapes) == 1:
        return shapes[0]
    whole, dim = list(shapes[0]), _along(name)
    whole[dim] = sum(shape[dim] for shape in shapes)
    return tuple(whole)


def _into(name: str, of_name: Sequence[_Partial], result: int) -> Iterator[Sums]:
    """The sums of one name, and their places in the result."""
    from rewire.kernels.handwritten.totals import Sums  # only where there is Triton

    whole = _side_by_side(name, [one.shape for one in of_name])
    dim = _along(name) % len(whole) if len(of_name) > 1 else 0
    apart, first = math.prod(whole[dim + 1 :]), 0
    for one in of_name:
        n = one.shape[dim]
        at = Part(result, 4 * first * apart, functools.partial(_narrowed, dim, first, n))
        yield Sums(one.place, at, one.parts, math.prod(one.shape), n * apart, whole[dim] * apart)
        first += n


def _narrowed(dim: int, first: int, n: int, x: Tensor) -> Tensor:
    return x.narrow(dim, first, n)


# Steps: functions of the list of tensors.


def _contiguous(at: At, tensors: list[Tensor]) -> None:
    tensors.append(taken(tensors, at).contiguous())


def _empty(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device, tensors: list[Tensor]
) -> None:
    tensors.append(torch.empty_strided(shape, strides, dtype=dtype, device=device))  # the fastest way to allocate


def _to(place: int, dtype: torch.dtype, tensors: list[Tensor]) -> None:
    tensors.append(tensors[place].to(dtype))


def _added_up(place: int, tensors: list[Tensor]) -> None:
    tensors.append(tensors[place].sum(0))


def _dense(x: Metadata) -> int | None:
    """0 for a contiguous tensor, whose stride is not needed; else None."""
    expected = 1
    for size, stride in zip(reversed(x.shape), reversed(x.strides), strict=True):
        if size != 1 and stride != expected:
            return None
        expected *= size
    return 0
