"""The depth graph of a model: what `rewire.graph` returns."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import networkx as nx
import torch
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from rewire.console import Shown, table
from rewire.errors import RewireError
from rewire.files import to_json, whole
from rewire.topologies.program import reaching


@dataclasses.dataclass(frozen=True)
class Cut:
    """The values that cross a cut after unit t: what a pipeline that is cut there has to send.

    Attributes:
        after: t, from 0 (the trunk's input) to T.
        states: nodes whose values later units read.
        bytes: of these values for one token; None if the width is unknown.
    """

    after: int
    states: tuple[str, ...]
    bytes: int | None


class DepthGraph(nx.DiGraph):
    """States and units of a model's trunks as nodes; reads, writes and mixes as weighted edges.

    A node is ``"<trunk>/<value>"``: ``x0`` the trunk's input, ``x1, ..`` states, ``s3_0`` stream 0 after unit 3, ``r5``
    the read of unit 5 if it is a mix, ``f5`` the branch output of unit 5. Trunks are not connected with each other.

    - Nodes have ``trunk``, ``value``, ``role`` ("state", "read" or "unit"), ``at`` (the unit t that makes it), ``path``
      and ``block`` (of the unit, or of the unit that makes the value), ``bytes`` (of one token); units also ``kind``
      ("attention", "ffn", ..). The trunk's output has ``output=True``.
    - Edges have ``weight`` (the mean over channels and ways, and over the batch for weights per token), ``spread``
      (their standard deviation over tokens and ways; 0 for constant ones), ``role`` ("read": a unit reads it, "write":
      a unit made it, "mix": between values), ``learned``, ``fixed`` (the part of the weight that is a shortcut which a
      topology keeps beside its learned weights) and ``bytes`` (one token of the value that is read).
      With an ablation also ``without`` and ``plain``: how much the loss rises, see `rewire.ablate`.

    Unknown values (weights on the meta device, bytes of an unknown width, the spread without a batch) are None.
    """

    @property
    def trunks(self) -> list[str]:
        """Names of the trunks."""
        return list(dict.fromkeys(trunk for _, trunk in self.nodes(data="trunk")))

    def of(self, trunk: str) -> DepthGraph:
        """The part of one trunk.

        Raises:
            KeyError: there is no trunk of this name.
        """
        nodes = [node for node, name in self.nodes(data="trunk") if name == trunk]
        if not nodes:
            raise KeyError(f"there is no trunk '{trunk}': the graph has {', '.join(self.trunks)}.")
        return self.subgraph(nodes).copy()

    def units(self) -> list[str]:
        """The nodes that are units, in order."""
        return [node for node, role in self.nodes(data="role") if role == "unit"]

    def outputs(self) -> list[str]:
        """The nodes that are outputs of trunks."""
        return [node for node, output in self.nodes(data="output") if output]

    def unused(self, threshold: float = 0.0) -> list[str]:
        """States, reads and units without a path to a trunk's output.

        Args:
            threshold: learned edges with a weight of smaller magnitude are ignored, and all edges of weight 0.
                (`rewire.freeze` drops the learned ones, too. It keeps what unused units read: their branches run.)
        """
        used = reaching(self._over(threshold), self.outputs())
        return [node for node in self if node not in used]

    def dependencies(self, unit: str, threshold: float = 0.0) -> dict[str, float]:
        """The total weights of the trunk's input and of each earlier unit in what a unit, or an output, reads.

        Branches are not looked through: weights are those of ``r_t = sum_i w_i f_i`` with ``f_0 = x_0``, added up over
        all paths from ``f_i`` to ``r_t``. Norms between them (post-norm blocks) count as 1.

        Args:
            unit: a node.
            threshold: weights of no larger magnitude are left out.

        Raises:
            KeyError: there is no such node.
            RewireError: the weights are not known.
        """
        self._check_known()
        if unit not in self:
            raise KeyError(f"there is no node '{unit}': units are {', '.join(self.units())}.")
        totals = {unit: 1.0}
        for node in self._backwards(unit):
            if node != unit and self._is_source(node):
                continue
            for source, _, weight in self.in_edges(node, data="weight"):
                totals[source] = totals.get(source, 0.0) + totals.get(node, 0.0) * weight
        found = {node: total for node, total in totals.items() if node != unit and self._is_source(node)}
        return {node: found[node] for node in self if abs(found.get(node, 0.0)) > threshold}

    def path_lengths(self, trunk: str) -> list[float]:
        """The shares of a trunk's output that come by paths through 0, 1, .. T units; they add up to 1.

        A path counts with the product of the magnitudes of its weights, as if all branches had the same gain. In a
        plain residual network all paths count alike, and lengths are binomial (arXiv 1605.06431).

        Raises:
            RewireError: the weights are not known.
        """
        part = self.of(trunk)
        part._check_known()
        depth = len(part.units())
        logs: dict[str, torch.Tensor] = {}  # by node and length, sums over paths; logarithms do not overflow
        for node in nx.topological_sort(part):
            given = [(source, abs(weight)) for source, _, weight in part.in_edges(node, data="weight") if weight]
            lengths = torch.full((depth + 1,), -torch.inf, dtype=torch.float64)
            if part.nodes[node]["at"] == 0:
                lengths[0] = 0.0
            elif given:
                weights = torch.tensor([weight for _, weight in given], dtype=torch.float64).log()
                lengths = (torch.stack([logs[source] for source, _ in given]) + weights[:, None]).logsumexp(0)
            logs[node] = lengths.roll(1) if part.nodes[node]["role"] == "unit" else lengths
        (output,) = part.outputs()
        return logs[output].softmax(0).nan_to_num(0.0).tolist()

    def effective_depth(self, trunk: str) -> float:
        """The mean of `path_lengths`: units on a path from the trunk's input to its output.

        `rewire.diagnose` has another notion, which looks at how much blocks change states, and not at weights.
        """
        return sum(length * share for length, share in enumerate(self.path_lengths(trunk)))

    def cuts(self, trunk: str) -> list[Cut]:
        """For each place between units, the values that cross it: cut a pipeline where they have fewest bytes.

        If a single state crosses, all that later units read of earlier ones comes through it.
        """
        part = self.of(trunk)
        units, places = part.units(), dict(part.nodes(data="at"))
        crossing: list[list[str]] = [[] for _ in range(len(units) + 1)]
        used = reaching(part, [*part.outputs(), *units])
        for node, data in part.nodes(data=True):
            last = max((places[to] for to in part.adj[node] if to in used), default=0)
            for t in range(data["at"], len(units) + 1 if data["output"] else last):
                crossing[t].append(node)
        sizes = dict(part.nodes(data="bytes"))
        return [
            Cut(t, tuple(states), None if None in sizes.values() else sum(sizes[state] for state in states))
            for t, states in enumerate(crossing)
        ]

    def _over(self, threshold: float) -> nx.DiGraph:
        """The graph without learned edges of a smaller weight, and without edges of weight 0."""

        def strong(source: str, target: str) -> bool:
            data = self.edges[source, target]
            weight, fixed = data["weight"], data["fixed"]
            return weight is None or (weight != 0 and (not data["learned"] or fixed or abs(weight) >= threshold))

        return nx.subgraph_view(self, filter_edge=strong)

    def _backwards(self, node: str) -> Iterable[str]:
        """A node and all nodes before it, last first."""
        return reversed([*nx.topological_sort(self.subgraph(reaching(self, [node])))])

    def _is_source(self, node: str) -> bool:
        data = self.nodes[node]
        return bool(data["role"] == "unit" or data["at"] == 0)

    def _check_known(self) -> None:
        if any(weight is None for *_, weight in self.edges(data="weight")):
            raise RewireError("the model was on the meta device: its weights are not known.")

    def summary(self) -> Summary:
        """What printing shows: the dependencies of each unit, and what is unused in each trunk."""
        return Summary(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the graph; the suffix of the path selects the format: .graphml, .dot or .json (node-link data).

        Raises:
            ValueError: the suffix is none of these.
        """
        suffix = Path(path).suffix.lower()
        if suffix not in (".graphml", ".dot", ".json"):
            raise ValueError(f"'{path}' has to end in .graphml, .dot or .json.")
        with whole(path) as file:
            if suffix == ".graphml":
                nx.write_graphml(self._known(), file)
            else:
                text = self._dot() if suffix == ".dot" else to_json(nx.node_link_data(self, edges="edges"))
                file.write_text(text, encoding="utf-8")

    def _known(self) -> nx.DiGraph:
        """The graph without attributes that are None, which GraphML cannot hold."""
        graph = nx.DiGraph()
        graph.add_nodes_from((node, _without_none(data)) for node, data in self.nodes(data=True))
        graph.add_edges_from((a, b, _without_none(data)) for a, b, data in self.edges(data=True))
        return graph

    def _dot(self) -> str:
        shapes = {"unit": "box", "read": "point", "state": "ellipse"}
        lines = ["digraph {", "  rankdir=LR;"]
        for node, data in self.nodes(data=True):
            label = data["path"] if data["role"] == "unit" else data["value"]
            lines.append(f"  {_quoted(node)} [label={_quoted(label)}, shape={shapes[data['role']]}];")
        for source, target, data in self.edges(data=True):
            weight = data["weight"]
            label = "" if weight is None or weight == 1 else f"{weight:.3g}"
            lines.append(f"  {_quoted(source)} -> {_quoted(target)} [label={_quoted(label)}];")
        return "\n".join([*lines, "}", ""])


class Summary(Shown):
    """A depth graph as tables."""

    def __init__(self, graph: DepthGraph) -> None:
        self.graph = graph

    def shown(self) -> Iterator[RenderableType]:
        for trunk in self.graph.trunks:
            yield from self._trunk(self.graph.of(trunk))

    def _trunk(self, part: DepthGraph) -> Iterable[Any]:
        (trunk,), unused, cuts = part.trunks, part.unused(), part.cuts(part.trunks[0])
        known = all(weight is not None for *_, weight in part.edges(data="weight"))
        depth = f", effective depth {part.effective_depth(trunk):.1f} of {len(part.units())} units" if known else ""
        held = max(len(cut.states) for cut in cuts)
        yield Text(
            f"{trunk}: {len(part)} nodes, {part.number_of_edges()} edges{depth}; {held} states cross between units, at "
            "most",
            style="bold",
            overflow="fold",
        )
        yield self._table(part, known, cuts)
        if unused:
            yield Text(f"No path to the output from {', '.join(part.nodes[node]['value'] for node in unused)}")

    @staticmethod
    def _table(part: DepthGraph, known: bool, cuts: list[Cut]) -> Table:
        rows = []
        for unit, cut in zip([*part.units(), *part.outputs()], [*cuts[1:], None], strict=True):
            data = part.nodes[unit]
            seen = part.dependencies(unit) if known else {}
            largest = sorted(seen.items(), key=lambda item: -abs(item[1]))[:_SHOWN]
            text = ", ".join(f"{part.nodes[node]['value']} {weight:.2g}" for node, weight in largest)
            more = f" and {len(seen) - _SHOWN} more" if len(seen) > _SHOWN else ""
            is_unit = data["role"] == "unit"
            held = "" if cut is None else _told([part.nodes[node]["value"] for node in cut.states])
            named = (data["at"], data["path"], data["kind"]) if is_unit else ("", "output", "")
            rows.append((*named, text + more, held))
        return table(("unit", "path", "kind", "reads, largest weights first", "held after it"), rows)


_SHOWN = 4  # dependencies of a unit, in a printed table


def _told(values: list[str]) -> str:
    """The first and the last values as text."""
    return ", ".join(values) if len(values) <= _SHOWN else f"{values[0]} .. {values[-1]}: {len(values)}"


def _without_none(data: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in data.items() if value is not None}


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
