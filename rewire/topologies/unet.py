"""modded-nanogpt's skips from the first half of the units to the second."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from rewire.errors import UnsupportedTopology
from rewire.mixes.history import History
from rewire.mixes.mix import Mix
from rewire.topologies.base import Dims, Granularity, Start
from rewire.topologies.dense import Dense
from rewire.topologies.registry import register_topology
from rewire.topologies.wiring import Few, Sources, Units


@register_topology("unet")
@dataclasses.dataclass(frozen=True)
class UNet(Dense[Few]):
    """A learned skip from each unit of the first half to its partner in the second, as in a U-net (modded-nanogpt).

    ``r_t = x_{t-1} + l_t x_{T+1-t}`` in the last ``T // 2`` units, else ``r_t = x_{t-1}``; ``x_t = r_t + f_t``; the
    trunk's output is ``x_T``. (modded-nanogpt's train_gpt.py of 2025, ``skip_weights``.) So units are paired from the
    outside in: the last unit gets the state of the first. With an odd number of units, the middle one has no partner;
    with an even number, the middle pair are neighbours, and l is added to the weight 1 of ``x_{t-1}``. The states are
    those that wait for their partners, last in first out, and ``x_t``, or inside a unit ``r_t``.

    **Preserving start.** ``l = 0``: the original network, bitwise; l has its full gradient from the first step on.

    **Paper start**, as in modded-nanogpt: ``l = 1``.
    """

    granularity: ClassVar[Granularity] = "block"
    of_states: ClassVar[frozenset[str]] = frozenset({"skip_weights"})
    first: ClassVar[int] = 1
    few: ClassVar[bool] = True

    units: Units = dataclasses.field(default=None, init=False, repr=False)
    sources: Sources = dataclasses.field(default=None, init=False, repr=False)

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

    def weights(self, parameters: dict[str, Tensor], dims: Dims) -> Few:
        scales = parameters["skip_weights"].unbind()
        pairs = zip(scales, self.wired(dims).values(), strict=True)
        rows = [torch.stack([x, torch.ones_like(x)]) if len(own) > 1 else (x + 1)[None] for x, own in pairs]
        return self.by_read(dims, rows)

    def mix(self, history: History, weights: Few, t: int) -> Tensor | Mix:
        return history.mix(weights[t])

    def reads(self, dims: Dims) -> range:
        """The reads of the units; the output is ``x_T``."""
        return range(1, dims.depth + 1)

    def wired(self, dims: Dims) -> dict[int, tuple[int, ...]]:
        """``x_{T+1-t}`` and ``x_{t-1}``, which are the same state for the middle pair of an even number of units."""
        last = range(dims.depth - dims.depth // 2 + 1, dims.depth + 1)
        return {t: tuple(sorted({dims.depth + 1 - t, t - 1})) for t in last}
