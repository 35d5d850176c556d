"""Branches that are added to a part of a stream: ``x[rows] += f``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


class Parts:
    """``parts[rows](f)`` is a function that stores ``f`` in rows of its argument: from zeros, it makes a branch."""

    def __getitem__(self, index: Any) -> Callable[[Any], Callable[[Tensor], Tensor]]:
        def branch(f: Any) -> Callable[[Tensor], Tensor]:
            def stored(x: Tensor) -> Tensor:
                x[index] = f
                return x

            return stored

        return branch
