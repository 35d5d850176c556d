"""Rewired models under activation checkpointing, and with several forwards in flight."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from mixing import ANCRE, all_gradients, assert_same, ids, keeping, llama, mixed, shaken, train_step
from models import WIDTH, PreNorm, Stack, images, vectors
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rewire
from rewire.patterns.tiny import tiny_model


@pytest.mark.parametrize(
    ("model_type", "granularity"),
    [
        (t, g)
        for t in ("llama", "gpt2", "bert", "vit", "t5")
        for g in ("block", "sublayer")
        if (t, g) != ("bert", "block")
    ],
)
def test_gradient_checkpointing_recomputes(model_type: str, granularity: str) -> None:
    model = mixed(tiny_model(model_type), granularity=granularity).train()
    inputs: dict[str, Any] = {"pixel_values": images(size=model.config.image_size)} if model_type == "vit" else {}
    if model_type != "vit":
        inputs["input_ids"] = ids()
    if model_type == "t5":
        inputs["decoder_input_ids"] = ids(length=7)
    suffixes = {"llama": "mlp", "gpt2": "mlp", "bert": "intermediate", "vit": "mlp", "t5": "DenseReluDense"}
    calls: list[str] = []
    for path, module in model.named_modules():
        if path.endswith(suffixes[model_type]):
            # before the call: recomputing stops in the midst of the last one, when all that was saved is there again
            module.register_forward_pre_hook(lambda *_, path=path: calls.append(path))
    expected = train_step(model, **inputs)
    once = len(calls)
    assert once == 6 if model_type == "t5" else once == 3
    calls.clear()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    actual = train_step(model, **inputs)
    assert len(calls) == 2 * once
    assert_same(expected, actual, 1e-6 if model_type == "t5" else 0.0)  # its parts' gradients add up in another order
    assert any("depth_connections" in name for name in actual)


def test_reentrant_checkpointing_is_refused() -> None:
    model = mixed(llama()).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(rewire.UnsupportedCall, match=r"model\.layers\.0.*use_reentrant=False"):
        model(ids())


class CheckpointedStack(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant) if self.checkpointed else layer(x)
        return self.out(x)

    checkpointed, reentrant = False, False


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpointing_of_own_blocks_is_refused() -> None:
    model = mixed(CheckpointedStack(PreNorm))
    model.checkpointed = model.reentrant = True
    with pytest.raises(rewire.UnsupportedCall, match=r"layers\.0.*use_reentrant=False.*checkpoint\(layer") as e:
        model(vectors())
    assert "CheckpointedStack.forward" in str(e.value)


def test_reentrant_checkpointing_of_an_input_that_requires_gradients_is_refused() -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([PreNorm(), PreNorm()])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=True)
            return x

    x = torch.randn(2, 5, WIDTH, requires_grad=True)
    with pytest.raises(rewire.UnsupportedCall, match=r"layers\.0.*use_reentrant=False.*checkpoint\(layer"):
        rewire.compile(Layers(), "ancre-ingoing", example_inputs=(x,))


class CheckpointFunction(torch.autograd.Function):
    """Activation checkpointing of its own, re-entrant, as diffusion models have it."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], x: Tensor, *parameters: Tensor) -> Any:
        ctx.function, ctx.x, ctx.parameters = function, x, parameters
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x = ctx.x.detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.function(x)
        return None, *torch.autograd.grad(output, (x, *ctx.parameters), grad)


def checkpointed(function: Callable[..., Any], x: Tensor, parameters: Iterable[Tensor], how: str) -> Any:
    if how == "function":
        return CheckpointFunction.apply(function, x, *parameters)
    return checkpoint(function, x, use_reentrant=how == "reentrant") if how else function(x)


class CheckpointsItself(PreNorm):
    how = ""

    def forward(self, x: Tensor) -> Tensor:
        return checkpointed(self._forward, x, self.parameters(), self.how)

    def _forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x) + torch.zeros(WIDTH))  # memory that no kernel fills
        return x


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("how", ["function", "reentrant"])
@pytest.mark.parametrize("blocks", ["all", "some"])
def test_the_reason_names_reentrant_checkpointing(how: str, blocks: str) -> None:
    model = Stack(CheckpointsItself)
    for layer in [*model.layers][:: 1 if blocks == "all" else 2]:
        layer.how = how
    with pytest.raises(rewire.RewireError, match=r"use_reentrant=False"):
        rewire.compile(model, ANCRE, example_inputs=(vectors(),))


@pytest.mark.parametrize("key", [ANCRE, "hc-dynamic", "muddformer"])
def test_blocks_that_hand_their_methods_to_a_helper_that_checkpoints(key: str) -> None:
    plain, model = Stack(PreNorm), Stack(CheckpointsItself)
    model.load_state_dict(plain.state_dict())
    for layer in model.layers:
        layer.how = "not re-entrant"
    expected, actual = (train_step(mixed(each, key), vectors()) for each in (plain, model))
    assert_same(expected, actual)


