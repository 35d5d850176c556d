"""Tensors [..., D] as kernels take them: rows and strides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Metadata(NamedTuple):
    """The properties of a tensor, other than its values, on which kernels depend."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def metadata(x: Tensor) -> Metadata:
    return Metadata(x.shape, x.stride(), x.dtype, x.device)


#: In multiples of the width: tensors whose rows are further apart are copied.
MAX_ROW_STRIDE = 256


def row_stride(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """Elements from one row of [..., D] to the next; None if rows are not evenly spaced, or too far apart.

    Kernels are compiled for a stride, which should not be one that changes with the length of sequences.
    """
    cols, stride, expected = shape[-1], None, None
    if 0 in shape:
        return cols
    for size, step in zip(reversed(shape[:-1]), reversed(strides[:-1]), strict=True):
        if size > 1 and expected not in (None, step):
            return None
        if size > 1:
            stride, expected = step if stride is None else stride, step * size
    if stride is None:  # a single row has no stride
        stride = cols
    return stride if (cols == 1 or strides[-1] == 1) and stride <= MAX_ROW_STRIDE * cols else None


def stream_strides(x: Metadata) -> tuple[int, int] | None:
    """Elements from one token to the next, and from one stream to the next, in [..., n, D]; None as in `row_stride`."""
    (*lead, n, cols), (*along, step, last) = x.shape, x.strides
    of_tokens = row_stride((*lead, cols), (*along, last))
    return None if of_tokens is None or row_stride((n, cols), (step, last)) is None else (of_tokens, step)
