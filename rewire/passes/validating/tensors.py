"""Tensors in what models return, and how far two of them are apart."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from rewire.errors import OutOfOrder
from rewire.runtime.stream import Stream

#: Relative tolerance (norm of the difference over norm of the original) by dtype.
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}
#: Gradients pass through more roundings than outputs.
_GRADIENT_SLACK = 5.0
_DEPTH = 6  # of objects inside objects that are looked into for tensors


def tensors_in(value: Any, depth: int = 0) -> list[Tensor]:
    """All tensors in a model's output, in order: in containers, dataclasses and plain objects."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Stream):
        raise OutOfOrder(
            f"the model returns the residual stream of trunk '{value.layout.trunk}' itself: a block of it was not "
            "called, or something keeps hidden states between the blocks."
        )
    if depth > _DEPTH:
        return []
    if isinstance(value, dict):
        return [t for item in value.values() for t in tensors_in(item, depth + 1)]
    if isinstance(value, (tuple, list, set, frozenset)):
        return [t for item in value for t in tensors_in(item, depth + 1)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [t for field in dataclasses.fields(value) for t in tensors_in(getattr(value, field.name), depth + 1)]
    if hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)) and not callable(value):
        return [t for item in vars(value).values() for t in tensors_in(item, depth + 1)]
    return []


def relative_error(reference: Tensor, other: Tensor) -> float:
    """Norm of the difference over the norm of ``reference``, in float32 or better."""
    a, b = real(reference), real(other)
    finite = torch.isfinite(a)
    if not torch.equal(finite, torch.isfinite(b)):
        return float("inf")
    a, b = a[finite], b[finite]
    return float((a - b).norm() / a.norm().clamp_min(torch.finfo(a.dtype).tiny))


def gradient_error(reference: Tensor, gradient: Tensor, largest: float, within: float = 0.0) -> float:
    """Relative error of a gradient if it is too large, else 0.

    A gradient that is zero in exact arithmetic (a key bias, say) is rounding noise in both.

    Args:
        reference, gradient: of the original, and of what is compared with it.
        largest: norm of the largest gradient of the original.
        within: the relative error that outputs may have at least.
    """
    tolerance = _GRADIENT_SLACK * max(within, TOLERANCES.get(reference.dtype, 1e-5))
    difference = float((reference.float() - gradient.float()).norm())
    if difference > tolerance * max(float(reference.float().norm()), 1e-3 * largest):
        return relative_error(reference, gradient)
    return 0.0


def tolerance(output: Tensor) -> float:
    """The relative error that an output may have."""
    return TOLERANCES.get(real(output).dtype if output.is_complex() else output.dtype, 1e-5)


def real(output: Tensor) -> Tensor:
    """Real numbers, in float32 or better."""
    real = torch.view_as_real(output) if output.is_complex() else output
    return real.to(torch.promote_types(real.dtype, torch.float32))


def finite(output: Tensor) -> bool:
    return output.numel() > 0 and bool(torch.isfinite(output).any())


def described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
