"""Effective connection weights, kept from one forward to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from mixing import mixed, shaken
from models import PreNorm, Stack, vectors
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import rewire
from rewire.topologies.ancre import ANCRe


def written(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.mul_(-3.0)


def written_unseen(parameter: nn.Parameter) -> None:
    parameter.data.mul_(-3.0)  # as averaged weights are swapped in: no version tells


@pytest.mark.parametrize("change", [written, written_unseen])
def test_weights_are_made_once_while_they_stay_as_they_are(change: Callable[[nn.Parameter], None]) -> None:
    model: Any = mixed(Stack(PreNorm), "ancre-ingoing").eval()
    (connection,), x = rewire.connections(model).values(), vectors()
    with torch.no_grad(), mock.patch.object(ANCRe, "weights", autospec=True, side_effect=ANCRe.weights) as made:
        first = model(x)
        assert torch.equal(model(x), first) and made.call_count == 1
        (parameter,) = connection.parameters()
        change(parameter)
        assert not torch.allclose(model(x), first) and made.call_count == 2
    assert torch.allclose(model(x), model(x).detach()) and model(x).requires_grad


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


@pytest.mark.parametrize("topology", ["ancre-ingoing", "denseformer", "hc-dynamic"])
def test_weights_that_torch_parametrizes_or_prunes(topology: str) -> None:
    found: list[dict[str, Tensor]] = []
    for halves in (True, False):
        torch.manual_seed(0)
        model = shaken(rewire.compile(Stack(PreNorm), topology, example_inputs=(vectors(),)), 0.2, 7)
        (connection,) = rewire.connections(model).values()
        for name in connection.learned_names:
            with torch.no_grad():
                mask = torch.rand(getattr(connection, name).shape, generator=torch.Generator().manual_seed(1)) > 0.3
                getattr(connection, name).mul_(1 if halves else mask / 2)
            if halves:
                prune.custom_from_mask(connection, name, mask)
                prune.remove(connection, name)
                parametrize.register_parametrization(connection, name, Halved())
        output = model(vectors())
        output.sum().backward()
        norms = {name: p.grad for name, p in model.named_parameters() if "layers.0" in name and p.grad is not None}
        found.append({"output": output.detach(), **norms})
    for name, value in found[1].items():
        torch.testing.assert_close(found[0][name], value)


def test_weights_are_pruned_while_the_model_learns() -> None:
    model = rewire.compile(Stack(PreNorm), "denseformer", example_inputs=(vectors(),))
    (connection,) = rewire.connections(model).values()
    mask = torch.ones_like(connection.alpha)
    mask[::2] = 0
    prune.custom_from_mask(connection, "alpha", mask)
    model(vectors()).square().sum().backward()
    gradient = connection.alpha_orig.grad
    assert gradient is not None and not gradient[::2].any() and gradient[1::2].any()
