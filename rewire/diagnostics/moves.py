"""How far connection weights have moved, whether they still have a gradient, and when they stopped moving."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rewire.runtime.connection import Connection

#: Share of the way that may be left when weights count as settled.
_LEFT = 0.05
#: Share of the largest gradient below which a gradient counts as gone.
_GONE = 0.01


@dataclasses.dataclass(frozen=True)
class Look:
    """The connection weights of one trunk at some step.

    Attributes:
        step: the training step.
        moved: largest change of a stored weight since the start, at natural scales. For a softmax, a change of 1 is a
            factor of e between two of its weights.
        gradient: L2 norm of the gradient of all stored weights, as it is in ``.grad``; None if there is none.
        effective: the effective weights that do not depend on the input, flat, float32 on the CPU.
        stored: the learned weights, flat, at natural scales.
    """

    step: int
    moved: float
    gradient: float | None
    effective: Tensor
    stored: Tensor


@torch.no_grad()
def look(connection: Connection, start: dict[str, Tensor], step: int) -> Look:
    """Look at a connection whose learned weights started at ``start`` (`Connection.values`)."""
    units, values = connection.stored_in, connection.values()
    stored = _flat([value / units[name] for name, value in values.items()])
    began = _flat([start[name] / units[name] for name in values])
    moved = (stored - began).abs().max().item() if len(stored) else 0.0
    gradients = [p.grad for p in connection.parameters() if p.grad is not None]
    return Look(step, moved, _norm(gradients) if gradients else None, _flat([connection.matrix()]), stored)


def starts(connections: dict[str, Connection]) -> dict[str, dict[str, Tensor]]:
    """The present learned weights of each trunk, for later comparison."""
    return {
        trunk: {name: value.detach().clone() for name, value in connection.values().items()}
        for trunk, connection in connections.items()
    }


@dataclasses.dataclass(frozen=True)
class Moves:
    """How the connection weights of a run moved.

    Attributes:
        moved: as `Look.moved`, at the end.
        gradient: the last gradient over the largest; nan if there never was one.
        settled: the step from which on less than 5 % of the way to the end was left; 0 if they never moved.
    """

    moved: float
    gradient: float
    settled: int

    @property
    def saturated(self) -> bool:
        """Whether the gradient is gone, so that nothing more can be learned."""
        return self.gradient < _GONE

    def __str__(self) -> str:
        text = f"{self.moved:.2g}, 95% by step {self.settled}"
        return f"{text}, no gradient left" if self.saturated else text


def together(looks: Sequence[Look]) -> Look:
    """Combine looks at several trunks at one step."""
    gradients = [each.gradient for each in looks if each.gradient is not None]
    effective, stored = (torch.cat([getattr(each, name) for each in looks]) for name in ("effective", "stored"))
    moved = max(each.moved for each in looks)
    return Look(looks[0].step, moved, math.hypot(*gradients) if gradients else None, effective, stored)


def moves(looks: Sequence[Look]) -> Moves:
    """Summarise looks in order.

    The way is that of the effective weights, as the logits of a saturated softmax move on without effect. If all
    effective weights depend on the input, it is that of the stored weights.
    """
    way = [each.effective - looks[-1].effective for each in looks]
    if not way[0].any():
        way = [each.stored - looks[-1].stored for each in looks]
    left = [step.norm().item() for step in way]
    far = [each.step for each, distance in zip(looks, left, strict=True) if distance > _LEFT * left[0]]
    later = [each.step for each in looks if not far or each.step > far[-1]]
    gradients = [each.gradient for each in looks if each.gradient is not None]
    largest = max(gradients, default=0.0)
    return Moves(looks[-1].moved, gradients[-1] / largest if largest else math.nan, later[0] if left[0] else 0)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.empty(0), *(tensor.detach().float().flatten().cpu() for tensor in tensors)])


def _norm(gradients: list[Tensor]) -> float:
    norm = nn.utils.get_total_norm(gradients)
    whole: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # if the weight is sharded
    return whole.item()
