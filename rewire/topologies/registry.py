"""Names of topologies. Installed packages add theirs through the entry point group ``rewire.topologies``."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rewire.attributes import REGISTERED_NAME
from rewire.errors import UnknownName
from rewire.registry import Factories, Options, said
from rewire.topologies.base import Start, Topology
from rewire.topologies.frozen import Frozen

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

    def registered(factory: T) -> T:
        _FACTORIES.add(name, factory)
        if isinstance(factory, type):
            setattr(factory, REGISTERED_NAME, name)
        return factory

    return registered


def list_topologies(pattern: str = "*") -> dict[str, str]:
    """Name -> one-line description of every topology.

    Args:
        pattern: a pattern for names, with shell wildcards.

    Example:
        >>> list(rewire.list_topologies("hc-*"))
        ['hc-dynamic', 'hc-gated', 'hc-static']
    """
    found = _FACTORIES.descriptions()
    return {name: found[name] for name in fnmatch.filter(found, pattern)}


def make_topology(topology: str | Topology, options: Options, start: Start | None = None) -> Topology:
    """The topology of that name with ``options``, or the object itself, in the form for ``start`` if that is given.

    Raises as `Factories.make` does.
    """
    made = _FACTORIES.make(topology, options)
    if isinstance(topology, str):
        _note(made, said(topology)[0])
    form = made if start is None else made.for_start(start)
    if type(form) is type(made):
        _note(form, made.registered_name)  # a copy with other fields loses its name
    return form


def placed_topology(topology: Topology, kinds: Sequence[str]) -> Topology:
    """The topology with unit numbers in options that name units by kind: see `Topology.placed`."""
    form = topology.placed(kinds)
    if form is not topology:
        _note(form, topology.registered_name)
    return form


def _note(topology: Topology, name: str) -> None:
    """Set the registered name of a topology that a function made."""
    if topology.registered_name != name:
        vars(topology)[REGISTERED_NAME] = name


def name_and_options(topology: Topology) -> tuple[str, Options]:
    """The arguments of `make_topology` for this topology; if it is not registered, its class's path and its fields."""
    name = topology.registered_name
    return name, options_of(topology, dict(_FACTORIES.items()).get(name, type(topology)))


def options_of(topology: Topology, factory: Callable[..., Topology]) -> Options:
    """The arguments of ``factory`` for this topology: its fields with the names of the factory's parameters."""
    return {name: getattr(topology, name) for name in inspect.signature(factory).parameters if hasattr(topology, name)}


def named_topology(name: str, options: Options) -> Topology:
    """The topology that a file names; nothing is imported for it.

    Raises:
        UnknownName: there is no such name.
        TypeError, ValueError, RewireError: the topology does not have these options.
    """
    if name == Frozen.__name__:
        return Frozen(**options)
    try:
        return make_topology(name, options)
    except UnknownName:
        known = ", ".join(sorted([Frozen.__name__, *list_topologies()]))
        raise UnknownName(
            f"the topology '{name}' is not known here; known are {known}. Import or install the package that has it."
        ) from None


def topology_in(recipe: Any) -> Topology | None:
    """The topology of a recipe; None if it is not known here, or the recipe is damaged."""
    try:
        return named_topology(recipe["topology"], recipe["options"])
    except Exception:  # a topology may raise anything for options it does not expect
        return None
