"""Files are written whole, under names that nobody could plant, and what is left of killed processes is removed."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import rewire
from rewire import files


def contents(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def write(folder: Path, names: str, last: str = "") -> None:
    with files.staged(folder, last) as stage:
        for name in names:
            (stage / name).write_text("new")


def fail(path: Path, error: type[BaseException]) -> None:
    with files.whole(path) as file:
        file.write_text("half")
        raise error


def test_nothing_changes_if_the_block_fails(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    for error in (KeyboardInterrupt, ValueError):
        with pytest.raises(error):
            fail(tmp_path / "a", error)
    assert (tmp_path / "a").read_text() == "old" and contents(tmp_path) == {"a"}


def test_the_last_file_comes_when_all_others_are_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def noted(name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            calls.append(f"{name} {Path(args[-1]).name}")
            return function(*args)

        return call

    monkeypatch.setattr(files, "_flush", noted("flush", files._flush))
    monkeypatch.setattr(os, "replace", noted("replace", os.replace))
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder, "abc", last="b")
    assert sorted(calls[:3]) == ["flush a", "flush b", "flush c"]
    assert sorted(calls[3:5]) == ["replace a", "replace c"]
    assert calls[5:] == ["flush folder", "replace b", "flush folder"]
    assert contents(folder) == {"a", "b", "c"}


@pytest.mark.parametrize("at", range(3))
def test_ctrl_c_among_the_moves_ends_when_all_are_made(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, count = os.replace, iter(range(10))

    def interrupted(*args: Any) -> None:
        if next(count) == at:
            raise KeyboardInterrupt
        replace(*args)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, "abc")
    assert contents(tmp_path) == {"a", "b", "c"}


def test_a_folder_in_the_place_of_a_file_is_told_before_anything_is_moved(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    with pytest.raises(rewire.RewireError, match="b' is a folder, in the place of a file"):
        write(tmp_path, "abc")
    assert contents(tmp_path) == {"b"}


def test_links_in_the_folder_are_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a").symlink_to(tmp_path / "precious")
    with files.staged(folder) as stage:
        (stage / "a").write_text("new")
    assert (tmp_path / "precious").read_text() == "precious"
    assert (folder / "a").read_text() == "new" and not (folder / "a").is_symlink()


def test_files_have_the_rights_that_others_have(tmp_path: Path) -> None:
    with files.whole(tmp_path / "new") as path:
        path.write_text("text")
    (tmp_path / "other").write_text("text")
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_file_by_name(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "file").write_text("old")
    with pytest.raises(ZeroDivisionError):
        fail(tmp_path / "link", ZeroDivisionError)
    assert (tmp_path / "file").read_text() == "old"
    with files.whole(tmp_path / "link") as path:
        path.write_text("new")
    assert (tmp_path / "file").read_text() == "new" and (tmp_path / "link").is_symlink()
    with pytest.raises(FileNotFoundError, match="nowhere/file'"):
        fail(tmp_path / "nowhere" / "file", ZeroDivisionError)
    with pytest.raises(IsADirectoryError):
        fail(tmp_path, ZeroDivisionError)


def test_pipes_are_written_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()))
    reader.start()
    with files.whole(tmp_path / "pipe") as path:
        path.write_text("text")
    reader.join()
    assert read == ["text"] and contents(tmp_path) == {"pipe"}


def test_only_what_nobody_writes_any_more_is_removed(tmp_path: Path) -> None:
    with files.staged(tmp_path) as mine:
        (mine / "file").write_text("text")
        here, elsewhere = mine.name[-8:], "0" * 8
        abandoned, link = tmp_path / f".rewire-0000000a-{here}", tmp_path / f".rewire-0000000d-{here}"
        new, old = tmp_path / f".rewire-0000000b-{elsewhere}", tmp_path / f".rewire-0000000c-{elsewhere}"
        for folder in (abandoned, new, old, tmp_path / ".rewire-notes", tmp_path / "elsewhere"):
            folder.mkdir()
        link.symlink_to(tmp_path / "elsewhere")
        for folder in (old, mine):  # locks, not clocks, say that this one is in use
            os.utime(folder, (0, time.time() - 2 * 24 * 60 * 60))
        with files.staged(tmp_path) as other:
            assert contents(tmp_path) == {mine.name, other.name, new.name, link.name, ".rewire-notes", "elsewhere"}
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


def test_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "fcntl", None)
    with files.staged(tmp_path) as stage:
        old = stage.with_name(stage.name.replace(files.token_of(stage), "0" * 8))
        old.mkdir()
        with files.whole(tmp_path / "file") as path:
            path.write_text("text")
        assert contents(tmp_path) == {stage.name, old.name, "file"}
        os.utime(old, (0, 0))
        with files.staged(tmp_path):
            assert not old.exists()


def test_a_file_in_a_staged_folder_is_written_there(tmp_path: Path) -> None:
    """The folder is locked already, by this very process: a second lock would wait for ever."""
    with files.staged(tmp_path) as stage, files.whole(stage / "a") as path:
        path.write_text("a")
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked there")
def test_a_process_that_is_forked_meanwhile_holds_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[int] = []
    move = files._move

    def fork(*args: Any) -> None:
        if not children:
            children.append(os.fork())
            if not children[0]:
                time.sleep(30)
                os._exit(0)
        move(*args)

    monkeypatch.setattr(files, "_move", fork)
    for text in "ab":
        with files.whole(tmp_path / "a") as path:
            path.write_text(text)
    assert os.waitpid(children[0], os.WNOHANG) == (0, 0)  # it is still there
    os.kill(children[0], 9)
    os.waitpid(children[0], 0)
    assert (tmp_path / "a").read_text() == "b"