class PartlyWithout(Stack):
    """Runs some blocks without gradients, or in re-entrant checkpoints; without gradients the stem before them, too."""

    without = range(0)
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and 0 not in self.without):
            x = self.inp(x)
        for number, layer in enumerate(self.layers):
            if number not in self.without:
                x = layer(x)
            elif self.reentrant:
                x = checkpoint(layer, x, use_reentrant=True)
            else:
                with torch.no_grad():
                    x = layer(x)
        return self.out(x)


@pytest.mark.parametrize(
    ("without", "reentrant", "adds"),
    [
        (range(1, 2), False, 2),
        (range(2, 3), False, 4),
        (range(2), False, 4),
        (range(1, 2), True, 2),
        (range(2, 3), True, 4),
    ],
)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
def test_gradients_that_are_switched_on_or_off_in_a_trunk_are_refused(
    without: range, reentrant: bool, adds: int
) -> None:
    """What the stream keeps for later blocks, and the connection weights, would lose their gradients in silence."""
    model = mixed(PartlyWithout(PreNorm), ANCRE)
    expected = train_step(model, vectors())
    model.without, model.reentrant = without, reentrant
    with pytest.raises(rewire.UnsupportedCall, match=rf"after {adds} of its 6 residual adds.*requires_grad_"):
        model(vectors())
    with torch.no_grad():
        without_gradients = model(vectors())
    model.without = range(0)
    assert torch.equal(without_gradients, model(vectors()))
    assert_same(expected, train_step(model, vectors()))


def test_a_trunk_may_run_without_gradients() -> None:
    model = mixed(PartlyWithout(PreNorm), ANCRE)
    expected = model(vectors())
    model.without = range(3)
    output = model(vectors())
    assert torch.equal(output, expected)
    output.sum().backward()
    assert all_gradients(model).keys() == {"out.weight", "out.bias"}


def test_blocks_that_are_frozen_otherwise_do_not_train() -> None:
    """What the error recommends: the blocks have no gradients, and all connection weights have."""
    model = mixed(Stack(PreNorm), ANCRE)
    expected = train_step(model, vectors())
    model.layers[:2].requires_grad_(False)
    model.inp.requires_grad_(False)
    frozen = tuple(f"{name}." for name in ("inp", "layers.0", "layers.1"))
    assert_same({n: g for n, g in expected.items() if not n.startswith(frozen)}, train_step(model, vectors()), 1e-6)


@pytest.mark.parametrize("granularity", ["block", "sublayer"])
@pytest.mark.parametrize("topology", [ANCRE, "denseformer"])
def test_torch_checkpoint_around_blocks(topology: str, granularity: str) -> None:
    model = mixed(CheckpointedStack(PreNorm), topology, granularity=granularity)
    calls: list[int] = []
    model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(0))
    expected = train_step(model, vectors())
    model.checkpointed = True
    assert_same(expected, train_step(model, vectors()))
    assert len(calls) == 3


class SelectivelyCheckpointed(Stack):
    """Keeps matrix products, and computes all else again: what torchtitan does by default."""

    checkpointed = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        contexts = keeping("mm", "bmm", "addmm", "baddbmm")
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False, context_fn=contexts) if self.checkpointed else layer(x)
        return self.out(x)


@pytest.mark.parametrize("topology", [ANCRE, "grn-v3", "muddformer", "hc-dynamic", "mhc", "attnres"])
def test_selective_checkpointing(topology: str) -> None:
    model = mixed(SelectivelyCheckpointed(PreNorm), topology)
    expected = train_step(model, vectors())
    model.checkpointed = True
    assert_same(expected, train_step(model, vectors()), 1e-5)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_two_forwards_before_one_backward(checkpointed: bool) -> None:
    model = mixed(CheckpointedStack(PreNorm))
    model.checkpointed = checkpointed
    first, second = vectors(), 2 * vectors().flip(0)
    separate = {}
    for x in (first, second):
        for name, gradient in train_step(model, x).items():
            separate[name] = separate.get(name, 0) + gradient
    model.zero_grad()
    a, b = model(first), model(second)
    (a.square().mean() + b.square().mean()).backward()
    assert_same(separate, all_gradients(model), 1e-6)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_interleaved_micro_batches(checkpointed: bool) -> None:
    """Two forwards advance block by block in turns, and their backwards run in the other order."""
    model = mixed(CheckpointedStack(PreNorm))
    first, second = vectors(), 2 * vectors().flip(0)
    expected = {}
    for x in (first, second):
        for name, gradient in train_step(model, x).items():
            expected[name] = expected.get(name, 0) + gradient
    model.zero_grad()
    a, b = model.inp(first), model.inp(second)
    for layer in model.layers:
        a = checkpoint(layer, a, use_reentrant=False) if checkpointed else layer(a)
        b = checkpoint(layer, b, use_reentrant=False) if checkpointed else layer(b)
    assert torch.equal(model.out(a), model(first)) and torch.equal(model.out(b), model(second))
    model.out(a).square().mean().backward()
    model.out(b).square().mean().backward()
    assert_same(expected, all_gradients(model), 1e-6)


