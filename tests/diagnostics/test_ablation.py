"""rewire.ablate, against formulas written out and against models whose blocks are switched off by hooks."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from every_topology import EVERY, kinds_first, mixed
from models import LinearNet, PostNorm, SeparatePreNorm, Stack, token_ids, vectors
from scipy import stats
from slow_cases import one_in
from torch import Tensor, nn
from torch.nn import functional as F

import rewire
from rewire.diagnostics.effects import spearman
from rewire.patterns.tiny import tiny_model

Oracle = Callable[[dict[tuple[str, str], float], set[int]], Tensor]


def squares(model: Any, batch: Any) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def batch(width: int = 8, seed: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, 3, 7, width, dtype=torch.float64, generator=generator)
    return x, y


def shaken(topology: str, **options: Any) -> tuple[LinearNet, nn.Module]:
    """A plain net in float64, and the same rewired with weights that really mix."""
    net = LinearNet(4).double()
    model = rewire.compile(net, topology, start="paper", validate=False, **options)
    with torch.no_grad():
        for name, parameter in rewire.connections(model)["blocks"].named_parameters():
            parameter.add_((0.3 if name != "w2" else 2.0) * torch.randn_like(parameter))
    return net, model


def rms(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def oracle(topology: str, net: LinearNet, model: nn.Module) -> Oracle:
    """The output by the topology's formula, some edges set to other weights, some units left out."""
    connection, (x, _) = rewire.connections(model)["blocks"], batch()
    weights, depth = connection.effective(), len(net.blocks)

    def mix(row: Any, names: list[str], sources: list[Tensor], into: str, new: dict[tuple[str, str], float]) -> Tensor:
        shares = [new.get((into, name), w) for name, w in zip(names, row, strict=True)]
        return sum(w * source for w, source in zip(shares, sources, strict=True))

    def output(new: dict[tuple[str, str], float], off: set[int]) -> Tensor:
        def f(t: int, read: Tensor) -> Tensor:
            block = net.blocks[t - 1]
            return block.linear(block.norm(read)) * (t not in off)

        if topology.startswith("ancre"):  # x_t = f_t + sum_i p_ti x_i
            states = [x]
            for t in range(1, depth + 1):
                row, names = connection.matrix()[t - 1, :t].double(), [f"x{i}" for i in range(t)]
                states.append(f(t, states[-1]) + mix(row, names, states, f"x{t}", new))
            return states[-1]
        if topology == "muddformer":  # r_t = sum_i A_ti x_i, x_t = r_t + f_t
            states = [x, x + f(1, x)]
            for t in range(2, depth + 2):
                w1, w2, a = (part.double() for part in (weights[t].w1, weights[t].w2, weights[t].static))
                row = (F.gelu(rms(states[-1]) @ w1) @ w2 + a[0]).unsqueeze(-2).unbind(-1)
                read = mix(row, [f"x{i}" for i in range(t)], states, f"r{t}", new)
                if t > depth:
                    return read
                states.append(read + f(t, read))
        increments, queries = [x, f(1, x)], connection.values()["queries"].double()  # attnres
        for t in range(2, depth + 2):
            shares = torch.stack([rms(source) @ queries[t - 2] for source in increments], -1).softmax(-1)
            names = ["x0", *(f"f{i}" for i in range(1, t))]
            read = mix(shares.unsqueeze(-2).unbind(-1), names, increments, f"r{t}", new)
            if t > depth:
                return read
            increments.append(f(t, read))
        raise AssertionError

    return output


@pytest.mark.each_once
@torch.no_grad()
@pytest.mark.parametrize("at_once", [1, 4])
@pytest.mark.parametrize("topology", ["ancre-ingoing", "muddformer", "attnres"])
def test_each_number_is_that_of_the_formula(topology: str, at_once: int) -> None:
    net, model = shaken(topology)
    compute, (x, y) = oracle(topology, net, model), batch()
    found = rewire.ablate(model, [(x, y)], loss=squares, at_once=at_once)
    assert found.in_turn == ""

    def rise(new: dict[tuple[str, str], float], off: set[int]) -> Any:
        return pytest.approx(float((compute(new, off) - y).square().mean()) - found.loss, rel=1e-6, abs=1e-9)

    assert found.loss == pytest.approx(float((compute({}, set()) - y).square().mean()), rel=1e-9)
    assert len(found.units) == 4
    for t, unit in enumerate(found.units, start=1):
        assert (unit.source, unit.path, unit.plain) == (f"f{t}", f"blocks.{t - 1}.linear", None)
        assert unit.without == rise({}, {t})
    edges = [(edge.destination, edge.source) for edge in found.edges]
    assert len(edges) == (10 if topology == "ancre-ingoing" else 14)

    def plain(ends: tuple[str, str]) -> float:
        into, source = int(ends[0][1:]), int(ends[1][1:])
        return 1.0 if topology == "attnres" else float(source == into - 1)

    for edge, ends in zip(found.edges, edges, strict=True):
        assert edge.without == rise({ends: 0.0}, set())
        assert edge.plain == rise({ends: plain(ends)}, set())
    assert found.sources
    for source in found.sources:
        out = [ends for ends in edges if ends[1] == source.source]
        assert source.without == rise(dict.fromkeys(out, 0.0), set())
        assert source.plain == rise({ends: plain(ends) for ends in out}, set())


