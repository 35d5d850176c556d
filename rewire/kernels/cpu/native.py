"""The sums of `plain` by a compiled C++ loop, ``sums.cpp``: one pass over memory, where torch makes one per tensor.

It is compiled on first use, in a few seconds, and kept in the folder of generated modules. If that fails, as without a
compiler, `plain` does without it.
"""

from __future__ import annotations

import array
import ctypes
import functools
import itertools
import logging
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rewire.kernels import cache, switch
from rewire.kernels.arguments import row_stride

SOURCES = tuple(Path(__file__).with_name(name) for name in ("sums.cpp", "sinkhorn.cpp"))
FLAGS = ("-O3", "-std=c++17", "-fopenmp", "-shared", "-fPIC")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
#: torch's name of the processor's vector instructions -> compiler flags. Others (ARM, POWER) have one baseline.
VECTORS = {"AVX2": _AVX2, "AVX512": (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")}
HEADER = Path(__file__).with_name("elements.h")

#: Number of elements for which another thread pays.
GRAIN = 1 << 15

_FUNCTIONS = {
    dtype: f"sums_{str(dtype).removeprefix('torch.')}"
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
}
_ARGUMENTS: list[Any] = [
    {"n": ctypes.c_int64, "p": ctypes.c_void_p}[kind] for kind in "nnnnnnpppppnnn"
]  # numbers and pointers

_log = logging.getLogger(__name__)


def knows(x: Tensor) -> bool:
    """Whether there is a kernel for tensors like ``x``, and no dispatch mode is active."""
    if switch.listened():  # dispatch modes do not see the kernel
        return False
    return x.is_cpu and x.numel() > 0 and _function(x.dtype)[0] is not None


def sums(
    terms: Sequence[Tensor],
    weights: Tensor | None,
    by_channel: bool,
    added: Sequence[Tensor] = (),
    states: Sequence[Tensor] = (),
    scores: Tensor | None = None,
    carried: Sequence[Tensor] = (),
) -> list[Tensor] | None:
    """``sum_n (w_mn + s_mn) g_n + sum_j a_j``, and the products of states with terms, ``<x_m, g_n>``.

    Args:
        terms: N tensors g_n [..., D].
        weights: w, [M, N] or, per channel, [M, N, D]; the first dimension may be missing for M = 1. None: only scores
            count.
        by_channel: whether weights are per channel.
        added: tensors a_j [..., D].
        states: M tensors x_m [..., D]; without them M = 1.
        scores: s, weights per token [..., M, N].
        carried: tensors [..., D] that are added to each of the M.

    Returns:
        M new tensors; with states also the products, in the dtype of accumulation: those for weights, in their shape,
        unless scores are given and weights are not per channel; and with scores those for them, in their shape. None
        if there is no kernel, a dispatch mode is active, or the kernel does not support the tensors: they have to be on
        a CPU, of one shape and one dtype (float32, float64, bfloat16, float16), with contiguous, evenly spaced rows.
    """
    first = (terms or added)[0]
    if not knows(first):
        return None
    outs = [_empty(first) for _ in range(len(states) or 1)]
    dots = _run(_Tensors(outs, states, carried, terms, added), weights, by_channel, scores)
    return None if dots is None else [*outs, *dots]


def mixes(
    sources: Sequence[Tensor], weights: Tensor | None, scores: Tensor | None, stacks: bool, apart: int
) -> list[Tensor]:
    """`operators.mixes`, of tensors of one dtype that this kernel `knows`; scores are one tensor [..., M, N]."""
    terms = _evenly(_one_by_one(sources, stacks))
    shape, results = terms[0].shape, len(weights) if weights is not None else scores.shape[-2]  # type: ignore[union-attr]
    made = [terms[0].new_empty(*shape[:-1], results - apart, shape[-1])] if stacks else []
    made += [terms[0].new_empty(shape) for _ in range(apart if stacks else results)]
    tensors = _Tensors(_one_by_one(made, stacks), (), (), terms, ())
    done = _run(tensors, weights, weights is not None and weights.dim() == 3, scores)
    assert done is not None
    return made


def mixes_backward(
    grads: Sequence[Tensor],
    sources: Sequence[Tensor],
    weights: Tensor | None,
    scores: Tensor | None,
    carried: Sequence[Tensor],
    stacks: bool,
) -> list[Tensor]:
    """`operators.mixes_backward`, of tensors of one dtype that this kernel `knows`."""
    made = [_empty(x) for x in sources]
    by_channel = weights is not None and weights.dim() == 3
    across = None if weights is None else weights.transpose(0, 1)
    states, joined, terms = (_evenly(_one_by_one(of, stacks)) for of in (sources, carried, grads))
    tensors = _Tensors(_one_by_one(made, stacks), states, joined, terms, ())
    dots = _run(tensors, across, by_channel, None if scores is None else scores.mT)
    assert dots is not None
    if weights is not None and scores is not None and not by_channel:
        dots = [over_tokens(dots[0], 2), *dots]
    like = [x for x in (weights, scores) if x is not None]
    found = [(d.transpose(0, 1) if x is weights else d.mT).to(x.dtype) for d, x in zip(dots, like, strict=True)]
    return [*made, *found]


def over_tokens(x: Tensor, kept: int) -> Tensor:
    """The sum over all dimensions but the last ``kept`` ones; if there are no others, ``x``."""
    return x.unsqueeze(0).flatten(0, -1 - kept).sum(0)


def _one_by_one(tensors: Sequence[Tensor], stacks: bool) -> Sequence[Tensor]:
    """The tensors, with a first one that is a stack split up."""
    return [*tensors[0].unbind(-2), *tensors[1:]] if stacks and tensors else tensors


def _evenly(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, with copies of those that have unevenly spaced rows, or zeros or signs that torch has not stored."""
    return [
        torch.zeros(x.shape, dtype=x.dtype).add_(x)
        if not x.data_ptr() or x.is_neg() or row_stride(x.shape, x.stride()) is None
        else x
        for x in tensors
    ]


class _Tensors(NamedTuple):
    """Tensors [..., D] of a sum, in the order in which the kernel takes them."""

    outs: Sequence[Tensor]  # M
    states: Sequence[Tensor]  # M, or none
    carried: Sequence[Tensor]  # M, or none: one added to each result
    terms: Sequence[Tensor]  # N
    added: Sequence[Tensor]  # added to all results


def _run(tensors: _Tensors, weights: Tensor | None, by_channel: bool, scores: Tensor | None) -> list[Tensor] | None:
    """Write the sums to ``outs``, and return the products as `sums` does; None if tensors are not supported."""
    # This runs with cold caches, between a model's matrix products: each torch call here costs 10 microseconds.
    first, results, n = tensors.outs[0], len(tensors.outs), len(tensors.terms)
    function, precision = _function(first.dtype)
    width, contiguous, rows = first.shape[-1] if first.dim() else 1, True, list[int]()
    for x in itertools.chain(*tensors):
        stride, pointer = width, x.data_ptr()
        if not x.is_contiguous():
            apart, contiguous = row_stride(x.shape, x.stride()), False
            if apart is None or x.is_neg():  # views of complex tensors may have lazy negation
                return None
            stride = apart
        if x.dtype != first.dtype or x.shape != first.shape or not x.is_cpu or not pointer:
            return None  # no memory: torch's zero gradients that are not stored
        rows += pointer, stride
    if scores is not None:
        if scores.shape != (*first.shape[:-1], results, n):
            return None
        scores = _exact(scores, precision)
    weights = first.new_zeros(results, n, dtype=precision) if weights is None else _exact(weights, precision)
    if weights.numel() != results * n * (width if by_channel else 1):
        return None
    elements = first.numel()
    if contiguous and not by_channel and scores is None:
        width = elements
    dots = [torch.empty_like(weights)] if tensors.states and (by_channel or scores is None) else []
    row_dots = [torch.zeros_like(scores)] if tensors.states and scores is not None else []
    assert function is not None
    places = array.array("q", rows)  # ctypes would create a type for each length
    function(
        by_channel, results, n, len(tensors.added), len(tensors.states) > 0, len(tensors.carried) > 0,
        places.buffer_info()[0], weights.data_ptr(), None if scores is None else scores.data_ptr(),
        dots[0].data_ptr() if dots else None, row_dots[0].data_ptr() if row_dots else None,
        elements // width, width, min(torch.get_num_threads(), 1 + elements // GRAIN),
    )  # fmt: skip
    return [*dots, *row_dots]


def _empty(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _exact(weights: Tensor, precision: torch.dtype) -> Tensor:
    """Weights in the dtype and layout that the kernel reads."""
    return weights if weights.dtype == precision and weights.is_contiguous() else weights.to(precision).contiguous()


@functools.cache
def _function(dtype: torch.dtype) -> tuple[Callable[..., None] | None, torch.dtype]:
    """The kernel for tensors of this dtype, if there is one, and the dtype in which it sums."""
    loops = loaded() if dtype in _FUNCTIONS else None
    precision = torch.promote_types(dtype, torch.float32)
    if loops is None:
        return None, precision
    function = loops[_FUNCTIONS[dtype]]
    function.argtypes, function.restype = _ARGUMENTS, None
    return function, precision


@functools.cache
def loaded() -> ctypes.CDLL | None:
    """The library compiled from `SOURCES`; None if compilation fails, which is reported once."""
    if not switch.ON or sys.platform != "linux":  # compilers elsewhere have no OpenMP, or another one
        return None
    try:
        return ctypes.CDLL(str(_compiled()))
    except (OSError, ValueError, subprocess.SubprocessError) as error:  # ValueError: unbalanced quotes in CXX
        reason = getattr(error, "stderr", None) or error
        _log.warning("Mixes on the CPU are left to torch, because their kernel could not be compiled. %s", reason)
        return None


def _compiled() -> Path:
    """Path of the shared library for this source, compiler, processor and torch; compiled if it is not there."""
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    flags = (*FLAGS, *VECTORS.get(torch.backends.cpu.get_cpu_capability(), ()))
    # Torch's own OpenMP, if torch has one, so that both share threads.
    openmp = sorted(map(str, (Path(torch.__file__).parent / "lib").glob("libgomp*")))
    texts = [file.read_text() for file in (HEADER, *SOURCES)]
    key = "\n".join([*texts, *compiler, *flags, *openmp, platform.machine(), torch.__version__])

    def compile_to(path: Path) -> None:
        command = [*compiler, *flags, *map(str, SOURCES), "-o", str(path), *openmp]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)

    return cache.kept("rewire_sums", key, ".so", compile_to)