class SwitchedOnLater(nn.Module):
    """A block of two streams that checkpoints itself in one of many ways, as those of FLUX in sd-scripts do."""

    how = ""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.other_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.linear, self.other = nn.Linear(width, width), nn.Linear(width, width)

    def _forward(self, x: Tensor, y: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.cat([self.norm(x), self.other_norm(y)], dim=1) + shift
        x = x + self.linear(both[:, : x.shape[1]]).tanh()
        y = y + self.other(both[:, x.shape[1] :]).tanh()
        return x, y

    def forward(self, x: Tensor, y: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        if self.training and self.how:

            def create_custom_forward(function: Callable[..., Any]) -> Callable[..., Any]:
                def custom_forward(*inputs: Any) -> Any:
                    return function(*inputs)

                return custom_forward

            if self.how == "wrapped":
                return checkpoint(create_custom_forward(self._forward), x, y, shift, use_reentrant=False)
            if self.how == "named":
                function = self._forward
                function = create_custom_forward(function)
                return checkpoint(function, x, y, shift, use_reentrant=False)
            if self.how == "partial":
                return checkpoint(functools.partial(self._forward, shift=shift), x, y, use_reentrant=False)
            if self.how == "lambda":
                return checkpoint(lambda x, y: self._forward(x, y, shift), x, y, use_reentrant=False)
            if self.how == "inner function":

                def run(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
                    return self._forward(x, y, shift)

                return checkpoint(run, x, y, use_reentrant=False)
            x, y = checkpoint(create_custom_forward(self._forward), x, y, shift, use_reentrant=False)
            return x, y
        else:
            return self._forward(x, y, shift)


class TwoStreams(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.x, self.y = nn.Linear(width, width), nn.Linear(width, width)
        self.blocks = nn.ModuleList([SwitchedOnLater(width) for _ in range(3)])

    def forward(self, inputs: Tensor) -> Tensor:
        x, y = self.x(inputs), self.y(inputs)
        for block in self.blocks:
            x, y = block(x, y, x.new_ones(x.shape[-1]))
        return torch.cat([x, y], dim=1)


@pytest.mark.parametrize("how", ["wrapped", "named", "partial", "lambda", "inner function", "assigned"])
@pytest.mark.parametrize("topology", ["ancre-ingoing", "hc-dynamic"])
def test_checkpointing_that_is_switched_on_later(how: str, topology: str) -> None:
    model, inputs = TwoStreams(), torch.randn(2, 4, 16)
    rewired = shaken(rewire.compile(model, topology, example_inputs=(inputs,)), 0.05).train()
    expected = gradients(rewired, inputs)
    for block in rewired.blocks:
        block.how = how
    actual = gradients(rewired, inputs)
    assert all(map(torch.equal, actual, expected))


def gradients(model: nn.Module, inputs: Tensor) -> list[Tensor]:
    loss = model(inputs).square().mean()
    return [loss.detach(), *torch.autograd.grad(loss, [*model.parameters()])]


class InSegments(nn.Module):
    """As SwissArmyTransformer runs its layers: segments in a function inside the forward, in a branch of an ``if``."""

    def __init__(self, segments: bool) -> None:
        super().__init__()
        self.embed, self.layers, self.segments = nn.Linear(8, WIDTH), Stack(PreNorm).layers, segments

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        if self.segments:

            def custom(start: int, end: int) -> Callable[..., Any]:
                def custom_forward(*inputs: Tensor) -> tuple[Tensor, int]:
                    hidden = inputs[0]
                    for layer in self.layers[start:end]:
                        hidden = layer(hidden)
                    return hidden, end - start

                return custom_forward

            start = 0
            while start < len(self.layers):
                args = [x]
                x, ran = checkpoint(custom(start, start + 2), *args, use_reentrant=False)
                start += ran
        else:
            for layer in self.layers:
                x = layer(x)
        return x


@pytest.mark.parametrize("key", [ANCRE, "hc-dynamic", "muddformer"])
def test_segments_in_a_function_inside_the_forward(key: str) -> None:
    plain, model = InSegments(False), InSegments(True)
    model.load_state_dict(plain.state_dict())
    expected, actual = (train_step(mixed(each, key, example_inputs=(vectors(),)), vectors()) for each in (plain, model))
    assert_same(expected, actual)
