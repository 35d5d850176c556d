"""State dicts of plain models in rewired ones, and of rewired models in plain ones."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from models import PreNorm, Stack
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

import rewire
from rewire.saving.distributed import LoadPlanner

STAYS = "The state dict is one of a plain model: the connection weights of trunk 'layers' stay as they are."


def plain(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Stack(PreNorm).eval()


def tokens() -> Tensor:
    return torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(0))


def rewired(topology: str = "ancre-ingoing", seed: int = 0, **options: Any) -> nn.Module:
    return rewire.compile(plain(seed), topology, example_inputs=(tokens(),), **options)


def test_a_plain_checkpoint_loads_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    trained, model = plain(1), rewired()
    with caplog.at_level(logging.WARNING, "rewire.saving"):
        result = model.load_state_dict(trained.state_dict())
    assert not result.missing_keys and not result.unexpected_keys
    assert [record.getMessage() for record in caplog.records] == [STAYS]
    torch.testing.assert_close(model(tokens()), trained(tokens()))  # the preserving start


def test_what_else_is_missing_is_still_an_error() -> None:
    state = plain(1).state_dict()
    del state["out.weight"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "out.weight", "depth_connections'):
        rewired().load_state_dict(state)


def test_a_part_of_the_weights_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    state = rewired("grn-v2").state_dict()
    del state[next(key for key in state if "depth_connections" in key)]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "depth_connections'):
        rewired("grn-v2").load_state_dict(state)
    assert not caplog.records


def test_parts_of_a_state_dict(caplog: pytest.LogCaptureFixture) -> None:
    """Adapters, for one, are loaded without the rest."""
    result = rewired().load_state_dict({"out.bias": plain(1).state_dict()["out.bias"]}, strict=False)
    assert any("depth_connections" in key for key in result.missing_keys)
    assert not caplog.records


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_copies_of_norms_are_refused(tmp_path: Path) -> None:
    """They would stay those of the model before, beside the norms that were loaded."""
    model = rewired("muddformer", separate_norms=True)
    with pytest.raises(RuntimeError, match=r"layers\.0\.\w+\.depth_connections': .* call rewire\.compile on that"):
        model.load_state_dict(plain(1).state_dict())
    dcp.save({"model": plain(1).state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(CheckpointException, match=r"\.k\.\w+': the state dict is one of a plain model, which has no"):
        dcp.load({"model": model.state_dict()}, checkpoint_id=tmp_path, planner=LoadPlanner(), no_dist=True)


def test_a_rewired_checkpoint_in_a_plain_model() -> None:
    model = rewired()
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "depth_connections\.layers'):
        plain(1).load_state_dict(model.state_dict())
    base = plain(1)
    base.load_state_dict(rewire.restore(model).state_dict())
    assert torch.equal(base.out.weight, model.out.weight)
