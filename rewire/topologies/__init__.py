"""Topologies: how the units of a trunk are connected. One family a file; importing this package registers all."""

from __future__ import annotations

import importlib
import pkgutil

from rewire.topologies.ancre import ANCRe
from rewire.topologies.base import Dims, QKVInputs, Recurrence, Topology
from rewire.topologies.dense import Dense, DenseIncrements
from rewire.topologies.denseformer import DenseFormer
from rewire.topologies.registry import list_topologies, make_topology, register_topology
from rewire.topologies.residual import Residual

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")

__all__ = [
    "ANCRe",
    "Dense",
    "DenseFormer",
    "DenseIncrements",
    "Dims",
    "QKVInputs",
    "Recurrence",
    "Residual",
    "Topology",
    "list_topologies",
    "make_topology",
    "register_topology",
]
