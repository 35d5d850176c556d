"""Runs workloads: compares the implementations of each, times them in turn, shows and saves the rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from rich import box
from rich.table import Table
from torch import Tensor, nn

from on_mixes.cold_passes import Passes, passes_side_by_side
from on_mixes.peers import Implementation
from on_mixes.workloads import EAGER, OURS, Workload
from rewire.bench import harness
from rewire.bench.harness import Timing
from rewire.passes.validating.tensors import relative_error

#: Tokens on which the implementations are compared before they are timed.
_CHECKED = 48


@dataclasses.dataclass(frozen=True)
class Row:
    """What was measured of one implementation of one workload.

    Attributes:
        status: why there are no times; empty if there are.
        error: largest relative difference of a result or gradient to float64; None for other work, and for what
            torch.compile made of a function that was compared itself.
    """

    workload: Workload
    implementation: str
    status: str = ""
    error: float | None = None
    passes: Passes | None = None

    def rate(self, name: Literal["forward", "backward"]) -> float:
        """Bytes of the floor per second."""
        assert self.passes is not None
        return getattr(self.workload.floor, name) / getattr(self.passes, name).median


def run(workloads: Iterable[Workload], rounds: int, compiled: bool = True) -> Iterator[list[Row]]:
    """Measure one workload after the other, the implementations of each in turn.

    Every implementation is compared with the float64 twin first, on a few tokens; one that differs is not timed, nor is
    one that fails: its row says why.

    Args:
        rounds: how often each implementation is timed.
        compiled: whether to measure the implementations that need torch.compile.

    Returns:
        The rows of each workload, in the order of its implementations.
    """
    for workload in workloads:
        torch.compiler.reset()  # the functions of many workloads share one code, whose compilations are limited
        statuses = {name: _status(one, compiled) for name, one in workload.implementations.items()}
        todo = {name: one for name, one in workload.implementations.items() if not statuses[name]}
        errors = _errors(workload, todo)
        statuses |= {name: error for name, error in errors.items() if isinstance(error, str)}
        passes = _time(workload, statuses, rounds)
        numbers = {name: error for name, error in errors.items() if isinstance(error, float)}
        yield [Row(workload, name, statuses[name], numbers.get(name), passes.get(name)) for name in statuses]


def _status(implementation: Implementation, compiled: bool) -> str:
    skipped = implementation.compiled and not compiled
    return implementation.status or ("not run: without torch.compile" if skipped else "")


def _errors(workload: Workload, implementations: Mapping[str, Implementation]) -> dict[str, float | str]:
    """The largest relative error of each implementation, or a status that says why there is none."""
    small = dataclasses.replace(workload.sizes, batch=1, length=_CHECKED)
    inputs = workload.inputs(small)
    exact = [x.double() for x in inputs]
    grads: list[Tensor] = []

    def results(implementation: Implementation, given: Sequence[Tensor]) -> list[Tensor]:
        leaves = [nn.Parameter(x.detach()) for x in given]  # kernels take norms of parameters only
        outputs = implementation.back(implementation.run(*implementation.into(*leaves)))
        if not grads:
            grads.extend(torch.randn_like(y) for y in outputs)
        upstream = [g.to(y.dtype) for g, y in zip(grads, outputs, strict=True)]
        found = [*outputs, *torch.autograd.grad(outputs, leaves, upstream)]
        return [x.detach() for x in found]

    wanted = results(workload.implementations[EAGER], exact)
    tolerance = max(4 * torch.finfo(small.dtype).eps, 1e-4)
    found: dict[str, float | str] = {}
    for name, implementation in implementations.items():
        if implementation.other_work or implementation.compiled:
            continue
        try:
            error = max(map(relative_error, wanted, results(implementation, inputs)))
        except Exception as failure:  # of any library: the others are still measured
            found[name] = _failed(failure)
            continue
        found[name] = error if error <= tolerance else f"differs from float64 by {error:.1e}"
    return found


def _time(workload: Workload, statuses: dict[str, str], rounds: int) -> dict[str, Passes]:
    """Times of the implementations without a status; one that fails gets it."""
    inputs = workload.inputs(workload.sizes)
    steps: dict[str, Any] = {}
    for name, implementation in workload.implementations.items():
        if not statuses[name]:
            step = _step(implementation, inputs)
            try:
                step()()  # compiles
                steps[name] = step
            except Exception as failure:
                statuses[name] = _failed(failure)
    return passes_side_by_side(steps, rounds, workload.sizes.device)


def _step(implementation: Implementation, inputs: Sequence[Tensor]) -> Callable[[], Callable[[], object]]:
    """Runs forward; what it returns runs backward. Gradients are returned, not accumulated."""
    leaves = [nn.Parameter(x.detach()) for x in implementation.into(*inputs)]  # kernels take norms of parameters only
    function = torch.compile(implementation.run, dynamic=False) if implementation.compiled else implementation.run
    used = leaves[: implementation.used]
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
    """The rows, workload by workload.

    Args:
        bandwidth: bytes per second of a copy, as `cold_passes.copy_bandwidth` measures it.
    """
    counted = any(row.passes and row.passes.both.peak is not None for row in rows)
    columns = ["ms forward", "GB/s", "copy", "ms backward", "GB/s", "copy", "/ ours", *(["MiB"] if counted else [])]
    workloads = list({id(row.workload): row.workload for row in rows}.values())
    caption = (
        f"A copy moves {bandwidth / 1e9:.1f} GB/s. GB/s and its share count the floor: each input read once, each "
        "result written once. ms: median and half the distance of the quartiles. / ours: both passes, round by round."
    )
    result = Table("", *columns, "", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=caption)
    result.caption_justify = "left"
    for column in result.columns[1:-1]:
        column.justify = "right"
        column.no_wrap = True
    for workload in workloads:
        result.add_row(f"[bold]{workload.name}[/bold]", *[""] * len(columns), _describe(workload))
        for row in rows:
            if row.workload is workload:
                result.add_row(*_cells(row, rows, bandwidth, counted))
        result.add_section()
    return result


def _describe(workload: Workload) -> str:
    forward, backward = workload.floor.forward / 2**20, workload.floor.backward / 2**20
    return f"floor {forward:.1f} + {backward:.1f} MiB"


def _cells(row: Row, rows: Sequence[Row], bandwidth: float, counted: bool) -> list[str]:
    implementation = row.workload.implementations[row.implementation]
    name = f"  {row.implementation}"
    if row.passes is None:
        return [name, *[""] * (8 if counted else 7), row.status]
    cells = [name]
    for timing, rate in ((row.passes.forward, row.rate("forward")), (row.passes.backward, row.rate("backward"))):
        rates = ["", ""] if implementation.other_work else [f"{rate / 1e9:.3g}", f"{rate / bandwidth:.0%}"]
        cells += [_spread(timing), *rates]
    ratio = over_ours(row, rows)
    cells.append("" if ratio is None else f"{ratio:.2f}")
    if counted:
        cells.append(f"{(row.passes.both.peak or 0) / 2**20:.0f}")
    return [*cells, "other work: plain adds" if implementation.other_work else implementation.note]


def _spread(timing: Timing) -> str:
    low, high = timing.quartiles
    return f"{1e3 * timing.median:.3g} ±{1e3 * (high - low) / 2:.2g}"


def over_ours(row: Row, rows: Iterable[Row]) -> float | None:
    """Time of both passes over that of "ours" in the same workload; None if one of the two was not measured."""
    same = (other for other in rows if other.workload is row.workload)
    ours = next((other.passes for other in same if other.implementation == OURS), None)
    return row.passes.both.ratio(ours.both) if row.passes and ours else None


def as_json(rows: Sequence[Row], bandwidth: float) -> list[dict[str, Any]]:
    """One entry for each row: everything that the table shows, and the seconds of each round."""
    return [_entry(row, rows, bandwidth) for row in rows]


def _entry(row: Row, rows: Sequence[Row], bandwidth: float) -> dict[str, Any]:
    sizes, implementation = row.workload.sizes, row.workload.implementations[row.implementation]
    entry: dict[str, Any] = {
        "workload": row.workload.name,
        "shape": [sizes.batch, sizes.length, sizes.width],
        "dtype": str(sizes.dtype).removeprefix("torch."),
        "implementation": row.implementation,
        "note": implementation.note,
        "other work": implementation.other_work,
        "status": row.status or "measured",
        "relative error": row.error,
        "floor bytes": dataclasses.asdict(row.workload.floor),
    }
    if row.passes is None:
        return entry
    passes: dict[str, Any] = {}
    for name, timing in (("forward", row.passes.forward), ("backward", row.passes.backward)):
        rate = getattr(row.workload.floor, name) / timing.median
        shares = {} if implementation.other_work else {"bytes per second": rate, "share of copy": rate / bandwidth}
        passes[name] = {
            "median": timing.median,
            "quartiles": timing.quartiles,
            "seconds": timing.seconds,
            "late": timing.late,
            **shares,
        }
    return entry | passes | {"over ours": over_ours(row, rows), "peak bytes": row.passes.both.peak}


def rates(rows: Iterable[Row]) -> dict[str, dict[str, tuple[float, float]]]:
    """Bytes per second of both passes by workload and implementation, where measured: what `plot_rates` draws."""
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for row in rows:
        if row.passes and not row.workload.implementations[row.implementation].other_work:
            found.setdefault(row.workload.name, {})[row.implementation] = (row.rate("forward"), row.rate("backward"))
    return found


def save(path: Path, rows: Sequence[Row], bandwidth: float, device: torch.device) -> None:
    """Write rows as JSON, after the machine and the bandwidth of a copy."""
    harness.save(path, [{"copy bytes per second": bandwidth, "rows": as_json(rows, bandwidth)}], device)
