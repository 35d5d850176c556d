"""Measuring side by side: several implementations of the same work, in turn, in one process.

Machines get warm, and other programs come and go. Implementations that run in turn suffer alike, so that ratios are
reliable where times are not.
"""

from __future__ import annotations

import dataclasses
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from rewire.copies import Inputs
from rewire.files import to_json, whole
from rewire.passes.validating.tensors import tensors_in
from rewire.version import __version__

#: Rounds before the first one that counts: compilation, caches, clocks.
WARMUP = 2


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The first and third quartile, never outside of the values: those of few values are not extrapolated."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    return low, high


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of each round, and the peak of allocated bytes above those that were there before.

    Attributes:
        seconds: one entry for each round, in the order of the rounds.
        peak: bytes on the accelerator; None on a CPU, where they are not counted.
        late: rounds in which a GPU may have waited for the host, which launched too slowly.
    """

    seconds: tuple[float, ...]
    peak: int | None = None
    late: int = 0

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        return quartiles(self.seconds)

    def ratio(self, other: Timing) -> float:
        """Median over the rounds of this timing over ``other`` in the same round."""
        return statistics.median(self.ratios(other))

    def ratios(self, other: Timing) -> list[float]:
        """This timing over ``other``, for each round."""
        return [a / b for a, b in zip(self.seconds, other.seconds, strict=True)]


def side_by_side(
    steps: Mapping[str, Callable[[], object]],
    rounds: int,
    device: torch.device,
    warmup: int = WARMUP,
    tick: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Run each of ``steps`` once per round, in turn.

    Args:
        steps: what to measure, by name.
        rounds: how often; 1 or more.
        device: of the steps; each step is waited for.
        warmup: rounds before the first one that counts.
        tick: called after every step, for a progress bar.
        clock: returns the time; ``time.process_time`` is the processor's.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    peaks: dict[str, int] = {}
    for number in range(warmup + rounds):
        for name, step in steps.items():
            before = reset_peak(device)
            wait(device)
            start = clock()
            step()
            wait(device)
            if number >= warmup:
                seconds[name].append(clock() - start)
                if before is not None:
                    peaks[name] = max(peaks.get(name, 0), torch.cuda.max_memory_allocated(device) - before)
            tick()
    return {name: Timing(tuple(values), peaks.get(name)) for name, values in seconds.items()}


def training_step(model: nn.Module, inputs: Inputs) -> Callable[[], None]:
    """Forward and backward of ``model``; the loss is the model's own, else the mean square of its outputs."""

    def step() -> None:
        model.zero_grad()
        output = model(*inputs[0], **inputs[1])
        loss = getattr(output, "loss", None)
        if loss is None:
            loss = sum(t.float().square().mean() for t in tensors_in(output) if t.is_floating_point())
        loss.backward()  # type: ignore[union-attr]

    return step


def kept_for_backward(model: nn.Module, forward: Callable[[], Tensor]) -> int:
    """Bytes of the activations that a forward keeps: those of this run, unlike the memory of a process."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = forward()
    del loss  # so far it kept storages from being counted twice
    return sum(kept.values())


#: Packages whose versions the numbers depend on.
_LIBRARIES = ("triton", "transformers", "liger-kernel", "fla-core", "hyper-connections")


def default_device() -> torch.device:
    """An accelerator, if the machine has one that torch can use, else the CPU."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def machine(device: torch.device) -> dict[str, Any]:
    """A description of the machine and the versions that the numbers belong to."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    libraries = {name: version for name in _LIBRARIES if (version := _version(name))}
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "rewire": __version__,
        **libraries,
    }


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def table(timings: Mapping[str, Timing], baseline: str) -> Table:
    """A row for each timing, with its ratio to ``baseline``."""
    counted = any(timing.peak is not None for timing in timings.values())
    result = Table("", "median", "quartiles", f"over {baseline}, by round", *(["peak memory"] if counted else []))
    for name, timing in timings.items():
        low, high = timing.quartiles
        row = [name, f"{1e3 * timing.median:.2f} ms", f"{1e3 * low:.2f} to {1e3 * high:.2f}"]
        row.append(f"{timing.ratio(timings[baseline]):.3f}")
        if counted:
            row.append("" if timing.peak is None else f"{timing.peak / 2**20:.0f} MiB")
        result.add_row(*map(Text, row))
    return result


def save(path: Path, results: Iterable[Mapping[str, object]], device: torch.device) -> None:
    """Write results as JSON, with a description of the machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = to_json({"machine": machine(device), "results": list(results)}) + "\n"
    with whole(path) as file:
        file.write_text(text)


def as_json(timings: Mapping[str, Timing]) -> dict[str, Any]:
    return {name: {"seconds": list(timing.seconds), "peak bytes": timing.peak} for name, timing in timings.items()}


def wait(device: torch.device) -> None:
    """Wait until a device has finished all work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def reset_peak(device: torch.device) -> int | None:
    """Start counting the peak of allocated memory; returns what is allocated now."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)
