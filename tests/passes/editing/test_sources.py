"""Functions that a model calls by what holds them: decorated, compiled, kept in lists, closures and tables."""

from __future__ import annotations

import functools
import pickle
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mixing import shaken
from models import WIDTH, Attention, Mlp, PreNorm, SeparateAttention, Stack, vectors
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rewire
from rewire.code.references import found_again
from rewire.passes.editing.sources import Sources

interpreted = functools.partial(torch.compile, backend="eager")


def alike(model: nn.Module, topology: str, validate: bool = True) -> nn.Module:
    """``model``, rewired: with moved weights it has to compute what a plainly written stack does."""
    plain = Stack(PreNorm, 2)
    plain.load_state_dict(model.state_dict())
    found, wanted = (
        shaken(rewire.compile(net, topology, example_inputs=(vectors(),), validate=validate), 0.2, seed=3)
        for net in (model, plain)
    )
    torch.testing.assert_close(found(vectors()), wanted(vectors()))
    return found


@interpreted
def add_compiled(x: Tensor, f: Tensor) -> Tensor:
    return f + x


class CallsCompiled(PreNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = add_compiled(x, self.attn(self.ln_1(x)))
        return add_compiled(x, self.mlp(self.ln_2(x)))


class HoldsCompiled(PreNorm):
    def __init__(self) -> None:
        super().__init__()
        self.plus = add_compiled

    def forward(self, x: Tensor) -> Tensor:
        x = self.plus(x, self.attn(self.ln_1(x)))
        return self.plus(x, self.mlp(self.ln_2(x)))  # type: ignore[no-any-return]


class CompiledForward(PreNorm):
    @interpreted
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class CompiledMethod(PreNorm):
    @interpreted
    def feed(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.ln_2(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.feed(x + self.attn(self.ln_1(x)))


SLOW = [pytest.param(block, marks=pytest.mark.slow) for block in (CallsCompiled, CompiledForward, CompiledMethod)]


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("block", [HoldsCompiled, *SLOW])
def test_functions_that_a_model_compiles_by_itself(block: type[nn.Module]) -> None:
    rewired = alike(Stack(block, 2), "ancre-ingoing", validate=False)
    if block is not HoldsCompiled:  # where torch.compile does not see which function that is
        compiled = torch.compile(rewired, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(vectors()), rewired(vectors()))


@torch.autocast("cpu", enabled=False)
def add_decorated(x: Tensor, f: Tensor) -> Tensor:
    return f + x


class CallsDecorated(PreNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = add_decorated(x, self.attn(self.ln_1(x)))
        return add_decorated(x, self.mlp(self.ln_2(x)))


class Held(PreNorm):
    """Calls a method of its own, as an object holds it."""

    def __init__(self, held: str) -> None:
        super().__init__()
        ways: dict[str, Any] = {
            "attribute": self.step,
            "partial": functools.partial(self.step),
            "compiled": interpreted(self.step),
        }
        self.held = ways[held]

    def step(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.held(x)  # type: ignore[no-any-return]


class InATable(Held):
    table = (Held.step,)

    def __init__(self) -> None:
        super().__init__("attribute")

    def forward(self, x: Tensor) -> Tensor:
        return self.table[0](self, x)


class HoldsForwards(Stack):
    def __init__(self) -> None:
        super().__init__(PreNorm, 2)
        self.held = [layer.forward for layer in self.layers]

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.held:
            x = layer(x)
        return self.out(x)


@pytest.mark.parametrize("held", ["attribute", "partial", "compiled", "table", "forwards"])
def test_methods_that_something_holds_are_refused(held: str) -> None:
    """They go on to be the original's: its connections would never run."""
    nets = {"table": lambda: Stack(InATable, 2), "forwards": HoldsForwards}
    model: nn.Module = nets.get(held, lambda: Stack(lambda: Held(held), 2))()
    with pytest.raises(rewire.EditError, match="as something holds it: call it by its name"):
        rewire.compile(model, "ancre-ingoing", example_inputs=(vectors(),), validate=False)


def test_validation_notices_a_trunk_that_never_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sources, "check_called", lambda self, scope: None)
    with pytest.raises(rewire.ValidationMismatch, match="no stream of trunk 'layers' begins"):
        rewire.compile(HoldsForwards(), "ancre-ingoing", example_inputs=(vectors(),))


class DropsAll(nn.Module):
    """An encoder that a training step leaves out by chance: with the seed of the second run, not of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = Stack(PreNorm, 2), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        encoded = not self.training or torch.rand(()) < 0.6
        return self.head(x) + self.encoder(x) if encoded else self.head(x)


def test_a_trunk_may_be_left_out_by_chance() -> None:
    torch.manual_seed(0)
    assert torch.rand(()) < 0.6
    torch.manual_seed(1)
    assert torch.rand(()) > 0.6
    rewire.compile(DropsAll(), "ancre-ingoing", example_inputs=(vectors(),))


class ByName(Held):
    def __init__(self) -> None:
        super().__init__("attribute")

    def forward(self, x: Tensor) -> Tensor:
        step = self.step if self.training else getattr(self, "step")  # noqa: B009
        return step(x)


def test_methods_by_another_name_of_the_same_call() -> None:
    alike(Stack(ByName, 2), "ancre-ingoing", validate=False)


def test_decorated_functions_are_refused() -> None:
    with pytest.raises(rewire.EditError, match=r"'add_decorated'.* at .*test_sources.py:\d+, is decorated"):
        alike(Stack(CallsDecorated, 2), "ancre-ingoing")


class InAClosure(Stack):
    def __init__(self) -> None:
        super().__init__(PreNorm, 2)
        self.held = [lambda x, layer=layer: layer(x) for layer in self.layers]

    forward = HoldsForwards.forward


@torch.jit.script
def add_scripted(x: Tensor, f: Tensor) -> Tensor:
    return f + x


class CallsScripted(PreNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = add_scripted(x, self.attn(self.ln_1(x)))
        return add_scripted(x, self.mlp(self.ln_2(x)))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (InAClosure, "reads a parameter that does not belong to the model's copy"),
        (lambda: Stack(CallsScripted), "TorchScript"),
    ],
)
def test_what_hides_is_named(model: Any, words: str) -> None:
    with pytest.raises(rewire.NoResidualAdds, match=words):
        rewire.compile(model(), "ancre-ingoing", example_inputs=(vectors(),))


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(x.flatten(0, 1), torch.tanh(self.up(x)).flatten(0, 1), self.down).view_as(x)


class OneProduct(PreNorm):
    """Its branch has no other weights than those of the product that adds it."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.baddbmm(x, self.ln_1(x), self.mlp.up.weight[:WIDTH].expand(len(x), -1, -1))


@pytest.mark.parametrize("block", [Products, OneProduct])
def test_an_add_inside_a_product_is_told(block: type[nn.Module]) -> None:
    with pytest.raises(rewire.NoResidualAdds, match="inside a product of matrices"):
        rewire.compile(Stack(block), "ancre-ingoing", example_inputs=(vectors(),))


class WithBias(PreNorm):
    """Adds a bias by a product of matrices, as GPT-2 does, and the branch by itself."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.mlp.up.weight[:WIDTH].expand(len(x), -1, -1)
        return x + torch.baddbmm(self.mlp.up.bias[:WIDTH], self.ln_1(x), weight)


def test_a_bias_inside_a_product_is_no_add() -> None:
    assert not rewire.inspect(Stack(WithBias), example_inputs=(vectors(),)).left


def test_hooks_with_a_factor_of_one() -> None:
    model = Stack(PreNorm, 2)
    for layer in model.layers:
        layer.register_forward_hook(lambda module, args, output: output.float() * 1.0)
    alike(model, "hc-dynamic", validate=False)


class Inside(Stack):
    """The loop over blocks stands in a function inside the forward."""

    def forward(self, x: Tensor) -> Tensor:
        def run(h: Tensor) -> Tensor:
            for layer in self.layers:
                h = layer(h)
            return h

        return self.out(run(self.inp(x)))


def test_a_loop_in_a_function_inside() -> None:
    alike(Inside(PreNorm, 2), "hc-dynamic", validate=False)


class Patched(Stack):
    """Its blocks have forwards of their own, which call those of the class."""

    def __init__(self) -> None:
        super().__init__(PreNorm, 2)
        for block in self.layers:
            block.forward = types.MethodType(lambda block, x: PreNorm.forward(block, x), block)


class Checkpointed(Stack):
    """As fairseq wraps layers."""

    def __init__(self) -> None:
        super().__init__(PreNorm, 2)
        for block in self.layers:
            vars(block)["forward"] = functools.partial(checkpoint, block.forward, use_reentrant=False)


class Traced(Stack):
    """Its blocks are graphs, of which every copy is made anew."""

    def __init__(self) -> None:
        super().__init__(PreNorm, 2)
        for number, block in enumerate(self.layers):
            self.layers[number] = torch.fx.symbolic_trace(block)


@pytest.mark.parametrize("validate", [True, False])
@pytest.mark.parametrize(
    ("made", "why"),
    [
        (Patched, "let the forward of its class call"),
        (Checkpointed, r"To checkpoint it, write checkpoint\(module"),
        (Traced, "traced by torch.fx"),
    ],
)
def test_modules_whose_copies_would_not_be_edited(made: type[nn.Module], why: str, validate: bool) -> None:
    with pytest.raises(rewire.EditError, match=why):
        rewire.compile(made(), "ancre-ingoing", example_inputs=(vectors(),), validate=validate)


def run(block: nn.Module, *args: Tensor) -> Any:
    return block(*args)


class Twice(Stack):
    """Two trunks, whose blocks one function calls."""

    def __init__(self) -> None:
        super().__init__(PreNorm, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for number, layer in enumerate(self.layers):
            x = run(layer, self.inp(x[..., : self.inp.in_features]) if number == 2 else x)
        return self.out(x)


def test_two_trunks_whose_blocks_one_function_calls() -> None:
    rewired = rewire.compile(Twice(), "hc-dynamic", example_inputs=(vectors(),))
    assert [len(c.layout.units) for c in rewire.connections(rewired).values()] == [4, 4]


def add_branch(branch: nn.Module, x: Tensor) -> Tensor:
    return x + branch(x)


class CallsPartials(PreNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = functools.partial(add_branch, nn.Sequential(self.ln_1, self.attn))(x)
        return functools.partial(add_branch, x=x)(nn.Sequential(self.ln_2, self.mlp))


def test_partials_of_functions_that_add() -> None:
    alike(Stack(CallsPartials, 2), "ancre-ingoing")


def logged(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def inner(*args: Any) -> Tensor:
        return function(*args)

    return inner


def unnamed(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def inner(*args: Any) -> Tensor:
        return function(*args)

    return inner


class Counted:
    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *args: Any) -> Tensor:
        self.calls += 1
        return self.function(*args)


@logged
@unnamed
def plus(x: Tensor, f: Tensor) -> Tensor:
    return x + f


@Counted
def plus_counted(x: Tensor, f: Tensor) -> Tensor:
    return x + f


def made() -> Callable[..., Tensor]:
    def plus(x: Tensor, f: Tensor) -> Tensor:
        return x + f

    return plus


class Adds(PreNorm):
    """Adds by a function or a method of some kind."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    @logged
    def method(self, x: Tensor, f: Tensor) -> Tensor:
        return x + f

    @staticmethod
    def static(x: Tensor, f: Tensor) -> Tensor:
        return x + f

    @staticmethod
    @logged
    def decorated_static(x: Tensor, f: Tensor) -> Tensor:
        return x + f

    @classmethod
    @logged
    def of_class(cls, x: Tensor, f: Tensor) -> Tensor:
        return x + f

    @property
    def given(self) -> Callable[..., Tensor]:
        return lambda x, f: plus(x, f)

    @property
    def adder(self) -> Callable[..., Tensor]:
        known = {"function": plus, "counted": plus_counted, "made": made(), "static": self.static}
        ways = {"method": self.method, "decorated static": self.decorated_static, "of class": Adds.of_class}
        return {**known, **ways, "lambda": self.given}[self.how]

    def forward(self, x: Tensor) -> Tensor:
        adder = self.adder
        x = adder(x, self.attn(self.ln_1(x)))
        return adder(x, self.mlp(self.ln_2(x)))


class AddsByName(Adds):
    def forward(self, x: Tensor) -> Tensor:
        if self.how == "static":
            x = self.static(x, self.attn(self.ln_1(x)))
            return AddsByName.static(x, self.mlp(self.ln_2(x)))
        x = self.method(x, self.attn(self.ln_1(x)))
        return self.decorated_static(self.of_class(x, self.mlp(self.ln_2(x))), torch.zeros(()))


class AddsBySuper(Adds):
    def forward(self, x: Tensor) -> Tensor:
        if self.how == "method":
            x = super().method(x, self.attn(self.ln_1(x)))
            return super().decorated_static(x, self.mlp(self.ln_2(x)))
        x = super().static(x, self.attn(self.ln_1(x)))
        return super().of_class(x, self.mlp(self.ln_2(x)))


HOW = ["function", "counted", "made", "static", "decorated static", "of class"]


@pytest.mark.parametrize(
    ("block", "how"), [*((Adds, how) for how in HOW), (AddsByName, "static"), (AddsByName, ""), (AddsBySuper, "")]
)
@pytest.mark.filterwarnings("ignore:.*not validated")
def test_helpers_of_all_kinds_and_their_pickles(block: type[Adds], how: str) -> None:
    rewired = alike(Stack(lambda: block(how), 2), "ancre-ingoing")
    again = pickle.loads(pickle.dumps(rewired))
    torch.testing.assert_close(again(vectors()), rewired(vectors()), rtol=0, atol=0)


class FromATable(PreNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = HIDDEN["plus"](x, self.attn(self.ln_1(x)))
        return HIDDEN["plus"](x, self.mlp(self.ln_2(x)))


def removed(x: Tensor, f: Tensor) -> Tensor:
    return x + f


HIDDEN = {"plus": removed}
del removed


def test_what_no_name_leads_to_cannot_be_pickled() -> None:
    rewired = rewire.compile(Stack(FromATable, 2), "ancre-ingoing", example_inputs=(vectors(),))
    with pytest.raises(rewire.EditError, match=r"removed at .*test_sources.py:\d+ .*use rewire.save"):
        pickle.dumps(rewired)


def test_a_function_is_found_by_its_name_wherever_it_has_moved_to() -> None:
    found = found_again(__name__, "plus", 1)
    assert found is not None and found.__qualname__ == "plus" and found is plus.__wrapped__.__closure__[0].cell_contents  # type: ignore[attr-defined]
    assert found_again(__name__, "nothing", 1) is None


class Chosen(PreNorm):
    """Adds by a function that is chosen by the type of what it gets first."""

    @functools.singledispatchmethod
    def step(self, branch: nn.Module, x: Tensor) -> Tensor:
        return x + branch(self.ln_2(x))

    @step.register
    def _(self, branch: Attention, x: Tensor) -> Tensor:
        return x + branch(self.ln_1(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.step(self.mlp, self.step(self.attn, x))


class Fewer(PreNorm):
    def forward(self, x: Tensor, attend: bool = True) -> Tensor:
        if attend:
            x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class CallsAgain(Stack):
    """Calls its first block once more, without the attention."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(self.layers[0](x, attend=False))


class PlainAgain(CallsAgain):
    def forward(self, x: Tensor) -> Tensor:
        x, first = self.inp(x), self.layers[0]
        for layer in self.layers:
            x = layer(x)
        return self.out(x + first.mlp(first.ln_2(x)))


def test_methods_that_are_chosen_by_type() -> None:
    alike(Stack(Chosen, 2), "ancre-ingoing")


@pytest.mark.parametrize("validate", [True, False])
def test_calls_of_one_block_that_make_different_numbers_of_adds(validate: bool) -> None:
    model, plain = CallsAgain(Fewer, 2), PlainAgain(PreNorm, 2)
    plain.load_state_dict(model.state_dict())
    found, wanted = (
        shaken(
            rewire.compile(
                net, "ancre-ingoing", example_inputs=(vectors(),), validate=validate, granularity="sublayer"
            ),
            0.2,
            seed=3,
        )
        for net in (model, plain)
    )
    torch.testing.assert_close(found(vectors()), wanted(vectors()))


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def test_a_subclass_of_sequential_that_adds() -> None:
    blocks = (Residual(nn.LayerNorm(WIDTH), branch) for _ in range(2) for branch in (SeparateAttention(), Mlp()))
    model = nn.Sequential(*blocks)
    x = torch.randn(2, 3, WIDTH)
    with pytest.raises(rewire.UnsupportedTopology, match="in a loop over modules"):
        rewire.compile(model, "dca", example_inputs=(x,), validate=False)
    rewire.compile(model, "ancre-ingoing", example_inputs=(x,))


def scaled(x: Tensor, f: Tensor, scale: float = 1.0, *, shift: float = 0.0) -> Tensor:
    return x + f * scale + shift


by_another_name = scaled
del scaled


def blocks_with_defaults() -> tuple[type[PreNorm], ...]:
    """Blocks whose helpers have defaults, in classes that no name of the module leads to."""

    class Adds(PreNorm):
        @staticmethod
        def plus(x: Tensor, f: Tensor, scale: float = 1.0) -> Tensor:
            return x + f * scale

        @classmethod
        def added(cls, x: Tensor, f: Tensor, scale: float = 1.0) -> Tensor:
            return x + f * scale

        def attended(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return x + self.attn(self.ln_1(x)) * scale

    class Static(Adds):
        def forward(self, x: Tensor) -> Tensor:
            x = self.plus(x, self.attn(self.ln_1(x)))
            return self.added(x, self.mlp(self.ln_2(x)))

    class Inside(PreNorm):
        def forward(self, x: Tensor) -> Tensor:
            def add(x: Tensor, f: Tensor, scale: float = 1.0) -> Tensor:
                return x + f * scale

            x = add(x, self.attn(self.ln_1(x)))
            return add(x, self.mlp(self.ln_2(x)))

    class Renamed(PreNorm):
        def forward(self, x: Tensor) -> Tensor:
            x = by_another_name(x, self.attn(self.ln_1(x)))
            return by_another_name(x, self.mlp(self.ln_2(x)))

    class Super(Adds):
        def attended(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return super().attended(x)

        def forward(self, x: Tensor) -> Tensor:
            x = self.attended(x)
            return x + self.mlp(self.ln_2(x))

    class ByTheBase(Adds):
        def forward(self, x: Tensor) -> Tensor:
            x = super().attended(x)
            return x + self.mlp(self.ln_2(x))

    return Static, Inside, Renamed, Super, ByTheBase


*DEFAULTS, BY_THE_BASE = blocks_with_defaults()


@pytest.mark.parametrize("block", DEFAULTS)
def test_defaults_of_helpers(block: type[PreNorm]) -> None:
    alike(Stack(block, 2), "ancre-ingoing", validate=False)


def test_a_method_that_is_called_as_the_base_classs() -> None:
    with pytest.raises(rewire.EditError, match=r"call it by its name there, as `self.attended`"):
        rewire.compile(Stack(BY_THE_BASE, 2), example_inputs=(vectors(),))
