"""Names of topologies in files: those that they are registered by; in files of version 0.1, those of their classes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from rewire.errors import RewireError, UnknownName
from rewire.topologies.ancre import ANCRe, ANCReCascaded, ANCReConstant
from rewire.topologies.attnres import AttnRes
from rewire.topologies.base import Topology
from rewire.topologies.denseformer import DenseFormer
from rewire.topologies.frozen import Frozen
from rewire.topologies.grn import DCA, GRNv1, GRNv2, GRNv3
from rewire.topologies.hyper import DynamicHyperConnections, FracConnections, HyperConnections
from rewire.topologies.laurel import LaurelLR, LaurelPA, LaurelRW
from rewire.topologies.mhc import ManifoldHyperConnections
from rewire.topologies.muddformer import MUDDFormer
from rewire.topologies.registry import list_topologies, make_topology, name_and_options
from rewire.topologies.residual import Residual
from rewire.topologies.scaling import BranchScale, LayerScale

#: What files of version 0.1 call topologies; the name of frozen ones, which nobody compiles, still is that.
_CLASSES: dict[str, Callable[..., Topology]] = {
    "ANCRe": ANCRe,
    "ANCReCascaded": ANCReCascaded,
    "ANCReConstant": ANCReConstant,
    "AttnRes": AttnRes,
    "BranchScale": BranchScale,
    "DCA": DCA,
    "DenseFormer": DenseFormer,
    "DynamicHyperConnections": DynamicHyperConnections,
    "FracConnections": FracConnections,
    "Frozen": Frozen,
    "GRNv1": GRNv1,
    "GRNv2": GRNv2,
    "GRNv3": GRNv3,
    "HyperConnections": HyperConnections,
    "LaurelLR": LaurelLR,
    "LaurelPA": LaurelPA,
    "LaurelRW": LaurelRW,
    "LayerScale": LayerScale,
    "MUDDFormer": MUDDFormer,
    "ManifoldHyperConnections": ManifoldHyperConnections,
    "Residual": Residual,
}

#: What weights that version 0.1 saved compute differently now.
_CHANGED = {
    "mhc": (
        "Sinkhorn-Knopp normalises rows last now, as published, no longer columns. Outputs differ as far as it has not "
        "converged: compare them, or train a little more."
    ),
}

_log = logging.getLogger(__name__)


def named_topology(name: str, options: dict[str, Any]) -> Topology:
    """The topology that a file names; never an import.

    Raises:
        UnknownName: there is no such name.
        TypeError, ValueError, RewireError: options that it does not have.
    """
    if name in _CLASSES:
        return _CLASSES[name](**options)
    try:
        return make_topology(name, options)
    except UnknownName:
        known = ", ".join(sorted({*_CLASSES, *list_topologies()}))
        raise UnknownName(
            f"the topology '{name}' is not known here; known are {known}. Import or install the package that has it."
        ) from None


def topology_in(recipe: Any) -> Topology | None:
    """The topology of a recipe; None if it is not known here, or the recipe is damaged."""
    try:
        return named_topology(recipe["topology"], recipe["options"])
    except (KeyError, RuntimeError, TypeError, ValueError, RewireError):
        return None


def current_recipe(recipe: Any) -> Any:
    """A recipe as this version writes it; what is damaged stays as it is, which is said where it is used."""
    topology = topology_in(recipe)
    if topology is None or recipe["topology"] not in _CLASSES:
        return recipe
    name, options = name_and_options(topology)
    if name in _CHANGED:
        _log.warning("These weights of '%s' were saved by version 0.1: %s", name, _CHANGED[name])
    return {**recipe, "topology": name, "options": options}
