"""Blocks that do not run add nothing: layer dropping, stochastic depth, early exits, removed blocks."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from every_topology import EVERY, NOT_PRESERVING, PRE_NORM_ONLY, QUICK, kinds_first
from mixing import shaken
from models import SeparateAttention
from slow_cases import one_in
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from written_nets import written_input, written_net

import rewire

WIDTH, DEPTH = 16, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(WIDTH), SeparateAttention(WIDTH), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Net(nn.Module):
    """Blocks, of which a call may leave out some."""

    block: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(self.block() for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, skip: tuple[int, ...] = (), stop: int = DEPTH) -> Tensor:
        x = self.stem(x)
        for number, block in enumerate(self.blocks):
            if number == stop:
                break
            if number in skip:
                continue
            x = block(x)
        return self.norm(x)


def vectors() -> Tensor:
    return torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1))


def results(model: nn.Module, *args: Any) -> list[Tensor]:
    """The output, and the gradients of all parameters, 0 where there is none."""
    model.zero_grad()
    out = model(*args)
    out.square().sum().backward()
    return [out.detach(), *(torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters())]


def silenced(model: nn.Module, blocks: tuple[int, ...]) -> nn.Module:
    """A copy, in which these blocks run, and add zeros."""
    quiet = copy.deepcopy(model)
    for number in blocks:
        block: Any = quiet.get_submodule(f"blocks.{number}")
        for last in (block.attn.o_proj, block.mlp[2]):
            nn.init.zeros_(last.weight), nn.init.zeros_(last.bias)
            for p in last.parameters():
                p.register_hook(torch.zeros_like)
    return quiet


#: Blocks that do not run, and how the model is called so that they do not.
WAYS: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    "one": ((1,), ((1,),)),
    "two in a row": ((1, 2), ((1, 2),)),
    "the first": ((0,), ((0,),)),
    "the last": ((3,), ((3,),)),
    "an early exit": ((2, 3), ((), 2)),
}
#: Then it is no call of the trunk, whose first read may be of its own, too.
NONE_RUNS = ((), 0)


@pytest.mark.parametrize("key", kinds_first(EVERY))
def test_it_is_as_if_its_branches_were_zero(key: str) -> None:
    name, options = EVERY[key]
    rewired = rewire.compile(Net(), name, start="paper", validate=False, **options)
    rewired = shaken(rewired, 0.1, seed=3)
    for way, (blocks, args) in WAYS.items():
        found, wanted = results(rewired, vectors(), *args), results(silenced(rewired, blocks), vectors())
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, msg=lambda text, way=way: f"{way}: {text}")


@pytest.mark.parametrize(
    "key",
    one_in(2, [k for k in EVERY if k in QUICK or (k.endswith(("-groups", "-few")) and k not in NOT_PRESERVING)]),
)
def test_at_its_start_it_is_the_plain_network(key: str) -> None:
    name, options = EVERY[key]
    model = Net()
    rewired = rewire.compile(model, name, validate=False, **options)
    for _, args in WAYS.values():
        torch.testing.assert_close(rewired(vectors(), *args), model(vectors(), *args), rtol=1e-4, atol=1e-5)


class Given(Net):
    """The trunk begins with the model's input."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Identity()


@pytest.mark.parametrize("key", kinds_first(EVERY)[:6])
def test_a_trunk_that_begins_with_the_models_input(key: str) -> None:
    name, options = EVERY[key]
    rewired = shaken(rewire.compile(Given(), name, start="paper", example_inputs=(vectors(),), **options), 0.1, seed=3)
    for blocks, args in WAYS.values():
        found, wanted = results(rewired, vectors(), *args), results(silenced(rewired, blocks), vectors())
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("key", kinds_first(EVERY)[:6])
def test_where_none_runs_it_is_the_plain_network(key: str) -> None:
    name, options = EVERY[key]
    model = Net()
    rewired = rewire.compile(model, name, start="paper", validate=False, **options)
    assert torch.equal(shaken(rewired, 0.1, seed=3)(vectors(), *NONE_RUNS), model(vectors(), *NONE_RUNS))


