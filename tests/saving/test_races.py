"""Several processes save into one folder at once, or are killed while they do."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import save_worker
import two_processes

import rewire
from rewire import files
from rewire.saving import folder as saving


def contents(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def holds_one_model(folder: Path) -> bool:
    """Whether there are the files of one save and nothing beside them."""
    return contents(folder) == {saving.RECIPE, *json.loads((folder / saving.RECIPE).read_text())["files"]}


def check_races(folder: Path, trials: int, writers: int) -> None:
    """All saves and loads succeed, what is left is whole, one of those that were saved, and nothing beside it."""
    printed = two_processes.run(Path(save_worker.__file__), folder, str(trials), ranks=writers + 1)
    wrong = [found for text in printed for line in text.splitlines() if (found := json.loads(line))]
    assert not wrong, "\n".join(wrong)
    winners = set()
    for number in range(trials):
        saved = folder / str(number) / "saved"
        winners.add(save_worker.rank_of(rewire.load(saved, save_worker.stack())))
        assert holds_one_model(saved)
    assert trials < 20 or winners == set(range(writers))


def test_processes_that_save_into_one_folder(tmp_path: Path) -> None:
    check_races(tmp_path, 5, writers=2)


@pytest.mark.slow
@pytest.mark.parametrize("writers", [2, 4])
def test_many_trials_of_processes_that_save_into_one_folder(writers: int, tmp_path: Path) -> None:
    check_races(tmp_path, 200, writers)


def in_a_process(work: Callable[[], Any]) -> int:
    """Run ``work`` in a process of its own; what that ended with."""
    child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


DISK = [(os, name) for name in ("mkdir", "open", "fsync", "replace", "unlink", "rmdir")]
DISK += [(saving, "save_file"), (Path, "write_text"), (Path, "unlink")]


def end_at(number: int) -> None:
    """Let this process end before its call of that number to anything that touches the disk."""
    calls = iter(range(number))

    def ending(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(calls, None) is None:
                os._exit(9)
            return function(*args, **kwargs)

        return call

    for module, name in DISK:
        setattr(module, name, ending(getattr(module, name)))


def test_a_killed_save_leaves_the_old_model_or_the_new_one(tmp_path: Path) -> None:
    old, new = save_worker.model_of(0), save_worker.model_of(1)
    left = []

    def save(number: int) -> None:
        end_at(number)
        rewire.save(new, tmp_path, max_shard_bytes=40_000)

    for number in range(200):
        rewire.save(old, tmp_path, max_shard_bytes=40_000)
        assert holds_one_model(tmp_path)  # what was cut off is gone
        if not in_a_process(lambda number=number: save(number)):  # type: ignore[misc]
            break
        left.append(save_worker.rank_of(rewire.load(tmp_path, save_worker.stack())))
    assert left == sorted(left) and set(left) == {0, 1} and 20 < len(left) < 200


def test_only_what_nobody_writes_any_more_is_removed(tmp_path: Path) -> None:
    with files.staged(tmp_path) as mine:
        (mine / "file").write_text("text")
        here = mine.name[-9:]
        abandoned, new, old = (tmp_path / f".rewire-{mark}" for mark in (f"0000000a{here}", "0000000b-x", "0000000c-x"))
        new, old = new.with_name(f"{new.name[:-1]}{'0' * 8}"), old.with_name(f"{old.name[:-1]}{'0' * 8}")
        link, mark = tmp_path / f".rewire-0000000d{here}", tmp_path / ".rewire-notes"
        for folder in (abandoned, new, old, mark, tmp_path / "elsewhere"):
            folder.mkdir()
        link.symlink_to(tmp_path / "elsewhere")
        os.utime(old, (0, time.time() - 2 * 24 * 60 * 60))
        with files.staged(tmp_path) as other:
            assert contents(tmp_path) == {mine.name, other.name, new.name, link.name, mark.name, "elsewhere"}
    assert (tmp_path / "file").read_text() == "text"


def test_a_stage_that_was_taken_for_an_abandoned_one_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process removes it before it is locked."""
    opened, taken = files._opened, []

    def removed_first(folder: Path) -> int | None:
        if not taken:
            taken.append(folder)
            folder.rmdir()
        return opened(folder)

    monkeypatch.setattr(files, "_opened", removed_first)
    with files.staged(tmp_path) as stage:
        assert stage.is_dir() and stage != taken[0]
