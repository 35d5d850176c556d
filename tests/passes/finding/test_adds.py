"""Which adds of a forward are residual adds: their names, kinds and what follows them; and what only looks like one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from false_friends import FALSE_FRIENDS, Gated
from flows import Written
from models import (
    DEPTH,
    CrossBlock,
    InPlace,
    MaskedStack,
    Mlp,
    OtherSelf,
    Parallel,
    ParallelFirst,
    PostNorm,
    PreNorm,
    ResidualUnit,
    Scaled,
    ShortcutUnit,
    Stack,
    WithAddNorm,
    WithDropPath,
    WithMask,
    vectors,
)
from torch import Tensor, nn
from written_nets import assert_right, written_net

import rewire
from rewire.passes.finding.adds import between, residual_adds

ATTENTION, FFN = ("attn", "attention", ()), ("mlp", "ffn", ())


def sites_of(block: type[nn.Module]) -> list[tuple[str, str, tuple[str, ...]]]:
    """Branch, kind and what follows, of the residual adds of one block of a stack; all blocks have to have the same."""
    (trunk,) = rewire.inspect((MaskedStack if block is WithMask else Stack)(block)).trunks
    per_block: dict[str, list[tuple[str, str, tuple[str, ...]]]] = {}
    for site in trunk.sites:
        assert site.name == f"{site.block}.{site.branch}"
        per_block.setdefault(site.block, []).append((site.branch, site.kind, site.post))
    assert list(per_block) == [f"layers.{i}" for i in range(DEPTH)]
    first = per_block["layers.0"]
    assert all(found == first for found in per_block.values())
    return first


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (PreNorm, [ATTENTION, FFN]),
        (PostNorm, [("attn", "attention", ("ln_1",)), ("mlp", "ffn", ("ln_2",))]),
        (Parallel, [("attn", "parallel", ())]),
        (ParallelFirst, [("attn", "parallel", ())]),
        (Scaled, [ATTENTION, FFN, FFN]),
        (WithAddNorm, [("attn", "attention", ("addnorm1.ln",)), ("mlp", "ffn", ("addnorm2.ln",))]),
        (WithDropPath, [ATTENTION, FFN]),
        (InPlace, [ATTENTION, FFN]),
        (OtherSelf, [FFN]),
        (WithMask, [ATTENTION, FFN]),
    ],
)
def test_sites(block: Callable[[], nn.Module], expected: list[tuple[str, str, tuple[str, ...]]]) -> None:
    found = sites_of(block)
    if block is Scaled:  # a gate is part of the branch
        assert found[:2] == expected[:2] and found[2][1:] == FFN[1:] and found[2][0] in ("mlp", "gate")
    else:
        assert found == expected


def test_cross_attention() -> None:
    report = rewire.inspect(nn.ModuleList([CrossBlock(), CrossBlock()]))
    assert [(site.branch, site.kind) for trunk in report.trunks for site in trunk.sites if site.block == "0"] == [
        ("self_attn", "attention"),
        ("cross_attn", "cross-attention"),
        ("ffn", "ffn"),
    ]


def test_convolutions_and_what_follows_the_add() -> None:
    (trunk,) = rewire.inspect(nn.Sequential(ResidualUnit(), ResidualUnit())).trunks
    assert [(site.name, site.kind, site.width) for site in trunk.sites] == [
        ("0.conv1", "conv", 8),
        ("1.conv1", "conv", 8),
    ]
    assert all(len(site.post) == 1 and "relu" in site.post[0] for site in trunk.sites) and trunk.post_norm
    (trunk,) = rewire.inspect(nn.Sequential(ShortcutUnit(), ShortcutUnit())).trunks
    assert [(site.name, site.kind, site.post) for site in trunk.sites] == [
        ("0.body", "branch", ()),
        ("1.body", "branch", ()),
    ]


@pytest.mark.parametrize("name", list(FALSE_FRIENDS))
def test_no_false_friends(name: str) -> None:
    """Alone, in a row, and inside the branches of real residual blocks."""
    friend = FALSE_FRIENDS[name]
    assert rewire.inspect(friend()).trunks == ()
    assert rewire.inspect(Stack(friend)).trunks == ()
    assert rewire.inspect(nn.Sequential(*[friend() for _ in range(3)])).trunks == ()

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.friend, self.mlp = nn.LayerNorm(32), friend(), Mlp()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.mlp(self.friend(self.norm(x)))

    (trunk,) = rewire.inspect(Stack(Around)).trunks
    assert len(trunk.sites) == DEPTH and all(site.block == f"layers.{i}" for i, site in enumerate(trunk.sites))


def test_the_position_embedding_is_reported() -> None:
    report = rewire.inspect(FALSE_FRIENDS["PositionalEmbedding"]())
    assert report.skipped == {"pos_embed": "adds a position embedding"}


class Earlier(PreNorm):
    """The second shortcut starts before the first add, which then is part of the second branch."""

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(y))


def test_an_add_inside_the_branch_of_another_is_left_alone() -> None:
    model = Stack(Earlier)
    report = rewire.inspect(model)
    (trunk,) = report.trunks
    assert [site.block for site in trunk.sites] == [f"layers.{n}" for n in range(DEPTH)]
    assert report.skipped == {f"layers.{n}.attn": "inside the branch of another residual add" for n in range(DEPTH)}
    rewire.compile(model, "residual", example_inputs=(vectors(),))


class Subtracted(PreNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.ln_2(x)) - x


class Averaged(PreNorm):
    """A convex combination scales the shortcut: no plain residual add."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x + 0.5 * self.mlp(self.ln_2(x))


