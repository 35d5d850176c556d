"""Two lanes: attentions read one stream, feed-forwards the other, and both write to both (modded-nanogpt)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from rewire.errors import check_count
from rewire.topologies.base import Dims, Start
from rewire.topologies.hyper import HyperConnections, Output, Weights
from rewire.topologies.registry import register_topology
from rewire.topologies.wiring import OUTPUT, Units, checked_units, placed


@register_topology("two-lanes")
@dataclasses.dataclass(frozen=True)
class TwoLanes(HyperConnections):
    """Two residual streams: attentions read the first, other branches the second (modded-nanogpt, pull request 230).

    ``l_0 = l_1 = x_0``. Unit t reads ``r_t = l_k``, k = 0 for attentions, else 1, and then ``l_j = d_t l_j + w_tj f_t``
    for both j; the output is ``(l_0 + l_1) / 2``. w has two numbers only in the last units; in earlier units the lanes
    share one, and so stay equal. These are `HyperConnections` of two streams with fixed reads and no mixing.

    **Preserving start.** ``d = w = 1``: both lanes are ``x_t``, bitwise, and so is the output. All weights learn from
    the first step on.

    **Paper start**, as in modded-nanogpt: ``d = sqrt(1.1)``, ``w = 1``.

    Args:
        last: number of units at the end in which the lanes differ; 8 are four blocks of attention and MLP, as in
            modded-nanogpt. (Earlier units hold two equal lanes.)
        second: units that read the second lane, by number or kind of branch; None: those that do not begin with an
            attention, or every second unit if all do.
    """

    of_states: ClassVar[frozenset[str]] = frozenset({"decay", "single", "write"})

    streams: int = dataclasses.field(default=2, init=False, repr=False)
    output: Output = dataclasses.field(default="mean", init=False, repr=False)
    last: int = 8
    second: Units = None

    def __post_init__(self) -> None:
        check_count("last", self.last, 1)
        object.__setattr__(self, "second", units := checked_units(self.second, "second"))
        if units and OUTPUT in units:
            raise ValueError("second='output': the output is the mean of both lanes.")

    def placed(self, kinds: Sequence[str]) -> TwoLanes:
        plain = [t for t, kind in enumerate(kinds, start=1) if "attention" not in kind]
        units = plain if self.second is None else placed(self.second, kinds)
        return dataclasses.replace(self, second=tuple(units)) if units else self

    def parameters(self, dims: Dims, start: Start) -> dict[str, Tensor]:
        """``decay``, d, float32 [T]; ``write`` [.., 2], w of the last units; ``single`` [..], w of earlier units."""
        two = min(self.last, dims.depth)
        decay = torch.full((dims.depth,), 1.0 if start == "preserve" else 1.1**0.5)
        before = {"single": torch.ones(dims.depth - two)} if dims.depth > two else {}
        return {"decay": decay, "write": torch.ones(two, 2), **before}

    def weights(self, parameters: dict[str, Tensor], dims: Dims) -> Weights:
        decay, write = parameters["decay"], parameters["write"]
        eye = torch.eye(2, dtype=decay.dtype, device=decay.device)
        read = torch.stack([eye[lane] for lane in self._lanes(dims.depth)])
        before = parameters.get("single", write.new_empty(0))
        written = torch.cat([before[:, None].expand(-1, 2), write])
        static = torch.cat([read[..., None], decay[:, None, None] * eye, written[..., None]], -1)  # A_m | A_r | B
        return super().weights({"static": static}, dims)

    def _lanes(self, depth: int) -> list[int]:
        """The lane that each unit reads."""
        named: Any = range(2, depth + 1, 2) if self.second is None else self.second
        second = {t if t > 0 else depth + 1 + t for t in named if isinstance(t, int)}
        return [int(t in second) for t in range(1, depth + 1)]
