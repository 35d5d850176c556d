"""Kernels compiled before they are first started, several at a time."""

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

#: Triton's driver and parser are those of the process.
_ONE_AT_A_TIME = threading.Lock()


def gpu_named(target: str | None) -> Any:
    """Triton's description of a GPU; None: the one that is here.

    Raises:
        RewireError: there is none, or none of that name; this build of PyTorch starts other kernels than there; or
            Triton is missing.
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


def compiled(launches: Iterable[Launch], gpu: Any, jobs: int | None) -> int:
    """Compile the kernels of these launches, as far as they are not in Triton's cache.

    By the function that starts them, so that Triton will ask its cache for the same. In threads: Triton holds Python's
    lock while it reads a kernel, 8 % of the time.

    Args:
        gpu: of `gpu_named`.
        jobs: threads; None: one for each processor.

    Returns:
        How many different kernels there are.
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
    except RuntimeError:  # no driver, or several
        return None


@contextlib.contextmanager
def _parsed_one_by_one() -> Iterator[None]:
    """Kernels' sources: `ast.parse` of Python 3.11 counts its depth for all threads together, and fails by chance."""
    from triton.runtime.jit import JITCallable

    parse, lock = JITCallable.parse, threading.Lock()

    def parsed(kernel: Any) -> Any:
        with lock:
            return parse(kernel)

    JITCallable.parse = parsed
    try:
        yield
    finally:
        JITCallable.parse = parse


@contextlib.contextmanager
def _in_place_of_a_device(gpu: Any) -> Iterator[None]:
    """Triton takes this GPU for the current device, unless it is None."""
    from triton.runtime import driver

    here = _driver()
    current: Any = types.SimpleNamespace(
        get_current_target=lambda: gpu,
        get_current_device=lambda: f"ahead of {gpu}",  # kernels of no device
        get_current_stream=lambda device: None,
    )
    if gpu is not None:
        driver.set_active(current)
    try:
        yield
    finally:
        driver.set_active(here)