class Passed(Net):
    """A method in which the trunk begins is called with other tensors, too, and hands them back."""

    def upto(self, x: Tensor, count: int) -> Tensor:
        for number, block in enumerate(self.blocks):
            if number < count:
                x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        x = self.upto(self.stem(self.upto(x, 0)), DEPTH)
        return self.norm(self.upto(x, 0)) + 0 * self.upto(2 * x, 0)


class Recursive(Net):
    def run(self, x: Tensor, number: int) -> Tensor:
        return x if number == DEPTH else self.run(self.blocks[number](x), number + 1)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.norm(self.run(self.stem(x), 0))


class Applied(Net):
    """The stem and the head go through the helper that adds."""

    def apply_to(self, x: Tensor, function: Any, add: bool) -> Tensor:
        return x + function(x) if add else function(x)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        x = self.apply_to(x, self.stem, False)
        for block in self.blocks:
            x = self.apply_to(x, block.attn, True)
            x = self.apply_to(x, block.mlp, True)
        return self.apply_to(x, self.norm, False)


class Written(Net):
    """`Applied`, written out."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        x = self.stem(x)
        for block in self.blocks:
            x = x + block.attn(x)
            x = x + block.mlp(x)
        return self.norm(x)


@pytest.mark.parametrize("topology", ["ancre-ingoing", "hc-dynamic", "dca"])
@pytest.mark.parametrize(("made", "twin"), [(Passed, Net), (Recursive, Net), (Applied, Written)])
def test_functions_that_begin_a_trunk_are_called_beside_it(topology: str, made: type[Net], twin: type[Net]) -> None:
    model, other = made(), twin()
    other.load_state_dict(model.state_dict())
    found, wanted = (shaken(rewire.compile(net, topology, validate=False), 0.1, seed=3) for net in (model, other))
    for ours, theirs in zip(results(found, vectors()), results(wanted, vectors()), strict=True):
        torch.testing.assert_close(ours, theirs)


class Dropping(Net):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        x = self.stem(x)
        for block in self.blocks:
            if self.training and torch.rand(()) < 0.5:
                continue
            x = block(x)
        return self.norm(x)


class DroppingAndRead(Net):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        x, means = self.stem(x), torch.zeros(())
        for block in self.blocks:
            if self.training and torch.rand(()) < 0.5:
                continue
            x = checkpoint(block, x, use_reentrant=False)
            means = means + x.mean()
        return self.norm(x) + means


class ReturnsEarly(Block):
    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.rand(()) < 0.3:
            return x
        x = x + self.attn(self.norm1(x))
        if self.training and torch.rand(()) < 0.3:
            return x
        return x + self.mlp(self.norm2(x))


class BranchByBranch(Block):
    def forward(self, x: Tensor) -> Tensor:
        if not self.training or torch.rand(()) < 0.5:
            x = x + self.attn(self.norm1(x))
        if not self.training or torch.rand(()) < 0.5:
            x = x + self.mlp(self.norm2(x))
        return x


class OneWayOrTheOther(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x)) if not self.training or torch.rand(()) < 0.5 else x
        if not self.training or torch.rand(()) < 0.5:
            h = self.norm2(x)
            y = x + self.mlp(h)
        else:
            y = x
        return y


class PostNorm(Block):
    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.rand(()) < 0.3:
            return x
        x = self.norm1(x + self.attn(x))
        return self.norm2(x + self.mlp(x))


BLOCKS = [Block, ReturnsEarly, BranchByBranch, OneWayOrTheOther, PostNorm]
DROPPED = [
    (key, (Dropping, DroppingAndRead)[(row + column) % 2], block)
    for row, key in enumerate(["ancre-ingoing", "hc-static", "muddformer", "denseformer-2x2"])
    for column, block in enumerate(BLOCKS)
    if block is not PostNorm or key not in PRE_NORM_ONLY
]


@pytest.mark.parametrize(("key", "net", "block"), one_in(3, DROPPED))
def test_stochastic_depth(key: str, net: type[Net], block: type[nn.Module]) -> None:
    name, options = EVERY[key]
    model = type(net.__name__, (net,), {"block": block})()
    rewired = rewire.compile(model, name, example_inputs=(vectors(),), **options)
    paths = [path for path, _ in model.named_parameters()]
    for seed in range(4):
        runs = []
        for each in (rewired.train(), model.train()):
            torch.manual_seed(seed)
            out = results(each, vectors())
            grads = {path: p.grad for path, p in each.named_parameters() if path in paths}
            runs.append([out[0], *(torch.zeros(()) if g is None else g.clone() for g in grads.values())])
        for ours, theirs in zip(*runs, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rewired.eval()(vectors()), model.eval()(vectors()), rtol=1e-4, atol=1e-4)


def test_a_model_that_is_cut() -> None:
    model = Net()
    rewired: Any = rewire.compile(model, "ancre-ingoing", example_inputs=(vectors(),))
    for each in (model, rewired):
        del each.blocks[2]
    torch.testing.assert_close(rewired(vectors()), model(vectors()))
    for each in (model, rewired):
        each.blocks = each.blocks[:2]
    torch.testing.assert_close(rewired(vectors()), model(vectors()))


@pytest.mark.slow
@torch.no_grad()
def test_compiled() -> None:
    rewired = shaken(rewire.compile(Net(), "denseformer", example_inputs=(vectors(),)), 0.1, seed=3)
    compiled = torch.compile(rewired, fullgraph=True, backend="eager")
    for args in (((1,),), ((), 2)):
        torch.testing.assert_close(compiled(vectors(), *args), rewired(vectors(), *args))


class Reversed(Net):
    def forward(self, x: Tensor, order: tuple[int, ...] = (0, 1, 2, 3)) -> Tensor:  # type: ignore[override]
        x = self.stem(x)
        for number in order:
            x = self.blocks[number](x)
        return self.norm(x)


@pytest.mark.parametrize("order", [(1, 0, 2, 3), (0, 1, 1, 2), (0, 1, 2, 3, 3), (3, 2)])
def test_other_orders_are_refused(order: tuple[int, ...]) -> None:
    rewired = rewire.compile(Reversed(), "ancre-ingoing", example_inputs=(vectors(),))
    with pytest.raises(rewire.OutOfOrder):
        rewired(vectors(), order)


class AtOnePlace(Net):
    """One line makes all adds; which of them did not run is told by the modules that the loop calls."""

    def forward(self, x: Tensor, skip: int = -1) -> Tensor:  # type: ignore[override]
        x = self.stem(x)
        for number, block in enumerate(self.blocks):
            if number == skip:
                continue
            x = x + block.mlp(block.norm2(x))  # type: ignore[operator]
        return self.norm(x)


class AtOnePlaceByChance(Net):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        x = self.stem(x)
        for block in self.blocks:
            if self.training and torch.rand(()) < 0.2:
                continue
            x = x + block.mlp(block.norm2(x))  # type: ignore[operator]
        return self.norm(x)


class Adds(nn.Module):
    def forward(self, f: Tensor, x: Tensor) -> Tensor:
        return x + f


class AddsElsewhere(nn.Module):
    """The adds are in modules of their own, and the branches outside of these (x-transformers)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), Adds()]) for _ in range(DEPTH)
        )

    def forward(self, x: Tensor, skip: tuple[int, ...] = ()) -> Tensor:
        for number, (norm, f, add) in enumerate(self.layers):
            if number not in skip:
                x = add(f(norm(x)), x)
        return x.tanh()


