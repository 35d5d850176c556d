"""Names of the attributes that rewire sets on others' modules, classes and tensors; docs/architecture.md lists them."""

from __future__ import annotations

#: The child module that holds the connections of a module's trunks; on a norm, the norm's copies.
CONNECTIONS = "depth_connections"
#: The gate of a module's edited forward, which the edited text calls.
GATE = "_depth"
#: On edited modules: the paths of norms that follow a read, each with the reason if it cannot be fused.
NORMS = "_depth_norms"
#: On generated classes, what was edited: name -> `Edited`.
EDITED = "_rewire_edited"
#: On generated classes: whether equal modules share the class.
SHARED = "_rewire_shared"
#: On modules that were found to be norms: the kind of norm.
NORM = "_rewire_norm"
#: On stand-ins for modules: the module, and the tracer that records their calls.
MODULE, TRACER = "_rewire_module", "_rewire_tracer"
#: On topologies and their classes: the name under which they are registered.
REGISTERED_NAME = "_registered_name"
#: On connection weights: S4's and Mamba's training code exempts parameters with this attribute from weight decay.
NO_WEIGHT_DECAY = "_no_weight_decay"
#: On the storage of tensors that backward recomputes: how to, their dtype, and their version counter.
RECOMPUTE = "_rewire_recompute"
#: In `copy.deepcopy`'s memo: the ids of all modules that are copied, some of them later.
COPIED = "_rewire_copied"
#: In its keys: what refers to a connection, and was copied before that is, if it is.
WAITING = "_rewire_waiting"
#: On hooks that take streams themselves, instead of the tensors that these stand for.
TAKES_STREAMS = "takes_streams"


def gate_of(function: str) -> str:
    """Name of the attribute that holds the gate of a module's function."""
    return GATE if function == "forward" else f"{GATE}_{function}"
