"""Pass: find the residual adds in the graph of one forward, and follow the stream from one to the next.

A residual add is ``x + f`` where ``x`` is an ancestor of ``f`` through at least one child module or parametrised
operation. Polynomials of an activation, rotary embeddings, masks and position embeddings fail that test.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
from collections.abc import Callable, Sequence

from torch import fx, nn

from rewire.passes.naming import branch_name
from rewire.passes.values import Values, is_add

VIEWS = {"reshape", "view", "flatten"}
_POSITIONAL = re.compile(
    r"(^|[._])(pos|positions?|positional|rel_pos|pe|ppeg|peg|cpe)([._0-9]|$|_?emb|_?conv|_?enc)", re.I
)


@dataclasses.dataclass
class Add:
    """One residual add.

    Attributes:
        node: the add (the outermost, when parallel branches are added one by one).
        shortcut: the stream's value.
        source: what the branches are computed from: the shortcut, or what a projection makes the shortcut from.
        branches: what is added to it, in order.
        post: operations between the add and the state that it makes.
        view: the reshape of the stream's value that serves as shortcut, if there is one.
    """

    node: fx.Node
    shortcut: fx.Node
    source: fx.Node
    branches: list[fx.Node]
    post: list[fx.Node] = dataclasses.field(default_factory=list)
    view: fx.Node | None = None

    @property
    def state(self) -> fx.Node:
        """The value that the stream has after this add."""
        return self.post[-1] if self.post else self.node


@dataclasses.dataclass(frozen=True)
class Passage:
    """How a stream passes through a module.

    Attributes:
        argument: name of the argument as which it enters; None if it begins inside the module.
        position: position of that argument.
        element: index in the returned tuple as which it leaves; None if it is what the module returns.
    """

    argument: str | None
    position: int
    element: int | str | None


@dataclasses.dataclass
class Carrier:
    """A call of a child that takes the stream in, or begins it, and gives it back."""

    node: fx.Node
    shortcut: fx.Node
    state: fx.Node
    passage: Passage


@dataclasses.dataclass
class Chain:
    """A stretch of the stream within one forward.

    Attributes:
        entry: the value at which it starts.
        links: adds and carriers, in order.
        exit: the value at which it ends: the last link's state, or a view of it in the entry's shape.
        opens_outside: the entry is an argument of the forward.
        closes_outside: the exit is returned by the forward.
        element: its index in the returned tuple (key in the returned dict); None if it is what the forward returns.
    """

    entry: fx.Node
    links: list[Add | Carrier]
    exit: fx.Node
    opens_outside: bool = False
    closes_outside: bool = False
    element: int | str | None = None

    @property
    def adds(self) -> list[Add]:
        return [link for link in self.links if isinstance(link, Add)]


@dataclasses.dataclass
class Found:
    """What one graph holds: chains, and adds that were looked at and left alone (description, reason)."""

    chains: list[Chain]
    rejected: list[tuple[str, str]]


def find_chains(graph: fx.Graph, root: nn.Module, carries: Callable[[str], list[Passage]]) -> Found:
    """Residual adds of ``graph``, linked into chains.

    Args:
        graph: a traced forward of ``root``, children as leaves.
        root: the module.
        carries: for the path of a child, how streams pass through it or come out of it.
    """
    return ChainFinder(Values(graph, root), carries).run()


class ChainFinder:
    """What `find_chains` does; flat graphs have their own answers to some of its questions (`flat`)."""

    def __init__(self, values: Values, carries: Callable[[str], list[Passage]]) -> None:
        self.values, self.carries = values, carries
        self.tips: dict[fx.Node, Chain] = {}  # current value of each chain
        self.chains: list[Chain] = []
        self.rejected: list[tuple[str, str]] = []

    def run(self) -> Found:
        for node in self.values.nodes:
            if is_add(node):
                self._visit_add(node)
            elif self.values.child(node) is not None:
                self._visit_child(node)
        for chain in self.chains:
            self._close(chain)
        return Found([chain for chain in self.chains if chain.links], self.rejected)

    @functools.cached_property
    def spine(self) -> set[fx.Node]:
        return self.values.spine()

    def _visit_add(self, node: fx.Node) -> None:
        values = self.values
        left, right = (values.resolve(arg) for arg in node.args[:2])  # type: ignore[arg-type]
        for shortcut, branch in ((left, right), (right, left)):
            if self._joins_parallel(node, shortcut, branch):
                return
        for shortcut, branch in ((left, right), (right, left)):
            if values.feeds_branch(shortcut, branch):
                add = Add(node, shortcut, shortcut, [branch])
                reason = self._false_friend(add)
                if reason:
                    self.rejected.append((self._name(shortcut, add), reason))
                else:
                    self._extend(shortcut, add)
                return
        for shortcut, branch in ((left, right), (right, left)):
            source = self._projected(node, shortcut, branch)
            if source is not None:
                self._start(shortcut, Add(node, shortcut, source, [branch]))
                return

    def _joins_parallel(self, node: fx.Node, inner: fx.Node, branch: fx.Node) -> bool:
        """``(x + attn) + mlp``: one residual add with two branches, if nothing else uses the first sum."""
        chain = self.tips.get(inner)
        link = chain.links[-1] if chain and chain.links else None
        if not isinstance(link, Add) or link.post or len(inner.users) != 1:
            return False
        link.branches.append(branch)
        link.node = node
        self._move(chain, node)  # type: ignore[arg-type]
        return True

    def _around(self, add: Add) -> Values:
        """The graph as the block sees it that holds ``add``."""
        return self.values

    def _name(self, shortcut: fx.Node, link: Add | Carrier) -> str:
        if isinstance(link, Add):
            return branch_name(self._around(link), shortcut, link.branches)
        return branch_name(self.values, shortcut, [link.state])

    def _false_friend(self, add: Add) -> str:
        values = self._around(add)
        names = [values.callee(node) for node in values.between(add.shortcut, add.branches[0]) - {add.shortcut}]
        if any(names) and all(_POSITIONAL.search(name) for name in names if name):
            return "adds a position embedding"
        return ""

    def _projected(self, add: fx.Node, shortcut: fx.Node, branch: fx.Node) -> fx.Node | None:
        """``x`` of ``downsample(x) + f(x)``: the shortcut holds one weight matrix, the branch more."""
        values, node, weights = self.values, shortcut, 0
        while (behind := values.behind(node, add)) is not None:
            weights += values.matrices(node)
            node = behind
        if weights != 1 or not values.feeds_branch(node, branch):
            return None
        return node if sum(map(values.matrices, values.between(node, branch))) > weights else None

    def _visit_child(self, node: fx.Node) -> None:
        for passage in self.carries(str(node.target)) if node in self.spine else ():
            state: fx.Node | None = node
            if passage.element is not None:
                picks = [u for u in node.users if u.target is operator.getitem and u.args[1] == passage.element]
                state = picks[0] if len(picks) == 1 else None
            if state is None:
                continue
            if passage.argument is None:
                self._start(state, Carrier(node, state, state, passage))
                continue
            source: object = node.kwargs.get(passage.argument)
            if len(node.args) > passage.position:
                source = node.args[passage.position]
            if isinstance(source, fx.Node):
                source = self.values.resolve(source)
                self._extend(source, Carrier(node, source, state, passage))

    def _extend(self, shortcut: fx.Node, link: Add | Carrier) -> None:
        """Append ``link`` to the chain whose value ``shortcut`` is, or start a chain there."""
        for tip, chain in list(self.tips.items()):
            last = chain.links[-1]
            view = last.view if isinstance(last, Add) else None
            if shortcut is tip:
                if isinstance(link, Add):
                    link.view = view
                elif view is not None:
                    continue
            elif isinstance(link, Add) and view is None and _views(shortcut, tip):
                link.view = shortcut
            elif _views(shortcut, tip) and self._restores(chain, shortcut):
                pass  # back in the entry's shape
            else:
                post = self._post_path(tip, shortcut)
                if post is None or not isinstance(last, Add) or view is not None:
                    continue
                last.post += post
            chain.links.append(link)
            self._move(chain, link.state)
            return
        if any(shortcut is old.shortcut for chain in self.chains for old in chain.links):
            self.rejected.append((self._name(shortcut, link), "its shortcut starts at an earlier value of the stream"))
            return
        self._start(shortcut, link)

    def _post_path(self, tip: fx.Node, shortcut: fx.Node) -> list[fx.Node] | None:
        return self.values.post_path(tip, shortcut)

    def _start(self, entry: fx.Node, link: Add | Carrier) -> None:
        chain = Chain(entry, [link], link.state)
        self.chains.append(chain)
        self.tips[link.state] = chain

    def _move(self, chain: Chain, tip: fx.Node) -> None:
        self.tips = {node: other for node, other in self.tips.items() if other is not chain}
        self.tips[tip] = chain

    def _close(self, chain: Chain) -> None:
        """Find out whether the chain begins at an argument and ends in a returned value."""
        last = chain.links[-1]
        chain.exit = last.state
        chain.opens_outside = chain.entry.op == "placeholder"
        for index, value in self.values.returned():
            value = self.values.resolve(value)
            post = self.values.post_path(last.state, value)
            if _views(value, last.state) and self._restores(chain, value):
                chain.exit = value
            elif post is None or (post and not self._belongs(chain, post)):
                continue
            elif post and isinstance(last, Add):
                last.post += post
                chain.exit = last.state
            chain.closes_outside, chain.element = True, index
            return

    def _restores(self, chain: Chain, view: fx.Node) -> bool:
        """Whether ``view`` reshapes to the shape that the chain's entry and its states have."""
        return any(_shape_of(node, view) for node in (chain.entry, *(link.state for link in chain.links)))

    def _belongs(self, chain: Chain, post: Sequence[fx.Node]) -> bool:
        """Whether operations after the last add are the block's own (post-norm), not the network's final norm."""
        if not isinstance(chain.links[-1], Add):
            return False
        return chain.opens_outside or len(chain.adds) == 1 or any(add.post for add in chain.adds)


