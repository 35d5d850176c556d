"""MUDDFormer: multiway dynamic dense connections (arXiv 2502.12170)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from rewire.mixes.again import made_again, remember_sums, sparing
from rewire.mixes.history import Free, History
from rewire.mixes.mix import Mix
from rewire.mixes.tokens import read_off_hidden, rms_norm
from rewire.topologies.base import (
    OF_STATES,
    Dims,
    Granularity,
    QKVInputs,
    Start,
    States,
    materialize,
    no_attention,
)
from rewire.topologies.dense import Dense
from rewire.topologies.registry import register_topology
from rewire.topologies.wiring import CHANNELS, Channel, Few

_EPS = 1e-6  # of the norms
_AFTER = 1e-3  # the paper's first scale of the norm behind the mix


class Aggregate(NamedTuple):
    """Weights of a read from n states in C ways: the paper's DA modules after one block. All are float32.

    Attributes:
        static: [C, n].
        w1: [D, K], K = C n.
        w2: [K, C n].
        before: with norms, the scales of those of the sources, [n, D].
        after: with norms, the scale of the one behind the mix for the shortcut, [D], if there is such a mix.
    """

    static: Tensor
    w1: Tensor
    w2: Tensor
    before: Tensor | None = None
    after: Tensor | None = None


Aggregates = Mapping[int, Aggregate] | Few


@register_topology("muddformer")
@dataclasses.dataclass(frozen=True)
class MUDDFormer(Dense[Aggregates]):
    """MUDDFormer: q, k, v and shortcut each read their own per-token mix of all states (arXiv 2502.12170).

    ``x_t = r_t + f_t``, where ``r_t = sum_{i<t} A_ti x_i`` and the weights depend on the token's last state,
    ``A_t = gelu(rmsnorm(x_{t-1}) W1_t) W2_t + a_t`` (Equations 5 and 6). A unit that begins with an attention has four
    such reads (Equations 7 and 8), one each for q, k, v and the residual ``r_t``; they share the hidden layer, whose
    size K is the number of weights it computes. Other units, and the output, have one. Unit 1 reads ``x_0``. In
    post-norm blocks ``r_t + f_t`` passes the norm.

    With ``norms=True`` (Equation 10, for deep models: without, MUDDFormer was seen to diverge at 24 layers) a mix is of
    normed states and added to the newest: q, k and v read ``x_{t-1} + sum_i A_ti g_i * rmsnorm(x_i)``, and the
    shortcut, other units and the output ``x_{t-1} + h_t * rmsnorm(sum_i A_ti g_i * rmsnorm(x_i))``. Scales g_i and h_t
    [D] are learned. That the second norm is on the shortcut's way alone is as in the authors' JAX code.

    The paper's wider feed-forwards in later blocks (Equation 9) are left out.

    With ``block=S`` (ours; see `dense`) reads are of ``x_0, x_S, x_2S, ..`` and of the newest state, which the weights
    depend on: ``r_t = sum_{i in K_t} A_ti x_i`` with ``K_t = {i < t: i = 0 (mod S) or i = t - 1}``. These are all that
    is held, and their number stands for t in the sizes below.

    With ``units``, ``sources`` and ``channels`` there are few reads, of few states (see `dense`), and of attentions
    only the inputs that are named have one: the others take ``x_{t-1}``. Units that begin otherwise, and the output,
    have a read if "shortcut" is named. ``units=[-1, "output"], sources=["x0", 3, 7], channels=("v", "shortcut")`` is
    the trimmed form of the NanoGPT speedrun.

    With ``separate_norms=True`` the reads of q, k and v pass a norm each: copies of the one that the model has, which
    stays that of q and of whatever else reads there.

    **Both starts** are the paper's (Section 3): ``W2 = 0``, a one-hot on ``x_{t-1}``, W1 from N(0, 1/D), always the
    same draw. All weights are exactly 0 or 1, so that this is the original network, bitwise. ``a`` and W2 have
    gradients at once, W1 through W2 one step later. If all branches start at zero output, then so do those of q, k and
    v (nothing they change is seen at first): all have moved after two steps. With norms ``a = 0``, ``g = 1`` and
    ``h = 1e-3``: all mixes are 0, and g and h learn from the second step on, like W1.

    Args:
        separate_norms: norms of their own for q, k and v.
        block: S, 1 or more; None is 1, no groups.
        channels: some of "q", "k", "v", "shortcut"; None: all.
        norms: of states before they are mixed, and behind the mix (PrePostDANorm).

    Raises:
        ValueError: an option is out of its range, or two choose sources.
    """

    granularity: ClassVar[Granularity] = "block"  # Equation 3: aggregates stand between blocks
    needs_width: ClassVar[bool] = True
    matrices: ClassVar[frozenset[str]] = frozenset({"w1", "w2"})
    reads_qkv: ClassVar[bool] = True
    inputs: ClassVar[tuple[Channel, ...]] = CHANNELS

    separate_norms: bool = False
    block: int | None = None
    channels: tuple[Channel, ...] | None = None
    norms: bool = False

    @property
    def has_program(self) -> bool:
        return not self.norms

    def parameters(self, dims: Dims, start: Start) -> dict[str, Tensor]:
        """``static``, ``w1`` and ``w2``, float32: for units t = 2..T and the output (T+1) in turn, with K = C t
        weights in C ways.

        ``static`` is flat: for each t its ways in turn, of each the t states. ``w1`` is [sum of K, D], W1_t
        transposed. ``w2`` is flat: for each t its [K, K].

        With norms ``before`` [S, D], g of the S states that are read, oldest first, and ``after`` [R, D], h of the
        reads that have one.

        Raises:
            UnsupportedTopology: with ``separate_norms``, no unit of the trunk begins with an attention.
        """
        if self.separate_norms and not dims.attention:
            raise no_attention(self, dims.depth, "leave out separate_norms=True")
        sizes = self.weight_counts(dims)
        static = [(0 if self.norms else 1) * torch.eye(n)[-1].repeat(ways) for ways, n in self._shapes(dims)]
        # A generator of its own: the caller's is not disturbed, and the values can be set again.
        generator = torch.Generator("cpu").manual_seed(0)
        w1 = torch.randn(sum(sizes), dims.width, generator=generator, device="cpu") * dims.width**-0.5
        found = {"static": torch.cat(static), "w1": w1, "w2": torch.zeros(sum(k * k for k in sizes))}
        if self.norms:
            found["before"] = torch.ones(len(self._read_states(dims)), dims.width)
            found["after"] = torch.full((len(self._with_shortcut(dims)), dims.width), _AFTER)
        return found

    def natural_scales(self, dims: Dims) -> dict[str, float]:
        """W2 sums over as many hidden units as it computes weights of states."""
        return {"static": OF_STATES, "w2": OF_STATES**2, "before": OF_STATES, "after": OF_STATES}

    def depth_powers(self) -> dict[str, int]:
        """A row of W2 has as many inputs as there are weights, and these are of as many states."""
        return {"static": 1, "w2": 2} if self.sources is None else {}

    def unit_rows(self, dims: Dims) -> dict[str, list[int]]:
        """None with norms: the scales of a source are read by many units."""
        sizes = self.weight_counts(dims)
        rows = self.each(dims, sizes)
        return {} if self.norms else {"static": rows, "w1": rows, "w2": self.each(dims, [k * k for k in sizes])}

    def weights(self, parameters: dict[str, Tensor], dims: Dims) -> Aggregates:
        """By read t, what its weights are computed with."""
        sizes = self.weight_counts(dims)
        static = parameters["static"].float().split(sizes)
        w1 = parameters["w1"].float().split(sizes)
        w2 = parameters["w2"].float().split([k * k for k in sizes])
        scales = self._scales(parameters, dims) if self.norms else [(None, None)] * len(sizes)
        rows = [
            Aggregate(a.unflatten(0, shape), hidden.T, out.unflatten(0, (len(a), len(a))), *norms)
            for shape, a, hidden, out, norms in zip(self._shapes(dims), static, w1, w2, scales, strict=True)
        ]
        return self.by_read(dims, rows)

    def mix(self, history: History, weights: Aggregates, t: int) -> Tensor | Mix | QKVInputs:
        read = weights[t]
        if read.before is not None:
            normed = Free().holding(map(_normed, history.states, read.before))
            return self._mix_normed(normed, weights, t, history.newest)
        # [..., C n], one way after the other
        scores, history.newest = read_off_hidden(history.newest, read.w1, read.w2, read.static.flatten(), _EPS)
        ways = history.mixes(None, scores.unflatten(-1, read.static.shape))
        return self.seen(ways, weights, t, history.newest)

    def _mix_normed(self, history: History, weights: Aggregates, t: int, x: Tensor) -> Tensor | Mix | QKVInputs:
        """`mix`, of a history of normed states; ``x`` is the newest as it is."""
        read = weights[t]
        scores, x = read_off_hidden(x, read.w1, read.w2, read.static.flatten(), _EPS)
        mixes = list(map(materialize, history.mixes(None, scores.unflatten(-1, read.static.shape))))
        if read.after is not None:  # of the last way
            mixes[-1] = _normed(mixes[-1], read.after)
        return self.seen([_sum(x, mix) for mix in mixes], weights, t, x)

    def _read(self, states: States, weights: Aggregates, t: int) -> tuple[Tensor | Mix | QKVInputs, History]:
        if not self.norms or isinstance(weights, Few):
            return super()._read(states, weights, t)
        newest, history = states
        first, last = weights[self.first].before, weights[max(t, self.first)].before
        assert first is not None and last is not None
        history = history.read(t, _normed(newest, first[0] if t < self.first else last[-1]))
        return (newest if t < self.first else self._mix_normed(history, weights, t, newest)), history

    def static(self, weights: Aggregates, t: int) -> Tensor:
        """a, the mean of the ways; with norms, it is of the normed states, and the newest counts 1 by itself."""
        read = weights[t]
        row = read.static.mean(0)
        return row if read.before is None else row + torch.eye(len(row), device=row.device)[-1]

    def _read_states(self, dims: Dims) -> list[int]:
        """The numbers of all states that are mixed."""
        return sorted({i for t in self.mixing(dims) for i in self.sources_of(t, dims)})

    def _with_shortcut(self, dims: Dims) -> list[int]:
        """The reads of which one way is the shortcut's, or all that the unit reads."""
        return [t for t in self.mixing(dims) if "shortcut" in (self.separate(t, dims) or ("shortcut",))]

    def _scales(self, parameters: dict[str, Tensor], dims: Dims) -> list[tuple[Tensor, Tensor | None]]:
        """For each read in turn, the scales of its norms: g of its sources, and h."""
        places = {i: place for place, i in enumerate(self._read_states(dims))}
        before = parameters["before"].float()
        after = dict(zip(self._with_shortcut(dims), parameters["after"].float(), strict=True))
        sources = [[places[i] for i in self.sources_of(t, dims)] for t in self.mixing(dims)]
        return [(before[own], after.get(t)) for own, t in zip(sources, self.mixing(dims), strict=True)]

    def _shapes(self, dims: Dims) -> list[tuple[int, int]]:
        """How many ways each read has, and how many states it mixes."""
        return list(zip(self.ways(dims), self.sizes(dims), strict=True))


def _sum(x: Tensor, mix: Tensor) -> Tensor:
    with sparing(x):
        total = x + mix
        remember_sums([total], (x, mix), (), lambda terms: [terms[0] + terms[1]])
        return total


def _normed(x: Tensor, scale: Tensor) -> Tensor:
    """The RMS norm of a state, or of a mix of such, in its dtype."""
    return made_again(lambda x: (rms_norm(x, _EPS) * scale).to(x.dtype), x)
