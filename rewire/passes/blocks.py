"""Pass: put the blocks of the trunks behind gates, and give them forwards that go through the stream."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from torch import fx

from rewire.connection import Connection, Gate
from rewire.errors import TraceError
from rewire.passes.attention import Inner, rewrite_inner
from rewire.passes.fuse import NORMS, fuse_norms
from rewire.passes.inline import inline
from rewire.passes.install import install
from rewire.passes.projections import Projections
from rewire.passes.residuals import Chain
from rewire.passes.rewrite import rewrite_chain
from rewire.passes.trunks import Block, LinkedTrunk
from rewire.stream import Layout
from rewire.tracing import print_forward
from rewire.tracing.printer import body_of, globals_for


@dataclasses.dataclass
class BlockRewrite:
    """A block, and the chains of it that go through a stream.

    Attributes:
        block: the block.
        gates: for each such chain its gate.
        layouts: and the layout of its trunk.
        places: for each of their residual adds, as (chain, number of the add), its positions in the trunk.
        projections: for residual adds, as (chain, number of the add), whose attention reads q, k and v apart.
    """

    block: Block
    gates: dict[int, Gate] = dataclasses.field(default_factory=dict)
    layouts: dict[int, Layout] = dataclasses.field(default_factory=dict)
    places: dict[tuple[int, int], list[int]] = dataclasses.field(default_factory=dict)
    projections: dict[tuple[int, int], Projections] = dataclasses.field(default_factory=dict)

    def apply(self) -> None:
        """Rewrite the graphs of all paths, print them as one forward, and install it."""
        traced = self.block.traced
        graphs: list[tuple[fx.Graph | None, str]] = []
        inner: dict[Inner, Projections] = {}
        norms: dict[str, str | None] = {}
        for path, found in zip(traced.paths, self.block.found, strict=True):
            graph, error = path.graph, path.error
            if graph is not None and found is not None:
                for number in self.gates:
                    chain = _same_chain(self.block.chains[number], found.chains)
                    if chain is None:
                        graph, error = None, f"on this path the residual stream of '{self.block.path}' does not run"
                        break
                    projections = {add: p for (of, add), p in self.projections.items() if of == number}
                    name = _free_name(graph, number)
                    inner |= rewrite_chain(graph, chain, _gate_name(number), name, projections)
                    places = [self.places.get((number, add), ()) for add in range(len(chain.adds))]
                    inline(graph, name, places, self.layouts[number])
                if graph is not None and all(layout.channel_dim == -1 for layout in self.layouts.values()):
                    norms |= fuse_norms(graph, traced.module)
            graphs.append((graph, error))
        table = globals_for(traced.signature, [graph for graph, _ in graphs if graph is not None])
        try:
            bodies = [
                body_of(graph, path.tests, path.nones, table, error)
                for path, (graph, error) in zip(traced.paths, graphs, strict=True)
            ]
            text = print_forward(traced.signature, traced.tested, bodies, table)
            install(traced.module, text, table)
        except TraceError as error:
            raise TraceError(f"'{self.block.path}' cannot be rewritten: {error}.") from error
        for number, gate in self.gates.items():
            traced.module.__dict__[_gate_name(number)] = gate
        traced.module.__dict__[NORMS] = norms
        for child, projections_of in inner.items():
            rewrite_inner(child, projections_of)


def _same_chain(chain: Chain, chains: Collection[Chain]) -> Chain | None:
    """The chain on another path that enters and leaves the forward as ``chain`` does."""
    same = [
        other
        for other in chains
        if (other.opens_outside, other.closes_outside, other.element, str(other.entry.target))
        == (chain.opens_outside, chain.closes_outside, chain.element, str(chain.entry.target))
    ]
    return same[0] if len(same) == 1 else None


def _gate_name(number: int) -> str:
    return "_depth" if number == 0 else f"_depth{number}"


def _free_name(graph: fx.Graph, number: int) -> str:
    taken = {str(node.target) for node in graph.nodes if node.op == "placeholder"} | {n.name for n in graph.nodes}
    name = "stream" if number == 0 else f"stream_{number}"
    while name in taken:
        name += "_"
    return name


def add_gates(linked: LinkedTrunk, connection: Connection, rewrites: dict[int, BlockRewrite]) -> None:
    """One gate for each chain of each block of a trunk, collected in ``rewrites`` by block."""
    trunk = linked.trunk.name
    for position, step in enumerate(linked.steps):
        rewrite = rewrites.setdefault(id(step.block), BlockRewrite(step.block))
        rewrite.places.setdefault((step.chain, step.add), []).append(position)
        before = _adds_before(step.block, step.chain, linked, position)
        if before is None:
            continue
        gate = rewrite.gates.setdefault(step.chain, Gate(step.block.path, None, trunk, ()))
        gate.positions = (*gate.positions, before)
        rewrite.layouts[step.chain] = connection.layout
        if before == 0:
            gate.connection = connection


def _adds_before(block: Block, chain: int, linked: LinkedTrunk, position: int) -> int | None:
    """Position of the stream when ``block`` is entered, if the add at ``position`` is the chain's first one."""
    step = linked.steps[position]
    if step.add != 0:
        return None
    carried = 0
    for link in block.chains[chain].links:
        if link in block.chains[chain].adds:
            break
        child = block.traced.module.get_submodule(str(link.node.target))
        inside = {id(module) for module in child.modules()}
        while carried < position and id(linked.steps[position - carried - 1].block.traced.module) in inside:
            carried += 1
    return position - carried
