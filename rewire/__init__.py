"""rewire: learned residual connections for models that nobody prepared.

model = rewire.compile(model, topology="ancre-ingoing")
"""

from rewire.backend import Backend, BackendReport
from rewire.compiler import coefficients, compile, inspect, restore
from rewire.connection import Connection, connections
from rewire.diagnostics import Diagnosis, diagnose
from rewire.diffs import diff, source
from rewire.errors import (
    AlreadyConnected,
    AlreadyRewired,
    BadExampleInputs,
    EditError,
    NoResidualAdds,
    OutOfOrder,
    RewireError,
    ShardedModel,
    TraceError,
    UnknownName,
    UnsupportedCall,
    UnsupportedTopology,
    ValidationMismatch,
    WidthMismatch,
)
from rewire.freeze import FreezeReport, FrozenTrunk, freeze
from rewire.init import Initializer, initialize, initializers, register_initializer
from rewire.init.roles import roles
from rewire.kernels.fused_qkv import Fused
from rewire.monitor import Monitor
from rewire.optim import parameter_groups
from rewire.passes.fusions import Fusion, fusions
from rewire.patterns import Pattern, patterns, register_pattern
from rewire.penalties import sparsity_penalty
from rewire.pictures import plot
from rewire.pretrained import from_pretrained
from rewire.saving import load, save
from rewire.stream import Stream
from rewire.topologies import ANCRe, DenseFormer, Dims, Residual, Topology, Ways, register_topology, topologies
from rewire.trunk import LeftAlone, Report, Site, Trunk

__version__ = "0.1.0"

__all__ = [
    "ANCRe",
    "AlreadyConnected",
    "AlreadyRewired",
    "Backend",
    "BackendReport",
    "BadExampleInputs",
    "Connection",
    "DenseFormer",
    "Diagnosis",
    "Dims",
    "EditError",
    "FreezeReport",
    "FrozenTrunk",
    "Fused",
    "Fusion",
    "Initializer",
    "LeftAlone",
    "Monitor",
    "NoResidualAdds",
    "OutOfOrder",
    "Pattern",
    "Report",
    "Residual",
    "RewireError",
    "ShardedModel",
    "Site",
    "Stream",
    "Topology",
    "TraceError",
    "Trunk",
    "UnknownName",
    "UnsupportedCall",
    "UnsupportedTopology",
    "ValidationMismatch",
    "Ways",
    "WidthMismatch",
    "coefficients",
    "compile",
    "connections",
    "diagnose",
    "diff",
    "freeze",
    "from_pretrained",
    "fusions",
    "initialize",
    "initializers",
    "inspect",
    "load",
    "parameter_groups",
    "patterns",
    "plot",
    "register_initializer",
    "register_pattern",
    "register_topology",
    "restore",
    "roles",
    "save",
    "source",
    "sparsity_penalty",
    "topologies",
]
