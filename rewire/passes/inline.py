"""Pass: write the sums of a frozen topology into a block's forward.

A rewritten forward leaves it to the stream what a branch reads and how it is added. Where that is constant and the
block has one place in the trunk, the sums can stand in the forward itself, which then shows what is connected.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import fx

from rewire.kernels.mix import mix
from rewire.passes.values import STREAM_ATTRIBUTES
from rewire.stream import Layout
from rewire.topologies.frozen import Frozen
from rewire.topologies.program import Line, PerChannel, Unit, Weight, branch_of, operands

_METHODS = ("read", "write", "merge", "push", "value", "finish", "leave")


def inline(graph: fx.Graph, name: str, places: Sequence[Collection[int]], layout: Layout) -> None:
    """Replace the calls of one stream in a rewritten graph by the sums that they compute.

    The graph stays as it is where that cannot be done: for learned topologies, channels that do not come last, and
    residual adds that stand at several places of the trunk, or share a unit with those of another block.

    Args:
        graph: changed in place.
        name: variable name of the stream.
        places: for each residual add of the stream in this graph, its positions in the trunk.
        layout: of the trunk.
    """
    topology = layout.topology
    if not isinstance(topology, Frozen) or layout.channel_dim != -1 or any(len(set(at)) != 1 for at in places):
        return
    positions = [next(iter(at)) for at in places]
    for root in [node for node in graph.nodes if node.meta.get("stream") == name and not _follows(node)]:
        adds = _adds_from(root)
        if adds is None:
            return
        here, positions = positions[:adds], positions[adds:]
        if here and layout.opens_unit(here[0]) and layout.closes_unit(here[-1]):
            _Inliner(graph, root, here[0], layout, topology).run()


def _follows(stream: fx.Node) -> bool:
    """Whether a stream comes from another one in the same graph; else it was entered, or a child returned it."""
    if stream.target is operator.getitem:
        source = stream.args[0]
        return isinstance(source, fx.Node) and source.op == "call_method" and source.target == "read"
    return stream.op == "call_method" and stream.target in _METHODS


def _adds_from(root: fx.Node) -> int | None:
    """Number of residual adds until the stream leaves or a child takes it; None if it is used in an unknown way."""
    adds, queue = 0, [root]
    while queue:
        stream = queue.pop()
        for user in stream.users:
            if user.op == "call_method" and user.target in _METHODS and user.args[0] is stream:
                adds += user.target in ("write", "push")
                queue += [node for node in (user, *user.users) if node.meta.get("stream")]
            elif user.op != "call_module" and not (user.target is getattr and user.args[1] in STREAM_ATTRIBUTES):
                return None
    return adds


@dataclasses.dataclass(frozen=True)
class _State:
    """What a stream is, in terms of the graph's values.

    Attributes:
        position: residual adds so far.
        values: by their names in the program, those that are kept.
        hidden: what the next branch reads, once that was computed.
        branches: of the unit so far.
    """

    position: int
    values: Mapping[str, fx.Node]
    hidden: fx.Node | None = None
    branches: tuple[fx.Node, ...] = ()


class _Inliner:
    def __init__(self, graph: fx.Graph, root: fx.Node, first: int, layout: Layout, topology: Frozen) -> None:
        self.graph, self.root, self.first, self.layout, self.topology = graph, root, first, layout, topology
        self.channels: fx.Node | None = None

    def run(self) -> None:
        nodes = list(self.graph.nodes)
        states, calls = {self.root: self._entered()}, []
        for node in nodes:
            stream = next((source for source in node.all_input_nodes if source in states), None)
            if stream is None:
                continue
            state = states[stream]
            if node.op == "call_module":  # a child goes on with the stream
                with self.graph.inserting_before(node):
                    node.replace_input_with(stream, self._stepped(state))
                continue
            calls.append(node)
            with self.graph.inserting_before(node):
                result = self._followed(node, state)
            if isinstance(result, _State):
                states[node] = result
            else:
                node.replace_all_uses_with(result)
        for node in reversed(calls):
            self.graph.erase_node(node)

    def _entered(self) -> _State:
        """The states, taken out of the stream that the block is given."""
        names = self.topology.held(self.layout.units[self.first] - 1)
        with self.graph.inserting_after(self.root):
            states = self.graph.create_node("call_function", getattr, (self.root, "states"))
        states.meta["inline" if len(names) == 1 else "unpacked"] = True
        values, place = dict[str, fx.Node](), states
        for number, name in enumerate(names):
            with self.graph.inserting_after(place):
                place = self.graph.create_node("call_function", operator.getitem, (states, number), name=name)
            values[name] = place
        return _State(self.first, values)

    def _followed(self, call: fx.Node, state: _State) -> _State | fx.Node:
        """The stream that ``call`` returns, or the value."""
        if call.target is getattr:
            return self.graph.call_function(getattr, (self.root, call.args[1]))
        if call.target is operator.getitem:  # of what `read` returns
            return state if call.args[1] == 1 else self._hidden(state)
        if call.target == "read":
            return self._opened(state)
        if call.target == "write":
            return self._written(self._opened(state), call.args[1:])
        if call.target == "merge":
            return self._merged(self._opened(state), call.args[1:])
        if call.target == "push":
            return self._pushed(self._opened(state), call.args[1])
        if state.position == len(self.layout.units):
            return self._output(state)
        return self._hidden(self._opened(state)) if call.target == "value" else self._left(state)

    def _opened(self, state: _State) -> _State:
        if state.hidden is not None:
            return state
        unit, values = self._unit(state), dict(state.values)
        self._run(unit.before, values)
        return dataclasses.replace(state, values=values, hidden=values[unit.read])

    def _written(self, state: _State, branches: Sequence[Any]) -> _State:
        t, position = self.layout.units[state.position], state.position + 1
        for element in [b for b in branches if b.target is operator.getitem and b.args[0].op == "call_module"]:
            element.meta["inline"] = True  # `self_attn[0]`, at both places where it is added
        summed = (*state.branches, *branches)
        if not self.layout.closes_unit(state.position):
            hidden = self._added([self._hidden(state), *branches], f"h{t}")
            return _State(position, state.values, hidden, summed)
        own, values = branch_of(t), dict(state.values)
        if own in self.topology.held(t):
            values[own] = self._added(summed, own)
            summed = (values[own],)
        for line in self._unit(state).after:
            if self._continues(line, state):
                values[line.target] = self._added([self._hidden(state), *branches], line.target)
            else:
                values[line.target] = self._sum(line, values, own, summed)
        return self._closed(position, values)

    def _continues(self, line: Line, state: _State) -> bool:
        """Whether ``line`` adds the unit's branches to what the unit read, as is done inside the unit, too."""
        unit, own = self._unit(state), branch_of(self.layout.units[state.position])
        return [(source, weight) for source, weight, _ in line.terms] == [(unit.read, 1.0), (own, 1.0)]

    def _merged(self, state: _State, branches: Sequence[Any]) -> fx.Node:
        t = self.layout.units[state.position]
        line = self.topology.written(t)
        if line is None:
            return self._added(branches, "merged")
        return self._sum(line._replace(target="merged"), state.values, branch_of(t), branches)

    def _pushed(self, state: _State, value: Any) -> _State:
        written, values = self.topology.written(self.layout.units[state.position]), dict(state.values)
        for line in self._unit(state).after:
            values[line.target] = value if line is written else self._sum(line, values)
        return self._closed(state.position + 1, values)

    def _closed(self, position: int, values: Mapping[str, fx.Node]) -> _State:
        held = self.topology.held(self.layout.units[position - 1])
        return _State(position, {name: values[name] for name in held})

    def _output(self, state: _State) -> fx.Node:
        values = dict(state.values)
        self._run(self.topology.lines.finish, values)
        return values[self.topology.lines.output]

    def _left(self, state: _State) -> fx.Node:
        left = self.graph.call_method("leave", (self._stepped(state),))
        left.meta["inline"] = True
        return left

    def _stepped(self, state: _State) -> fx.Node:
        """The stream as the next block gets it."""
        adds = state.position - self.first
        if adds == 0:
            return self.root
        states = tuple(state.values.values())
        stream = self.graph.call_method("step", (self.root, states) if adds == 1 else (self.root, states, adds))
        stream.meta["stream"] = self.root.meta["stream"]
        return stream

    # -- sums ----------------------------------------------------------------------------------------------------------

    def _unit(self, state: _State) -> Unit:
        return self.topology.lines.units[self.layout.units[state.position] - 1]

    @staticmethod
    def _hidden(state: _State) -> fx.Node:
        assert state.hidden is not None
        return state.hidden

    def _run(self, lines: Sequence[Line], values: dict[str, fx.Node]) -> None:
        for line in lines:
            values[line.target] = self._sum(line, values)

    def _sum(
        self, line: Line, values: Mapping[str, fx.Node], own: str = "", branches: Sequence[fx.Node] = ()
    ) -> fx.Node:
        sources, weights, added = operands(line, values, own, branches)
        if not sources:
            return self._added(added, line.target)
        args = (tuple(sources), tuple(map(self._constant, weights)), *([tuple(added)] if added else []))
        return self.graph.create_node("call_function", mix, args, name=line.target)

    def _added(self, nodes: Sequence[fx.Node], name: str) -> fx.Node:
        result = nodes[0]
        for number, node in enumerate(nodes[1:], start=2):
            last = number == len(nodes)
            result = self.graph.create_node("call_function", operator.add, (result, node), name=name if last else None)
            result.meta["inline"] = not last
        return result

    def _constant(self, weight: Weight) -> Any:
        if not isinstance(weight, PerChannel):
            return weight
        if self.channels is None:
            with self.graph.inserting_after(self.root):
                box = self.graph.call_function(getattr, (self.root, "weights"))
            with self.graph.inserting_after(box):
                constants = self.graph.call_function(getattr, (box, "value"))
            with self.graph.inserting_after(constants):
                self.channels = self.graph.create_node(
                    "call_function", getattr, (constants, "channels"), name="channels"
                )
            box.meta["inline"] = constants.meta["inline"] = True
        row = self.graph.call_function(operator.getitem, (self.channels, weight.row))
        row.meta["inline"] = True
        return row
