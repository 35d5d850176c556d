"""The script for one GPU, as far as a CPU can tell: all of it, at tiny sizes, with kernels in Triton's interpreter."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package of that name, of which this imports what needs no torch."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import on_gpu
    import on_gpu.goals
    import on_gpu.processes

    yield on_gpu
    for name in [name for name in sys.modules if name.partition(".")[0] == "on_gpu"]:
        del sys.modules[name]


class TestProcesses:
    """With jobs that are a line of Python each."""

    def run(self, on_gpu: Any, jobs: dict[str, str], limit: float = 20, **options: Any) -> dict[str, dict[str, Any]]:
        todo = [on_gpu.processes.Job(f"{name}: {line}", dict, limit=limit) for name, line in jobs.items()]
        code = "import sys, os, time, pathlib; exec(sys.argv[2].partition(': ')[2])"
        options = {"workers": 2, "seconds": 60} | options
        records = on_gpu.processes.run_all(todo, [sys.executable, "-c", code], dict(os.environ), **options)
        return {record["job"].partition(":")[0]: record for record in records}

    WRITE = 'pathlib.Path(sys.argv[1]).write_text(\'{"status": "done", "result": {"x": 1}}\')'

    def test_each_costs_its_own_record(self, on_gpu: Any) -> None:
        lines = {"killed": "os.kill(os.getpid(), 9)", "wrong": "print('before'); 1 / 0", "right": self.WRITE}
        found = self.run(on_gpu, lines)
        assert found["right"]["status"] == "done" and found["right"]["result"] == {"x": 1}
        assert found["killed"]["status"] == "failed" and found["killed"]["error"] == "killed by SIGKILL"
        assert found["wrong"]["error"] == "ended with 1" and "ZeroDivisionError" in found["wrong"]["log"]

    def test_one_that_hangs_is_ended_with_what_it_started(self, on_gpu: Any, tmp_path: Path) -> None:
        child = f"subprocess.Popen(['sh', '-c', 'sleep 1; touch {tmp_path}/alive'])"
        start = time.monotonic()
        found = self.run(on_gpu, {"hangs": f"import subprocess; {child}; time.sleep(100)"}, limit=0.5)
        assert found["hangs"]["error"] == "no end within 0.5 s" and time.monotonic() - start < 10
        time.sleep(1)
        assert not (tmp_path / "alive").exists()

    def test_nothing_is_recorded_of_what_the_budget_cuts_off(self, on_gpu: Any) -> None:
        found = self.run(on_gpu, {"right": self.WRITE, "long": "time.sleep(100)", "late": self.WRITE}, seconds=1)
        assert set(found) in ({"right"}, {"right", "late"})
        assert not self.run(on_gpu, {"right": self.WRITE}, seconds=0)

    def test_a_line_that_was_cut_off_is_no_record(self, on_gpu: Any, tmp_path: Path) -> None:
        path = tmp_path / "new" / "file.jsonl"
        on_gpu.processes.append(path, {"job": "a", "status": "failed"})
        path.write_text(path.read_text() + '{"job": "b", "sta')
        on_gpu.processes.append(path, {"job": "a", "status": "done"})
        assert on_gpu.processes.read(path) == [{"job": "a", "status": "failed"}, {"job": "a", "status": "done"}]
        assert on_gpu.processes.latest(on_gpu.processes.read(path)) == {"a": {"job": "a", "status": "done"}}


def test_goals(on_gpu: Any) -> None:
    def share(forward: float, backward: float) -> dict[str, Any]:
        return {"width": 8, "forward": {"share of copy": forward}, "backward": {"share of copy": backward}}

    results = {
        "bandwidth/sum of 2": {"shapes": [share(0.95, 0.8), share(0.5, 0.7)]},
        "bandwidth/sum of 8": {"shapes": [share(0.92, 0.9)]},
        "bandwidth/sum of 8, per token": {"shapes": [share(0.1, 0.1)]},
        "step/llama-1b/dca/compiled": {"time over plain": 1.05},
        "step/llama-1b/mhc/compiled": {"time over plain": 1.07},
        "mix/sum of 2": {"rows": [{"workload": "sum of 2", "implementation": "eager", "status": "measured"}]},
    }
    results["mix/sum of 2"]["rows"][0]["over ours"] = 0.9
    records = {job: {"status": "done", "result": result} for job, result in results.items()}
    records["step/llama-1b/grn-v3/compiled"] = {"status": "failed", "error": "killed by SIGKILL"}
    found = {what: (value, met) for what, _, value, met in on_gpu.goals._goals(records)}
    assert found["mix forward, share of copy, median"] == (0.92, True)
    assert found["mix backward, share of copy, median"] == (0.8, False)
    assert found["llama-1b, dca, compiled: time"] == (pytest.approx(0.05), True)
    assert found["llama-1b, mhc, compiled: time"] == (pytest.approx(0.07), False)
    assert found["llama-1b, grn-v3, compiled: time"] == (None, None)
    assert found["eager over ours, any workload, least"] == (0.9, False)


def test_steps_are_shown_beside_their_goals(on_gpu: Any) -> None:
    result = {
        "time over plain": 1.05,
        "quartiles": [1.04, 1.06],
        "milliseconds": {"plain": 100.0, "rewired": 105.0},
        "peak memory over plain": None,
    }
    jobs = ("step/llama-1b/dca/compiled", "step/llama-350m/dca/compiled")
    table = on_gpu.goals._steps({job: {"status": "done", "result": result} for job in jobs})
    rows = zip(*(column.cells for column in table.columns), strict=True)
    assert list(rows) == [
        ("llama-1b/dca/compiled", "105.0", "100.0", "+5.0%", "+4.0% to +6.0%", "<= 8%", ""),
        ("llama-350m/dca/compiled", "105.0", "100.0", "+5.0%", "+4.0% to +6.0%", "", ""),
    ]


def gpu(tmp_path: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    out = tmp_path / "gpu.jsonl"
    environment = {**os.environ, "REWIRE_CACHE_DIR": str(tmp_path / "kernels")}
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--device", "cpu", "--small", "--out", str(out)]
    done = subprocess.run([*command, *options], cwd=ROOT, env=environment, capture_output=True, text=True)
    return done, [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


@pytest.mark.slow
def test_the_script_goes_on_after_jobs_that_die(tmp_path: Path) -> None:
    jobs = ["test/killed", "test/fails", "test/cannot", "check/kernel/2 sources*", "bandwidth/sum of 2"]
    done, first = gpu(tmp_path, "--seed", "5", "--workers", "3", "--jobs", *jobs)
    assert done.returncode == 1 and len(first) == 5, done.stdout + done.stderr
    found = {record["job"]: record for record in first}
    assert {job: (found[job]["status"], found[job]["error"]) for job in jobs[:3]} == {
        "test/killed": ("failed", "killed by SIGKILL"),
        "test/fails": ("failed", "ValueError: as it was asked to"),
        "test/cannot": ("skipped", "it never does"),
    }
    assert found["check/kernel/2 sources (5 x 24, float32)"]["result"]["largest error over tolerance"] <= 1
    (shape,) = found["bandwidth/sum of 2"]["result"]["shapes"]
    assert shape["forward"]["share of copy"] > 0 and shape["backward"]["share of copy"] > 0
    assert all(record["setting"]["seed"] == 5 for record in first)
    assert "failed: test/killed: killed by SIGKILL" in done.stdout and "3 failed" not in done.stdout

    done, second = gpu(tmp_path, "--jobs", *jobs, "test/passes")
    assert second[:5] == first and [record["job"] for record in second[5:]] == ["test/passes"]
    assert second[-1]["setting"]["seed"] == 5
    done, third = gpu(tmp_path, "--jobs", "test/killed", "test/passes", "--retry")
    assert third[:6] == second and [record["job"] for record in third[6:]] == ["test/killed"]
    done, again = gpu(tmp_path, "--list", "--jobs", "test")
    assert again == third and "failed  test/killed" in done.stdout and "done    test/passes" in done.stdout


@pytest.mark.slow
def test_jobs_of_times_run_in_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = ["--here", "--jobs", "test/fails", "bandwidth/gates of 4 streams"]
    refused, found = gpu(tmp_path, *jobs)
    assert refused.returncode == 2 and "TRITON_INTERPRET=1" in refused.stderr and not found
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    done, found = gpu(tmp_path, *jobs)
    assert done.returncode == 1, done.stdout + done.stderr
    assert {record["job"]: record["status"] for record in found} == {"test/fails": "failed", jobs[-1]: "done"}


#: One of each kind, and of each way through its code.
TINY = [
    "check/kernel",
    "check/device/more than*",
    "check/device/side stream",
    "check/device/second device",
    "check/model/laurel-pa, 2 layers, *",
    "bandwidth/gather 16 for 4",
    "bandwidth/queries*",
    "bandwidth/projection to 24",
    "bandwidth/Sinkhorn*",
    "mix/hyper-connections*",
    "mix/attention residuals*",
    "step/llama-60m/ancre-ingoing",
    "step/llama-60m/attnres, block=6/eager",
]


@pytest.mark.slow
def test_jobs_at_tiny_sizes(tmp_path: Path) -> None:
    """In one process, which saves the start of one for each."""
    program = f"""
