"""Names of topologies. Installed packages add theirs through the entry point group ``rewire.topologies``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from rewire.registry import Registry
from rewire.topologies.base import Topology

T = TypeVar("T", bound=Callable[..., Topology])

_REGISTRY: Registry[Callable[..., Topology]] = Registry("topology", "topologies", entry_points="rewire.topologies")


def register_topology(name: str) -> Callable[[T], T]:
    """Decorator: make a `Topology` class (or a function that returns one) available as ``topology=name``.

    The first line of its docstring is its description in `topologies`. Its parameters are the options that
    ``rewire.compile(model, name, **options)`` accepts.
    """

    def register(factory: T) -> T:
        _REGISTRY.add(name, factory)
        return factory

    return register


def topologies() -> dict[str, str]:
    """Name of every topology, and what it is in one line."""
    return {name: (inspect.getdoc(factory) or "").split("\n")[0] for name, factory in _REGISTRY.items()}


def make_topology(topology: str | Topology, options: dict[str, Any]) -> Topology:
    """The topology of that name with ``options``, or the object itself.

    Raises:
        UnknownName: no such topology, or no such option; the nearest names are given.
        TypeError: neither a name nor a `Topology`.
    """
    if isinstance(topology, Topology):
        if options:
            raise TypeError(
                f"options {sorted(options)} go to a topology given by name; set them on the object instead."
            )
        return topology
    if not isinstance(topology, str):
        raise TypeError(f"topology must be a name or a rewire.Topology, not {type(topology).__name__}.")
    factory = _REGISTRY.get(topology)
    allowed = list(inspect.signature(factory).parameters)
    for option in options:
        if option not in allowed:
            takes = f"it takes {', '.join(allowed)}" if allowed else "it takes none"
            raise TypeError(f"topology '{topology}' has no option '{option}': {takes}.")
    return factory(**options)
