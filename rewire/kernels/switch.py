"""Decides whether kernels are used for a tensor."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from rewire.kernels import kernel
from rewire.torch_internals import in_dispatch_mode

#: ``REWIRE_KERNELS=off`` leaves every mix to plain PyTorch.
ON = os.environ.get("REWIRE_KERNELS", "on").lower() not in ("off", "0", "false")
#: Triton's interpreter runs kernels on a CPU: for tests.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

#: Dtypes of states that kernels support.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def uses_kernels(x: Tensor) -> bool:
    """Whether mixes of tensors like ``x`` run as Triton kernels, or are recorded as if on a GPU.

    False in an exported program, which has to run without rewire.
    """
    noted = kernel.threads_noting > 0 and kernel.noting()  # every sum asks: mostly without the call
    here = ON and (x.is_cuda or (INTERPRETED and x.device.type == "cpu") or noted)
    return here and x.dtype in DTYPES and not torch.compiler.is_exporting()


def opaque(x: Tensor) -> bool:
    """Whether torch.compile sees mixes of tensors like ``x`` as operators: kernels, or on a CPU the compiled loop."""
    on_cpu = x.device.type == "cpu" and x.dtype in DTYPES and not torch.compiler.is_exporting()
    return uses_kernels(x) or (ON and on_cpu and torch.compiler.is_compiling())


def listened() -> bool:
    """Whether torch.compile or a dispatch mode has to see each operation.

    Such modes are those of fake tensors and of selective checkpointing. The latter keeps results of some operations and
    returns them instead of running these again, so that they must not be written to.
    """
    return torch.compiler.is_compiling() or in_dispatch_mode()
