"""How the matrices of a parameter lie in its storage."""

from __future__ import annotations

import dataclasses
import math

from torch import Tensor


@dataclasses.dataclass(frozen=True)
class StorageLayout:
    """The location of one matrix or kernel in a parameter.

    Attributes:
        transposed: outputs and inputs are swapped: [in, out, ..], as in transformers' Conv1D and transposed
            convolutions.
        groups: groups of a transposed convolution, [groups * in, out / groups, ..].
        stacked: the first dimension counts independent matrices (experts).
        rows: for a fused projection, whose outputs are ``n`` times several parts: (n, first row, number of rows) of one
            part within one of the n.
    """

    transposed: bool = False
    groups: int = 1
    stacked: bool = False
    rows: tuple[int, int, int] | None = None

    def view(self, stored: Tensor) -> Tensor:
        """The values as a view of ``stored``, in the order [out, in, ..]; outputs may be split into two dimensions."""
        first = 1 if self.stacked else 0
        if self.groups > 1:
            stored = stored.unflatten(0, (self.groups, -1)).transpose(1, 2)  # [groups, out / groups, in, ..]
        elif self.transposed:
            stored = stored.transpose(first, first + 1)
        if self.rows is None:
            return stored
        count, start, size = self.rows
        return stored.unflatten(first, (count, -1)).narrow(first + 1, start, size)

    def shape(self, stored: Tensor) -> tuple[int, ...]:
        """Shape of the values: [out, in, *kernel], or [experts, out, in] if stacked."""
        view = self.view(stored)
        first = 1 if self.stacked else 0
        split = self.groups > 1 or self.rows is not None
        if not split:
            return tuple(view.shape)
        return (*view.shape[:first], math.prod(view.shape[first : first + 2]), *view.shape[first + 2 :])
