"""Checks that tensors fit the kernels of a spec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from rewire.kernels.arguments import Metadata
from rewire.kernels.sums.spec import MAX_NORM_WIDTH, MixSpec


def check_forward(spec: MixSpec, given: Mapping[str, Sequence[Metadata]], stacked: int) -> None:
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


def check_backward(spec: MixSpec, given: Mapping[str, Sequence[Metadata]], stacked: int) -> None:
    """As `check_forward`, for `launch.mix_backward`."""
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


def _check(spec: MixSpec, given: Mapping[str, Sequence[Metadata]], states: Sequence[str], **counts: int) -> None:
    """Check numbers, dtypes, devices and shapes; ``states`` are the names of all tensors [..., D]."""
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


def _check_dtypes(states: Sequence[Metadata], factors: Sequence[Metadata]) -> None:
    wrong = sorted({str(x.dtype) for x in states} - {"torch.float32", "torch.bfloat16", "torch.float16"})
    if wrong:
        raise TypeError(f"The kernels mix float32, bfloat16 and float16, in float32; got {', '.join(wrong)}.")
    if any(x.dtype != torch.float32 for x in factors):
        raise TypeError("Weights and scores of a mix have to be float32.")


def _check_stacked(stacked: int, most: int, what: str) -> None:
    if not 0 <= stacked <= most:
        raise ValueError(f"stacked={stacked}: there are {most} {what}.")
