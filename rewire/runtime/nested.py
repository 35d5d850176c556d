"""Maps over arguments and results that have tensors and streams inside containers, dataclasses and other objects."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from types import MemberDescriptorType, SimpleNamespace
from typing import Any, TypeAlias

from torch import Tensor, nn

from rewire.runtime.stream import Stream
from rewire.topologies.base import QKVInputs

#: What leads to a tensor in a container: indices, keys and fields; or its number among the tensors and streams there.
Item: TypeAlias = int | tuple[int | str, ...]
#: Types of what stands beside tensors most often.
_PLAIN = (type(None), bool, int, float, str)
#: How classes set attributes that leave that to Python.
_SETTERS: tuple[Any, ...] = (object.__setattr__, SimpleNamespace.__setattr__)


def mapped(value: Any, change: Callable[[Any], Any], fresh: bool = False) -> Any:
    """Apply ``change`` to all tensors and streams in ``value``; returns the same object if nothing changes.

    Args:
        value: a tensor or stream, or tuples, lists, dicts and dataclasses of these, or another object that holds some:
            see `parts_by_name`.
        change: called with each tensor or stream.
        fresh: whether to copy changed lists and objects. Otherwise they change in place, as dicts always do, since
            their other holders may read them. Changed tuples and frozen dataclasses are always copied.
    """
    if isinstance(value, (Tensor, Stream)):
        return change(value)
    if isinstance(value, (tuple, list)):
        items = [mapped(item, change, fresh) for item in value]
        if _same(items, value):
            return value
        if fresh or isinstance(value, tuple):
            return like(value, items)
        value[:] = items
        return value
    if isinstance(value, dict):
        for key in list(value):
            new = mapped(value[key], change, fresh)
            if not _same(new, value[key]):
                value[key] = new
        return value
    held = parts_by_name(value)
    changed = {name: mapped(item, change, fresh) for name, item in held.items()}
    changed = {name: new for name, new in changed.items() if not _same(new, held[name])}
    return _with_parts(value, changed, fresh) if changed else value


def is_container(value: object) -> bool:
    """Whether `mapped` looks inside ``value``."""
    return isinstance(value, (tuple, list, dict)) or bool(parts_by_name(value))


def _same(new: Any, old: object) -> bool:
    """Whether nothing was changed; compares tuples and lists by item, as Dynamo does not know their identity."""
    if isinstance(old, (tuple, list)):
        return all(_same(one, other) for one, other in zip(new, old, strict=True))
    return new is old


def _is_instance_of_dataclass(value: object) -> bool:
    if value is None or isinstance(value, type):  # None: Dynamo 2.11 cannot inspect its class
        return False
    return dataclasses.is_dataclass(value)


def parts_by_name(value: Any) -> dict[Any, Any]:
    """What `mapped` looks at in an object that is no tuple, list or dict.

    The init arguments of a dataclass; the tensors and streams in the attributes of an object whose class sets them as
    Python does; or those that are set and read by key (a batch of PyTorch Geometric). In all others there is nothing.
    """
    cls = type(value)
    if cls in _PLAIN or isinstance(value, (Tensor, Stream)):
        return {}
    if _is_instance_of_dataclass(value):
        held = attributes(value)
        fields = dataclasses.fields(value)
        return {field.name: held[field.name] for field in fields if field.init and field.name in held}
    if _has_keys(cls):
        return {key: value[key] for key in value.keys() if isinstance(value[key], (Tensor, Stream))}  # noqa: SIM118
    if cls.__setattr__ not in _SETTERS or not hasattr(value, "__dict__"):
        return {}
    return {name: item for name, item in vars(value).items() if isinstance(item, (Tensor, Stream))}


def _has_keys(cls: type) -> bool:
    wanted = ("keys", "__getitem__", "__setitem__", "__contains__")
    return not issubclass(cls, (dict, nn.Module)) and all(callable(getattr(cls, name, None)) for name in wanted)


def _with_parts(value: Any, changed: dict[Any, Any], fresh: bool) -> Any:
    """An object with other parts, by name: the same one, or a copy where it is frozen or has to be ``fresh``."""
    if _is_instance_of_dataclass(value) and (fresh or type(value).__dataclass_params__.frozen):
        return dataclasses.replace(value, **changed)
    value = copy.copy(value) if fresh else value
    for name, new in changed.items():
        if _has_keys(type(value)):
            value[name] = new
        else:
            setattr(value, name, new)
    return value


def attributes(value: Any) -> dict[str, Any]:
    """The fields of a dataclass instance, by name, read without running its class's code, which may raise."""
    held = vars(value) if hasattr(value, "__dict__") else {}
    names = [field.name for field in dataclasses.fields(value) if field.name not in held]
    slots = [name for name in names if isinstance(getattr(type(value), name, None), MemberDescriptorType)]
    return {**held, **{name: getattr(value, name) for name in slots if hasattr(value, name)}}


