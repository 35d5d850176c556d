"""Pass: find the residual adds in the graph of one forward, and follow the stream from one to the next.

A residual add is ``x + f`` where ``x`` is an ancestor of ``f`` through at least one child module or parametrised
operation. Polynomials of an activation, rotary embeddings, masks and position embeddings fail that test.
"""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import networkx as nx
import torch
from torch import fx, nn

#: Functions and methods that may stand between a residual add and the state that it makes (``relu(x + f)``).
_POST_FUNCTIONS = {
    torch.relu, torch.clamp, torch.nn.functional.relu, torch.nn.functional.gelu, torch.nn.functional.silu,
    torch.nn.functional.dropout, torch.nn.functional.layer_norm,
}  # fmt: skip
_POST_METHODS = {"relu", "relu_", "clamp", "contiguous", "to", "float", "type_as"}
_POST_MODULES = re.compile(r"norm|relu|gelu|silu|swish|tanh|dropout|droppath|activation|identity|_act", re.IGNORECASE)
_VIEWS = {"reshape", "view", "flatten"}
_POSITIONAL = re.compile(
    r"(^|[._])(pos|positions?|positional|rel_pos|pe|ppeg|peg|cpe)([._0-9]|$|_?emb|_?conv|_?enc)", re.I
)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
#: Attributes that a stream has like a tensor, and that need no read.
STREAM_ATTRIBUTES = {"dtype", "device", "shape"}


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


