"""Tensors [..., D] as kernels take them: rows, strides, and what has to fit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rewire.kernels.spec import MAX_NORM_WIDTH, MixSpec

#: Times the width: rows further apart are copied.
MAX_ROW_STRIDE = 256


@dataclasses.dataclass(frozen=True, eq=False)
class Terms:
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
    def of(cls, spec: MixSpec, sources: Sequence[Tensor], weights: Tensor | None, scores: Sequence[Tensor]) -> Terms:
        flat = [s.squeeze(-1) for s in map(as_rows, scores)]
        apart = tuple(by_output(flat, spec.outputs)) if scores else ()
        if weights is not None and weights.dim() == (1 if spec.weights == "scalar" else 2):
            weights = weights[None]
        return cls(tuple(map(as_rows, sources)), weights, apart)

    def __getitem__(self, part: slice) -> Terms:
        weights = None if self.weights is None else self.weights[:, part]
        return Terms(self.sources[part], weights, tuple(scores[part] for scores in self.scores))

    def arguments(self) -> dict[str, Any]:
        """What `_source_parameters` of the generator declares."""
        arguments = strided("sources", self.sources) if self.sources else {}
        if self.weights is not None:
            arguments["weights"] = self.weights.contiguous()
        if self.scores:
            arguments |= strided("scores", tuple(s for scores in self.scores for s in scores))
        return arguments


def by_output(scores: Sequence[Tensor], outputs: int) -> list[tuple[Tensor, ...]]:
    """outputs times N scores as N of each output."""
    n = len(scores) // outputs
    return [tuple(scores[o * n : (o + 1) * n]) for o in range(outputs)]


def as_rows(x: Tensor) -> Tensor:
    """[..., D] as [rows, D] with stride 1 along the last dimension: a view wherever the strides allow it.

    Strides are compiled in. Those of one token of each sequence, which change with the number of tokens, must not be.
    """
    flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    if x.is_contiguous():
        return flat
    dense = flat.stride(1) == 1 or flat.shape[1] == 1
    return flat if dense and row_stride(flat) <= MAX_ROW_STRIDE * flat.shape[1] else flat.contiguous()


def strided(name: str, x: Tensor | Sequence[Tensor]) -> dict[str, Any]:
    """[rows, D] tensors, or scores [rows], and their row strides, as arguments."""
    if isinstance(x, Tensor):
        return {name: x, f"{name}_stride": row_stride(x)}
    singular = {"mixes": "mix"}.get(name, name.removesuffix("s"))
    return {name: tuple(x), f"{singular}_strides": tuple(map(row_stride, x))}


def row_stride(x: Tensor) -> int:
    """Of [rows, ...]."""
    return x.stride(0) if x.shape[0] > 1 else math.prod(x.shape[1:])  # of one row, it could be any


def check_terms(spec: MixSpec, states: Sequence[Tensor], weights: Tensor | None, scores: Sequence[Tensor]) -> None:
    """Raise TypeError or ValueError where dtypes or shapes do not fit; ``states`` are all tensors [..., D]."""
    wrong = sorted({str(x.dtype) for x in states} - {"torch.float32", "torch.bfloat16", "torch.float16"})
    if wrong:
        raise TypeError(f"The kernels mix float32, bfloat16 and float16, in float32; got {', '.join(wrong)}.")
    devices = {x.device for x in (*states, *scores, *(() if weights is None else (weights,)))}
    if len(devices) > 1:
        raise ValueError(f"The tensors of a mix have to be on one device, got {', '.join(sorted(map(str, devices)))}.")
    if any(x.dtype != torch.float32 for x in (*scores, *(() if weights is None else (weights,)))):
        raise TypeError("Weights and scores of a mix have to be float32.")
    shapes = {tuple(x.shape) for x in states}
    if len(shapes) > 1:
        raise ValueError(f"The tensors of a mix have to be of one shape, got {', '.join(map(str, sorted(shapes)))}.")
    (shape,) = shapes
    if spec.norm and shape[-1] > MAX_NORM_WIDTH:
        raise ValueError(f"A fused norm holds rows of at most {MAX_NORM_WIDTH} channels, got {shape[-1]}.")
    check_count("scores", scores, spec.pairs if spec.scores else 0)
    check_count("weights", () if weights is None else (weights,), int(spec.weights != "none"))
    expected = (spec.outputs, spec.sources, *shape[-1:][: spec.weights == "channel"])
    if weights is not None and tuple(weights.shape) not in (expected, expected[1:] if spec.outputs == 1 else expected):
        raise ValueError(f"Weights of {spec} have to be {list(expected)}, got {list(weights.shape)}.")
    if any(s.shape != (*shape[:-1], 1) for s in scores):
        raise ValueError(f"Scores of a mix of {list(shape)} have to be {[*shape[:-1], 1]}.")


def check_count(name: str, found: Sequence[Any], wanted: int) -> None:
    """Raise ValueError unless there are as many as wanted."""
    if len(found) != wanted:
        raise ValueError(f"{name}: the spec asks for {wanted}, got {len(found)}.")


def given(x: Tensor | None) -> tuple[Tensor, ...]:
    """One tensor, or none."""
    return () if x is None else (x,)


def check_stacked(stacked: int, most: int, what: str) -> None:
    """Raise ValueError if more are to be stacked than there are."""
    if not 0 <= stacked <= most:
        raise ValueError(f"stacked={stacked}: there are {most} {what}.")
