"""Trunks of a run in training mode are those of evaluation mode by their blocks, not by their names."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

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
