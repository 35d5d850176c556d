"""Code between the blocks that starts to look at hidden states after the model was rewired: right, or an error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_close, evaluate
from every_topology import mixed
from models import PreNorm, Stack, vectors
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from written_nets import assert_right, written_net

import rewire
from rewire.errors import OutOfOrder
from rewire.runtime.stream import Stream


class Looking(Stack):
    """Switched on later."""

    def __init__(self) -> None:
        super().__init__(PreNorm, depth=3)
        self.on, self.after = False, list[Callable[[Tensor], Tensor]]()


class ByIsinstance(Looking):
    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
            if self.on and isinstance(x, torch.Tensor):
                x = 0.5 * x
        return self.out(x)


class ByType(Looking):
    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
            if self.on and type(x) is torch.Tensor:
                x = 0.5 * x
        return self.out(x)


class ByIsTensor(Looking):
    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
            if self.on and torch.is_tensor(x):
                x = 0.5 * x
        return self.out(x)


class ByMethod(Looking):
    def look(self, x: Any) -> Any:
        return 0.5 * x if self.on and isinstance(x, torch.Tensor) else x

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
            x = self.look(x)
        return self.out(x)


class ByCallback(Looking):
    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
            for function in self.after:
                x = function(x)
        return self.out(x)


class Reading(Looking):
    """It changes nothing, but what it read is part of the output."""

    def forward(self, x: Tensor) -> Tensor:
        x, read = self.inp(x), torch.zeros(())
        for layer in self.layers:
            x = layer(x)
            for function in self.after:
                read = read + function(x)
        return self.out(x) + read


class ByView(Looking):
    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
            if self.on:
                x[..., 0].zero_()
        return self.out(x)


class ByData(Looking):
    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
            if self.on:
                x.data.mul_(0.5)
        return self.out(x)


class ByDataAugmented(Looking):
    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
            y = x
            if self.on:
                y[..., :4].data *= 0.5
        return self.out(x)


class BySettingData(Looking):
    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
            if self.on:
                x.data = 0.5 * x.data
        return self.out(x)


class Writer(PreNorm):
    on = False

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        if self.on:
            x.data.mul_(0.5)
        return x + self.mlp(self.ln_2(x))


class InTheBlock(Looking):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Writer() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            layer.on = self.on
        return super().forward(x)


KINDS = [ByIsinstance, ByType, ByIsTensor, ByMethod, ByCallback, Reading, ByView, ByData, ByDataAugmented]
KINDS += [BySettingData, InTheBlock]
KEYS = ["residual", "ancre-ingoing", "denseformer", "grn-v1", "hc-static", "hc-dynamic", "attnres", "muddformer"]


def halved(x: Any) -> Any:
    return 0.5 * x if isinstance(x, torch.Tensor) else x


def summed(x: Any) -> Any:
    return x.sin().mean() if isinstance(x, torch.Tensor) else 0


@pytest.mark.parametrize(
    ("kind", "key"), [(kind, KEYS[number % 4 + more]) for number, kind in enumerate(KINDS) for more in (0, 4)]
)
def test_it_is_right_or_refused(kind: type[Looking], key: str) -> None:
    torch.manual_seed(0)
    model = kind()
    rewired = rewire.compile(model, key, example_inputs=(vectors(),))
    assert_close(evaluate(model, (vectors(),), {}), evaluate(rewired, (vectors(),), {}))
    for other in (model, rewired):
        other.on, other.after = True, [summed if kind is Reading else halved]  # type: ignore[attr-defined, assignment]
    for train in (False, True):
        expected = evaluate(model, (vectors(),), {}, train)
        with contextlib.suppress(OutOfOrder):
            assert_close(expected, evaluate(rewired, (vectors(),), {}, train))
            assert kind is Reading or key == "residual"


class OnTheOtherWay(Looking):
    """What calls a block on a way that was not seen gets the stream for it."""

    def run(self, layer: nn.Module, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(layer, x, use_reentrant=False)
        return found

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = self.run(layer, x) if self.on else layer(x)
        return self.out(x)


@pytest.mark.parametrize("key", ["ancre-ingoing", "hc-dynamic"])
def test_other_ways_to_call_blocks(key: str) -> None:
    rewired = mixed(OnTheOtherWay(), key)
    expected = evaluate(rewired, (vectors(),), {}, True)
    rewired.on = True  # type: ignore[assignment]
    assert_close(expected, evaluate(rewired, (vectors(),), {}, True))


@pytest.mark.each_once
@pytest.mark.parametrize("key", ["ancre-ingoing", "grn-v1", "hc-static"])
@pytest.mark.parametrize(
    "write",
    [
        lambda stream: stream[..., 0].zero_(),
        lambda stream: stream.view(-1).mul_(2),
        lambda stream: stream.detach().mul_(2),
        lambda stream: stream.transpose(0, 1)[0].fill_(1),
        lambda stream: stream.data.mul_(0.5),
        lambda stream: stream.mul_(0.5),
        lambda stream: stream.retain_grad(),
        lambda stream: stream.register_hook(print),
    ],
)
def test_writes_to_a_stream_are_not_lost(write: Callable[[Stream], Any], key: str) -> None:
    """Whoever still has one, in a module that was put around a block, say."""
    rewired = mixed(Stack(PreNorm), key)

    def hook(_m: Any, _args: Any, stream: Stream) -> None:
        write(stream)

    nn.Module.register_forward_hook(rewired.layers[1], hook)
    with torch.no_grad(), pytest.raises(OutOfOrder, match="written to in place"):
        rewired(vectors())


def test_a_sum_that_waits_for_its_state_gets_other_dimensions() -> None:
    block = "b, t, d = x.shape\nx = x.reshape(b * t, d)\nx = x + self.f(x)\nreturn x.view(b, t, d)"
    body = "for block in self.blocks:\n    x = block(x)\n    if torch.is_tensor(x):\n        x = x * 0.8"
    assert_right(written_net(block, body), 3)
