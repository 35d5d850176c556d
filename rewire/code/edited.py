"""Classes whose methods were edited: generated subclasses of the user's own."""

from __future__ import annotations

import dataclasses
from types import FunctionType
from typing import Any

from torch import nn

from rewire.attributes import EDITED
from rewire.code.functions import Decorated, undecorated


@dataclasses.dataclass(frozen=True)
class Edited:
    """An edited method.

    Attributes:
        name: name of the method.
        source: its new source.
        definition: the function that was edited, if it is not the class's own method of this name.
    """

    name: str
    source: str
    definition: FunctionType | None = None

    def original(self, cls: type) -> Decorated:
        """The original method."""
        definition: Any = self.definition
        return Decorated(definition) if definition is not None else undecorated(getattr(cls, self.name))


def is_edited(module: nn.Module) -> bool:
    """Whether methods of the module were edited; also true for FSDP's subclass of a generated class."""
    return hasattr(type(module), EDITED)


def edits_of(module: nn.Module) -> dict[str, Edited]:
    edits: dict[str, Edited] = getattr(type(module), EDITED)
    return edits


def original_class(module: nn.Module) -> type:
    """The user's class of an edited module."""
    mro = type(module).__mro__
    return mro[next(n for n, cls in enumerate(mro) if EDITED in vars(cls)) + 1]
