"""Objects that stand for a tensor: torch functions, operators and attributes act on their value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rewire.torch_internals import C_FUNCTIONS, HIGHER_ORDER, WithoutTorchFunction, pytree

#: Functions that write to their argument. A tuple of functions: torch.compile cannot trace a look-up by name.
_IN_PLACE = tuple(
    getattr(namespace, name)
    for namespace in (torch, torch.nn.functional, torch.nn.init, C_FUNCTIONS)
    for name in dir(namespace)
    if name.endswith("_") and not name.endswith("__")
)


#: Attributes for writing to a tensor or asking for its gradient: on a value computed on the fly, neither would have an
#: effect.
_IN_VAIN = ("data", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "backward", "grad")


class TensorLike:
    """An object that can be read as a tensor, its `value`, but not be written to in place.

    It is not a tensor to ``isinstance``: C++ would believe a ``__class__`` that says so, and read memory that is not
    there.
    """

    def value(self) -> Tensor:
        """The tensor that it stands for."""
        raise NotImplementedError

    def lent(self) -> Tensor:
        """`value`, for callers that may keep it, or views of it."""
        return self.value()

    def written_to(self, how: str) -> Exception:
        """The error for an attempt to write to it."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HIGHER_ORDER):  # torch.compile's form of activation checkpointing
            with WithoutTorchFunction():
                return func(*args, **kwargs)
        if func in _IN_PLACE or kwargs.get("inplace") or "out" in kwargs:
            leaves = pytree.tree_leaves((args, kwargs), is_leaf=_is_like)
            raise next(leaf for leaf in leaves if _is_like(leaf)).written_to(getattr(func, "__name__", str(func)))
        args, kwargs = pytree.tree_map(_value_of, (args, kwargs), is_leaf=_is_like)
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.endswith("_") or name in _IN_VAIN:
            raise self.written_to(name)
        return getattr(self.lent(), name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.lent()[index]

    def __setitem__(self, index: object, value: object) -> None:
        raise self.written_to("an assignment to its elements")

    def __len__(self) -> int:
        return len(self.value())

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.lent())


def _is_like(value: object) -> bool:
    return isinstance(value, TensorLike)


def _value_of(value: object) -> Any:
    return value.lent() if isinstance(value, TensorLike) else value


def _operator(name: str) -> Any:
    def apply(self: TensorLike, *others: object) -> Any:
        return getattr(torch.Tensor, name)(self.lent(), *map(_value_of, others))

    return apply


for _name in (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "matmul", "rmatmul", "neg", "abs"),
    *("eq", "ne", "lt", "le", "gt", "ge"),
):
    setattr(TensorLike, f"__{_name}__", _operator(f"__{_name}__"))
