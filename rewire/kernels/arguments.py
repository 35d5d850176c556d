"""Tensors [..., D] as kernels take them: rows, strides, and what has to fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rewire.kernels.spec import MAX_NORM_WIDTH, MixSpec


class Layout(NamedTuple):
    """Of a tensor: all that is asked of it before its values are."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def layout(x: Tensor) -> Layout:
    return Layout(x.shape, x.stride(), x.dtype, x.device)


#: Times the width: rows further apart are copied.
MAX_ROW_STRIDE = 256


def row_stride(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """Elements from a row of [..., D] to the next; None if it is not one number for all rows, or not to be compiled in.

    Strides are compiled in. Those of one token of each sequence, which change with the number of tokens, must not be.
    """
    cols, stride, expected = shape[-1], None, None
    if 0 in shape:
        return cols
    for size, step in zip(reversed(shape[:-1]), reversed(strides[:-1]), strict=True):
        if size > 1 and expected not in (None, step):
            return None
        if size > 1:
            stride, expected = step if stride is None else stride, step * size
    if stride is None:  # of one row, it could be any
        stride = cols
    return stride if (cols == 1 or strides[-1] == 1) and stride <= MAX_ROW_STRIDE * cols else None


def stream_strides(x: Layout) -> tuple[int, int] | None:
    """Of streams [..., n, D], elements from a token to the next, and from a stream to the next; None as above."""
    (*lead, n, cols), (*along, step, last) = x.shape, x.strides
    of_tokens = row_stride((*lead, cols), (*along, last))
    return None if of_tokens is None or row_stride((n, cols), (step, last)) is None else (of_tokens, step)


def check_forward(spec: MixSpec, given: Mapping[str, Sequence[Layout]], stacked: int) -> None:
    """Raise TypeError or ValueError unless `launch.mix_forward` can take such tensors."""
    _check(
        spec,
        given,
        ("sources", "added", "accumulators", "probes"),
        sources=spec.sources,
        added=spec.outputs * spec.added,
        accumulators=spec.outputs * spec.accumulate,
        probes=spec.outputs * spec.probe,
        norm_weight=int(spec.norm is not None),
        norm_bias=int(spec.shifted),
        means=int(spec.attended),
    )
    _check_stacked(stacked, 0 if spec.norm else spec.outputs, "mixes without a norm")


def check_backward(spec: MixSpec, given: Mapping[str, Sequence[Layout]], stacked: int) -> None:
    """The same for `launch.mix_backward`."""
    _check(
        spec,
        given,
        ("grads", "sources", "mixes", "grad_mixes", "carried"),
        grads=spec.outputs,
        sources=spec.sources,
        mixes=int(spec.norm is not None),
        rstd=int(spec.norm is not None),
        grad_mixes=int(spec.norm is not None and len(given["grad_mixes"]) > 0),
        norm_weight=int(spec.norm is not None),
        carried=spec.sources * spec.carried,
    )
    _check_stacked(stacked, spec.sources, "gradients of sources")
    if len({x.dtype for x in given["sources"][:stacked]}) > 1:
        raise ValueError("Sources whose gradients are stacked have to be of one dtype.")


def _check(spec: MixSpec, given: Mapping[str, Sequence[Layout]], states: Sequence[str], **counts: int) -> None:
    """Numbers, dtypes, devices and shapes; ``states`` are the names of all tensors [..., D]."""
    _check_dtypes([x for name in states for x in given[name]], [*given["weights"], *given["scores"]])
    devices = {x.device for of in given.values() for x in of}
    if len(devices) > 1:
        raise ValueError(f"The tensors of a mix have to be on one device, got {', '.join(sorted(map(str, devices)))}.")
    shapes = {tuple(x.shape) for name in states for x in given[name]}
    if len(shapes) > 1:
        raise ValueError(f"The tensors of a mix have to be of one shape, got {', '.join(map(str, sorted(shapes)))}.")
    (shape,) = shapes
    if spec.norm and shape[-1] > MAX_NORM_WIDTH:
        raise ValueError(f"A fused norm holds rows of at most {MAX_NORM_WIDTH} channels, got {shape[-1]}.")
    counts |= {"scores": spec.pairs * spec.scores, "weights": int(spec.weights != "none")}
    for name, wanted in counts.items():
        if len(given[name]) != wanted:
            raise ValueError(f"{name}: the spec asks for {wanted}, got {len(given[name])}.")
    expected = (spec.outputs, spec.sources, *shape[-1:][: spec.weights == "channel"])
    if any(tuple(w.shape) not in (expected, expected[spec.outputs == 1 :]) for w in given["weights"]):
        raise ValueError(f"Weights of {spec} have to be {list(expected)}, got {list(given['weights'][0].shape)}.")
    if any(s.shape != (*shape[:-1], 1) for s in given["scores"]):
        raise ValueError(f"Scores of a mix of {list(shape)} have to be {[*shape[:-1], 1]}.")


def _check_dtypes(states: Sequence[Layout], factors: Sequence[Layout]) -> None:
    wrong = sorted({str(x.dtype) for x in states} - {"torch.float32", "torch.bfloat16", "torch.float16"})
    if wrong:
        raise TypeError(f"The kernels mix float32, bfloat16 and float16, in float32; got {', '.join(wrong)}.")
    if any(x.dtype != torch.float32 for x in factors):
        raise TypeError("Weights and scores of a mix have to be float32.")


def _check_stacked(stacked: int, most: int, what: str) -> None:
    if not 0 <= stacked <= most:
        raise ValueError(f"stacked={stacked}: there are {most} {what}.")
