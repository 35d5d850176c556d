"""What a topology computes, by the reference of its scheme."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rewire.conformance import reference
from rewire.conformance.ours import packed
from rewire.topologies import Topology
from rewire.topologies.base import Dims
from rewire.topologies.registry import name_and_options


class Called:
    """A branch that notes what it reads; it takes hidden states of another shape than the reference does."""

    def __init__(self, block: Any, attention: bool, shape: torch.Size, reads: list[Tensor]) -> None:
        self.block, self.attention, self.shape, self.reads = block, attention, shape, reads

    def __call__(self, *inputs: Tensor) -> Tensor:
        inputs = tuple(value.view(self.shape) for value in inputs)
        self.reads.append(inputs[-1])
        f: Tensor = self.block(*inputs)
        return f.reshape(-1, f.shape[-1])


def by_reference(
    topology: Topology, parameters: Mapping[str, Tensor], x: Tensor, blocks: Sequence[Any], dims: Dims | None = None
) -> tuple[Tensor, list[Tensor]]:
    """The output, and what each unit reads, of x [.., D]; gradients reach the parameters."""
    name, options = name_and_options(topology)
    known = reference(name)
    given = {"start" if name == "layerscale" and option == "eps" else option: v for option, v in options.items()}
    chosen = known.with_options({option: value for option, value in given.items() if option in known.options})
    dims, reads = dims or Dims(len(blocks), x.shape[-1]), list[Tensor]()
    branches = [Called(block, t in dims.attention, x.shape, reads) for t, block in enumerate(blocks, start=1)]
    weights = unpacked(name, parameters, dims, chosen)
    output = known.forward(x.reshape(-1, x.shape[-1]), weights, branches, lambda state: state, **chosen)
    return output.view(x.shape), reads


def unpacked(name: str, parameters: Mapping[str, Tensor], dims: Dims, options: Mapping[str, Any]) -> dict[str, Tensor]:
    """The weights of a reference, float64, of those of the topology.

    Each of the latter is one of the former, in another place: the way back is the transpose of the way there.
    """
    known = reference(name)
    empty = known.parameters(dims.depth, dims.width, dims.attention, **options)
    weights = {n: torch.zeros_like(value, requires_grad=True) for n, value in empty.items()}
    there = {n: value for n, value in packed(known.file, weights, dims, options).items() if value.requires_grad}
    if not there:
        return weights
    values = [parameters[n].double() if n in parameters else torch.zeros_like(value) for n, value in there.items()]
    ends, starts = list(there.values()), list(weights.values())
    back = torch.autograd.grad(ends, starts, values, create_graph=True, materialize_grads=True)
    return dict(zip(weights, back, strict=True))