import json, sys
sys.path[:0] = [{str(ROOT / "benchmarks")!r}, {str(ROOT / "tests")!r}]
import torch, torchvision_stub
from on_gpu import jobs
every = jobs.all_jobs(jobs.Setting(torch.device("cpu"), True, 5))
assert len({{job.name for job in every}}) == len(every)
for job in jobs.chosen(every, {TINY!r}):
    print("result", json.dumps([job.name, job.run()]))
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "REWIRE_CACHE_DIR": str(tmp_path / "kernels")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    lines = [line.removeprefix("result ") for line in done.stdout.splitlines() if line.startswith("result ")]
    results = dict(map(json.loads, lines))
    kinds = {kind: list(names) for kind, names in itertools.groupby(sorted(results), lambda x: x.partition("/")[0])}
    assert kinds.keys() == {"bandwidth", "check", "mix", "step"} and len(kinds["check"]) > 70
    rows = [row for name in kinds["mix"] for row in results[name]["rows"]]
    assert {row["implementation"] for row in rows if row["status"] == "measured"} >= {"eager", "ours"}
    absent = {row["status"] for row in rows if row["implementation"] in ("liger-kernel", "fla-core")}
    assert absent <= {"not run: needs CUDA", "not installed: pip install fla-core"}
    assert all(results[name]["time over plain"] > 0 for name in kinds["step"]) and len(kinds["step"]) == 3


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["first.mul_(1.01)", "first.view(-1)[0] = float('nan')"])
def test_a_wrong_kernel_is_found(tmp_path: Path, wrong: str) -> None:
    program = f"""
import sys
import torch
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
from on_gpu import kernel_checks
from rewire.kernels.sums import launch
from rewire.kernels.sums.spec import MixSpec
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


@pytest.mark.slow
def test_a_wrong_kernel_is_found_in_a_model(tmp_path: Path) -> None:
    program = f"""
import sys
import torch
sys.path[:0] = [{str(ROOT / "benchmarks")!r}, {str(ROOT / "tests")!r}]
import torchvision_stub
from on_gpu import model_checks
from rewire.kernels import operators, switch
check = model_checks.ModelCheck("ancre-ingoing", 1, frozenset(["norm"]))
run = lambda: model_checks.run(check, torch.device("cpu"), 0, small=True)
run()
right = operators.launch_backward
def backward(spec, inputs, *options):
    return right(spec, inputs._replace(grads=[1.01 * g for g in inputs.grads]), *options)
operators.launch_backward = backward
try:
    run()
except AssertionError as error:
    print(error)
operators.launch_backward, switch.ON = right, False
try:
    run()
except AssertionError as error:
    print(error)
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "REWIRE_CACHE_DIR": str(tmp_path / "kernels")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "the difference is" in done.stdout and "no kernel with norm ran" in done.stdout
