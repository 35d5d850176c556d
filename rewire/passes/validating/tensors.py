"""The tensors in what models return, and how far two of them are apart."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rewire.errors import OutOfOrder
from rewire.runtime.nested import parts_by_name
from rewire.runtime.stream import Stream

#: Relative tolerance (norm of the difference over norm of the original) by dtype.
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}
#: Gradients pass through more roundings than outputs.
_GRADIENT_SLACK = 5.0
#: A block of 65536 gradient elements is kept as this many sums, each of this many elements.
_SUMS, _FOLDED = 4096, 16
_DEPTH = 6  # levels of nested objects that are searched for tensors


def tensors_in(value: object, depth: int = 0) -> list[Tensor]:
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
    return [t for item in parts_by_name(value).values() for t in tensors_in(item, depth + 1)]


def relative_error(reference: Tensor, other: Tensor) -> float:
    """Norm of the difference over the norm of ``reference``, in float32 or better."""
    a, b = real(reference), real(other)
    finite = torch.isfinite(a)
    if not torch.equal(finite, torch.isfinite(b)):
        return float("inf")
    a, b = a[finite], b[finite]
    return float((a - b).norm() / a.norm().clamp_min(torch.finfo(a.dtype).tiny))


class Gradient(NamedTuple):
    """What is kept of a parameter's gradient.

    Attributes:
        sketch: see `sketch`.
        dtype: of the gradient.
    """

    sketch: Tensor
    dtype: torch.dtype


def sketch(gradient: Tensor) -> Tensor:
    """A gradient in a sixteenth of its memory, if it is large: sums of 16 elements, with random factors.

    It is linear, and preserves norms up to about one part in a hundred (Johnson and Lindenstrauss). So two gradients
    differ by as much as their sketches. A difference in a single element is wholly in one sum.
    """
    exact = torch.promote_types(gradient.dtype, torch.float32)
    flat = gradient.detach().flatten()
    if flat.numel() <= _FOLDED * _SUMS:
        return flat.to(exact)
    factors, whole = _factors(flat.device, exact), flat.numel() // (_FOLDED * _SUMS) * _FOLDED * _SUMS
    parts = flat[:whole].view(-1, _FOLDED, _SUMS).split(16)  # a few at a time, to save memory
    sums = [(part.to(exact) * factors).sum(1).flatten() for part in parts]
    return torch.cat([*sums, flat[whole:].to(exact)])


@functools.cache
def _factors(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Factors of size 0.5 to 1.5 and random sign: equal elements do not cancel, and none vanishes."""
    drawn = torch.rand((2, _FOLDED, _SUMS), generator=torch.Generator().manual_seed(4))
    return ((0.5 + drawn[0]) * (drawn[1] - 0.5).sign()).to(device, dtype)


def gradient_error(reference: Gradient, other: Tensor, largest: float, within: float = 0.0) -> float:
    """The relative error of a gradient if it is too large, else 0.

    A gradient that is zero in exact arithmetic (a key bias, for example) is rounding noise in both: ``largest`` is the
    norm of the original's largest. ``within`` is a lower bound of the tolerance for outputs.
    """
    tolerance = _GRADIENT_SLACK * max(within, TOLERANCES.get(reference.dtype, 1e-5))
    norm = float(reference.sketch.norm())
    if float((reference.sketch - other).norm()) > tolerance * max(norm, 1e-3 * largest):
        return relative_error(reference.sketch, other)
    return 0.0


def tolerance(output: Tensor) -> float:
    """The relative error that is allowed for an output."""
    return TOLERANCES.get(real(output).dtype if output.is_complex() else output.dtype, 1e-5)


def real(output: Tensor) -> Tensor:
    """A tensor as real numbers, in float32 or better."""
    real = torch.view_as_real(output) if output.is_complex() else output
    return real.to(torch.promote_types(real.dtype, torch.float32))


def finite(output: Tensor) -> bool:
    return output.numel() > 0 and bool(torch.isfinite(output).any())


def described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
