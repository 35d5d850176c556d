"""What a study trains: a `Task`, which the user writes, and the budget of one run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rewire.diagnostics.losses import loss_of_model
from rewire.errors import RewireError
from rewire.torch_internals import pytree
from rewire.training import Groups


def adamw(groups: Groups) -> torch.optim.Optimizer:
    """AdamW with betas of 0.9 and 0.95."""
    return torch.optim.AdamW(groups, betas=(0.9, 0.95))


def positive(value: object) -> bool:
    """Whether a value is a positive, finite number."""
    return isinstance(value, int | float) and 0 < value < math.inf


@dataclasses.dataclass(frozen=True)
class Task:
    """A model, its data and how it is trained: what `rewire.study` compares topologies on.

    Attributes:
        model: makes a new model at each call; its weights come from torch's global generator, which the study seeds.
        batches: from a seed, on which alone they depend, an iterable of training batches that does not end before the
            budget does.
        validation: a list of held-out batches; the compared loss is their mean.
        loss: of (model, batch), a scalar; default: ``model(**batch).loss``.
        optimizer: makes one from parameter groups, which have their rate and weight decay; default: AdamW.
        learning_rate: of the plain model, where the search begins. Rates are warmed up over the first tenth of the
            budget and fall to a tenth by a cosine.
        weight_decay: of all but the connection weights.
        clip: largest norm of the gradients of all parameters together.

    Raises:
        ValueError: the rate or ``clip`` is not positive, or there is nothing to validate on.
        TypeError: a function is none, or ``validation`` cannot be read again and again.

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
        if isinstance(self.model, nn.Module):
            raise TypeError(
                f"model is a {type(self.model).__name__}: give a function that makes a new one at each call."
            )
        for name in ("model", "batches", "loss", "optimizer"):
            if not callable(getattr(self, name)):
                raise TypeError(f"{name} is a {type(getattr(self, name)).__name__}: it has to be a function.")
        for name in ("learning_rate", "clip"):
            if not positive(getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)!r}: it has to be a positive number.")
        if not hasattr(self.validation, "__len__") or isinstance(self.validation, Tensor | Mapping):
            kind = type(self.validation).__name__
            raise TypeError(f"validation is a {kind}: it has to be a list of batches, or a DataLoader.")
        if not len(self.validation):
            raise ValueError("validation is empty: there is nothing to compare losses on.")


def check_seeded(task: Task, seed: int) -> None:
    """Refuse a task whose weights and first batch are not determined by the seed: its runs could not be paired.

    Raises:
        RewireError: they differ from call to call, each run would go on where the last one ended, or there is no batch.
    """
    (first, batch), (again, other) = _begun(task, seed), _begun(task, seed)
    before, after = [*first.parameters()], [*again.parameters()]
    if {*map(id, before)} & {*map(id, after)}:
        raise RewireError(
            "the task's model() gives the same weights at each call, so that a run would go on where the last one "
            "ended: let it make a new model, or return a deep copy."
        )
    if not _equal(before, after):
        raise RewireError(
            "the task's model() gives other weights at each call with the same seed: let them come from torch's global "
            "generator, which the study seeds."
        )
    if not _equal(batch, other):
        raise RewireError(f"batches({seed}) gives another first batch at each call: let batches follow from the seed.")


def _begun(task: Task, seed: int) -> tuple[nn.Module, Any]:
    """The model and the first batch of a run."""
    torch.manual_seed(seed)
    model = task.model()
    if not isinstance(model, nn.Module):
        raise RewireError(f"the task's model() gives a {type(model).__name__}, not a torch.nn.Module.")
    for batch in task.batches(seed):
        return model, batch
    raise RewireError(f"batches({seed}) has no batch.")


def _equal(first: object, second: object) -> bool:
    """Whether both hold as many tensors, with the same shapes and numbers."""
    leaves, others = ([x for x in pytree.tree_leaves(of) if isinstance(x, Tensor)] for of in (first, second))
    return len(leaves) == len(others) and all(
        a.shape == b.shape and bool(torch.isclose(a, b, rtol=0, atol=0, equal_nan=True).all())
        for a, b in zip(leaves, others, strict=True)
    )


@dataclasses.dataclass(frozen=True)
class Budget:
    """How long one run trains: a number of steps, or seconds of training without evaluation; whichever ends first.

    Raises:
        ValueError: neither is given, or one is not positive.
    """

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        given = [value for value in (self.steps, self.seconds) if value is not None]
        if not given or not all(map(positive, given)):
            raise ValueError(f"a run needs a positive number of steps or seconds, not {self.steps} and {self.seconds}.")

    def times(self, length: float) -> Budget:
        """A budget that is ``length`` times as long."""
        steps = None if self.steps is None else max(1, round(self.steps * length))
        return Budget(steps, None if self.seconds is None else self.seconds * length)

    def spent(self, steps: int, seconds: float) -> float:
        """The share of the budget that is spent, from 0 to 1."""
        parts = [steps / self.steps if self.steps else 0.0, seconds / self.seconds if self.seconds else 0.0]
        return min(1.0, max(parts))
