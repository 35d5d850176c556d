"""Pass: give queries, keys and values of an attention separate inputs, in a flat graph.

A graph has no modules: the projections of an attention are found by the operations that read its input, and by the
paths of the modules in which these ran.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import fx, nn

from rewire.conventions import FUSED_QKV, QKV
from rewire.errors import UnsupportedTopology
from rewire.mixes.fused_qkv import Fused, fused_linear
from rewire.passes.finding.adds import Add, between
from rewire.passes.finding.attention import MULTIHEAD, projected_by, projections_in
from rewire.passes.finding.flow import Flow, Op
from rewire.passes.finding.fused import as_fused, features_in
from rewire.trunk import Site

#: Operations that project -> the position of the argument that they project.
_PRODUCTS = {"linear": 0, "addmm": 1}


@dataclasses.dataclass(frozen=True)
class Fed:
    """An argument of an operation that is to be computed from the input for queries, for keys or for values.

    Attributes:
        node: the operation.
        position: position of the argument.
        way: ``q``, ``k`` or ``v``.
        path: the operations from the state (excluded) to the argument (included), in order.
    """

    node: fx.Node
    position: int
    way: str
    path: tuple[fx.Node, ...]


@dataclasses.dataclass(frozen=True)
class Attention:
    """The projections of an attention: three operations, or one for all three.

    Attributes:
        fed: the projected arguments.
        fused: layout of the output, if one operation projects all three.
    """

    fed: tuple[Fed, ...]
    fused: Fused | None = None


def find_attention(flow: Flow, add: Add, site: Site) -> Attention:
    """The projections of a residual add's attention.

    Raises:
        UnsupportedTopology: they were not found.
    """
    reached = _reached(add)
    multihead = [op for op in reached if op.name == MULTIHEAD]
    if len(multihead) == 1:
        return Attention(tuple(_fed(add, multihead[0], n, way) for n, way in enumerate("qkv")))
    used = _by_use(flow, add, {projected_by(op): op for op in reached if _position(op) is not None}, site.width or 0)
    if used is not None:
        return used
    products = {op.scope.path: op for op in reached if _position(op) is not None}
    for parent in sorted({path.rpartition(".")[0] for path in products}, key=len, reverse=True):
        prefix = f"{parent}." if parent else ""
        for names in QKV:
            paths = [prefix + name for name in names]
            if products.keys() >= set(paths):
                return Attention(
                    tuple(_fed(add, products[path], None, way) for path, way in zip(paths, "qkv", strict=True))
                )
        for path, op in products.items():
            if not path.startswith(prefix) or not FUSED_QKV.search(path.removeprefix(prefix)):
                continue
            fused = as_fused(features_in(flow, add, path, _rows(op) or 0, site.width or 0))
            if fused is not None and all(fused.sizes):
                return Attention(tuple(_fed(add, op, None, way) for way in "qkv"), fused)
    raise UnsupportedTopology(
        f"the attention '{site.name}' cannot have separate q/k/v inputs in a flat graph: its projections of queries, "
        "keys and values, in this order, were not found by names or by use (linear maps: "
        f"{', '.join(products) or 'none'}). Use rewire.compile, which knows more layouts, and pass its result to "
        "torch.compile; or use a topology that reads one value."
    )


def _by_use(flow: Flow, add: Add, products: dict[str, Op], width: int) -> Attention | None:
    """The projections, by how the attention uses their results; None if that is not clear."""
    known = projections_in(flow, add)
    paths, beside = known[0] if len(known) == 1 else ((), {})
    if beside or not paths or not products.keys() >= {*paths}:
        return None
    if len(paths) == 3:
        return Attention(tuple(_fed(add, products[path], None, way) for path, way in zip(paths, "qkv", strict=True)))
    fused = as_fused(features_in(flow, add, paths[0], _rows(products[paths[0]]) or 0, width))
    if len(paths) != 1 or fused is None or not all(fused.sizes):
        return None
    return Attention(tuple(_fed(add, products[paths[0]], None, way) for way in "qkv"), fused)


def separate(graph: fx.Graph, value: fx.Node, attention: Attention) -> fx.Node:
    """Connect the projections of ``attention`` to their part of ``value``, a `QKVInputs`, and all else to the residual.

    Returns:
        The residual.
    """
    users = list(value.users)
    with graph.inserting_after(value):
        parts = {name: graph.call_function(getattr, (value, name)) for name in ("residual", "v", "k", "q")}
    for user in users:
        user.replace_input_with(value, parts["residual"])
    arguments = [_computed(graph, fed, parts["residual"], parts[fed.way]) for fed in attention.fed]
    if attention.fused is None:
        for fed, argument in zip(attention.fed, arguments, strict=True):
            fed.node.update_arg(fed.position, argument)
    else:
        _feed_fused(graph, attention.fed[0], attention.fused, arguments)
    for node in sorted({node for fed in attention.fed for node in fed.path}, reverse=True):
        if not node.users:
            graph.erase_node(node)
    return parts["residual"]


def _computed(graph: fx.Graph, fed: Fed, state: fx.Node, value: fx.Node) -> fx.Node:
    """An argument, computed from ``value`` in place of ``state``."""
    made = {state: value}
    with graph.inserting_before(fed.node):
        for node in fed.path:
            made[node] = graph.node_copy(node, lambda source: made.get(source, source))
    return made[fed.path[-1] if fed.path else state]


def _feed_fused(graph: fx.Graph, fed: Fed, fused: Fused, arguments: list[fx.Node]) -> None:
    node = fed.node
    weight: Any
    bias: Any
    with graph.inserting_before(node):
        if node.op == "call_module":
            weight, bias = (graph.get_attr(f"{node.target}.{name}") for name in ("weight", "bias"))
        elif fed.position == 0:
            weight, bias = node.args[1], (*node.args, None)[2]
        else:  # addmm(bias, x, weight)
            weight, bias = graph.call_method("t", (node.args[2],)), node.args[0]
        made = graph.call_function(fused_linear, (weight, bias, fused.groups, fused.sizes, *arguments))
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _reached(add: Add) -> list[Op]:
    """The operations that read the state of ``add`` in its branches, perhaps after others without weights, in order."""
    passed, found = {add.state}, set[Op]()
    for op in sorted(add.region, key=lambda op: op.index):
        if any(source in passed for source in op.inputs):
            (found if op.weighted else passed).add(op)
    return sorted(found, key=lambda op: op.index)


def _fed(add: Add, op: Op, position: int | None, way: str) -> Fed:
    position = _position(op) if position is None else position
    assert position is not None
    source = next(source for source in op.inputs if source.node is op.node.args[position])
    way_there = sorted(between(add.state, source) - {add.state}, key=lambda op: op.index)
    return Fed(op.node, position, way, tuple(step.node for step in way_there))


def _rows(op: Op) -> int | None:
    """Number of outputs of a projection."""
    if op.leaf is not None:
        return int(op.leaf.out_features)  # type: ignore[arg-type]
    return None if op.shape is None else int(op.shape[-1])


def _position(op: Op) -> int | None:
    """The position of the argument that an operation projects; None if it is not a projection."""
    if op.leaf is not None:
        return 0 if type(op.leaf) is nn.Linear else None
    by_name = bool(op.node.kwargs) or len(op.node.args) < 2  # such as a bias or factors
    return None if by_name else _PRODUCTS.get(op.name)
