"""Pass: rewrite a flat graph so that the residual adds of one trunk go through a stream.

Only the residual adds change: ``x + f`` becomes ``stream.write(f)``, and users of ``x`` use what ``stream.read()``
returns; projections of attentions may get parts of it. With kernels, a norm is computed together with the read.
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
    """Replace the adds of ``chain`` by operations on a stream.

    Args:
        graph: the graph in which the chain was found; changed in place.
        chain: the residual adds.
        opens: path of the module that begins the stream.
        attentions: by the number of their add, attentions that get separate q/k/v inputs.
        norms: by the number, from 1, of the next add, norms that are computed together with the read.
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
    """The stream to write to, the read, and the output of ``norm`` for it (without a norm, the read)."""
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
    """Erase additions that have become unused."""
    for op in (add.op, *reversed(add.inner)):
        if not op.node.users:
            graph.erase_node(op.node)


def _last_placeholder(entry: fx.Node) -> fx.Node:
    """The node after which ``entry`` can be used: the last placeholder, or ``entry``."""
    node = entry
    while node.next.op == "placeholder":
        node = node.next
    return node
