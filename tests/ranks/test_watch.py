"""What is looked at before steps; ranks that drift apart are tested in test_parallel.py."""

from __future__ import annotations

import copy
import logging
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import PreNorm, Stack
from torch import nn

import rewire
from rewire.ranks import watch


def training(model: nn.Module, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(steps):
        optimizer.zero_grad()
        model(torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(number))).square().mean().backward()
        optimizer.step()


def looked(model: nn.Module, steps: int, store: Any) -> int:
    """In how many steps something is left in the store."""
    steps_with: set[int] = set()

    def leave(self: watch.Watch, place: list[Any], post: dict[str, Any]) -> None:
        steps_with.add(self.count)
        original(self, place, post)

    original = watch.Watch._leave
    with (
        mock.patch.object(watch, "alone", return_value=False),
        mock.patch.object(watch, "store_of", return_value=store),
        mock.patch.object(dist, "get_rank", return_value=0),
        mock.patch.object(watch.Watch, "_leave", leave),
    ):
        training(model, steps)
    return len(steps_with)


def rewired() -> nn.Module:
    torch.manual_seed(0)
    return rewire.compile(Stack(PreNorm), "ancre-ingoing", validate=False)


def test_few_steps_are_looked_at_also_of_copies_and_no_keys_are_left() -> None:
    store = dist.HashStore()
    assert looked(copy.deepcopy(rewired()), 9, store) == 3  # 2, 4 and 8
    assert store.num_keys() == 0
    assert looked(Stack(PreNorm), 9, store) == 0  # not rewired


def test_a_store_that_has_gone_ends_it(caplog: pytest.LogCaptureFixture) -> None:
    store = mock.Mock()
    store.compare_set.side_effect = dist.DistNetworkError("Broken pipe")
    with caplog.at_level(logging.WARNING, "rewire.ranks"):
        looked(rewired(), 9, store)
    assert caplog.messages == ["connection weights are no longer compared between ranks: Broken pipe"]
