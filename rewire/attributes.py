"""Names of what rewire puts on modules, classes and tensors of others; docs/architecture.md has them in a table."""

from __future__ import annotations

#: The child, on the module that owns a trunk, that holds the connections of its trunks; on a norm, its copies.
CONNECTIONS = "depth_connections"
#: What the text of an edited function talks to: attribute of the module that has the function.
GATE = "_depth"
#: Paths of norms below an edited module that follow a read, and why one cannot be fused.
NORMS = "_depth_norms"
#: On generated classes, what was edited: name -> `Edited`.
EDITED = "_rewire_edited"
#: On generated classes, that equal modules have the same one.
SHARED = "_rewire_shared"
#: On modules that were found to be norms, of which kind.
NORM = "_rewire_norm"
#: On stand-ins for modules, the module, and the tracer that sees their calls.
MODULE, TRACER = "_rewire_module", "_rewire_tracer"
#: On topologies, and classes of them, the name by which they are registered.
REGISTERED_NAME = "_registered_name"
#: On parameters of connections, for those who decide by it what optimisers decay, as in S4's and Mamba's.
NO_WEIGHT_DECAY = "_no_weight_decay"
#: On the memory of tensors that backward makes again: how, their dtype, and how often they had been written to.
RECIPE = "_rewire_recipe"
#: On hooks that want streams as they are, not the tensors that they stand for.
TAKES_STREAMS = "takes_streams"


def gate_of(function: str) -> str:
    """The attribute that holds the gate of a function of a module."""
    return GATE if function == "forward" else f"{GATE}_{function}"