class Values:
    """Questions about the values of one graph."""

    def __init__(self, graph: fx.Graph, root: nn.Module) -> None:
        self.root = root
        self.nodes = list(graph.nodes)
        self.order = {node: index for index, node in enumerate(self.nodes)}
        self.flow = nx.DiGraph(
            (source, node) for node in self.nodes for source in node.all_input_nodes if not _is_metadata(node)
        )
        self.flow.add_nodes_from(self.nodes)
        self._between: dict[tuple[fx.Node, fx.Node], frozenset[fx.Node]] = {}

    def child(self, node: fx.Node) -> nn.Module | None:
        """The child module that ``node`` calls; None for anything else (an opaque method, too)."""
        if node.op != "call_module":
            return None
        try:
            return self.root.get_submodule(str(node.target))
        except AttributeError:
            return None

    def callee(self, node: fx.Node) -> str | None:
        """Path of the child, or name of the method, that ``node`` calls or hands to a function to be called."""
        if node.op == "call_module":
            return str(node.target)
        if node.op == "call_function":
            handed = [str(source.target) for source in node.all_input_nodes if source.op == "get_attr"]
            return next((path for path in handed if isinstance(_attribute(self.root, path), nn.Module)), None)
        return None

    def parametrised(self, node: fx.Node) -> bool:
        """Whether ``node`` is a child module with parameters, a method call, or an op on a weight matrix."""
        callee = self.callee(node)
        if callee is not None:
            child = _attribute(self.root, callee)
            return not isinstance(child, nn.Module) or next(child.parameters(), None) is not None
        return any(
            source.op == "get_attr" and getattr(_attribute(self.root, str(source.target)), "ndim", 0) >= 2
            for source in node.all_input_nodes
        )

    def matrices(self, node: fx.Node) -> int:
        """Number of weight matrices and convolution kernels of the child that ``node`` calls."""
        child = self.child(node)
        return 0 if child is None else sum(parameter.ndim >= 2 for parameter in child.parameters())

    def between(self, start: fx.Node, end: fx.Node) -> frozenset[fx.Node]:
        """All nodes on paths from ``start`` to ``end``, both included; empty if there is none."""
        if (start, end) not in self._between:
            self._between[start, end] = frozenset(self._paths(start, end))
        return self._between[start, end]

    def _paths(self, start: fx.Node, end: fx.Node) -> set[fx.Node]:
        if self.order[start] >= self.order[end]:
            return {start} if start is end else set()
        window = self.flow.subgraph(self.nodes[self.order[start] : self.order[end] + 1])
        before = nx.ancestors(window, end) | {end}
        return (nx.descendants(window, start) | {start}) & before if start in before else set()

    def feeds_branch(self, shortcut: fx.Node, branch: fx.Node) -> bool:
        """Whether ``shortcut`` is an ancestor of ``branch`` through a parametrised operation."""
        return any(self.parametrised(node) for node in self.between(shortcut, branch) - {shortcut})

    def returned(self) -> list[tuple[int | str | None, fx.Node]]:
        """Returned values with their index in the returned tuple, or key in the returned dict."""
        result: Any = returned_tuple(self.nodes[-1])
        items: Iterable[tuple[Any, Any]] = ()
        if isinstance(result, (tuple, list)):
            items = enumerate(result)
        elif isinstance(result, dict):
            items = result.items()
        if items:
            return [(index, value) for index, value in items if isinstance(value, fx.Node)]
        return [(None, result)] if isinstance(result, fx.Node) else []

    def spine(self) -> set[fx.Node]:
        """What lies on the way back from the first returned value, taking the shortcut at every residual add.

        Children elsewhere (attention, say) are not looked into.
        """
        spine: set[fx.Node] = set()
        todo = [value for _, value in self.returned()[:1]]
        while todo:
            node = todo.pop()
            if node in spine:
                continue
            spine.add(node)
            shortcuts: list[fx.Node] = []
            if _is_add(node):
                left, right = node.args[:2]
                shortcuts = [a for a, b in ((left, right), (right, left)) if self.feeds_branch(a, b)]  # type: ignore[arg-type, misc]
            todo += shortcuts or node.all_input_nodes
        return spine

    def transparent(self, node: fx.Node) -> bool:
        return isinstance(self.child(node), nn.Identity)

    def resolve(self, node: fx.Node) -> fx.Node:
        """``node``, or what an identity module hands through."""
        while self.transparent(node) and isinstance(node.args[0], fx.Node):
            node = node.args[0]
        return node

    def is_post(self, node: fx.Node) -> bool:
        """Whether ``node`` is a norm, an activation, a dropout or a cast of one value."""
        if len(node.all_input_nodes) != 1 and not (node.op == "call_function" and node.target in _POST_FUNCTIONS):
            return False
        child = self.child(node)
        if child is not None:
            return bool(_POST_MODULES.search(f"{node.target} {type(child).__name__} {type(child).__module__}"))
        if node.op == "call_method":
            return str(node.target) in _POST_METHODS
        return node.op == "call_function" and node.target in _POST_FUNCTIONS

    def post_path(self, start: fx.Node, end: fx.Node) -> list[fx.Node] | None:
        """The operations from ``start`` (excluded) to ``end`` if each is one that may follow an add."""
        path: list[fx.Node] = []
        node = end
        while node is not start:
            if (
                not node.args
                or not (self.is_post(node) or self.transparent(node))
                or not isinstance(node.args[0], fx.Node)
            ):
                return None
            path.insert(0, node)
            node = node.args[0]
        return path


def find_chains(graph: fx.Graph, root: nn.Module, carries: Callable[[str], list[Passage]]) -> Found:
    """Residual adds of ``graph``, linked into chains.

    Args:
        graph: a traced forward of ``root``, children as leaves.
        root: the module.
        carries: for the path of a child, how streams pass through it or come out of it.
    """
    return _ChainFinder(Values(graph, root), carries).run()