def along(passing: Any, value: Any, change: Callable[[Any, Any], Any]) -> Any:
    """``value`` with ``change(stream, item)`` for each item at whose place ``passing`` has a stream.

    Changed containers are copied; ``value`` itself is not changed.
    """
    if isinstance(passing, (Stream, QKVInputs)):
        return change(passing, value)
    if isinstance(passing, (tuple, list)) and isinstance(value, (tuple, list)):
        if len(passing) != len(value):
            return value
        items = [along(part, item, change) for part, item in zip(passing, value, strict=True)]
        return value if _same(items, value) else like(value, items)
    if isinstance(passing, dict) and isinstance(value, dict):
        made = {key: along(passing[key], item, change) for key, item in value.items() if key in passing}
        made = {key: new for key, new in made.items() if not _same(new, value[key])}
        changed = (value.copy() if type(value) is dict else copy.copy(value)) if made else value  # for Dynamo
        for key, new in made.items():
            changed[key] = new
        return changed
    if type(passing) is type(value):
        held = parts_by_name(value)
        pairs = {name: (item, held[name]) for name, item in parts_by_name(passing).items() if name in held}
        made = {name: along(*pair, change) for name, pair in pairs.items()}
        made = {name: new for name, new in made.items() if not _same(new, held[name])}
        return _with_parts(value, made, fresh=True) if made else value
    return value


def tensors_and_streams(value: object) -> list[Any]:
    """The tensors and streams in a value, in the order of `mapped`."""
    found: list[Any] = []

    def keep(part: object) -> Any:
        found.append(part)
        return part

    mapped(value, keep)
    return found


def at(value: Any, item: Item) -> Any:
    """What an item leads to in a value; None if nothing is there."""
    if isinstance(item, int):
        return next(iter(tensors_and_streams(value)[item:]), None)
    for key in item:
        if isinstance(value, (tuple, list)):
            value = dict(enumerate(value))
        elif not isinstance(value, dict):
            value = attributes(value) if _is_instance_of_dataclass(value) else parts_by_name(value)
        value = value.get(key)
    return value


def with_item(value: object, item: Item | None, change: Callable[[Any], Any]) -> Any:
    """``change(value)``; for a tuple or list, the same with one item changed: by default its only tensor."""
    if not isinstance(value, (tuple, list)) or item == ():
        return change(value)
    items = list(value)
    if not isinstance(item, tuple):
        tensors = [n for n, part in enumerate(items) if isinstance(part, (Tensor, Stream))][item or 0 :]
        if not tensors or (item is None and len(tensors) != 1):
            return change(value)
        item = (tensors[0],)
    index, *inside = item
    if not isinstance(index, int) or index >= len(items):
        return change(value)
    items[index] = with_item(items[index], tuple(inside), change)
    return like(value, items)


def like(value: Any, items: Sequence[object]) -> Any:
    """A tuple, named tuple or list of the type of ``value``, with other items."""
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
