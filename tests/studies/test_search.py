from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from regression import model
from torch import nn

import rewire
from rewire.studies.search import Tried, at_edge, best, climb, effects, scaled
from rewire.studies.training import Setting


def search(start: Setting, names: Sequence[str], loss: Callable[[Setting], float], most: int | None = None) -> Tried:
    """A search on a function instead of runs."""
    return climb(start, names, lambda settings: [loss(each) for each in settings], most=most)


def distance(setting: Setting, **wanted: float) -> float:
    return sum(abs(math.log(getattr(setting, name) / value)) for name, value in wanted.items())


def test_a_rate_is_climbed_until_both_neighbours_are_worse() -> None:
    tried = search(Setting(0.001), ["rate"], lambda setting: distance(setting, rate=0.13))
    assert best(tried) == Setting(0.128)
    assert {0.064, 0.256} <= {setting.rate for setting in tried}  # seven steps from the start: it is never cut short
    assert at_edge(tried, ["rate"]) == []


def test_scales_are_searched_along_each_axis() -> None:
    wanted = {"rate": 0.002, "embedding": 16.0, "branch": 0.25}
    tried = search(Setting(0.001), list(wanted), lambda setting: distance(setting, **wanted))
    assert dataclasses.asdict(best(tried)) == pytest.approx({**wanted, "connections": 1.0})  # type: ignore[arg-type]


def test_lower_rates_are_tried_while_all_diverge() -> None:
    tried = search(Setting(0.16), ["rate"], lambda setting: setting.rate if setting.rate < 0.02 else math.inf, most=5)
    assert [each.rate for each in tried] == [0.16, 0.04, 0.01, 0.02, 0.005]
    assert best(search(Setting(1.0), ["rate"], lambda setting: math.inf)) is None


def test_a_search_that_is_cut_short_says_so() -> None:
    names = ["rate", "connections"]
    tried = search(Setting(0.001), names, lambda setting: distance(setting, rate=0.001, connections=64.0), most=7)
    assert len(tried) == 7 and best(tried) == Setting(0.001, 4.0)
    assert "connections" in at_edge(tried, names)


def test_what_is_known_is_not_tried_again() -> None:
    known = {Setting(0.01): 0.5, Setting(0.02): 0.4}
    asked: list[Setting] = []

    def losses(settings: Sequence[Setting]) -> list[float]:
        asked.extend(settings)
        return [1.0] * len(settings)

    climb(Setting(0.01), ["rate"], losses, known)
    assert asked == [Setting(0.04)]


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.blocks = nn.Embedding(4, 8), model()[1:4]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.table(tokens))


def test_scales_are_those_that_the_model_has_by_its_roles() -> None:
    assert scaled(rewire.roles(model())) == {"embedding": True, "branch": True}
    assert scaled(rewire.roles(model()[1:4])) == {"embedding": False, "branch": True}
    assert scaled(rewire.roles(Tables())) == {"embedding": True, "branch": True}


def test_a_scale_without_effect_or_that_was_not_tried_is_named() -> None:
    tried = search(Setting(0.01), ["rate", "branch"], lambda setting: 1.0 + distance(setting, rate=0.01))
    found = effects(tried, {"embedding": False, "branch": True})
    assert found == {"embedding": "not tried: the model has no such weights", "branch": "no effect (0.25, 1, 4)"}
    tried = search(Setting(0.01), ["branch"], lambda setting: distance(setting, branch=4.0))
    assert effects(tried, {"branch": True}) == {"branch": "best 4 of 0.25, 1, 4, 16 in the search"}
