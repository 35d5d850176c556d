"""Training steps, forward and backward, of models of the papers: plain and rewired in turn, with peaks of memory."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import nn

import rewire
from rewire.bench import harness
from rewire.bench.shapes import batch_for, make_shape
from rewire.patterns.tiny import tiny_model

#: Name of the setting, then that of the shape, sequences, and their length.
SHAPES = {
    "llama-1b": ("llama-1b", 8, 2048),
    "llama-1b-5504": ("llama-1b-5504", 8, 2048),
    "llama-350m": ("llama-350m", 16, 1024),
    "llama-60m": ("llama-60m", 128, 256),
    "llama-60m, batch 1": ("llama-60m", 1, 256),
}
#: Topologies with options; without, all that are registered.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {"attnres, block=6": ("attnres", {"block": 6})}


def topologies() -> dict[str, tuple[str, dict[str, Any]]]:
    return VARIANTS | {name: (name, {}) for name in rewire.list_topologies()}


def measure(shape: str, topology: str, compiled: bool, device: torch.device, small: bool) -> dict[str, Any]:
    """Time and peak of memory of the rewired model over the plain one's, which has the same weights."""
    name, batch, length = SHAPES[shape]
    torch._dynamo.config.recompile_limit = 64  # both share the code of their outermost forward
    if small:
        name, batch, length = "tiny llama", 1, 8
        plain = tiny_model("llama").train()
    else:
        plain = make_shape(name, device, torch.bfloat16)
    named, options = topologies()[topology]
    models = {"plain": plain, "rewired": rewire.compile(plain, named, start="paper", validate=False, **options)}
    inputs = batch_for(plain, batch, length)
    weights = {which: _bytes(model) for which, model in models.items()}
    steps = {
        which: harness.training_step(_compiled(model, small) if compiled else model, inputs)
        for which, model in models.items()
    }
    peaks = {which: _peak(steps[which], models[which], device) for which in models}
    timings = harness.side_by_side(steps, 1 if small else 15, device, warmup=1 if small else 3)
    ours, base = timings["rewired"], timings["plain"]
    ratios = [a / b for a, b in zip(ours.seconds, base.seconds, strict=True)]
    whole = {which: None if peak is None else weights[which] + peak for which, peak in peaks.items()}
    return {
        "model": name,
        "batch": batch,
        "length": length,
        "topology": named,
        "options": options,
        "compiled": compiled,
        "time over plain": statistics.median(ratios),
        "quartiles": list(harness.Timing(tuple(ratios)).quartiles),
        "peak memory over plain": whole["rewired"] / whole["plain"] if whole["plain"] else None,  # type: ignore[operator]
        "peak bytes": whole,
        "milliseconds": {which: 1e3 * timing.median for which, timing in timings.items()},
        "seconds": {which: list(timing.seconds) for which, timing in timings.items()},
    }


def _compiled(model: nn.Module, small: bool) -> nn.Module:
    return torch.compile(model, backend="eager" if small else "inductor", dynamic=False)  # type: ignore[return-value]


def _bytes(model: nn.Module) -> int:
    return sum(x.nbytes for x in {*model.parameters(), *model.buffers()})


def _peak(step: Any, model: nn.Module, device: torch.device) -> int | None:
    """Bytes that a step has at most beside the weights, gradients with them; None on a CPU."""
    if device.type != "cuda":
        return None
    step()  # compiles
    model.zero_grad()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    model.zero_grad()
    return peak
