"""Backward hooks on modules that streams pass. torch calls them for tensors only, so rewire refuses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from rewire.code.edited import original_class
from rewire.errors import EditError, UnsupportedCall
from rewire.runtime.gate import Gate
from rewire.torch_internals import backward_hooks

_WHY = (
    "a residual stream passes it in place of tensors, and torch would not call them. Register them on its norms and "
    "branches, which get tensors"
)


def check_hooks(module: nn.Module) -> None:
    """Refuse a module that has backward hooks.

    Raises:
        EditError: it has some.
    """
    gate = _passed(module)
    if gate is not None and any(backward_hooks(module)):
        raise EditError(f"'{gate.block}' ({gate.where}) has backward hooks: {_WHY}")


def _refusing(name: str) -> Callable[..., Any]:
    def register(self: nn.Module, *args: object, **kwargs: object) -> Any:
        gate = _passed(self)
        if gate is not None:
            raise UnsupportedCall(f"backward hooks on block '{gate.block}' ({gate.where}): {_WHY}.")
        return getattr(original_class(self), name)(self, *args, **kwargs)

    register.__name__ = name
    return register


#: Methods of generated classes that register backward hooks: they refuse where a stream passes.
REFUSING = {
    name: _refusing(name)
    for name in ("register_full_backward_hook", "register_full_backward_pre_hook", "register_backward_hook")
}


def _passed(module: nn.Module) -> Gate | None:
    """The gate through which a stream enters or leaves a module, if there is one."""
    return next((gate for gate in vars(module).values() if isinstance(gate, Gate) and gate.passes_stream), None)
