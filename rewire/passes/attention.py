"""Pass: let an attention read its queries, keys and values from different mixes of the stream.

What stands between the stream and the projections (the branch's norm) is computed once for each of the three. An
attention module gets its three inputs as one value, `Ways`, in place of ``hidden_states``, and a forward in which each
projection takes its own.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import fx, nn

from rewire.errors import TraceError, UnsupportedTopology
from rewire.kernels.fused_qkv import Fused, project_fused
from rewire.passes.install import install, is_rewritten
from rewire.passes.values import Values
from rewire.patterns import Pattern
from rewire.topologies.base import Ways
from rewire.tracing import Leaf, Traced, print_forward, trace
from rewire.tracing.forwards import plain_forward
from rewire.tracing.printer import body_of, globals_for

#: Usual names of the three projections.
_NAMES = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("to_q", "to_k", "to_v"),
    ("q", "k", "v"),
    ("wq", "wk", "wv"),
    ("q_lin", "k_lin", "v_lin"),
    ("query_proj", "key_proj", "value_proj"),
)
_FUSED = re.compile(r"(^|[._])(qkv|c_attn|wqkv|in_proj|query_key_value|to_qkv)([._]|$)|qkv", re.I)
_WAYS = ("q", "k", "v")
#: The number of its layer, by which an attention finds its part of the cache.
_NUMBERS = frozenset({"layer_idx", "layer_index"})


@dataclasses.dataclass(frozen=True)
class Projections:
    """Where an attention projects its input.

    Attributes:
        block: the module whose forward holds the residual add.
        where: path of the attention from the model's root, for messages.
        paths: below the block, the three projections (q, k, v), or one that is fused, or a torch.nn.MultiheadAttention.
        fused: layout of a fused projection's output; None for three apart.
        leaves: library attributes that tracing replaces.
        forwards: module class -> function that is traced in place of its forward.
    """

    block: nn.Module
    where: str
    paths: tuple[str, ...]
    fused: Fused | None
    leaves: Sequence[Leaf]
    forwards: Mapping[type[nn.Module], FunctionType]

    def error(self, why: str) -> UnsupportedTopology:
        return UnsupportedTopology(
            f"the attention '{self.where}' cannot read its queries, keys and values apart: {why}. Use a topology that "
            "reads one value, or register a pattern whose `qkv` names the projections that its forward calls."
        )


def find_projections(
    block: nn.Module,
    path: str,
    branch: str,
    found: Iterable[Pattern],
    leaves: Sequence[Leaf],
    forwards: Mapping[type[nn.Module], FunctionType],
) -> Projections:
    """The projections of one attention, by what the patterns say, else by their usual names and use.

    Args:
        block: the module whose forward holds the attention's residual add.
        path: its path from the model's root.
        branch: path of the attention below the block.
        found: patterns of the model, the most special first.
        leaves: see `Projections`.
        forwards: see `Projections`.

    Raises:
        UnsupportedTopology: they were not found; the message says what a pattern would have to name.
    """
    where = f"{path}.{branch}" if path else branch
    for pattern in found:
        paths = tuple(text.format(branch=branch) for text in pattern.qkv)
        if paths and all(_submodule(block, p) is not None for p in paths):
            holder, fused = block.get_submodule(paths[0].rpartition(".")[0]), None
            if pattern.fused and len(paths) == 1:
                fused = pattern.fused(block.get_submodule(paths[0]), holder)
            projections = Projections(block, where, paths, fused, leaves, forwards)
            if len(paths) == 3 or fused or _multihead(block, paths[0]):
                return projections
    for paths in _usual(block, branch):
        projections = Projections(block, where, paths, None, leaves, forwards)
        if len(paths) == 3 or _multihead(block, paths[0]):
            return projections
        fused = _fused_by_use(projections)
        if fused:
            return dataclasses.replace(projections, fused=fused)
    below = [name for name, child in block.named_modules() if name and isinstance(child, nn.Linear)]
    raise UnsupportedTopology(
        f"the attention '{where}' cannot read its queries, keys and values apart: no projections with usual names were "
        f"found (linear maps of '{path}': {', '.join(below) or 'none'}). Use a topology that reads one value, or "
        "register a pattern with `qkv` set to the paths of the three below the block (or of a fused one, and `fused` "
        "to the layout of its output)."
    )


@dataclasses.dataclass(frozen=True)
class Inner:
    """A child that holds projections and gets `Ways` as its argument of that name."""

    path: str
    argument: str


def feed_attention(
    graph: fx.Graph, value: fx.Node, read: fx.Node, users: Sequence[fx.Node], projections: Projections
) -> set[Inner]:
    """Let ``users`` of ``value`` read the `Ways` that ``read`` is: projections their own, all else the residual.

    Returns:
        The children that are handed `Ways` and have to be rewritten by `rewrite_inner`.

    Raises:
        UnsupportedTopology: a projection's input cannot be told apart from the others'.
    """
    feeder = _Feeder(graph, value, read, projections.block, projections)
    feeder.run(projections.paths)
    missing = [path for path in projections.paths if not feeder.reached(path)]
    if missing:
        raise projections.error(f"its block does not hand what it reads to {', '.join(missing)}")
    rest = feeder.attribute("residual")
    for user in users:
        user.replace_input_with(value, rest)
    feeder.sweep()
    return feeder.inner


def rewrite_inner(inner: Inner, projections: Projections) -> None:
    """Give the child that ``inner`` names, and what it hands `Ways` to, forwards that take them apart.

    Raises:
        UnsupportedTopology: they cannot.
    """
    module = projections.block.get_submodule(inner.path)
    if is_rewritten(module):
        return  # a module that stands at several places
    paths = tuple(path.removeprefix(f"{inner.path}.") for path in projections.paths)
    where = f"{projections.where} ({inner.path})"
    here = dataclasses.replace(projections, block=module, paths=paths)
    wrappers = plain_forward(type(module))[1]
    if wrappers:
        raise projections.error(f"the forward of {where} is decorated (by {', '.join(wrappers)})")
    try:
        function = here.forwards.get(type(module))
        traced = _traced(module, function, here.leaves)
        below: set[Inner] = set()
        reached: set[str] = set()
        for graph in (path.graph for path in traced.paths):
            feeder = None if graph is None else _feed_argument(graph, inner.argument, here)
            if feeder is not None:
                below |= feeder.inner
                reached |= set(filter(feeder.reached, paths))
        missing = [path for path in paths if path not in reached]
        if missing:
            raise projections.error(f"the forward of {where} does not call {', '.join(missing)} on its input")
        table = globals_for(traced.signature, [path.graph for path in traced.paths if path.graph is not None])
        bodies = [body_of(path.graph, path.tests, path.nones, table, path.error) for path in traced.paths]
        install(module, print_forward(traced.signature, traced.tested, bodies, table), table)
    except TraceError as error:
        raise projections.error(f"the forward of {where} cannot be traced: {error}") from error
    for child in sorted(below, key=lambda child: child.path):
        rewrite_inner(child, here)


def _traced(module: nn.Module, function: FunctionType | None, leaves: Sequence[Leaf]) -> Traced:
    """The attention's forward; the same one for all layers, if its code can do with a number that is not known."""
    try:
        return trace(module, function=function, leaves=leaves, through_functions=False, varying=_NUMBERS)
    except TraceError:
        return trace(module, function=function, leaves=leaves, through_functions=False)


