"""Pass: let an attention read its queries, keys and values from different mixes of the stream.

What stands between the stream and the projections (the branch's norm) is computed once for each of the three. An
attention module gets its three inputs as one value, `Ways`, in place of ``hidden_states``, and a forward in which each
projection takes its own.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from types import FunctionType
from typing import Any

from torch import fx, nn

from rewire.errors import TraceError
from rewire.kernels.fused_qkv import project_fused
from rewire.passes.install import install, is_rewritten
from rewire.passes.projections import Projections
from rewire.passes.values import Values
from rewire.topologies.base import Ways
from rewire.tracing import Leaf, Traced, print_forward, trace
from rewire.tracing.forwards import plain_forward
from rewire.tracing.printer import body_of, globals_for

_WAYS = ("q", "k", "v")
#: The number of its layer, by which an attention finds its part of the cache.
_NUMBERS = frozenset({"layer_idx", "layer_index"})


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
    feeder = _Feeder(graph, value, read, projections)
    feeder.run(users, "residual")
    missing = [path for path in projections.paths if path not in feeder.reached]
    if missing:
        raise projections.error(f"its block does not hand what it reads to {', '.join(missing)}")
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
        traced = _traced(module, here.forwards.get(type(module)), here.leaves)
        graphs = [path.graph for path in traced.paths if path.graph is not None]
        feeders = [feeder for graph in graphs if (feeder := _feed_argument(graph, inner.argument, here))]
        missing = [path for path in paths if not any(path in feeder.reached for feeder in feeders)]
        if missing:
            raise projections.error(f"the forward of {where} does not call {', '.join(missing)} on its input")
        table = globals_for(traced.signature, graphs)
        bodies = [body_of(path.graph, path.tests, path.nones, table, path.error) for path in traced.paths]
        install(module, print_forward(traced.signature, traced.tested, bodies, table), table, shared=True)
    except TraceError as error:
        raise projections.error(f"the forward of {where} cannot be traced: {error}") from error
    for child in sorted({child for feeder in feeders for child in feeder.inner}, key=lambda child: child.path):
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
    feeder = _Feeder(graph, value, read, projections)
    feeder.run(users, "q")  # shapes, and gates computed from what the attention reads
    return feeder


class _Feeder:
    """Feeds the projections in one graph, or the children that hold them.

    Attributes:
        reached: paths of the projections that were fed, or whose holder was.
        inner: the children that were handed `Ways`.
    """

    def __init__(self, graph: fx.Graph, value: fx.Node, read: fx.Node, projections: Projections) -> None:
        self.graph, self.value, self.read, self.of = graph, value, read, projections
        self.values = Values(graph, projections.block)
        self.attributes: dict[str, fx.Node] = {}
        self.copies: dict[tuple[str, fx.Node], fx.Node] = {}
        self.reached: set[str] = set()
        self.inner: set[Inner] = set()

    def run(self, users: Sequence[fx.Node], rest: str) -> None:
        """Feed what projects; all else among ``users`` of the value reads the way ``rest``."""
        for node in list(self.graph.nodes):
            if node.op == "call_module":
                self._feed(node)
        other = self._attribute(rest)
        for user in users:
            user.replace_input_with(self.value, other)
        self._sweep()

    def _feed(self, node: fx.Node) -> None:
        """Feed the child that ``node`` calls, if it is a projection or holds some."""
        paths, target = self.of.paths, str(node.target)
        held = {path for path in paths if path == target or path.startswith(f"{target}.")}
        if not held or not self._sources(node):
            return  # keys and values of a cross-attention come from elsewhere
        self.reached |= held
        if target not in paths:
            self._feed_child(node)
        elif isinstance(self.values.child(node), nn.MultiheadAttention):
            self._feed_multihead(node)
        elif len(paths) == 3:
            source = self._source(node)
            node.replace_input_with(source, self._copy(source, _WAYS[paths.index(target)], node))
        else:
            self._feed_fused(node)

    def _sources(self, node: fx.Node) -> list[fx.Node]:
        """Arguments of ``node`` that are computed from the value."""
        return [source for source in node.all_input_nodes if self.values.between(self.value, source)]

    def _source(self, node: fx.Node) -> fx.Node:
        """The one argument of ``node`` that is computed from the value."""
        sources = self._sources(node)
        if len(sources) > 1:
            raise self.of.error(f"'{node.target}' is called with several values of the stream")
        return sources[0]

    def _feed_fused(self, node: fx.Node) -> None:
        source, layout = self._source(node), self.of.fused
        assert layout is not None
        inputs = [self._copy(source, way, node) for way in _WAYS]
        with self.graph.inserting_before(node):
            module = self.graph.get_attr(str(node.target))
            arguments: tuple[Any, ...] = (module, layout.groups, layout.sizes, *inputs)
            fused = self.graph.create_node("call_function", project_fused, arguments, name=node.name)
        node.replace_all_uses_with(fused)
        self.graph.erase_node(node)

    def _feed_multihead(self, node: fx.Node) -> None:
        names = ("query", "key", "value")
        arguments = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
        for way, name in zip(_WAYS, names, strict=True):
            source = arguments[name]
            if isinstance(source, fx.Node) and self.values.between(self.value, source):
                arguments[name] = self._copy(source, way, node)
        node.args = (*(arguments.pop(name) for name in names), *node.args[3:])
        node.kwargs = {key: arguments[key] for key in node.kwargs if key in arguments}

    def _feed_child(self, node: fx.Node) -> None:
        source = self._source(node)
        forward, _ = plain_forward(type(self.of.block.get_submodule(str(node.target))))
        names = list(inspect.signature(forward).parameters)[1:]
        places = [names[n] for n, argument in enumerate(node.args) if argument is source]
        places += [name for name, argument in node.kwargs.items() if argument is source]
        if len(places) != 1:
            raise self.of.error(f"'{node.target}' is called with the stream's value in {len(places)} arguments")
        node.replace_input_with(source, self._three_ways(source, node))
        self.inner.add(Inner(str(node.target), places[0]))

    def _three_ways(self, source: fx.Node, before: fx.Node) -> fx.Node:
        """``source`` computed from each of the three reads, as one `Ways`."""
        if source is self.value:
            return self.read
        inputs = tuple(self._copy(source, way, before) for way in _WAYS)
        with self.graph.inserting_before(before):
            handed = self.graph.call_function(apart, inputs)
        handed.meta["inline"] = True
        return handed

    def _copy(self, node: fx.Node, way: str, before: fx.Node) -> fx.Node:
        """``node`` computed from the way's value in place of the common one."""
        if node is self.value:
            return self._attribute(way)
        if not self.values.between(self.value, node):
            return node
        if (way, node) not in self.copies:
            sources = {source: self._copy(source, way, before) for source in node.all_input_nodes}
            with self.graph.inserting_before(before):
                copy = self.graph.node_copy(node, lambda source: sources[source])
            copy.name = self.graph._graph_namespace.create_name(f"{node.name}_{way}", None)
            self.copies[way, node] = copy
        return self.copies[way, node]

    def _attribute(self, name: str) -> fx.Node:
        """``read.q`` and so on, written where it is used."""
        if name not in self.attributes:
            with self.graph.inserting_after(self.read):
                self.attributes[name] = self.graph.call_function(getattr, (self.read, name))
            self.attributes[name].meta["inline"] = True
        return self.attributes[name]

    def _sweep(self) -> None:
        """Erase what only the projections used, now that they use copies of it."""
        copied = {node for _, node in self.copies}
        for node in sorted(copied, key=self.values.order.__getitem__, reverse=True):
            if not node.users:
                self.graph.erase_node(node)
        for node in self.attributes.values():
            if not node.users:
                self.graph.erase_node(node)
