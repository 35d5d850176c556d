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
from rewire.torch_internals import in_function_mode, saved_tensor_hooks, writes_to

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
    return recipe() if recipe is not None and dtype == x.dtype and version == writes_to(x) else None


def sparing(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Where tensors with recipes are not saved, if that may be of tensors like ``x``.

    Not where somebody else looks after what is saved, as activation checkpointing does: sources would be kept for it.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or left_to_autograd(x, 1):
        return contextlib.nullcontext()
    if saved_tensor_hooks() is not None or in_function_mode():
        return contextlib.nullcontext()  # backward may run without the mode
    return torch.autograd.graph.saved_tensors_hooks(Saved, Saved.__call__)


def spared(function: Callable[P, R]) -> Callable[P, R]:
    """A function that runs while `sparing` tensors like its first argument."""

    @functools.wraps(function)
    def inside(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        like: Any = args[0]
        with sparing(like):
            return function(*args, **kwargs)

    return inside


def is_sparing() -> bool:
    """Whether `sparing` is on; also in the forward of an autograd function."""
    hooks = None if torch.compiler.is_compiling() else saved_tensor_hooks()
    return hooks is not None and hooks[0] is Saved


def remember(x: Tensor, recipe: Recipe, ctx: Any = None) -> None:
    """While `sparing`, tell how ``x``, new and the only one with its memory, can be made again.

    What made it in autograd's graph, ``ctx`` in the forward of a function, holds the recipe. Its memory does not: a
    detached ``x`` keeps nothing alive of what it was made of.
    """
    if not is_sparing():
        return
    storage, node = x.untyped_storage(), x.grad_fn
    holds: Any = vars(ctx) if node is None and ctx is not None else getattr(node, "metadata", None)
    if holds is not None and x.is_contiguous() and storage.nbytes() == x.numel() * x.element_size():
        holds[RECIPE] = recipe
        setattr(storage, RECIPE, (weakref.ref(recipe), x.dtype, writes_to(x)))


class _Streams:
    """The recipe of streams: those of the unit before, and what this unit has written.

    It knows nothing of later units, whose graph would otherwise be held by that of earlier ones.

    Attributes:
        count: units since streams were kept.
        make: makes them again.
        made: streams that were made again of the same ones.
    """

    def __init__(
        self, count: int, make: Recipe, made: weakref.WeakKeyDictionary[_Streams, Tensor] | None = None
    ) -> None:
        self.count, self.make = count, make
        self.made = weakref.WeakKeyDictionary[_Streams, Tensor]() if made is None else made

    def __call__(self) -> Tensor:
        """The streams. Those behind the next unit are forgotten: backward has done with them."""
        for later in [streams for streams in self.made if streams.count > self.count + 1]:
            del self.made[later]
        found = self.made.get(self)
        if found is None:
            found = self.made[self] = self.make()
        return found


def remember_written(
    streams: Tensor,
    written: Tensor,
    write: Callable[[Tensor, Sequence[Tensor]], Tensor],
    branches: Sequence[Tensor],
    ctx: Any = None,
) -> None:
    """Tell that ``written`` is ``write(streams, branches)``; every `SEGMENT` times it is kept nevertheless."""
    if not is_sparing():
        return
    known = recipe_of(streams)
    before = known if isinstance(known, _Streams) else _Streams(0, Saved(streams.detach()))
    if before.count < SEGMENT - 1:
        kept = [Saved(f.detach()) for f in branches]
        made = _Streams(before.count + 1, lambda: write(before(), [f() for f in kept]), before.made)
        remember(written, made, ctx)


def norm_again(norm: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``norm(x)``, of which backward makes again what is as large as ``x``; also ``x``, if that can be made again."""
    with sparing(x):
        return made_again(norm, x) if is_sparing() and _is_norm(norm) else norm(x)


def made_again(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``function(x)``, likewise; it gives the same results again and does nothing else."""
    with sparing(x):
        if not is_sparing() or x.numel() <= x.shape[-1]:  # of one token, weights are as large as what it makes
            return function(x)
        region = _Region(function, x)
        with torch.autograd.graph.saved_tensors_hooks(region.pack, region.unpack):
            result = function(x)
        remember(result, region)
        return result


def _is_norm(module: Any) -> bool:
    """Whether this is a norm as it was written, which gives the same results again and does nothing else."""
    if not isinstance(module, nn.Module):
        return False
    if NORM not in module.__dict__ and module not in _NORMS:
        _NORMS[module] = recognise(module)[0] is not None
    return (NORM in module.__dict__ or _NORMS[module]) and changed(module) is None


class _Region:
    """A norm of ``x``. The large tensors that its operations save are told apart by the order of saving.

    Attributes:
        uses: how often its operations have saved ``x`` itself, where that can be made again.
        held, left: ``x`` while backward needs it, and how often it still does.
        saved, made: the other large tensors, as they were; and what was made again and not asked for yet.
    """

    def __init__(self, norm: Callable[[Tensor], Tensor], x: Tensor) -> None:
        self.norm = norm.forward if isinstance(norm, nn.Module) else norm  # hooks would see it twice
        self.x, self.size = Saved(x.detach()), x.numel()
        self.uses, self.left = 0, 0
        self.held: Tensor | None = None
        self.memory = x.untyped_storage().data_ptr()
        kind = x.device.type
        self.autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        self.saved: list[tuple[torch.Size, torch.dtype]] = []
        self.made: dict[int, Tensor] = {}

    def pack(self, x: Tensor) -> Saved | int:
        if x.numel() < self.size or x.untyped_storage().data_ptr() == self.memory:
            kept = Saved(x)
            if kept.recipe is not None and kept.recipe is self.x.recipe:
                kept.recipe, self.uses = self.source, self.uses + 1
            return kept
        self.saved.append((x.shape, x.dtype))
        return len(self.saved) - 1

    def unpack(self, saved: Saved | int) -> Tensor:
        if isinstance(saved, Saved):
            return saved()
        if saved not in self.made:
            self()
        return self.made.pop(saved)

    def source(self, used: int = 1) -> Tensor:
        """``x``, made again once and held until all that the norm's operations have saved of it was asked for."""
        if self.held is None:
            self.held, self.left = self.x(), self.uses
        x, self.left = self.held, self.left - used
        if self.left <= 0:
            self.held = None
        return x

    def __call__(self) -> Tensor:
        """What the norm returned."""
        found: list[Tensor] = []
        x = self.source(used=0).detach().requires_grad_()
        memory = x.untyped_storage().data_ptr()

        def keep(saved: Tensor) -> None:
            if saved.numel() >= self.size and saved.untyped_storage().data_ptr() != memory:
                found.append(saved.data)  # detached, it would hold the graph that holds these hooks

        kind, dtype, on = self.autocast
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: x)
        with torch.enable_grad(), torch.autocast(kind, dtype, on), hooks:
            result = self.norm(x)
        if [(y.shape, y.dtype) for y in found] != self.saved:
            raise RuntimeError(
                f"{getattr(self.norm, '__qualname__', 'a norm')} saves other tensors when it runs again for backward "
                "than it did before: what its forward depends on has changed since. Change it after backward."
            )
        self.made = dict(enumerate(found))
        return result.detach()