def without(model: nn.Module, paths: list[str], data: tuple[Tensor, Tensor]) -> float:
    """The loss of a copy whose modules at these paths return zeros."""
    other = copy.deepcopy(model)
    for path in paths:
        other.get_submodule(path).register_forward_hook(lambda module, args, output: torch.zeros_like(output))
    return float(squares(other, data))


@torch.no_grad()
@pytest.mark.parametrize("key", one_in(2, kinds_first(EVERY)))
def test_units_of_every_topology_by_hooks(key: str) -> None:
    data = vectors(), torch.randn(2, 9, 5)
    model = mixed(Stack(SeparatePreNorm), key)
    found = rewire.ablate(model, [data], loss=squares)
    assert found.in_turn == "" and found.loss == pytest.approx(float(squares(model, data)), rel=1e-5)
    assert len(found.units) == rewire.connections(model)["layers"].layout.dims.depth
    for unit in found.units:
        branches = [unit.path] if unit.path.endswith(("attn", "mlp")) else [f"{unit.path}.attn", f"{unit.path}.mlp"]
        expected = without(model, branches, data) - float(squares(model, data))
        assert unit.without == pytest.approx(expected, rel=1e-3, abs=3e-6)
    assert bool(found.edges) != bool(found.refused)


@torch.no_grad()
def test_gates_that_are_set_where_they_are_used() -> None:
    """hc-dynamic whose weights do not depend on the token after all is hc-static, which is a program."""
    _, static = shaken("hc-static")
    torch.manual_seed(0)  # the same net
    _, dynamic = shaken("hc-dynamic")
    values = rewire.connections(static)["blocks"].values()
    connection = rewire.connections(dynamic)["blocks"]
    connection.set_values({"static": values["static"], "dynamic": torch.zeros_like(connection.values()["dynamic"])})
    one, other = (rewire.ablate(model, [batch()], loss=squares) for model in (static, dynamic))
    known, found = ({(e.what, e.source, e.destination): e for e in each.effects} for each in (one, other))
    # The output, their mean, is a sum of the program's; a topology with weights per token has no weights there.
    assert {source for _, source, _ in known.keys() - found.keys()} == {f"s4_{j}" for j in range(4)}
    for key, effect in found.items():
        assert (effect.without, effect.plain) == pytest.approx((known[key].without, known[key].plain), abs=1e-9)


