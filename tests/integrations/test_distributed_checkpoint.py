"""torch.distributed.checkpoint: saved by two processes, loaded by one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import two_processes
from mixing import mixed
from models import PreNorm, Stack, vectors
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import rewire


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distributed")
    printed = two_processes.run(Path(__file__).with_name("checkpoint_worker.py"), folder)
    assert all("is sharded: save the model with torch.distributed.checkpoint" in text for text in printed)
    return folder


@pytest.mark.filterwarnings("ignore:.*torch.distributed:UserWarning")
def test_one_process_loads_what_two_saved(saved: Path) -> None:
    torch.manual_seed(1)
    model = mixed(Stack(PreNorm))
    optimizer = torch.optim.AdamW(rewire.parameter_groups(model, lr=0.05, weight_decay=0.1))
    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": states}
    dcp.load(state, checkpoint_id=saved / "checkpoint")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    with torch.no_grad():
        torch.testing.assert_close(model(vectors(batch=4)), torch.load(saved / "output.pt"))
    for connection in rewire.connections(model).values():
        for weight in connection.parameters():
            assert bool(optimizer.state[weight]["exp_avg"].any())
    assert not (saved / "refused").exists()


@pytest.mark.filterwarnings("ignore:.*torch.distributed:UserWarning")
def test_another_rewiring_is_refused(saved: Path) -> None:
    model = mixed(Stack(PreNorm), temperature=0.02)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=saved / "checkpoint")
    with pytest.raises(rewire.RewireError, match=r"belong to another rewiring.*temperature"):
        model.load_state_dict(state["model"])
