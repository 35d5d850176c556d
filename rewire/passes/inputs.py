"""Example inputs: the caller's, or those that the registry of architectures makes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from rewire.copies import Inputs
from rewire.errors import BadExampleInputs, RewireError
from rewire.logs import find as log
from rewire.patterns import Pattern, first_given


def inputs_for(model: nn.Module, found: list[Pattern], example_inputs: object) -> Inputs:
    """The caller's example inputs, or those that the registry of architectures makes.

    Raises:
        BadExampleInputs: the caller's are none, or there are none and the registry makes none.
    """
    if example_inputs is not None:
        return normalise_inputs(example_inputs)
    make = first_given(found, "example_inputs")
    if make is None:
        raise BadExampleInputs("the registry of architectures has no inputs for it")
    try:
        inputs: Inputs = make(model)
    except RewireError:
        raise
    except Exception as error:  # a config may lack settings, or have some that fit no rule
        raise BadExampleInputs(f"the registry's inputs do not fit its config: {error}") from error
    return inputs


def known_inputs(model: nn.Module, found: list[Pattern], example_inputs: object) -> Inputs | None:
    """The caller's example inputs, or those of the registry; None, with a line in the log, if it has none."""
    try:
        return inputs_for(model, found, example_inputs)
    except BadExampleInputs as error:
        if example_inputs is not None:
            raise
        log.info("%s: %s", type(model).__name__, error)
        return None


def normalise_inputs(example_inputs: object) -> Inputs:
    """Example inputs as (args, kwargs): from a tuple of args, a dict of kwargs, a pair of both, or one tensor.

    Raises:
        BadExampleInputs: they are none of these.
    """
    if isinstance(example_inputs, Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, Mapping):  # a dict, or the result of a tokeniser
        return (), _named(example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        if (
            len(example_inputs) == 2
            and isinstance(example_inputs[0], (tuple, list))
            and isinstance(example_inputs[1], Mapping)
        ):
            return tuple(example_inputs[0]), _named(example_inputs[1])
        return tuple(example_inputs), {}
    raise BadExampleInputs(
        "example_inputs must be a tuple of args, a dict of kwargs, a pair of both, or one tensor, "
        f"not {type(example_inputs).__name__}."
    )


def _named(kwargs: Mapping[Any, object]) -> dict[str, Any]:
    wrong = next((key for key in kwargs if not isinstance(key, str)), None)
    if wrong is not None:
        raise BadExampleInputs(f"example_inputs have {wrong!r} for the name of an argument: names are strings.")
    return dict(kwargs)
