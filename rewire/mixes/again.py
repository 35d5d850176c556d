"""Recomputation: tensors that backward makes again instead of keeping them, such as streams, reads, and their norms.

A tensor may have a function that recomputes it, as an attribute of its storage, so that all views share it. While
`sparing` is on, autograd saves such functions instead of their tensors. Their sources are kept, and like autograd,
backward refuses sources that were written to since.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from rewire.attributes import NORM, RECOMPUTE
from rewire.mixes.autograd import left_to_autograd
from rewire.mixes.norms import changed, recognise
from rewire.torch_internals import in_function_mode, memory_of, saved_tensor_hooks, writes_to

#: Sums of more sources are not recomputed: the cost grows with their number, the memory saved does not.
FEW = 32

Recompute = Callable[[], Tensor]
P = ParamSpec("P")
R = TypeVar("R")
_THREAD = threading.local()
_NORMS = weakref.WeakKeyDictionary[nn.Module, bool]()  #: Module -> whether it is a norm.


class Saved:
    """A tensor as it is saved for backward: the function that recomputes it, or else the tensor itself."""

    __slots__ = ("geometry", "recompute", "tensor", "version")

    def __init__(self, x: Tensor) -> None:
        self.recompute, self.version = recompute_of(x), writes_to(x)
        self.tensor = x if self.recompute is None else None
        self.geometry = x.size(), x.stride(), x.storage_offset()

    def __call__(self, done: bool = False) -> Tensor:
        """The tensor, detached; ``done`` is passed to the function.

        Raises:
            RuntimeError: the tensor was written to.
        """
        if self.recompute is not None:
            with torch.enable_grad():  # without gradients, sums may be computed differently
                return self.recompute(done).as_strided(*self.geometry)
        assert self.tensor is not None
        if writes_to(self.tensor) != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {tuple(self.tensor.shape)} that a rewired model keeps for backward."
            )
        return self.tensor


class _Once:
    """A recompute function that caches its result until autograd has unpacked it as often as it was saved.

    Attributes:
        make: the function.
        saved, asked: how often autograd has saved and unpacked the result.
        held: the cached result.
    """

    __slots__ = ("__weakref__", "asked", "held", "make", "saved")

    def __init__(self, make: Recompute) -> None:
        self.make: Recompute | None = make
        self.saved = self.asked = 0
        self.held: Tensor | None = None

    def __call__(self, done: bool = False) -> Tensor:
        """The result; ``done``: autograd will not ask for it again, so it need not be cached."""
        made = self.make() if self.held is None and self.make is not None else self.held
        assert made is not None
        self.held = None if done or not self.saved else made
        return made


def _packed(x: Tensor) -> Saved:
    """The object that autograd saves in place of ``x`` while `sparing` is on."""
    saved = Saved(x)
    if saved.recompute is not None:
        saved.recompute.saved += 1
    return saved


def _unpacked(saved: Saved) -> Tensor:
    recompute = saved.recompute
    if recompute is None:
        return saved()
    recompute.asked += 1
    return saved(done=recompute.asked % recompute.saved == 0)  # backward may run several times


def recompute_of(x: Tensor) -> _Once | None:
    """The function that recomputes ``x``; None if it has none, or was written to since."""
    known, dtype, version = getattr(x.untyped_storage(), RECOMPUTE, (None, None, None))
    return known() if known is not None and dtype == x.dtype and version == writes_to(x) else None


def sparing(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """A context in which recompute functions are saved instead of tensors, where tensors like ``x`` may have them.

    It does nothing under other saved-tensor hooks, such as activation checkpointing's, which would keep the sources.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or left_to_autograd(x, 1):
        return contextlib.nullcontext()
    if saved_tensor_hooks() is not None or in_function_mode():
        return contextlib.nullcontext()  # backward may run without the mode
    return torch.autograd.graph.saved_tensors_hooks(_packed, _unpacked)


