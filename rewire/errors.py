"""Every error that rewire raises on purpose: messages say what was done, where (module path), and what to do."""

import difflib
import math
import numbers
from collections.abc import Iterable, Sequence
from types import CodeType
from typing import TypeGuard


class RewireError(Exception):
    """Base class of all errors of this package."""


class NoResidualAdds(RewireError):
    """The model has no residual add that could be rewritten."""


class UnknownName(RewireError):
    """A topology, initialiser, trunk or pattern of that name does not exist."""


class AlreadyRewired(RewireError):
    """The model was rewired before."""


class AlreadyConnected(RewireError):
    """The architecture has learned depth connections of its own."""


class WrappedModel(RewireError):
    """The model is already sharded, wrapped, compiled or scripted; it has to be rewired before that."""


class UnsupportedTopology(RewireError):
    """The topology's formulas do not fit the trunk (post-norm blocks, granularity, start)."""


class WidthMismatch(RewireError):
    """States of different widths would have to be mixed in one trunk."""


class BadExampleInputs(RewireError):
    """The original model does not run on the example inputs."""


class ValidationMismatch(RewireError):
    """The rewritten model differs from the original."""


class OutOfOrder(RewireError):
    """A block was called outside the order of its trunk."""


class UnsupportedCall(RewireError):
    """A rewired block was called in a way that rewiring does not support."""


class TraceError(RewireError):
    """A module's forward could not be traced.

    Attributes:
        place: the instruction that failed, as a code object and an offset in it; None if unknown.
    """

    def __init__(self, why: str, place: tuple[CodeType, int] | None = None) -> None:
        super().__init__(why)
        self.place = place


class EditError(RewireError):
    """A forward cannot be edited: its source is not available, or it writes an add in an unknown form."""


def with_notes(error: Exception) -> str:
    """The message of an error, followed by its notes."""
    return " ".join([str(error), *getattr(error, "__notes__", ())])


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question that suggests names like ``name``, to append to an error message; it starts with a blank."""
    near = difflib.get_close_matches(name, list(known), n=3)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""


def moved_trunk(trunk: str, model: object, then: str) -> RewireError:
    """The error for a rewired ``model`` in which a trunk is not found again; ``then``: what was to be done with it."""
    return RewireError(
        f"trunk '{trunk}' is not where it was when {type(model).__name__} was rewired: unwrap the model first (merge "
        f"adapters, for example), then {then} it."
    )


def check_type(name: str, value: object, kind: type) -> None:
    """Raise TypeError, naming the argument and both types, if an argument has another type."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be a {kind.__name__}, not {type(value).__name__}.")


def check_positive(option: str, value: float | None, like: float, optional: bool = False) -> None:
    """Raise ValueError if ``value`` is not a positive number; ``optional``: None is allowed, too."""
    if not (optional and value is None) and not (is_number(value) and 0 < value < math.inf):
        raise ValueError(f"{option}={value!r}: it has to be a positive number, like {like:g}{', or None' * optional}.")


def check_small(option: str, value: float) -> None:
    """Raise ValueError if ``value`` is not a number from 0 to 0.01."""
    if not (is_number(value) and 0 <= value <= 0.01):
        raise ValueError(f"{option}={value!r}: it has to be a small number, from 0 to 0.01.")


def is_number(value: object) -> TypeGuard[float]:
    """Whether ``value`` is a real number, and no truth value."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_choice(option: str, value: str, allowed: Sequence[str]) -> None:
    """Raise ValueError if ``value`` is not in ``allowed``."""
    if value not in allowed:
        raise ValueError(f"{option}={value!r}: it has to be one of {', '.join(map(repr, allowed))}.")


def check_count(option: str, value: int | None, least: int, optional: bool = False) -> None:
    """Raise ValueError if ``value`` is not an integer of at least ``least``; ``optional``: None is allowed, too."""
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{option}={value!r}: it has to be a whole number, {least} or more{', or None' * optional}.")
