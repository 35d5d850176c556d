"""Forward hooks on modules that take or return streams: they see hidden states as tensors, and may change them.

A `Stream` is not a tensor, and must not pretend to be one: C++ code trusts ``isinstance``, and would read memory that
is not there. So users' hooks get a copy of the hidden state instead. The stream goes on with that copy, or with what
the hook returns for it (`Stream.shown`), so that returned values, in-place writes and gradients all take effect.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rewire.attributes import TAKES_STREAMS
from rewire.errors import UnsupportedCall
from rewire.runtime.nested import along
from rewire.runtime.stream import Stream
from rewire.topologies.base import QKVInputs
from rewire.torch_internals import forward_hooks, forward_pre_hooks, global_backward_hooks, global_forward_hooks

#: Packages whose hooks get streams. FSDP2 and checkpointing flatten them as pytrees; those that transformers collects
#: become tensors when the model returns them.
_KNOW_STREAMS = ("torch", "transformers", "rewire")


class SeeingTensors:
    """Wraps a user's forward hook or pre-hook on a module that takes or returns streams.

    Args:
        hook: the hook, as it was registered.
        before: whether it is a pre-hook.
    """

    takes_streams = True

    def __init__(self, hook: Callable[..., Any], before: bool) -> None:
        self.hook, self.before = hook, before

    def __call__(self, module: nn.Module, *given: object) -> Any:
        if getattr(type(module), "is_rewires_own", False):
            return None  # the original model has no such module
        changing = len(given) if self.before else 1
        read, changed = given[: len(given) - changing], given[len(given) - changing :]
        shown = _Shown(self._name, module)
        seen = [along(part, part, shown.show) for part in changed]
        if not shown.places:
            return self.hook(module, *[along(part, part, _value) for part in read], *changed)
        result = self.hook(module, *[along(part, part, _value) for part in read], *seen)
        if self.before and len(given) == 2:
            result = seen if result is None else result
            return tuple([along(part, new, shown.put) for part, new in zip(changed, result, strict=True)])
        result = seen[0] if result is None else result
        if self.before and not isinstance(result, tuple):
            result = (result,)
        return along(changed[0], result, shown.put)

    @property
    def _name(self) -> str:
        kind = "forward pre-hook" if self.before else "forward hook"
        return f"{kind} {getattr(self.hook, '__qualname__', None) or repr(self.hook)}"


class _Shown:
    """The hidden states that are shown to one call of a hook."""

    def __init__(self, hook: str, module: nn.Module) -> None:
        self.hook, self.module = hook, module
        #: A stream, the tensor that the hook got for it, and the function that makes a stream of the hook's tensor.
        self.places: list[tuple[Any, Tensor, Callable[[Tensor], Any]]] = []

    def show(self, passing: Stream | QKVInputs, _: object) -> Tensor:
        known = next((copy for other, copy, _ in self.places if other is passing), None)
        if known is not None:
            return known
        value, put = passing.shown()
        copy = value.clone()
        self.places.append((passing, copy, put))
        return copy

    def put(self, passing: Stream | QKVInputs, item: object) -> Any:
        copy, put = next((copy, put) for other, copy, put in self.places if other is passing)
        if not isinstance(item, Tensor):
            raise self._refused(f"a {type(item).__name__}", copy)
        if (item.shape, item.dtype) != (copy.shape, copy.dtype):
            raise self._refused(f"a tensor of shape {tuple(item.shape)} and {item.dtype}", copy)
        return put(item)

    def _refused(self, what: str, copy: Tensor) -> UnsupportedCall:
        return UnsupportedCall(
            f"{self.hook} on {_path(self.module)} returned {what} in place of hidden states of shape "
            f"{tuple(copy.shape)} and {copy.dtype}: the other states of the residual stream would not fit. Return a "
            "tensor like the one that it gets, put it on a norm or a branch inside the block, or use "
            "rewire.restore(model)."
        )


def _value(passing: Stream | QKVInputs, _: object) -> Tensor:
    return passing.value() if isinstance(passing, Stream) else passing.residual


def _path(module: nn.Module) -> str:
    blocks = (value.block for value in vars(module).values() if hasattr(value, "passes_stream"))
    return f"'{next(blocks, type(module).__name__)}'"


def seeing_tensors(hook: Callable[..., Any], before: bool) -> Callable[..., Any]:
    """Wrap a user's hook so that it gets tensors in place of streams."""
    inner = hook
    while isinstance(inner, functools.partial):
        inner = inner.func
    package = (getattr(inner, "__module__", None) or "").partition(".")[0]
    known = package in _KNOW_STREAMS or getattr(inner, TAKES_STREAMS, False)
    return hook if known else SeeingTensors(hook, before)


def registering(base: type) -> dict[str, Callable[..., Any]]:
    """Methods for a subclass of ``base`` that register forward hooks so that they get tensors in place of streams."""

    def of(name: str, before: bool) -> Callable[..., Any]:
        def register(self: nn.Module, hook: Callable[..., Any], *args: object, **kwargs: object) -> Any:
            return getattr(base, name)(self, seeing_tensors(hook, before), *args, **kwargs)

        register.__name__ = name
        return register

    names = {"register_forward_pre_hook": True, "register_forward_hook": False}
    return {name: of(name, before) for name, before in names.items()}


def show_tensors(pre_hooks: Any, hooks: Any) -> None:
    """Wrap the hooks in these tables of torch, so that they get tensors in place of streams."""
    for table, before in ((pre_hooks, True), (hooks, False)):
        for key, hook in [*table.items()]:
            seeing = seeing_tensors(hook, before)
            if seeing is not hook:
                table[key] = seeing


def as_registered(module: nn.Module) -> None:
    """Unwrap a module's hooks."""
    for hooks in (forward_pre_hooks(module), forward_hooks(module)):
        for key, hook in [*hooks.items()]:
            if isinstance(hook, SeeingTensors):
                hooks[key] = hook.hook


def show_tensors_to_global_hooks() -> None:
    """Wrap global hooks. Torch does not tell when one is registered, so this looks whenever a stream begins.

    Raises:
        UnsupportedCall: there are global backward hooks; or torch.compile is tracing, and a global forward hook is new
            since the model last ran.
    """
    if any(global_backward_hooks()):
        raise UnsupportedCall(
            "there are global backward hooks (torch.nn.modules.module.register_module_full_backward_hook), and torch "
            "would not call them for blocks, which a residual stream passes in place of tensors: register hooks on "
            "norms and branches, which get tensors."
        )
    pre_hooks, hooks = global_forward_hooks()
    if not torch.compiler.is_compiling():
        show_tensors(pre_hooks, hooks)
    elif any(seeing_tensors(hook, True) is not hook for hook in (*pre_hooks.values(), *hooks.values())):
        raise UnsupportedCall(
            "there are global forward hooks (torch.nn.modules.module.register_module_forward_hook), and torch.compile "
            "would trace them with streams in place of hidden states: call the model once without torch.compile after "
            "they are registered."
        )
