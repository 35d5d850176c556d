from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import rewire
from rewire.errors import OutOfOrder, WidthMismatch
from rewire.runtime.held import Reading
from rewire.runtime.layout import Layout
from rewire.runtime.live import Live
from rewire.runtime.stream import Stream
from rewire.topologies import ANCRe, DenseFormer, Residual, Topology
from rewire.topologies.ancre import ANCReCascaded
from rewire.topologies.base import Dims, QKVInputs

PRESERVING = [
    Residual(),
    ANCRe(),
    ANCRe("outgoing"),
    ANCRe("none"),
    ANCReCascaded(),
    DenseFormer(),
    DenseFormer(2, 3),
]
UNITS = {
    "one each": (1, 2, 3, 4, 5, 6),
    "pairs": (1, 1, 2, 2, 3, 3),
    "uneven": (1, 2, 2, 2, 3, 3),
    "single": (1,) * 6,
}


def open_stream(topology: Topology, x: Tensor, units: tuple[int, ...], **learned: Tensor) -> Stream:
    topology = topology if learned else topology.for_start("preserve")
    layout = Layout("decoder.layers", topology, units)
    weights = topology.weights(learned or topology.parameters(layout.dims, "preserve"), layout.dims)
    return Stream.begin(x, weights, layout)


def net(sites: int, dtype: torch.dtype = torch.float64) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh()).to(dtype) for _ in range(sites)]


def plain(x: Tensor, branches: list[nn.Module]) -> Tensor:
    for branch in branches:
        x = x + branch(x)
    return x


def run(stream: Stream, branches: list[nn.Module]) -> Tensor:
    for branch in branches:
        value, stream = stream.read()
        stream = stream.write(branch(value))
    return stream.finish()


FITTING = [
    pytest.param(topology, units, id=f"{topology}-{name}")
    for topology in PRESERVING
    for name, units in UNITS.items()
    if not isinstance(topology, DenseFormer) or topology.period <= units[-1]  # else there is nothing to average
]


@pytest.mark.parametrize(("topology", "units"), FITTING)
def test_preserving_topologies_equal_the_plain_network(topology: Topology, units: tuple[int, ...]) -> None:
    branches, x = net(6), torch.randn(2, 3, 8, dtype=torch.float64)
    want = plain(x, branches)
    assert (run(open_stream(topology, x, units), branches) - want).norm() <= 1e-5 * want.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_residual_sites_are_the_plain_network_bitwise(dtype: torch.dtype) -> None:
    branches, x = net(6, dtype), torch.randn(2, 3, 8).to(dtype)
    assert torch.equal(run(open_stream(Residual(), x, UNITS["one each"]), branches), plain(x, branches))


def test_inside_a_unit_the_residual_adds_stay() -> None:
    """Block granularity against the formulas: x_2 = attn + ffn + p_02 x_0 + p_12 x_1, ffn sees x_1 + attn."""
    a1, f1, a2, f2 = net(4)
    x0 = torch.randn(3, 8, dtype=torch.float64)
    logits = torch.tensor([0.3, 0.01, 0.02])
    e = torch.exp(logits.double() / 0.01)[1:]
    p02, p12 = (e / e.sum()).tolist()
    first = a1(x0)
    x1 = x0 + first + f1(x0 + first)
    second = a2(x1)
    x2 = p02 * x0 + p12 * x1 + second + f2(x1 + second)
    stream = open_stream(ANCRe(), x0, (1, 1, 2, 2), logits=logits)
    torch.testing.assert_close(run(stream, [a1, f1, a2, f2]), x2, rtol=1e-6, atol=1e-6)


def holds(stream: Stream, x: Tensor) -> bool:
    """Whether ``x`` is all that a stream of ANCRe holds."""
    newest, history, *_ = stream.states  # within a unit, also what it mixes
    return all(state.data_ptr() == x.data_ptr() for state in (newest, *history.states)) and len(history.states) <= 1


def test_what_a_unit_holds_between_its_sites() -> None:
    x, f, g, h = torch.randn(4, 3, 8)
    stream = open_stream(ANCRe(), x, (1, 1, 1, 2))
    assert stream.held is None
    assert torch.equal(stream.value(), x) and torch.equal(stream.read()[0], x)
    stream = stream.write(f)
    assert holds(stream, x)
    assert isinstance(stream.held, Reading) and stream.held.branch is f
    torch.testing.assert_close(stream.value(), x + f)
    stream = stream.write(g)
    torch.testing.assert_close(stream.value(), x + f + g)
    torch.testing.assert_close(stream.held.branch, f + g)
    stream = stream.write(h)
    assert stream.held is None
    newest, history = stream.states
    assert len((*history.states, newest)) == 2
    torch.testing.assert_close(stream.value(), x + f + g + h)


@pytest.mark.parametrize("units", [(1,), (1, 1), (1, 1, 1)])
def test_parallel_branches_are_summed_wherever_they_are(units: tuple[int, ...]) -> None:
    x, *branches = torch.randn(7, 3, 8).unbind()
    stream, want = open_stream(ANCRe(), x, units), x
    for _ in units:
        f, g = branches.pop(), branches.pop()
        stream, want = stream.write(f, g), want + f + g
    torch.testing.assert_close(stream.finish(), want)


