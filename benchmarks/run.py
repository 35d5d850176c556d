"""Run the benchmarks of a CPU, one process each: ``python benchmarks/run.py [--long]``. Results go to out/benchmarks/.

With ``--long``, those of single mixes and of training steps as well, which take many minutes. gpu.py runs by itself.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
SCRIPTS = ("rewiring.py", "topologies.py")
LONG = ("mixes.py", "cpu_step.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", action="store_true", help=f"{' and '.join(LONG)}, too")
    for script in SCRIPTS + LONG * parser.parse_args().long:
        print(f"== {script}", flush=True)
        environment = {**os.environ, "PYTHONPATH": str(HERE.parent / "tests")}  # for torchvision_stub
        subprocess.run([sys.executable, HERE / script], check=True, env=environment)


if __name__ == "__main__":
    main()
