from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
import torch
from on_mixes import comparison, workloads
from on_mixes.chart import plot_rates
from on_mixes.cold_passes import Passes
from on_mixes.comparison import Row
from on_mixes.peers import Implementation, status
from rich.console import Console
from torch import Tensor

from rewire.bench import harness
from rewire.bench.harness import Timing
from rewire.kernels import switch
from rewire.kernels.kernel import Kernel, Launch

CPU = torch.device("cpu")
SIZES = workloads.Sizes(1, 6, 16, torch.float32, CPU)
BANDWIDTH = 1e10


def all_workloads(sizes: workloads.Sizes) -> list[workloads.Workload]:
    return [*workloads.make_workloads(sizes, small=True), workloads.weighted_sum(sizes, 18, "scores")]


@pytest.mark.parametrize("workload", all_workloads(SIZES), ids=lambda workload: workload.name)
def test_all_implementations_do_the_same_work(workload: workloads.Workload) -> None:
    (rows,) = comparison.run([workload], rounds=2, compiled=False)
    assert [row.implementation for row in rows] == list(workload.implementations)
    for row in rows:
        measured = not row.status
        assert measured == (row.passes is not None)
        if measured:
            assert workload.implementations[row.implementation].other_work == (row.error is None)
    assert {row.implementation for row in rows if not row.status} >= {"plain residual", "eager", "ours"}
    assert all(row.status.startswith(("not run: ", "not installed: ")) for row in rows if row.status)


def test_bfloat16() -> None:
    workload = workloads.weighted_sum(dataclasses.replace(SIZES, dtype=torch.bfloat16), 4, "channel")
    (rows,) = comparison.run([workload], rounds=1, compiled=False)
    assert all(1e-5 < row.error < 1e-2 for row in rows if row.error is not None)


@pytest.mark.slow
def test_torch_compile() -> None:
    (rows,) = comparison.run([workloads.weighted_sum(SIZES, 2, "scalar")], rounds=1)
    assert not any(row.status for row in rows)
    assert {row.implementation for row in rows if row.error is None} == {
        "plain residual",
        "eager, compiled",
        "ours, compiled",
    }


def with_implementation(implementation: Implementation) -> workloads.Workload:
    workload = workloads.weighted_sum(SIZES, 2, "scalar")
    return dataclasses.replace(workload, implementations={**workload.implementations, "another": implementation})


@pytest.mark.parametrize("compiled", [False, True])
def test_a_way_that_fails_is_listed_and_the_others_are_measured(compiled: bool) -> None:
    def run(*given: Tensor) -> Any:
        raise ZeroDivisionError("in their code\nmore")

    (rows,) = comparison.run([with_implementation(Implementation(run, other_work=compiled))], rounds=1, compiled=False)
    assert rows[-1].status == "failed: ZeroDivisionError: in their code"
    assert rows[-1].passes is None and rows[3].passes is not None


def test_a_way_that_computes_something_else_is_not_timed() -> None:
    def values(a: Tensor, b: Tensor, w: Tensor) -> Any:
        return (w[0] * a + 1.01 * w[1] * b,)

    def gradients(a: Tensor, b: Tensor, w: Tensor) -> Any:
        return (w[0] * a + w[1].detach() * b + 0 * w[1],)

    for wrong in (values, gradients):
        (rows,) = comparison.run([with_implementation(Implementation(wrong))], rounds=1, compiled=False)
        assert rows[-1].status.startswith("differs from float64 by ")
        assert rows[-1].passes is None


def test_peers_that_cannot_run_say_why() -> None:
    assert status("no_such_module", "the-package", CPU, needs_cuda=True) == "not installed: pip install the-package"
    assert status("json", "json", CPU, needs_cuda=True) == "not run: needs CUDA"
    assert status("json", "json", torch.device("cuda"), needs_cuda=True) == ""
    assert status("json", "json", CPU, needs_cuda=False) == ""


# -- bytes -----------------------------------------------------------------------------------------------------------


def test_floors() -> None:
    """Against the inputs and results themselves: each once, in backward with the gradients."""
    for workload in (workloads.weighted_sum(SIZES, 3, "channel"), workloads.sum_and_norm(SIZES, 3)):
        inputs = workload.inputs(SIZES)
        results = workload.implementations["eager"].run(*inputs)
        given, made = (sum(x.numel() * x.element_size() for x in tensors) for tensors in (inputs, results))
        assert workload.floor.forward == given + made
        # Backward of a norm reads the sum as well, which is one of the results.
        again = SIZES.state if len(results) == 2 else 0
        assert workload.floor.backward == made + 2 * given + again


