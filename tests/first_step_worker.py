"""Two processes of tests/test_precompiling.py: one compiles kernels ahead, one makes a step on what seems to be a GPU.

    python first_step_worker.py ahead|step eager|compiled TOPOLOGY...

Prints for each topology as JSON: how many kernels `precompile` counts; or how many the step asks Triton for, and the
names of those that were not in its cache.
"""

from __future__ import annotations

import copy
import json
import sys
from types import SimpleNamespace
from typing import Any

from models import NanoGPT, token_ids
from torch import nn
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import rewire
from rewire.kernels import switch
from rewire.kernels.handwritten import projection  # noqa: F401  (before `switch.INTERPRETED` is set, on which it looks)

TARGET = "sm_90"


def rewired(topology: str) -> nn.Module:
    model = NanoGPT(depth=6).bfloat16()
    return rewire.compile(model, topology, example_inputs=(token_ids(2, 8),) * 2, validate=False)


def ahead(topology: str, compiled: bool) -> int:
    model = copy.deepcopy(rewired(topology)).to("meta")
    return rewire.precompile(model, (token_ids(2, 8),) * 2, target=TARGET, compiled=compiled)


def step(topology: str, compiled: bool) -> tuple[int, list[str]]:
    """Triton starts the kernels itself, on real addresses; what it would give to a GPU is dropped."""
    asked: list[Any] = []

    def listen(src: Any, cache_hit: bool, **_: Any) -> None:
        asked.append((src.name, cache_hit))

    knobs.compilation.listener = listen
    model, ids = rewired(topology), token_ids(2, 8)
    if compiled:
        model.compile()
    _, loss = model(ids, ids)
    loss.backward()
    return len(asked), [name for name, hit in asked if not hit]


def seem_to_have_a_gpu() -> None:
    dropped = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 228 << 10},
        load_binary=lambda *binary: (0, 0, 0, 0, 1024),
    )
    gpu = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        launcher_cls=lambda src, metadata: lambda *arguments: None,
        utils=dropped,
    )
    driver.set_active(gpu)  # type: ignore[arg-type]
    switch.INTERPRETED = True  # kernels are started on a CPU; by Triton, as it was imported without


if __name__ == "__main__":
    _, what, how, *topologies = sys.argv
    if what == "step":
        seem_to_have_a_gpu()
    run = {"ahead": ahead, "step": step}[what]
    print(json.dumps({topology: run(topology, how == "compiled") for topology in topologies}))
