"""What is on the disk when a process is ended, or interrupted, while it writes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rewire.ejecting import eject
from rewire.saving import folder as saving

_DISK = [(os, name) for name in ("mkdir", "open", "fsync", "replace", "unlink", "rmdir")]
_DISK += [(saving, "save_file"), (eject, "save_file"), (Path, "write_text"), (Path, "unlink")]


def _at(patch: pytest.MonkeyPatch, number: int, end: Callable[[], object]) -> Iterator[int]:
    """Call ``end`` before the call of that number to anything that touches the disk; returns the calls before it."""
    calls = iter(range(number))

    def ending(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(calls, None) is None:
                patch.undo()
                end()
            return function(*args, **kwargs)

        return call

    for module, name in _DISK:
        patch.setattr(module, name, ending(getattr(module, name)))
    return calls


def interrupted(number: int, work: Callable[[], object]) -> bool:
    """Do ``work``, with Ctrl-C at its call of that number; whether it made as many."""

    def end() -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        _at(patch, number, end)
        try:
            work()
        except KeyboardInterrupt:
            return True
    return False


def killed(number: int, work: Callable[[], object]) -> bool:
    """Do ``work`` in a process of its own, which ends before its call of that number; whether it made as many."""

    def cut() -> None:
        with pytest.MonkeyPatch.context() as patch:
            _at(patch, number, lambda: os._exit(9))
            work()

    return in_a_process(cut)() == 9


def in_a_process(work: Callable[[], object]) -> Callable[[], int]:
    """Start ``work`` in a process of its own; what waits for it returns what it ended with."""
    child = os.fork()
    if not child:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return lambda: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