@pytest.mark.parametrize("block", [Subtracted, Averaged])
def test_a_shortcut_that_is_changed_on_the_way_is_no_residual_add(block: type[nn.Module]) -> None:
    assert rewire.inspect(Stack(block)).trunks == ()


class WithAlpha(PreNorm):
    def forward(self, x: Tensor) -> Tensor:
        return torch.add(x, self.mlp(self.ln_2(x)), alpha=0.5)


def test_an_add_with_a_factor_is_not_taken_for_a_plain_one() -> None:
    """Either left alone or rewritten with its factor."""
    model = Stack(WithAlpha)
    if rewire.inspect(model).trunks:
        rewire.compile(model, "residual", example_inputs=(torch.randn(2, 9, 8),))


@pytest.mark.parametrize("block", [PreNorm, PostNorm, Parallel, Scaled, WithAddNorm, WithDropPath, Gated])
def test_the_finder_needs_no_values(block: type[nn.Module]) -> None:
    with torch.device("meta"):
        model = Stack(block)
    assert rewire.inspect(model) == rewire.inspect(Stack(block))


def test_inspecting_changes_and_runs_nothing() -> None:
    model = Stack(PreNorm)
    state = {path: (type(m), set(vars(m)), dict(m._forward_hooks)) for path, m in model.named_modules()}
    random = torch.random.get_rng_state()
    for module in model.modules():
        module.register_forward_pre_hook(lambda *_: pytest.fail("was called"))
    rewire.inspect(model)
    assert torch.equal(torch.random.get_rng_state(), random)
    for path, module in model.named_modules():
        assert (type(module), set(vars(module)), dict(module._forward_hooks)) == state[path]


NET = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
    def forward(self, x):
        f = self.linear(x)
        return {}
