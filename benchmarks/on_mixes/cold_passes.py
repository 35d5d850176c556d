"""Forward and backward passes, measured side by side from cold caches."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from rewire.bench.harness import WARMUP, Timing, reset_peak, wait
from rewire.torch_internals import keep_busy

#: Bytes that are written before a pass is timed: they push its inputs out of the caches.
_FLUSH = {"cuda": 1 << 30, "cpu": 1 << 26}
#: Seconds for which a GPU is kept busy before a pass, at least and at most, while the host launches it.
_BUSY = (1e-3, 0.1)
#: A guess at a GPU's clock, which is not asked for; what is slower is busy for longer.
_CYCLES_PER_SECOND = 2e9


@dataclasses.dataclass(frozen=True)
class Passes:
    """Both passes of one implementation; the peaks are those of forward and backward together."""

    forward: Timing
    backward: Timing

    @property
    def both(self) -> Timing:
        sums = [a + b for a, b in zip(self.forward.seconds, self.backward.seconds, strict=True)]
        return Timing(tuple(sums), self.backward.peak, max(self.forward.late, self.backward.late))


def passes_side_by_side(
    implementations: Mapping[str, Callable[[], Callable[[], object]]],
    rounds: int,
    device: torch.device,
    warmup: int = WARMUP,
) -> dict[str, Passes]:
    """Run forward and backward of each of ``implementations`` once per round, in turn, from cold caches.

    On CUDA the time is the device's, between two events: it is kept busy before, until the host has launched the pass.
    Elsewhere it is that of the clock.

    Args:
        implementations: by name, a function that runs forward and returns one that runs backward.
        rounds, device, warmup: as for `harness.side_by_side`.
    """
    make = _Events if device.type == "cuda" else _Clock
    watches = {name: (make(device), make(device)) for name in implementations}
    peaks: dict[str, int] = {}
    flush = torch.empty(_FLUSH.get(device.type, _FLUSH["cpu"]), dtype=torch.uint8, device=device)
    for number in range(warmup + rounds):
        for name, implementation in implementations.items():
            before = reset_peak(device)
            flush.zero_()
            back = watches[name][0].time(implementation)
            flush.zero_()
            result = watches[name][1].time(back)
            wait(device)
            if before is not None and number >= warmup:
                peaks[name] = max(peaks.get(name, 0), torch.cuda.max_memory_allocated(device) - before)
            del back, result
    return {
        name: Passes(*(watch.timing(warmup, peaks.get(name)) for watch in of_passes))
        for name, of_passes in watches.items()
    }


class _Clock:
    """Times one pass of one implementation by the clock."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: list[float] = []

    def time(self, function: Callable[[], Any]) -> Any:
        """What ``function`` returned."""
        wait(self.device)
        start = time.perf_counter()
        result = function()
        wait(self.device)
        self.seconds.append(time.perf_counter() - start)
        return result

    def timing(self, warmup: int, peak: int | None) -> Timing:
        """The times of the rounds after ``warmup``."""
        return Timing(tuple(self.seconds[warmup:]), peak)


class _Events:
    """The same by the clock of a GPU, which spins until the host has launched all of the pass.

    The first event is then still to come when the last has been recorded. It spins for somewhat longer than the host
    took in the round before.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.busy = device, _BUSY[1]
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.late: list[bool] = []

    def time(self, function: Callable[[], Any]) -> Any:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(self.device)
        keep_busy(int(self.busy * _CYCLES_PER_SECOND))
        begin.record(stream)
        start = time.perf_counter()
        result = function()
        host = time.perf_counter() - start
        end.record(stream)
        self.late.append(begin.query())
        self.events.append((begin, end))
        self.busy = min(max(2 * host, _BUSY[0]), _BUSY[1])
        return result

    def timing(self, warmup: int, peak: int | None) -> Timing:
        """The times of the rounds after ``warmup``, once the device is done."""
        seconds = tuple(begin.elapsed_time(end) / 1e3 for begin, end in self.events[warmup:])
        return Timing(seconds, peak, sum(self.late[warmup:]))


def copy_bandwidth(device: torch.device, size: int = 1 << 28, rounds: int = 10) -> float:
    """Bytes per second that a copy of ``size`` bytes moves, read and write counted: what mixes are held against.

    Timed like the passes of `passes_side_by_side`.
    """
    source = torch.empty(size, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)

    def copy() -> Callable[[], object]:
        target.copy_(source)
        return lambda: None

    return 2 * size / passes_side_by_side({"copy": copy}, rounds, device)["copy"].forward.median