def spared(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: run a function while `sparing` tensors like its first argument."""

    @functools.wraps(function)
    def inside(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_grad_enabled() or torch.compiler.is_dynamo_compiling():
            return function(*args, **kwargs)
        like: Any = args[0]
        with sparing(like):
            return function(*args, **kwargs)

    return inside


def is_sparing() -> bool:
    """Whether `sparing` is on; true in the forward of an autograd function, too."""
    return _packing() is _packed


def _packing() -> Any:
    """The hook that autograd calls with each tensor that it saves, if there is one."""
    hooks = None if torch.compiler.is_compiling() else saved_tensor_hooks()
    return None if hooks is None else hooks[0]


def _remembers() -> bool:
    """Whether recompute functions are wanted: while `sparing` is on, and in operations that will be recomputed."""
    return is_sparing() or isinstance(getattr(_packing(), "__self__", None), _Region)


def remember(x: Tensor, recompute: Recompute, ctx: object = None) -> None:
    """While `sparing`, let ``recompute`` make ``x`` again; ``x`` has to be new and the only tensor with its memory.

    The autograd node that made ``x``, or ``ctx`` in the forward of an autograd function, owns ``recompute``. The
    storage does not, so a detached ``x`` does not keep its sources alive.
    """
    if not _remembers():
        return
    storage, node = x.untyped_storage(), x.grad_fn
    holds: Any = vars(ctx) if node is None and ctx is not None else getattr(node, "metadata", None)
    if holds is not None and x.is_contiguous() and storage.nbytes() == x.numel() * x.element_size():
        once = recompute if isinstance(recompute, _Once) else _Once(recompute)
        holds.setdefault(RECOMPUTE, []).append(once)
        setattr(storage, RECOMPUTE, (weakref.ref(once), x.dtype, writes_to(x)))


def _forget(x: Tensor) -> None:
    """Do not recompute ``x``: autograd saves ``x`` itself, and not its sources for it."""
    recompute = recompute_of(x)
    if recompute is not None:
        recompute.make = None
        delattr(x.untyped_storage(), RECOMPUTE)


def remember_sums(
    sums: Sequence[Tensor],
    sources: Sequence[Tensor],
    factors: Sequence[Tensor | None],
    add_up: Callable[..., Sequence[Tensor]],
    ctx: object = None,
) -> None:
    """Let backward recompute all ``sums`` by ``add_up(sources, *factors)``, unless there are many sources.

    Sources that are recomputed themselves have to be kept for other reasons, too.
    """
    if not _remembers() or len(sources) > FEW:
        return
    kept, fixed = [Saved(x.detach()) for x in sources], [None if w is None else Saved(w.detach()) for w in factors]
    ways = list[_Once]()

    def make(number: int) -> Tensor:
        found = add_up([x() for x in kept], *[None if w is None else w() for w in fixed])
        for way, made in zip(ways, found, strict=True):
            way.held = made.detach() if way.saved else None
        return found[number].detach()

    ways += [_Once(functools.partial(make, number)) for number in range(len(sums))]
    for total, way in zip(sums, ways, strict=True):
        remember(total, way, ctx)


class UnitsLeft:
    """A context that tells `remember_written` how many units follow the one that is written."""

    __slots__ = ("before", "count")

    def __init__(self, count: int) -> None:
        self.count = count

    def __enter__(self) -> None:
        self.before, _THREAD.left = getattr(_THREAD, "left", None), self.count

    def __exit__(self, *error: object) -> None:
        _THREAD.left = self.before


def _keeps_streams() -> bool:
    """Whether to keep the streams here: outside `UnitsLeft`, and where 6, 16, 40, 64, .. units are left.

    Backward recomputes all streams between two kept ones at once. It begins with few, and takes more as it frees
    memory.
    """
    left = getattr(_THREAD, "left", None)
    return left is None or left == 6 or left % 24 == 16


def keep_some(streams: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return new streams; every few units, keep them: drop the recompute functions that mixes gave them."""
    for stream in streams if _keeps_streams() and not torch.compiler.is_compiling() else ():
        _forget(stream)
    return streams


def remember_written(
    streams: Tensor,
    written: Tensor,
    write: Callable[[Tensor, Sequence[Tensor]], Tensor],
    branches: Sequence[Tensor],
    ctx: object = None,
) -> None:
    """Let backward recompute ``written`` by ``write(streams, branches)``, in `UnitsLeft`, unless it is kept."""
    if _keeps_streams() or not is_sparing():
        return
    # Detached: otherwise the function would hold their graph.
    before, kept = Saved(streams.detach()), [Saved(f.detach()) for f in branches]
    remember(written, lambda: write(before(), [f() for f in kept]), ctx)


def norm_again(norm: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``norm(x)``; backward recomputes what is as large as ``x``, and ``x`` itself if it can."""
    with sparing(x):
        return made_again(norm, x) if is_sparing() and _is_norm(norm) else norm(x)


def made_again(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`norm_again` for any deterministic function without side effects."""
    with sparing(x):
        if not is_sparing() or x.numel() <= x.shape[-1]:  # for one token, weights are as large as activations
            return function(x)
        region = _Region(function, x)
        with torch.autograd.graph.saved_tensors_hooks(region.pack, region.unpack):
            result = function(x)
        region.settle()
        remember(result, region)
        return result


def merged_again(merge: Callable[..., Tensor], x: Tensor, branches: Sequence[Tensor]) -> Tensor:
    """``merge(x, *branches)``, the next state; backward recomputes it, and all that is as large, from the branches.

    Nothing is recomputed if its operations save only ``x``: then branches need not be kept.
    """
    with sparing(x):
        if not is_sparing() or x.numel() <= x.shape[-1] or any(left_to_autograd(f, 1) for f in branches):
            return merge(x, *branches)
        region = _Region(merge, x, branches)
        with torch.autograd.graph.saved_tensors_hooks(region.pack, region.unpack):
            result = merge(x, *branches)
        if region.settle():
            _forget(result)  # a mix would recompute it from tensors that the region recomputes
            remember_written(x, result, lambda x, branches: region.run(x, branches)[0], branches)
        return result


def _is_norm(module: object) -> bool:
    """Whether this is an unchanged norm: deterministic and without side effects."""
    if not isinstance(module, nn.Module):
        return False
    if NORM not in module.__dict__ and module not in _NORMS:
        _NORMS[module] = recognise(module)[0] is not None
    return (NORM in module.__dict__ or _NORMS[module]) and changed(module) is None


class _Region:
    """Operations on ``x`` that backward runs again for the large tensors they save, known by the order of saving.

    Attributes:
        learns: whether ``x`` requires gradients: if not, less is saved.
        others: other large tensors that the operations read.
        used: by memory, the tensors among ``others`` that they have saved.
        saved, kept: properties of the other large tensors that they have saved; the tensors themselves, if kept.
        made: tensors that were recomputed and not yet unpacked.
    """

    def __init__(self, function: Callable[..., Tensor], x: Tensor, others: Sequence[Tensor] = ()) -> None:
        self.function = function.forward if isinstance(function, nn.Module) else function  # hooks must not run twice
        self.x, self.size, self.learns = Saved(x.detach()), x.numel(), x.requires_grad
        self.others = [(Saved(other.detach()), other.requires_grad) for other in others]
        self.memory, self.used = memory_of(x), set[int]()
        self.memories = {memory_of(other) for other in others}
        kind = x.device.type
        there = torch.amp.is_autocast_available(kind)  # false on the meta device
        self.autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) if there else None
        self.saved: list[tuple[torch.Size, torch.dtype]] = []
        self.kept = list[Saved]()
        self.made: dict[int, Tensor] = {}

    def pack(self, x: Tensor) -> Saved | int:
        memory = memory_of(x)
        if x.numel() < self.size or memory == self.memory or memory in self.memories:
            self.used |= {memory} & self.memories
            return _packed(x)
        self.saved.append((x.shape, x.dtype))
        self.kept.append(Saved(x))
        return len(self.saved) - 1

    def settle(self) -> bool:
        """Whether keeping ``others`` instead of what was saved pays; if not, keep what was saved."""
        worth = len(self.saved) + len(self.used) >= len(self.others)
        if worth:
            self.kept = []
        if not (worth and self.saved):
            self.others = []
        return worth

    def unpack(self, saved: Saved | int) -> Tensor:
        if isinstance(saved, Saved):
            return _unpacked(saved)
        if self.kept:
            return self.kept[saved]()
        if saved not in self.made:
            self()
        return self.made.pop(saved)

    def __call__(self) -> Tensor:
        """Run the operations, and return their result."""
        others = [other().requires_grad_(grad) for other, grad in self.others]
        result, found = self.run(self.x(), others)
        if [(y.shape, y.dtype) for y in found] != self.saved:
            raise RuntimeError(
                f"{getattr(self.function, '__qualname__', 'a norm')} saves other tensors when it runs again for "
                "backward: something that its forward depends on has changed. Change it after backward."
            )
        self.made = dict(enumerate(found))
        return result

    def run(self, x: Tensor, others: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The operations' result, and the large tensors that they save."""
        found: list[Tensor] = []
        x = x.detach().requires_grad_(self.learns)
        known = {memory_of(y) for y in (x, *others)}

        def keep(saved: Tensor) -> None:
            if saved.numel() >= self.size and memory_of(saved) not in known:
                found.append(saved.data)  # detach() would hold the graph, which holds these hooks

        autocast = contextlib.nullcontext() if self.autocast is None else torch.autocast(*self.autocast)
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: x)
        with torch.enable_grad(), autocast, hooks:
            result = self.function(x, *others)
        return result.detach(), found
