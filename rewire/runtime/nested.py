"""Arguments and results with tensors and streams somewhere inside them: in containers and dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from rewire.runtime.stream import Stream


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """``value`` with tensors and streams in it changed; the same object if none is. Dictionaries change in place."""
    if isinstance(value, (Tensor, Stream)):
        return change(value)
    if isinstance(value, (tuple, list)):
        items = [mapped(item, change) for item in value]
        return value if all(new is old for new, old in zip(items, value, strict=True)) else like(value, items)
    if isinstance(value, dict):
        for key in list(value):
            new = mapped(value[key], change)
            if new is not value[key]:
                value[key] = new
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = vars(value) if hasattr(value, "__dict__") else {}
        fields = [field.name for field in dataclasses.fields(value) if field.init and field.name in held]
        changed = {name: mapped(held[name], change) for name in fields}
        changed = {name: new for name, new in changed.items() if new is not held[name]}
        return dataclasses.replace(value, **changed) if changed else value
    return value


def tensors_and_streams(value: Any) -> list[Any]:
    """The tensors and streams in a value, in the order in which `mapped` comes to them."""
    found: list[Any] = []

    def keep(part: Any) -> Any:
        found.append(part)
        return part

    mapped(value, keep)
    return found


def with_item(value: Any, item: int | None, change: Callable[[Any], Any]) -> Any:
    """``change(value)``; of a tuple or list, if ``item`` is a number, the tensor of that number in it changed."""
    if item is None or not isinstance(value, (tuple, list)):
        return change(value)
    items = list(value)
    number = [n for n, part in enumerate(items) if isinstance(part, Tensor)][item]
    items[number] = change(items[number])
    return like(value, items)


def like(value: Any, items: Sequence[Any]) -> Any:
    """A tuple, named tuple or list like ``value``, of other items."""
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
