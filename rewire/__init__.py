"""rewire: learned residual connections for models that nobody prepared.

model = rewire.compile(model, topology="ancre-ingoing")
"""

from rewire.compiler import coefficients, compile, inspect, restore, source
from rewire.connection import Connection, connections
from rewire.errors import (
    AlreadyConnected,
    AlreadyRewired,
    BadExampleInputs,
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
from rewire.patterns import Pattern, patterns, register_pattern
from rewire.penalties import sparsity_penalty
from rewire.stream import Stream
from rewire.topologies import ANCRe, DenseFormer, Dims, Residual, Topology, Ways, register_topology, topologies
from rewire.trunk import Report, Site, Trunk

__version__ = "0.1.0"

__all__ = [
    "ANCRe",
    "AlreadyConnected",
    "AlreadyRewired",
    "BadExampleInputs",
    "Connection",
    "DenseFormer",
    "Dims",
    "FreezeReport",
    "FrozenTrunk",
    "Fused",
    "Initializer",
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
    "freeze",
    "initialize",
    "initializers",
    "inspect",
    "patterns",
    "register_initializer",
    "register_pattern",
    "register_topology",
    "restore",
    "roles",
    "source",
    "sparsity_penalty",
    "topologies",
]
