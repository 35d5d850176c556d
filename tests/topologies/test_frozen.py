"""Programs of the static topologies, what is left out of them, and the topology that runs what is left."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from every_topology import EVERY, PRE_NORM_ONLY, STATIC
from torch import Tensor
from toy_nets import begin

from rewire.errors import UnsupportedTopology
from rewire.topologies import ANCRe, Dims, Topology, make_topology
from rewire.topologies.base import materialize
from rewire.topologies.frozen import Constants, Frozen, coded, frozen
from rewire.topologies.program import (
    Edge,
    Line,
    PerChannel,
    Program,
    Term,
    Unit,
    edges,
    fold,
    lifetimes,
    matrix,
    prune,
    recurrence,
)
from rewire.topologies.registry import name_and_options

WIDTH = 6


def drawn(key: str, depth: int) -> tuple[Topology, Dims, Any]:
    """A topology with random weights."""
    name, options = EVERY[key]
    topology, dims = make_topology(name, options), Dims(depth, WIDTH)
    size = 0.01 if "ancre" in key and "none" not in key else 0.3
    parameters = {k: v + size * torch.randn_like(v) for k, v in topology.parameters(dims, "paper").items()}
    return topology, dims, topology.weights(parameters, dims)


def as_frozen(topology: Topology, weights: Any, dims: Dims, threshold: float = 0.0) -> tuple[Frozen, Any]:
    pruned, _ = prune(topology.program(weights, dims), threshold)
    table = matrix(pruned)
    made, channels = frozen("it", fold(pruned), (table.shape[0], table.shape[1]))
    tensors = {"table": table} | ({"channels": torch.stack(channels)} if channels else {})
    assert {name: t.shape for name, t in made.parameters(dims, "preserve").items()} == {
        n: t.shape for n, t in tensors.items()
    }
    return made, made.weights(tensors, dims)


def run(topology: Topology, weights: Any, dims: Dims, x: Tensor, post_norm: bool = False, parallel: int = 1) -> Tensor:
    states = begin(topology, x, weights)
    for t in range(1, dims.depth + 1):
        read, states = topology.read(states, weights, t)
        branches = [torch.tanh(materialize(read) * (t + n)) for n in range(parallel)]
        if post_norm:
            merged = materialize(topology.merge(states, weights, t, *branches))
            states = topology.push(states, weights, t, torch.sin(merged))
        else:
            states = topology.write(states, weights, t, *branches)
        assert topology.template(states).shape == x.shape
    return topology.finish(states, weights, dims)


@pytest.mark.each_once
@pytest.mark.parametrize("parallel", [1, 2])
@pytest.mark.parametrize("depth", [2, 5])
@pytest.mark.parametrize("key", STATIC)
def test_same_function_and_matrix(key: str, depth: int, parallel: int) -> None:
    topology, dims, weights = drawn(key, depth)
    made, constants = as_frozen(topology, weights, dims)
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64)
    for post_norm in (False, True)[: 1 if key in PRE_NORM_ONLY else 2]:
        want = run(topology, weights, dims, x, post_norm, parallel)
        # constants are written with the digits of float32, and the branches amplify
        torch.testing.assert_close(run(made, constants, dims, x, post_norm, parallel), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(made.matrix(constants, dims), topology.matrix(weights, dims))


@pytest.mark.parametrize("key", [key for key in EVERY if key not in STATIC])
def test_no_constant_form(key: str) -> None:
    name, options = EVERY[key]
    topology, dims = make_topology(name, options), Dims(3, 8, frozenset({1, 3}))
    weights = topology.weights(topology.parameters(dims, "paper"), dims)
    with pytest.raises(UnsupportedTopology, match=f"topology '{name}' has no constant form"):
        topology.program(weights, dims)


@pytest.mark.parametrize("key", STATIC)
def test_options_are_json_and_come_back(key: str) -> None:
    topology, dims, weights = drawn(key, 3)
    made, constants = as_frozen(topology, weights, dims, threshold=0.05)
    name, options = name_and_options(made)
    saved = json.loads(json.dumps(options))
    assert name == "Frozen" and saved == options
    again = Frozen(**saved)
    assert again == made and name_and_options(again)[1] == saved and again.needs_width == made.needs_width
    x = torch.randn(3, WIDTH)
    assert torch.equal(run(again, constants, dims, x), run(made, constants, dims, x))


# -- pruning -----------------------------------------------------------------------------------------------------------


def ancre(*rows: list[float]) -> Program:
    return recurrence([[Term(f"x{i}", w) for i, w in enumerate(row)] for row in rows])


def test_prune_drops_weak_terms_and_never_a_branch() -> None:
    program = ancre([1.0], [0.01, -0.5], [-0.01, 0.02, 0.97])
    pruned, dropped = prune(program, 0.02)
    assert dropped == [Edge("x2", "x0", 0.01), Edge("x3", "x0", -0.01)]  # 0.02 is not below the threshold
    assert [len(unit.after[0].terms) - 1 for unit in pruned.units] == [1, 1, 2]
    assert (edges(program), edges(pruned)) == (6, 4)
    torch.testing.assert_close(matrix(pruned), torch.tensor([[1, 0, 0], [0, -0.5, 0], [0, 0.02, 0.97]]))
    nothing, dropped = prune(program, 100.0)
    assert [unit.after[0].terms for unit in nothing.units] == [(Term(f"f{t}", 1.0),) for t in (1, 2, 3)]
    assert len(dropped) == 6


def test_threshold_zero_drops_exact_zeros_only() -> None:
    pruned, dropped = prune(ancre([1e-30], [0.0, -0.0]), 0.0)
    assert dropped == [Edge("x2", "x0", 0.0), Edge("x2", "x1", -0.0)] and edges(pruned) == 1


def test_the_largest_term_of_a_read_stays() -> None:
    unit = Unit((Line("r1", (Term("x0", 1e-5),)),), "r1", ())
    output = Line("output", (Term("x0", 1e-5), Term("f1", -1e-4)))
    pruned, dropped = prune(Program((unit,), (output,), "output"), 0.1)
    assert pruned.units[0].before == unit.before
    assert pruned.finish == (Line("output", (Term("f1", -1e-4),)),) and dropped == [Edge("output", "x0", 1e-5)]


def test_a_weight_per_channel_counts_as_its_largest() -> None:
    strong, weak = torch.tensor([0.0, -0.5]), torch.tensor([0.05, -0.06])
    output = Line("output", (Term("x0", strong), Term("f1", weak)))
    _, dropped = prune(Program((Unit((), "x0", ()),), (output,), "output"), 0.1)
    assert dropped == [Edge("output", "f1", pytest.approx(0.06))]


def test_what_nobody_reads_goes_with_all_that_only_it_reads() -> None:
    """Two streams, of which the output reads one."""

    def unit(t: int, a: str, b: str) -> Unit:
        def carried(source: str) -> tuple[Term, ...]:
            return Term(source, 0.9), Term(f"f{t}", 1.0)

        return Unit((), a, (Line(f"a{t}", carried(a)), Line(f"b{t}", carried(b))))

    program = Program((unit(1, "x0", "x0"), unit(2, "a1", "b1")), (), "a2")
    pruned, dropped = prune(program, 0.0)
    assert [[line.target for line in unit.after] for unit in pruned.units] == [["a1"], ["a2"]]
    assert dropped == [Edge("b1", "x0", 0.9, unread=True), Edge("b2", "b1", 0.9, unread=True)]
    assert lifetimes(pruned)[1] == [("x0",), ("a1",), ("a2",)]


def test_the_kept_shortcut_stands_beside_the_matrix() -> None:
    dims = Dims(2)
    topology = ANCRe("none", cascade="keep")
    program = topology.program(topology.weights({"logits": torch.tensor([0.5, 0.001, 0.002])}, dims), dims)
    pruned, dropped = prune(program, 0.01)
    assert [edge.source for edge in dropped] == ["x0", "x1"]
    torch.testing.assert_close(matrix(pruned), torch.tensor([[0.5, 0], [0, 0]]))
    (first,), (second,) = (unit.after for unit in fold(pruned).units)
    assert first == Line("x1", (Term("x0", 1.5), Term("f1", 1.0)))
    assert second == Line("x2", (Term("x1", 1.0), Term("f2", 1.0)))


# -- folding -----------------------------------------------------------------------------------------------------------


def test_fold_leaves_plain_numbers_and_no_copies() -> None:
    third = float(torch.tensor(1 / 3))
    same, apart = torch.full((4,), 0.5), torch.tensor([0.5, 0.25])
    unit = Unit(
        (Line("r1", (Term("x0", 1 + 9e-7),)),),
        "r1",
        (Line("x1", (Term("r1", 1.0), Term("x0", third), Term("f1", 1.0))), Line("y1", (Term("x1", 1 - 2e-6),))),
    )
    output = Line("output", (Term("y1", same), Term("x1", apart)))
    folded = fold(Program((unit,), (output,), "output"))
    assert folded.units[0].before == () and folded.units[0].read == "x0"
    x1, y1 = folded.units[0].after
    assert x1 == Line("x1", (Term("x0", 1.33333334), Term("f1", 1.0)))
    assert y1.terms[0].weight == pytest.approx(1 - 2e-6, abs=1e-7)  # too far from 1 to be a copy
    assert folded.finish[0].terms[0] == Term("y1", 0.5) and folded.finish[0].terms[1].weight is apart


def test_a_lone_branch_is_no_copy() -> None:
    """In a post-norm block it passes the norm on its way to the state."""
    program = fold(prune(ancre([0.0], [0.0, 1.0]), 0.0)[0])
    assert program.units[0].after == (Line("x1", (Term("f1", 1.0),)),)
    made, _ = frozen("it", program, (2, 2))
    x, constants, dims = torch.randn(3, WIDTH), made.weights({"table": torch.zeros(2, 2)}, Dims(2)), Dims(2)
    first = torch.sin(torch.tanh(x))
    torch.testing.assert_close(run(made, constants, dims, x, True), torch.sin(first + torch.tanh(2 * first)))


def test_a_state_that_is_not_read_is_not_kept_in_post_norm_either() -> None:
    """DenseFormer whose average drops the newest state: what the norm returns is forgotten."""
    topology = make_topology("denseformer", {})
    weights = topology.weights({"alpha": torch.tensor([1.0, 0.0, 0.5, 0.0, 1.0])}, Dims(2))
    made, constants = as_frozen(topology, weights, Dims(2))
    assert [made.held(t) for t in range(3)] == [("x0",), ("x0",), ("r3",)]
    x = torch.randn(3, WIDTH)
    want = run(topology, weights, Dims(2), x, True)
    torch.testing.assert_close(run(made, constants, Dims(2), x, True), want)


def test_lifetimes() -> None:
    """x0 is read until unit 3 is written, x1 by unit 2 alone, x2 until unit 4."""
    program, _ = prune(ancre([1.0], [0.0, 1.0], [0.5, 0.0, 1.0], [0.0, 0.0, 0.5, 1.0]), 0.0)
    during, after = lifetimes(program)
    assert after == [("x0",), ("x0", "x1"), ("x0", "x2"), ("x2", "x3"), ("x4",)]
    assert during == [("x0",), ("x0", "x1"), ("x0", "x2"), ("x2", "x3")]


def test_something_is_held_while_a_branch_runs() -> None:
    program, _ = prune(ancre([0.0], [0.0, 0.0]), 0.0)
    assert lifetimes(program) == ([("x0",), ("x1",)], [("x0",), ("x1",), ("x2",)])


def test_its_program_has_the_weights_again() -> None:
    scale = torch.tensor([0.5, 2.0])
    lines = Line("x1", (Term("x0", scale), Term("f1", 0.25)))
    made, channels = frozen("it", Program((Unit((), "x0", (lines,)),), (), "x1"), (1, 1))
    (unit,) = made.program(Constants(torch.zeros(1, 1), torch.stack(channels)), Dims(1)).units
    ((target, (shortcut, own)),) = unit.after
    assert (target, shortcut.source, own) == ("x1", "x0", Term("f1", 0.25)) and torch.equal(shortcut.weight, scale)


# -- damaged programs --------------------------------------------------------------------------------------------------


def test_a_program_of_another_depth() -> None:
    made = frozen("it", ancre([1.0], [0.0, 1.0]), (2, 2))[0]
    with pytest.raises(UnsupportedTopology, match="was made for 2 units, and the trunk has 3"):
        made.parameters(Dims(3), "preserve")
    with pytest.raises(UnsupportedTopology, match=r"matrix \[99999, 2\]"):
        frozen("it", ancre([1.0], [0.0, 1.0]), (99999, 2))[0].parameters(Dims(2), "preserve")


def test_values_out_of_nowhere() -> None:
    with pytest.raises(ValueError, match="reads 'x7', which it does not compute"):
        Frozen("it", coded(recurrence([[Term("x7", 1.0)]])), [1, 1])
    with pytest.raises(ValueError, match="weights per channel"):
        Frozen("it", coded(recurrence([[Term("x0", PerChannel(10**12))]])), [1, 1])