def ways(x: Any) -> Ways:
    """What an attention with a rewritten forward reads: ``x`` itself, or one tensor for all three."""
    return x if isinstance(x, Ways) else Ways(x, x, x, x)


def apart(q: Any, k: Any, v: Any) -> Ways:
    """What a block hands to its attention."""
    return Ways(q, k, v, q)


def _feed_argument(graph: fx.Graph, argument: str, projections: Projections) -> _Feeder | None:
    """Rewrite one path of an attention's forward; None where it does not use its input."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    value = next((node for node in placeholders if str(node.target) == argument), None)
    if value is None or not value.users:
        return None
    users = list(value.users)
    with graph.inserting_after(placeholders[-1]):
        read = graph.create_node("call_function", ways, (value,), name=f"{argument}_ways")
    feeder = _Feeder(graph, value, read, projections.block, projections)
    feeder.run(projections.paths)
    rest = feeder.attribute("q")  # shapes, and gates computed from what the attention reads
    for user in users:
        user.replace_input_with(value, rest)
    feeder.sweep()
    return feeder


class _Feeder:
    """Feeds the projections in one graph, or the children that hold them."""

    def __init__(self, graph: fx.Graph, value: fx.Node, read: fx.Node, root: nn.Module, of: Projections) -> None:
        self.graph, self.value, self.read, self.root, self.of = graph, value, read, root, of
        self.values = Values(graph, root)
        self.attributes: dict[str, fx.Node] = {}
        self.copies: dict[tuple[str, fx.Node], fx.Node] = {}
        self.fed: set[str] = set()  # paths of the projections, and of the children that hold some, that were fed
        self.inner: set[Inner] = set()

    def reached(self, path: str) -> bool:
        """Whether the projection at ``path``, or a child that holds it, was fed."""
        return any(path == target or path.startswith(f"{target}.") for target in self.fed)

    def run(self, paths: tuple[str, ...]) -> None:
        for node in list(self.graph.nodes):
            if node.op != "call_module":
                continue
            target = str(node.target)
            holds = any(path == target or path.startswith(f"{target}.") for path in paths)
            if not holds or not self._depends(node):
                continue  # keys and values of a cross-attention come from elsewhere
            self.fed.add(target)
            if target in paths:
                self._feed_projection(node, paths.index(target), len(paths))
            else:
                self.inner.add(self._feed_child(node))

    def attribute(self, name: str) -> fx.Node:
        """``read.q`` and so on, written where it is used."""
        if name not in self.attributes:
            with self.graph.inserting_after(self.read):
                self.attributes[name] = self.graph.call_function(getattr, (self.read, name))
            self.attributes[name].meta["inline"] = True
        return self.attributes[name]

    def sweep(self) -> None:
        """Erase what only the projections used, now that they use copies of it."""
        copied = {node for _, node in self.copies}
        for node in sorted(copied, key=self.values.order.__getitem__, reverse=True):
            if not node.users:
                self.graph.erase_node(node)
        for node in self.attributes.values():
            if not node.users:
                self.graph.erase_node(node)

    def _depends(self, node: fx.Node) -> list[fx.Node]:
        """Arguments of ``node`` that are computed from the value."""
        return [source for source in node.all_input_nodes if self.values.between(self.value, source)]

    def _feed_projection(self, node: fx.Node, number: int, count: int) -> None:
        sources = self._depends(node)
        if isinstance(self.values.child(node), nn.MultiheadAttention):
            self._feed_multihead(node)
            return
        if len(sources) > 1:
            raise self.of.error(f"'{node.target}' is called with several values of the stream")
        source = sources[0]
        if count == 3:
            node.replace_input_with(source, self._copy(source, _WAYS[number], node))
            return
        assert self.of.fused is not None
        inputs = [self._copy(source, way, node) for way in _WAYS]
        with self.graph.inserting_before(node):
            module = self.graph.get_attr(str(node.target))
            fused = self.graph.create_node(
                "call_function",
                project_fused,
                (module, self.of.fused.groups, self.of.fused.sizes, *inputs),
                name=node.name,
            )
        node.replace_all_uses_with(fused)
        self.graph.erase_node(node)

    def _feed_multihead(self, node: fx.Node) -> None:
        arguments = dict(zip(("query", "key", "value"), node.args, strict=False)) | dict(node.kwargs)
        for way, name in zip(_WAYS, ("query", "key", "value"), strict=True):
            source = arguments[name]
            if isinstance(source, fx.Node) and self.values.between(self.value, source):
                arguments[name] = self._copy(source, way, node)
        node.args, node.kwargs = (
            (*(arguments.pop(n) for n in ("query", "key", "value")), *node.args[3:]),
            {key: arguments[key] for key in node.kwargs if key in arguments},
        )

    def _feed_child(self, node: fx.Node) -> Inner:
        sources = self._depends(node)
        if len(sources) > 1:
            raise self.of.error(f"'{node.target}' is called with several values of the stream")
        source = sources[0]
        names = list(inspect.signature(plain_forward(type(self.root.get_submodule(str(node.target))))[0]).parameters)
        places = [names[1 + n] for n, arg in enumerate(node.args) if arg is source]
        places += [name for name, arg in node.kwargs.items() if arg is source]
        if len(places) != 1:
            raise self.of.error(f"'{node.target}' is called with the stream's value in {len(places)} arguments")
        if source is self.value:
            node.replace_input_with(source, self.read)
        else:
            inputs = tuple(self._copy(source, way, node) for way in _WAYS)
            with self.graph.inserting_before(node):
                handed = self.graph.call_function(apart, inputs)
            handed.meta["inline"] = True
            node.replace_input_with(source, handed)
        return Inner(str(node.target), places[0])

    def _copy(self, node: fx.Node, way: str, before: fx.Node) -> fx.Node:
        """``node`` computed from the way's value in place of the common one."""
        if node is self.value:
            return self.attribute(way)
        if not self.values.between(self.value, node):
            return node
        if (way, node) not in self.copies:
            sources = {source: self._copy(source, way, before) for source in node.all_input_nodes}
            with self.graph.inserting_before(before):
                copy = self.graph.node_copy(node, lambda source: sources[source])
            copy.name = self.graph._graph_namespace.create_name(f"{node.name}_{way}", None)
            self.copies[way, node] = copy
        return self.copies[way, node]


