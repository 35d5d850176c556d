"""Topologies: how the units of a trunk are connected. One family a file; importing this package registers all."""

from __future__ import annotations

import importlib
import pkgutil

from rewire.topologies.ancre import ANCRe, ANCReCascaded, ANCReConstant
from rewire.topologies.attnres import AttnRes
from rewire.topologies.base import Dims, QKVInputs, Recurrence, Topology
from rewire.topologies.ddl import DDL
from rewire.topologies.dense import Dense, DenseIncrements
from rewire.topologies.denseformer import DenseFormer
from rewire.topologies.fixed_scale import FixedScale
from rewire.topologies.gated import GatedHyperConnections
from rewire.topologies.gpas import GPAS
from rewire.topologies.grn import DCA, GRNv1, GRNv2, GRNv3
from rewire.topologies.hyper import DynamicHyperConnections, FracConnections, HyperConnections
from rewire.topologies.lanes import TwoLanes
from rewire.topologies.laurel import LaurelLR, LaurelPA, LaurelRW
from rewire.topologies.mhc import ManifoldHyperConnections
from rewire.topologies.muddformer import MUDDFormer
from rewire.topologies.multi_gate import MultiGate
from rewire.topologies.orthogonal import OrthogonalUpdate
from rewire.topologies.registry import list_topologies, make_topology, register_topology
from rewire.topologies.residual import Residual
from rewire.topologies.residual_scale import ResidualScale
from rewire.topologies.review import Review
from rewire.topologies.scaling import BranchScale, LayerScale
from rewire.topologies.unet import UNet
from rewire.topologies.variance_gate import VarianceGate
from rewire.topologies.x0_lambdas import X0Lambdas

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")

__all__ = [
    "DCA",
    "DDL",
    "GPAS",
    "ANCRe",
    "ANCReCascaded",
    "ANCReConstant",
    "AttnRes",
    "BranchScale",
    "Dense",
    "DenseFormer",
    "DenseIncrements",
    "Dims",
    "DynamicHyperConnections",
    "FixedScale",
    "FracConnections",
    "GRNv1",
    "GRNv2",
    "GRNv3",
    "GatedHyperConnections",
    "HyperConnections",
    "LaurelLR",
    "LaurelPA",
    "LaurelRW",
    "LayerScale",
    "MUDDFormer",
    "ManifoldHyperConnections",
    "MultiGate",
    "OrthogonalUpdate",
    "QKVInputs",
    "Recurrence",
    "Residual",
    "ResidualScale",
    "Review",
    "Topology",
    "TwoLanes",
    "UNet",
    "VarianceGate",
    "X0Lambdas",
    "list_topologies",
    "make_topology",
    "register_topology",
]
