"""The values of one traced forward: what each is computed from, and through what."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from typing import Any

import networkx as nx
import torch
from torch import fx, nn

#: Functions and methods that may stand between a residual add and the state that it makes (``relu(x + f)``).
POST_FUNCTIONS = {
    torch.relu, torch.clamp, torch.nn.functional.relu, torch.nn.functional.gelu, torch.nn.functional.silu,
    torch.nn.functional.dropout, torch.nn.functional.layer_norm, torch.nn.functional.batch_norm,
}  # fmt: skip
_POST_METHODS = {"relu", "relu_", "clamp", "contiguous", "to", "float", "type_as"}
_POST_MODULES = re.compile(r"norm|relu|gelu|silu|swish|tanh|dropout|droppath|activation|identity|_act", re.IGNORECASE)
#: Sums of two values, and those that overwrite the first one.
_SUMS = {operator.add, operator.iadd, torch.add, torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor}
_OVERWRITING = {"add_", operator.iadd, torch.ops.aten.add_.Tensor}
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
#: Attributes that a stream has like a tensor, and that need no read.
STREAM_ATTRIBUTES = {"dtype", "device", "shape"}


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

    def described(self, node: fx.Node) -> str:
        """What ``node`` calls, in words that may tell what it does: a path, and the name of a class."""
        child = self.child(node)
        plain = child is None or type(child).__module__.startswith("torch.nn.")
        if plain and not isinstance(child, (*CONVOLUTIONS, nn.MultiheadAttention)):
            return str(node.target)
        return f"{node.target} {type(child).__name__}"

    def is_norm(self, node: fx.Node) -> bool:
        """Whether ``node`` calls a norm, to judge by names."""
        child = self.child(node)
        return child is not None and "norm" in f"{node.target} {type(child).__name__}".lower()

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

    def behind(self, node: fx.Node, add: fx.Node) -> fx.Node | None:
        """The only value that ``node`` is computed from, if it is a child's call on the way to ``add``."""
        return node.all_input_nodes[0] if self.child(node) is not None and len(node.all_input_nodes) == 1 else None

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
            if is_add(node):
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
        if len(node.all_input_nodes) != 1 and not (node.op == "call_function" and node.target in POST_FUNCTIONS):
            return False
        child = self.child(node)
        if child is not None:
            return bool(_POST_MODULES.search(f"{node.target} {type(child).__name__} {type(child).__module__}"))
        if node.op == "call_method":
            return str(node.target) in _POST_METHODS
        return node.op == "call_function" and node.target in POST_FUNCTIONS

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


def returned_tuple(output: fx.Node) -> Any:
    """What a forward returns; of ``(x, ...) + more`` the first tuple."""
    result = output.args[0]
    extended = isinstance(result, fx.Node) and result.target is operator.add and isinstance(result.args[0], tuple)
    return result.args[0] if isinstance(result, fx.Node) and extended else result


def _is_metadata(node: fx.Node) -> bool:
    """Whether ``node`` is a value's shape, dtype or device: nothing of the value itself flows through it."""
    if node.op == "call_method":
        return node.target in ("size", "dim", "numel")
    return node.target is getattr and node.args[1] in (*STREAM_ATTRIBUTES, "ndim", "is_cuda")


def is_add(node: fx.Node) -> bool:
    """Whether ``node`` adds two traced values, in any spelling."""
    function = node.op == "call_function" and node.target in _SUMS
    method = node.op == "call_method" and node.target in ("add", "add_")
    if not (function or method) or len(node.args) != 2 or node.kwargs:
        return False
    first, second = node.args
    if not (isinstance(first, fx.Node) and isinstance(second, fx.Node)):
        return False
    # what an in-place add overwrites must not be used afterwards under its old name
    return not (node.target in _OVERWRITING and any(node < user for user in first.users))


def _attribute(root: nn.Module, path: str) -> object:
    value: object = root
    for part in path.split("."):
        value = getattr(value, part, None)
    return None if value is root else value
