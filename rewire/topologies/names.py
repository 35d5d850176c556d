"""Names of topologies in files: those that they are registered by, and that of frozen ones, which nobody compiles."""

from __future__ import annotations

from typing import Any

from rewire.errors import UnknownName
from rewire.topologies.base import Topology
from rewire.topologies.frozen import Frozen
from rewire.topologies.registry import list_topologies, make_topology


def named_topology(name: str, options: dict[str, Any]) -> Topology:
    """The topology that a file names; never an import.

    Raises:
        UnknownName: there is no such name.
        TypeError, ValueError, RewireError: options that it does not have.
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
    except Exception:  # whatever a topology does with options that it was not written for
        return None
