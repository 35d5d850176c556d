"""Runs tests in Triton's interpreter, which computes kernels on a CPU.

It is chosen when a kernel is decorated, so that such tests need a process of their own. A test module keeps them in a
class with ``__test__ = INTERPRETED``, and starts them by a test outside of it that calls `interpret`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

#: For the test that starts the others.
starts_interpreter = pytest.mark.skipif(INTERPRETED, reason="already in the interpreter")


def interpret(tests: str, directory: Path) -> None:
    """Run tests in a pytest process with TRITON_INTERPRET=1, and fail with its report if one of them fails.

    Args:
        tests: what pytest is to collect: ``file::class``.
        directory: where generated kernels are kept.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "REWIRE_CACHE_DIR": str(directory / "kernels")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
