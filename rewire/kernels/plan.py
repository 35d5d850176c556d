"""Which kernels a mix takes, and on which tensors: a `Plan`, made once for tensors of given shapes, strides and dtypes.

A plan works on a list of tensors: those that are given, then those that its steps make, one by one. Each has its place
in the list, and a kernel's arguments are places.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rewire.kernels.arguments import Layout, check_backward, check_forward, row_stride
from rewire.kernels.grid import Grid, Kernel, generated
from rewire.kernels.spec import DOTS_FAN_IN, MAX_NORM_WIDTH, MixSpec

Places = tuple[int, ...]
#: Arguments of a kernel: the place of a tensor, or those of several.
Arguments = dict[str, int | Places]

#: Arguments whose rows have strides of their own, and what the kernels call these.
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
#: What is given as one block of memory.
DENSE = ("weights", "norm_weight", "norm_bias", "rstd")


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """Steps, and where their results are.

    Attributes:
        steps: in turn; each takes the tensors so far, and may add some.
        places: of results, by name.
    """

    steps: tuple[Callable[[list[Tensor]], None], ...]
    places: Mapping[str, Places]

    def __call__(self, tensors: list[Tensor]) -> dict[str, list[Tensor]]:
        """The results for these inputs."""
        for step in self.steps:
            step(tensors)
        return {name: [tensors[i] for i in places] for name, places in self.places.items()}


def forward(
    spec: MixSpec, given: Mapping[str, Sequence[Layout]], dtype: torch.dtype | None, eps: float, stacked: int
) -> Plan:
    """Of `launch.mix_forward`: ``mixes``, ``normed``, ``rstd``, ``stacked``, and partial sums of dot products.

    Args:
        given: by field of `launch.MixInputs`.
    """
    check_forward(spec, given, stacked)
    make = _Maker(spec, given)
    states = [layout.dtype for name in ("sources", "added") for layout in given[name]]
    dtype = dtype or functools.reduce(torch.promote_types, states or [torch.float32])
    mixes = make.states([dtype] * spec.outputs * spec.mixed, stacked)
    norm: Arguments = {name: make.at[name][0] for name in ("norm_weight", "norm_bias") if make.at[name]}
    running = make.at["accumulators"]
    for part, step in spec.chunks():
        arguments = make.terms(part)
        arguments |= {"accumulators": running} if step.accumulate else {}
        arguments |= {"added": make.at["added"]} if step.added else {}
        arguments |= {"probes": make.at["probes"]} if step.probe else {}
        running = mixes if part.stop == spec.sources else make.states([torch.float32] * spec.outputs)
        arguments |= {"mixes": running} if step.mixed else {}
        if step.norm:
            made = {"normed": make.state(dtype), "rstd": make.floats(make.rows)}
            arguments |= norm | made
            make.found(**made)
        make.kernel(step, False, arguments, eps=eps)
    return make.plan(mixes=mixes)


def backward(spec: MixSpec, given: Mapping[str, Sequence[Layout]], stacked: int) -> Plan:
    """Of `launch.mix_backward`: gradients of ``sources``, of what was ``added``, ``stacked``, and partial sums.

    Args:
        given: by field of `launch.GradientInputs`.
    """
    check_backward(spec, given, stacked)
    make = _Maker(spec, given)
    sources = make.states([x.dtype for x in given["sources"]], stacked)
    grads = make.at["grads"]
    if spec.norm is None:
        make.plain_backward(grads, sources, make.itemsize)
        return make.plan(sources=sources, added=grads[: spec.outputs == 1])
    used = len(make.at["grad_mixes"]) > 0
    norm: Arguments = {"rstd": make.at["rstd"][0], "grad_normed": grads[0], "mix": make.at["mixes"][0]}
    norm |= {"norm_weight": make.at["norm_weight"][0]}
    norm |= {"grad_mix": make.at["grad_mixes"][0]} if used else {}
    few = spec.weights != "channel" and spec.sources <= DOTS_FAN_IN and make.cols <= MAX_NORM_WIDTH // 2
    if few or not spec.sources:
        step = dataclasses.replace(spec, keep_mix=used, accumulate=False, added=min(spec.added, 1))
        added = make.state(given["grads"][0].dtype) if step.added else None
        arguments = make.terms(slice(0, spec.sources)) if spec.has_dots else {}
        arguments |= norm | ({} if added is None else {"grad_added": added})
        make.kernel(step, True, arguments | ({"grad_sources": sources} if sources else {}))
        return make.plan(sources=sources, added=() if added is None else (added,))
    # Registers cannot hold whole rows and all those sums: the norm comes first, its gradient in float32.
    unweighted: dict[str, Any] = {"sources": 0, "weights": "none", "scores": False, "accumulate": False}
    alone = dataclasses.replace(spec, **unweighted, added=1, keep_mix=used)
    middle = make.state(torch.float32)
    make.kernel(alone, True, norm | {"grad_added": middle})
    make.plain_backward((middle,), sources, torch.float32.itemsize)
    return make.plan(sources=sources, added=(middle,))


class _Maker:
    """Makes a plan.

    Attributes:
        at: places of what is given, by name.
        rows, cols: of each state.
    """

    def __init__(self, spec: MixSpec, given: Mapping[str, Sequence[Layout]]) -> None:
        self.spec, self.at = spec, dict[str, Places]()
        like = (given.get("grads") or [*given["sources"], *given["added"], *given["accumulators"]])[0]
        self.shape, self.device = like.shape, like.device
        self.rows, self.cols, self.itemsize = math.prod(like.shape[:-1]), like.shape[-1], like.dtype.itemsize
        self.strides: list[int] = []
        self.steps: list[Callable[[list[Tensor]], None]] = []
        self.results: dict[str, Places] = {}
        for name, layouts in given.items():
            self.at[name] = tuple(range(len(self.strides), len(self.strides) + len(layouts)))
            for place, layout in zip(self.at[name], layouts, strict=True):
                stride = _dense(layout) if name in DENSE else row_stride(layout.shape, layout.strides)
                if stride is None:  # it is copied
                    self.steps.append(functools.partial(_contiguous, place))
                self.strides.append(layout.shape[-1] if stride is None else stride)

    def plan(self, **results: Places) -> Plan:
        return Plan(tuple(self.steps), self.results | results)

    def found(self, **places: int) -> None:
        """Results, more of which may be found later."""
        for name, place in places.items():
            self.results[name] = (*self.results.get(name, ()), place)

    # What is made: each returns its place.

    def _made(self, stride: int, step: Callable[[list[Tensor]], None]) -> int:
        self.steps.append(step)
        self.strides.append(stride)
        return len(self.strides) - 1

    def floats(self, *shape: int) -> int:
        return self._made(0, functools.partial(_empty, shape, torch.float32, self.device))

    def state(self, dtype: torch.dtype) -> int:
        return self._made(self.cols, functools.partial(_empty, self.shape, dtype, self.device))

    def states(self, dtypes: Sequence[torch.dtype], stacked: int = 0) -> Places:
        """One for each dtype, of which the first ``stacked`` are views of one."""
        views: Places = ()
        if stacked:
            shape = (*self.shape[:-1], stacked, self.cols)
            whole = self._made(0, functools.partial(_empty, shape, dtypes[0], self.device))
            self.found(stacked=whole)
            views = tuple(range(whole + 1, whole + 1 + stacked))
            self.steps.append(functools.partial(_unbind, whole))
            self.strides += [stacked * self.cols] * stacked
        return (*views, *map(self.state, dtypes[stacked:]))

    def weights(self, part: slice) -> int:
        """Those of some of the sources."""
        (place,), whole = self.at["weights"], slice(0, self.spec.sources)
        return place if part == whole else self._made(0, functools.partial(_narrow, place, self.spec, part))

    # Kernels.

    def terms(self, part: slice) -> Arguments:
        """Some of the sources, with their weights and scores."""
        scores, n = self.at["scores"], self.spec.sources
        of_each = [scores[o * n : (o + 1) * n][part] for o in range(self.spec.outputs * self.spec.scores)]
        found: Arguments = {"sources": self.at["sources"][part]} if self.spec.sources else {}
        found |= {} if self.spec.weights == "none" else {"weights": self.weights(part)}
        return found | ({"scores": tuple(place for places in of_each for place in places)} if scores else {})

    def plain_backward(self, grads: Places, sources: Places, itemsize: int) -> None:
        """Backward without a norm, in as many kernels as the fan-in asks for; gradients have that itemsize."""
        plain = dataclasses.replace(self.spec.without_norm(), probe=False, accumulate=False, added=0)
        most = self.spec.fan_in(dots=self.spec.has_dots)
        for first in range(0, self.spec.sources, most):
            part = slice(first, min(first + most, self.spec.sources))
            arguments = self.terms(part) if plain.has_dots else {}
            arguments |= {"carried": self.at["carried"][part]} if plain.carried else {}
            step = dataclasses.replace(plain, sources=part.stop - part.start)
            self.kernel(step, True, arguments | {"grads": grads, "grad_sources": sources[part]}, itemsize)

    def kernel(
        self, spec: MixSpec, backward: bool, arguments: Arguments, itemsize: int = 0, eps: float | None = None
    ) -> None:
        """A step that starts a kernel; with what it sums over rows, of which each program leaves a part."""
        sums = backward or spec.probe
        grid = Grid.of(spec, self.rows, self.cols, itemsize or self.itemsize, sums)
        if sums:
            partials = {
                name: self.floats(*shape) for name, shape in _partials(spec, backward, grid, self.rows, self.cols)
            }
            arguments |= partials
            self.found(**partials)
        strides = {
            STRIDES[name]: tuple(self.strides[i] for i in at) if isinstance(at, tuple) else self.strides[at]
            for name, at in arguments.items()
            if name in STRIDES
        }
        norm = {"eps": float(eps)} if eps is not None and spec.norm else {}
        numbers = {**strides, **norm, "rows": self.rows, "COLS": self.cols}
        self.steps.append(Kernel(generated(spec, backward, grid), self.device, arguments, numbers))


def _partials(spec: MixSpec, backward: bool, grid: Grid, rows: int, cols: int) -> list[tuple[str, tuple[int, ...]]]:
    """float32 sums that programs leave behind, as `_dot_parameters` of the generator declares them."""
    shapes = {
        "weight_partials": {
            "none": (),
            "scalar": (grid.row_programs * grid.col_programs, spec.outputs, spec.sources),
            "channel": (grid.row_programs, spec.outputs, spec.sources, cols),
        }[spec.weights],
        "score_partials": (grid.col_programs, rows, spec.outputs, spec.sources) if spec.scores else (),
        "norm_weight_partials": (grid.row_programs, cols) if spec.norm and backward else (),
        "norm_bias_partials": (grid.row_programs, cols) if spec.shifted and backward else (),
    }
    return [(name, shape) for name, shape in shapes.items() if shape]


# Steps: what they do to the tensors so far.


def _contiguous(place: int, tensors: list[Tensor]) -> None:
    tensors[place] = tensors[place].contiguous()


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, tensors: list[Tensor]) -> None:
    tensors.append(torch.empty(shape, dtype=dtype, device=device))


def _unbind(place: int, tensors: list[Tensor]) -> None:
    tensors += tensors[place].unbind(-2)


def _narrow(place: int, spec: MixSpec, part: slice, tensors: list[Tensor]) -> None:
    dim = -2 if spec.weights == "channel" else -1
    tensors.append(tensors[place].narrow(dim, part.start, part.stop - part.start).contiguous())


def _dense(layout: Layout) -> int | None:
    """0 for a contiguous tensor, whose stride nobody asks for."""
    expected = 1
    for size, stride in zip(reversed(layout.shape), reversed(layout.strides), strict=True):
        if size != 1 and stride != expected:
            return None
        expected *= size
    return 0