class _ChainFinder:
    def __init__(self, values: Values, carries: Callable[[str], list[Passage]]) -> None:
        self.values, self.carries = values, carries
        self.spine = values.spine()
        self.tips: dict[fx.Node, Chain] = {}  # current value of each chain
        self.chains: list[Chain] = []
        self.rejected: list[tuple[str, str]] = []

    def run(self) -> Found:
        for node in self.values.nodes:
            if _is_add(node):
                self._visit_add(node)
            elif self.values.child(node) is not None:
                self._visit_child(node)
        for chain in self.chains:
            self._close(chain)
        return Found([chain for chain in self.chains if chain.links], self.rejected)

    def _visit_add(self, node: fx.Node) -> None:
        values = self.values
        left, right = (values.resolve(arg) for arg in node.args[:2])  # type: ignore[arg-type]
        for shortcut, branch in ((left, right), (right, left)):
            if self._joins_parallel(node, shortcut, branch):
                return
        for shortcut, branch in ((left, right), (right, left)):
            if values.feeds_branch(shortcut, branch):
                reason = self._false_friend(shortcut, branch)
                if reason:
                    self.rejected.append((branch_name(values, shortcut, [branch]), reason))
                else:
                    self._extend(shortcut, Add(node, shortcut, shortcut, [branch]))
                return
        for shortcut, branch in ((left, right), (right, left)):
            source = self._projected(shortcut, branch)
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

    def _false_friend(self, shortcut: fx.Node, branch: fx.Node) -> str:
        values = self.values
        names = [values.callee(node) for node in values.between(shortcut, branch) - {shortcut}]
        if any(names) and all(_POSITIONAL.search(name) for name in names if name):
            return "adds a position embedding"
        return ""

    def _projected(self, shortcut: fx.Node, branch: fx.Node) -> fx.Node | None:
        """``x`` of ``downsample(x) + f(x)``: the shortcut holds one weight matrix, the branch more."""
        values, node, weights = self.values, shortcut, 0
        while values.child(node) is not None and len(node.all_input_nodes) == 1:
            weights += values.matrices(node)
            node = node.all_input_nodes[0]
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
                post = self.values.post_path(tip, shortcut)
                if post is None or not isinstance(last, Add) or view is not None:
                    continue
                last.post += post
            chain.links.append(link)
            self._move(chain, link.state)
            return
        if any(shortcut is old.shortcut for chain in self.chains for old in chain.links):
            name = branch_name(self.values, shortcut, [link.state])
            self.rejected.append((name, "its shortcut starts at an earlier value of the stream"))
            return
        self._start(shortcut, link)

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


def returned_tuple(output: fx.Node) -> Any:
    """What a forward returns; of ``(x, ...) + more`` the first tuple."""
    result = output.args[0]
    extended = isinstance(result, fx.Node) and result.target is operator.add and isinstance(result.args[0], tuple)
    return result.args[0] if isinstance(result, fx.Node) and extended else result


def joins(graph: fx.Graph, root: nn.Module) -> bool:
    """Whether a forward adds one of its arguments to a value made of another: a helper that does a block's add."""
    values = Values(graph, root)
    arguments = [node for node in values.nodes if node.op == "placeholder"]
    for node in filter(_is_add, values.nodes):
        if not any(values.post_path(node, value) is not None for _, value in values.returned()):
            continue
        for shortcut, branch in (node.args[:2], node.args[1::-1]):
            others = [other for other in arguments if other is not shortcut]
            apart = shortcut in arguments and not values.between(shortcut, branch)
            if apart and any(values.between(other, branch) for other in others):
                return True
    return False


# -- names -----------------------------------------------------------------------------------------------------------

_KINDS = (
    ("cross-attention", re.compile(r"cross_?att|enc(oder|dec)_?att|encdecatt", re.I)),
    ("attention", re.compile(r"attn|attention|self_att|msa\b|_sa_block|_mha_block", re.I)),
    ("conv", re.compile(r"conv", re.I)),
    (
        "ffn",
        re.compile(r"mlp|ffn|ff\b|feed_?forward|moe|expert|fc\d?\b|intermediate|_ff_block|densere|linear\d?\b", re.I),
    ),
)