"""
NEAR_MISSES: list[tuple[str, str]] = [
    ("x.detach() + f", "its shortcut is detached"),
    ("sum([x, f])", "its shortcut is a sum with a number"),
    ("torch.add(f, x, alpha=0.5)", "its shortcut is scaled"),
    ("x - f", "is a subtraction"),
    ("f - x", "is a subtraction"),
    ("torch.lerp(x, f, 0.5)", "mixes the state and a branch with `lerp`"),
    ("torch.addcmul(x, f, torch.ones(8))", "adds a branch with `addcmul`"),
    ("torch.stack([x, f]).sum(0)", "sums a stack"),
]


@pytest.mark.parametrize(("written", "why"), NEAR_MISSES)
def test_near_misses_are_left_alone_with_a_reason(written: str, why: str, tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text(NET.format(written))
    names: dict[str, Any] = {"torch": torch, "nn": nn}
    exec(compile(file.read_text(), str(file), "exec"), names)
    report = rewire.inspect(nn.Sequential(names["Block"](), names["Block"]()), (torch.randn(2, 8),))
    assert not report.trunks and [left.path for left in report.left] == ["0.linear", "1.linear"]
    for left in report.left:
        assert left.why.startswith(why) and left.written == written and left.place == f"{file}:8"


# -- on flows that are written by hand


def test_operations_between_two() -> None:
    net = Written()
    x = net.op("input")
    left, right, aside = net.op("relu", x, at="inner"), net.op("tanh", x), net.op("neg", x)
    end = net.op("mul", left, right)
    net.op("mul", aside, end)
    assert between(x, end) == {x, left, right, end}
    assert between(x, end, net.scope("")) == {x, left, right, end}
    assert between(x, left, net.scope("inner")) == {x, left}
    assert between(end, end) == {end}
    assert between(end, x) == between(left, right) == frozenset()


def test_ways_do_not_leave_a_call() -> None:
    """What they start from may stand outside."""
    net = Written()
    x = net.op("input")
    outside = net.linear(x, "other")
    inside = net.op("relu", outside, at="block")
    end = net.op("add", inside, x, at="block")
    assert between(x, end, net.scope("block")) == {x, end}
    assert between(outside, end, net.scope("block")) == {outside, inside, end}
    assert between(x, inside, net.scope("block")) == frozenset()


def test_a_projected_shortcut_is_no_branch() -> None:
    """``x + (g(x) + f(x))``: the sum inside looks like one with a projected shortcut, and x is not its branch."""
    net = Written()
    x = net.op("input")
    g, f = net.linear(x, "block.g"), net.linear(net.op("relu", net.linear(x, "block.f")), "block.f")
    inner = net.op("add", g, f, at="block")
    outer = net.op("add", x, inner, at="block")
    found, _ = residual_adds(net.flow())
    (add,) = (add for add in found if add.op is outer)
    assert add.shortcut is add.source is x and add.branches == [inner]


@pytest.mark.parametrize("between", ["relu", "mul", "dropout", "layer_norm"])
def test_a_projected_shortcut_has_a_branch_with_a_nonlinearity(between: str) -> None:
    """A linear map and its adapter of low rank, ``W(x) + B(A(x)) * scale``, are one linear map (LoRA)."""
    net = Written()
    x = net.op("input")
    made = net.linear(net.op(between, net.linear(x, "block.a")), "block.b")
    net.op("add", net.linear(x, "block.w"), made, at="block")
    assert len(residual_adds(net.flow())[0]) == (between in ("relu", "layer_norm"))


class Adapted(nn.Linear):
    """FLUX's LoRA."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.a, self.b = nn.Linear(8, 2), nn.Linear(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.b(self.a(x)) * 0.5