def test_floors_of_streams() -> None:
    """H [4 states] and f: a read of H gives r, a write of H and f gives H'."""
    for workload in (workloads.hyper_connections(SIZES, 4), workloads.manifold_hyper_connections(SIZES, 4)):
        assert workload.floor.forward == (4 + 1 + 4 + 1 + 4) * SIZES.state
        # Write: gradient of H', H, f to gradients of H and f. Read: gradient of r and H, added to the gradient of H.
        assert workload.floor.backward == (4 + 4 + 1 + 4 + 1 + 1 + 4 + 4 + 4) * SIZES.state


def test_floor_of_a_trunk() -> None:
    unit = SIZES.state
    trunk = workloads.trunk(SIZES, 3)
    # Four inputs and three results; three gradients, the three states that are mixed, and four gradients.
    assert trunk.floor == workloads.Bytes(7 * unit, 10 * unit)


def test_a_norm_is_fused_with_its_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    workload, started = workloads.sum_and_norm(SIZES, 3), list[Launch]()
    monkeypatch.setattr(Kernel, "start", lambda kernel, used: started.append(kernel.launch(used)))
    monkeypatch.setattr(switch, "INTERPRETED", True)
    results = workload.implementations["ours"].run(*map(torch.nn.Parameter, workload.inputs(SIZES)))
    torch.autograd.backward(results, list(map(torch.zeros_like, results)))
    made_for = [call.code.made_for for call in started]
    made_again = (False, None)  # the sum, which is not kept for the norm's backward
    assert [(of.backward, of.spec.norm) for of in made_for] == [(False, "rms"), made_again, (True, "rms")]


# -- rows ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def rows() -> list[Row]:
    workload = workloads.weighted_sum(SIZES, 2, "scalar")
    ours = Passes(Timing((1e-3, 2e-3, 3e-3), peak=2**20), Timing((2e-3, 2e-3, 2e-3), peak=2**20))
    eager = Passes(Timing((2e-3, 4e-3, 6e-3), peak=2**21), Timing((4e-3, 4e-3, 4e-3), peak=2**21))
    return [
        Row(workload, "eager", error=1e-7, passes=eager),
        Row(workload, "ours", error=1e-7, passes=ours),
        Row(workload, "ours, compiled", "not run: for a test"),
    ]


def test_a_table(rows: list[Row]) -> None:
    shown = Console(width=140)
    with shown.capture() as captured:
        shown.print(comparison.table(rows, BANDWIDTH))
    text = captured.get()
    for part in ("sum of 2, a weight each", "not run: for a test", "4 ±1", "2.00", "1.00", "A copy moves 10.0 GB/s"):
        assert part in text


def test_json(rows: list[Row], tmp_path: Path) -> None:
    comparison.save(tmp_path / "rows.json", rows, BANDWIDTH, CPU)
    saved = json.loads((tmp_path / "rows.json").read_text())
    assert saved["machine"] == harness.machine(CPU)
    (result,) = saved["results"]
    eager, ours, compiled = result["rows"]
    assert (eager["over ours"], ours["over ours"], eager["peak bytes"]) == (2.0, 1.0, 2**21)
    assert ours["forward"]["median"] == 2e-3 and ours["forward"]["seconds"] == [1e-3, 2e-3, 3e-3]
    assert ours["forward"]["share of copy"] == pytest.approx(ours["floor bytes"]["forward"] / 2e-3 / BANDWIDTH)
    assert (compiled["status"], ours["status"]) == ("not run: for a test", "measured")
    assert "forward" not in compiled


def test_a_plot(rows: list[Row], tmp_path: Path) -> None:
    found = comparison.rates(rows)
    (workload,) = found.values()
    assert workload["ours"] == (rows[1].workload.floor.forward / 2e-3, rows[1].workload.floor.backward / 2e-3)
    assert "ours, compiled" not in workload
    plot_rates(found, BANDWIDTH, tmp_path / "rates.png")
    assert matplotlib.image.imread(tmp_path / "rates.png").shape[1] == 1800
    with pytest.raises(ValueError, match="nothing to plot"):
        plot_rates({}, BANDWIDTH, tmp_path / "none.png")


def test_default_sizes_depend_on_the_device() -> None:
    small, large = workloads.default_workloads(CPU), workloads.default_workloads(torch.device("cuda"))
    assert {workload.sizes.dtype for workload in small} == {torch.float32}
    assert {workload.sizes.dtype for workload in large} == {torch.bfloat16}
    assert {workload.sizes.tokens for workload in large} == {16384}
    assert {workload.sizes.width for workload in large} == {1024, 2048, 4096, 8192}
    assert len(large) > len(small)
    assert workloads.default_workloads(CPU, torch.float16, 2, 3)[0].sizes == workloads.Sizes(
        2, 3, 1024, torch.float16, CPU
    )
