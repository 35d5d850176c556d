"""Tensors that backward makes again in place of keeping them: streams, what units read, what norms make of that.

How a tensor can be made again, its *recipe*, is put on its storage, so that each view of it has it. Where autograd
saves a tensor with a recipe while `sparing` is on, it saves the recipe. Sources of recipes are kept, and as autograd
does, backward refuses those that were written to since.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from rewire.attributes import NORM, RECIPE
from rewire.mixes.autograd import left_to_autograd
from rewire.mixes.norms import changed, recognise
from rewire.torch_internals import saved_tensor_hooks, writes_to

#: Units after which streams are kept: with T units, T / 8 times all streams are kept, and in backward 8 times more.
SEGMENT = 8

Recipe = Callable[[], Tensor]
P = ParamSpec("P")
R = TypeVar("R")
_NORMS = weakref.WeakKeyDictionary[nn.Module, bool]()  #: Modules that were looked at, and whether they are norms.


class Saved:
    """A tensor as it is saved for backward: by its recipe if it has one, or else as it is."""

    __slots__ = ("geometry", "recipe", "tensor", "version")

    def __init__(self, x: Tensor) -> None:
        self.recipe, self.version = recipe_of(x), writes_to(x)
        self.tensor = x if self.recipe is None else None
        self.geometry = x.size(), x.stride(), x.storage_offset()

    def __call__(self) -> Tensor:
        """The tensor, without its history of gradients.

        Raises:
            RuntimeError: it was written to.
        """
        if self.recipe is not None:
            with torch.enable_grad():  # sums without gradients may be computed in another way
                return self.recipe().as_strided(*self.geometry)
        assert self.tensor is not None
        if writes_to(self.tensor) != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {tuple(self.tensor.shape)} that a rewired model keeps for backward."
            )
        return self.tensor


def recipe_of(x: Tensor) -> Recipe | None:
    """How ``x`` can be made again, if it was not written to since that was told."""
    recipe, dtype, version = getattr(x.untyped_storage(), RECIPE, (None, None, None))
    return recipe if dtype == x.dtype and version == writes_to(x) else None


def sparing(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Where tensors with recipes are not saved, if that may be of tensors like ``x``.

    Not where somebody else looks after what is saved, as activation checkpointing does: sources would be kept for it.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or left_to_autograd(x, 1):
        return contextlib.nullcontext()
    if saved_tensor_hooks() is not None:
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(Saved, Saved.__call__)


def spared(function: Callable[P, R]) -> Callable[P, R]:
    """A function that runs while `sparing` tensors like its first argument."""

    @functools.wraps(function)
    def inside(*args: P.args, **kwargs: P.kwargs) -> R:
        like: Any = args[0]
        with sparing(like):
            return function(*args, **kwargs)

    return inside


def is_sparing() -> bool:
    """Whether `sparing` is on; also in the forward of an autograd function."""
    hooks = None if torch.compiler.is_compiling() else saved_tensor_hooks()
    return hooks is not None and hooks[0] is Saved


def remember(x: Tensor, recipe: Recipe) -> None:
    """While `sparing`, tell how ``x``, new and the only one with its memory, can be made again."""
    if is_sparing():
        storage = x.untyped_storage()
        if x.is_contiguous() and storage.nbytes() == x.numel() * x.element_size():
            setattr(storage, RECIPE, (recipe, x.dtype, writes_to(x)))


class _Segment:
    """Streams after each of some units in turn, of which only the first are kept."""

    def __init__(self, first: Tensor) -> None:
        self.first, self.steps = Saved(first.detach()), list[Callable[[Tensor], Tensor]]()
        self.made: dict[int, Tensor] = {}

    def after(self, count: int) -> Tensor:
        """Streams after so many units. Those behind the next unit are forgotten: backward has done with them."""
        self.made = {n: x for n, x in self.made.items() if n <= count + 1}
        known = max((n for n in self.made if n <= count), default=0)
        x = self.made[known] if known else self.first()
        for n in range(known, count):
            x = self.made[n + 1] = self.steps[n](x)
        return x


class _Streams:
    """The recipe of streams: so many units after the first of a segment."""

    def __init__(self, segment: _Segment, count: int) -> None:
        self.segment, self.count = segment, count

    def __call__(self) -> Tensor:
        return self.segment.after(self.count)


def remember_written(
    streams: Tensor, written: Tensor, write: Callable[[Tensor, Sequence[Tensor]], Tensor], branches: Sequence[Tensor]
) -> None:
    """Tell that ``written`` is ``write(streams, branches)``; every `SEGMENT` times it is kept nevertheless."""
    if not is_sparing():
        return
    known = recipe_of(streams)
    whole = isinstance(known, _Streams) and known.count == len(known.segment.steps)
    segment = known.segment if isinstance(known, _Streams) and whole else _Segment(streams)
    if len(segment.steps) < SEGMENT - 1:
        kept = [Saved(f.detach()) for f in branches]
        segment.steps.append(lambda x: write(x, [f() for f in kept]))
        remember(written, _Streams(segment, len(segment.steps)))


def normed(norm: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``norm(x)``, of which backward makes again what is as large as ``x``; also ``x``, if that can be made again."""
    with sparing(x):
        if not (is_sparing() and _is_norm(norm)):
            return norm(x)
        region = _Region(norm, x)  # type: ignore[arg-type]
        with torch.autograd.graph.saved_tensors_hooks(region.pack, region.unpack):
            result = norm(x)
        remember(result, region.result)
        return result


def _is_norm(module: Any) -> bool:
    """Whether this is a norm as it was written, which gives the same results again and does nothing else."""
    if not isinstance(module, nn.Module):
        return False
    if NORM not in module.__dict__ and module not in _NORMS:
        _NORMS[module] = recognise(module)[0] is not None
    return (NORM in module.__dict__ or _NORMS[module]) and changed(module) is None


class _Region:
    """A norm of ``x``. The large tensors that its operations save are told apart by the order of saving."""

    def __init__(self, norm: nn.Module, x: Tensor) -> None:
        self.norm, self.x, self.size = norm, Saved(x.detach()), x.numel()
        self.memory = x.untyped_storage().data_ptr()
        kind = x.device.type
        self.autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        self.count = 0
        self.made: dict[int, Tensor] = {}

    def pack(self, x: Tensor) -> Saved | int:
        if x.numel() < self.size or x.untyped_storage().data_ptr() == self.memory:
            return Saved(x)
        self.count += 1
        return self.count - 1

    def unpack(self, saved: Saved | int) -> Tensor:
        if isinstance(saved, Saved):
            return saved()
        if saved not in self.made:
            self.result()
        return self.made.pop(saved)

    def result(self) -> Tensor:
        """What the norm returned."""
        found: list[Tensor] = []
        x = self.x().detach().requires_grad_()
        memory = x.untyped_storage().data_ptr()

        def keep(saved: Tensor) -> None:
            if saved.numel() >= self.size and saved.untyped_storage().data_ptr() != memory:
                found.append(saved)

        kind, dtype, on = self.autocast
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: x)
        with torch.enable_grad(), torch.autocast(kind, dtype, on), hooks:
            result: Tensor = self.norm.forward(x)
        self.made = dict(enumerate(found))
        return result.detach()
