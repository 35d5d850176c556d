"""What a study trains: a `Task`, which the user writes, and the budget of one run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rewire.diagnostics.losses import loss_of_model
from rewire.training import Groups


def adamw(groups: Groups) -> torch.optim.Optimizer:
    """AdamW with betas of 0.9 and 0.95."""
    return torch.optim.AdamW(groups, betas=(0.9, 0.95))


@dataclasses.dataclass(frozen=True)
class Task:
    """A model, its data and how it is trained: what `rewire.study` compares topologies on.

    Attributes:
        model: makes the model; its weights come from torch's global generator, which the study seeds.
        batches: batches to train on, for a seed: an iterable that does not end before the budget does.
        validation: batches that are held out; the loss that is compared is their mean.
        loss: of (model, batch), a scalar; default: ``model(**batch).loss``.
        optimizer: makes one of parameter groups, which have their rate and weight decay; default: AdamW.
        learning_rate: of the plain model, where the search begins. Rates are warmed up over the first tenth of the
            budget and fall to a tenth by a cosine.
        weight_decay: of all but the connection weights.
        clip: largest norm of the gradients of all parameters together.

    Raises:
        ValueError: the rate or ``clip`` is not positive, or there is nothing to validate on.

    Example:
        >>> task = rewire.Task(
        ...     model=lambda: torch.nn.Sequential(Block(8), Block(8), Block(8)),
        ...     batches=lambda seed: ((torch.randn(4, 8), torch.randn(4, 8)) for _ in range(1000)),
        ...     validation=[(torch.randn(16, 8), torch.randn(16, 8))],
        ...     loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        ... )
    """

    model: Callable[[], nn.Module]
    batches: Callable[[int], Iterable[Any]]
    validation: Sequence[Any]
    loss: Callable[[nn.Module, Any], Tensor] = loss_of_model
    optimizer: Callable[[Groups], torch.optim.Optimizer] = adamw
    learning_rate: float = 1e-3
    weight_decay: float = 0.1
    clip: float = 1.0

    def __post_init__(self) -> None:
        for name in ("learning_rate", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)!r}: it has to be a positive number.")
        if not len(self.validation):
            raise ValueError("validation is empty: there is nothing to compare losses on.")


@dataclasses.dataclass(frozen=True)
class Budget:
    """How long one run trains: a number of steps, or seconds of training without evaluation; the first that is spent.

    Raises:
        ValueError: neither is given, or one is not positive.
    """

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        given = [value for value in (self.steps, self.seconds) if value is not None]
        if not given or min(given) <= 0:
            raise ValueError(f"a run needs a positive number of steps or seconds, not {self.steps} and {self.seconds}.")

    def times(self, length: float) -> Budget:
        """A budget that is ``length`` times as long."""
        steps = None if self.steps is None else max(1, round(self.steps * length))
        return Budget(steps, None if self.seconds is None else self.seconds * length)

    def spent(self, steps: int, seconds: float) -> float:
        """The part of the budget that is spent, from 0 to 1."""
        parts = [steps / self.steps if self.steps else 0.0, seconds / self.seconds if self.seconds else 0.0]
        return min(1.0, max(parts))
