"""Functions that a model calls by what holds them: decorated, compiled, kept in lists, closures and tables."""

from __future__ import annotations

import functools
import types
from typing import Any

import pytest
import torch
from mixing import shaken
from models import WIDTH, PreNorm, Stack, vectors
from torch import Tensor, nn

import rewire
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
    torch._dynamo.reset()
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
    with pytest.raises(rewire.EditError, match="'add_decorated', which adds to the stream, is decorated"):
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
    [(InAClosure, "reads a parameter that is none of the model's copy"), (lambda: Stack(CallsScripted), "TorchScript")],
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


def test_an_add_inside_a_product_is_told() -> None:
    with pytest.raises(rewire.NoResidualAdds, match="inside a product of matrices"):
        rewire.compile(Stack(Products), "ancre-ingoing", example_inputs=(vectors(),))


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


class Traced(Stack):
    """Its blocks are graphs, of which every copy is made anew."""

    def __init__(self) -> None:
        super().__init__(PreNorm, 2)
        for number, block in enumerate(self.layers):
            self.layers[number] = torch.fx.symbolic_trace(block)


@pytest.mark.parametrize("validate", [True, False])
@pytest.mark.parametrize(
    ("made", "why"), [(Patched, "let the forward of its class call"), (Traced, "traced by torch.fx")]
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
