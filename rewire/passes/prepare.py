"""Pass: prepare a model for the other passes: a copy, the patterns that know it, and inputs to run it on."""

from __future__ import annotations

import dataclasses
from types import FunctionType

from torch import nn

from rewire.copies import Inputs, shared
from rewire.passes.inputs import known_inputs
from rewire.patterns import Pattern, patterns_for


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A model to search and rewire.

    Attributes:
        model: a copy around the same tensors, with what patterns switch off switched off.
        patterns: the patterns that match the model.
        inputs: positional and keyword arguments to run copies on; None if there are none.
        given: whether they are the caller's.
    """

    model: nn.Module
    patterns: list[Pattern]
    inputs: Inputs | None = None
    given: bool = False

    @property
    def name(self) -> str:
        """The class name of the model."""
        return type(self.model).__name__

    @property
    def forwards(self) -> dict[type[nn.Module], FunctionType]:
        """Replacements for the forwards of modules of some classes: see `Pattern.forwards`."""
        return {cls: function for pattern in reversed(self.patterns) for cls, function in pattern.forwards.items()}


def prepare(model: nn.Module, example_inputs: object = None) -> Prepared:
    """Prepare a model, which is not changed.

    Args:
        model: a plain model.
        example_inputs: as for `rewire.compile`; None: those that the registry of architectures makes, if it can.

    Raises:
        BadExampleInputs: ``example_inputs`` are none.
    """
    inputs = known_inputs(model, patterns_for(model), example_inputs)
    return dataclasses.replace(without_inputs(model), inputs=inputs, given=example_inputs is not None)


def without_inputs(model: nn.Module) -> Prepared:
    """Prepare a model that is to be traced."""
    patterns, copied = patterns_for(model), shared(model)
    for pattern in patterns:
        if pattern.prepare:
            pattern.prepare(copied)
    return Prepared(copied, patterns)