class AddsElsewhereInAWhile(AddsElsewhere):
    """Nothing tells which iteration runs before its branch is computed."""

    def forward(self, x: Tensor, skip: tuple[int, ...] = ()) -> Tensor:
        number = 0
        while number < DEPTH:
            norm, f, add = self.layers[number]  # type: ignore[misc]
            if number not in skip:
                x = add(f(norm(x)), x)
            number += 1
        return x.tanh()


@pytest.mark.parametrize("topology", ["residual-scale", "denseformer", "hc-static", "grn-v1"])
def test_a_branch_that_was_computed_for_another_unit_is_refused(topology: str) -> None:
    """It read what the first block that was left out would have read."""
    model = AddsElsewhereInAWhile()
    plain = rewire.compile(model, "residual", example_inputs=(vectors(),))
    torch.testing.assert_close(plain(vectors(), (1, 2)), model(vectors(), (1, 2)))
    rewired = rewire.compile(model, topology, example_inputs=(vectors(),))
    for skip in ((1, 2), (0,)):
        with pytest.raises(rewire.OutOfOrder, match=r"layers.\d.2' .*test_skipped.* computed from its state after \d "):
            rewired(vectors(), skip)
    frozen, _ = rewire.freeze(shaken(rewired, 0.1))
    with pytest.raises(rewire.OutOfOrder):
        frozen(vectors(), (1,))


