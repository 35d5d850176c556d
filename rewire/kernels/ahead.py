"""Compiles kernels before their first launch, several at a time."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import types
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import torch

from rewire.console import progress
from rewire.errors import RewireError
from rewire.kernels.kernel import Launch

#: Triton's driver and Python's parser are shared by all threads.
_ONE_AT_A_TIME = threading.Lock()


def gpu_named(target: str | None) -> Any:
    """Triton's description of the GPU ``target``; None: the current one.

    Raises:
        RewireError: there is no GPU, or none of that name; this build of PyTorch launches different kernels from those
            of that GPU; or Triton is missing.
    """
    try:
        from triton.backends.compiler import GPUTarget
    except ImportError as error:
        raise RewireError("Triton, which compiles kernels, is not installed.") from error
    if target is None:
        if _driver() is None:
            raise RewireError("there is no GPU here: name the one to compile kernels for, as in target='sm_90'.")
        return None
    amd, number = target.startswith("gfx"), re.fullmatch(r"sm_(\d+)", target)
    if not amd and number is None:
        raise RewireError(f"target={target!r}: it has to be like 'sm_90' (NVIDIA) or 'gfx942' (AMD).")
    if amd != (torch.version.hip is not None):
        raise RewireError(f"target={target!r}: the installed PyTorch {torch.__version__} is built for other GPUs.")
    if number is not None:
        return GPUTarget("cuda", int(number[1]), 32)
    return GPUTarget("hip", target, 64 if target.startswith("gfx9") else 32)


def compiled(launches: Iterable[Launch], gpu: object, jobs: int | None) -> int:
    """Compile the kernels of these launches that are not in Triton's cache yet.

    This uses the function that launches them, so that the cache keys are the same. Threads are enough: Triton holds the
    GIL only while it parses a kernel, 8 % of the time.

    Args:
        gpu: the result of `gpu_named`.
        jobs: number of threads; None: one for each processor.

    Returns:
        The number of different kernels.
    """
    from triton import AsyncCompileMode

    seen = set[int]()
    with (
        _ONE_AT_A_TIME,
        ThreadPoolExecutor(jobs or os.cpu_count()) as threads,
        _in_place_of_a_device(gpu),
        _parsed_one_by_one(),
        AsyncCompileMode(threads) as compiling,
    ):
        for code, arguments in launches:
            kernel = code.jit().run(**arguments, **code.constants, grid=code.programs, warmup=True)
            seen.add(id(kernel))
        with progress("compiling kernels", len(compiling.raw_futures)) as advance:
            for _ in as_completed(compiling.raw_futures):
                advance()
    return len(seen)


def _driver() -> Any:
    from triton.runtime import driver

    try:
        return driver.active
    except RuntimeError:  # there is no driver, or there are several
        return None


@contextlib.contextmanager
def _parsed_one_by_one() -> Iterator[None]:
    """A lock on `ast.parse`: Python 3.11 counts its depth over all threads together, and fails at random."""
    from triton.runtime.jit import JITCallable

    parse, lock = JITCallable.parse, threading.Lock()

    def parsed(kernel: object) -> Any:
        with lock:
            return parse(kernel)

    JITCallable.parse = parsed
    try:
        yield
    finally:
        JITCallable.parse = parse


@contextlib.contextmanager
def _in_place_of_a_device(gpu: object) -> Iterator[None]:
    """A context in which Triton takes this GPU, unless it is None, for the current device."""
    from triton.runtime import driver

    here = _driver()
    current: Any = types.SimpleNamespace(
        get_current_target=lambda: gpu,
        get_current_device=lambda: f"ahead of {gpu}",  # a key that no real device has
        get_current_stream=lambda device: None,
    )
    if gpu is not None:
        driver.set_active(current)
    try:
        yield
    finally:
        driver.set_active(here)
