"""Peers whose kernels need a GPU, in Triton's interpreter: what is handed to them is right."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import dataclasses
import torch
from on_mixes import comparison, workloads
torch.manual_seed(0)
sizes = workloads.Sizes(1, 8, 32, torch.float32, torch.device("cpu"))
comparison._CHECKED = 8
for workload in (workloads.attention_residuals(sizes, 4), workloads.manifold_hyper_connections(sizes, 4)):
    ours = dataclasses.replace(workload.implementations["liger-kernel"], status="")
    print(comparison._errors(workload, {"liger-kernel": ours})["liger-kernel"])
"""


@pytest.mark.slow
def test_liger() -> None:
    benchmarks = str(Path(__file__).parents[2] / "benchmarks")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": benchmarks}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(float(error) < 1e-4 for error in done.stdout.split()), done.stdout
