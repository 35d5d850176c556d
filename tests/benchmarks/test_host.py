"""Host time: the script runs, on Triton's own launcher and a driver that does nothing."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")]

ROOT = Path(__file__).parents[2]


def test_kernels_are_started(tmp_path: Path) -> None:
    script, options = str(ROOT / "benchmarks" / "host.py"), ["--units", "2", "--rounds", "1"]
    command = [sys.executable, script, "ancre-ingoing", "mhc", *options]
    environment = {**os.environ, "REWIRE_CACHE_DIR": str(tmp_path / "kernels")}
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "host.json")], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads((tmp_path / "host.json").read_text())
    plain, ancre, mhc, *others = report["trunks"]
    assert (plain["kernels"], ancre["kernels"]) == (0, 2)  # two sums, and the gradients of two states
    # Of four sublayers: 4 and 5 from each to the next, and as many for the first read and the last write; in backward
    # the three writes between them are made again.
    assert mhc["kernels"] == (3 * 9 + 9 + 3) / 2
    liger = [row["kernels"] > 0 for row in others if row["trunk"] == "mhc, liger-kernel"]
    assert all(liger) and len(liger) == (importlib.util.find_spec("liger_kernel") is not None)
    assert {row["operator"] for row in report["operators"]} == {"mix", "mix_backward", "mixes with a probe"}
    assert all(row["launcher us"] > 0 for row in report["operators"])
