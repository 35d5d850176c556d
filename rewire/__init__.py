"""rewire: learned residual connections for unmodified PyTorch models.

model = rewire.compile(model, topology="ancre-ingoing")
"""

from rewire import conformance as conformance
from rewire.backend import Backend
from rewire.compiler import compile, inspect
from rewire.diagnostics.ablation import ablate
from rewire.diagnostics.connectivity import graph
from rewire.diagnostics.draw import plot
from rewire.diagnostics.measure import diagnose
from rewire.diagnostics.monitor import Monitor
from rewire.diagnostics.sparsity import sparsify
from rewire.diffs import diff, source
from rewire.ejecting.eject import eject
from rewire.errors import (
    AlreadyConnected,
    AlreadyRewired,
    BadExampleInputs,
    EditError,
    NoResidualAdds,
    OutOfOrder,
    RewireError,
    TraceError,
    UnknownName,
    UnsupportedCall,
    UnsupportedTopology,
    ValidationMismatch,
    WidthMismatch,
    WrappedModel,
)
from rewire.freezing import freeze
from rewire.init import Initializer, initialize, list_initializers, register_initializer
from rewire.init.roles import roles
from rewire.logs import show_those_of_the_environment
from rewire.mixes.fused_qkv import Fused
from rewire.passes.editing.fusions import fusions
from rewire.passes.rewrite import restore
from rewire.patterns import Pattern, list_patterns, register_pattern
from rewire.pipeline import pipeline_cache, pipeline_stage
from rewire.precompiling import precompile
from rewire.reporting.page import report
from rewire.runtime.connection import coefficients, connections, parallelize
from rewire.saving.folder import load, save
from rewire.saving.pretrained import from_pretrained
from rewire.studies import Task, study
from rewire.topologies import (
    ANCRe,
    Dense,
    DenseIncrements,
    Dims,
    QKVInputs,
    Recurrence,
    Residual,
    Topology,
    list_topologies,
    register_topology,
)
from rewire.training import parameter_groups, sparsity_penalty
from rewire.version import __version__ as __version__

show_those_of_the_environment()

__all__ = [
    "ANCRe",
    "AlreadyConnected",
    "AlreadyRewired",
    "Backend",
    "BadExampleInputs",
    "Dense",
    "DenseIncrements",
    "Dims",
    "EditError",
    "Fused",
    "Initializer",
    "Monitor",
    "NoResidualAdds",
    "OutOfOrder",
    "Pattern",
    "QKVInputs",
    "Recurrence",
    "Residual",
    "RewireError",
    "Task",
    "Topology",
    "TraceError",
    "UnknownName",
    "UnsupportedCall",
    "UnsupportedTopology",
    "ValidationMismatch",
    "WidthMismatch",
    "WrappedModel",
    "ablate",
    "coefficients",
    "compile",
    "connections",
    "diagnose",
    "diff",
    "eject",
    "freeze",
    "from_pretrained",
    "fusions",
    "graph",
    "initialize",
    "inspect",
    "list_initializers",
    "list_patterns",
    "list_topologies",
    "load",
    "parallelize",
    "parameter_groups",
    "pipeline_cache",
    "pipeline_stage",
    "plot",
    "precompile",
    "register_initializer",
    "register_pattern",
    "register_topology",
    "report",
    "restore",
    "roles",
    "save",
    "source",
    "sparsify",
    "sparsity_penalty",
    "study",
]
