"""Sharded parameters get the values that they would have unsharded: two real processes on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_sharded_like_whole(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE.parent.parent)])}
    workers = [
        subprocess.Popen(
            [sys.executable, str(HERE / "sharded_worker.py"), str(rank), str(tmp_path / "meeting_point")],
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
    assert all(text.endswith("passed\n") for text in printed)
