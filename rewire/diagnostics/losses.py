"""The loss of a batch, if the caller does not define one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import Tensor, nn

from rewire.errors import RewireError

#: A function from a model and a batch to a scalar.
Loss: TypeAlias = Callable[[Any, Any], Tensor]


def loss_of_model(model: nn.Module, batch: object) -> Tensor:
    """The loss that the model itself returns: ``model(**batch).loss``."""
    if not isinstance(batch, Mapping):
        raise RewireError(
            f"a batch is a {type(batch).__name__}, not a dict of the model's arguments: pass loss=, a function of "
            "(model, batch)."
        )
    loss = getattr(model(**batch), "loss", None)
    if loss is None:
        raise RewireError(
            f"{type(model).__name__} returned no loss: give it labels, or pass loss=, a function of (model, batch)."
        )
    return loss


def scalar(loss: Loss) -> Loss:
    """``loss``, checked to return a tensor of one number."""

    @functools.wraps(loss)
    def checked(model: object, batch: object) -> Tensor:
        found = loss(model, batch)
        if not isinstance(found, Tensor) or found.numel() != 1:
            what = f"a tensor of shape {[*found.shape]}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
            raise RewireError(f"the loss of a batch is {what}: it has to be a tensor of one number.")
        return found.reshape(())

    return checked
