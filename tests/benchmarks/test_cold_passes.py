from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from on_mixes.cold_passes import _Events, copy_bandwidth, passes_side_by_side

CPU = torch.device("cpu")


def test_passes_run_in_turn_and_are_timed_apart() -> None:
    calls: list[str] = []

    def implementation(name: str, forward: float, backward: float) -> Callable[[], Callable[[], None]]:
        def back() -> None:
            calls.append(f"{name} backward")
            time.sleep(backward)

        def run() -> Callable[[], None]:
            calls.append(f"{name} forward")
            time.sleep(forward)
            return back

        return run

    found = passes_side_by_side(
        {"a": implementation("a", 0.001, 0.02), "b": implementation("b", 0.02, 0.001)}, 3, CPU, warmup=1
    )
    assert calls == ["a forward", "a backward", "b forward", "b backward"] * 4
    a, b = found["a"], found["b"]
    assert a.backward.median >= 0.02 and b.forward.median >= 0.02
    assert a.forward.ratio(a.backward) < 1 < b.forward.ratio(b.backward)
    assert a.both.seconds == tuple(map(sum, zip(a.forward.seconds, a.backward.seconds, strict=True)))


class FakeGPU:
    """A clock that the device and the host share; the device spins, then runs a pass of 5 seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, launching: float) -> None:
        self.now = self.free = 0.0  # of the host; when the device has done all that was launched
        self.launching = launching
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: FakeEvent(self))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
        monkeypatch.setattr(torch.cuda, "_sleep", self.spin)
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def spin(self, cycles: int) -> None:
        self.free = max(self.free, self.now) + cycles / 2e9

    def run(self) -> str:
        self.now += self.launching
        self.free = max(self.free, self.now) + 5
        return "result"


class FakeEvent:
    def __init__(self, gpu: FakeGPU) -> None:
        self.gpu = gpu

    def record(self, stream: None) -> None:
        self.at = max(self.gpu.free, self.gpu.now)

    def query(self) -> bool:
        return self.at <= self.gpu.now

    def elapsed_time(self, end: FakeEvent) -> float:
        return 1e3 * (end.at - self.at)


@pytest.mark.parametrize(("launching", "late"), [(0.02, 0), (0.3, 3)])
def test_a_gpu_is_busy_until_the_host_has_launched_a_pass(
    monkeypatch: pytest.MonkeyPatch, launching: float, late: int
) -> None:
    gpu = FakeGPU(monkeypatch, launching)
    watch = _Events(torch.device("cuda"))
    for _ in range(4):
        assert watch.time(gpu.run) == "result"
        gpu.now = gpu.free  # it is waited for
    timing = watch.timing(1, None)
    assert timing.late == late and len(timing.seconds) == 3
    assert timing.median == pytest.approx(5 if not late else 5 + launching - 0.1)


def test_copy_bandwidth_is_plausible() -> None:
    assert 1e8 < copy_bandwidth(CPU, size=1 << 22, rounds=3) < 1e13