def test_writes_count_in_order() -> None:
    """Site k belongs to unit k: scales make the order visible."""
    x, f, g = torch.randn(3, 3, 8)
    stream = open_stream(ANCReCascaded(), x, (1, 2), scales=torch.tensor([2.0, 5.0]))
    assert (stream.position, stream.complete) == (0, False)
    stream = stream.write(f)
    assert (stream.position, stream.complete) == (1, False)
    stream = stream.write(g)
    assert (stream.position, stream.complete) == (2, True)
    want = 5 * (2 * x + f) + g
    torch.testing.assert_close(stream.finish(), want)
    torch.testing.assert_close(stream.value(), want)


def test_push_after_a_write_serves_post_norm() -> None:
    norms, branches, x = [nn.LayerNorm(8) for _ in range(3)], net(3, torch.float32), torch.randn(3, 8)
    topology = ANCRe().for_start("preserve")
    layout, want = Layout("decoder.layers", topology, (1, 2, 3), posts=range(3)), x
    stream = Stream.begin(x, topology.weights(topology.parameters(layout.dims, "preserve"), layout.dims), layout)
    for norm, branch in zip(norms, branches, strict=True):
        value, stream = stream.read()
        stream = stream.write(branch(value))
        assert stream.in_post and not stream.complete
        stream = stream.push(norm(stream.value()))
        want = norm(want + branch(want))
    torch.testing.assert_close(stream.finish(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("units", [(1, 2), (1, 1)])
def test_finish_too_early(units: tuple[int, ...]) -> None:
    x = torch.randn(3, 8)
    stream = open_stream(ANCRe(), x, units)
    for written in range(2):
        with pytest.raises(OutOfOrder, match=f"decoder.layers.* after {written} of its 2"):
            stream.finish()
        stream = stream.write(x)
    stream.finish()


def test_too_many_writes() -> None:
    x = torch.randn(3, 8)
    stream = open_stream(ANCRe(), x, (1, 2)).write(x).write(x)
    with pytest.raises(OutOfOrder, match=r"decoder.layers.* already complete"):
        stream.write(x)


@pytest.mark.parametrize("units", [(1, 2), (1, 1)])
def test_width_mismatch(units: tuple[int, ...]) -> None:
    stream = open_stream(ANCRe(), torch.randn(3, 8), units).write(torch.randn(3, 8))
    with pytest.raises(WidthMismatch, match=r"decoder.layers.*residual add 1.*\(3, 4\).*\(3, 8\)"):
        stream.write(torch.randn(3, 8), torch.randn(3, 4))


@pytest.mark.parametrize("posts", [(), (0,)])
def test_copies_of_a_sum_that_has_a_post_may_be_written_to(posts: tuple[int, ...]) -> None:
    layout = Layout("decoder.layers", ANCRe("none"), (1, 2), posts=posts)
    weights = layout.topology.weights(layout.topology.parameters(layout.dims, "preserve"), layout.dims)
    live = Live(Stream.begin(torch.randn(3, 8), weights, layout).write(torch.randn(3, 8)), None)
    copy = live.read().clone()
    live.also(copy)
    assert not live.overwritten
    copy.mul_(2)
    assert live.overwritten is not bool(posts)


def test_what_is_read_is_not_replaced_by_another_shape() -> None:
    _, replaced = open_stream(DenseFormer(), torch.randn(3, 8), (1, 2)).write(torch.randn(3, 8)).shown()
    with pytest.raises(WidthMismatch, match=r"residual add 1.*\(3, 4\).*\(3, 8\)"):
        replaced(torch.randn(3, 4))


def test_a_stream_is_a_value() -> None:
    """Writing twice from one stream gives two independent futures, and changes neither it nor its tensors."""
    x, f, g = torch.randn(3, 3, 8)
    copy = x.clone()
    for units in ((1, 2), (1, 1)):
        stream = open_stream(ANCRe("none"), x, units, logits=torch.ones(units[-1] * (units[-1] + 1) // 2))
        first, second = stream.write(f), stream.write(g)
        assert stream.position == 0
        assert holds(stream, x)
        assert stream.held is None
        torch.testing.assert_close(first.value(), x + f)
        torch.testing.assert_close(second.value(), x + g)
        held = [] if first.held is None else pytree.tree_leaves(first.held)
        before = [v.clone() for v in held]
        first.write(g)
        assert len(held) == (3 if units == (1, 1) else 0)
        assert all(torch.equal(value, old) for value, old in zip(held, before, strict=True))
        assert torch.equal(x, copy)


@pytest.mark.parametrize("written", [0, 1, 2, 3])
def test_pytree_round_trip(written: int) -> None:
    x = torch.randn(3, 8)
    stream = open_stream(ANCRe(), x, (1, 2, 2))
    for _ in range(written):
        stream = stream.write(torch.randn(3, 8))
    leaves, spec = pytree.tree_flatten(stream)
    tensors = [leaf for leaf in leaves if leaf is not None]
    held = [t for t in (*stream.states, *pytree.tree_leaves(stream.held)) if t is not None]
    # The weights are hidden from whoever casts leaves.
    assert [id(t) for t in tensors] == [id(t) for t in held]
    again = pytree.tree_unflatten(leaves, spec)
    assert isinstance(again, Stream)
    assert again.shared is stream.shared
    assert again.layout is stream.layout
    assert again.position == written
    assert again.states == stream.states
    assert type(again.held) is type(stream.held)
    doubled = pytree.tree_map_only(Tensor, lambda t: t.double(), stream)
    assert doubled.dtype == torch.float64
    assert doubled.shared.weights.rows[0].dtype == torch.float32


def test_looks_like_its_hidden_states() -> None:
    x = torch.randn(2, 3, 8).bfloat16()
    stream = open_stream(ANCRe(), x, (1, 2)).write(x)
    assert (stream.shape, stream.dtype, stream.device) == (x.shape, x.dtype, x.device)


def test_gradients_reach_every_weight_through_a_stream() -> None:
    branches, x = net(6, torch.float32), torch.randn(4, 8)
    logits = nn.Parameter(ANCRe().parameters(Dims(3), "paper")["logits"])
    run(open_stream(ANCRe(), x, (1, 1, 2, 2, 3, 3), logits=logits), branches).square().mean().backward()
    assert logits.grad is not None
    assert (logits.grad[1:] != 0).all()


class TwoStates(Residual):
    """Reads apart, and writes to what `read` made of the states."""

    def read(self, states, weights, t):  # type: ignore[no-untyped-def]
        (x,) = states
        return QKVInputs(x, 2 * x, 3 * x, 4 * x), (x, 4 * x)

    def write(self, states, weights, t, *branches):  # type: ignore[no-untyped-def]
        _, residual = states
        return (residual + 10 * sum(branches),)


def test_reading_opens_a_unit_once() -> None:
    x, f, g = torch.randn(3, 3, 8)
    stream = open_stream(TwoStates(), x, (1, 1))
    value, opened = stream.read()
    assert isinstance(value, QKVInputs) and (stream.position, opened.position) == (0, 0)
    for way, factor in zip((value.q, value.k, value.v, value.residual), (1, 2, 3, 4), strict=True):
        assert torch.equal(way, factor * x)
    again, unchanged = opened.read()
    assert len(opened.states) == 2 and unchanged is opened and again is value
    for begun in (stream, opened):  # a branch that does not read the stream leaves the reading to the write
        inside = begun.write(f)
        assert torch.equal(inside.value(), 4 * x + f) and torch.equal(begun.value(), 4 * x)
        torch.testing.assert_close(inside.write(g).finish(), 4 * x + 10 * (f + g))


@pytest.mark.parametrize(("dim", "shape"), [(-3, (2, 8, 4, 5)), (1, (2, 8, 4)), (-1, (2, 4, 8))])
def test_topologies_see_channels_last(dim: int, shape: tuple[int, ...]) -> None:
    seen = []

    class Watching(ANCRe):
        needs_width = True

        def start(self, x, weights):  # type: ignore[no-untyped-def]
            seen.append(x.shape)
            return super().start(x, weights)

        def write(self, states, weights, t, *branches):  # type: ignore[no-untyped-def]
            seen.extend(branch.shape for branch in branches)
            return super().write(states, weights, t, *branches)

    x, f = torch.randn(2, *shape)
    layout = Layout("stages", Watching(), (1, 2), width=8, channel_dim=dim)
    stream = Stream.begin(
        x, layout.topology.weights(layout.topology.parameters(layout.dims, "paper"), layout.dims), layout
    )
    value, stream = stream.read()
    assert value.shape == shape and stream.shape == shape
    out = stream.write(f).write(f).finish()
    torch.testing.assert_close(out, f + (x + (x + f)) / 2)
    assert {seen_shape[-1] for seen_shape in seen} == {8} and out.is_contiguous()
    with pytest.raises(WidthMismatch, match=r"'stages' was found to be 8 channels wide.*shape \(2, 7"):
        Stream.begin(torch.randn(2, 7, 7, 7), None, layout)


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.f = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, queries: Tensor, memory: Tensor) -> Tensor:
        return queries + self.f(self.norm(queries) + memory).tanh()


class Queries(nn.Module):
    """Learned queries, which the first add broadcasts over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.blocks = nn.Parameter(torch.randn(1, 5, 8)), nn.ModuleList(Reader() for _ in range(3))

    def forward(self, memory: Tensor) -> Tensor:
        x = self.queries
        for block in self.blocks:
            x = block(x, memory)
        return x


def test_an_example_with_a_batch_of_one_is_named_where_weights_are_broadcast() -> None:
    rewired = rewire.compile(Queries(), "denseformer", example_inputs=(torch.randn(1, 5, 8),))
    with pytest.raises(WidthMismatch, match="rewire it with a batch of two or more"):
        rewired(torch.randn(3, 5, 8))
    rewire.compile(Queries(), "denseformer", example_inputs=(torch.randn(2, 5, 8),))(torch.randn(3, 5, 8))
