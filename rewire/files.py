"""Atomic writes of users' files: each is written whole or not at all, even if the process is killed.

Files are first written into a new staging folder beside their destination, then moved, each in one step. The staging
folder has a random name and must not exist before, so that no link planted under its name is followed.

A killed process leaves its staging folder behind, and the next writer removes it. Running processes hold a lock on
theirs, so that nobody else removes it. Locks are only visible on one machine, so the folder's name says which machine
made it; folders of other machines are removed when nothing was added to them for a day.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import math
import os
import platform
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from rewire.errors import RewireError

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows: without locks, all folders count as another machine's
    fcntl = None

_STAGE = re.compile(r"\.rewire-([0-9a-f]{8})-([0-9a-f]{8})")
_DAY = 24 * 60 * 60


@contextlib.contextmanager
def staged(folder: Path, last: str = "") -> Iterator[Path]:
    """A new folder, whose files are moved to ``folder`` when the block succeeds, and deleted otherwise.

    Moves of several processes on this machine to one ``folder`` do not interleave. Ctrl-C during the moves raises
    `KeyboardInterrupt` after the last of them.

    Args:
        folder: destination; it has to exist.
        last: name of the file that is moved last, after all others have been flushed to disk.

    Raises:
        RewireError: ``folder`` has a subfolder with the name of a file.
    """
    _remove_abandoned(folder)
    stage, lock = _claimed(folder)
    try:
        yield stage
        for path in stage.iterdir():
            _flush(path)
        with _alone(folder):
            try:
                _move(stage, folder, last)
            except KeyboardInterrupt:
                _move(stage, folder, last)  # the rest
                raise
    finally:
        try:
            shutil.rmtree(stage, ignore_errors=True)
        finally:
            _close(lock)


@contextlib.contextmanager
def whole(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path to write a file to, which replaces ``path`` when the block succeeds.

    Anything but a regular file (``/dev/stdout``, a pipe) is written to directly, and so is a file in a `staged` folder,
    which nobody else sees. If ``path`` is a link to a file, the file is replaced.
    """
    if _STAGE.fullmatch(Path(path).parent.name) or (os.path.lexists(path) and not os.path.isfile(path)):
        yield Path(path)
    else:
        target = Path(os.path.realpath(path))
        if not target.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
        with staged(target.parent) as stage:
            yield stage / target.name


def make_folder(folder: Path) -> None:
    """Make a folder and its parents if they do not exist. Raises as `check_no_file` does."""
    check_no_file(folder)
    folder.mkdir(parents=True, exist_ok=True)


def check_no_file(folder: Path) -> None:
    """Raise RewireError if ``folder`` is a file."""
    if folder.exists() and not folder.is_dir():
        raise RewireError(f"'{folder}' is a file: give a folder.")


def token_of(stage: Path) -> str:
    """The random part of a `staged` folder's name, from which unique file names can be made."""
    found = _STAGE.fullmatch(stage.name)
    assert found is not None
    return found[1]


def tokens(folder: Path) -> set[str]:
    """The tokens of all staging folders in ``folder``."""
    return {found[1] for path in folder.iterdir() if (found := _STAGE.fullmatch(path.name))}


def _claimed(folder: Path) -> tuple[Path, int | None]:
    """A new staging folder, and the lock on it."""
    while True:
        stage = folder / f".rewire-{secrets.token_hex(4)}-{_machine()}"
        stage.mkdir(mode=0o700)
        lock = None
        with contextlib.suppress(FileNotFoundError):
            lock = _opened(stage)
            _lock(lock)
            if lock is None or os.path.samestat(os.stat(stage), os.fstat(lock)):
                return stage, lock
        _close(lock)  # another process removed it as abandoned before it was locked


def _remove_abandoned(folder: Path) -> None:
    for stage in folder.glob(".rewire-*"):
        found = _STAGE.fullmatch(stage.name)
        with contextlib.suppress(OSError):  # another process removes it, too, or we may not
            if found and stage.is_dir() and not stage.is_symlink():
                _remove_if_abandoned(stage, here=found[2] == _machine())


def _remove_if_abandoned(stage: Path, here: bool) -> None:
    lock = _opened(stage)
    try:
        if _is_abandoned(stage, lock if here else None):
            shutil.rmtree(stage)
    finally:
        _close(lock)


def _is_abandoned(stage: Path, lock: int | None) -> bool:
    """Whether no process writes there any more; takes ``lock``, None for another machine's folder, if so."""
    if lock is not None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            pass
    return time.time() - stage.stat().st_mtime > _DAY


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """A context that only one process of this machine at a time can enter for a folder."""
    lock = _opened(folder)
    try:
        _lock(lock)
        yield
    finally:
        _close(lock)


def _opened(folder: Path) -> int | None:
    return os.open(folder, os.O_RDONLY) if fcntl else None


def _lock(handle: int | None) -> None:
    if handle is not None:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)


def _close(handle: int | None) -> None:
    if handle is not None:
        with contextlib.suppress(OSError):  # explicitly: a process forked meanwhile holds the handle, too
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def _machine() -> str:
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


def _move(stage: Path, folder: Path, last: str) -> None:
    """Move the files in ``stage``; a second call moves those that are left."""
    names = sorted(os.listdir(stage), key=lambda name: name == last)
    for name in names:
        if (folder / name).is_dir() and not (folder / name).is_symlink():
            raise RewireError(f"'{folder / name}' is a folder, in the place of a file: move it away.")
    for name in names:
        if name == last:
            _flush(folder)
        os.replace(stage / name, folder / name)
    _flush(folder)


def _flush(path: Path) -> None:
    """Wait until what was written is on disk."""
    if path.is_dir() and os.name == "nt":  # folders cannot be opened there
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def to_json(data: object, indent: int = 1) -> str:
    """Plain data, dataclasses and tensors as JSON; NaN and infinity, which JSON lacks, become null."""
    return json.dumps(as_plain(data), indent=indent, allow_nan=False)


def as_plain(value: object) -> Any:
    """``value`` as strings, numbers, lists and dicts, with None for numbers that are not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Tensor):
        return as_plain(value.tolist())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: as_plain(each) for name, each in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, (list, tuple)):
        return [as_plain(each) for each in value]
    return value if value is None or isinstance(value, (str, int)) else str(value)
