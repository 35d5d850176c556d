"""Which modules residual adds may stand in, told by their weights and code: those that `follow` looks into."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
from types import FunctionType
from typing import Any

from torch import nn

from rewire.conventions import is_matrix


class Candidates:
    """Modules that residual adds may stand in.

    Args:
        everything: all but those of torch.
    """

    def __init__(self, everything: bool) -> None:
        self.everything = everything
        self._known: dict[tuple[nn.Module, str], bool] = {}

    def may_add(self, module: nn.Module, given: int) -> bool:
        """Whether residual adds may stand in a module: a ``+``, and weights; or a second tensor to be added.

        Args:
            given: number of tensors that it is called with.
        """
        if getattr(type(module), "forward", None) in (nn.Sequential.forward, nn.ModuleList.forward):
            return True
        home = type(module).__module__
        if home.startswith("torch.nn.") and not home.endswith(".transformer"):
            return False
        if self.everything:
            return True
        return (given > 1 or self._below(module, "weights")) and self._below(module, "adds")

    def _below(self, module: nn.Module, what: str) -> bool:
        """Whether a module, or one below it, has weight matrices, or a ``+`` in its code."""
        key = module, what
        if key not in self._known:
            self._known[key] = False
            parameters = module.parameters(recurse=False)
            cls: Any = type(module)
            own = _adds(cls) if what == "adds" else any(is_matrix(p.shape) for p in parameters)
            self._known[key] = own or any(self._below(c, what) for c in module.children())
        return self._known[key]


@functools.lru_cache(maxsize=4096)
def _adds(cls: type) -> bool:
    """Whether a forward, or a method or function that it may call, has a ``+`` in it."""
    with contextlib.suppress(Exception):
        functions = [value for name, value in vars(cls).items() if isinstance(value, FunctionType)]
        functions += [
            f
            for base in cls.__mro__[1:]
            for f in vars(base).values()
            if isinstance(f, FunctionType) and base.__module__ == cls.__module__
        ]
        return any(
            _has_plus(inspect.unwrap(function)) for function in functions if not function.__name__.startswith("__")
        )
    return True


def _has_plus(function: FunctionType) -> bool:
    code = function.__code__
    if {"add", "add_", "residual"} & {*code.co_names}:
        return True
    return any(i.opname == "BINARY_OP" and i.argrepr in ("+", "+=") for i in dis.get_instructions(code))