@pytest.mark.parametrize("topology", ["residual-scale", "denseformer", "hc-static", "grn-v1"])
@pytest.mark.parametrize("skip", [(1, 2), (0,), (3,)])
def test_branches_that_are_added_elsewhere(topology: str, skip: tuple[int, ...]) -> None:
    rewired = shaken(rewire.compile(AddsElsewhere(), topology, example_inputs=(vectors(),)), 0.3)
    frozen, _ = rewire.freeze(rewired) if topology != "grn-v1" else (rewired, None)
    found = rewired(vectors(), skip)
    torch.testing.assert_close(frozen(vectors(), skip), found)
    for number in skip:
        rewired.layers[number][1].register_forward_hook(lambda _, args, made: torch.zeros_like(made))
    torch.testing.assert_close(found, rewired(vectors()))


def test_iterations_that_are_left_out_by_chance() -> None:
    rewired = rewire.compile(AtOnePlaceByChance(), "ancre-ingoing", example_inputs=(vectors(),))
    dropped = rewire.inspect(rewired).dropped
    assert dropped and {*dropped} < {f"blocks.{number}.mlp" for number in range(DEPTH)}
    plain = AtOnePlaceByChance()
    for seed in range(4):
        found, wanted = (torch.manual_seed(seed) and model.train()(vectors()) for model in (rewired, plain))
        torch.testing.assert_close(found, wanted)


