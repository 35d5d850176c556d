"""Real processes on the CPU, mostly two, for what is distributed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def run(script: Path, *arguments: str | Path, ranks: int = 2) -> list[str]:
    """Run ``script RANK ARGUMENTS...`` as each rank; what each printed. All must end well, within five minutes."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    environment |= {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(ranks)}
    workers = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), *map(str, arguments)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        printed = [worker.communicate(timeout=300)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert [worker.returncode for worker in workers] == [0] * ranks, "\n".join(printed)
    return printed
