"""The script for one GPU, as far as a CPU can tell: all of it, at tiny sizes, with kernels in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def run(tmp_path: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    out = tmp_path / "gpu.json"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "REWIRE_CACHE_DIR": str(tmp_path / "kernels")}
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--dry-run", "--out", str(out), *options]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert out.exists(), done.stderr[-3000:]
    return done, json.loads(out.read_text())


def test_the_whole_script(tmp_path: Path) -> None:
    done, report = run(tmp_path, "--seed", "5")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert {job["status"] for job in report["jobs"]} == {"done"}
    assert {job["phase"] for job in report["jobs"]} == {"check", "mixes", "steps"}
    assert all(job["largest error over tolerance"] <= 1 for job in report["jobs"] if job["phase"] == "check")
    rows = [row for job in report["jobs"] for row in job.get("rows", ())]
    measured = {row["implementation"] for row in rows if row["status"] == "measured"}
    assert measured >= {"eager", "ours", "hyper-connections"}
    assert {row["status"] for row in rows if row["implementation"] in ("liger-kernel", "fla-core")} <= {
        "not run: needs CUDA",
        "not installed: pip install fla-core",
    }
    assert len([job for job in report["jobs"] if job.get("time over plain")]) == 9
    assert (report["seed"], report["dry run"]) == (5, True)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    done, report = run(tmp_path, "--minutes", "0", "--phases", "check", "steps")
    assert done.returncode == 0
    assert {job["status"] for job in report["jobs"]} == {"not measured: out of time"}
    assert {job["phase"] for job in report["jobs"]} == {"check", "steps"}
    assert "ancre, compiled: not measured: out of time" in done.stdout


@pytest.mark.parametrize("wrong", ["first.mul_(1.01)", "first.view(-1)[0] = float('nan')"])
def test_a_wrong_kernel_is_found(tmp_path: Path, wrong: str) -> None:
    program = f"""
import sys
import torch
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
import kernel_checks
from rewire.kernels import launch
from rewire.kernels.spec import MixSpec
right = launch.mix_backward
def backward(*args, **kwargs):
    found = right(*args, **kwargs)
    first = found.sources[0]
    {wrong}
    return found
check = kernel_checks.Check(MixSpec(2), 3, 8, torch.float32)
kernel_checks.run(check, torch.device("cpu"), 0)
launch.mix_backward = backward
try:
    kernel_checks.run(check, torch.device("cpu"), 0)
except AssertionError as error:
    print(error)
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "REWIRE_CACHE_DIR": str(tmp_path / "kernels")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(("gradient of sources: the error is", "gradient of sources differs from run to run"))


def test_a_wrong_kernel_is_found_in_a_model(tmp_path: Path) -> None:
    program = f"""
import sys
import torch
sys.path[:0] = [{str(ROOT / "benchmarks")!r}, {str(ROOT / "tests")!r}]
import torchvision_stub
import model_checks
from rewire.kernels import operators
check = model_checks.ModelCheck("ancre-ingoing", 1, frozenset(["norm"]))
run = lambda: model_checks.run(check, torch.device("cpu"), 0, small=True)
run()
right = operators.launch_backward
def backward(spec, grads, *args, **kwargs):
    return right(spec, [1.01 * g for g in grads], *args, **kwargs)
operators.launch_backward = backward
try:
    run()
except AssertionError as error:
    print(error)
operators.launch_backward, operators.SWITCHED_ON = right, False
try:
    run()
except AssertionError as error:
    print(error)
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "REWIRE_CACHE_DIR": str(tmp_path / "kernels")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "the difference is" in done.stdout and "no kernel with norm ran" in done.stdout
