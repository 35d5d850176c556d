"""What an initialiser is, and the registry. Installed packages add theirs by entry points, ``rewire.initializers``."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import ClassVar, TypeVar

from torch import Generator, Tensor

from rewire.init.table import MATRICES, Roles, Weight
from rewire.registry import Factories, Options


@dataclasses.dataclass(frozen=True)
class Rule:
    """What happens to one weight.

    Attributes:
        name: for the report, with the important numbers: ``IDI(tau=1)``.
        fill: fills a tensor [out, in] or [out, in / groups, *kernel] in place; for parameters that are no matrices, in
            the parameter's own shape. It gets the present values; for stacked experts, one expert at a time. Random
            numbers come from the generator.
    """

    name: str
    fill: Callable[[Tensor, Generator | None], object]


class Initializer(abc.ABC):
    """A rule from role and shape to values.

    Subclasses are frozen dataclasses: their fields are the options. They raise `ValueError` for values that their
    docstring does not allow.

    Example:
        >>> from rewire.init import Rule
        >>> class Halves(rewire.Initializer):
        ...     def rule(self, weight, roles):
        ...         return Rule("halved", lambda values, generator: values.mul_(0.5))
        >>> report = rewire.initialize(copy.deepcopy(model), Halves())
    """

    @abc.abstractmethod
    def rule(self, weight: Weight, roles: Roles) -> Rule | None:
        """The rule for ``weight``; None leaves its values alone."""

    def check(self, roles: Roles) -> None:  # noqa: B027 (most fit all models)
        """Raise a `RewireError` if the initialiser has no meaning for a model with these roles."""


class OfMatrices(Initializer):
    """An initialiser with rules for matrices and kernels alone, and zeros."""

    #: Roles that are set to zero.
    zero: ClassVar[frozenset[str]] = frozenset()

    def rule(self, weight: Weight, roles: Roles) -> Rule | None:
        if weight.role in self.zero:
            return Rule("zeros", lambda values, _: values.zero_())
        return self.matrix(weight, roles) if weight.role in MATRICES else None

    @abc.abstractmethod
    def matrix(self, weight: Weight, roles: Roles) -> Rule | None:
        """The rule for a matrix or kernel."""


I = TypeVar("I", bound=Callable[..., Initializer])  # noqa: E741

_FACTORIES: Factories[Initializer] = Factories(
    "initialiser",
    "initializers",
    entry_points="rewire.initializers",
    product=Initializer,  # type: ignore[type-abstract]
    public="rewire.init.Initializer",
)


def register_initializer(name: str) -> Callable[[I], I]:
    """Decorator: make an `Initializer` class (or a function that returns one) available as ``init=name``.

    The first line of its docstring is its description in `list_initializers`. Its parameters are the options that
    ``rewire.initialize(model, name, **options)`` accepts.

    Example:
        >>> from rewire.init import Rule
        >>> @rewire.register_initializer("half")
        ... class Halves(rewire.Initializer):
        ...     'Half of the weights that are there.'
        ...     def rule(self, weight, roles):
        ...         return Rule("halved", lambda values, generator: values.mul_(0.5))
        >>> report = rewire.initialize(copy.deepcopy(model), "half")
    """
    return _FACTORIES.register(name)


def list_initializers() -> dict[str, str]:
    """Name of every initialiser -> a one-line description.

    Example:
        >>> "idinit" in rewire.list_initializers()
        True
    """
    return _FACTORIES.descriptions()


def make_initializer(init: str | Initializer, options: Options) -> Initializer:
    """The initialiser of that name with ``options``, or the object itself. Raises as `Factories.make`."""
    return _FACTORIES.make(init, options)
