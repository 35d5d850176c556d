"""``units=``, ``sources=`` and ``channels=``: each dense topology against formulas written here, in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from every_topology import mixed
from models import PreNorm, Stack, vectors
from torch import Tensor
from torch.nn import functional as F
from toy_nets import WIDTH, Mixer, net

from rewire.errors import UnsupportedTopology
from rewire.topologies import make_topology
from rewire.topologies.base import Dims, QKVInputs

DEPTH = 7
OUT = DEPTH + 1
ATTENTION = frozenset({2, 3, 6})
Wires = Mapping[int, Sequence[int]]

#: What is asked for, and which sources which reads then have: of states, and of increments.
WIRINGS: list[tuple[dict[str, Any], Wires, Wires]] = [
    ({"units": [-1], "sources": ["x0", 3]}, {7: (0, 3, 6)}, {7: (0, 3)}),
    ({"units": [3, 6], "sources": [-1, -2]}, {3: (1, 2), 6: (4, 5)}, {3: (1, 2), 6: (4, 5)}),
    ({"units": 6, "sources": "x4"}, {6: (4, 5)}, {6: (4,)}),
    ({"sources": [5]}, {7: (5, 6), OUT: (5, 7)}, {6: (5,), 7: (5,), OUT: (5,)}),
    ({"units": [4]}, {4: (0, 1, 2, 3)}, {4: (0, 1, 2, 3)}),
    ({"sources": {3: [0], 7: [2, 4]}}, {3: (0, 2), 7: (2, 4, 6)}, {3: (0,), 7: (2, 4)}),
    ({"units": [2, 5, 7], "sources": ["x0", 4]}, {2: (0, 1), 5: (0, 4), 7: (0, 4, 6)}, {2: (0,), 5: (0, 4), 7: (0, 4)}),
]
STATIC: list[tuple[str, dict[str, Any]]] = [
    ("ancre-ingoing", {"temperature": 0.5}),
    ("ancre-ingoing", {"temperature": 0.5, "form": "difference"}),
    ("ancre-ingoing", {"temperature": 0.5, "form": "difference", "cascade": "keep"}),
    ("ancre-outgoing", {"temperature": 0.5}),
    ("ancre-outgoing", {"temperature": 0.5, "form": "difference"}),
    ("ancre-none", {}),
    ("ancre-constant", {}),
    ("denseformer", {}),
    ("grn-v1", {}),
    ("grn-v2", {}),
]
PER_TOKEN: list[tuple[str, dict[str, Any]]] = [
    ("grn-v3", {}),
    ("dca", {}),
    ("dca", {"channels": ["v"]}),
    ("dca", {"channels": ["q", "v", "shortcut"]}),
    ("muddformer", {}),
    ("muddformer", {"channels": ["v", "shortcut"]}),
    ("muddformer", {"channels": ["shortcut"]}),
    ("muddformer", {"norms": True}),
    ("muddformer", {"norms": True, "channels": ["v", "shortcut"]}),
    ("muddformer", {"norms": True, "channels": ["q", "k"]}),
    ("attnres", {"scaled": True}),
    ("attnres", {"form": "difference"}),
    ("attnres", {"additive": True}),
    ("attnres", {"heads": 2}),
    ("attnres", {"qkv": True}),
    ("attnres", {"qkv": True, "channels": ["k"]}),
    ("attnres", {"normed": True}),
]
INCREMENTS = ("grn", "dca", "attnres")


def rms(x: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


class Reader:
    """Takes weights from a flat tensor, piece by piece."""

    def __init__(self, flat: Tensor) -> None:
        self.flat, self.at = flat, 0

    def take(self, *shape: int) -> Tensor:
        n = math.prod(shape)
        piece = self.flat[self.at : self.at + n]
        self.at += n
        return piece.reshape(*shape, *self.flat.shape[1:])


def ways_of(name: str, options: dict[str, Any], t: int, attention: frozenset[int]) -> list[str] | None:
    """The inputs that have reads of their own; "all" is one for the whole unit; None if there is none."""
    channels = options.get("channels", ["q", "k", "v", "shortcut"])
    if t not in attention:
        return ["all"] if "shortcut" in channels else None
    own = ["q", "k", "v", "shortcut"] if name == "muddformer" else ["q", "k", "v"]
    return [channel for channel in own if channel in channels] or None


def ancre_weights(name: str, options: dict[str, Any], wires: Wires, values: dict[str, Tensor]) -> dict[Any, Tensor]:
    pairs = [(t, i) for t in sorted(wires) for i in wires[t]]
    if name == "ancre-constant":
        return {(t, i): torch.tensor(1 / len(wires[t])).double() for t, i in pairs}
    logits = dict(zip(pairs, values["logits"], strict=True))
    if name == "ancre-none":
        return logits
    side = 0 if name == "ancre-ingoing" else 1
    found = {}
    for pair in pairs:
        others = [other for other in pairs if other[side] == pair[side]]
        tau = options["temperature"]
        share = (logits[pair] / tau).exp() / sum((logits[other] / tau).exp() for other in others)
        if options.get("form") == "difference":
            kept = options.get("cascade") == "keep"
            share = share - 1 / len(others) + float(pair[1] == pair[0] - 1 and not kept)
        found[pair] = share
    return found


def states_oracle(
    name: str, options: dict[str, Any], wires: Wires, values: dict[str, Tensor], x: Tensor, blocks: Any, dims: Dims
) -> Tensor:
    """ANCRe, DenseFormer and MUDDFormer."""
    states = [x]
    if name.startswith("ancre"):
        p = ancre_weights(name, options, wires, values)
        for t, block in enumerate(blocks, start=1):
            f = block(states[-1])
            kept = states[-1] if options.get("cascade") == "keep" or t not in wires else 0
            states.append(f + kept + sum(p[t, i] * states[i] for i in wires.get(t, ())))
        return states[-1]
    parts = {key: Reader(value) for key, value in values.items()}

    def reads(t: int) -> dict[str, Tensor]:
        numbers = wires.get(t)
        ways = ways_of(name, options, t, dims.attention)
        if numbers is None or ways is None:
            return {"all": states[-1]}
        n = len(numbers)
        if name == "denseformer":
            a = parts["alpha"].take(n)
            return {"all": sum(w * states[i] for w, i in zip(a, numbers, strict=True))}
        k = len(ways) * n
        a, w1, w2 = parts["static"].take(k), parts["w1"].take(k), parts["w2"].take(k, k)
        scores = F.gelu(rms(states[-1]) @ w1.T) @ w2 + a
        by_way = scores.unflatten(-1, (len(ways), n)).unbind(-2)
        if options.get("norms"):
            named = sorted({i for own in wires.values() for i in own})
            known = {i: values["before"][named.index(i)] * rms(states[i]) for i in numbers}
            mixed = {
                w: sum(s[..., m, None] * known[i] for m, i in enumerate(numbers))
                for w, s in zip(ways, by_way, strict=True)
            }
            for way in mixed.keys() & {"all", "shortcut"}:
                mixed[way] = parts["after"].take(1)[0] * rms(mixed[way])
            return {way: states[-1] + value for way, value in mixed.items()}
        return {
            way: sum(score[..., m, None] * states[i] for m, i in enumerate(numbers))
            for way, score in zip(ways, by_way, strict=True)
        }

    for t, block in enumerate(blocks, start=1):
        found = reads(t) if t > 1 else {"all": states[0]}
        r, inputs = inputs_of(found, t in dims.attention, states[-1], own_shortcut=True)
        states.append(r + block(*inputs))
    return reads(OUT)["all"]


def inputs_of(found: dict[str, Tensor], attention: bool, plain: Tensor, own_shortcut: bool) -> Any:
    """What the shortcut sees, and what the branch is called with."""
    if "all" in found:
        value = found["all"]
        return value, [value] * (4 if attention else 1)
    q, k, v = (found.get(way, plain) for way in "qkv")
    shortcut = found.get("shortcut", plain if own_shortcut else q)
    return shortcut, [q, k, v, shortcut]


def increments_oracle(
    name: str, options: dict[str, Any], wires: Wires, values: dict[str, Tensor], x: Tensor, blocks: Any, dims: Dims
) -> Tensor:
    """GRN, DCA and Attention Residuals."""
    increments = [x]
    parts = {key: Reader(value) for key, value in values.items()}

    def reads(t: int) -> dict[str, Tensor]:
        numbers = wires.get(t)
        ways = ways_of(name, options, t, dims.attention)
        if numbers is None or ways is None or (options.get("additive") and t == OUT):
            return {"all": sum(increments)}
        rest = [f for i, f in enumerate(increments) if i not in numbers]
        stack = [*([sum(rest)] if rest else []), *[increments[i] for i in numbers]]
        found = {}
        if name == "attnres":
            for way, w in zip(ways, parts["queries"].take(len(ways)), strict=True):
                heads = options.get("heads", 1)
                scores = torch.stack([(rms(f) * w).unflatten(-1, (heads, -1)).sum(-1) for f in stack])
                shares = scores.softmax(0)
                if options.get("scaled"):
                    shares = len(stack) * shares
                elif options.get("form") == "difference":
                    shares = 1 + shares - 1 / len(stack)
                elif options.get("additive"):
                    shares = 1 + shares
                shares = shares.repeat_interleave(x.shape[-1] // heads, -1)
                mixed = [rms(f) for f in stack] if options.get("normed") else stack
                found[way] = sum(a * f for a, f in zip(shares, mixed, strict=True))
            return found
        b = parts["b"].take(len(ways), len(stack))
        w = parts["w"].take(len(ways)) if "w" in parts else [None] * len(ways)
        for way, own, query in zip(ways, b, w, strict=True):
            scored = [0 if query is None else (f @ query).clamp(min=0)[..., None] for f in stack]
            found[way] = sum((a + s) * f for a, s, f in zip(own, scored, stack, strict=True))
        return found

    for t, block in enumerate(blocks, start=1):
        _, inputs = inputs_of(reads(t), t in dims.attention, sum(increments), own_shortcut=False)
        increments.append(block(*inputs))
    return reads(OUT)["all"]


def expected_wires(name: str, states: Wires, increments: Wires, asked: dict[str, Any], dims: Dims) -> Wires:
    wires = dict(increments if name.startswith(INCREMENTS) else states)
    if name.startswith("ancre"):
        wires.pop(OUT, None)
    return wires


@pytest.mark.each_once
@pytest.mark.parametrize(("asked", "states", "increments"), WIRINGS, ids=[str(asked) for asked, *_ in WIRINGS])
@pytest.mark.parametrize(("name", "options"), [*STATIC, *PER_TOKEN], ids=str)
def test_few_connections_are_the_formulas(
    double: None, name: str, options: dict[str, Any], asked: dict[str, Any], states: Wires, increments: Wires
) -> None:
    apart = name in ("dca", "muddformer") or options.get("qkv", False)
    dims = Dims(DEPTH, WIDTH, ATTENTION if apart else frozenset())
    topology = make_topology(name, {**options, **asked})
    wires = expected_wires(name, states, increments, asked, dims)
    # a read that the channels leave out
    readable = {t: numbers for t, numbers in wires.items() if ways_of(name, options, t, dims.attention)}
    if set(readable) != set(wires) and ("units" in asked or isinstance(asked.get("sources"), dict)):
        with pytest.raises(UnsupportedTopology, match="no connections at"):
            topology.parameters(dims, "paper")
        return
    if not readable:
        with pytest.raises(UnsupportedTopology, match="no unit of a trunk of 7 units can read"):
            topology.parameters(dims, "paper")
        return
    once = [i for numbers in readable.values() for i in numbers]
    if name == "ancre-outgoing" and len(once) == len(set(once)):
        with pytest.raises(UnsupportedTopology, match="would learn nothing"):
            topology.parameters(dims, "paper")
        return
    if options.get("additive"):
        readable.pop(OUT, None)
    torch.manual_seed(3)
    blocks = net(DEPTH, torch.float64)
    blocks = [Mixer().double() if t in dims.attention else block for t, block in enumerate(blocks, start=1)]
    drawn = topology.parameters(dims, "paper").items()
    values = {key: (p.double() + 0.3 * torch.randn(p.shape).double()).requires_grad_() for key, p in drawn}
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    oracle = increments_oracle if name.startswith(INCREMENTS) else states_oracle
    inputs = [x, *values.values(), *[p for block in blocks for p in block.parameters()]]

    got = run_through(topology, topology.weights(values, dims), x, blocks, dims)
    want = oracle(name, options, readable, values, x, blocks, dims)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    upstream = torch.randn_like(want)
    for g, w in zip(grads(got, inputs, upstream), grads(want, inputs, upstream), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-8, atol=1e-8)


def grads(out: Tensor, inputs: list[Tensor], upstream: Tensor) -> list[Tensor]:
    found = torch.autograd.grad(out, inputs, upstream, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs, strict=True)]


def run_through(topology: Any, weights: Any, x: Tensor, blocks: Any, dims: Dims) -> Tensor:
    states = topology.start(x, weights)
    for t, block in enumerate(blocks, start=1):
        read, states = topology.read(states, weights, t)
        if isinstance(read, QKVInputs):
            f = block(read.q, read.k, read.v, read.residual)
        else:
            read = read if isinstance(read, Tensor) else read.value()
            f = block(*[read] * (4 if t in dims.attention else 1))
        states = topology.write(states, weights, t, f)
    return topology.finish(states, weights, dims)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"units": [9]}, r"no connections at unit 9 of a trunk of 7 units; it can have them at 2, 3, 4, 5, 6, 7, 'out"),
        ({"units": [1], "sources": [0]}, "no connections at unit 1 of"),
        ({"units": [4], "sources": [-1]}, "unit 4 can read none beside the newest"),
        ({"units": [4], "sources": [6]}, "unit 4 can read none beside the newest"),
        ({"sources": [9]}, "no unit of a trunk of 7 units can read x9"),
        ({"units": [5], "sources": [2, 6]}, "no unit of a trunk of 7 units can read x6"),
        ({"sources": {4: [5]}}, "unit 4 reads sources before it, x0 to x3, and not x5"),
    ],
)
def test_what_a_trunk_does_not_have(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedTopology, match=message):
        make_topology("denseformer", options).parameters(Dims(DEPTH), "preserve")


def test_other_ways_to_say_it() -> None:
    """As files and other libraries have it."""
    said = make_topology("denseformer", {"sources": {3: ["x0"], "output": [2, 2]}})
    pairs = [["3", ["0"]], ["output", ["x2"]]]
    assert said == make_topology("denseformer", {"sources": pairs})
    assert said == make_topology("denseformer", {"sources": {"3": torch.tensor([0]), "output": range(2, 3)}})
    units = make_topology("denseformer", {"units": torch.tensor([3, -1]), "sources": torch.tensor([0, -2])})
    assert units == make_topology("denseformer", {"units": ["3", "-1", 3], "sources": ["0", "-2"]})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("denseformer", {"units": []}, "units is empty"),
        ("denseformer", {"units": ["last"]}, "a unit is its number"),
        ("denseformer", {"units": [0]}, "a unit is its number"),
        ("denseformer", {"units": True}, "a unit is its number"),
        ("denseformer", {"sources": []}, "sources is empty"),
        ("denseformer", {"sources": ["y3"]}, "a source is the number of a unit"),
        ("denseformer", {"sources": [1.5]}, "a source is the number of a unit"),
        ("denseformer", {"sources": {3: []}}, "a source is the number|sources is empty"),
        ("denseformer", {"sources": [0], "block": 2}, "chooses sources"),
        ("denseformer", {"sources": [0], "period": 2}, "leave out two"),
        ("dca", {"sources": [0], "last": 2}, "chooses increments"),
        ("muddformer", {"channels": ["values"]}, "it has to name some of 'q', 'k', 'v', 'shortcut'"),
        ("attnres", {"channels": ["v"]}, "pass qkv=True"),
    ],
)
def test_what_options_cannot_be(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_topology(name, options)


def test_only_named_states_are_held() -> None:
    topology, dims = make_topology("denseformer", {"units": [6], "sources": ["x0", 3]}), Dims(DEPTH)
    weights = topology.weights(topology.parameters(dims, "preserve"), dims)
    states, held = topology.start(torch.zeros(2, WIDTH), weights), []
    for t in range(1, DEPTH + 1):
        held.append(1 + len(states[1].states))
        _, states = topology.read(states, weights, t)
        states = topology.write(states, weights, t, torch.ones(2, WIDTH))
    assert held == [1, 2, 2, 2, 3, 3, 1]  # the newest; x0 from its read on, x3 too, until unit 6 has read both


@pytest.mark.parametrize("name", ["denseformer", "grn-v1"])
def test_what_is_held_may_get_other_dimensions_while_a_unit_reads(name: str) -> None:
    topology, dims = make_topology(name, {"sources": {3: ["x0"], "output": ["x0", 1]}}), Dims(4)
    weights = topology.weights(topology.parameters(dims, "preserve"), dims)
    x = torch.randn(2, 3, WIDTH)
    _, history = topology.start(x, weights)
    history = history.after([x, 2 * x]).read(3, 3 * x)
    flat = history.viewed(lambda x: x.flatten(0, 1))
    for of_flat, own in ((flat.states, history.states), (flat.kept.states, history.kept.states)):
        assert len(of_flat) == len(own)
        for one, other in zip(of_flat, own, strict=True):
            torch.testing.assert_close(one, other.flatten(0, 1))
    torch.testing.assert_close(flat.newest, history.newest.flatten(0, 1))


def test_branches_are_named_by_kind() -> None:
    kinds = ["attention", "ffn"] * 3
    topology = make_topology("denseformer", {"units": ["attention", "output"], "sources": [-2]})
    assert topology.placed(kinds).units == (3, 5, "output")  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedTopology, match="they begin with attention, ffn"):
        make_topology("denseformer", {"units": ["conv"]}).placed(kinds)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # which Dynamo itself hides
@pytest.mark.parametrize("key", ["ancre-few", pytest.param("muddformer-few", marks=pytest.mark.slow)])
def test_they_are_captured_whole(key: str) -> None:
    torch.manual_seed(0)
    model = mixed(Stack(PreNorm, 4), key)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(vectors()), model(vectors()))
