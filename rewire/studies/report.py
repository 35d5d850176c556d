"""What a study found: rows, and what each row shows, in words, as a table and as plain data."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from rewire.console import Shown
from rewire.files import as_plain
from rewire.init.initializers.scaled_weights import Scaled
from rewire.studies.contenders import Contender, Held
from rewire.studies.paired import FEWEST, LEVEL, Difference, difference, holm
from rewire.studies.search import Tried
from rewire.studies.training import Cost, Point, Result, Setting

#: Columns of the table, after the names.
TITLES = (
    *("loss", "below the baseline\n95% interval", "shown\n(p by Holm)", "in its\ntime", "speed-\nup"),
    *("step", "rate ×\nconn."),
)

#: The smallest difference that counts, as a share of the standard deviation of the plain model's losses over seeds.
SMALLEST = 0.1

LIMITS = (
    "Losses are of this model, this data and this budget; no evidence for larger ones. Rates and scales were searched "
    "on other seeds than those that are compared; all see the same validation data."
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One contender, or the plain model.

    Attributes:
        setting: the best that the search found; None if there is none.
        tried: loss of each setting, mean over the seeds of the search.
        searched: all runs of the search.
        results: one for each compared seed; empty if it was dropped after the search, or never ran.
        cost: of a step; None if it was not measured.
        reason: why there are no results.
        edges: numbers whose search stopped at the edge of the tried range.
        controls: runs with the same seeds, and connection weights that are held.
        longer: runs of the plain model with the same seeds, for as long as this one's runs take.
    """

    name: str
    contender: Contender
    setting: Setting | None = None
    tried: Tried = dataclasses.field(default_factory=dict)
    searched: list[Result] = dataclasses.field(default_factory=list)
    results: list[Result] = dataclasses.field(default_factory=list)
    cost: Cost | None = None
    reason: str = ""
    edges: list[str] = dataclasses.field(default_factory=list)
    controls: dict[Held, list[Result]] = dataclasses.field(default_factory=dict)
    longer: list[Result] = dataclasses.field(default_factory=list)

    @property
    def is_plain(self) -> bool:
        return self.contender.settings is None

    @property
    def losses(self) -> list[float]:
        return [result.loss for result in self.results]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.losses) if self.results else math.inf

    def curve(self) -> list[Point]:
        """The mean of the runs at each evaluation that all have reached."""
        points = zip(*(result.curve for result in self.results), strict=False)
        return [Point(*(statistics.fmean(values) for values in zip(*each, strict=True))) for each in points]  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class Study(Shown):
    """What `rewire.study` found. Printing it shows a table.

    Attributes:
        rows: from the lowest mean loss to the highest; then those that were dropped after the search, and failed ones.
        scales: an initialiser with the best factors that were found for the plain model's weights: pass it on as
            ``rewire.compile(.., init=found.scales)``. All topologies started with these.
        effects: the result of the search for each of these factors.
        lengths: mean loss of the baseline by the length of its run, as a multiple of the budget.
        about: budget, trials, seeds, machine, versions.
        earlier: topologies without a row that were studied before with the same storage: p-values count them.
    """

    rows: list[Row]
    scales: Scaled
    effects: dict[str, str]
    lengths: dict[float, float]
    about: dict[str, Any]
    earlier: list[str] = dataclasses.field(default_factory=list)

    def row(self, name: str) -> Row:
        return {row.name: row for row in self.rows}[name]

    @functools.cached_property
    def baseline(self) -> Row:
        """The better of the plain models."""
        return min((row for row in self.rows if row.is_plain), key=lambda row: row.mean)

    @property
    def best(self) -> Row | None:
        """The best topology among those that are shown to be better than the baseline; None if there is none."""
        return next((row for row in self.rows if self.verdict(row) == "better"), None)

    def gain(self, row: Row) -> Difference:
        """How far the row's losses are below the baseline's with the same seeds."""
        return difference(self.baseline.losses, row.losses)

    @functools.cached_property
    def p(self) -> dict[str, float]:
        """p-values of the compared rows, corrected for all contenders that entered (Holm)."""
        entered = [row for row in self.rows if not row.is_plain]
        return holm({row.name: self.gain(row).p for row in entered if row.results}, len(entered) + len(self.earlier))

    @functools.cached_property
    def smallest(self) -> float:
        """The smallest difference that counts: a tenth of the standard deviation of the baseline over the seeds.

        Nearly equal weights give nearly equal losses, whose paired differences may be real but of no use.
        """
        losses = self.baseline.losses
        return SMALLEST * statistics.stdev(losses) if len(losses) > 1 else 0.0

    def verdict(self, row: Row) -> str:
        """What the row shows: better, worse, no difference, or why nothing is shown."""
        if not row.results:
            return "dropped" if row.tried and not row.reason else "not run"
        if not math.isfinite(row.mean):
            return "diverged"
        if row.is_plain:
            return "baseline" if row is self.baseline else "plain"
        if len(row.results) < FEWEST:
            return "too few seeds"
        if self.p[row.name] > LEVEL or abs(self.gain(row).mean) < self.smallest:
            return "no difference"
        return "better" if row.mean < self.baseline.mean else "worse"

    def in_its_time(self, row: Row) -> Difference | None:
        """How far the row is below the plain model trained for the same time; None if that was not run."""
        return difference([result.loss for result in row.longer], row.losses) if row.longer else None

    def learned(self, row: Row, held: Held = "end") -> Difference | None:
        """How far the row is below its control; None if that was not run."""
        control = row.controls.get(held)
        return difference([result.loss for result in control], row.losses) if control else None

    def speed_up(self, row: Row) -> float | None:
        """Time that the plain model needs for this loss, over the time that this row took.

        Interpolated in the plain model's losses at several lengths, over the logarithm of the length. None: no
        difference is shown, the losses do not fall with the length, or it was not measured; infinite: more than 4.
        """
        points = sorted(self.lengths.items())
        shown = self.verdict(row) in ("better", "worse")
        if row.cost is None or not shown or not self.about.get("steps") or len(points) < 2:
            return None
        (a, first), (b, last) = points[0], points[-1]
        if not last < first < math.inf:
            return None
        times = math.log(b / a) * (first - row.mean) / (first - last) + math.log(a / row.cost.time)
        return math.inf if times > math.log(4) else math.exp(times)

    # In words.

    def headline(self) -> str:
        """The result in a sentence."""
        best, compared = self.best, [row for row in self.rows if not row.is_plain and row.results]
        if best is None:
            return f"No difference shown: none of {len(compared)} topologies is better than {self.baseline.name}."
        gain = self.gain(best)
        cost = f"a step takes {best.cost.time:.2f} times as long" if best.cost else "its cost was not measured"
        timed = self.in_its_time(best)
        in_time = "" if timed is None else f"; in the same time, {_shown(timed)}"
        return (
            f"{best.name} is better than {self.baseline.name}, the best plain model: {_interval(gain)} lower "
            f"(p = {self.p[best.name]:.2g}), at equal steps; {cost}{in_time}."
        )

    def findings(self) -> list[str]:
        """Sentences on each topology, whatever its result, and on the plain model's scales."""
        scales = [f"Scale of {name}: {effect}." for name, effect in self.effects.items()]
        counted = [f"p-values also count what was studied before: {', '.join(self.earlier)}."] if self.earlier else []
        return [self._finding(row) for row in self.rows if not row.is_plain] + scales + counted

    def limits(self) -> str:
        """What these numbers do not show, in words."""
        return LIMITS

    def _finding(self, row: Row) -> str:
        verdict = self.verdict(row)
        if verdict == "not run":
            return f"{row.name}: {row.reason}."
        numbers = " and ".join(row.edges)
        short = f" Its search was cut short: not all neighbours in {numbers} were tried." if numbers else ""
        if verdict == "dropped":
            loss = min(row.tried.values())
            return f"{row.name}: dropped after the search, in which others had lower losses ({loss:.4g}).{short}"
        if verdict == "diverged":
            return f"{row.name} {_diverged(row.losses)}.{short}"
        gain = self.gain(row)
        if verdict == "too few seeds":
            words = f"nothing is shown by fewer than {FEWEST} seeds"
        elif verdict == "no difference" and self.p[row.name] <= LEVEL:
            words = (
                f"a difference is shown, but it is less than {SMALLEST:g} of what seeds differ by, and does not count"
            )
        elif verdict == "no difference":
            words = "no difference is shown"
        else:
            words = f"{verdict} is shown"
        ahead = sum(value > 0 for value in gain.values)
        sentences = [
            f"{row.name}: {words}; {_interval(gain)} below {self.baseline.name} at equal steps, lower on {ahead} of "
            f"{len(gain.values)} seeds, p = {self.p[row.name]:.2g}.{short}",
            *self._controls(row),
        ]
        if (timed := self.in_its_time(row)) is not None:
            sentences.append(f"With the plain model trained for the same time: {_shown(timed)}.")
        last = row.results[0].moves
        if last is not None:
            sentences.append(f"Its weights moved by up to {last}.")
        return " ".join(sentences)

    def _controls(self, row: Row) -> list[str]:
        said = []
        if (start := self.learned(row, "start")) is not None:
            said.append(f"Weights frozen at the start: {_shown(start)}.")
        if (end := self.learned(row)) is not None:
            gained = end.p <= LEVEL and end.mean > 0
            meaning = "learning them gains" if gained else "no gain from learning them is shown"
            said.append(f"Frozen where another run's ended, the model trained anew: {_shown(end)}; {meaning}.")
        if (rule := self.learned(row, "rule")) is not None:
            said.append(f"Against the nearest fixed rule: {_shown(rule)}.")
        return said

    def shown(self) -> Iterator[RenderableType]:
        yield self.table()

    def table(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
        table.add_column("", no_wrap=True)
        for title in TITLES:
            table.add_column(title, justify="right", no_wrap=True)
        for row in self.rows:
            table.add_row(Text(row.name), *self.cells(row), style="bold" if row is self.baseline else "")
        return table

    def cells(self, row: Row) -> list[str]:
        """The row's numbers, one for each of `TITLES`."""
        verdict = self.verdict(row)
        cost = "" if row.cost is None else f"{row.cost.time:.2f}"
        rate = "" if row.setting is None else f"{row.setting.rate:.2g}"
        rate += "" if row.setting is None or row.is_plain else f"×{row.setting.connections:g}"
        if verdict == "diverged" or not row.results:
            return ["", "", verdict, "", "", cost, rate]
        if row.is_plain:
            gain = "" if row is self.baseline else _interval(self.gain(row), "+")
            return [f"{row.mean:.4g}", gain, verdict, "", "", cost, rate]
        timed, speed = self.in_its_time(row), self.speed_up(row)
        return [
            f"{row.mean:.4g}",
            _interval(self.gain(row), "+"),
            f"{verdict} ({self.p[row.name]:.2g})",
            "" if timed is None else f"{timed.mean:+.2g}",
            "" if speed is None else f"{speed:.2f}" if speed < math.inf else ">4",
            cost,
            rate,
        ]

    def as_json(self) -> dict[str, Any]:
        """All results as numbers, strings, lists and dicts; numbers that are not finite become None."""
        found: dict[str, Any] = as_plain(
            {
                "about": self.about,
                "headline": self.headline(),
                "scales": dataclasses.asdict(self.scales),
                "effects": self.effects,
                "baseline": self.baseline.name,
                "lengths": [list(each) for each in sorted(self.lengths.items())],
                "findings": self.findings(),
                "limits": self.limits(),
                "rows": [self._row_as_json(row) for row in self.rows],
            }
        )
        return found

    def _row_as_json(self, row: Row) -> dict[str, Any]:
        compared = bool(row.results) and not row.is_plain
        timed, end = self.in_its_time(row), self.learned(row)
        return {
            "name": row.name,
            "compile": row.contender.settings,
            "verdict": self.verdict(row),
            "setting": row.setting and dataclasses.asdict(row.setting),
            "mean": row.mean,
            "losses": _by_seed(row.results),
            "gain": self.gain(row)._asdict() if compared else None,
            "p": self.p[row.name] if compared else None,
            "in its time": timed and timed._asdict(),
            "learned": end and end._asdict(),
            "speed-up": self.speed_up(row) if compared else None,
            "cost": row.cost and row.cost._asdict(),
            "reason": row.reason,
            "edges": row.edges,
            "controls": {held: _by_seed(results) for held, results in row.controls.items()},
            "longer": _by_seed(row.longer),
            "moves": {r.trial.seed: dataclasses.asdict(r.moves) for r in row.results if r.moves},
            "search": [
                {**dataclasses.asdict(r.trial.setting), "seed": r.trial.seed, "loss": r.loss, "spikes": r.spikes}
                for r in row.searched
            ],
            "curves": {r.trial.seed: [list(point) for point in r.curve] for r in row.results},
        }


def _interval(found: Difference, sign: str = "") -> str:
    """The mean, with its interval if there is one."""
    if math.isnan(found.low):
        return f"{found.mean:{sign}.2g}"
    return f"{found.mean:{sign}.2g} ({found.low:{sign}.2g} to {found.high:{sign}.2g})"


def _diverged(values: Sequence[float]) -> str:
    return f"diverged on {sum(not math.isfinite(value) for value in values)} of {len(values)} seeds"


def _shown(found: Difference) -> str:
    """What a difference from a control shows, in words."""
    if not math.isfinite(found.mean):
        return f"the control {_diverged(found.values)}"
    if found.p > LEVEL:
        return f"no difference shown, {_interval(found)} lower"
    return f"{_interval(found)} lower" if found.mean > 0 else f"{abs(found.mean):.2g} higher"


def _by_seed(results: Sequence[Result]) -> dict[int, float]:
    return {result.trial.seed: result.loss for result in results}