class LeavesOneOut(nn.Module):
    """One of three layers, by chance, is not in the loop (the layer dropout of CaiT in vit-pytorch)."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)]) for _ in range(3))
        self.always = always

    def forward(self, x: Tensor) -> Tensor:
        out = int(torch.randint(3, ())) if self.training or self.always else 3
        for norm, f in [layer for number, layer in enumerate(self.layers) if number != out]:
            x = x + f(norm(x))
        return x


@pytest.mark.parametrize("always", [False, True])
def test_chance_is_noticed_where_as_many_others_run(always: bool) -> None:
    drawn = [int(torch.manual_seed(seed) and torch.randint(3, ())) for seed in (0, 1)]
    assert drawn[0] != drawn[1]
    if always:
        with pytest.raises(rewire.OutOfOrder, match=r"'layers.\d.1' runs in place of"):
            rewire.compile(LeavesOneOut(always), "residual-scale", example_inputs=(vectors(),))
        return
    rewired = rewire.compile(LeavesOneOut(always), "residual-scale", example_inputs=(vectors(),))
    for seed in range(3):
        found, wanted = (torch.manual_seed(seed) and net(vectors()) for net in (rewired, rewire.restore(rewired)))
        torch.testing.assert_close(found, wanted)


def test_a_block_that_never_ran_is_said() -> None:
    class Never(Net):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x, skip=(2,))

    (left,) = rewire.inspect(Never(), (vectors(),)).left
    assert left.path == "blocks.2" and "did not run" in left.why


def test_a_block_that_another_method_ran_is_not_said_to_be_left_out() -> None:
    class Reads(Block):
        def read(self, x: Tensor) -> Tensor:
            x = x[:, :1] + self.norm1(x).mean(1, keepdim=True)
            return x + self.mlp(self.norm2(x))

    class Last(Net):
        block = Reads

        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            x = super().forward(x, stop=DEPTH - 1)
            return self.blocks[-1].read(x)  # type: ignore[operator]

    (left,) = rewire.inspect(Last(), (vectors(),)).left
    assert left.path == "blocks.3.mlp" and left.why.startswith("a single residual add")


@pytest.mark.parametrize("number", range(DEPTH))
def test_a_block_that_runs_for_the_first_time_is_refused(number: int) -> None:
    class Later(Net):
        def forward(self, x: Tensor, skip: tuple[int, ...] = (number,)) -> Tensor:  # type: ignore[override]
            return super().forward(x, skip)

    model = Later()
    rewired = rewire.compile(model, "ancre-ingoing", example_inputs=(vectors(),))
    if number == DEPTH - 1:  # behind the trunk
        torch.testing.assert_close(rewired(vectors(), ()), model(vectors(), ()))
        return
    with pytest.raises(rewire.OutOfOrder):
        rewired(vectors(), ())


def test_adds_of_one_place() -> None:
    rewired = shaken(rewire.compile(AtOnePlace(), "ancre-ingoing", example_inputs=(vectors(),)), 0.3)
    found = rewired(vectors(), 1)
    rewired.blocks[1].mlp.register_forward_hook(lambda _, args, made: torch.zeros_like(made))
    torch.testing.assert_close(found, rewired(vectors()))


def test_layer_dropping_is_named() -> None:
    rewired = rewire.compile(Dropping(), "ancre-ingoing", example_inputs=(vectors(),))
    report = rewire.inspect(rewired)
    assert report == rewire.inspect(Dropping(), (vectors(),)) and len(report.trunks[0].sites) == 2 * DEPTH
    with torch.random.fork_rng():
        ran = []
        for seed in range(2):
            torch.manual_seed(seed)
            ran.append({n for n in range(DEPTH) if torch.rand(()) >= 0.5})
    both = ran[0] & ran[1]
    expected = [f"blocks.{n}.{part}" for n in range(DEPTH) if n not in both for part in ("attn", "mlp")]
    assert list(report.dropped) == expected and expected
    assert not rewire.inspect(Net(), (vectors(),)).dropped


class ReturnsInALoop(Net):
    """Leaves the loop over its blocks by a return, before a block or behind it."""

    def forward(self, x: Tensor, before: int = DEPTH, behind: int = DEPTH) -> Tensor:
        x = self.stem(x)
        for number, block in enumerate(self.blocks):
            if number == before:
                return self.norm(x)
            x = block(x)
            if number == behind: return self.norm(x)  # fmt: skip # noqa: E701
        return self.norm(x)


@pytest.mark.parametrize("topology", ["ancre-ingoing", "hc-dynamic", "dca"])
def test_a_return_in_a_loop(topology: str) -> None:
    returning, stopping = (
        shaken(rewire.compile(net(), topology, validate=False), 0.1, seed=3) for net in (ReturnsInALoop, Net)
    )
    for args, stop in (((), DEPTH), ((1,), 1), ((DEPTH, 1), 2)):
        found, wanted = results(returning, vectors(), *args), results(stopping, vectors(), (), stop)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_last_block_that_adds_in_place_may_be_left_out() -> None:
    block = "x = x * 2\nx += self.f(x.clone())\nreturn x"
    body = "for i, block in enumerate(self.blocks):\n    if i in self.left_out:\n        continue\n    x = block(x)"
    net, x = written_net(block, body), written_input()
    net.left_out = ()  # type: ignore[assignment]
    rewired = rewire.compile(net, "ancre-ingoing", example_inputs=(x,))
    net.left_out = rewired.left_out = (2,)  # type: ignore[assignment]
    torch.testing.assert_close(rewired(x), net(x))


# -- everywhere in the code that calls blocks --------------------------------------------------------------------------


class Branch(nn.Module):
    """A block whose add may stand in the code around it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.f = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def branch(self, x: Tensor) -> Tensor:
        return self.f(self.norm(x)).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(self.norm(x)).tanh()


