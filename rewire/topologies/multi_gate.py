"""Multi-Gate Residuals: gated streams that units read by a softmax over them (arXiv 2605.23259)."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch
from torch import Tensor

from rewire.errors import UnsupportedTopology, check_count, is_number
from rewire.mixes.again import keep_some
from rewire.mixes.mix import Mix, mix, pending_mix, softmax
from rewire.mixes.tokens import project_normed
from rewire.topologies.base import (
    Dims,
    Granularity,
    Named,
    Start,
    States,
    Topology,
    in_increments,
    materialize,
    no_preserving_start,
    total,
)
from rewire.topologies.registry import register_topology

_EPS = 1e-6  # of the norms


@register_topology("multi-gate")
@dataclasses.dataclass(frozen=True)
class MultiGate(Topology[Named]):
    """Multi-Gate Residuals: n streams, each with a gate that moves it towards each branch (arXiv 2605.23259).

    The streams are ``x_0`` and the outputs of the first n - 1 units. From then on every stream moves towards the branch
    output, ``s_i = s_i + b_i (f_t - s_i)`` with ``b_i = sigmoid(v_t . rmsnorm(s_i) / sqrt(D) + c_ti)``. Unit t reads
    the mean ``sum_i a_i s_i`` with ``a = softmax_i(w_t . rmsnorm(s_i) / sqrt(D))``, and the output is one more such
    read. All weights are per token, and norms have no scale. So states stay as large as branch outputs. It is the
    paper's form with independent gates; with fewer units than streams it is `AttnRes`.

    **Paper start.** ``v = w = 0``; all entries of c are ``-ln(sqrt(L / 21) (e^3 + 1) - n)`` for L units with gates.
    (Formulas and starts are taken from the implementation in burn-mamba.)

    **Preserving start.** There is none: a sum of all branches is not a mean of streams.

    Args:
        streams: n, 2 or more.
        bias: start of c; None: as above.
    """

    granularity: ClassVar[Granularity] = "sublayer"  # as Attention Residuals, with which the paper compares it
    needs_width: ClassVar[bool] = True
    by_token: ClassVar[bool] = True
    of_states: ClassVar[frozenset[str]] = frozenset({"queries", "gates", "bias"})

    streams: int = 4
    bias: float | None = None

    def __post_init__(self) -> None:
        check_count("streams", self.streams, 2)
        if self.bias is not None and not (is_number(self.bias) and math.isfinite(self.bias)):
            raise ValueError(f"bias={self.bias!r}: it has to be a number, like -3.0, or None.")

    def parameters(self, dims: Dims, start: Start) -> dict[str, Tensor]:
        """``queries``, w, float32 [T, D]; ``gates``, v [T - n + 1, D], and ``bias``, c [T - n + 1, n], if T >= n.

        Raises:
            UnsupportedTopology: a preserving start; or too few units for the paper's bias with so many streams.
        """
        if start == "preserve":
            raise no_preserving_start(self, "its streams are means, not sums, of what units return")
        gated = dims.depth - self.streams + 1
        found = {"queries": torch.zeros(dims.depth, dims.width)}
        if gated > 0:
            found["gates"] = torch.zeros(gated, dims.width)
            found["bias"] = torch.full((gated, self.streams), self._bias(gated))
        return found

    def _bias(self, gated: int) -> float:
        left = math.sqrt(gated / 21) * (math.exp(3) + 1) - self.streams
        if self.bias is None and left <= 0:
            raise UnsupportedTopology(
                f"topology 'multi-gate': the paper's start of the gates is not defined for {self.streams} streams and "
                f"{gated} units after the first ones. Use fewer streams, or set the start, as in bias=-3.0."
            )
        return -math.log(left) if self.bias is None else self.bias

    def read(self, states: States, weights: Named, t: int) -> tuple[Tensor | Mix, States]:
        return (states[0] if t == 1 else self._pooled(states, weights, t)), states

    def write(self, states: States, weights: Named, t: int, *branches: Tensor) -> States:
        if len(states) < self.streams:
            return (*states, total(branches))
        unit = t - self.streams
        found = []
        for stream, bias in zip(states, weights["bias"][unit], strict=True):
            gate = torch.sigmoid(_scored(stream, weights["gates"][unit]) + bias)
            found.append(mix((stream, *branches), None, scores=(1 - gate, *[gate] * len(branches))))
        return tuple(keep_some(found))

    def finish(self, states: States, weights: Named, dims: Dims) -> Tensor:
        return materialize(self._pooled(states, weights, dims.depth + 1))

    def newest(self, states: States, weights: Named, t: int) -> tuple[int, ...]:
        return (0,) if t == 1 else ()

    def matrix(self, weights: Named, dims: Dims) -> Tensor:
        """float32 [T + 1, T + 1]: row t - 1 is the read of unit t, the last one the output; columns f_0 .. f_T.

        These are the weights with v = w = 0.
        """
        zero = weights["queries"].new_zeros(dims.depth, dims.depth + 1)
        return in_increments(self, weights | {"queries": zero, "gates": zero}, dims.depth, zero.device)

    def _pooled(self, streams: States, weights: Named, t: int) -> Mix:
        scores = torch.stack([_scored(stream, weights["queries"][t - 2]) for stream in streams])
        return pending_mix(streams, None, scores=softmax(scores, scaled=False)[0].unbind())


def _scored(stream: Tensor, query: Tensor) -> Tensor:
    """``query . rmsnorm(stream) / sqrt(D)``, [..., 1]."""
    return project_normed(stream, query[:, None], _EPS) * stream.shape[-1] ** -0.5
