"""Runs jobs in processes of their own and writes a line for each as it ends. Nothing here touches a GPU.

A job that fails, crashes, or takes too long costs its own line; the next one starts in a fresh process.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import signal
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]

#: Of what a job that failed has written, how much is kept.
MOST_CHARACTERS = 3000
#: Seconds that a killed process has to end.
PATIENCE = 10.0


class Skipped(Exception):
    """The job cannot run here: its reason is written down."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One thing to do.

    Attributes:
        name: what it is, from the general to the particular: ``step/llama-1b/dca/compiled``.
        run: returns what is to be written down, as JSON has it; raises if it fails, `Skipped` if it cannot run here.
        turn: jobs of a lower one run first.
        limit: seconds that it may take, with the start of its process and all that is compiled.
        alone: whether nothing else may run at the same time: it takes times, or most of the memory.
        hidden: whether it only runs if it is asked for by its name.
    """

    name: str
    run: Callable[[], Mapping[str, Any]]
    turn: int = 1
    limit: float = 180.0
    alone: bool = False
    hidden: bool = False


# In the process of a job.


def run_here(job: Job, result: Path, about: Callable[[], Mapping[str, Any]]) -> int:
    """Run a job and write its record, with what ``about`` tells, to ``result``; returns the exit status."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # Linux: it ends with the process that started it
    record = outcome(job, about)
    whole = result.with_suffix(".part")
    whole.write_text(json.dumps(record))
    whole.rename(result)
    return int(record["status"] == "failed")


def outcome(job: Job, about: Callable[[], Mapping[str, Any]]) -> Record:
    """What became of a job that runs in this process."""
    try:
        return {"status": "done", "result": job.run(), **about()}
    except Skipped as reason:
        return {"status": "skipped", "error": str(reason)}
    except Exception as error:
        traceback.print_exc()
        summary = next(iter(str(error).splitlines()), "")
        return {"status": "failed", "error": f"{type(error).__name__}: {summary}"}


# In the process that starts them.


class _Process:
    """A job that was started."""

    def __init__(self, job: Job, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.job, self.started = job, time.monotonic()
        self.folder = tempfile.TemporaryDirectory(prefix="gpu-job-")
        self.result, self.log = Path(self.folder.name, "result.json"), Path(self.folder.name, "log")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, str(self.result), job.name],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                process_group=0,  # what it starts dies with it
            )

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def kill(self) -> bool:
        """Whether it is gone: one that hangs in the driver may not be."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            return False
        return True

    def record(self) -> Record | None:
        """What became of it; None while it runs."""
        late = self.seconds > self.job.limit
        if self.process.poll() is None and not late:
            return None
        gone = self.kill()  # also what it has left running
        record: Record = {"job": self.job.name, "seconds": round(self.seconds, 1)}
        if self.result.exists():
            record |= json.loads(self.result.read_text())
        elif late:
            left = "" if gone else ", and could not be killed"
            record |= {"status": "failed", "error": f"no end within {self.job.limit:g} s{left}"}
        else:
            code = self.process.returncode
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
            record |= {"status": "failed", "error": how}
        if record["status"] == "failed":
            record["log"] = self.log.read_text(errors="replace")[-MOST_CHARACTERS:]
        return record

    def close(self) -> None:
        self.kill()
        self.folder.cleanup()


def run_all(
    jobs: Sequence[Job],
    command: Sequence[str],
    environment: Mapping[str, str],
    workers: int,
    seconds: float,
) -> Iterator[Record]:
    """Run jobs in turn and yield the record of each as it ends; at most ``workers`` at a time, and some alone.

    Args:
        command: runs one job, given a path for its record and its name.
        environment: of the processes.
        seconds: none starts later, and what still runs then is killed, without a record.
    """
    end, waiting, running = time.monotonic() + seconds, list(jobs), list[_Process]()
    try:
        while (waiting or running) and time.monotonic() < end:
            while waiting and _may_start(waiting[0], running, workers):
                running.append(_Process(waiting.pop(0), command, environment))
            for process in list(running):
                record = process.record()
                if record is not None:
                    running.remove(process)
                    process.close()
                    yield record
            time.sleep(0.02)
    finally:
        for process in running:
            process.close()


def _may_start(job: Job, running: Sequence[_Process], workers: int) -> bool:
    if job.alone or any(process.job.alone for process in running):
        return not running
    return len(running) < workers


# The file.


def read(path: Path) -> list[Record]:
    """The records of a file, in turn; a line that was cut off is left out."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    return records


def append(path: Path, record: Record) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    cut_off = path.exists() and not path.read_bytes().endswith(b"\n")
    with path.open("a") as file:
        file.write("\n" * cut_off + json.dumps(record) + "\n")


def latest(records: Sequence[Record]) -> dict[str, Record]:
    """The last record of each job."""
    return {record["job"]: record for record in records}
