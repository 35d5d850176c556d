"""rewire.graph: what is in it, against the matrices, against formulas written out, and against brute force."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from every_topology import EVERY, STATIC, kinds_first, mixed
from models import LinearNet, SeparatePreNorm, Stack, vectors
from torch import Tensor, nn
from torch.nn import functional as F

import rewire
from rewire.diagnostics.depth_graph import DepthGraph
from rewire.diagnostics.outline import outline_of
from rewire.patterns.tiny import tiny_model
from rewire.topologies.program import Line, Program, Term, Unit, branch_of


def separate(key: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    return mixed(Stack(SeparatePreNorm).to(dtype), key)


def shares(graph: DepthGraph, trunk: str, row: str, columns: Sequence[str]) -> list[float]:
    """How much of the columns goes into a row, not through other columns; without what stands beside the matrix."""
    found = dict.fromkeys(columns, 0.0)

    def walk(value: str, weight: float) -> None:
        if value in found:
            found[value] += weight
            return
        for source, _, data in graph.in_edges(f"{trunk}/{value}", data=True):
            walk(source.removeprefix(f"{trunk}/"), weight * (data["weight"] - data["fixed"]))

    for source, target, data in graph.in_edges(f"{trunk}/{row}", data=True):
        walk(source.removeprefix(f"{trunk}/"), data["weight"] - data["fixed"])
        assert target == f"{trunk}/{row}"
    if row in found and not graph.in_degree(f"{trunk}/{row}"):
        found[row] = 1.0
    return list(found.values())


@pytest.mark.parametrize("key", STATIC)
def test_a_static_topologys_graph_is_its_matrix(key: str) -> None:
    model = separate(key)
    (trunk, matrix), graph = next(iter(rewire.coefficients(model).items())), rewire.graph(model)
    program = outline_of(rewire.connections(model)[trunk]).program
    rows = [shares(graph, trunk, row, program.columns) for row in program.rows]
    torch.testing.assert_close(torch.tensor(rows), matrix, rtol=1e-5, atol=1e-6)
    assert {spread for *_, spread in graph.edges(data="spread")} == {0.0}


def test_nodes_know_where_they_are() -> None:
    graph = rewire.graph(separate("grn-v1"))
    one, other = graph.nodes["layers/f2"], rewire.graph(separate("hc-static")).nodes["layers/f4"]
    assert (one["path"], one["block"], one["kind"], one["at"]) == ("layers.1", "layers.1", "attention, ffn", 2)
    assert (other["path"], other["block"], other["kind"]) == ("layers.1.mlp", "layers.1", "ffn")
    assert graph.nodes["layers/x0"]["bytes"] == 4 * 32 and graph.edges["layers/f1", "layers/r3"]["bytes"] == 4 * 32
    assert graph.edges["layers/r2", "layers/f2"]["role"] == "read"
    assert graph.edges["layers/f1", "layers/r3"]["role"] == "mix"
    assert graph.outputs() == ["layers/r4"] and graph.units() == ["layers/f1", "layers/f2", "layers/f3"]
    assert nx.is_directed_acyclic_graph(graph)


# -- weights of tokens -------------------------------------------------------------------------------------------------


def linear_net(topology: str, **options: Any) -> tuple[LinearNet, nn.Module, Tensor]:
    """A plain net in float64, and the same rewired with weights that really mix."""
    net, x = LinearNet(4).double(), torch.randn(3, 7, 8, dtype=torch.float64)
    model = rewire.compile(net, topology, start="paper", validate=False, **options)
    with torch.no_grad():
        for parameter in rewire.connections(model)["blocks"].parameters():
            parameter.add_(torch.randn_like(parameter))
    return net, model, x


def branch(net: LinearNet, t: int, x: Tensor) -> Tensor:
    block = net.blocks[t - 1]
    return block.linear(block.norm(x))


def rms(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def muddformer(net: LinearNet, weights: Any, x: Tensor) -> tuple[Tensor, dict[tuple[str, str], Tensor]]:
    """Equations 5 and 6, and the weights A_ti [tokens]."""
    states, seen = [x, x + branch(net, 1, x)], dict[tuple[str, str], Tensor]()
    for t in range(2, len(net.blocks) + 2):
        w1, w2, a = (weights[t].w1.double(), weights[t].w2.double(), weights[t].static.double())
        shares = F.gelu(rms(states[-1]) @ w1) @ w2 + a[0]
        read = sum(shares[..., i, None] * state for i, state in enumerate(states))
        seen |= {(f"r{t}", f"x{i}"): shares[..., i] for i in range(t)}
        if t <= len(net.blocks):
            states.append(read + branch(net, t, read))
    return read, seen


def attnres(net: LinearNet, queries: Tensor, x: Tensor) -> tuple[Tensor, dict[tuple[str, str], Tensor]]:
    """``a_ti = softmax_i(w_t . rmsnorm(f_i))``"""
    increments, seen = [x, branch(net, 1, x)], dict[tuple[str, str], Tensor]()
    for t, query in enumerate(queries.double(), start=2):
        shares = torch.stack([rms(f) @ query for f in increments], -1).softmax(-1)
        read = sum(shares[..., i, None] * f for i, f in enumerate(increments))
        seen |= {(f"r{t}", branch_of(i) if i else "x0"): shares[..., i] for i in range(t)}
        if t <= len(net.blocks):
            increments.append(branch(net, t, read))
    return read, seen


@torch.no_grad()
@pytest.mark.parametrize("topology", ["muddformer", "attnres"])
def test_weights_of_tokens_are_those_of_the_formula(topology: str) -> None:
    net, model, x = linear_net(topology)
    connection = rewire.connections(model)["blocks"]
    if topology == "muddformer":
        output, seen = muddformer(net, connection.effective(), x)
    else:
        output, seen = attnres(net, connection.values()["queries"], x)
    torch.testing.assert_close(model(x), output)
    graph = rewire.graph(model, (x,))
    for (target, source), weights in seen.items():
        data = graph.edges[f"blocks/{source}", f"blocks/{target}"]
        assert data["weight"] == pytest.approx(float(weights.mean()), rel=1e-6, abs=1e-9)
        assert data["spread"] == pytest.approx(float(weights.std(correction=0)), rel=1e-6, abs=1e-7)
    assert len(seen) == sum(data["learned"] for *_, data in graph.edges(data=True))


@torch.no_grad()
def test_gates_of_tokens_are_those_of_the_formula() -> None:
    """hc-dynamic: ``A_m | A_r | B`` of the first unit, whose streams are all x."""
    _, model, x = linear_net("hc-dynamic", streams=3)
    values = {name: value.double() for name, value in rewire.connections(model)["blocks"].values().items()}
    scale = torch.cat([values["scale"][0, :1].expand(4), values["scale"][0, 1:]])
    gates = values["static"][0] + scale * (rms(x) @ values["dynamic"][0]).tanh().unsqueeze(-2)  # [.., n, 1 + n + 1]
    graph = rewire.graph(model, (x,))
    read = gates[..., 0].sum(-1)  # all three streams are x0
    data = graph.edges["blocks/x0", "blocks/r1"]
    assert (data["weight"], data["spread"]) == pytest.approx((float(read.mean()), float(read.std(correction=0))))
    for j in range(3):
        carried, written = gates[..., 1 + j].sum(-1), gates[..., j, 4]
        assert graph.edges["blocks/x0", f"blocks/s1_{j}"]["weight"] == pytest.approx(float(carried.mean()))
        assert graph.edges["blocks/f1", f"blocks/s1_{j}"]["weight"] == pytest.approx(float(written.mean()))


@pytest.mark.parametrize("key", kinds_first(EVERY))
def test_every_topology_has_a_graph(key: str) -> None:
    model = separate(key)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items() if "extra" not in name}
    graph = rewire.graph(model, (vectors(),))
    assert nx.is_directed_acyclic_graph(graph) and graph.trunks == ["layers"] and len(graph.outputs()) == 1
    assert set(graph.nodes) == set(rewire.graph(model).nodes) and set(graph.edges) == set(rewire.graph(model).edges)
    assert sum(graph.path_lengths("layers")) == pytest.approx(1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items() if name in before)


def test_a_formula_that_is_no_sum_is_refused() -> None:
    class Squashed(rewire.Dense):
        """Gates of each channel, by the channel itself."""

        def parameters(self, dims: rewire.Dims, start: Any) -> dict[str, Tensor]:
            return {"a": torch.ones(sum(self.sizes(dims)))}

        def weights(self, parameters: dict[str, Tensor], dims: rewire.Dims) -> Any:
            return self.of_reads(dims, parameters["a"])

        def static(self, weights: Any, t: int) -> Tensor:
            return weights[t]

        def mix(self, history: Any, weights: Any, t: int) -> Tensor:
            return sum(w * torch.sigmoid(x) * x for w, x in zip(weights[t], history.states, strict=True))

    model = rewire.compile(LinearNet(), Squashed(), start="paper", validate=False)
    with pytest.raises(rewire.UnsupportedTopology, match="is no weighted sum of its sources"):
        rewire.graph(model, (vectors(),))


# -- what is used ------------------------------------------------------------------------------------------------------


def some_program(depth: int, seed: int) -> Program:
    """Random sums, many of weight 0."""
    draw, values, units = random.Random(seed), ["x0"], list[Unit]()
    for t in range(1, depth + 1):
        before = (Line(f"r{t}", _terms(draw, values)),)
        values = [*values, f"r{t}"]
        read = draw.choice(values)
        after = tuple(
            Line(f"x{t}{part}", (*_terms(draw, values), Term(branch_of(t), draw.choice([0.0, 1.0])))) for part in "ab"
        )
        units.append(Unit(before, read, after))
        values = [*values, *(line.target for line in after)]
    return Program(tuple(units), (), values[-1])


def _terms(draw: random.Random, values: Sequence[str]) -> tuple[Term, ...]:
    chosen = draw.sample(list(values), min(len(values), 3))
    return tuple(Term(value, draw.choice([0.0, 0.0, draw.uniform(0.5, 2)])) for value in chosen)


def numbers(program: Program, without: str = "") -> dict[str, float]:
    """The values of a program on numbers, one of them set to 0."""
    values = {"x0": 0.7}

    def put(name: str, value: float) -> None:
        values[name] = 0.0 if name == without else value

    put("x0", 0.7)
    for t, unit in enumerate(program.units, start=1):
        for line in unit.before:
            put(line.target, sum(weight * values[source] for source, weight, *_ in line.terms))
        put(branch_of(t), 1.3 + values[unit.read] ** 2)
        for line in unit.after:
            put(line.target, sum(weight * values[source] for source, weight, *_ in line.terms))
    return values


@pytest.mark.parametrize("seed", range(12))
def test_what_is_unused_is_what_the_output_does_not_notice(seed: int) -> None:
    """By brute force: each value is set to 0, and the output looked at; of those that are 0 anyway it sees nothing."""
    program, graph = some_program(5, seed), DepthGraph()
    add(graph, program)
    unused = {node.removeprefix("it/") for node in graph.unused()}
    whole = numbers(program)
    noticed = {name for name in whole if numbers(program, name)[program.output] != whole[program.output]}
    assert noticed == {name for name, number in whole.items() if name not in unused and number != 0}
    assert 0 < len(unused) < len(whole)


def add(graph: DepthGraph, program: Program) -> None:
    """As `rewire.graph` does, without a model."""
    from rewire.diagnostics.connectivity import add_trunk
    from rewire.diagnostics.outline import Outline

    about = [{"path": "", "block": "", "kind": ""}] * (len(program.units) + 2)
    add_trunk(graph, "it", Outline(program, "static"), about, 4)


def test_units_that_nothing_uses() -> None:
    """GRN-v1 whose unit 2 goes nowhere: it runs, and both say so."""
    model = separate("grn-v1")
    b = torch.ones(10)
    b[[5, 8]] = 0  # of f2, in what unit 3 reads and in the output
    rewire.connections(model)["layers"].set_values({"b": b})
    _, report = rewire.freeze(model)
    assert rewire.graph(model).unused() == ["layers/r2", "layers/f2"]
    assert report.trunks[0].unused == (2,) and "Nothing uses units 2 of layers, which still run" in str(report)


def test_freezing_drops_what_the_graph_calls_unused() -> None:
    model = separate("denseformer")
    with torch.no_grad():  # the first two states go nowhere but into unit 1 and 2
        alpha = torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0])
        rewire.connections(model)["layers"].set_values({"alpha": alpha})
    graph = rewire.graph(model)
    frozen, report = rewire.freeze(model, example_inputs=(vectors(),))
    assert report.change == 0 and graph.unused() == []
    assert [len(cut.states) for cut in rewire.graph(frozen).cuts("layers")] == [1, 1, 1, 1]
    assert report.trunks[0].states == (4, 1)


# -- the meta device, and errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("topology", "edges"), [("ancre-ingoing", 8253), ("muddformer", 8505), ("laurel-pa", 378)])
def test_126_layers_on_meta(topology: str, edges: int) -> None:
    with torch.device("meta"):
        net = LinearNet(126)
    graph = rewire.graph(rewire.compile(net, topology, start="paper", validate=False))
    assert len(graph.units()) == 126 and {weight for *_, weight in graph.edges(data="weight")} == {None}
    assert graph.number_of_edges() == edges
    with pytest.raises(rewire.RewireError, match="on the meta device: its weights are not known"):
        graph.effective_depth("blocks")
    assert "126 units" not in str(graph.summary()) and "blocks.125" in str(graph.summary())


def test_errors() -> None:
    with pytest.raises(rewire.RewireError, match="LinearNet was not rewired: it has no depth connections"):
        rewire.graph(LinearNet())
    with torch.device("meta"):
        model = rewire.compile(LinearNet(), validate=False)
    with pytest.raises(rewire.RewireError, match="on the meta device: load its weights before it is run on a batch"):
        rewire.graph(model, (vectors(),))
    model = rewire.compile(LinearNet(), "muddformer", validate=False)
    with pytest.raises(rewire.BadExampleInputs, match="LinearNet does not run on the batch"):
        rewire.graph(model, (vectors(), 1))
    with pytest.raises(KeyError, match="there is no node 'f1': units are blocks/f1, "):
        rewire.graph(model).dependencies("f1")
    with pytest.raises(KeyError, match="no trunk 'stem': the graph has blocks"):
        rewire.graph(model).of("stem")


# -- what it tells -----------------------------------------------------------------------------------------------------


def test_paths_of_a_plain_network_are_binomial() -> None:
    graph = rewire.graph(rewire.compile(LinearNet(5), "residual", validate=False))
    assert graph.path_lengths("blocks") == pytest.approx([n / 32 for n in (1, 5, 10, 10, 5, 1)])
    assert graph.effective_depth("blocks") == pytest.approx(2.5)
    assert [cut.states for cut in graph.cuts("blocks")] == [(f"blocks/x{t}",) for t in range(6)]
    assert [cut.bytes for cut in graph.cuts("blocks")] == [32] * 6
    assert graph.dependencies("blocks/f3") == {"blocks/x0": 1, "blocks/f1": 1, "blocks/f2": 1}


def test_dependencies_are_total_weights() -> None:
    """``x_2 = f_2 + a x_0 + b x_1`` and ``x_1 = f_1 + x_0``: of x_0 there is a + b in x_2."""
    model = rewire.compile(LinearNet(3), "ancre-none", start="paper", validate=False)
    rewire.connections(model)["blocks"].set_values({"logits": torch.tensor([1.0, 0.5, 0.25, 0, 0, 2])})
    graph = rewire.graph(model)
    assert graph.dependencies("blocks/f3") == {"blocks/x0": 0.75, "blocks/f1": 0.25, "blocks/f2": 1}
    assert graph.dependencies("blocks/x3") == {"blocks/x0": 1.5, "blocks/f1": 0.5, "blocks/f2": 2, "blocks/f3": 1}
    assert graph.dependencies("blocks/x3", 0.6) == {"blocks/x0": 1.5, "blocks/f2": 2, "blocks/f3": 1}


def test_several_trunks_and_files(tmp_path: Path) -> None:
    model = rewire.compile(tiny_model("t5"), "denseformer", validate=False)
    graph = rewire.graph(model)
    assert graph.trunks == ["encoder.block", "decoder.block"]
    assert nx.number_weakly_connected_components(graph) == 2
    assert isinstance(graph.of("decoder.block"), DepthGraph) and len(graph.of("decoder.block").outputs()) == 1
    for suffix in ("graphml", "json", "dot"):
        graph.save(tmp_path / f"depth.{suffix}")
    again = nx.read_graphml(tmp_path / "depth.graphml")
    assert dict(again.edges) == {ends: dict(data) for ends, data in graph.edges.items()}
    saved = nx.node_link_graph(json.loads((tmp_path / "depth.json").read_text()), edges="edges")
    assert nx.utils.graphs_equal(saved, nx.DiGraph(graph))
    assert '"encoder.block/x0" -> "encoder.block/r2"' in (tmp_path / "depth.dot").read_text()
    with pytest.raises(ValueError, match=r"has to end in \.graphml, \.dot or \.json"):
        graph.save("depth.png")
    assert str(graph.summary()).count("effective depth") == 2


def test_names_with_quotes_in_dot(tmp_path: Path) -> None:
    graph = DepthGraph()
    graph.add_node('a"\\', trunk="a", value='x"', role="state", path="", at=0, output=True)
    graph.save(tmp_path / "it.dot")
    assert '"a\\"\\\\" [label="x\\"", shape=ellipse];' in (tmp_path / "it.dot").read_text()
