"""DDP and FSDP2 with two real processes on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

TESTS = Path(__file__).parent

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="torch without gloo")


@pytest.mark.parametrize(
    "scenario",
    [
        "ddp",
        "fsdp",
        "fsdp_bfloat16",
        "fsdp_mixed",
        "fsdp_checkpointed",
        "fsdp_resume",
        "sharded_before",
        "no_own_group",
    ],
)
def test_two_processes(scenario: str, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    script = str(TESTS / "distributed_worker.py")
    workers = [
        subprocess.Popen(
            [sys.executable, script, scenario, str(rank), str(tmp_path / "rendezvous")],
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
