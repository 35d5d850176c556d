"""A topology whose attentions have separate q/k/v inputs, and what shows that they do.

Told without knowing any layout: with all biases zero, keys of zero make the attention's weights uniform, whatever the
queries are; queries of zero do so whatever the keys are; values of zero make its output zero, whatever both are.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

import rewire
from rewire.passes.find import find
from rewire.passes.finding.projections import Projections, find_projections
from rewire.passes.inputs import normalise_inputs
from rewire.passes.prepare import prepare
from rewire.passes.validating.tensors import relative_error, tensors_in
from rewire.patterns import first_given, patterns_for
from rewire.topologies.base import Dims, Start, States, total


@dataclasses.dataclass(frozen=True)
class Apart(rewire.Recurrence):
    """The plain residual network, except that way w of an attention reads ``a_w x + b_w flip(x)``."""

    reads_qkv = True

    def parameters(self, dims: Dims, start: Start) -> dict[str, Tensor]:
        return {"ways": torch.tensor([[1.0, 0.0]] * 3)}

    def weights(self, parameters: dict[str, Tensor], dims: Dims) -> Any:
        return parameters["ways"], dims.attention

    def read(self, states: States, weights: Any, t: int) -> tuple[Tensor | rewire.QKVInputs, States]:
        (x,), (ways, attention) = states, weights
        if t not in attention:
            return x, states
        q, k, v = (a.to(x.dtype) * x + b.to(x.dtype) * x.flip(-1) for a, b in ways)
        return rewire.QKVInputs(q, k, v, x), states

    def merge(self, states: States, weights: Any, t: int, *branches: Tensor) -> Tensor:
        return states[0] + total(branches)

    def push(self, states: States, weights: Any, t: int, x: Tensor) -> States:
        return (x,)

    def finish(self, states: States, weights: Any, dims: Dims) -> Tensor:
        return states[0]

    def matrix(self, weights: Any, dims: Dims) -> Tensor:
        return torch.eye(dims.depth)


ZERO, SAME, OTHER = (0.0, 0.0), (1.0, 0.0), (0.0, 1.0)


class Reader:
    """A rewired model without biases, run with given reads."""

    def __init__(self, model: nn.Module, example_inputs: Any = None) -> None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias") and "relative" not in name:
                    parameter.zero_()
        make = first_given(patterns_for(model), "example_inputs")
        self.inputs = make(model) if example_inputs is None else normalise_inputs(example_inputs)
        self.model = model.eval()
        self.rewired = rewire.compile(model, Apart(), example_inputs=example_inputs)  # compares it with the original

    def __call__(self, q: Any, k: Any, v: Any) -> Tensor:
        with torch.no_grad():
            for connection in rewire.connections(self.rewired).values():
                connection.get_parameter("ways").copy_(torch.tensor([q, k, v]))
            output = tensors_in(self.rewired(*self.inputs[0], **self.inputs[1]))
        return torch.cat([t.flatten() for t in output if t.is_floating_point()])


def check_reads(read: Reader) -> None:
    plain = read(SAME, SAME, SAME)
    for way in range(3):  # each of the three matters
        ways = [OTHER if n == way else SAME for n in range(3)]
        assert relative_error(plain, read(*ways)) > 1e-4, way
    assert relative_error(read(SAME, ZERO, SAME), read(OTHER, ZERO, SAME)) < 1e-6
    assert relative_error(read(ZERO, SAME, SAME), read(ZERO, OTHER, SAME)) < 1e-6
    assert relative_error(read(SAME, SAME, ZERO), read(OTHER, OTHER, ZERO)) < 1e-6


def projections_of(model: nn.Module, inputs: Any, *patterns: rewire.Pattern) -> Projections:
    """What the finder says of the first attention."""
    found = find(prepare(model, inputs)).evaluation
    name, chain = next(iter(found.chains.items()))
    return find_projections(found.flow, found.trunks[name].sites[0], patterns, chain.adds[0])
