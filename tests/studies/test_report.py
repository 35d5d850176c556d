from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from rewire.init import Scaled
from rewire.studies.contenders import PLAIN, Contender, parse
from rewire.studies.page import _log, write
from rewire.studies.report import Row, Study
from rewire.studies.training import Cost, Point, Result, Setting, Trial

NOISE = (0.01, -0.02, 0.0, 0.02, -0.01, 0.015)
SETTING = Setting(0.01)


def results(gain: float, seeds: int = 6, spread: float = 0.001) -> list[Result]:
    """Runs that end ``gain`` below 1, but for what their seed does and for noise that is their own."""
    losses = [1 - gain + NOISE[n] + spread * (-1) ** n * (n + 1) for n in range(seeds)]
    return [Result(Trial(SETTING, n), [Point(0, 0.0, 2.0), Point(100, 1.0, loss)]) for n, loss in enumerate(losses)]


def row(name: str, gain: float, seeds: int = 6, time: float = 1.2, **more: object) -> Row:
    cost = Cost(0.01, time, 0, 3)
    return Row(name, parse(name), SETTING, {SETTING: 1.0}, [], results(gain, seeds), cost, **more)  # type: ignore[arg-type]


def study(*rows: Row, seeds: int = 6) -> Study:
    plain = Row("residual", PLAIN, SETTING, {SETTING: 1.0}, [], results(0.0, seeds, 0.0), Cost(0.01, 1.0, 0, 0))
    ranked = sorted([plain, *rows], key=lambda row: row.mean)
    return Study(ranked, Scaled(), {"branch": "no effect (0.25, 1, 4)"}, {1.0: 1.0, 2.0: 0.9}, {"steps": 100})


def test_verdicts() -> None:
    names = {"mhc": 0.05, "dca": -0.05, "unet": 0.001}
    found = study(*(row(name, gain) for name, gain in names.items()))
    assert {name: found.verdict(found.row(name)) for name in names} == {
        "mhc": "better",
        "dca": "worse",
        "unet": "no difference",
    }
    assert found.best is found.row("mhc")
    assert found.headline().startswith("mhc is better than residual, the best plain model: 0.051 (0.0")
    assert "Scale of branch: no effect" in found.findings()[-1]


def test_a_difference_that_is_shown_may_be_too_small_to_count() -> None:
    tiny = dataclasses.replace(row("mhc", 0.0), results=results(0.001, spread=0.00001))
    found = study(tiny)
    assert found.p["mhc"] < 1e-4 and found.verdict(tiny) == "no difference" and found.best is None
    assert "is less than 0.1 of what seeds differ by" in found.findings()[0]


def test_nothing_is_better_by_four_seeds() -> None:
    found = study(row("mhc", 0.5, 4), seeds=4)
    assert found.verdict(found.row("mhc")) == "too few seeds" and found.best is None
    assert "nothing is shown by fewer than 5 seeds" in found.findings()[0]


def test_one_seed_has_no_interval() -> None:
    found = study(row("mhc", 0.5, 1), seeds=1)
    assert found.cells(found.row("mhc"))[1:3] == ["+0.5", "too few seeds (1)"]
    assert "; 0.5 below residual at equal steps" in found.findings()[0]


def test_those_that_were_dropped_count() -> None:
    gain = 0.006
    dropped = [
        Row(f"dropped-{n}", Contender(f"dropped-{n}", {"topology": "mhc"}), SETTING, {SETTING: 2.0}) for n in range(30)
    ]
    alone, among = study(row("mhc", gain)), study(row("mhc", gain), *dropped)
    assert alone.verdict(alone.row("mhc")) == "better"
    assert among.verdict(among.row("mhc")) == "no difference" and among.verdict(among.row("dropped-3")) == "dropped"


def test_those_of_earlier_calls_count() -> None:
    found = study(row("mhc", 0.006))
    again = dataclasses.replace(found, earlier=[f"studied-{n}" for n in range(30)])
    assert again.p["mhc"] == pytest.approx(31 * found.p["mhc"])
    assert again.verdict(again.row("mhc")) == "no difference" and "studied-29." in again.findings()[-1]