class Adapters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.maps = Adapted(), nn.ModuleList(Adapted() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.maps:
            x = x + torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("inputs", [None, (torch.randn(2, 8),)])
def test_adapters_of_low_rank_are_no_residual_adds(inputs: Any) -> None:
    report = rewire.inspect(Adapters(), inputs)
    (trunk,) = report.trunks
    assert [site.name for site in trunk.sites] == ["maps.0", "maps.1", "maps.2"] and not report.left


def test_parallel_branches_are_one_add() -> None:
    net = Written()
    x = net.op("input")
    first = net.op("add", x, net.linear(x, "block.f"), at="block")
    outer = net.op("add", first, net.linear(x, "block.g"), at="block")
    (add,), _ = residual_adds(net.flow())
    assert add.op is outer and add.inner == [first] and [op.scope.path for op in add.branches] == ["block.f", "block.g"]


def test_what_is_used_before_the_second_branch_is_an_add_of_its_own() -> None:
    net = Written()
    x = net.op("input")
    first = net.op("add", x, net.linear(x, "block.f"), at="block")
    net.op("add", first, net.linear(x, "block.g"), at="block")
    net.op("relu", first)
    assert residual_adds(net.flow())[0][0].op is first


@pytest.mark.parametrize("shape", [(2, 3, 8), (3, 8), (2, 1, 8)])
def test_what_is_broadcast_is_no_state(shape: tuple[int, ...]) -> None:
    net = Written()
    x = net.op("input", shape=shape)
    net.op("add", x, net.op("expand", net.linear(x, "block.f", shape)), at="block")
    assert len(residual_adds(net.flow())[0]) == (shape == (2, 3, 8))


@pytest.mark.parametrize("given", [("x", "residual"), ("x",), ("residual",), ()])
def test_a_branch_of_the_block_before_is_added_where_a_call_gets_both(given: tuple[str, ...]) -> None:
    """``x, residual = norm(x, residual)``: the branch has run before, and the state is a sum."""
    net = Written()
    x = net.op("input")
    state = net.op("add", x, net.linear(x, "0.f"), at="0")
    branch = net.linear(net.linear(state, "0.g"), "0.g")
    net.scope("1").arguments = {name: [{"x": branch, "residual": state}[name]] for name in given}
    added = net.op("add", branch, state, at="1")
    net.op("mul", added, net.linear(added, "1.f"), at="1")
    found = {add.op: add for add in residual_adds(net.flow())[0]}
    assert (added in found) == (len(given) == 2)
    if added in found:
        assert found[added].shortcut is state and found[added].branches == [branch]


def test_a_mask_that_each_block_adds_is_no_state() -> None:
    """It is given to the call, like the branch, but no sum."""
    net = Written()
    mask = net.op("input")
    branch = net.linear(net.linear(mask, "0.g"), "0.g")
    net.scope("1").arguments = {"x": [branch], "mask": [mask]}
    added = net.op("add", branch, mask, at="1")
    net.op("mul", added, net.linear(added, "1.f"), at="1")
    assert residual_adds(net.flow())[0] == []


@pytest.mark.parametrize(
    ("body", "adds"),
    [
        ("e = x\nfor block in self.blocks:\n    x = block(x + e)", 6),
        ("e, x = x, torch.zeros_like(x)\nfor block in self.blocks:\n    x = e + x\n    x = block(x)", 6),
        ("e, x = x, torch.tanh(x)\nfor _ in range(3):\n    x = self.blocks[0](x + e)", 2),  # a loop with one block
    ],
)
def test_a_value_that_a_loop_adds_again_and_again_is_no_stream(body: str, adds: int) -> None:
    """As in looped transformers, and of a time embedding in StyleTTS2: its sums were taken for shortcuts from it."""
    assert_right(written_net(body=body), adds)


@pytest.mark.parametrize("shift", ["s", "s.view(2, 3, 8)", "s.double().float()"])
def test_a_shift_of_the_branches_of_all_blocks_is_no_state(shift: str) -> None:
    """A FiLM layer whose scale and shift one projection makes for all blocks."""
    block = f"x, s = x\nh = self.f(x) * s + {shift}\nreturn x + h"
    net = written_net(block, "s = torch.tanh(self.stem(x))\nfor block in self.blocks:\n    x = block((x, s))")
    assert_right(net, adds=3)


@pytest.mark.parametrize("skip", ["torch.lerp(first, x, 0.3)", "first * 0.7 + x * 0.3"])
def test_weighted_sums_with_an_earlier_state_are_no_post_norms(skip: str) -> None:
    body = f"x = self.blocks[0](x)\nfirst = x\nx = self.stem(self.blocks[1](x))\nx = {skip}\nx = self.blocks[2](x)"
    for trunk in rewire.inspect(written_net(body=body), (torch.randn(2, 3, 8),)).trunks:
        assert not trunk.post_norm
