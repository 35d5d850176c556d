"""Several processes save into one folder at once, or are killed while they do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cut_off
import pytest
import save_worker
import two_processes

import rewire
from rewire.saving import folder as saving


def contents(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def holds_one_model(folder: Path) -> bool:
    """Whether there are the files of one save and nothing beside them."""
    return contents(folder) == {saving.RECIPE, *json.loads((folder / saving.RECIPE).read_text())["files"]}


def winners_of_races(folder: Path, trials: int, writers: int) -> list[int]:
    """All saves and loads succeed, what is left is whole, one of those that were saved, and nothing beside it.

    Whose it is, for each trial."""
    printed = two_processes.run(Path(save_worker.__file__), folder, str(trials), ranks=writers + 1)
    wrong = [found for text in printed for line in text.splitlines() if (found := json.loads(line))]
    assert not wrong, "\n".join(wrong)
    winners = []
    for number in range(trials):
        saved = folder / str(number) / "saved"
        winners.append(save_worker.rank_of(rewire.load(saved, save_worker.stack())))
        assert holds_one_model(saved)
    assert set(winners) <= set(range(writers))
    return winners


@pytest.mark.slow
@pytest.mark.parametrize("writers", [2, 4])
def test_many_trials_of_processes_that_save_into_one_folder(writers: int, tmp_path: Path) -> None:
    winners = winners_of_races(tmp_path, 15, writers)
    assert len(set(winners)) > 1, "one process was always the last: they did not save at once"


@pytest.mark.parametrize("ended", [cut_off.killed, cut_off.interrupted])
def test_a_save_that_is_cut_off_leaves_the_old_model_or_the_new_one(ended: Any, tmp_path: Path) -> None:
    old, new = save_worker.model_of(0), save_worker.model_of(1)
    left = []
    for number in range(200):
        rewire.save(old, tmp_path, max_shard_bytes=40_000)
        assert holds_one_model(tmp_path)  # what was cut off is gone
        if not ended(number, lambda: rewire.save(new, tmp_path, max_shard_bytes=40_000)):
            break
        left.append(save_worker.rank_of(rewire.load(tmp_path, save_worker.stack())))
    assert set(left) == {0, 1} and 20 < len(left) < 200
    assert left == sorted(left) or ended is cut_off.interrupted