def test_a_search_that_was_cut_short_is_said_of_those_that_were_dropped_too() -> None:
    dropped = Row("unet", parse("unet"), SETTING, {SETTING: 2.0}, edges=["rate"])
    found = study(row("mhc", 0.05, edges=["connections"]), dropped)
    assert [
        f"not all neighbours in {name}" in each
        for name, each in zip(["connections", "rate"], found.findings(), strict=False)
    ] == [True] * 2


def test_a_gain_is_of_learning_only_above_the_frozen_end() -> None:
    above = study(row("mhc", 0.05, controls={"end": results(0.02, spread=0.0)}))
    below = study(row("mhc", 0.05, controls={"end": results(0.06, spread=0.0)}))
    assert above.findings()[0].count("learning them gains") == 1
    assert below.findings()[0].count("no gain from learning them is shown") == 1


def test_in_the_same_time_it_may_lose() -> None:
    found = study(row("mhc", 0.05, longer=results(0.09, spread=0.0)))
    timed = found.in_its_time(found.row("mhc"))
    assert timed is not None and timed.mean == pytest.approx(-0.04, abs=0.002)
    assert "in the same time, 0.0" in found.headline() and found.headline().endswith("higher.")


def test_speed_up_is_by_what_the_plain_model_needs() -> None:
    found = study(row("mhc", 0.1), row("unet", 0.05, time=2.0), row("dca", 2.0))
    # 0.1 lower takes the plain model twice the steps; what one of it costs, 1.2.
    assert found.speed_up(found.row("mhc")) == pytest.approx(2 / 1.2, rel=0.03)
    assert found.speed_up(found.row("unet")) == pytest.approx(2**0.5 / 2, rel=0.03)
    assert found.speed_up(found.row("dca")) == math.inf
    flat = dataclasses.replace(found, lengths={1.0: 1.0, 2.0: 1 - 1e-9})
    assert flat.speed_up(found.row("mhc")) == math.inf  # and not too large a number


def test_no_speed_up_is_told_where_no_difference_is_shown() -> None:
    found = study(row("mhc", 0.001))
    assert found.verdict(found.row("mhc")) == "no difference" and found.speed_up(found.row("mhc")) is None


def test_a_row_that_diverged() -> None:
    bad = row("mhc", 0.1)
    bad.results[2] = Result(bad.results[2].trial, [Point(3, 0.1, math.inf)])
    found = study(bad)
    assert found.verdict(bad) == "diverged"
    assert found.findings()[0] == "mhc diverged on 1 of 6 seeds."
    assert found.as_json()["rows"][-1]["mean"] is None
    assert found.speed_up(bad) is None and found.cells(bad)[:3] == ["", "", "diverged"]


def test_a_control_that_diverged() -> None:
    control = results(0.02)
    control[1] = Result(control[1].trial, [Point(3, 0.1, math.inf)])
    found = study(row("mhc", 0.05, controls={"end": control}, longer=control))
    said = found.findings()[0] + found.headline()
    assert said.count("the control diverged on 1 of 6 seeds") == 3 and "nan" not in said and "inf" not in said


def test_pages_of_odd_results(tmp_path: Path) -> None:
    """All seeds of a row diverged; losses are negative, as those of densities; one plain model diverged."""
    bad = row("mhc", 0.1)
    bad.results[:] = [Result(run.trial, [Point(3, 0.1, math.inf)]) for run in bad.results]
    plain = dataclasses.replace(bad, name="residual, scaled", contender=PLAIN)
    found = study(row("unet", 1.5), row("dca", 1.4), bad, plain)
    found.about["seeds"], found.about["seconds"] = 6, None
    write(found, tmp_path)
    page = (tmp_path / "study.html").read_text()
    assert found.baseline.name == "residual" and found.verdict(plain) == "diverged"
    assert page.count("<td>diverged</td>") == 2 and "nan" not in page.split("<img")[0]
    assert (tmp_path / "curves.png").exists()
    assert [_log({"unet": [(1.0, 2.0), (2.0, loss)]}) for loss in (0.5, -0.5)] == ["y", ""]
