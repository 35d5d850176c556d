"""Tensors [..., D] as kernels take them: rows and strides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Metadata(NamedTuple):
    """Of a tensor: all that is asked of it before its values are."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def metadata(x: Tensor) -> Metadata:
    return Metadata(x.shape, x.stride(), x.dtype, x.device)


#: Times the width: rows further apart are copied.
MAX_ROW_STRIDE = 256


def row_stride(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """Elements from a row of [..., D] to the next; None if it is not one number for all rows, or not to be compiled in.

    Strides are compiled in. Those of one token of each sequence, which change with the number of tokens, must not be.
    """
    cols, stride, expected = shape[-1], None, None
    if 0 in shape:
        return cols
    for size, step in zip(reversed(shape[:-1]), reversed(strides[:-1]), strict=True):
        if size > 1 and expected not in (None, step):
            return None
        if size > 1:
            stride, expected = step if stride is None else stride, step * size
    if stride is None:  # of one row, it could be any
        stride = cols
    return stride if (cols == 1 or strides[-1] == 1) and stride <= MAX_ROW_STRIDE * cols else None


def stream_strides(x: Metadata) -> tuple[int, int] | None:
    """Of streams [..., n, D], elements from a token to the next, and from a stream to the next; None as above."""
    (*lead, n, cols), (*along, step, last) = x.shape, x.strides
    of_tokens = row_stride((*lead, cols), (*along, last))
    return None if of_tokens is None or row_stride((n, cols), (step, last)) is None else (of_tokens, step)
