"""Whether user code writes in place to a value that was read from a stream: its states would not change with it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from rewire.errors import OutOfOrder
from rewire.torch_internals import while_traced, writes_to

#: How to mend it.
REMEDY = (
    "Write `x = x.masked_fill(..)`, without the underscore. If only some calls do it (`if x.shape[1] == 1: x += f`), "
    "let them go the way of the inputs that the model was rewired with."
)
_NOTED = "writes_when_read"


def noted(value: Tensor) -> int | None:
    """How often a tensor was written to; None while torch.compile traces, when its fake tensor keeps the number."""
    if not torch.compiler.is_dynamo_compiling():
        return writes_to(value)
    while_traced(_note, value)
    return None


def is_written(value: Tensor, before: int | None) -> bool:
    """Whether a tensor was written to since it was `noted`.

    Raises:
        OutOfOrder: it was, while torch.compile traces.
    """
    if not torch.compiler.is_dynamo_compiling():
        return before is not None and writes_to(value) != before
    while_traced(_check, value)
    return False


def _note(fake: Tensor) -> None:
    setattr(fake, _NOTED, writes_to(fake))


def _check(fake: Tensor) -> None:
    if writes_to(fake) != getattr(fake, _NOTED, writes_to(fake)):
        raise OutOfOrder(
            "the value of a trunk was written to in place, after the stream was read: earlier states that other "
            f"blocks read would not change with it. {REMEDY} The block is named below."
        )


def uncounted() -> bool:
    """Whether torch counts no writes to the tensors that are made now: in `torch.inference_mode`."""
    return not torch.compiler.is_dynamo_compiling() and torch.is_inference_mode_enabled()


@contextlib.contextmanager
def counting() -> Iterator[None]:
    """Context in which torch counts writes to the tensors that are made, and records no gradients."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def counted(value: Tensor) -> Tensor:
    """The tensor, or a copy of one that was made in `torch.inference_mode`."""
    if torch.compiler.is_dynamo_compiling() or not value.is_inference():
        return value
    with counting():
        return value.clone()
