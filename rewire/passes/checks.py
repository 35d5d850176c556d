"""What is refused before anything is looked at: wrong choices, and models that cannot be rewired as they are."""

from __future__ import annotations

from torch import nn

from rewire.connection import Connection
from rewire.errors import AlreadyRewired, ShardedModel
from rewire.passes.install import is_edited


def check_choices(granularity: str, start: str) -> None:
    if granularity not in ("auto", "block", "sublayer"):
        raise ValueError(f"granularity must be 'auto', 'block' or 'sublayer', not {granularity!r}.")
    if start not in ("preserve", "paper"):
        raise ValueError(f"start must be 'preserve' or 'paper', not {start!r}.")


def check_model(model: nn.Module) -> None:
    """Refuse what cannot be rewired."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}.")
    check_whole(model)
    for path, module in model.named_modules():
        if is_edited(module) or isinstance(module, Connection):
            where = f"'{path}'" if path else "the model"
            raise AlreadyRewired(f"{where} was rewired before: call rewire.restore(model) first.")


def check_whole(model: nn.Module) -> None:
    """Refuse models that are sharded, wrapped or compiled.

    Raises:
        ShardedModel: saying which module is.
    """
    for path, module in model.named_modules():
        where = f"'{path}'" if path else "the model"
        kind = " ".join(cls.__name__ for cls in type(module).__mro__)
        if "FSDPModule" in kind or "FullyShardedDataParallel" in kind or "DistributedDataParallel" in kind:
            raise ShardedModel(f"{where} is already sharded or distributed: rewire the model first, then shard it.")
        if "OptimizedModule" in kind:
            raise ShardedModel(f"{where} is already compiled: rewire the model first, then torch.compile it.")
    if any(type(parameter).__name__ == "DTensor" for parameter in model.parameters()):
        raise ShardedModel("the model's parameters are already sharded: rewire the model first, then shard it.")