def joins(graph: fx.Graph, root: nn.Module) -> bool:
    """Whether a forward adds one of its arguments to a value made of another: a helper that does a block's add."""
    values = Values(graph, root)
    arguments = [node for node in values.nodes if node.op == "placeholder"]
    for node in filter(is_add, values.nodes):
        if not any(values.post_path(node, value) is not None for _, value in values.returned()):
            continue
        for shortcut, branch in (node.args[:2], node.args[1::-1]):
            others = [other for other in arguments if other is not shortcut]
            apart = shortcut in arguments and not values.between(shortcut, branch)
            if apart and any(values.between(other, branch) for other in others):
                return True
    return False


def _views(node: fx.Node, value: fx.Node) -> bool:
    return node.op == "call_method" and str(node.target) in VIEWS and node.args[0] is value


def _shape_of(value: fx.Node, view: fx.Node) -> bool:
    """Whether the arguments of the reshape ``view`` are the shape of ``value``, whole or size by size."""
    sizes = view.args[1:]
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
        sizes = tuple(sizes[0])
    if len(sizes) == 1 and isinstance(sizes[0], fx.Node):
        return _is_shape(sizes[0], value)
    for index, size in enumerate(sizes):
        if not isinstance(size, fx.Node) or size.target is not operator.getitem or size.args[1] != index:
            return False
        if not _is_shape(size.args[0], value):
            return False
    return bool(sizes)


def _is_shape(node: object, value: fx.Node) -> bool:
    if not isinstance(node, fx.Node) or not node.args or node.args[0] is not value:
        return False
    whole = node.target is getattr and node.args[1] == "shape"
    return whole or (node.op == "call_method" and node.target == "size" and len(node.args) == 1)
