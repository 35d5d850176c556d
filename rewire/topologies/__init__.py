"""Topologies: how the units of a trunk are connected. Each family has a file; importing this package registers all."""

from __future__ import annotations

import importlib
import pkgutil

from rewire.topologies.ancre import ANCRe as ANCRe
from rewire.topologies.ancre import ANCReCascaded as ANCReCascaded
from rewire.topologies.ancre import ANCReConstant as ANCReConstant
from rewire.topologies.attnres import AttnRes as AttnRes
from rewire.topologies.base import Dims as Dims
from rewire.topologies.base import QKVInputs as QKVInputs
from rewire.topologies.base import Recurrence as Recurrence
from rewire.topologies.base import Topology as Topology
from rewire.topologies.ddl import DDL as DDL
from rewire.topologies.dense import Dense as Dense
from rewire.topologies.dense import DenseIncrements as DenseIncrements
from rewire.topologies.denseformer import DenseFormer as DenseFormer
from rewire.topologies.fixed_scale import FixedScale as FixedScale
from rewire.topologies.gated import GatedHyperConnections as GatedHyperConnections
from rewire.topologies.gpas import GPAS as GPAS
from rewire.topologies.grn import DCA as DCA
from rewire.topologies.grn import GRNv1 as GRNv1
from rewire.topologies.grn import GRNv2 as GRNv2
from rewire.topologies.grn import GRNv3 as GRNv3
from rewire.topologies.hyper import (
    DynamicHyperConnections as DynamicHyperConnections,
)
from rewire.topologies.hyper import (
    FracConnections as FracConnections,
)
from rewire.topologies.hyper import (
    HyperConnections as HyperConnections,
)
from rewire.topologies.lanes import TwoLanes as TwoLanes
from rewire.topologies.laurel import LaurelLR as LaurelLR
from rewire.topologies.laurel import LaurelPA as LaurelPA
from rewire.topologies.laurel import LaurelRW as LaurelRW
from rewire.topologies.mhc import ManifoldHyperConnections as ManifoldHyperConnections
from rewire.topologies.muddformer import MUDDFormer as MUDDFormer
from rewire.topologies.multi_gate import MultiGate as MultiGate
from rewire.topologies.orthogonal import OrthogonalUpdate as OrthogonalUpdate
from rewire.topologies.registry import (
    list_topologies as list_topologies,
)
from rewire.topologies.registry import (
    make_topology as make_topology,
)
from rewire.topologies.registry import (
    register_topology as register_topology,
)
from rewire.topologies.residual import Residual as Residual
from rewire.topologies.residual_scale import ResidualScale as ResidualScale
from rewire.topologies.review import Review as Review
from rewire.topologies.scaling import BranchScale as BranchScale
from rewire.topologies.scaling import LayerScale as LayerScale
from rewire.topologies.unet import UNet as UNet
from rewire.topologies.variance_gate import VarianceGate as VarianceGate
from rewire.topologies.x0_lambdas import X0Lambdas as X0Lambdas

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")
