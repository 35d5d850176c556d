"""Fixed rules: connection weights that nobody has to learn, nearest to what a topology learns."""

from __future__ import annotations

import torch
from torch import Tensor

from rewire.runtime.connection import Connection
from rewire.topologies.ancre import ANCRe
from rewire.topologies.scaled_sum import ScaledSum
from rewire.topologies.scaling import BranchScale

#: A logit so far above all others, in temperatures, that the softmax is at one choice.
_CHOSEN = 30.0


def fixed_rule(connection: Connection) -> dict[str, Tensor] | None:
    """Weights by the nearest fixed rule, by name, for a connection whose weights have been learned; None: none known.

    - ANCRe as a difference: ``P = E + e_{t-1} - 1/t``, its softmaxes at the newest state. What it adds to the plain
      network is the newest state less the mean, which amplifies recent branches with nothing learned.
    - Scales of branches and shortcuts: their mean over the depth, at each depth.
    """
    topology, learned = connection.layout.topology, connection.values()
    if isinstance(topology, ANCRe) and topology.form == "difference":
        chosen = _CHOSEN * topology.temperature
        rows = [torch.zeros(count) for count in topology.sizes(connection.layout.dims)]
        for row in rows:
            row[-1] = chosen  # sources ascend: the newest is the last
        return {"logits": torch.cat(rows).to(learned["logits"].device)}
    if isinstance(topology, BranchScale | ScaledSum):
        return {name: value.detach().mean(0, keepdim=True).expand_as(value) for name, value in learned.items()}
    return None
