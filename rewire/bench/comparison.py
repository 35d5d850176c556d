"""Runs the cases of `rewire.bench.cases`: compares the ways of each, times them in turn, shows and saves the rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from rich import box
from rich.table import Table
from torch import Tensor, nn

from rewire.bench import harness
from rewire.bench.cases import EAGER, OURS, Bytes, Case
from rewire.bench.harness import Passes, Timing
from rewire.bench.peers import Way
from rewire.passes.validate import relative_error

#: Tokens on which the ways are compared before they are timed.
_CHECKED = 48


@dataclasses.dataclass(frozen=True)
class Row:
    """What was measured of one way of one case.

    Attributes:
        status: why there are no times; empty if there are.
        error: largest relative difference of a result or gradient to float64; None for other work, and for what
            torch.compile made of a function that was compared itself.
    """

    case: Case
    way: str
    status: str = ""
    error: float | None = None
    passes: Passes | None = None

    def rate(self, name: Literal["forward", "backward"]) -> float:
        """Bytes of the floor per second."""
        assert self.passes is not None
        return getattr(self.case.floor, name) / getattr(self.passes, name).median


def run(cases: Iterable[Case], rounds: int, compiled: bool = True) -> Iterator[list[Row]]:
    """Measure one case after the other, the ways of each in turn.

    Every way is compared with the float64 twin first, on a few tokens; one that differs is not timed, nor is one that
    fails: its row says why.

    Args:
        rounds: how often each way is timed.
        compiled: whether to measure the ways that need torch.compile.

    Returns:
        The rows of each case, in the order of its ways.
    """
    for case in cases:
        torch._dynamo.reset()  # the functions of many cases share one code, whose compilations are limited
        statuses = {name: _status(way, compiled) for name, way in case.ways.items()}
        errors = _errors(case, {name: way for name, way in case.ways.items() if not statuses[name]})
        statuses |= {name: error for name, error in errors.items() if isinstance(error, str)}
        passes = _time(case, statuses, rounds)
        numbers = {name: error for name, error in errors.items() if isinstance(error, float)}
        yield [Row(case, name, statuses[name], numbers.get(name), passes.get(name)) for name in case.ways]


def _status(way: Way, compiled: bool) -> str:
    return way.status or ("" if compiled or not way.compiled else "not run: without torch.compile")


def _errors(case: Case, ways: Mapping[str, Way]) -> dict[str, float | str]:
    """By way, its largest relative error; or a status."""
    small = dataclasses.replace(case.sizes, batch=1, length=_CHECKED)
    inputs = case.inputs(small)
    exact = [x.double() for x in inputs]
    grads: list[Tensor] = []

    def results(way: Way, given: Sequence[Tensor]) -> list[Tensor]:
        leaves = [nn.Parameter(x.detach()) for x in given]  # kernels take norms of parameters only
        outputs = way.back(way.run(*way.into(*leaves)))
        if not grads:
            grads.extend(torch.randn_like(y) for y in outputs)
        upstream = [g.to(y.dtype) for g, y in zip(grads, outputs, strict=True)]
        found = [*outputs, *torch.autograd.grad(outputs, leaves, upstream)]
        return [x.detach() for x in found]

    wanted = results(case.ways[EAGER], exact)
    tolerance = max(4 * torch.finfo(small.dtype).eps, 1e-4)
    found: dict[str, float | str] = {}
    for name, way in ways.items():
        if way.other_work or way.compiled:
            continue
        try:
            error = max(map(relative_error, wanted, results(way, inputs)))
        except Exception as failure:  # of any library: the others are still measured
            found[name] = _failed(failure)
            continue
        found[name] = error if error <= tolerance else f"differs from float64 by {error:.1e}"
    return found


def _time(case: Case, statuses: dict[str, str], rounds: int) -> dict[str, Passes]:
    """Times of the ways without a status; one that fails gets it."""
    inputs = case.inputs(case.sizes)
    steps: dict[str, Any] = {}
    for name, way in case.ways.items():
        if not statuses[name]:
            step = _step(way, inputs)
            try:
                step()()  # compiles
                steps[name] = step
            except Exception as failure:
                statuses[name] = _failed(failure)
    return harness.passes_side_by_side(steps, rounds, case.sizes.device)


def _step(way: Way, inputs: Sequence[Tensor]) -> Callable[[], Callable[[], object]]:
    """Runs forward; what it returns runs backward. Gradients are returned, not accumulated."""
    leaves = [nn.Parameter(x.detach()) for x in way.into(*inputs)]  # kernels take norms of parameters only
    function = torch.compile(way.run, dynamic=False) if way.compiled else way.run
    used = leaves[: way.used]
    grads: list[Tensor] = []

    def forward() -> Callable[[], object]:
        outputs = function(*leaves)
        if not grads:
            grads.extend(map(torch.randn_like, outputs))
        return lambda: torch.autograd.grad(outputs, used, grads)

    return forward


def _failed(failure: Exception) -> str:
    first = next(iter(str(failure).splitlines()), "")
    return f"failed: {type(failure).__name__}: {first}"[:200]


def table(rows: Sequence[Row], bandwidth: float) -> Table:
    """The rows, case by case.

    Args:
        bandwidth: bytes per second of a copy, as `harness.copy_bandwidth` measures it.
    """
    counted = any(row.passes and row.passes.both.peak is not None for row in rows)
    columns = ["ms forward", "GB/s", "copy", "ms backward", "GB/s", "copy", "/ ours", *(["MiB"] if counted else [])]
    cases = list({id(row.case): row.case for row in rows}.values())
    caption = [
        f"A copy moves {bandwidth / 1e9:.1f} GB/s. GB/s and its share count the floor: each input read once, each "
        "result written once. ms: median and half the distance of the quartiles. / ours: both passes, round by round.",
        *(f"{case.name}: {case.remark}." for case in cases if case.remark),
    ]
    result = Table("", *columns, "", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption="\n".join(caption))
    result.caption_justify = "left"
    for column in result.columns[1:-1]:
        column.justify = "right"
        column.no_wrap = True
    for case in cases:
        result.add_row(f"[bold]{case.name}[/bold]", *[""] * len(columns), _describe(case))
        for row in rows:
            if row.case is case:
                result.add_row(*_cells(row, rows, bandwidth, counted))
        result.add_section()
    return result


def _describe(case: Case) -> str:
    def mebibytes(bytes_: Bytes) -> str:
        return f"{bytes_.forward / 2**20:.1f} + {bytes_.backward / 2**20:.1f}"

    moved = f", our kernels {mebibytes(case.moved)}" if case.moved else ""
    unblocked = f", without blocks {mebibytes(case.unblocked)}" if case.unblocked else ""
    return f"floor {mebibytes(case.floor)} MiB{moved}{unblocked}"


def _cells(row: Row, rows: Sequence[Row], bandwidth: float, counted: bool) -> list[str]:
    way = row.case.ways[row.way]
    name = f"  {row.way}"
    if row.passes is None:
        return [name, *[""] * (8 if counted else 7), row.status]
    cells = [name]
    for timing, rate in ((row.passes.forward, row.rate("forward")), (row.passes.backward, row.rate("backward"))):
        cells += [_spread(timing), *(["", ""] if way.other_work else [f"{rate / 1e9:.3g}", f"{rate / bandwidth:.0%}"])]
    ratio = over_ours(row, rows)
    cells.append("" if ratio is None else f"{ratio:.2f}")
    if counted:
        cells.append(f"{(row.passes.both.peak or 0) / 2**20:.0f}")
    return [*cells, "other work: plain adds" if way.other_work else way.note]


def _spread(timing: Timing) -> str:
    low, high = timing.quartiles
    return f"{1e3 * timing.median:.3g} ±{1e3 * (high - low) / 2:.2g}"


def over_ours(row: Row, rows: Iterable[Row]) -> float | None:
    """Time of both passes over that of "ours" in the same case; None if one of the two was not measured."""
    ours = next((other.passes for other in rows if other.case is row.case and other.way == OURS), None)
    return row.passes.both.ratio(ours.both) if row.passes and ours else None


def as_json(rows: Sequence[Row], bandwidth: float) -> list[dict[str, Any]]:
    """One entry for each row: everything that the table shows, and the seconds of each round."""
    return [_entry(row, rows, bandwidth) for row in rows]


def _entry(row: Row, rows: Sequence[Row], bandwidth: float) -> dict[str, Any]:
    sizes, way = row.case.sizes, row.case.ways[row.way]
    entry: dict[str, Any] = {
        "case": row.case.name,
        "remark": row.case.remark,
        "shape": [sizes.batch, sizes.length, sizes.width],
        "dtype": str(sizes.dtype).removeprefix("torch."),
        "way": row.way,
        "note": way.note,
        "other work": way.other_work,
        "status": row.status or "measured",
        "relative error": row.error,
        "floor bytes": dataclasses.asdict(row.case.floor),
        "moved bytes": _counted(row.case.moved, row.way),
        "unblocked bytes": _counted(row.case.unblocked, row.way),
    }
    if row.passes is None:
        return entry
    passes: dict[str, Any] = {}
    for name, timing in (("forward", row.passes.forward), ("backward", row.passes.backward)):
        rate = getattr(row.case.floor, name) / timing.median
        shares = {} if way.other_work else {"bytes per second": rate, "share of copy": rate / bandwidth}
        passes[name] = {"median": timing.median, "quartiles": timing.quartiles, "seconds": timing.seconds, **shares}
    return entry | passes | {"over ours": over_ours(row, rows), "peak bytes": row.passes.both.peak}


def _counted(bytes_: Bytes | None, way: str) -> dict[str, int] | None:
    return dataclasses.asdict(bytes_) if bytes_ and way == OURS else None


def rates(rows: Iterable[Row]) -> dict[str, dict[str, tuple[float, float]]]:
    """Bytes per second of both passes by case and way, where they were measured: what `plot_rates` draws."""
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for row in rows:
        if row.passes and not row.case.ways[row.way].other_work:
            found.setdefault(row.case.name, {})[row.way] = (row.rate("forward"), row.rate("backward"))
    return found


def save(path: Path, rows: Sequence[Row], bandwidth: float, device: torch.device) -> None:
    """Write rows as JSON, after the machine and the bandwidth of a copy."""
    harness.save(path, [{"copy bytes per second": bandwidth, "rows": as_json(rows, bandwidth)}], device)
