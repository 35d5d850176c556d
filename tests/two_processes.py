"""Two real processes on the CPU, for what is distributed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def run(script: Path, *arguments: str | Path) -> list[str]:
    """Run ``script RANK ARGUMENTS...`` as ranks 0 and 1; what each printed. Both must end well, within five minutes."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    workers = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), *map(str, arguments)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        printed = [worker.communicate(timeout=300)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(printed)
    return printed
