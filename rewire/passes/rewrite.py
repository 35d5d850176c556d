"""Pass: rewrite the graph of one forward so that its residual adds go through the stream.

Only the residual adds change: ``x + f`` becomes ``stream.write(f)``, and what read ``x`` reads ``stream.read()``.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import fx

from rewire.passes.attention import Inner, feed_attention
from rewire.passes.projections import Projections
from rewire.passes.residuals import VIEWS, Add, Carrier, Chain
from rewire.passes.values import STREAM_ATTRIBUTES


def rewrite_chain(
    graph: fx.Graph, chain: Chain, gate: str, name: str, projections: Mapping[int, Projections] = MappingProxyType({})
) -> dict[Inner, Projections]:
    """Rewrite one chain in place.

    Args:
        graph: the graph that the chain was found in.
        chain: the residual adds to rewrite, in order.
        gate: attribute of the block that holds the chain's gate.
        name: variable name of the stream in the printed forward.
        projections: for residual adds (by number) whose attention reads q, k and v apart: where they are projected.

    Returns:
        The children that are handed one value each for q, k and v, to be rewritten by `rewrite_inner`.

    Raises:
        UnsupportedTopology: q, k and v of such an attention cannot be taken apart here.
    """
    rewriter = _Rewriter(graph, chain, gate, name, projections)
    rewriter.run()
    return rewriter.inner


class _Rewriter:
    def __init__(
        self, graph: fx.Graph, chain: Chain, gate: str, name: str, projections: Mapping[int, Projections]
    ) -> None:
        self.graph, self.chain, self.gate, self.name, self.projections = graph, chain, gate, name, projections
        self.inner: dict[Inner, Projections] = {}

    def run(self) -> None:
        chain = self.chain
        first = chain.links[0]
        if isinstance(first, Carrier) and first.shortcut is first.state:
            stream, value, links = self._named(first.state), first.state, chain.links[1:]  # a child opens it
        else:
            with self.graph.inserting_after(_last_placeholder(chain.entry)):
                stream = self._named(self.graph.call_module(f"{self.gate}.enter", (chain.entry,)))
            value, links = chain.entry, chain.links
        view: fx.Node | None = None
        for link in links:
            if isinstance(link, Add):
                stream = self._reads(value, stream, view, link)
                stream = self._write(link, stream)
                value, view = link.state, link.view
            else:
                link.node.replace_input_with(link.shortcut, stream)
                self._values(value, stream, view, keep=[link.node])
                stream, value, view = self._named(link.state), link.state, None
        self._close(value, stream, view)
        for link in reversed(chain.adds):
            self._erase(link)
        self._sweep()

    def _write(self, add: Add, stream: fx.Node) -> fx.Node:
        """The stream after ``add``."""
        graph = self.graph
        with graph.inserting_before(add.node):
            branches = add.branches
            if add.view is not None:
                shape = graph.call_function(getattr, (stream, "shape"))
                branches = [graph.call_method("reshape", (branch, shape)) for branch in branches]
            if not add.post:
                return self._named(graph.call_method("write", (stream, *branches)))
            merged = graph.call_method("merge", (stream, *branches))
        add.node.replace_all_uses_with(merged)
        with graph.inserting_after(add.post[-1]):
            return self._named(graph.call_method("push", (stream, add.post[-1])))

    def _reads(self, value: fx.Node, stream: fx.Node, view: fx.Node | None, add: Add) -> fx.Node:
        """Let the branches of ``add``, users of ``value``, read the stream; returns the stream to write to."""
        users = self._users(value, stream, view, keep=self._sums(add))
        if not users:
            return stream
        graph = self.graph
        with graph.inserting_after(stream):
            pair = graph.create_node("call_method", "read", (stream,), name="opened")
        pair.meta["unpacked"] = True
        with graph.inserting_after(pair):
            read = graph.create_node("call_function", operator.getitem, (pair, 0), name="read")
        with graph.inserting_after(read):
            opened = self._named(graph.call_function(operator.getitem, (pair, 1)))
        projections = self.projections.get(self.chain.adds.index(add))
        if projections is None:
            self._replace(value, self._viewed(read, view), users)
        else:
            if view is not None:
                raise projections.error("it reads a reshaped value of the stream")
            inner = feed_attention(graph, value, read, users, projections)
            self.inner |= dict.fromkeys(inner, projections)
        return opened

    def _values(self, value: fx.Node, stream: fx.Node, view: fx.Node | None, keep: Sequence[fx.Node]) -> None:
        """Let the users of ``value`` that are no branches, except those in ``keep``, have the stream's hidden state."""
        users = self._users(value, stream, view, keep)
        if users:
            with self.graph.inserting_after(stream):
                hidden = self.graph.call_method("value", (stream,))
            self._replace(value, self._viewed(hidden, view), users)

    def _users(self, value: fx.Node, stream: fx.Node, view: fx.Node | None, keep: Sequence[fx.Node]) -> list[fx.Node]:
        """Users of ``value`` that need its values; those that ask for its shape, dtype or device ask the stream."""
        users = [user for user in value.users if user not in keep and user is not stream and not _is_push(user, value)]
        if view is None:
            for user in [u for u in users if u.target is getattr and u.args[1] in STREAM_ATTRIBUTES]:
                user.replace_input_with(value, stream)
                users.remove(user)
        return users

    @staticmethod
    def _replace(value: fx.Node, replacement: fx.Node, users: Sequence[fx.Node]) -> None:
        for user in users:
            user.replace_input_with(value, replacement)

    def _viewed(self, node: fx.Node, view: fx.Node | None) -> fx.Node:
        if view is None:
            return node
        with self.graph.inserting_after(node):
            return self.graph.call_method(str(view.target), (node, *view.args[1:]), dict(view.kwargs))

    def _close(self, value: fx.Node, stream: fx.Node, view: fx.Node | None) -> None:
        """Hand the stream out of the forward, or finish it."""
        chain, graph = self.chain, self.graph
        output = next(iter(reversed(graph.nodes)))
        by_child = isinstance(chain.links[-1], Carrier)
        if chain.closes_outside:
            holder = output if chain.exit in output.all_input_nodes else output.all_input_nodes[0]
            self._values(value, stream, view, keep=[holder, chain.exit])
            if not by_child:
                with graph.inserting_before(holder):
                    left = graph.call_method("leave", (stream,))
                left.meta["inline"] = True
                holder.replace_input_with(chain.exit, left)
                if chain.exit is not value:  # a view, back in the entry's shape
                    self._values(chain.exit, stream, None, keep=[holder])
        elif not by_child:
            users = [user for user in value.users if user is not stream and not _is_push(user, value)]
            if users:
                with graph.inserting_after(stream):
                    finished = graph.call_method("finish", (stream,))
                self._replace(value, self._viewed(finished, view), users)

    def _named(self, node: fx.Node) -> fx.Node:
        node.meta["stream"] = self.name
        return node

    @staticmethod
    def _sums(add: Add) -> list[fx.Node]:
        """The add itself, and the adds inside it when branches were added one by one."""
        nodes, node = [add.node], add.node
        for _ in add.branches[1:]:
            node = next(arg for arg in node.args if isinstance(arg, fx.Node) and arg not in add.branches)
            nodes.append(node)
        return nodes

    def _erase(self, add: Add) -> None:
        for node in self._sums(add):
            if not node.users:
                self._drop(node)

    def _sweep(self) -> None:
        """Erase sums and views that nobody uses any more."""
        for node in reversed(list(self.graph.nodes)):
            view = node.op == "call_method" and node.target in VIEWS
            total = node.op == "call_function" and node.target in (operator.add, torch.add)
            if not node.users and (view or total):
                self._drop(node)

    def _drop(self, node: fx.Node) -> None:
        """Erase a sum or a view, and the identity modules between it and the branches."""
        branches = [branch for add in self.chain.adds for branch in add.branches]
        inputs = node.all_input_nodes
        self.graph.erase_node(node)
        for source in inputs:
            while source.op == "call_module" and not source.users and source not in branches:
                behind = source.all_input_nodes[0]
                self.graph.erase_node(source)
                source = behind


def _is_push(node: fx.Node, value: fx.Node) -> bool:
    return node.op == "call_method" and node.target == "push" and node.args[1] is value


def _last_placeholder(entry: fx.Node) -> fx.Node:
    """Where code that uses ``entry`` may begin: after all arguments."""
    node = entry
    while node.next.op == "placeholder":
        node = node.next
    return node
