"""Run all benchmarks, one process each: ``python benchmarks/run.py``. Results go to out/benchmarks/."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
SCRIPTS = ("tracing.py",)

if __name__ == "__main__":
    for script in SCRIPTS:
        print(f"== {script}", flush=True)
        subprocess.run([sys.executable, HERE / script], check=True)
