"""Whether user code writes in place to a value that was read from a stream: its states would not change with it."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from rewire.errors import OutOfOrder
from rewire.torch_internals import (
    memories_within,
    memory_within,
    only_inlined,
    outside_inference_mode,
    while_traced,
    writes_within,
)

#: How to mend it.
REMEDY = (
    "Write `x = x.masked_fill(..)`, without the underscore. If only some calls do it (`if x.shape[1] == 1: x += f`), "
    "let them go the way of the inputs that the model was rewired with."
)
#: For a tensor of the model's that is part of a stream.
PART = (
    "later blocks read it, too. Write `f = f * 2`, not `f *= 2`, and let branches return new tensors, not one buffer "
    "that they share. If only some calls do it, let them go the way of the inputs that the model was rewired with."
)
_NOTED = "writes_when_read"
#: By their memory: fake tensors that became a part of a stream, and how often they were written to then. (Not by an
#: attribute, as `_NOTED`: histories hold them detached, as other objects.)
_KEPT: dict[int | None, tuple[Any, int | None]] = {}


def noted(value: Tensor) -> int | None:
    """How often a tensor was written to.

    None for one of the user's that was made in `torch.inference_mode`, and while torch.compile traces, when the fake
    tensor keeps the number.
    """
    if not torch.compiler.is_dynamo_compiling():
        return writes_within(value)
    while_traced(_note, value)
    return None


def is_written(value: Tensor, before: int | None) -> bool:
    """Whether a tensor was written to since it was `noted`.

    Raises:
        OutOfOrder: it was, while torch.compile traces.
    """
    if not torch.compiler.is_dynamo_compiling():
        return before is not None and writes_within(value) != before
    while_traced(_check, value)
    return False


def _note(fake: Tensor) -> None:
    setattr(fake, _NOTED, writes_within(fake))


def _check(fake: Tensor) -> None:
    if writes_within(fake) != getattr(fake, _NOTED, 0):  # 0: read in front of a graph break, and an input since
        raise OutOfOrder(
            "the value of a trunk was written to in place, after the stream was read: earlier states that other "
            f"blocks read would not change with it. {REMEDY} The block is named below."
        )


def note_part(value: Tensor) -> None:
    """While torch.compile traces: note a tensor that becomes part of a stream, for `check_part`."""
    while_traced(_note_part, value)


def check_part(part: Tensor) -> None:
    """While torch.compile traces: check that a tensor was not written to since it became part of a stream.

    Raises:
        OutOfOrder: it was.
    """
    while_traced(_check_part, part)


def _note_part(fake: Tensor) -> None:
    memory = memory_within(fake)
    # A buffer that branches share becomes a part several times: what was written to it since the first time counts.
    if memory is not None and memory not in _KEPT:
        _KEPT[memory] = weakref.ref(fake, lambda _: _KEPT.pop(memory, None)), writes_within(fake)


def _check_part(fake: Tensor) -> None:
    known, before = _KEPT.get(memory_within(fake), (lambda: None, 0))
    value = known()
    if value is not None and writes_within(value) != before:
        raise OutOfOrder(f"a tensor was written to in place after it was added: {PART}")


def share_memory(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors have the same memory; under torch.compile, where that cannot be told, are the same."""
    if x is y or torch.compiler.is_dynamo_compiling():
        return x is y
    memory, other = memories_within((x, y))
    return memory is not None and memory == other


def uncounted() -> bool:
    """Whether torch counts no writes to the tensors that are made now: in `torch.inference_mode`."""
    return not torch.compiler.is_dynamo_compiling() and torch.is_inference_mode_enabled()


def counted(value: Tensor) -> Tensor:
    """The tensor, or a copy of one that was made in `torch.inference_mode`."""
    if torch.compiler.is_dynamo_compiling() or not value.is_inference():
        return value
    with outside_inference_mode():
        return value.clone()


only_inlined(noted, is_written, uncounted, counted)
