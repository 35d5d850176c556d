"""Sinkhorn-Knopp of small matrices by a compiled loop, ``sinkhorn.cpp``, in place of hundreds of torch operations.

The formulas are those of `rewire.topologies.manifolds.sinkhorn`.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from rewire.kernels.cpu import native

_FUNCTIONS = {torch.float32: "sinkhorn_float32", torch.float64: "sinkhorn_float64"}


def fits(logits: Tensor) -> bool:
    """Whether the loop supports such matrices: float32 or float64, on a CPU."""
    return logits.dtype in _FUNCTIONS and native.knows(logits)


def forward(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """The result, [..., n, n], contiguous, for matrices that it `fits`."""
    return _run(logits, None, iterations, eps)


def backward(grad: Tensor, logits: Tensor, iterations: int, eps: float) -> Tensor:
    """The gradient of the logits, [..., n, n], contiguous, from the gradient of the result."""
    return _run(logits, grad, iterations, eps)


def _run(logits: Tensor, grad: Tensor | None, iterations: int, eps: float) -> Tensor:
    result = torch.empty_like(logits, memory_format=torch.contiguous_format)
    given, up = logits.contiguous(), None
    if grad is not None:  # a copy: torch's zero gradients may have no memory
        up = torch.empty_like(result).copy_(grad)
    pointers = [None if x is None else x.data_ptr() for x in (given, up, result)]  # no gradient: the forward
    size, n = logits.numel(), logits.shape[-1]
    parts = min(torch.get_num_threads(), 1 + iterations * size // native.GRAIN)
    _function(logits.dtype)(size // n**2, n, iterations, eps, *pointers, parts)
    return result


@functools.cache
def _function(dtype: torch.dtype) -> Any:
    function = native.loaded()[_FUNCTIONS[dtype]]  # type: ignore[index]
    function.restype = None
    function.argtypes = [*[ctypes.c_int64] * 3, ctypes.c_double, *[ctypes.c_void_p] * 3, ctypes.c_int64]
    return function
