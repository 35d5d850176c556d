"""Whether user code writes in place to a value that was read from a stream: its states would not change with it."""

from __future__ import annotations

import torch
from torch import Tensor

from rewire.errors import OutOfOrder
from rewire.torch_internals import (
    fake_mode_within,
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
#: An attribute of the trace's fake tensor mode, so that it is dropped with it: by memory, fake tensors that may be part
#: of a stream, and how often they were written to when they were noted. (Histories hold them as other objects.)
_PARTS = "rewire_parts_of_streams"


def noted(value: Tensor, part: bool = False) -> int | None:
    """How often a tensor was written to.

    None for one of the user's that was made in `torch.inference_mode`, and while torch.compile traces, when the fake
    tensor keeps the number.

    Args:
        value: the tensor.
        part: whether it may be part of a stream: see `check_parts`.
    """
    if not torch.compiler.is_dynamo_compiling():
        return writes_within(value)
    while_traced(_note_part if part else _note, value)
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


def _note(fakes: list[Tensor]) -> None:
    (fake,) = fakes
    setattr(fake, _NOTED, writes_within(fake))


def _check(fakes: list[Tensor]) -> None:
    (fake,) = fakes
    if writes_within(fake) != getattr(fake, _NOTED, 0):  # 0: read in front of a graph break, and an input since
        raise OutOfOrder(
            "the value of a trunk was written to in place, after the stream was read: earlier states that other "
            f"blocks read would not change with it. {REMEDY} The block is named below."
        )


def check_parts(*parts: Tensor) -> None:
    """While torch.compile traces: check that tensors of a stream were not written to since they were `noted` as such.

    Raises:
        OutOfOrder: one was.
    """
    while_traced(_check_parts, *parts)


def _note_part(fakes: list[Tensor]) -> None:
    _note(fakes)
    (fake,) = fakes
    # A buffer that branches share becomes a part several times: what was written to it since the first time counts.
    _parts_by_memory(fake).setdefault(memory_within(fake), (fake, writes_within(fake)))


def _parts_by_memory(fake: Tensor) -> dict[int | None, tuple[Tensor, int | None]]:
    """What `_PARTS` names, of the trace to which a fake tensor belongs."""
    return vars(fake_mode_within(fake)).setdefault(_PARTS, {})


def _check_parts(fakes: list[Tensor]) -> None:
    for fake in fakes:
        memory = memory_within(fake)
        value, before = _parts_by_memory(fake).get(memory, (fake, None))
        if memory is not None and before is not None and writes_within(value) != before:
            raise OutOfOrder(f"a tensor was written to in place after it became part of the stream: {PART}")


def share_memory(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors have the same memory; under torch.compile, where that cannot be told, are the same."""
    if x is y or torch.compiler.is_dynamo_compiling():
        return x is y
    memory = memory_within(x)
    return memory is not None and memory == memory_within(y)


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
