"""torch.distributed.checkpoint: saved by two processes, loaded by one and by four."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import two_processes
from checkpoint_worker import load, optimizer_of, step
from mixing import mixed
from models import PreNorm, Stack
from torch import Tensor

import rewire

pytestmark = pytest.mark.slow

WORKER = two_processes.TESTS / "checkpoint_worker.py"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distributed")
    printed = two_processes.run(WORKER, folder, "save")
    assert all("is sharded: save the model with torch.distributed.checkpoint" in text for text in printed)
    assert not (folder / "refused").exists()
    return folder


@pytest.mark.filterwarnings("ignore:.*torch.distributed:UserWarning")
def test_one_process_resumes_what_two_saved(saved: Path) -> None:
    torch.manual_seed(1)
    model = mixed(Stack(PreNorm))
    optimizer = optimizer_of(model)
    load(saved, model, optimizer)
    for connection in rewire.connections(model).values():
        for weight in connection.parameters():
            assert bool(optimizer.state[weight]["momentum_buffer"].any())
    step(model, optimizer)
    same(model.state_dict(), torch.load(saved / "saver.pt"))


def test_four_processes_resume_what_two_saved(saved: Path) -> None:
    two_processes.play(WORKER, saved, "resume", ranks=4)
    same(torch.load(saved / "resumed.pt"), torch.load(saved / "saver.pt"))


def same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.filterwarnings("ignore:.*torch.distributed:UserWarning")
def test_another_rewiring_is_refused(saved: Path) -> None:
    model = mixed(Stack(PreNorm), temperature=0.02)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=saved / "checkpoint")
    with pytest.raises(rewire.RewireError, match=r"belong to another rewiring.*temperature"):
        model.load_state_dict(state["model"])
