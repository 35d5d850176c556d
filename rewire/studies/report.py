"""What a study found: rows, ranked, as a table, sentences and plain data."""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Any

from rich import box
from rich.table import Table

from rewire.console import Shown
from rewire.studies.contenders import PLAIN, SCALED, Contender, Scales
from rewire.studies.search import Result, Setting
from rewire.studies.training import Cost, Point, reached

#: Columns of the table, after the names.
TITLES = (
    *("loss", "seeds\nbetter", "steps to\nbaseline's", "the same\nin seconds"),
    *("step time\n× plain", "kept\nMiB", "learned\nweights", "rate"),
)

_LIMITS = (
    "Losses are of this model, this data and this budget; no evidence for larger ones. The rates were searched on seed "
    "0, the runs that count have others; all see the same validation data."
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One contender.

    Attributes:
        setting: the best that the search found; empty if there is none.
        runs: one for each seed, with that setting.
        cost: of a step; None for controls, which cost what the topology does.
        reason: why there are no runs.
    """

    contender: Contender
    setting: Setting = dataclasses.field(default_factory=dict)
    runs: list[Result] = dataclasses.field(default_factory=list)
    cost: Cost | None = None
    reason: str = ""

    @property
    def name(self) -> str:
        return self.contender.name

    @property
    def losses(self) -> list[float]:
        return [run.loss for run in self.runs]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.losses) if self.runs else math.inf

    @property
    def spread(self) -> float:
        """Standard deviation over the seeds; 0 for one."""
        return statistics.stdev(self.losses) if len(self.runs) > 1 and self.mean < math.inf else 0.0

    def curve(self) -> list[Point]:
        """The mean of the runs at each evaluation that all have reached."""
        points = zip(*(run.curve for run in self.runs), strict=False)
        return [Point(*(statistics.fmean(values) for values in zip(*each, strict=True))) for each in points]  # type: ignore[arg-type]

    def reached(self, goals: dict[float, float]) -> Point | None:
        """Mean step and seconds at which runs were as good as the goal of their seed; None if one never was."""
        found = [reached(run.curve, goals[run.setting["seed"]]) for run in self.runs if run.setting["seed"] in goals]
        points = [point for point in found if point]
        if not points or len(points) < len(found):
            return None
        return Point(*(statistics.fmean(values) for values in zip(*points, strict=True)))  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class Study(Shown):
    """What `rewire.study` found. Printing it shows a table.

    Attributes:
        rows: from the lowest mean loss to the highest; those without runs last.
        scales: of the weights of all models but the row "residual".
        about: budget, trials, seeds, machine, versions.
    """

    rows: list[Row]
    scales: Scales
    about: dict[str, Any]

    def row(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)

    @property
    def baseline(self) -> Row:
        """The better of the plain models."""
        return next(row for row in self.rows if row.contender in (PLAIN, SCALED))

    def gains(self, row: Row) -> list[float]:
        """How far the loss of each run is below that of the baseline with the same seed."""
        goals = self.goals()
        return [goals[run.setting["seed"]] - run.loss for run in row.runs if run.setting["seed"] in goals]

    def goals(self) -> dict[float, float]:
        """The baseline's final loss by seed."""
        return {run.setting["seed"]: run.loss for run in self.baseline.runs}

    def findings(self) -> list[str]:
        """A sentence on each topology, whichever way it fell."""
        return [self._finding(row) for row in self.rows if row.contender.settings and not row.contender.held]

    def limits(self) -> str:
        """What these numbers do not show."""
        topologies = sum(bool(row.runs and row.contender.settings and not row.contender.held) for row in self.rows)
        seeds = len(self.baseline.runs)
        by_chance = topologies / 2**seeds
        return (
            f"{_LIMITS} By chance alone, about {by_chance:.1f} of {topologies} that do nothing would be better on all "
            f"of {seeds} seeds."
        )

    def _finding(self, row: Row) -> str:
        if not row.runs:
            return f"{row.name}: {row.reason}."
        gains = self.gains(row)
        gain, better = statistics.fmean(gains), sum(each > 0 for each in gains)
        if not math.isfinite(gain):
            return f"{row.name} diverged on {sum(loss == math.inf for loss in row.losses)} of {len(gains)} seeds."
        sentence = (
            f"{row.name} ends {abs(gain):.4f} {'below' if gain > 0 else 'above'} {self.baseline.name}, the best plain "
            f"model; it is better on {better} of {len(gains)} seeds"
        )
        control = row.contender.control
        assert control is not None
        held = self.row(control.name)
        if control.held == "frozen":
            return f"{sentence}. With its weights frozen it ends at {held.mean:.4f}, learned at {row.mean:.4f}."
        (behind,) = (-gain for gain in self.gains(held))
        return (
            f"{sentence}. With weights that stand still, where it is the plain model, it ends {behind:+.4f} from that."
        )

    def __rich__(self) -> Table:
        return self.table()

    def table(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
        table.add_column("", no_wrap=True)
        for title in TITLES:
            table.add_column(title, justify="right", no_wrap=True)
        for row in self.rows:
            cells = self.cells(row)
            table.add_row(row.name, *cells, style="bold" if row is self.baseline else "")
        return table

    def cells(self, row: Row) -> list[str]:
        """The row's numbers, one for each of `TITLES`."""
        if not row.runs:
            return ["not run", *[""] * (len(TITLES) - 1)]
        point = row.reached(self.goals())
        gains = self.gains(row)
        cost = row.cost
        return [
            f"{row.mean:.4f}" + (f" ± {row.spread:.4f}" if len(row.runs) > 1 else ""),
            "" if row is self.baseline else f"{sum(gain > 0 for gain in gains)}/{len(gains)}",
            "never" if point is None else f"{point.step:.0f}",
            "" if point is None else f"{point.seconds:.0f}",
            "" if cost is None else f"{cost.time:.2f}",
            "" if cost is None else f"{cost.kept / 2**20:.1f}",
            "" if cost is None else f"{cost.weights:,}",
            f"{row.setting['rate']:.2g}",
        ]

    def as_json(self) -> dict[str, Any]:
        """All that was found, of numbers, strings, lists and dicts; a loss that is not finite is None."""
        return {
            "about": self.about,
            "scales": dataclasses.asdict(self.scales),
            "baseline": self.baseline.name,
            "findings": self.findings(),
            "limits": self.limits(),
            "rows": [
                {
                    "name": row.name,
                    "compile": row.contender.settings,
                    "held": row.contender.held,
                    "setting": row.setting,
                    "reason": row.reason,
                    "losses": {int(run.setting["seed"]): _finite(run.loss) for run in row.runs},
                    "mean": _finite(row.mean),
                    "spread": row.spread,
                    "cost": row.cost and row.cost._asdict(),
                    "curves": {
                        int(run.setting["seed"]): [[p.step, p.seconds, _finite(p.loss)] for p in run.curve]
                        for run in row.runs
                    },
                }
                for row in self.rows
            ],
        }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