def _submodule(root: nn.Module, path: str) -> nn.Module | None:
    try:
        return root.get_submodule(path)
    except AttributeError:
        return None


def _multihead(block: nn.Module, path: str) -> bool:
    return isinstance(_submodule(block, path), nn.MultiheadAttention)


def _usual(block: nn.Module, branch: str) -> list[tuple[str, ...]]:
    """Paths below the block of modules with the usual names, those in the branch first."""
    modules = dict(block.named_modules())
    linear = {path for path, child in modules.items() if getattr(child, "weight", None) is not None}
    parents = [path for path in modules if path == branch or path.startswith(f"{branch}.")]
    parents.append(branch.rpartition(".")[0])  # the branch is a projection itself
    found: list[tuple[str, ...]] = [(path,) for path in parents if _multihead(block, path)]
    for parent in parents:
        prefix = f"{parent}." if parent else ""
        for names in _NAMES:
            paths = tuple(prefix + name for name in names)
            if linear.issuperset(paths):
                found.append(paths)
        children = [path for path in linear if path.startswith(prefix) and "." not in path[len(prefix) :]]
        found += [(path,) for path in children if _FUSED.search(path[len(prefix) :])]
    return found


def _fused_by_use(projections: Projections) -> Fused | None:
    """Layout of a fused projection's output, from how the forward that calls it takes it apart."""
    (path,) = projections.paths
    parent, _, name = path.rpartition(".")
    attention = projections.block.get_submodule(parent)
    width = _rows(projections.block.get_submodule(path))
    if width is None:
        return None
    try:
        function = projections.forwards.get(type(attention))
        traced = trace(attention, function=function, leaves=projections.leaves)
    except TraceError:
        return None
    calls = [n for p in traced.paths if p.graph is not None for n in p.graph.nodes if n.target == name]
    layouts = {_layout(user, node, width) for node in calls for user in node.users}
    return layouts.pop() if len(layouts) == 1 else None