@torch.no_grad()
def test_queries_keys_and_values_lose_an_edge_together() -> None:
    """DCA written out: ``r = sum_i (b_i + relu(w . f_i)) * f_i`` three times, of which the queries' is the residual."""
    data = torch.randn(2, 5, 32, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    net = nn.Sequential(SeparatePreNorm(), SeparatePreNorm()).double()
    model = rewire.compile(net, "dca", validate=False)
    for parameter in rewire.connections(model)["Sequential"].parameters():
        parameter.add_(0.5 * torch.randn_like(parameter))
    topology, weights = (c := rewire.connections(model)["Sequential"]).layout.topology, c.effective()
    queries = c.values()["w"].double().split([3, 3, 1])
    assert topology.registered_name == "dca"

    def loss(without: tuple[int, int] | None) -> float:
        sources = [data[0]]
        for t, block in enumerate([*net, None], start=1):
            ways = []
            for b, w in zip(weights.rows[t - 1].double(), queries[t - 1], strict=True):
                factors = [b_i + (f @ w).clamp(min=0).unsqueeze(-1) for b_i, f in zip(b, sources, strict=True)]
                factors = [0 * g if without == (t, i) else g for i, g in enumerate(factors)]
                ways.append(sum(g * f for g, f in zip(factors, sources, strict=True)))
            if block is None:
                return float(ways[0].square().mean())
            q, k, v = map(block.ln_1, ways)
            attn = block.attn
            attended = attn.o_proj(F.scaled_dot_product_attention(attn.q_proj(q), attn.k_proj(k), attn.v_proj(v)))
            sources.append(attended + block.mlp(block.ln_2(ways[0] + attended)))
        raise AssertionError

    found = rewire.ablate(model, [data], loss=squares, of=["edge"])
    assert found.loss == pytest.approx(loss(None), rel=1e-9) and len(found.edges) == 6
    for edge in found.edges:
        ends = int(edge.destination[1:]), int(edge.source[1:])
        assert edge.without == pytest.approx(loss(ends) - found.loss, rel=1e-6, abs=1e-9)


@torch.no_grad()
def test_post_norm() -> None:
    data = vectors(), torch.randn(2, 9, 5)
    model = mixed(Stack(PostNorm), "ancre-ingoing", granularity="sublayer")
    found = rewire.ablate(model, [data], loss=squares)
    assert found.loss == pytest.approx(float(squares(model, data)), rel=1e-5)
    expected = [without(model, [unit.path], data) - found.loss for unit in found.units]
    assert [unit.without for unit in found.units] == pytest.approx(expected, rel=1e-3, abs=1e-6)


@torch.no_grad()
def test_a_shortcut_that_is_kept_stays() -> None:
    """``x_t = x_{t-1} + f_t + sum p x``: without an edge there is still the shortcut beside it."""
    net, model = shaken("ancre-ingoing", cascade="keep")
    (x, y), found = batch(), rewire.ablate(model, [batch()], loss=squares, of=["edge"])
    states, matrix = [x], rewire.coefficients(model)["blocks"].double()
    matrix[3, 3] = 0
    for t, block in enumerate(net.blocks, start=1):
        added = block.linear(block.norm(states[-1])) + sum(p * s for p, s in zip(matrix[t - 1], states, strict=False))
        states.append(states[-1] + added)
    (edge,) = (edge for edge in found.edges if (edge.source, edge.destination) == ("x3", "x4"))
    assert edge.without == pytest.approx(float((states[-1] - y).square().mean()) - found.loss, rel=1e-6, abs=1e-9)
    assert rewire.graph(model).edges["blocks/x3", "blocks/x4"]["weight"] == pytest.approx(1 + edge.weight)


def test_the_models_own_loss_and_several_batches() -> None:
    model = mixed(tiny_model("llama"), "ancre-ingoing")
    ids = [token_ids(2, 9, 97), token_ids(3, 5, 97)]
    batches = [{"input_ids": one, "labels": one} for one in ids]
    found = rewire.ablate(model, batches)
    with torch.no_grad():
        assert found.loss == pytest.approx(sum(float(model.eval()(**one).loss) for one in batches) / 2, rel=1e-6)
    assert found.in_turn == "" and [unit.path for unit in found.units] == [f"model.layers.{n}" for n in range(3)]


@torch.no_grad()
def test_bfloat16() -> None:
    """Weights are those of float32: what the states are rounded to does not round them."""
    batch = {"input_ids": token_ids(2, 9, 97), "labels": token_ids(2, 9, 97)}
    model = mixed(tiny_model("llama"), "muddformer").eval()
    low = copy.deepcopy(model).bfloat16()
    precise, graph = rewire.graph(model, batch), rewire.graph(low, batch)
    assert graph.nodes["model.layers/x0"]["bytes"] == precise.nodes["model.layers/x0"]["bytes"] / 2
    for ends, data in precise.edges.items():
        assert graph.edges[ends]["weight"] == pytest.approx(data["weight"], rel=0.02, abs=2e-3)
    found = rewire.ablate(low, [batch], at_most=2)
    assert found.loss == pytest.approx(float(low(**batch).loss), rel=1e-2) and len(found.edges) == 2


def test_it_leaves_the_model_alone() -> None:
    model = mixed(Stack(SeparatePreNorm), "muddformer").train()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    state, layout = torch.get_rng_state(), rewire.connections(model)["layers"].layout
    rewire.ablate(model, [(vectors(), torch.zeros(2, 9, 5))], loss=squares)
    assert torch.equal(torch.get_rng_state(), state) and model.training
    assert rewire.connections(model)["layers"].layout is layout
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_budgets() -> None:
    _, model = shaken("denseformer")
    whole = rewire.ablate(model, [batch()], loss=squares)
    some = rewire.ablate(model, [batch()], loss=squares, at_most=3)
    assert (len(whole.effects), whole.asked) == (4 + 5 + 14, 4 + 5 + 14)
    assert len(some.edges) == 3 and len(some.units) == 4 and some.asked == whole.asked
    known = {(edge.source, edge.destination): edge.without for edge in whole.edges}
    assert all(edge.without == pytest.approx(known[edge.source, edge.destination], abs=1e-9) for edge in some.edges)
    assert rewire.ablate(model, [batch()], loss=squares, seconds=0.0).effects == ()
    assert "measured" not in str(whole) and f"{4 + 5 + 3} of 23 measured" in str(some)


def test_in_turn_where_vmap_does_not_follow() -> None:
    """A loss that looks at a number: the same effects, and the reason is told."""
    _, model = shaken("ancre-none")

    def looks(model: Any, data: Any) -> Tensor:
        value = squares(model, data)
        return value if value > 0 else -value

    found, other = (rewire.ablate(model, [batch()], loss=loss) for loss in (looks, squares))
    assert "vmap" in found.in_turn and other.in_turn == ""
    assert [e.without for e in found.effects] == pytest.approx([e.without for e in other.effects], abs=1e-9)
    assert "ran in turn, not at once" in str(found)


def test_what_is_told() -> None:
    _, model = shaken("ancre-ingoing")
    found, graph = rewire.ablate(model, [batch()], loss=squares), rewire.graph(model)
    found.onto(graph)
    for edge in found.edges:
        data = graph.edges[f"blocks/{edge.source}", f"blocks/{edge.destination}"]
        assert (data["without"], data["plain"]) == (edge.without, edge.plain)
        assert data["weight"] == pytest.approx(edge.weight)
    assert graph.nodes["blocks/f2"]["without"] == found.units[1].without
    assert dict(rewire.graph(model, ablation=found).edges) == dict(graph.edges)
    plain = json.loads(found.to_json())
    assert plain["loss"] == found.loss and len(plain["effects"]) == len(found.effects)
    assert plain["correlation"] == found.correlation() == found.correlation("blocks")
    rises = [edge.without for edge in found.strongest(4)]
    assert rises == sorted((edge.without for edge in found.edges), reverse=True)[:4]
    assert found.strongest(1, "weight")[0].weight == max(abs(edge.weight) for edge in found.edges)
    assert f"{found.loss:.4f}" in str(found) and "Rank correlation" in str(found)
    with pytest.raises(ValueError, match="k=99: 10 edges were measured"):
        found.strongest(99)


@torch.no_grad()
def test_what_is_no_weight_is_no_edge() -> None:
    """The output of Delta Attention Residuals is the plain stream, and its first read the input."""
    _, model = shaken("attnres", additive=True)
    found = rewire.ablate(model, [batch()], loss=squares, of=["edge"])
    assert {edge.destination for edge in found.edges} == {"r2", "r3", "r4"}
    assert all(edge.without != 0 for edge in found.edges)
    learned = {ends[1] for *ends, learned in rewire.graph(model, batch()[:1]).edges(data="learned") if learned}
    assert learned == {"blocks/r2", "blocks/r3", "blocks/r4"}


@torch.no_grad()
@pytest.mark.parametrize("options", [{"delayed": True, "output": "learned"}, {"entry_scales": True}], ids=str)
def test_streams_that_wait_or_start_apart_have_no_edges(options: dict[str, Any]) -> None:
    """Their sums are not those of a unit's own gates: units alone can be left out."""
    _, model = shaken("mhc", **options)
    found = rewire.ablate(model, [batch()], loss=squares)
    assert not found.edges and found.units and "does more than add up states" in found.refused["blocks"]
    matrix = rewire.coefficients(model)["blocks"]
    weight = rewire.graph(model).edges["blocks/f1", "blocks/r2"]["weight"]
    assert weight == pytest.approx(float(matrix[1, 1]), rel=1e-5)


def test_spearman() -> None:
    a, b = [0.3, 0.1, 0.1, 2.0, -1.0, 0.3], [1.0, 5.0, 2.0, 2.0, 0.0, 3.0]
    assert spearman(a, b) == pytest.approx(stats.spearmanr(a, b).statistic)
    assert spearman([1, 2], [1, 2]) is None and spearman([1, 1, 1], [1, 2, 3]) is None


def test_errors() -> None:
    net, model = shaken("ancre-ingoing")
    with pytest.raises(rewire.RewireError, match="LinearNet was not rewired: there is nothing to ablate"):
        rewire.ablate(net, [batch()], loss=squares)
    with pytest.raises(rewire.BadExampleInputs, match="there are no batches"):
        rewire.ablate(model, [], loss=squares)
    with pytest.raises(rewire.RewireError, match=r"is a tensor of shape \[3, 7, 8\]"):
        rewire.ablate(model, [batch()], loss=lambda model, data: model(data[0]))
    with pytest.raises(ValueError, match="some of 'unit', 'source', 'edge'"):
        rewire.ablate(model, [batch()], loss=squares, of=["state"])  # type: ignore[list-item]
    with pytest.raises(rewire.RewireError, match=r"not a dict of the model's arguments"):
        rewire.ablate(model, [batch()])
    _, squeezed = shaken("ddl")
    with pytest.raises(rewire.UnsupportedTopology, match="trunk 'blocks': topology 'ddl' does more than add up states"):
        rewire.ablate(squeezed, [batch()], loss=squares, of=["edge"])
    found = rewire.ablate(squeezed, [batch()], loss=squares)
    assert [effect.what for effect in found.effects] == ["unit"] * 4 and "No edges in blocks" in str(found)
