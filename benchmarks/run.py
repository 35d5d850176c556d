"""Run all benchmarks, one process each: ``python benchmarks/run.py``. Results go to out/benchmarks/."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
SCRIPTS = ("tracing.py", "topologies.py")

if __name__ == "__main__":
    for script in SCRIPTS:
        print(f"== {script}", flush=True)
        environment = {**os.environ, "PYTHONPATH": str(HERE.parent / "tests")}  # for torchvision_stub
        subprocess.run([sys.executable, HERE / script], check=True, env=environment)
