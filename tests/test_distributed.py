"""DDP and FSDP2 with two real processes on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def run(tmp_path: Path, *scenarios: str) -> None:
    """Functions of distributed_worker.py, one after the other in the same two processes."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    script = str(TESTS / "distributed_worker.py")
    workers = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(tmp_path / "meeting_point"), *scenarios],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        printed = [worker.communicate(timeout=120)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(printed)
    for text in printed:
        assert [f"{scenario} passed" for scenario in scenarios if f"{scenario} passed" not in text] == []


def test_ddp_and_fsdp_train_like_one_process(tmp_path: Path) -> None:
    run(tmp_path, "ddp", "fsdp", "fsdp_checkpointed", "fsdp_resume")


def test_fsdp_in_bfloat16_and_mixed_precision(tmp_path: Path) -> None:
    run(tmp_path, "fsdp_bfloat16", "fsdp_mixed")


def test_fsdp_with_every_topology(tmp_path: Path) -> None:
    run(tmp_path, "fsdp_every_topology", "fsdp_penalty")


def test_fsdp_in_mixed_precision_with_every_topology(tmp_path: Path) -> None:
    run(tmp_path, "fsdp_mixed_every_topology")


def test_what_is_refused(tmp_path: Path) -> None:
    run(tmp_path, "sharded_before", "no_own_group")
