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
    """A branch that notes what it reads, [N, D]."""

    def __init__(self, block: Any, attention: bool, reads: list[Tensor]) -> None:
        self.block, self.attention, self.reads = block, attention, reads

    def __call__(self, *inputs: Tensor) -> Tensor:
        self.reads.append(inputs[-1])
        return self.block(*inputs)  # type: ignore[no-any-return]


def by_reference(
    topology: Topology, parameters: Mapping[str, Tensor], x: Tensor, blocks: Sequence[Any], dims: Dims | None = None
) -> tuple[Tensor, list[Tensor]]:
    """The output, and what each unit reads, of x [.., D]; gradients reach the parameters."""
    name, options = name_and_options(topology)
    known = reference(name)
    given = {"start" if name == "layerscale" and option == "eps" else option: v for option, v in options.items()}
    chosen = known.with_options({option: value for option, value in given.items() if option in known.options})
    dims, reads = dims or Dims(len(blocks), x.shape[-1]), list[Tensor]()
    branches = [Called(block, t in dims.attention, reads) for t, block in enumerate(blocks, start=1)]
    output = known.forward(
        x.reshape(-1, x.shape[-1]), unpacked(name, parameters, dims, chosen), branches, lambda state: state, **chosen
    )
    return output.view(x.shape), [read.view(x.shape) for read in reads]


def unpacked(name: str, parameters: Mapping[str, Tensor], dims: Dims, options: Mapping[str, Any]) -> dict[str, Tensor]:
    """The weights of a reference, float64, of those of the topology.

    Each of the latter is one of the former, in another place: the way back is the transpose of the way there.
    """
    known = reference(name)
    empty = known.parameters(dims.depth, dims.width, dims.attention, **options)
    weights = {n: torch.zeros_like(value, requires_grad=True) for n, value in empty.items()}
    there = packed(known.file, weights, dims, options)
    if not there:
        return {}
    values = [parameters[n].double() if n in parameters else torch.zeros_like(value) for n, value in there.items()]
    back = torch.autograd.grad(
        list(there.values()), list(weights.values()), values, create_graph=True, allow_unused=True
    )
    return {n: torch.zeros_like(w) if b is None else b for (n, w), b in zip(weights.items(), back, strict=True)}
