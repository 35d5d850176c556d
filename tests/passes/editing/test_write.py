"""What edited forwards say, and that they compute what the user's own do."""

from __future__ import annotations

import copy
import pickle
import textwrap
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision_stub  # noqa: F401
from comparing import assert_close, evaluate
from models import WIDTH, PostNorm, PreNorm, Stack, vectors
from torch import Tensor, nn
from written_nets import assert_right, written_input, written_net

import rewire
from rewire.patterns.tiny import tiny_model


class GPTJ(PreNorm):
    """Parallel branches, added up in two statements."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.ln_1(x)
        y = x + self.attn(h)
        y = y + self.mlp(h)
        return y


class NormInTraining(PreNorm):
    """An operation behind the add that one mode has and the other has not."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mlp(self.ln_1(x))
        if self.training:
            x = x * 0.5
        return x


class NoiseBetween(PreNorm):
    """The trunk starts in other places in training, and a state between two adds is made in training alone."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.training:
            with torch.no_grad():
                scale = x.std()
            x = x * scale
        x = x + self.attn(self.ln_1(x))
        if mask is not None:
            x = x.clone()
            if self.training:
                x = x * mask
        x = x + self.mlp(self.ln_2(x))
        x = x * 0.5 if self.training else x
        return x + self.mlp(x)


class ProjectsFirst(PreNorm):
    """The trunk starts with an operand, in an ``if``; an activation in place follows behind it."""

    def __init__(self, projects: bool = False) -> None:
        super().__init__()
        self.shortcut = nn.Linear(WIDTH, WIDTH) if projects else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.mlp(x)
        if self.shortcut is not None:
            x = x + self.shortcut(shortcut)
        return F.relu(x, inplace=True)


class WrittenTo(PreNorm):
    """The next state is made by an in-place operation, as a statement."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        x = x.clone()
        x.mul_(0.5)
        return x + self.mlp(self.ln_2(x))


