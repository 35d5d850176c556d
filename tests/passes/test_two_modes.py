"""Trunks of a run in training mode are those of evaluation mode by their blocks, not by their names."""

from __future__ import annotations

import pytest
import torch
from mixing import shaken
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rewire
from rewire.passes.find import find
from rewire.passes.prepare import prepare

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, otherwise: bool = False) -> Tensor:
        f = self.f(torch.tanh(x))
        return torch.stack([x, f]).sum(0) if otherwise else x + f  # the former is no residual add


class Net(nn.Module):
    """As in a U-net, a state begins anew in each pass of a loop; in training mode only the last one is a trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.resnets, self.attentions = (nn.ModuleList(Block() for _ in range(3)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for number, (project, resnet, attention) in enumerate(
            zip(self.maps, self.resnets, self.attentions, strict=True)
        ):
            x = attention(resnet(project(torch.tanh(x)), self.training and number < 2))
        return x


def test_they_are_told_by_their_blocks() -> None:
    found = find(prepare(Net(), (torch.randn(2, 3, WIDTH),)), "run")
    assert found.training is not None and len(found.trunks) == 3
    ((name, trunk),) = found.training.trunks.items()
    assert {site.block for site in trunk.sites} == {"resnets.2", "attentions.2"}
    assert {site.block for site in found.trunks[name].sites} == {"resnets.2", "attentions.2"}


class Pair(nn.Module):
    """Two residual adds; in training mode, it may make the sum in another way, as DINOv2 drops paths of a list."""

    def __init__(self, otherwise: bool) -> None:
        super().__init__()
        self.stem, self.f, self.g = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.otherwise = otherwise

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.otherwise:
            return torch.stack([self.stem(x), self.f(x), self.g(x)]).sum(0)
        x = self.stem(x)
        x = x + self.f(x)
        return x + self.g(x)


def test_a_stream_of_evaluation_mode_alone_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Training never moves its connection weights."""
    model, x = nn.Sequential(Pair(True), Pair(False)), torch.randn(2, 3, WIDTH)
    rewired = rewire.compile(model, "ancre-ingoing", example_inputs=(x,))
    rewired.train()(x).sum().backward()
    trained = {name: w.grad is not None for name, c in rewire.connections(rewired).items() for w in c.parameters()}
    assert trained == {"0": False, "1": True}
    (warned,) = [one for one in caplog.messages if "training mode makes no such residual stream" in one]
    assert warned.startswith("trunk '0'")


@torch.jit.script
def out_of_sight(x: Tensor, f: Tensor) -> Tensor:
    return x + f