def _layout(user: fx.Node, node: fx.Node, width: int) -> Fused | None:
    """How ``user`` takes the fused projection ``node`` apart; None if it does not say."""
    if user.args[:1] != (node,):
        return None
    arguments: list[Any] = [*user.args[1:], *user.kwargs.values()]
    is_split = user.target in ("split", torch.split)
    if is_split and isinstance(arguments[0], (list, tuple)) and len(arguments[0]) == 3:
        sizes = tuple(arguments[0])
        return Fused(1, sizes) if all(isinstance(size, int) for size in sizes) and sum(sizes) == width else None
    if is_split or user.target in ("chunk", torch.chunk):
        three = arguments[0] == 3 if not is_split else 3 * arguments[0] == width if _is_int(arguments[0]) else True
        return Fused(1, (width // 3,) * 3) if three and width % 3 == 0 else None
    if user.target in ("view", "reshape"):
        flat = arguments[0] if len(arguments) == 1 and isinstance(arguments[0], (list, tuple)) else arguments
        return _by_shape(list(flat), width)
    return None


def _by_shape(shape: list[Any], width: int) -> Fused | None:
    """Layout of (..., 3, heads, size), (..., heads, 3, size)."""
    after = next((shape[n + 1 :] for n in range(len(shape) - 1, 0, -1) if shape[n] is not None and shape[n] == 3), [])
    size = 1
    for entry in after:
        if not _is_int(entry) or entry <= 0:
            return None
        size *= entry
    return Fused(width // (3 * size), (size,) * 3) if after and width % (3 * size) == 0 else None


def _is_int(value: Any) -> bool:
    return isinstance(value, int)


def _rows(projection: nn.Module) -> int | None:
    """Number of outputs of a linear map, nn.Linear or transformers' Conv1D."""
    rows = getattr(projection, "out_features", getattr(projection, "nf", None))
    return rows if isinstance(rows, int) else None
