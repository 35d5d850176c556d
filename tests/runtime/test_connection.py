"""Effective connection weights, kept from one forward to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from mixing import mixed
from models import PreNorm, Stack, vectors
from torch import nn

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