class Scripted(nn.Module):
    """Adds in TorchScript in training mode, as nanotron's blocks do."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return out_of_sight(x, self.f(x)) if self.training else x + self.f(x)


def test_an_error_of_training_mode_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(rewire.OutOfOrder, match=r"in training mode, .* the model takes another way: block '0'"):
        rewire.compile(nn.Sequential(Scripted(), Scripted()), example_inputs=(torch.randn(2, 3, WIDTH),))
    assert "TorchScript or a kernel" in caplog.text


class Settling(nn.Module):
    """Behind its add, one mode alone changes the state."""

    def __init__(self, mode: bool) -> None:
        super().__init__()
        self.f, self.mode = nn.Linear(WIDTH, WIDTH), mode

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.f(x)
        return torch.tanh(x) if self.training == self.mode else x


@pytest.mark.parametrize("mode", [False, True])
def test_what_follows_the_last_add_in_one_mode_only_is_behind_the_stream(mode: bool) -> None:
    """Behind the others, a state is made of the sum in both modes."""
    found = find(prepare(nn.Sequential(*(Settling(mode) for _ in range(3))), (torch.randn(2, 3, WIDTH),)), "run")
    (trunk,) = found.trunks.values()
    assert [site.post for site in trunk.sites] == [("tanh",), ("tanh",), ()]
    for finding in found.findings:
        (chain,) = finding.chains.values()
        assert chain.adds[-1].post == []


def test_what_follows_the_last_add_in_both_modes_is_its_post() -> None:
    class Both(Settling):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x + self.f(x))

    found = find(prepare(nn.Sequential(*(Both(True) for _ in range(3))), (torch.randn(2, 3, WIDTH),)), "run")
    (trunk,) = found.trunks.values()
    assert [site.post for site in trunk.sites] == [("tanh",)] * 3


def added(f: nn.Module, norm: nn.Module, x: Tensor) -> Tensor:
    return x + f(norm(x))


class Adder(nn.Module):
    def forward(self, f: nn.Module, norm: nn.Module, x: Tensor) -> Tensor:
        return x + f(norm(x))


class Scaled(nn.Module):
    """A block that scales the state in one mode, and adds here."""

    def __init__(self, mode: bool) -> None:
        super().__init__()
        self.norm, self.f, self.mode = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), mode

    def forward(self, x: Tensor) -> Tensor:
        if self.training == self.mode:
            x = x * 0.7
        x = x + self.f(self.norm(x))
        return x


class ScaledForHelper(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        if self.training == self.mode:
            x = x * 0.7
        x = added(self.f, self.norm, x)
        return x


class ScaledForMethod(Scaled):
    def add(self, x: Tensor) -> Tensor:
        return x + self.f(self.norm(x))

    def forward(self, x: Tensor) -> Tensor:
        if self.training == self.mode:
            x = x * 0.7
        x = checkpoint(self.add, x, use_reentrant=False)  # type: ignore[assignment]
        return x


class ScaledForModule(Scaled):
    def __init__(self, mode: bool) -> None:
        super().__init__(mode)
        self.adder = Adder()

    def forward(self, x: Tensor) -> Tensor:
        if self.training == self.mode:
            x = x * 0.7
        x = self.adder(self.f, self.norm, x)
        return x


@pytest.mark.each_once
@pytest.mark.parametrize("mode", [False, True])
@pytest.mark.parametrize("topology", ["hc-dynamic", "mhc", "attnres"])
@pytest.mark.parametrize("block", [ScaledForHelper, ScaledForMethod, ScaledForModule])
def test_a_stream_that_starts_in_a_function_or_in_what_it_calls(block: type[Scaled], topology: str, mode: bool) -> None:
    """The first read, of the tensor that comes in, is the tensor itself only while connections do not mix."""
    x, outputs = torch.randn(2, 3, WIDTH), []
    for made in (Scaled, block):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(made(mode) for _ in range(3)))
        rewired = shaken(rewire.compile(model, topology, example_inputs=(x,), validate=False), 0.3, 1)
        outputs.append([rewired.train(training)(x) for training in (False, True)])
    for one, other in zip(*outputs, strict=True):
        torch.testing.assert_close(one, other)


def test_a_stream_that_starts_with_an_expression_or_in_what_is_called() -> None:
    class Renamed(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            if not self.training:
                return added(self.f, self.norm, x)
            y = x * 0.7
            y = y + self.f(self.norm(y))
            return y

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Renamed(True) for _ in range(3)))
    with pytest.raises(rewire.EditError, match="starts in different places"):
        rewire.compile(model, "hc-dynamic", example_inputs=(torch.randn(2, 3, WIDTH),), validate=False)


class DropsFirst(nn.Module):
    """A block of flash-attn: the first one drops a part of the embeddings, and keeps the result under another name."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.norm, self.f, self.drop = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(p)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        dropped = self.drop(x)
        residual = (dropped + residual) if residual is not None else dropped
        return self.f(self.norm(residual)), residual


class DropsEmbeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DropsFirst(0.0 if number else 0.1) for number in range(4))

    def forward(self, x: Tensor) -> Tensor:
        residual = None
        for layer in self.layers:
            x, residual = layer(x, residual)
        return residual + x  # type: ignore[operator, no-any-return]


class DropsAnotherName(nn.Module):
    """The variable that is dropped from is the parameter under another name (BLT's decoder)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, given: Tensor) -> Tensor:
        x = given
        x = nn.functional.dropout(x, 0.1, self.training)
        for layer in self.layers:
            x = x + layer(x.tanh())
        return x


@pytest.mark.parametrize("topology", ["denseformer", "hc-static"])
@pytest.mark.parametrize("net", [DropsEmbeddings, DropsAnotherName])
def test_a_dropout_before_the_first_add_under_another_name(net: type[nn.Module], topology: str) -> None:
    model, x = net(), torch.randn(2, 3, WIDTH)
    rewired = rewire.compile(model, topology, example_inputs=(x,))
    for training in (False, True):
        runs = []
        for each in (model, rewired):
            torch.manual_seed(1)
            runs.append(each.train(training)(x))
        torch.testing.assert_close(*runs)
