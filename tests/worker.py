"""One of the processes that two_processes.py starts: scripts of scenarios are played by it. Any number of them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

import rewire
from rewire.kernels.cpu import plain

plain.WORTHWHILE = 0  # as in conftest.py


def play(scenarios: Mapping[str, Any]) -> NoReturn:
    """Join the other ranks, and run those scenarios that the command line names, one after the other."""
    _, *names = sys.argv[1:]
    begin()
    for name in names:
        scenarios[name]()
        print(name, "passed", flush=True)
    end()


def begin() -> None:
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{os.environ['MEETING_POINT']}", rank=rank, world_size=ranks)


def end() -> NoReturn:
    """Leave together with the others.

    A forward that was refused may have left a collective behind, whose thread aborts the interpreter's own exit.
    """
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def folder() -> Path:
    """Where scenarios may write."""
    return Path(sys.argv[1])


def full(value: Tensor) -> Tensor:
    """A tensor with the parts that other ranks have."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def kept(value: Tensor) -> Tensor:
    """Its values now."""
    return full(value).detach().clone()


def mine(x: Tensor) -> Tensor:
    """The rows of this rank."""
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def errors(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> dict[str, float]:
    """How far off each tensor is, relative to its norm; to a thousandth of the largest one, if that is more."""
    assert sorted(expected) == sorted(actual), sorted(set(expected) ^ set(actual))
    largest = max(float(value.norm()) for value in expected.values())
    return {
        name: float((value.double() - actual[name].double()).norm()) / max(float(value.double().norm()), 1e-3 * largest)
        for name, value in expected.items()
    }


def refuses(words: str, call: Callable[[], object], error: type[Exception] = rewire.RewireError) -> None:
    with pytest.raises(error, match=words):
        call()


def in_seconds(words: str, call: Callable[[], object], seconds: float = 10) -> None:
    """Refused, and not only after the patience of a collective."""
    begun = time.monotonic()
    refuses(words, call)
    assert time.monotonic() - begun < seconds
