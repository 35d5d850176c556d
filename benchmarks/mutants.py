"""Changes one file of the package in small ways, one at a time, and shows which of them its tests do not notice.

    make mutants FILE=rewire/passes/finding/chains.py TESTS=tests/passes/finding SAMPLE=40

Needs cosmic-ray (``pip install -e ".[mutants]"``). It works on a copy of the repository. What survives is a test that
is missing, or code that makes no difference to results: what only saves time, the words of an error.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

ROOT = Path(__file__).parents[1]
_IN_ORDER = "SELECT job_id FROM mutation_specs ORDER BY start_pos_row, start_pos_col, operator_name, occurrence"
COSMIC_RAY = [sys.executable, "-m", "cosmic_ray.cli"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="of the package, from the root of the repository")
    parser.add_argument("tests", nargs="+", help="files or folders of tests that are to notice")
    parser.add_argument("--sample", type=int, default=0, help="how many changes, drawn by chance; 0: all")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--timeout", type=float, default=120, help="seconds after which a change counts as noticed")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "rewire"
        copy_to(copy)
        session = mutated(copy, arguments)
        report(session)


def copy_to(folder: Path) -> None:
    """The files that git knows."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def mutated(copy: Path, arguments: argparse.Namespace) -> Path:
    """The session of cosmic-ray in which all changes have been tried."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments.tests]
    config, session = copy / "mutants.toml", copy / "mutants.sqlite"
    config.write_text(
        f'[cosmic-ray]\nmodule-path = "{arguments.file}"\ntimeout = {arguments.timeout}\nexcluded-modules = []\n'
        f'test-command = {json.dumps(" ".join(command))}\n\n[cosmic-ray.distributor]\nname = "local"\n'
    )
    paths = [str(copy), str(copy / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}

    def run(*command: str | Path) -> None:
        subprocess.run([*COSMIC_RAY, *map(str, command)], cwd=copy, env=environment, check=True)

    run("init", config, session)
    draw(session, arguments.sample, arguments.seed)
    run("baseline", config)  # without a change, the tests have to pass
    run("exec", config, session)
    return session


def draw(session: Path, sample: int, seed: int) -> None:
    """Keep so many changes."""
    with closing(sqlite3.connect(session)) as database, database:
        jobs = [job for (job,) in database.execute(_IN_ORDER)]
        kept = set(random.Random(seed).sample(jobs, sample) if 0 < sample < len(jobs) else jobs)
        for table in ("mutation_specs", "work_items"):
            database.executemany(f"DELETE FROM {table} WHERE job_id = ?", [(job,) for job in jobs if job not in kept])


def report(session: Path) -> None:
    """Print what nobody noticed, as diffs, and how many that are."""
    with closing(sqlite3.connect(session)) as database:
        rows = list(database.execute("SELECT test_outcome, diff FROM work_results"))
    survivors = [diff for outcome, diff in rows if "SURVIVED" in str(outcome).upper()]
    for diff in survivors:
        print("\n".join(line for line in diff.splitlines() if line[:1] in "+-@" and line[:3] not in ("+++", "---")))
        print()
    print(f"{len(survivors)} of {len(rows)} changes were not noticed")


if __name__ == "__main__":
    main()
