"""Pass: rewrite the graph of one forward so that its residual adds go through the stream.

Only the residual adds change: ``x + f`` becomes ``stream.write(f)``, and what read ``x`` reads ``stream.read()``.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from rewire.passes.residuals import Add, Carrier, Chain
from rewire.passes.values import STREAM_ATTRIBUTES


def rewrite_chain(graph: fx.Graph, chain: Chain, gate: str, name: str) -> None:
    """Rewrite one chain in place.

    Args:
        graph: the graph that the chain was found in.
        chain: the residual adds to rewrite, in order.
        gate: attribute of the block that holds the chain's gate.
        name: variable name of the stream in the printed forward.
    """
    _Rewriter(graph, chain, gate, name).run()


class _Rewriter:
    def __init__(self, graph: fx.Graph, chain: Chain, gate: str, name: str) -> None:
        self.graph, self.chain, self.gate, self.name = graph, chain, gate, name

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
                self._reads(value, stream, view, keep=self._sums(link))
                stream = self._write(link, stream)
                value, view = link.state, link.view
            else:
                link.node.replace_input_with(link.shortcut, stream)
                self._reads(value, stream, view, keep=[link.node])
                stream, value, view = self._named(link.state), link.state, None
        self._close(value, stream, view)
        for link in reversed(chain.adds):
            self._erase(link)

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

    def _reads(self, value: fx.Node, stream: fx.Node, view: fx.Node | None, keep: Sequence[fx.Node]) -> None:
        """Let the users of ``value`` read the stream, except those in ``keep``."""
        users = [user for user in value.users if user not in keep and user is not stream]
        attributes = [user for user in users if user.target is getattr and user.args[1] in STREAM_ATTRIBUTES]
        for user in attributes:
            if view is None:
                user.replace_input_with(value, stream)
        users = [user for user in users if user not in attributes or view is not None]
        users = [user for user in users if not _is_push(user, value)]
        if users:
            read = self._read(stream, view)
            for user in users:
                user.replace_input_with(value, read)

    def _read(self, stream: fx.Node, view: fx.Node | None) -> fx.Node:
        with self.graph.inserting_after(stream):
            read = self.graph.call_method("read", (stream,))
        if view is None:
            return read
        with self.graph.inserting_after(read):
            return self.graph.call_method(str(view.target), (read, *view.args[1:]), dict(view.kwargs))

    def _close(self, value: fx.Node, stream: fx.Node, view: fx.Node | None) -> None:
        """Hand the stream out of the forward, or finish it."""
        chain, graph = self.chain, self.graph
        output = next(iter(reversed(graph.nodes)))
        by_child = isinstance(chain.links[-1], Carrier)
        if chain.closes_outside:
            holder = output if chain.exit in output.all_input_nodes else output.all_input_nodes[0]
            self._reads(value, stream, view, keep=[holder, chain.exit])
            if not by_child:
                with graph.inserting_before(holder):
                    left = graph.call_method("leave", (stream,))
                left.meta["inline"] = True
                holder.replace_input_with(chain.exit, left)
                if chain.exit is not value:  # a view, back in the entry's shape
                    self._reads(chain.exit, stream, None, keep=[holder])
        elif not by_child:
            users = [user for user in value.users if user is not stream and not _is_push(user, value)]
            if users:
                with graph.inserting_after(stream):
                    finished = graph.call_method("finish", (stream,))
                if view is not None:
                    with graph.inserting_after(finished):
                        finished = graph.call_method(str(view.target), (finished, *view.args[1:]), dict(view.kwargs))
                for user in users:
                    user.replace_input_with(value, finished)

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
                self.graph.erase_node(node)


def _is_push(node: fx.Node, value: fx.Node) -> bool:
    return node.op == "call_method" and node.target == "push" and node.args[1] is value


def _last_placeholder(entry: fx.Node) -> fx.Node:
    """Where code that uses ``entry`` may begin: after all arguments."""
    node = entry
    while node.next.op == "placeholder":
        node = node.next
    return node