class InIfs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.norm = nn.ModuleList(Branch() for _ in range(3)), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, keep: tuple[bool, ...]) -> Tensor:
        a, b, c = self.blocks
        if keep[0]:
            x = x + a.branch(x)
        if keep[1]:
            x = x + b.branch(x)
        if keep[2]:
            x = x + c.branch(x)
        return self.norm(x)


class InALoop(InIfs):
    def forward(self, x: Tensor, keep: tuple[bool, ...]) -> Tensor:
        for kept, block in zip(keep, self.blocks, strict=True):
            if kept:
                x = x + block.branch(x)
        return self.norm(x)


class InAnExpression(InIfs):
    def forward(self, x: Tensor, keep: tuple[bool, ...]) -> Tensor:
        for kept, block in zip(keep, self.blocks, strict=True):
            x = x + block.branch(x) if kept else x
        return self.norm(x)


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Branch() for _ in range(2))

    def forward(self, x: Tensor, keep: tuple[bool, ...]) -> Tensor:
        for kept, block in zip(keep, self.blocks, strict=True):
            if not kept:
                continue
            x = block(x)
        return x


class AddingStage(Stage):
    def forward(self, x: Tensor, keep: tuple[bool, ...]) -> Tensor:
        for kept, block in zip(keep, self.blocks, strict=True):
            if not kept:
                continue
            x = x + block.branch(x)
        return x


class InStages(nn.Module):
    stage: type[nn.Module] = Stage

    def __init__(self) -> None:
        super().__init__()
        self.stages, self.norm = nn.ModuleList(self.stage() for _ in range(2)), nn.LayerNorm(WIDTH)
        self.blocks = [block for stage in self.stages for block in stage.blocks]

    def forward(self, x: Tensor, keep: tuple[bool, ...]) -> Tensor:
        for number, stage in enumerate(self.stages):
            x = stage(x, keep[2 * number : 2 * number + 2])
        return self.norm(x)


class InStagesThatAdd(InStages):
    stage = AddingStage


class InStagesOneByOne(InStages):
    def forward(self, x: Tensor, keep: tuple[bool, ...]) -> Tensor:
        x = self.stages[0](x, keep[:2])
        x = self.stages[1](x, keep[2:])
        return self.norm(x)


@pytest.mark.each_once
@pytest.mark.parametrize("topology", ["denseformer", "grn-v1", "hc-static"])
@pytest.mark.parametrize("net", [InIfs, InALoop, InAnExpression, InStages, InStagesThatAdd, InStagesOneByOne])
def test_each_of_them_may_be_left_out(net: Any, topology: str) -> None:
    """The first ones, too. Where none runs, the trunk does not start: its output is its input."""
    plain, x = net(), vectors()
    every = (True,) * len(plain.blocks)
    rewired = shaken(rewire.compile(plain, topology, example_inputs=(x, every)), 0.2)
    branches = [module for module in rewired.modules() if isinstance(module, Branch)]
    for keep in itertools.product((True, False), repeat=len(every)):
        left = rewired(x, keep)
        if not any(keep):
            torch.testing.assert_close(left, plain(x, keep))
            continue
        before = copy.deepcopy(rewired.state_dict())
        for kept, branch in zip(keep, branches, strict=True):
            for parameter in branch.f.parameters() if not kept else ():
                parameter.data.zero_()
        torch.testing.assert_close(left, rewired(x, every))
        rewired.load_state_dict(before)
