"""What the error about ranks that differ says; ranks that meet are tested in test_distributed.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import PreNorm, Stack

import rewire
from rewire.ranks import meeting
from rewire.ranks.meeting import Meeting, check_alike, difference


def facts(topology: str, **options: Any) -> dict[str, Any]:
    model = rewire.compile(Stack(PreNorm), topology, validate=False, **options)
    (connection,) = rewire.connections(model).values()
    return connection.facts()


def test_facts_are_those_of_every_rewiring_that_is_alike() -> None:
    torch.manual_seed(0)
    first = facts("muddformer")
    torch.manual_seed(1)
    assert facts("muddformer") == first


@pytest.mark.parametrize(
    ("one", "two", "words"),
    [
        ({}, {"temperature": 0.1}, "rank 2 has temperature 0.1 where rank 0 has 0.01"),
        ({}, {"block": 2}, "rank 2 has block 2 where rank 0 has"),
        ({}, {"granularity": "sublayer"}, r"rank 2 has units \[1, 2, 3, .* where rank 0 has \[1, 1, 2"),
        ({"start": "paper"}, {"start": "preserve"}, "rank 2 has start preserve where rank 0 has paper"),
    ],
)
def test_what_differs_is_named(one: dict[str, Any], two: dict[str, Any], words: str) -> None:
    posts = [{"rank": rank, "facts": facts("ancre-ingoing", **given)} for rank, given in ((2, two), (0, one))]
    with pytest.raises(rewire.RewireError, match=words):
        check_alike(posts)
    check_alike(posts[:1] * 3)


def test_ranks_with_the_same_difference_are_named_together() -> None:
    posts = [{"rank": rank, "facts": facts("ancre-outgoing" if rank else "ancre-ingoing")} for rank in (3, 1, 0)]
    assert "ranks 1, 3 have topology ancre-outgoing where rank 0 has ancre-ingoing (trunk " in difference(posts)


@pytest.fixture
def store() -> Iterator[None]:
    """A process group of one process whose ranks come one after the other."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("store")
def test_who_does_not_come_is_waited_for_in_vain_and_compared_later(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, other = facts("ancre-ingoing"), facts("ancre-outgoing")
    first = Meeting("test", [0, 1], mine)
    assert not first.wait(0.05)
    monkeypatch.setattr(meeting, "_NUMBERS", meeting._NUMBERS - meeting._NUMBERS)  # as the other rank counts
    with mock.patch.object(dist, "get_rank", return_value=1):
        second = Meeting("test", [0, 1], other)
    for one in (first, second):
        with pytest.raises(rewire.RewireError, match="rank 1 has topology ancre-outgoing where rank 0 has"):
            one.wait(0)
