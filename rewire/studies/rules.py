"""Fixed rules: connection weights without learning, close to what a topology learns."""

from __future__ import annotations

import torch
from torch import Tensor

from rewire.runtime.connection import Connection
from rewire.topologies.ancre import ANCRe
from rewire.topologies.scaled_sum import ScaledSum
from rewire.topologies.scaling import BranchScale

#: A logit so far above all others, in temperatures, that the softmax picks its choice alone.
_CHOSEN = 30.0


def fixed_rule(connection: Connection) -> dict[str, Tensor] | None:
    """The fixed rule closest to a connection's learned weights, as weights by name; None if no rule is known.

    - ANCRe as a difference: ``P = E + e_{t-1} - 1/t``, its softmaxes at the newest state. It adds to the plain network
      the newest state less the mean, which amplifies recent branches without learning.
    - Scales of branches and shortcuts: their mean over the depth, at each depth.
    """
    topology, learned = connection.layout.topology, connection.values()
    if isinstance(topology, ANCRe) and topology.form == "difference":
        chosen = _CHOSEN * topology.temperature
        rows = [torch.zeros(count) for count in topology.sizes(connection.layout.dims)]
        for row in rows:
            row[-1] = chosen  # sources ascend: the last is the newest
        return {"logits": torch.cat(rows).to(learned["logits"].device)}
    if isinstance(topology, BranchScale | ScaledSum):
        return {name: value.detach().mean(0, keepdim=True).expand_as(value) for name, value in learned.items()}
    return None
