"""Parameter groups for optimisers: connection weights get settings of their own."""

from __future__ import annotations

from typing import Any

from torch import nn

from rewire.connection import connections


def parameter_groups(
    model: nn.Module, *, lr: float, weight_decay: float, connection_lr: float | None = None
) -> list[dict[str, Any]]:
    """Parameters of ``model`` for a torch optimiser, the connection weights in a group of their own, without decay.

    Weight decay would pull them towards 0, which is no neutral value: logits towards equal weights, scales towards
    branches that are switched off. Works on sharded and on plain models, too, and after adapters were added: parameters
    without gradients are left out.

    Args:
        model: the model, rewired or not.
        lr: learning rate.
        weight_decay: of all but the connection weights.
        connection_lr: learning rate of the connection weights; default: ``lr``.

    Returns:
        Groups for ``torch.optim.AdamW(groups)``: all other parameters, then the connection weights; none is empty.
    """
    learned = {id(p): p for connection in connections(model).values() for p in connection.parameters()}
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in learned]
    own = [p for p in learned.values() if p.requires_grad]
    rate = lr if connection_lr is None else connection_lr
    groups = [
        {"params": others, "lr": lr, "weight_decay": weight_decay},
        {"params": own, "lr": rate, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
