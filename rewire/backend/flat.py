"""Pass: rewrite a flat graph so that the residual adds of one trunk go through a stream.

Only the residual adds change: ``x + f`` becomes ``stream.write(f)``, and what read ``x`` reads ``stream.value()``; or
the attentions' projections, parts of it. Where kernels run, a norm that reads it is computed with it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from types import MappingProxyType

from torch import fx

from rewire.backend.flat_attention import Attention, separate
from rewire.backend.flat_norms import FlatNorm
from rewire.passes.finding.adds import Add
from rewire.passes.finding.chains import Chain


def rewrite_chain(
    graph: fx.Graph,
    chain: Chain,
    opens: str,
    attentions: Mapping[int, Attention],
    norms: Mapping[int, FlatNorm] = MappingProxyType({}),
) -> None:
    """Let the adds of ``chain`` go through a stream.

    Args:
        graph: the graph that the chain was found in; changed in place.
        chain: the residual adds.
        opens: path of the module that opens the stream.
        attentions: those that get separate values for queries, keys and values, by the number of their add.
        norms: those that are computed together with what they read, by the number, from 1, of the add behind it.
    """
    entry = chain.entry.node
    with graph.inserting_after(_last_placeholder(entry)):
        stream = graph.call_module(opens, (entry,))
    branches = {user for user in entry.users if user is not stream}
    stream, value, _ = _read(graph, stream)
    first = chain.adds[0]
    for user in branches & {op.node for op in first.region} | branches & {first.op.node}:
        user.replace_input_with(entry, value)
    if 0 in attentions:
        separate(graph, value, attentions[0])
    for number, add in enumerate(chain.adds):
        pushed = stream = _write(graph, add, stream)
        norm = norms.get(number + 1)
        if number + 1 < len(chain.adds):
            stream, value, normed = _read(graph, stream, norm)
        else:
            with graph.inserting_after(stream):
                value = graph.call_method("finish", (stream,))
        for user in [user for user in add.result.node.users if user is not pushed]:
            user.replace_input_with(add.result.node, value)
        if number + 1 in attentions:
            separate(graph, value, attentions[number + 1])
        if norm is not None:
            norm.replace(graph, normed)
        _sweep(graph, add)


def _read(graph: fx.Graph, stream: fx.Node, norm: FlatNorm | None = None) -> tuple[fx.Node, fx.Node, fx.Node]:
    """The stream to write to, its value, and what ``norm`` makes of that (without one, the value)."""
    with graph.inserting_before(stream.next):
        given = () if norm is None else (norm.insert(graph),)
        found = graph.call_method("read_normed" if given else "read", (stream, *given))
        value, *normed, stream = (graph.call_function(operator.getitem, (found, n)) for n in range(2 + len(given)))
    return stream, value, normed[0] if normed else value


def _write(graph: fx.Graph, add: Add, stream: fx.Node) -> fx.Node:
    """The stream after ``add``."""
    with graph.inserting_before(add.op.node):
        written = graph.call_method("write", (stream, *(branch.node for branch in add.branches)))
        if not add.post:
            return written
        merged = graph.call_method("value", (written,))
    add.op.node.replace_all_uses_with(merged)
    with graph.inserting_after(add.post[-1].node):
        return graph.call_method("push", (written, add.post[-1].node))


def _sweep(graph: fx.Graph, add: Add) -> None:
    """Erase the additions that are unused now."""
    for op in (add.op, *reversed(add.inner)):
        if not op.node.users:
            graph.erase_node(op.node)


def _last_placeholder(entry: fx.Node) -> fx.Node:
    """Where code that uses ``entry`` may begin: after all arguments."""
    node = entry
    while node.next.op == "placeholder":
        node = node.next
    return node
