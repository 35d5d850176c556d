"""Names of topologies. Installed packages add theirs through the entry point group ``rewire.topologies``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from rewire.registry import Factories
from rewire.topologies.base import Topology

T = TypeVar("T", bound=Callable[..., Topology])

_FACTORIES: Factories[Topology] = Factories(
    "topology",
    "list_topologies",
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
