"""Branches of a part of the state, which are zero elsewhere: rows of the batch, masks, slices; in place or not."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from every_topology import EVERY, FEW, QUICK
from mixing import learned, shaken
from models import SeparateAttention
from slow_cases import one_in
from torch import Tensor, nn

import rewire

WIDTH, DEPTH = 16, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(WIDTH), SeparateAttention(WIDTH), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def attend(self, x: Tensor) -> Tensor:
        return self.attn(self.norm1(x))

    def feed(self, x: Tensor) -> Tensor:
        return self.mlp(self.norm2(x))


class Net(nn.Module):
    block: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(self.block() for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def net(block: type[nn.Module]) -> nn.Module:
    return type(f"Net{block.__name__}", (Net,), {"block": block})()


def vectors(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(6, 5, WIDTH, generator=torch.Generator().manual_seed(1), dtype=dtype)


def results(model: nn.Module, *args: Any) -> list[Tensor]:
    """The output, and the gradients of all parameters, 0 where there is none."""
    model.zero_grad()
    out = model(*args)
    out.square().sum().backward()
    return [out.detach(), *(torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters())]


def drop_add(x: Tensor, branch: Any, ratio: float) -> Tensor:
    """As DINOv2 drops a branch for a part of the batch."""
    keep = max(int(len(x) * (1 - ratio)), 1)
    rows = torch.randperm(len(x), device=x.device)[:keep]
    residual = branch(x[rows])
    sums = torch.index_add(x.flatten(1), 0, rows, residual.flatten(1).to(dtype=x.dtype), alpha=len(x) / keep)
    return sums.view_as(x)


class OnAPart(Block):
    def forward(self, x: Tensor) -> Tensor:
        def attend(x: Tensor) -> Tensor:
            return self.attn(self.norm1(x))

        def feed(x: Tensor) -> Tensor:
            return self.mlp(self.norm2(x))

        if self.training:
            x = drop_add(x, attend, 0.4)
            return drop_add(x, feed, 0.4)
        x = x + attend(x)
        return x + feed(x)


class Scattered(Block):
    def forward(self, x: Tensor) -> Tensor:
        rows = torch.randperm(len(x))[: len(x) // 2] if self.training else torch.arange(len(x))
        x = x.index_add(0, rows, self.attn(self.norm1(x[rows])))
        where = rows[:, None, None].expand(-1, *x.shape[1:])
        return torch.scatter_add(x, 0, where, self.mlp(self.norm2(x[rows])))


class ByKeyword(Block):
    """As DINOv3's blocks, which run a list of batches, and drop rows in training only."""

    def run(self, xs: list[Tensor]) -> list[Tensor]:
        if not self.training:
            xs = [torch.add(other=self.attn(self.norm1(x)), input=x) for x in xs]
            return [torch.add(input=x, other=self.mlp(self.norm2(x))) for x in xs]
        rows = [torch.randperm(len(x))[: len(x) // 2] for x in xs]
        branches = [self.attn(self.norm1(x[some])) for x, some in zip(xs, rows, strict=True)]
        xs = [
            torch.index_add(x, dim=0, source=f, index=some, alpha=2.0)
            for x, f, some in zip(xs, branches, rows, strict=True)
        ]
        branches = [self.mlp(self.norm2(x[some])) for x, some in zip(xs, rows, strict=True)]
        return [
            torch.index_add(source=f, index=some, input=x, dim=0) for x, f, some in zip(xs, branches, rows, strict=True)
        ]

    def forward(self, x: Tensor) -> Tensor:
        return self.run([x])[0]


@pytest.mark.parametrize(
    ("key", "block"),
    one_in(
        3,
        [
            *((key, ByKeyword) for key in ("ancre-ingoing", "hc-dynamic", "muddformer")),
            *((key, Scattered) for key in ("ancre-ingoing", "hc-static", "muddformer", "denseformer-2x2")),
            *((key, OnAPart) for key in ("ancre-ingoing", "denseformer-2x2", "hc-static", "hc-dynamic", "frac-hc")),
            *((key, OnAPart) for key in ("muddformer", "dca", "attnres-qkv")),
        ],
    ),
)
def test_a_part_of_the_batch(key: str, block: type[nn.Module]) -> None:
    name, options = EVERY[key]
    model, x = type("Parts", (Net,), {"block": block})(), torch.randn(6, 5, WIDTH)
    rewired = rewire.compile(model, name, example_inputs=(x,), **options)
    (connection,) = rewire.connections(rewired).values()
    assert len(connection.layout.units) == 2 * DEPTH
    paths = [path for path, _ in model.named_parameters()]
    for training in (True, False, True):
        runs = []
        for each in (rewired.train(training), model.train(training)):
            torch.manual_seed(4)
            out = results(each, x)
            grads = {path: p.grad for path, p in each.named_parameters() if path in paths}
            runs.append([out[0], *(torch.zeros(()) if g is None else g.clone() for g in grads.values())])
        for ours, theirs in zip(*runs, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


class Flattened(Block):
    """Of every second example, in dimensions in which rows and channels are one."""

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.arange(0, len(x), 2)

        def attend(x: Tensor) -> Tensor:
            return self.attn(self.norm1(x))

        flat = x.flatten(1)
        flat = torch.index_add(flat, 0, rows, attend(x[rows]).flatten(1), alpha=0.5)
        x = flat.view_as(x)
        return x.index_add(0, rows, self.mlp(self.norm2(x[rows])))


class WithZeros(Block):
    """The same as sums with what is zero elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.arange(0, len(x), 2)
        x = x + torch.zeros_like(x).index_add(0, rows, 0.5 * self.attn(self.norm1(x[rows])))
        return x + torch.zeros_like(x).index_add(0, rows, self.mlp(self.norm2(x[rows])))


@pytest.mark.parametrize("key", [*QUICK, "attnres-additive", "attnres-qkv"])
def test_a_part_of_the_batch_is_a_branch_with_zeros(key: str, caplog: pytest.LogCaptureFixture) -> None:
    name, options = EVERY[key]
    given = {"start": "paper", "example_inputs": (torch.randn(6, 5, WIDTH),), **options}
    parts = rewire.compile(type("Parts", (Net,), {"block": Flattened})(), name, **given)
    zeros = rewire.compile(type("Zeros", (Net,), {"block": WithZeros})(), name, validate=False, **given)
    assert not caplog.records
    shaken(parts, 0.2, seed=3)
    for ours, theirs in zip(learned(parts).values(), learned(zeros).values(), strict=True):
        theirs.data.copy_(ours.data)
    x = torch.randn(6, 5, WIDTH, dtype=torch.float64)
    for ours, theirs in zip(results(parts.double(), x), results(zeros.double(), x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


class Rows(Block):
    def forward(self, x: Tensor) -> Tensor:
        rows = torch.arange(0, len(x), 2)
        x[rows] += self.attend(x[rows])
        return x + self.feed(x)


class Assigned(Block):
    def forward(self, x: Tensor) -> Tensor:
        rows = torch.arange(0, len(x), 2)
        x[rows] = torch.add(self.attend(x[rows]), x[rows])
        return x + self.feed(x)


class OfAPart(Block):
    def forward(self, x: Tensor) -> Tensor:
        rows = torch.arange(0, len(x), 2)
        part = x[rows]
        x[rows] = part + self.attend(part)
        return x + self.feed(x)


class Masked(Block):
    def forward(self, x: Tensor) -> Tensor:
        keep = torch.arange(len(x)) % 2 == 0
        x[keep] = x[keep] + self.attend(x[keep])
        return x + self.feed(x)


class IndexAdd(Block):
    def forward(self, x: Tensor) -> Tensor:
        rows = torch.arange(0, len(x), 2)
        x.index_add_(0, rows, self.attend(x[rows]))
        return x + self.feed(x)


class ScatterAdd(Block):
    def forward(self, x: Tensor) -> Tensor:
        rows = torch.arange(0, len(x), 2)
        x = x.scatter_add_(0, rows[:, None, None].expand(-1, *x.shape[1:]), self.attend(x[rows]))
        return x + self.feed(x)


class IndexPut(Block):
    def forward(self, x: Tensor) -> Tensor:
        rows = torch.arange(0, len(x), 2)
        x.index_put_((rows,), self.attend(x[rows]), accumulate=True)
        return x + self.feed(x)


class Put(Block):
    def forward(self, x: Tensor) -> Tensor:
        rows = torch.arange(0, len(x), 2)
        x = torch.index_put(x, (rows,), self.attend(x[rows]), True)
        return x + self.feed(x)


class EverySecond(Block):
    def forward(self, x: Tensor) -> Tensor:
        x[::2] += self.attend(x[::2].clone())  # what autograd keeps of a view would be written to
        return x + self.feed(x)


class AddedTo(Block):
    def forward(self, x: Tensor) -> Tensor:
        x[::2].add_(self.attend(x[::2].clone()))
        return x + self.feed(x)


class Copied(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        y[::2] += self.attend(x[::2])
        return y + self.feed(y)


class InAList(Block):
    def forward(self, x: Tensor) -> Tensor:
        states, rows = [x], torch.arange(0, len(x), 2)
        states[0][rows, ...] += self.attend(states[0][rows])
        return states[0] + self.feed(states[0])


class Spread(Block):
    """What all of them compute."""

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.arange(0, len(x), 2)
        x = x + torch.zeros_like(x).index_add(0, rows, self.attend(x[rows]))
        return x + self.feed(x)


class Tokens(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x[:, 1:] = torch.add(x[:, 1:], self.attend(x[:, 1:].clone()), alpha=0.5)
        return x + self.feed(x)


class SpreadTokens(Block):
    def forward(self, x: Tensor) -> Tensor:
        part = 0.5 * self.attend(x[:, 1:])
        x = x + torch.cat([torch.zeros_like(part[:, :1]), part], 1)
        return x + self.feed(x)


FORMS = [
    *(Rows, Assigned, OfAPart, Masked, IndexAdd, ScatterAdd, IndexPut, Put, EverySecond, AddedTo, Copied, InAList),
]


def same(key: str, block: type[nn.Module], twin: type[nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Two nets rewired, with the same connection weights, which have moved."""
    name, options = EVERY[key]
    given = {"start": "paper", "example_inputs": (vectors(),), **options}
    ours, theirs = (rewire.compile(net(each), name, validate=each is block, **given) for each in (block, twin))
    shaken(ours, 0.2, seed=3)
    for mine, other in zip(learned(ours).values(), learned(theirs).values(), strict=True):
        other.data.copy_(mine.data)
    return ours.double(), theirs.double()


@pytest.mark.parametrize(
    ("key", "block"), [*zip(itertools.cycle(["ancre-ingoing", "hc-dynamic"]), FORMS, strict=False)]
)
def test_a_part_is_added_in_place(key: str, block: type[nn.Module], caplog: pytest.LogCaptureFixture) -> None:
    model = net(block)
    assert [len(trunk.sites) for trunk in rewire.inspect(model, (vectors(),)).trunks] == [2 * DEPTH]
    ours, theirs = same(key, block, Spread)
    assert not caplog.records
    x = vectors(torch.float64)
    for mine, other in zip(results(ours, x), results(theirs, x), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "block", "twin"),
    [
        *((key, Rows, Spread) for key in (*rewire.list_topologies(), "attnres-additive", "attnres-qkv")),
        *((key, Tokens, SpreadTokens) for key in FEW),
    ],
)
def test_in_every_topology(key: str, block: type[nn.Module], twin: type[nn.Module]) -> None:
    x = vectors(torch.float64)
    for mine, other in zip(*(results(each, x) for each in same(key, block, twin)), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


class AttendsLater(Block):
    def forward(self, x: Tensor) -> Tensor:
        rows = torch.arange(0, len(x), 2)
        x[rows] += self.feed(x[rows])
        return x + self.attend(x)


@pytest.mark.parametrize("key", ["muddformer", "dca"])
def test_what_is_read_apart_behind_a_write_is_validated(key: str, caplog: pytest.LogCaptureFixture) -> None:
    """The oracle runs a block once more for each of queries, keys and values, and a block writes to what it gets."""
    rewired = rewire.compile(net(AttendsLater), key, granularity="sublayer", example_inputs=(vectors(),))
    assert not caplog.records and all(one.layout.sites[1].reads_qkv for one in rewire.connections(rewired).values())


class Twice(Block):
    def forward(self, x: Tensor) -> Tensor:
        rows = torch.tensor([0, 2, 2])
        x[rows] += self.attend(x[rows])
        return x + self.feed(x)


class Elsewhere(Block):
    def forward(self, x: Tensor) -> Tensor:
        rows = torch.arange(0, len(x), 2)
        x[rows + 1] = x[rows] + self.attend(x[rows])
        return x + self.feed(x)


@pytest.mark.parametrize("block", [Twice, Elsewhere])
def test_rows_that_come_twice_or_from_elsewhere_are_left_alone(block: type[nn.Module]) -> None:
    report = rewire.inspect(net(block), (vectors(),))
    assert [{site.kind for site in trunk.sites} for trunk in report.trunks] == [{"ffn"}]
    (why,) = {left.why for left in report.left if left.written.startswith("x[")}
    assert "adds to a part of the state in place" in why and "no row twice" in why


class ReadUnderAnotherName(Block):
    def forward(self, x: Tensor) -> Tensor:
        y, rows = x, torch.arange(0, len(x), 2)
        x[rows] += self.attend(x[rows])
        return y + self.feed(x)


def add_rows(x: Tensor, rows: Tensor, f: Tensor) -> Tensor:
    x[rows] += f
    return x


class ForgottenResult(Block):
    def forward(self, x: Tensor) -> Tensor:
        rows = torch.arange(0, len(x), 2)
        add_rows(x, rows, self.attend(x[rows]))
        return x + self.feed(x)


class AsAnExpression(Block):
    def forward(self, x: Tensor) -> Tensor:
        tokens = x[:, 1:].add_(self.attend(x[:, 1:].clone()))
        return x + self.feed(x) + 0 * tokens.sum()


class OfACall(Block):
    def forward(self, x: Tensor) -> Tensor:
        x.narrow(1, 1, 3)[::2] += self.attend(x[::2, 1:4].clone())
        return x + self.feed(x)


@pytest.mark.parametrize(
    ("block", "why"),
    [
        (ReadUnderAnotherName, "'y' in ReadUnderAnotherName.forward has the same memory and is read afterwards"),
        (ForgottenResult, "'x' in ForgottenResult.forward has the same memory and is read afterwards"),
        (AsAnExpression, "elements of the residual stream are written to at .*: write them in a statement by itself"),
        (OfACall, "'x' in OfACall.forward has the same memory and is read afterwards"),
    ],
)
def test_what_would_show_in_two_places_is_refused(block: type[nn.Module], why: str) -> None:
    with pytest.raises(rewire.EditError, match=why):
        rewire.compile(net(block), "ancre-ingoing", example_inputs=(vectors(),))


class Halved(Block):
    """A part that is scaled behind the add, in place: no residual add."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(x)
        x[:, 1:].mul_(0.5)
        return x + self.feed(x)


def test_a_part_may_change_behind_an_add() -> None:
    model = net(Halved)
    rewired = rewire.compile(model, "ancre-ingoing", example_inputs=(vectors(),))
    assert "x[:, 1:].mul_(0.5)\n    x = depth.push(x)" in str(rewire.source(rewired, "blocks.0"))
    torch.testing.assert_close(rewired(vectors()), model(vectors()))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # which Dynamo itself hides
@pytest.mark.slow
@pytest.mark.parametrize("block", [Rows, IndexAdd, Tokens])
def test_parts_are_compiled(block: type[nn.Module]) -> None:
    rewired = shaken(rewire.compile(net(block), "ancre-ingoing", example_inputs=(vectors(),)), 0.01, seed=3)
    made = torch.compile(rewired, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(results(made, vectors()), results(rewired, vectors()), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


class InBetween(nn.Module):
    """A block whose state is a view of what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.branch = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, count = torch.tensor([1]), len(x)
        x.index_add_(0, rows, self.branch(self.norm(x[rows])))
        x = x.flatten(0, 1)
        return x.unflatten(0, (count, -1))


class InBetweenAnew(InBetween):
    def forward(self, x: Tensor) -> Tensor:
        rows, count = torch.tensor([1]), len(x)
        x = x.index_add(0, rows, self.branch(self.norm(x[rows])))
        x = x.flatten(0, 1)
        return x.unflatten(0, (count, -1))


@pytest.mark.parametrize("key", ["residual", "ancre-ingoing", "hc-dynamic"])
def test_a_view_of_another_blocks_state_may_be_written_to(key: str) -> None:
    """All blocks write into the memory of the first one's input; rewired, each adds to a tensor of its own."""
    x, found = torch.randn(6, 5, WIDTH), []
    for block in (InBetween, InBetweenAnew):
        torch.manual_seed(0)
        plain = type("Stated", (Net,), {"block": block})()
        rewired = rewire.compile(plain, key, trunks=["blocks"], example_inputs=(x,))
        found.append(results(shaken(rewired, 0.1, seed=3), x))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
