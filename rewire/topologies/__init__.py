"""Topologies: how the units of a trunk are connected. One family a file; `register_topology` adds more."""

from __future__ import annotations

from rewire.topologies.ancre import ANCRe
from rewire.topologies.base import Topology
from rewire.topologies.denseformer import DenseFormer
from rewire.topologies.registry import make_topology, register_topology, topologies
from rewire.topologies.residual import Residual

__all__ = ["ANCRe", "DenseFormer", "Residual", "Topology", "make_topology", "register_topology", "topologies"]
