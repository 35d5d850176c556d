"""Base of topologies whose states are weighted sums of a shortcut and a branch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rewire.mixes.mix import Mix, pending_mix
from rewire.topologies.base import Dims, FirstOrder, States, repeatable
from rewire.topologies.program import Program, Term, Weight, recurrence


class Scales(NamedTuple):
    """Effective weights of a `ScaledSum`, float32; each has T rows.

    Attributes:
        shortcut: a, scalars [T] or one for each channel [T, D].
        branch: b, of the same shape; None: all 1.
        shift: c [T, D]; None: all 0.
        kept: whether ``x_{t-1}`` is added once more, without a scale.
    """

    shortcut: Tensor
    branch: Tensor | None = None
    shift: Tensor | None = None
    kept: bool = False


class ScaledSum(FirstOrder[Scales]):
    """``x_t = a_t * x_{t-1} + b_t * f_t + c_t``; unit t reads ``x_{t-1}``, the only state; the output is ``x_T``.

    Post-norm blocks norm the sum.
    """

    @repeatable
    def merge(self, states: States, weights: Scales, t: int, *branches: Tensor) -> Mix:
        (x,), unit = states, t - 1
        shift = () if weights.shift is None else (weights.shift[unit].to(x.dtype),)
        if weights.branch is None:
            kept = states if weights.kept else ()
            return pending_mix(states, weights.shortcut[unit : unit + 1], added=(*kept, *branches, *shift))
        scales = (weights.shortcut[unit], *[weights.branch[unit]] * len(branches))
        return pending_mix((x, *branches), scales, added=shift)

    def matrix(self, weights: Scales, dims: Dims) -> Tensor:
        """float32 [T, T]: ``a_t`` on the diagonal, not including a kept shortcut."""
        return torch.diag(weights.shortcut if weights.shortcut.dim() == 1 else weights.shortcut.mean(1))

    def program(self, weights: Scales, dims: Dims) -> Program:
        if weights.shift is not None:  # a weighted sum of values cannot express it
            return super().program(weights, dims)
        shortcuts = []
        for i, a in enumerate(_entries(weights.shortcut)):
            kept = [Term(f"x{i}", 1.0, fixed=True)] if weights.kept else []
            shortcuts.append([*kept, Term(f"x{i}", a)])
        return recurrence(shortcuts, None if weights.branch is None else _entries(weights.branch))


def _entries(scales: Tensor) -> Sequence[Weight]:
    """The scale of each unit: a number from [T], a vector from [T, D]."""
    if scales.dim() > 1:
        return scales.unbind()
    return scales.tolist()