def branch_modules(values: Values, shortcut: fx.Node, branches: Sequence[fx.Node]) -> list[fx.Node]:
    """Calls of children and methods between the stream and the add, norms and activations aside."""
    region: set[fx.Node] = set()
    for branch in branches:
        region |= values.between(shortcut, branch) - {shortcut}
    calls = [n for n in region if values.callee(n) and values.parametrised(n) and not _is_norm(values, n)]
    # children before methods: a method's name says less
    return sorted(calls, key=lambda node: (values.child(node) is None, values.order[node]))


def branch_name(values: Values, shortcut: fx.Node, branches: Sequence[fx.Node]) -> str:
    """Path, below the block, of the module that the branch mainly is."""
    calls = branch_modules(values, shortcut, branches)
    if not calls:
        return branches[0].name
    kind = branch_kind(values, shortcut, branches)
    pattern = dict(_KINDS).get("attention" if kind == "parallel" else kind)
    named = [call for call in calls if pattern and pattern.search(_described(values, call))]
    return str(values.callee((named or calls)[0]))


def branch_kind(values: Values, shortcut: fx.Node, branches: Sequence[fx.Node]) -> str:
    """``attention``, ``cross-attention``, ``ffn``, ``parallel`` (both), ``conv`` or ``branch``, from names."""
    texts = [_described(values, call) for call in branch_modules(values, shortcut, branches)]
    kinds = [name for name, pattern in _KINDS if any(pattern.search(text) for text in texts)]
    patterns = dict(_KINDS)
    attention = [kind for kind in kinds if kind.endswith("attention")]
    other = [text for text in texts if not patterns["attention"].search(text)]
    if attention and any(patterns["ffn"].search(text) for text in other):
        return "parallel"
    return kinds[0] if kinds else "branch"


def width_of(values: Values, add: Add) -> int | None:
    """Channels of the stream, from the norms, linear maps or convolutions next to the add; None if unknown."""
    readers = sorted(add.shortcut.users, key=lambda node: values.order.get(node, 0))
    for user in (*add.post, *readers):
        child = values.child(user)
        if isinstance(child, (nn.Linear, *_CONVOLUTIONS)):
            return int(child.in_features if isinstance(child, nn.Linear) else child.in_channels)
        weight = getattr(child, "weight", None)
        if child is not None and _is_norm(values, user) and getattr(weight, "ndim", 0) == 1:
            return int(weight.shape[0])  # type: ignore[union-attr]
    return None


def _described(values: Values, node: fx.Node) -> str:
    child = values.child(node)
    plain = child is None or type(child).__module__.startswith("torch.nn.")
    return (
        str(node.target) if plain and not isinstance(child, _CONVOLUTIONS) else f"{node.target} {type(child).__name__}"
    )


def _is_norm(values: Values, node: fx.Node) -> bool:
    child = values.child(node)
    return child is not None and "norm" in f"{node.target} {type(child).__name__}".lower()


def _is_metadata(node: fx.Node) -> bool:
    """Whether ``node`` is a value's shape, dtype or device: nothing of the value itself flows through it."""
    if node.op == "call_method":
        return node.target in ("size", "dim", "numel")
    return node.target is getattr and node.args[1] in (*STREAM_ATTRIBUTES, "ndim", "is_cuda")


def _is_add(node: fx.Node) -> bool:
    function = node.op == "call_function" and node.target in (operator.add, operator.iadd, torch.add)
    method = node.op == "call_method" and node.target in ("add", "add_")
    if not (function or method) or len(node.args) != 2 or node.kwargs:
        return False
    first, second = node.args
    if not (isinstance(first, fx.Node) and isinstance(second, fx.Node)):
        return False
    # what an in-place add overwrites must not be used afterwards under its old name
    in_place = node.target in ("add_", operator.iadd)
    return not (in_place and any(node < user for user in first.users))


def _views(node: fx.Node, value: fx.Node) -> bool:
    return node.op == "call_method" and str(node.target) in _VIEWS and node.args[0] is value


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


def _attribute(root: nn.Module, path: str) -> object:
    value: object = root
    for part in path.split("."):
        value = getattr(value, part, None)
    return None if value is root else value
