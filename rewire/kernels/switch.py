"""Where kernels run, and whether they do."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from rewire.kernels.kernel import noting
from rewire.torch_internals import in_dispatch_mode

#: ``REWIRE_KERNELS=off`` leaves every mix to plain PyTorch.
ON = os.environ.get("REWIRE_KERNELS", "on").lower() not in ("off", "0", "false")
#: Triton's interpreter runs kernels on a CPU: for tests.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

#: Those of states.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def uses_kernels(x: Tensor) -> bool:
    """Whether mixes of tensors like ``x`` run as Triton kernels, or would on a GPU and are noted.

    Not in an exported program, which is run where there is no rewire.
    """
    here = ON and (x.is_cuda or (INTERPRETED and x.device.type == "cpu") or noting())
    return here and x.dtype in DTYPES and not torch.compiler.is_exporting()


def opaque(x: Tensor) -> bool:
    """Whether mixes of tensors like ``x`` are operators to torch.compile: kernels, or on a CPU the compiled loop."""
    on_cpu = x.device.type == "cpu" and x.dtype in DTYPES and not torch.compiler.is_exporting()
    return uses_kernels(x) or (ON and on_cpu and torch.compiler.is_compiling())


def listened() -> bool:
    """Whether somebody is to see each operation: torch.compile, or a dispatch mode.

    Fake tensors are such a mode, and so is selective checkpointing. That keeps results of some operations, to hand them
    out again in place of running these: they may not be written to.
    """
    return torch.compiler.is_compiling() or in_dispatch_mode()
