"""The costs of a rewired model beside the plain one: counted, and measured if there are inputs."""

from __future__ import annotations

import copy
import dataclasses
import functools

import torch
from torch import Tensor, nn

from rewire.bench.harness import Timing, kept_for_backward, side_by_side, training_step
from rewire.copies import Inputs
from rewire.freezing import most_held, weights_of
from rewire.passes.inputs import normalise_inputs
from rewire.passes.rewrite import restore
from rewire.passes.validating.tensors import tensors_in
from rewire.runtime.connection import Connection

_ROUNDS = 7


@dataclasses.dataclass(frozen=True)
class Measured:
    """Training steps (forward and backward) of the plain and the rewired model, timed in turn.

    Attributes:
        plain, rewired: their times.
        kept: bytes of activations that a forward keeps for its backward, of the plain and the rewired model.
        device: the device.
    """

    plain: Timing
    rewired: Timing
    kept: tuple[int, int]
    device: torch.device

    @property
    def noisy(self) -> bool:
        """Whether the models differ by less than their rounds do: the middle halves of the times overlap."""
        (plain, slow), (rewired, slower) = self.plain.quartiles, self.rewired.quartiles
        return plain <= slower and rewired <= slow


def states_held(connection: Connection) -> int:
    """The largest number of hidden states that a trunk holds between units; the plain model holds one."""
    layout = connection.layout
    with torch.no_grad():
        return most_held(layout.topology, weights_of(connection), layout.dims)


def measured(model: nn.Module, example_inputs: object) -> Measured:
    """Time steps of copies: the model, its gradients and the random state stay as they are."""
    inputs = normalise_inputs(example_inputs)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    with torch.random.fork_rng():
        rewired = copy.deepcopy(model).train()
        models = {"plain": restore(rewired).train(), "rewired": rewired}
        kept = {name: kept_for_backward(each, functools.partial(_loss, each, inputs)) for name, each in models.items()}
        steps = {name: training_step(each, inputs) for name, each in models.items()}
        times = side_by_side(steps, _ROUNDS, device)
    return Measured(times["plain"], times["rewired"], (kept["plain"], kept["rewired"]), device)


def _loss(model: nn.Module, inputs: Inputs) -> Tensor:
    output = model(*inputs[0], **inputs[1])
    return sum(x.float().square().mean() for x in tensors_in(output) if x.is_floating_point())  # type: ignore[return-value]
