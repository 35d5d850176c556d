"""The sums of `plain` by a compiled kernel, ``sums.cpp``: one pass over memory where torch makes one for each tensor.

Compiled when it is first needed, in a few seconds, and kept in the folder of generated modules. Where that fails,
as without a compiler, `plain` goes on without it.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rewire.kernels import cache, operators

SOURCE = Path(__file__).with_name("sums.cpp")
FLAGS = ("-O3", "-std=c++17", "-fopenmp", "-shared", "-fPIC")
#: What the processor can do, as torch names it, with the flags for it. Others (ARM, POWER) have one baseline.
VECTORS = {"AVX2": ("-mavx2", "-mfma"), "AVX512": ("-mavx2", "-mfma")}

#: Elements for which another thread is worth waking up.
GRAIN = 1 << 15

_FUNCTIONS = {torch.float32: "sums_float32", torch.float64: "sums_float64", torch.bfloat16: "sums_bfloat16"}
_ARGUMENTS: list[Any] = [
    {"n": ctypes.c_int64, "p": ctypes.c_void_p}[kind] for kind in "nnppnpppppnpnnn"
]  # numbers and pointers

_log = logging.getLogger(__name__)


def sums(
    terms: Sequence[Tensor],
    weights: Tensor | None,
    by_channel: bool,
    added: Sequence[Tensor] = (),
    states: Sequence[Tensor] = (),
    scores: Tensor | None = None,
) -> list[Tensor] | None:
    """``sum_n (w_mn + s_mn) g_n + sum_j a_j``, and the products of states with terms, ``<x_m, g_n>``.

    Args:
        terms: N tensors g_n [..., D].
        weights: w, [M, N] or, per channel, [M, N, D]; the first dimension may be missing for M = 1. None: zero, the
            scores are all there is.
        by_channel: whether they are per channel.
        added: tensors a_j [..., D].
        states: M tensors x_m [..., D]; without them M = 1.
        scores: s, weights per token [..., M, N].

    Returns:
        M new tensors; with states also the products, in the dtype of accumulation: those for weights, in their shape,
        unless scores are given and weights are not per channel; and with scores those for them, in their shape.
        None if the kernel does not know such tensors (it knows contiguous ones of one dtype and shape, float32,
        float64 or bfloat16, on a CPU), a dispatch mode follows what torch does, or there is no kernel.
    """
    # This runs with cold caches, between a model's matrix products: each call of torch here costs 10 microseconds.
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:  # they would not see the kernel
        return None
    first = (terms or added)[0]
    shape, dtype = first.shape, first.dtype
    function, precision = _function(dtype)
    if function is None:
        return None
    pointers = _pointers((*terms, *added, *states), shape, dtype)
    elements = first.numel()
    if pointers is None or elements == 0:
        return None
    results, n, branches = len(states) or 1, len(terms), len(added)
    if scores is not None:
        if scores.shape != (*shape[:-1], results, n):
            return None
        scores = _exact(scores, precision)
    weights = first.new_zeros(results, n, dtype=precision) if weights is None else _exact(weights, precision)
    width = shape[-1] if by_channel or scores is not None else elements
    if weights.numel() != results * n * (width if by_channel else 1):
        return None
    outs = [torch.empty_like(first) for _ in range(results)]
    dots = [torch.empty_like(weights)] if states and (by_channel or scores is None) else []
    row_dots = [torch.zeros_like(scores)] if states and scores is not None else []
    rows = elements // width
    parts = min(torch.get_num_threads(), 1 + elements // GRAIN)
    function(
        by_channel, results, _array([x.data_ptr() for x in outs]), _array(pointers[n + branches :]) if states else None,
        n, _array(pointers[:n]), weights.data_ptr(), None if scores is None else scores.data_ptr(),
        dots[0].data_ptr() if dots else None, row_dots[0].data_ptr() if row_dots else None,
        branches, _array(pointers[n : n + branches]), rows, width, parts,
    )  # fmt: skip
    return [*outs, *dots, *row_dots]


def _exact(weights: Tensor, precision: torch.dtype) -> Tensor:
    """Weights as the kernel reads them."""
    return weights if weights.dtype == precision and weights.is_contiguous() else weights.to(precision).contiguous()


def _pointers(tensors: Sequence[Tensor], shape: torch.Size, dtype: torch.dtype) -> list[int] | None:
    """Where their elements are; None if the kernel does not know one of them."""
    found = []
    for x in tensors:
        if x.dtype != dtype or x.shape != shape or not x.is_contiguous() or not x.is_cpu:
            return None
        found.append(x.data_ptr())
    return found if all(found) else None  # none: gradients that torch knows to be zero, and does not store


def _array(pointers: list[int]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(pointers))(*pointers)


@functools.cache
def _function(dtype: torch.dtype) -> tuple[Callable[..., None] | None, torch.dtype]:
    """The kernel for such tensors, if there is one, and the dtype it sums in."""
    library = _library() if dtype in _FUNCTIONS else None
    precision = torch.promote_types(dtype, torch.float32)
    if library is None:
        return None, precision
    function = library[_FUNCTIONS[dtype]]
    function.argtypes, function.restype = _ARGUMENTS, None
    return function, precision


@functools.cache
def _library() -> ctypes.CDLL | None:
    if not operators.SWITCHED_ON or sys.platform != "linux":  # compilers elsewhere bring no OpenMP, or another
        return None
    try:
        return ctypes.CDLL(str(_compiled()))
    except (OSError, ValueError, subprocess.SubprocessError) as error:  # ValueError: quotes in CXX that do not end
        reason = getattr(error, "stderr", None) or error
        _log.warning("Sums on the CPU are left to torch: their kernel could not be compiled. %s", reason)
        return None


def _compiled() -> Path:
    """The shared library, compiled unless it is there: for this source, compiler, processor and torch."""
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    flags = (*FLAGS, *VECTORS.get(torch.backends.cpu.get_cpu_capability(), ()))
    # Torch's own OpenMP, where torch brings one: its threads are then the same.
    openmp = sorted(map(str, (Path(torch.__file__).parent / "lib").glob("libgomp*")))
    key = "\n".join([SOURCE.read_text(), *compiler, *flags, *openmp, platform.machine(), torch.__version__])

    def compile_to(path: Path) -> None:
        command = [*compiler, *flags, str(SOURCE), "-o", str(path), *openmp]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)

    return cache.kept("rewire_sums", key, ".so", compile_to)