class Augmented(PreNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x += self.attn(self.ln_1(x.clone()))
        return torch.add(x, self.mlp(self.ln_2(x)), alpha=0.5)


class Transposed(PreNorm):
    """The stream runs in other dimensions for a while, and passes a norm in them."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        x = self.ln_1(x + self.attn(x))
        x = x.transpose(0, 1)
        return x + self.mlp(self.ln_2(x))


class WrittenInPart(PreNorm):
    """A branch is added to some elements of the sum only."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        chosen = torch.arange(x.shape[1]) > 0
        x[:, chosen] += self.mlp(self.ln_2(x[:, chosen]))
        return x


class SeveralLines(PreNorm):
    """Comments, strings and brackets over several lines stay."""

    def forward(self, x: Tensor) -> Tensor:
        """Adds."""
        note = "x = x + self.attn"  # not this one: x + self.attn(x)
        del note
        x = (
            x  # the stream
            + self.attn(
                self.ln_1(x)
            )
        )  # fmt: skip
        return F.relu(x + self.mlp(self.ln_2(x)))


class Walrus(PreNorm):
    def forward(self, x: Tensor) -> Tensor:
        if (y := x + self.attn(self.ln_1(x))).dim() == 3:
            return y + self.mlp(self.ln_2(y))
        return y


class OneLine(PreNorm):
    def forward(self, x: Tensor) -> Tensor: return x + self.mlp(self.ln_1(x))  # fmt: skip


BLOCKS = [
    GPTJ,
    NormInTraining,
    NoiseBetween,
    WrittenTo,
    WrittenInPart,
    Augmented,
    Transposed,
    SeveralLines,
    Walrus,
    OneLine,
]


@pytest.mark.parametrize("block", BLOCKS)
def test_all_ways_of_writing(block: type[nn.Module]) -> None:
    model, x = Stack(block), vectors()
    rewired = rewire.compile(model, "ancre-none", example_inputs=(x,))
    assert_close(evaluate(model, (x,), {}), evaluate(rewired, (x,), {}))
    model.train(), rewired.train()
    torch.testing.assert_close(rewired(x), model(x))


def body(block: type[nn.Module]) -> str:
    """The edited forward of the second block, without its head."""
    source = rewire.source(rewire.compile(Stack(block), "residual", example_inputs=(vectors(),)), "layers.1")
    return textwrap.dedent(source.partition(":\n")[2])


def test_parallel_branches_in_two_statements() -> None:
    assert "y = depth.add(x, self.attn(h), more=True)\n" in body(GPTJ)
    assert "y = depth.add(y, self.mlp(h), last=True)\n" in body(GPTJ)


def test_an_in_place_operation_gives_its_variable_the_new_state() -> None:
    assert "\nx = depth.push(x.mul_(0.5)" in body(WrittenTo)


class Masked(nn.Module):
    """Hands a mask to its blocks, if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([NoiseBetween() for _ in range(3)])

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = F.pad(x, (0, WIDTH - x.shape[-1]))
        for layer in self.layers:
            x = layer(x, mask)
        return x


@pytest.mark.each_once
@pytest.mark.parametrize("topology", ["residual", "denseformer", "ancre-none"])
@pytest.mark.parametrize("training", [False, True])
def test_operations_that_run_in_some_calls(topology: str, training: bool) -> None:
    """Behind an ``if``, the state is what it made, or what it was before."""
    model, x, mask = Masked(), vectors(), torch.arange(9.0)[:, None]
    rewired = rewire.compile(model, topology, example_inputs=(x, mask))
    assert [len(c.layout.units) for c in rewire.connections(rewired).values()] == [9]
    for given in ((x, mask), (x,)):
        torch.testing.assert_close(rewired.train(training)(*given), model.train(training)(*given))
    text = rewire.source(rewired, "layers.0")
    assert "\n    x = depth.open(x)\n" in text and "\n    x = depth.reach(x)\n" in text


def test_two_streams_that_start_with_what_one_call_returns() -> None:
    body = "x, y = x.chunk(2)\nfor block in self.blocks:\n    x = x + block.f(x)\n    y = y + block.g(y)\nx = x * y"
    assert_right(written_net(body=body), adds=6)


def test_variables_that_never_hold_the_stream_are_not_looked_at_behind_the_blocks() -> None:
    body = "for block in self.blocks:\n    often = False\n    x = checkpoint(block, x, use_reentrant=often)"
    rewired = rewire.compile(written_net(body=body), "residual", example_inputs=(written_input(),))
    reached = [line.split()[1] for line in rewire.diff(rewired).splitlines() if ".reach(" in line]
    assert reached == ["x"]


class Half(nn.Module):
    def forward(self, x: Tensor, factor: float) -> Tensor:
        return factor * x


class Kinds(nn.Module):
    """A loop over layers of several kinds: what an add is followed by runs the next time around."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([PreNorm(), Half(), PreNorm(), Half(), PreNorm()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if isinstance(layer, PreNorm):
                x = layer(x)
            elif isinstance(layer, Half):
                x = layer(x, 0.5)
        return x


def test_an_in_place_operation_of_a_block_that_runs_twice() -> None:
    """It makes the first state of the first call, and the next one of the second: one assignment for both."""

    class Halved(PreNorm):
        def forward(self, x: Tensor) -> Tensor:
            x = x.clone()
            x.mul_(0.5)
            return x + self.mlp(self.ln_2(x))

    class Twice(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.layers[0](self.layers[0](self.inp(x))))

    model, x = Twice(Halved, depth=1), vectors()
    rewired = rewire.compile(model, "ancre-none", example_inputs=(x,))
    assert "\n    x = depth.push(depth.open(x.mul_(0.5)" in rewire.source(rewired, "layers.0")
    assert_close(evaluate(model, (x,), {}), evaluate(rewired, (x,), {}))


def test_branches_of_an_if_that_take_turns_in_a_loop() -> None:
    model, x = Kinds(), torch.randn(2, 3, WIDTH)
    rewired = rewire.compile(model, "denseformer", example_inputs=(x,))
    assert [len(c.layout.units) for c in rewire.connections(rewired).values()] == [6]
    torch.testing.assert_close(rewired(x), model(x))


def test_a_start_that_is_an_operand_in_an_if() -> None:
    x = torch.randn(2, 3, WIDTH)
    model = nn.Sequential(ProjectsFirst(True), ProjectsFirst(), ProjectsFirst())
    rewired = rewire.compile(model, "residual", example_inputs=(x,))
    assert [len(c.layout.units) for c in rewire.connections(rewired).values()] == [3]
    assert rewire.source(rewired, "0").count("depth.open(") == 1


def test_views_of_the_stream_are_views_of_all_states() -> None:
    assert body(Transposed).count("depth.view(lambda value: value.transpose(0, 1), x)") == 2


def test_comments_and_line_breaks_stay() -> None:
    text = body(SeveralLines)
    assert '"x = x + self.attn"  # not this one: x + self.attn(x)\n' in text and '"""Adds."""\n' in text
    assert ")  # fmt: skip\n" in text


def test_names_that_the_function_has() -> None:
    class Named(PreNorm):
        def forward(self, x: Tensor, depth: int = 2, gate: int = 1) -> Tensor:
            return x + self.mlp(self.ln_1(x)) * (depth * gate)

    model, x = Stack(Named), vectors()
    rewired = rewire.compile(model, "residual", example_inputs=(x,))
    torch.testing.assert_close(rewired(x), model(x))
    assert "depth_ = self._depth.enter()" in rewire.source(rewired, "layers.0")


@pytest.mark.parametrize("model_type", ["bloom", "falcon"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_helpers_that_are_no_methods_are_copied(model_type: str, copied: Any) -> None:
    rewired = rewire.compile(tiny_model(model_type).eval(), validate=False)
    ids = torch.arange(3, 9)[None]
    assert torch.equal(copied(rewired)(ids).logits, rewired(ids).logits)


def test_a_state_that_is_written_to_after_it_was_read_is_noticed() -> None:
    class Late(PreNorm):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            h = self.mlp(self.ln_1(x.clone()))
            if mask is not None:
                x.mul_(mask)
            return x + h

    class Net(Stack):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            x = self.inp(x)
            for layer in self.layers:
                x = layer(x, mask)
            return self.out(x)

    rewired = rewire.compile(Net(Late), "ancre-none", example_inputs=(vectors(),))
    with torch.no_grad(), pytest.raises(rewire.OutOfOrder, match=r"written to in place in block 'layers\.0'"):
        rewired(vectors(), torch.ones(2, 9, 1))


class Derived(PreNorm):
    """Its base class makes residual adds, and so does the class itself."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + self.mlp(self.ln_2(x))


class DerivedTwice(Derived):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@pytest.mark.parametrize("block", [Derived, DerivedTwice])
def test_methods_that_call_super(block: Any) -> None:
    model, x = Stack(block), vectors()
    rewired = rewire.compile(model, "grn-v1", example_inputs=(x,))
    (connection,) = rewire.connections(rewired).values()
    assert len(connection.layout.units) == 9
    for training in (False, True):
        assert_close(evaluate(model, (x,), {}, training), evaluate(rewired, (x,), {}, training))
    for other in (copy.deepcopy(rewired), pickle.loads(pickle.dumps(rewired))):
        assert torch.equal(other(x), rewired(x))
    with torch.no_grad():
        for weight in connection.parameters():
            weight.add_(0.3)
    assert not torch.allclose(rewired(x), model(x), atol=1e-3)


class Mixes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real


class MixesBetween(nn.Module):
    """FNet: every second branch has no weights, and its operation stands in a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        mixes = (nn.Sequential(nn.LayerNorm(8), Mixes()) for _ in range(3))
        linear = (nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(3))
        self.layers = nn.ModuleList(nn.ModuleList(pair) for pair in zip(mixes, linear, strict=True))

    def forward(self, x: Tensor) -> Tensor:
        for mix, linear in self.layers:
            x = mix(x) + x
            x = linear(x) + x
        return x


class Doubles(MixesBetween):
    """The first add of each turn is none of a branch; the trunk starts behind that of the first turn."""

    def forward(self, x: Tensor) -> Tensor:
        for _, linear in self.layers:
            x = x.tanh() + x
            x = linear(x) + x
        return x


def test_a_branch_that_mixes_positions_in_a_module_of_its_own() -> None:
    rewired = rewire.compile(MixesBetween(), "denseformer", granularity="sublayer", validate=False)
    (connection,) = rewire.connections(rewired).values()
    assert len(connection.layout.units) == 6
    with pytest.raises(rewire.RewireError, match=r"starts in an expression of .*that a loop runs again"):
        rewire.compile(Doubles(), "denseformer", example_inputs=(vectors(),))


class Wraps(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"state": x}


def test_an_object_where_a_state_was_expected() -> None:
    rewired: Any = rewire.compile(Stack(PostNorm), "residual", example_inputs=(vectors(),))
    rewired.layers[1].ln_1 = Wraps()
    with pytest.raises(rewire.OutOfOrder, match=r"'layers\.1' \(.*models.py:\d+\) makes a dict"):
        rewired(vectors())


class NormsBeside(nn.Module):
    """A helper makes the next state, and returns it behind something else, which is or is not a tensor."""

    def __init__(self, count: bool) -> None:
        super().__init__()
        self.ln_1, self.mlp, self.ln_2 = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.count = count

    def beside(self, pair: list[Any]) -> tuple[Any, Tensor]:
        other, x = pair
        x = self.ln_2(x)
        return other, x

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mlp(self.ln_1(x))
        other, x = self.beside([1 if self.count else x.mean(), x])
        return x * other


@pytest.mark.parametrize("count", [True, False])
def test_the_state_among_what_a_helper_returns(count: bool) -> None:
    model = nn.Sequential(*(NormsBeside(count) for _ in range(3)))
    rewired = rewire.compile(model, "ancre-ingoing", example_inputs=torch.randn(2, 5, WIDTH))
    assert "item=(1,)" in rewire.diff(rewired) and len(rewire.connections(rewired)) == 1


class NormsAtOnce(nn.Module):
    """Its helper makes the next state in the tuple that it returns, behind a tensor that may be None."""

    def __init__(self, unpacks: bool) -> None:
        super().__init__()
        self.mlp, self.norm, self.unpacks = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), unpacks

    def beside(self, x: Tensor, other: Tensor | None) -> tuple[Tensor | None, Tensor]:
        return other, self.norm(x)

    def forward(self, given: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
        x, other = given
        x = x + self.mlp(x)
        if self.unpacks:
            other, x = self.beside(x, other)
        else:
            found = self.beside(x, other)
            x, other = found[1], found[0]
        return x, other


@pytest.mark.parametrize("unpacks", [True, False])
@pytest.mark.parametrize("seen", [True, False])
def test_the_state_behind_what_may_be_missing(seen: bool, unpacks: bool) -> None:
    model, x = nn.Sequential(*(NormsAtOnce(unpacks) for _ in range(3))), torch.randn(2, 5, WIDTH)
    rewired = rewire.compile(model, "ancre-ingoing", example_inputs=((x, x if seen else None),))
    for given in ((x, x), (x, None)):
        for recorded in (True, False):
            with torch.set_grad_enabled(recorded):
                torch.testing.assert_close(rewired(given)[0], model(given)[0])


def kept(function: Any) -> Any:
    return lambda *args: function(*args)


class Decorated(PreNorm):
    """Begins with a decorated function, and has one behind an add (torchtitan's FLUX)."""

    def forward(self, x: Tensor) -> Tensor:
        @kept
        @kept
        def attended(h: Tensor) -> Tensor:
            return self.attn(self.ln_1(h))  # type: ignore[no-any-return]

        x = x + attended(x)

        @kept
        def changed(h: Tensor) -> Tensor:
            return self.mlp(self.ln_2(h))  # type: ignore[no-any-return]

        return x + changed(x)  # type: ignore[no-any-return]


class DecoratedInALoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:

            @kept
            def branch(h: Tensor, block: nn.Module = block) -> Tensor:
                return block(h)  # type: ignore[no-any-return]

            x = x + branch(x).tanh()
        return x


def test_decorated_functions_inside_a_forward() -> None:
    for net, x in ((Stack(Decorated), vectors()), (DecoratedInALoop(), torch.randn(2, 3, WIDTH))):
        rewired = rewire.compile(net, "ancre-ingoing", example_inputs=(x,))
        assert not rewire.inspect(net, example_inputs=(x,)).left
        torch.testing.assert_close(rewired(x), net(x))


@pytest.mark.parametrize(
    "returned",
    [
        "(x), x.mean()",
        "(x), (x.mean())",
        "((x), x.mean())",
        "(x if c else x + 0), c",
        "(x, c)[0], (x, c)",
        '(x), ")),"',
        "(\n    x,  # ), (\n    c\n)",
    ],
)
def test_tuples_with_and_without_brackets_of_their_own(returned: str) -> None:
    """Also where the example does not run."""
    block = "c = True\nx = x + self.f(x)\nx = x + self.g(x)\n"
    assert_right(written_net(f"{block}return {returned}", "for block in self.blocks:\n    x, _ = block(x)"), adds=6)
    body = f"c = True\nfor block in self.blocks:\n    x = x + block.f(x)\nif len(x) == 1:\n    return {returned}"
    net, one = written_net(body=body), written_input()[:1]
    rewired = rewire.compile(net, example_inputs=(written_input(),))
    assert [*map(type, rewired(one))] == [*map(type, net(one))]
