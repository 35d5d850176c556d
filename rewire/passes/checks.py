"""What is refused before a model is searched: wrong choices, and models that cannot be rewired as they are."""

from __future__ import annotations

from collections.abc import Iterable

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
    """Refuse what cannot be rewired."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}.")
    check_unwrapped(model)
    for path, module in model.named_modules():
        if is_edited(module) or isinstance(module, Connection):
            where = f"'{path}'" if path else "the model"
            raise AlreadyRewired(f"{where} was rewired before: call rewire.restore(model) first.")


def check_unwrapped(model: nn.Module) -> None:
    """Refuse models that are sharded, wrapped, compiled or scripted.

    Raises:
        WrappedModel: saying which module is.
    """
    for path, module in model.named_modules():
        where = f"'{path}'" if path else "the model"
        if isinstance(module, torch.jit.ScriptModule):
            raise WrappedModel(
                f"{where} is TorchScript ({type(module).__name__}), which has no Python source to edit: rewire the "
                "model that it was made from, before torch.jit."
            )
        if isinstance(module, nn.DataParallel):
            raise WrappedModel(f"{where} is wrapped in DataParallel: rewire what is inside (.module), then wrap that.")
        kind = " ".join(cls.__name__ for cls in type(module).__mro__)
        if "FSDPModule" in kind or "FullyShardedDataParallel" in kind or "DistributedDataParallel" in kind:
            raise WrappedModel(f"{where} is already sharded or distributed: rewire the model first, then shard it.")
        if "PipelineIdentityLayer" in kind:
            raise WrappedModel(
                f"{where} stands for a layer of another pipeline stage (pp_size of transformers): rewire the whole "
                "model, cut it, and call rewire.pipeline_stage on each part."
            )
        if "OptimizedModule" in kind:
            raise WrappedModel(f"{where} is already compiled: rewire the model first, then torch.compile it.")
    if any(type(parameter).__name__ == "DTensor" for parameter in model.parameters()):
        raise WrappedModel("the model's parameters are already sharded: rewire the model first, then shard it.")


def on_meta(model: nn.Module) -> bool:
    """Whether any of its tensors is on the meta device."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def check_loaded(model: nn.Module, done: str) -> None:
    """Refuse models without values; ``done`` says what would be done to them.

    Raises:
        RewireError: it is on the meta device.
    """
    if on_meta(model):
        raise RewireError(f"{type(model).__name__} is on the meta device: load its weights before it is {done}.")


def check_not_cut(model: nn.Module, trunks: Iterable[Trunk]) -> None:
    """Refuse one stage of a pipeline: what its trunk had before and after would be missing from its streams.

    Raises:
        RewireError: modules around a trunk were taken away.
    """
    for trunk in trunks:
        owner = model.get_submodule(trunk.owner)
        gone = [name for name, child in children_of(owner).items() if child is None]
        if gone:
            raise RewireError(
                f"module '{gone[0]}' beside trunk '{trunk.name}' was set to None, as in one stage of a pipeline. "
                "Stages that are rewired one by one are networks of their own: rewire the whole model, cut it, and "
                f"call rewire.pipeline_stage on each part. If this is the whole model, say so: trunks=['{trunk.name}']."
            )
