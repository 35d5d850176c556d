"""benchmarks/throughput.py, first_step.py, compile_time.py and on_gpu/tiles.py, as far as they run without a GPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from scripts import script

from rewire.kernels.handwritten import projection, writes

ROOT = Path(__file__).parents[2]


def turn(seconds: float) -> dict[str, float | None]:
    return {"seconds": seconds, "peak bytes": None}


def test_ratios_are_of_the_same_round() -> None:
    throughput = script("throughput")
    workers = []
    for name, kernels, seconds in (("plain", True, (1.0, 2.0)), ("mhc", True, (2.0, 8.0)), ("mhc", False, (4.0, 4.0))):
        worker = throughput.Worker(throughput.Variant(name, kernels), None, None)
        worker.about = {"tokens": 12, "first step seconds": 1.0}
        worker.turns = [turn(each) for each in seconds]
        workers.append(worker)
    failed = throughput.Worker(throughput.Variant("dca", True), None, None, about={"error": "no memory"})
    plain, mhc, without, died = throughput.results([*workers, failed])
    assert (plain["throughput over plain"], plain["tokens per second"]) == (1.0, 8.0)
    assert (mhc["throughput over plain"], mhc["range"]) == (0.375, [0.25, 0.5])
    assert (without["variant"], without["throughput over plain"]) == ("mhc, no kernels", 0.375)
    assert died == {"variant": "dca", "error": "no memory"}
    assert [*throughput.table([mhc, died]).columns[1].cells] == ["2", "no memory"]


@pytest.mark.slow
def test_variants_take_turns(tmp_path: Path) -> None:
    out = tmp_path / "throughput.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "throughput.py"), "--device", "cpu", "--small", "--eager"]
    command += ["--rounds", "2", "--workers", "2", "--topologies", "ancre-ingoing", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["variant"]: row for row in json.loads(out.read_text())["results"]}
    names = {"plain", "ancre-ingoing", "ancre-ingoing, no kernels", "plain, eager", "ancre-ingoing, eager"}
    assert rows.keys() == names and all(len(row["seconds"]) == 2 for row in rows.values())
    assert rows["plain"]["throughput over plain"] == rows["plain, eager"]["throughput over plain"] == 1
    assert rows["ancre-ingoing"]["parameters"] > rows["plain"]["parameters"]


@pytest.mark.slow
def test_first_steps(tmp_path: Path) -> None:
    out = tmp_path / "first_step.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "first_step.py"), "--device", "cpu", "--small"]
    command += ["--topologies", "ancre-ingoing", "no-such", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    plain, ours, unknown = json.loads(out.read_text())["results"]
    assert done.returncode == 1 and "no-such" in unknown["error"]
    assert plain["first step"] > 0 and ours["second step"] > 0 and "ancre-ingoing" in done.stdout


@pytest.mark.slow
def test_compile_times(tmp_path: Path) -> None:
    out = tmp_path / "compile_time.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "compile_time.py"), "--runs", "traced", "--layers", "1"]
    command += ["--by-block", "--topologies", "ancre-ingoing", "no-such", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    plain, ours, unknown = json.loads(out.read_text())["results"]
    assert done.returncode == 1 and "no-such" in unknown["traced"]
    assert 0 < plain["traced"] < ours["traced"] and "by block" in done.stdout and "failed" in done.stdout


def test_tiles_are_written_into_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were measured; the modules still run, and have them."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "on_gpu"))
    tiles = script("on_gpu/tiles")
    copies = {}
    for module in (projection, writes):
        path = tmp_path / Path(str(module.__file__)).name
        shutil.copy(str(module.__file__), path)
        names = ("FORWARD", "BACKWARD", "WEIGHTS")
        tables = {name: getattr(module, name) for name in names if hasattr(module, name)}
        copies[path.stem] = SimpleNamespace(__file__=str(path), **tables)
    monkeypatch.setattr(tiles, "MODULES", copies)
    tiles.apply({("projection", "BACKWARD", 96): (1, 2, 3, 4), ("writes", "FORWARD", 6): (5, 6, 7, 8)})
    found = {name: {} for name in copies}
    for name, copy in copies.items():
        exec(compile(Path(copy.__file__).read_text(), copy.__file__, "exec"), found[name])
    assert found["projection"]["BACKWARD"] == projection.BACKWARD | {128: (1, 2, 3, 4)}
    assert found["projection"]["FORWARD"] == projection.FORWARD
    assert (found["writes"]["FORWARD"], found["writes"]["BACKWARD"]) == ((5, 6, 7, 8), writes.BACKWARD)


def test_each_tile_is_measured_with_each_kind_of_columns() -> None:
    tiles = script("on_gpu/tiles")
    kinds = {case.kind for case in tiles.cases()}
    of_projections = {
        ("projection", name, columns) for name in ("FORWARD", "BACKWARD", "WEIGHTS") for columns in (8, 24, 50, 96)
    }
    assert kinds == of_projections | {("writes", "FORWARD", 6), ("writes", "BACKWARD", 6)}
    assert set(tiles.COLUMNS.values()) == projection.FORWARD.keys() == projection.WEIGHTS.keys()
    (case,) = (c for c in tiles.cases() if c.kind == ("writes", "BACKWARD", 6) and c.tile == (8, 128, 8, 1))
    with tiles.patched(case):
        assert writes.BACKWARD == (8, 128, 8, 1)
    assert writes.BACKWARD != (8, 128, 8, 1)
