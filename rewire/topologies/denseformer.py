"""DenseFormer: a depth-weighted average after each block (arXiv 2402.02622)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from rewire.errors import UnsupportedTopology, check_count
from rewire.mixes.claimed import Table
from rewire.mixes.history import History
from rewire.mixes.mix import Mix, mix
from rewire.topologies.base import Dims, Granularity, Start
from rewire.topologies.dense import Dense
from rewire.topologies.registry import register_topology
from rewire.topologies.wiring import Few

Averages = Table | Few | Mapping[int, Tensor]


@register_topology("denseformer")
@dataclasses.dataclass(frozen=True)
class DenseFormer(Dense[Averages]):
    """DenseFormer: after each unit, a weighted average of all states so far (arXiv 2402.02622).

    ``x_t = y_{t-1} + f_t`` and ``y_t = sum_i a_ti x_i`` over ``i <= t`` with ``i = t (mod dilation)``, if t
    is a multiple of period; otherwise ``y_t = x_t``. ``y_0 = x_0``. Unit t reads ``y_{t-1}``; the trunk's
    output is ``y_T``. So ``y_t`` is read t + 1, over ``x_0 .. x_t``. Both starts are ``a_tt = 1`` and 0
    elsewhere: exactly the original network.

    **Groups.** With ``block=S`` (ours; see `dense`) averages are over ``x_0, x_S, x_2S, ..`` and ``x_t``:
    ``y_t = sum_{i in K_{t+1}} a_ti x_i`` with ``K_{t+1} = {i <= t: i = 0 (mod S) or i = t}``. Only
    these are held. (Dilation averages other states for each t, so that all have to be held.)

    With ``units`` and ``sources`` only some ``y_t`` are averages, of some states; else ``y_t = x_t`` (see `dense`).

    Args:
        dilation: average only every dilation-th earlier state, 1 or more.
        period: average only after every period-th unit, 1 or more.
        block: S, 1 or more; None is 1, no groups.

    Raises:
        ValueError: an option is below 1, or two of them choose states.
    """

    granularity: ClassVar[Granularity] = "block"
    of_states: ClassVar[frozenset[str]] = frozenset({"alpha"})

    dilation: int = 1
    period: int = 1
    block: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("dilation", self.dilation, 1)
        check_count("period", self.period, 1)
        if self.dilation > 1 and self.block not in (None, 1):
            raise ValueError(
                f"dilation={self.dilation} and block={self.block} choose different states to average: pass one of them."
            )
        if self.few and self.dilation * self.period > 1:
            raise ValueError("dilation= and period= choose states and units, as units= and sources= do: leave out two.")

    def depth_powers(self) -> dict[str, int]:
        return {"alpha": 1} if self.sources is None else {}

    def parameters(self, dims: Dims, start: Start) -> dict[str, Tensor]:
        """``alpha``, float32, flat: for each t with an average, one entry for each of its sources i,
        ascending.

        Raises:
            UnsupportedTopology: period is greater than the number of units, so that nothing would be learned.
        """
        if self.period > dims.depth:
            raise UnsupportedTopology(
                f"topology 'denseformer' with period={self.period} averages nothing in a trunk of {dims.depth} "
                f"units: pass a period of at most {dims.depth}."
            )
        return {"alpha": torch.cat([torch.eye(n)[-1] for n in self.sizes(dims)])}  # a_tt

    def weights(self, parameters: dict[str, Tensor], dims: Dims) -> Averages:
        alpha = parameters["alpha"].float()
        every = self.dilation == self.period == 1
        return self.table(dims, alpha) if every else self.of_reads(dims, alpha)

    def mix(self, history: History, weights: Averages, t: int) -> Tensor | Mix:
        """``y_{t-1}``"""
        if (t - 1) % self.period:
            return history.newest
        row = weights[t]
        if self.dilation > 1 and isinstance(row, Tensor):
            return mix([history.states[i] for i in self._dilated(t)], row)
        return history.mix(row)

    def mixing(self, dims: Dims) -> Sequence[int]:
        return super().mixing(dims) if self.few else self.reads(dims)[self.period - 1 :: self.period]

    def sources_of(self, t: int, dims: Dims) -> Sequence[int]:
        return super().sources_of(t, dims) if self.dilation == 1 else self._dilated(t)

    def _dilated(self, t: int) -> range:
        return range((t - 1) % self.dilation, t, self.dilation)

    def static(self, weights: Averages, t: int) -> Tensor:
        return super().static(weights, t) if isinstance(weights, Table) else weights[t]

    def is_static(self, weights: Averages) -> bool:
        return True
