"""``block=S``: each dense topology against its formulas as written, in float64, with all gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from formulas import by_reference
from torch import Tensor, nn
from toy_nets import WIDTH, Mixer, net, plain, run

from rewire.conformance.references.ancre import sources as states_read
from rewire.mixes.history import History
from rewire.topologies import make_topology
from rewire.topologies.base import Dims, Start

DEPTH = 7  # no multiple of the sizes of groups
#: Units that begin with an attention, for topologies that ask for it.
ATTENTION = frozenset({2, 3, 6})
DENSE: list[tuple[str, dict[str, Any]]] = [
    ("ancre-ingoing", {"temperature": 0.5}),
    ("ancre-ingoing", {"temperature": 0.5, "form": "difference", "cascade": "keep"}),
    ("ancre-outgoing", {"temperature": 0.5}),
    ("ancre-outgoing", {"temperature": 0.5, "form": "difference"}),
    ("ancre-none", {}),
    ("ancre-constant", {}),
    ("denseformer", {}),
    ("denseformer", {"period": 2}),
    ("grn-v1", {}),
    ("grn-v2", {}),
    ("grn-v3", {}),
    ("dca", {}),
    ("muddformer", {}),
    ("attnres", {}),
]
INCREMENTS = {"grn-v1", "grn-v2", "grn-v3", "dca", "attnres"}
each_topology = pytest.mark.parametrize(("name", "options"), DENSE, ids=lambda x: x if isinstance(x, str) else str(x))


def dims_of(name: str, depth: int = DEPTH) -> Dims:
    attention = ATTENTION if name in ("dca", "muddformer") else frozenset[int]()
    return Dims(depth, WIDTH, frozenset(t for t in attention if t <= depth))


def blocks_of(name: str, depth: int = DEPTH) -> list[nn.Module]:
    torch.manual_seed(3)
    attention = dims_of(name, depth).attention
    blocks = net(depth, torch.float64)
    return [Mixer().double() if t in attention else block for t, block in enumerate(blocks, start=1)]


def drawn(topology: Any, dims: Dims) -> dict[str, Tensor]:
    torch.manual_seed(2)
    found = topology.parameters(dims, "paper")
    return {key: (p.double() + 0.3 * torch.randn(p.shape).double()).requires_grad_() for key, p in found.items()}


@pytest.mark.each_once
@pytest.mark.parametrize("size", [2, 3, 6, 9])
@each_topology
def test_formulas(name: str, options: dict[str, Any], size: int, double: None) -> None:
    topology, dims = make_topology(name, {**options, "block": size}), dims_of(name)
    parameters, blocks = drawn(topology, dims), blocks_of(name)
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    got = run(topology, topology.weights(parameters, dims), x, blocks, dims)
    want, _ = by_reference(topology, parameters, x, blocks, dims)
    close = 1e-6 if name == "ancre-constant" else 1e-10  # its shares are float32 numbers
    torch.testing.assert_close(got, want, rtol=close, atol=close)
    inputs, upstream = [x, *parameters.values(), *nn.ModuleList(blocks).parameters()], torch.randn_like(x)
    found, wanted = (torch.autograd.grad(out, inputs, upstream, materialize_grads=True) for out in (got, want))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=close, atol=close)


# -- properties --------------------------------------------------------------------------------------------------------


def outcome(name: str, options: dict[str, Any], start: Start = "paper", depth: int = DEPTH) -> list[Tensor]:
    """Parameters, output, and gradients."""
    topology, dims = make_topology(name, options), dims_of(name, depth)
    parameters = drawn(topology, dims)
    parameters = {key: value.detach().float().requires_grad_() for key, value in parameters.items()}
    blocks, x = blocks_of(name, depth), torch.randn(3, WIDTH, dtype=torch.float64)
    out = run(topology, topology.weights(parameters, dims), x, blocks, dims)
    inputs = [*parameters.values(), *nn.ModuleList(blocks).parameters()]
    return [*parameters.values(), out, *torch.autograd.grad(out.sum(), inputs, materialize_grads=True)]


@each_topology
def test_groups_of_one_unit_are_none(name: str, options: dict[str, Any]) -> None:
    none, one = outcome(name, options), outcome(name, {**options, "block": 1})
    assert all(map(torch.equal, none, one))


@each_topology
def test_groups_longer_than_the_trunk_are_one_group(name: str, options: dict[str, Any]) -> None:
    depth, longer = outcome(name, {**options, "block": DEPTH}), outcome(name, {**options, "block": DEPTH + 5})
    assert all(map(torch.equal, depth, longer))


@pytest.mark.each_once
@pytest.mark.parametrize("size", [2, 3, 8])
@each_topology
def test_what_is_held_is_few(name: str, options: dict[str, Any], size: int) -> None:
    depth = WIDTH  # no state of scores of later reads has as many columns as a hidden state
    topology, dims = make_topology(name, {**options, "block": size}), dims_of(name, depth)
    weights = topology.weights({k: v.float() for k, v in drawn(topology, dims).items()}, dims)
    seen, inside = [], []

    def check(t: int, read: Any, opened: Any, written: Any) -> None:
        inside.append(len(opened[1].states))
        held = [x for state in written for x in (state.states if isinstance(state, History) else (state,))]
        seen.append(sum(x.shape == (3, WIDTH) for x in held))

    run(topology, weights, torch.randn(3, WIDTH).double(), blocks_of(name, depth), dims, check)
    assert seen == [1 + math.ceil(t / size) for t in range(1, depth + 1)]
    # While a branch runs, a newest state inside a group is held only where it was read as it is.
    for t, states in enumerate(inside, start=1):
        as_it_is = name.startswith("ancre") or (t - 1) % options.get("period", 1) > 0
        assert states == 1 + (math.ceil((t - 1) / size) if as_it_is else (t - 1) // size)


@pytest.mark.each_once
@pytest.mark.parametrize("size", [2, 3, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", sorted({name for name, _ in DENSE} - {"ancre-constant", "dca"}))
def test_preserving_start(name: str, dtype: torch.dtype, size: int) -> None:
    topology, dims = make_topology(name, {"block": size}).for_start("preserve"), Dims(41, WIDTH)
    blocks, x = net(41, dtype), torch.randn(4, WIDTH).to(dtype)
    out = run(topology, topology.weights(topology.parameters(dims, "preserve"), dims), x, blocks, dims)
    if name in INCREMENTS:  # sums of groups round otherwise
        torch.testing.assert_close(out, plain(x, blocks), rtol=1e-4 if dtype == torch.float32 else 1e-12, atol=1e-4)
    else:
        assert torch.equal(out, plain(x, blocks))


@each_topology
def test_matrix_tells_what_is_read(name: str, options: dict[str, Any]) -> None:
    topology, dims = make_topology(name, {**options, "block": 3}), dims_of(name)
    parameters = {key: value.float() for key, value in drawn(topology, dims).items()}
    table = topology.matrix(topology.weights(parameters, dims), dims)
    if name in INCREMENTS:
        assert torch.equal(table[6, 1:4], table[6, 1].expand(3)) and torch.equal(table[6, 4:7], table[6, 4].expand(3))
        assert table[6, 1] != table[6, 4] or name == "attnres"
        assert table.tril().equal(table) and bool((table[6, :7] != 0).all())
    else:
        first = 2 if name in ("denseformer", "muddformer") else 1  # the read of row 0
        for row in range(DEPTH):
            if name == "denseformer" and (row + 1) % options.get("period", 1):
                continue
            sources, found = states_read(row + first, 3), table[row].nonzero().flatten().tolist()
            # a difference of softmaxes over one entry is 0
            assert found == sources or (options.get("cascade") == "keep" and found == sources[1:])


@pytest.mark.parametrize("block", [None, 1, 2, 3, 10])
def test_numbers_of_sources(block: int | None) -> None:
    states, increments = make_topology("ancre-ingoing", {"block": block}), make_topology("grn-v1", {"block": block})
    for t in range(1, 10):
        numbers = states_read(t, block or 1)
        found, as_many = states.sources_of(t, Dims(9)), increments.sources_of(t, Dims(9))  # type: ignore[attr-defined]
        assert found == numbers and len(as_many) == len(numbers)
    parameters = states.parameters(Dims(9), "paper")
    assert len(parameters["logits"]) == sum(len(states_read(t, block or 1)) for t in range(1, 10))
    assert [row.shape[1] for row in states.weights(parameters, Dims(9)).rows] == states.sizes(Dims(9))


@pytest.mark.each_once
@pytest.mark.parametrize("name", sorted({name for name, _ in DENSE}))
@pytest.mark.parametrize("block", [0, -1, 2.0, True])
def test_sizes_that_are_none(name: str, block: Any) -> None:
    with pytest.raises(ValueError, match=rf"block={block!r}: .*whole number, 1 or more, or None"):
        make_topology(name, {"block": block})


def test_options_that_choose_states_otherwise() -> None:
    with pytest.raises(ValueError, match=r"last=2 and block=3.*pass one"):
        make_topology("grn-v1", {"last": 2, "block": 3})
    with pytest.raises(ValueError, match=r"dilation=2 and block=3.*pass one"):
        make_topology("denseformer", {"dilation": 2, "block": 3})


@pytest.mark.parametrize("name", ["ancre-ingoing", "ancre-outgoing"])
def test_distributions(name: str) -> None:
    topology, dims = make_topology(name, {"temperature": 0.5, "block": 3}), Dims(DEPTH)
    weights = topology.weights({key: value.detach().float() for key, value in drawn(topology, dims).items()}, dims)
    found = topology.distributions(weights, dims)
    sources = [states_read(t, 3) for t in range(1, DEPTH + 1)]
    into = [len(its) for its in sources]
    out_of = [sum(i in its for its in sources) for i in range(DEPTH)]
    assert [len(p) for p in found] == (into if name == "ancre-ingoing" else out_of)
    for p in found:
        torch.testing.assert_close(p.sum(), torch.ones(()))
