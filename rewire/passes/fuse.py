"""Pass: let the norm that follows a read of the stream be computed with it.

``read, stream = stream.read(); normed = self.norm(read)`` becomes ``read, normed, stream =
stream.read_normed(self.norm)``. The stream decides at each call whether one kernel does both.
"""

from __future__ import annotations

import dataclasses
import operator

from torch import fx, nn

from rewire.kernels.norms import mark, obstacle, unmark

#: Attribute of rewritten blocks: paths of norms below the block that follow a read, and why one cannot be fused.
NORMS = "_depth_norms"


@dataclasses.dataclass(frozen=True)
class Fusion:
    """A norm that follows a read of the residual stream.

    Attributes:
        module: path of the norm.
        obstacle: why kernels do not compute it together with the read; None if they do.
    """

    module: str
    obstacle: str | None


def fuse_norms(graph: fx.Graph, block: nn.Module) -> dict[str, str | None]:
    """Fuse the norms in a rewritten graph with the reads before them.

    Args:
        graph: changed in place.
        block: the module whose forward it is.

    Returns:
        For the path of each module that is called on a read first, None, or why it is not fused.
    """
    found: dict[str, str | None] = {}
    for pair in [n for n in graph.nodes if n.op == "call_method" and n.target == "read" and n.meta.get("unpacked")]:
        elements = {user.args[1]: user for user in pair.users if user.target is operator.getitem}
        if 0 not in elements or 1 not in elements:
            continue
        norm = _norm_of(elements[0])
        if norm is None:
            continue
        path = str(norm.target)
        found[path] = mark(block.get_submodule(path))
        if found[path] is None:
            _join(graph, pair, norm, elements[1])
    return found


def _norm_of(read: fx.Node) -> fx.Node | None:
    """The first child that is called on what was read, and on nothing else."""
    calls = [user for user in read.users if user.op == "call_module" and user.all_input_nodes == [read]]
    calls = [call for call in calls if len(call.args) + len(call.kwargs) == 1]
    order = {node: place for place, node in enumerate(read.graph.nodes)}
    return min(calls, key=order.__getitem__, default=None)


def _join(graph: fx.Graph, pair: fx.Node, norm: fx.Node, stream: fx.Node) -> None:
    """``read, stream = pair`` and the norm, as ``read, normed, stream``."""
    with graph.inserting_before(pair):
        module = graph.get_attr(str(norm.target))
    pair.target = "read_normed"
    pair.args = (*pair.args, module)
    stream.args = (pair, 2)
    with graph.inserting_before(stream):
        normed = graph.call_function(operator.getitem, (pair, 1))
    norm.replace_all_uses_with(normed)
    graph.erase_node(norm)
    normed.name = norm.name


def unfuse(block: nn.Module) -> None:
    """Take away what `fuse_norms` left on a block and its norms."""
    for path in block.__dict__.pop(NORMS, {}):
        unmark(block.get_submodule(path))


def fusions(model: nn.Module) -> list[Fusion]:
    """The norms of a rewired model that follow a read of the residual stream, and what stands in the way of fusing.

    A fused norm is computed by the kernel that computes what it reads (on CUDA devices, for widths up to 8192). Hooks
    on a norm, an FSDP group of its own, or another module in its place forbid it: then it is called as usual.

    Args:
        model: a rewired model, in its present state.
    """
    rows = []
    for name, block in model.named_modules():
        for path, reason in block.__dict__.get(NORMS, {}).items():
            full = f"{name}.{path}" if name else path
            rows.append(Fusion(full, reason or obstacle(model.get_submodule(full))))
    return rows
