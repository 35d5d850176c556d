"""Real processes on the CPU, mostly two, for what is distributed. worker.py is what most of them run."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO

TESTS = Path(__file__).parent


class Crashed(Exception):
    """A process was ended by a signal of its own."""


def play(script: Path, folder: Path, *scenarios: str, ranks: int = 2) -> None:
    """Run functions of a script, one after the other in the same processes; each says that it has passed.

    Args:
        script: hands its functions to `worker.play`.
        folder: in which they may write.
        scenarios: names of the functions.
        ranks: number of processes.
    """
    for text in run(script, folder, *scenarios, ranks=ranks):
        assert [name for name in scenarios if f"{name} passed" not in text] == []


def play_despite_gloo(script: Path, folder: Path, *scenarios: str, ranks: int = 2) -> None:
    """`play`; if a process crashes, once more, with a warning.

    `test_distributed.test_every_topology` was seen to lose a process, once in about fifty runs with torch 2.13. Gloo's
    threads drop tensors that have Python objects when they like (github.com/pytorch/pytorch/pull/179291), and it makes
    thousands of them; valgrind finds no fault of rewire's in it. Torch's context parallelism was seen to lose one, once
    in fifteen runs, for a reason that was not found. So the first crash is a warning, and the second one an error.
    """
    try:
        play(script, folder, *scenarios, ranks=ranks)
    except Crashed as crash:
        warnings.warn(f"a process crashed, and all ran once more: {crash}", stacklevel=2)
        play(script, folder, *scenarios, ranks=ranks)


def run(script: Path, *arguments: str | Path, ranks: int = 2) -> list[str]:
    """Run ``script ARGUMENTS...`` as each rank; what each printed. All must end well, within eight minutes.

    The environment says which rank it is, and where they meet: torch's variables, and ``MEETING_POINT``, a file.

    Raises:
        Crashed: one was ended by SIGSEGV or SIGABRT.
        AssertionError: one ended badly otherwise, or not at all; then it says where each of its threads was.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port(), "WORLD_SIZE": str(ranks)}
    environment["PYTHONFAULTHANDLER"] = "1"
    with ExitStack() as stack:
        environment["MEETING_POINT"] = os.path.join(stack.enter_context(TemporaryDirectory()), "meeting_point")
        # Files: a pipe that nobody reads is full at some point, and its process waits.
        outputs = [stack.enter_context(TemporaryFile("w+")) for _ in range(ranks)]
        workers = [
            subprocess.Popen(
                [sys.executable, str(script), *map(str, arguments)],
                env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            for rank, output in enumerate(outputs)
        ]
        try:
            in_time = _ended(workers, 480)
            if not in_time:
                for worker in workers:
                    worker.send_signal(signal.SIGABRT)  # faulthandler prints stacks
                _ended(workers, 10)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        printed = [_read(output) for output in outputs]
    codes = [worker.returncode for worker in workers]
    if in_time and {-signal.SIGABRT, -signal.SIGSEGV}.intersection(codes):
        raise Crashed(_ends(codes, printed))
    if any(codes):
        raise AssertionError(_ends(codes, printed))
    return printed


def _free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def _ended(workers: list[subprocess.Popen[bytes]], seconds: float) -> bool:
    """Whether all of them end in time."""
    end = time.monotonic() + seconds
    try:
        for worker in workers:
            worker.wait(max(0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True


def _read(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _ends(codes: list[int], printed: list[str]) -> str:
    """The last lines of each: where one ends badly, the others complain at length, and reports are cut off."""
    return "\n".join(
        f"rank {rank} ended with {code}:\n{_end(text)}"
        for rank, (code, text) in enumerate(zip(codes, printed, strict=True))
    )


def _end(text: str) -> str:
    lines = [line for line in text.splitlines() if "Warning" not in line and "_register_pre_backward_hook" not in line]
    return "\n".join(lines[-30:])
