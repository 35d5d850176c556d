"""What is refused before a model is searched: models that cannot be rewired as they are, and bad choices."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from rewire.code.edited import is_edited
from rewire.errors import AlreadyRewired, RewireError, WrappedModel
from rewire.runtime.connection import Connection
from rewire.torch_internals import children_of
from rewire.trunk import Trunk


def check_choices(granularity: str = "auto", start: str = "preserve", loop: str = "continue") -> None:
    if granularity not in ("auto", "block", "sublayer"):
        raise ValueError(f"granularity must be 'auto', 'block' or 'sublayer', not {granularity!r}.")
    if start not in ("preserve", "paper"):
        raise ValueError(f"start must be 'preserve' or 'paper', not {start!r}.")
    if loop not in ("continue", "restart"):
        raise ValueError(f"loop must be 'continue' or 'restart', not {loop!r}.")


def check_model(model: nn.Module) -> None:
    """Refuse a model that cannot be rewired."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}.")
    check_unwrapped(model)
    check_copies_know_their_modules(model)
    for path, module in model.named_modules():
        if is_edited(module) or isinstance(module, Connection):
            where = f"'{path}'" if path else "the model"
            raise AlreadyRewired(f"{where} was rewired before: call rewire.restore(model) first.")


def check_copies_know_their_modules(model: nn.Module) -> None:
    """Refuse attributes that identify modules in a way that fails in a copy, which would then behave differently.

    Raises:
        RewireError: saying which attribute does.
    """
    ids, own = {id(module) for module in model.modules()}, vars(nn.Module())
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            how = "" if name in own else _known_by(value, ids)
            if how:
                raise RewireError(
                    f"'{name}' of '{path or type(module).__name__}' knows modules by {how}, which does not work in a "
                    "copy, and rewire works on a copy. Store their names, or the modules themselves."
                )


def _known_by(value: Any, ids: set[int]) -> str:
    """How an attribute, or its content, identifies modules with these ids; empty if in no such way."""
    kind = type(value)  # isinstance would query a proxy whose object is gone
    if issubclass(kind, weakref.WeakKeyDictionary):
        return "weak references" if any(id(key) in ids for key in value) else ""
    items = [value, *(value if issubclass(kind, (dict, list, tuple, set, frozenset)) else ())]
    items += value.values() if issubclass(kind, dict) else ()
    if any(type(item) in weakref.ProxyTypes and id(_module_behind(item)) in ids for item in items):
        return "weak proxies"
    return "their id()" if any(type(item) is int and item in ids for item in items) else ""


def _module_behind(proxy: object) -> Any:
    """The module behind a weak proxy; None if it is no proxy, or the module is gone."""
    try:
        return getattr(getattr(proxy, "modules", None), "__self__", None)
    except ReferenceError:
        return None


#: Class of a wrapper -> what was done to the model, and the attribute that holds the model.
_WRAPPERS = {
    "DataParallel": ("wrapped in DataParallel", ".module"),
    "DistributedDataParallel": ("wrapped in DistributedDataParallel", ".module"),
    "FullyShardedDataParallel": ("already sharded", ""),
    "FSDPModule": ("already sharded", ""),
    "OptimizedModule": ("already compiled", "._orig_mod"),
}


def check_unwrapped(model: nn.Module) -> None:
    """Refuse models that are sharded, wrapped, compiled or scripted.

    Raises:
        WrappedModel: saying which module is, and what to do: a rewired model has to be unwrapped.
    """
    was_rewired = any(isinstance(module, Connection) for module in model.modules())
    for path, module in model.named_modules():
        where = f"'{path}'" if path else "the model"
        if isinstance(module, torch.jit.ScriptModule):
            raise WrappedModel(
                f"{where} is TorchScript ({type(module).__name__}), which has no Python source to edit: rewire "
                "the model that it was made from, before torch.jit."
            )
        kinds = [cls.__name__ for cls in type(module).__mro__]
        if "PipelineIdentityLayer" in kinds:
            raise WrappedModel(
                f"{where} stands for a layer of another pipeline stage (pp_size of transformers): rewire the whole "
                "model, cut it, and call rewire.pipeline_stage on each part."
            )
        for wrapper in kinds:
            if wrapper in _WRAPPERS:
                done, inside = _WRAPPERS[wrapper]
                raise WrappedModel(f"{where} is {done}: {_remedy(was_rewired, inside, path)}.")
    if any(type(parameter).__name__ == "DTensor" for parameter in model.parameters()):
        raise WrappedModel(f"the model's parameters are already sharded: {_remedy(was_rewired, '')}.")


def _remedy(was_rewired: bool, inside: str, path: str = "") -> str:
    """What to do with a wrapped model; ``inside`` is the wrapper's attribute that holds the model."""
    if was_rewired and inside:
        return f"put what is inside ({inside}) in its place" if path else f"pass the model that is inside ({inside})"
    if was_rewired:
        return "do this before the model is sharded"
    return f"rewire what is inside ({inside}), then wrap that" if inside else "rewire the model first, then shard it"


def on_meta(model: nn.Module) -> bool:
    """Whether any tensor of a model is on the meta device."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def check_loaded(model: nn.Module, done: str) -> None:
    """Refuse models without values; ``done`` says what they are needed for.

    Raises:
        RewireError: the model is on the meta device.
    """
    if on_meta(model):
        raise RewireError(f"{type(model).__name__} is on the meta device: load its weights before it is {done}.")


def check_not_cut(model: nn.Module, trunks: Iterable[Trunk]) -> None:
    """Refuse one stage of a pipeline: its streams would miss the earlier and later states of the trunk.

    Raises:
        RewireError: modules around a trunk were removed.
    """
    for trunk in trunks:
        owner = model.get_submodule(trunk.owner)
        gone = [name for name, child in children_of(owner).items() if child is None]
        if gone:
            raise RewireError(
                f"module '{gone[0]}' beside trunk '{trunk.name}' was set to None, as in a pipeline stage. Stages that "
                "are rewired one by one would not be connected with each other: rewire the whole model, cut it, and "
                f"call rewire.pipeline_stage on each part. If this is the whole model, pass trunks=['{trunk.name}']."
            )
