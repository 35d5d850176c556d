"""Skips from the first half of the units to the second: modded-nanogpt's."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from rewire.errors import UnsupportedTopology
from rewire.mixes.mix import mix
from rewire.topologies.base import Dims, Granularity, Recurrence, Start, States, total
from rewire.topologies.program import Program, Term, mixed_reads
from rewire.topologies.registry import register_topology


class Skips(NamedTuple):
    """Effective weights of the skips.

    Attributes:
        scales: l, float32 [T // 2], of the last units, ascending.
        first: the first unit that has a skip; the states ``x_1 .. x_{T//2}`` are kept for it and those after it.
    """

    scales: Tensor
    first: int


@register_topology("unet")
@dataclasses.dataclass(frozen=True)
class UNet(Recurrence[Skips]):
    """A learned skip from each unit of the first half to its partner in the second, as in a U-net (modded-nanogpt).

    ``r_t = x_{t-1} + l_t x_{T+1-t}`` in the last ``T // 2`` units, else ``r_t = x_{t-1}``; ``x_t = r_t + f_t``; the
    trunk's output is ``x_T``. (modded-nanogpt's train_gpt.py of 2025, ``skip_weights``.) So units are paired from the
    outside in: the last one gets what the first one left. Of an odd number of units, the one in the middle has no
    partner; of an even number, the pair in the middle are neighbours, and l is added to the weight 1 of ``x_{t-1}``.
    The states are those that wait for their partners, last in first out, and ``x_t``, or inside a unit ``r_t``.

    **Preserving start.** ``l = 0``: the original network, bitwise; l has its full gradient at once.

    **Paper start**, as in modded-nanogpt: ``l = 1``.
    """

    granularity: ClassVar[Granularity] = "block"
    of_states: ClassVar[frozenset[str]] = frozenset({"skip_weights"})

    def parameters(self, dims: Dims, start: Start) -> dict[str, Tensor]:
        """``skip_weights``, float32 [T // 2]: l of the last units, ascending.

        Raises:
            UnsupportedTopology: there is only one unit.
        """
        if dims.depth < 2:
            raise UnsupportedTopology(
                "topology 'unet' pairs units, and the trunk has only one: try granularity='sublayer', or leave the "
                "trunk out with trunks=[...]."
            )
        return {"skip_weights": torch.full((dims.depth // 2,), 0.0 if start == "preserve" else 1.0)}

    def weights(self, parameters: dict[str, Tensor], dims: Dims) -> Skips:
        scales = parameters["skip_weights"]
        return Skips(scales, first=dims.depth - len(scales) + 1)

    def read(self, states: States, weights: Skips, t: int) -> tuple[Tensor, States]:
        if t < weights.first:
            return states[-1], states
        *waiting, skipped, x = states
        r = mix((skipped,), weights.scales[t - weights.first, None], added=(x,))
        return r, (*waiting, r)

    def merge(self, states: States, weights: Skips, t: int, *branches: Tensor) -> Tensor:
        return total((states[-1], *branches))  # in the model's own order: bitwise equality at the start

    def push(self, states: States, weights: Skips, t: int, x: Tensor) -> States:
        waiting = states[:-1]
        return (*waiting, x, x) if t <= len(weights.scales) else (*waiting, x)

    def newest(self, states: States, weights: Skips, t: int) -> tuple[int, ...]:
        if t >= weights.first:
            return ()
        return (-2, -1) if 1 < t <= len(weights.scales) + 1 else (-1,)  # the former waits for its partner

    def finish(self, states: States, weights: Skips, dims: Dims) -> Tensor:
        return states[-1]

    def matrix(self, weights: Skips, dims: Dims) -> Tensor:
        """float32 [T, T]: row t - 1 is the read of unit t, of the columns x_0 .. x_{T-1}."""
        table = torch.eye(dims.depth, device=weights.scales.device)
        for t, scale in enumerate(weights.scales, start=weights.first):
            table[t - 1, dims.depth + 1 - t] += scale
        return table

    def program(self, weights: Skips, dims: Dims) -> Program:
        reads = [[Term(f"x{i}", 1.0)] for i in range(dims.depth)]
        for t, scale in enumerate(weights.scales.tolist(), start=weights.first):
            reads[t - 1].append(Term(f"x{dims.depth + 1 - t}", scale))
        return mixed_reads(reads)
