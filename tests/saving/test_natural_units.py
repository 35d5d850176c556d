"""Files whose connection weights are stored in other units than today's are converted when they are loaded."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mixing import shaken
from models import PreNorm, Stack, vectors
from torch import nn

import rewire
from rewire.patterns.tiny import tiny_model
from rewire.saving.checkpoint import matrices
from rewire.topologies.ancre import ANCRe

TOPOLOGIES = ["ancre-ingoing", "denseformer", "grn-v3", "hc-static", "laurel-rw", "muddformer", "variance-gate"]


def stack() -> nn.Module:
    return Stack(PreNorm).eval()


def compiled(topology: str) -> nn.Module:
    return rewire.compile(stack(), topology, validate=False)


@pytest.fixture
def before(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], nn.Module]:
    """Makes a model with connection weights as they were stored before there were units: as the formulas have them."""

    def make(topology: str) -> nn.Module:
        with monkeypatch.context() as patch:
            cls = type(next(iter(rewire.connections(compiled(topology)).values())).layout.topology)
            patch.setattr(cls, "natural_scales", lambda self, dims: {})
            model = shaken(compiled(topology), 0.01, 3)
            (connection,) = rewire.connections(model).values()
            assert "scales" not in connection.recipe()
        return model

    return make


def assert_same(model: nn.Module, old: nn.Module) -> None:
    (connection,), (theirs,) = rewire.connections(model).values(), rewire.connections(old).values()
    assert connection.recipe()["scales"] and not torch.equal(*(next(c.parameters()) for c in (connection, theirs)))
    for name, value in theirs.values().items():
        torch.testing.assert_close(connection.values()[name], value)
    torch.testing.assert_close(model(vectors()), old(vectors()))


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_state_dicts(before: Callable[[str], nn.Module], topology: str, tmp_path: Path) -> None:
    old, model = before(topology), compiled(topology)
    state = copy.deepcopy(old.state_dict())
    model.load_state_dict(state)
    assert_same(model, old)
    model.load_state_dict(copy.deepcopy(model.state_dict()))  # in today's units: as they are
    assert_same(model, old)
    torch.save(old.state_dict(), tmp_path / "old.pt")
    for matrix, want in zip(matrices(tmp_path / "old.pt").values(), rewire.coefficients(old).values(), strict=True):
        torch.testing.assert_close(matrix, want)


def test_the_given_state_dict_stays_as_it_is(before: Callable[[str], nn.Module]) -> None:
    state = before("ancre-ingoing").state_dict()
    kept = copy.deepcopy(state)
    compiled("ancre-ingoing").load_state_dict(state, assign=True)
    assert all(torch.equal(value, kept[name]) for name, value in state.items())


@pytest.mark.parametrize("topology", ["ancre-ingoing", "muddformer"])
def test_folders(before: Callable[[str], nn.Module], topology: str, tmp_path: Path) -> None:
    old = before(topology)
    rewire.save(old, tmp_path, max_shard_bytes=1_000)  # a recipe is not where its weights are
    assert_same(rewire.load(tmp_path, stack(), example_inputs=(vectors(),)), old)


def test_checkpoints_of_transformers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ANCRe, "natural_scales", lambda self, dims: {})
        old = shaken(rewire.compile(tiny_model("llama"), "ancre-ingoing", validate=False), 0.01, 3)
        old.save_pretrained(tmp_path / "old")
        (want,) = rewire.coefficients(old).values()
    rewire.from_pretrained(tmp_path / "old").save_pretrained(tmp_path / "new")  # in today's units: as they are
    for folder in ("old", "new"):
        model, _ = rewire.from_pretrained(tmp_path / folder, output_loading_info=True)  # type: ignore[misc]
        (found,) = rewire.coefficients(model).values()
        torch.testing.assert_close(found, want)


@pytest.mark.parametrize("scales", [None, [], 1, {"logits": 0}, {"logits": -1.0}, {"logits": "1"}, {"logits": 1e999}])
def test_damaged_units(scales: Any) -> None:
    model = compiled("ancre-ingoing")
    (connection,) = rewire.connections(model).values()
    text = json.dumps({**connection.recipe(), "scales": scales})
    state = model.state_dict()
    (key,) = (name for name in state if name.endswith("_extra_state"))
    state[key] = torch.tensor(list(text.encode()), dtype=torch.uint8)
    with pytest.raises(rewire.RewireError, match="damaged"):
        model.load_state_dict(state)
