"""Names of topologies. Installed packages add theirs through the entry point group ``rewire.topologies``."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from rewire.errors import RewireError, UnknownName
from rewire.registry import Factories
from rewire.topologies.base import Topology

T = TypeVar("T", bound=Callable[..., Topology])

_FACTORIES: Factories[Topology] = Factories(
    "topology",
    "topologies",
    entry_points="rewire.topologies",
    product=Topology,  # type: ignore[type-abstract]
    public="rewire.Topology",
)


def register_topology(name: str) -> Callable[[T], T]:
    """Decorator: make a `Topology` class (or a function that returns one) available as ``topology=name``.

    The first line of its docstring is its description in `list_topologies`. Its parameters are the options that
    ``rewire.compile(model, name, **options)`` accepts.

    Example:
        >>> @rewire.register_topology("halved")
        ... class Halved(rewire.Residual):
        ...     'Plain residual connections, with half of each branch.'
        ...     def merge(self, states, weights, t, *branches):
        ...         return states[0] + 0.5 * sum(branches)
        >>> halved = rewire.compile(model, "halved", example_inputs=(x,), start="paper")
    """
    return _FACTORIES.register(name)


def list_topologies() -> dict[str, str]:
    """Name of every topology, and what it is in one line.

    Example:
        >>> "ancre-ingoing" in rewire.list_topologies()
        True
    """
    return _FACTORIES.descriptions()


def make_topology(topology: str | Topology, options: dict[str, Any]) -> Topology:
    """The topology of that name with ``options``, or the object itself. Raises as `Factories.make`."""
    return _FACTORIES.make(topology, options)


def name_and_options(topology: Topology) -> tuple[str, dict[str, Any]]:
    """What `named_topology` makes this topology of: its registered name, or for want of one that of its class."""
    for name, factory in _FACTORIES.items():
        if isinstance(factory, type) and factory is not type(topology):
            continue
        fields = [option for option in inspect.signature(factory).parameters if hasattr(topology, option)]
        options = {option: getattr(topology, option) for option in fields}
        # options of other topologies may happen to have the same names
        with contextlib.suppress(TypeError, ValueError, RewireError):
            if factory(**options) == topology:
                return name, options
    return type(topology).__name__, topology.options()


def named_topology(name: str, options: dict[str, Any]) -> Topology:
    """The topology of a registered name, or of the name of a class that is loaded; never an import.

    Files of version 0.1 name classes; so do those of topologies that are not registered, as frozen ones.

    Raises:
        UnknownName: there is no such name.
        TypeError, ValueError, RewireError: options that it does not have.
    """
    if name in dict(_FACTORIES.items()):
        return make_topology(name, options)
    classes = {cls.__name__: cls for cls in _subclasses(Topology)}
    if name not in classes:
        known = ", ".join(sorted({*classes, *list_topologies()}))
        raise UnknownName(
            f"the topology '{name}' is not known here; known are {known}. Import or install the package that has it."
        )
    made: Topology = classes[name](**options)
    return made


def _subclasses(cls: type) -> list[type]:
    direct: list[type] = cls.__subclasses__()
    return direct + [below for child in direct for below in _subclasses(child)]
