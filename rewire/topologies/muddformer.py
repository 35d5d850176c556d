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
_AFTER = 1e-3  # the paper's start of the scale of the norm after the mix


class Aggregate(NamedTuple):
    """Weights of a read from n states in C ways: the paper's DA modules after one block. All are float32.

    Attributes:
        static: [C, n].
        w1: [D, K], K = C n.
        w2: [K, C n].
        before: with norms, the scales of the sources' norms, [n, D].
        after: with norms, the scale of the norm after the shortcut's mix, [D], if there is such a mix.
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
    size K is the number of weights that it computes. Other units, and the output, have one. Unit 1 reads ``x_0``.
    Post-norm blocks norm ``r_t + f_t``.

    With ``norms=True`` (Equation 10, for deep models: without it, MUDDFormer was seen to diverge at 24 layers), normed
    states are mixed, and the mix is added to the newest: q, k and v read ``x_{t-1} + sum_i A_ti g_i * rmsnorm(x_i)``,
    and the shortcut, other units and the output ``x_{t-1} + h_t * rmsnorm(sum_i A_ti g_i * rmsnorm(x_i))``. Scales g_i
    and h_t [D] are learned. Having the second norm only in the shortcut's read follows the authors' JAX code.

    The paper's wider feed-forwards in later blocks (Equation 9) are not implemented.

    With ``block=S`` (ours; see `dense`) reads mix ``x_0, x_S, x_2S, ..`` and the newest state, on which the weights
    depend: ``r_t = sum_{i in K_t} A_ti x_i`` with ``K_t = {i < t: i = 0 (mod S) or i = t - 1}``. Only these states are
    held, and their number replaces t in the sizes below.

    With ``units``, ``sources`` and ``channels`` only some units read a mix, of some states (see `dense`), and only the
    named inputs of attentions have a read: the others take ``x_{t-1}``. Units that begin otherwise, and the output,
    have a read if "shortcut" is named. ``units=[-1, "output"], sources=["x0", 3, 7], channels=("v", "shortcut")`` is
    the trimmed form of the NanoGPT speedrun.

    With ``separate_norms=True`` the reads of q, k and v have separate norms: k and v get copies of the model's norm,
    which stays that of q and of everything else that reads there.

    **Both starts** are the paper's (Section 3): ``W2 = 0``, a one-hot on ``x_{t-1}``, W1 from N(0, 1/D), always the
    same draw. All weights are exactly 0 or 1, so that this is the original network, bitwise. ``a`` and W2 have
    gradients from the first step on, W1 one step later, through W2. If all branches start at zero output, the weights
    of q, k and v start learning one step later: all have moved after two steps. With norms ``a = 0``, ``g = 1`` and
    ``h = 1e-3``: all mixes are 0, and g and h learn from the second step on, like W1.

    Args:
        separate_norms: whether q, k and v have separate norms.
        block: S, 1 or more; None is 1, no groups.
        channels: some of "q", "k", "v", "shortcut"; None: all.
        norms: whether to norm states before they are mixed, and the mix (PrePostDANorm).

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
        """``static``, ``w1`` and ``w2``, float32: for each of the units t = 2..T and the output (T+1), with K = C t
        weights in C ways.

        ``static`` is flat: for each t, for each of its ways, t entries. ``w1`` is [sum of K, D], W1_t transposed.
        ``w2`` is flat: for each t its [K, K].

        With norms also ``before`` [S, D], g of the S states that are read, oldest first, and ``after`` [R, D], h of the
        reads that have one.

        Raises:
            UnsupportedTopology: with ``separate_norms``, no unit of the trunk begins with an attention.
        """
        if self.separate_norms and not dims.attention:
            raise no_attention(self, dims.depth, "leave out separate_norms=True")
        sizes = self.weight_counts(dims)
        static = [(0 if self.norms else 1) * torch.eye(n)[-1].repeat(ways) for ways, n in self._shapes(dims)]
        # A local generator: it leaves the caller's alone, and gives the same values after a reset.
        generator = torch.Generator("cpu").manual_seed(0)
        w1 = torch.randn(sum(sizes), dims.width, generator=generator, device="cpu") * dims.width**-0.5
        found = {"static": torch.cat(static), "w1": w1, "w2": torch.zeros(sum(k * k for k in sizes))}
        if self.norms:
            found["before"] = torch.ones(len(self._read_states(dims)), dims.width)
            found["after"] = torch.full((len(self._with_shortcut(dims)), dims.width), _AFTER)
        return found

    def natural_scales(self, dims: Dims) -> dict[str, float]:
        """W2's sums are over K hidden units, and it computes K weights of states."""
        return {"static": OF_STATES, "w2": OF_STATES**2, "before": OF_STATES, "after": OF_STATES}

    def depth_powers(self) -> dict[str, int]:
        """Static weights have a power of 1; W2 has 2, as its fan-in K and the number of states both grow."""
        return {"static": 1, "w2": 2} if self.sources is None else {}

    def unit_rows(self, dims: Dims) -> dict[str, list[int]]:
        """As in `Topology`, but empty with norms: many units use the scales of a source."""
        sizes = self.weight_counts(dims)
        rows = self.each(dims, sizes)
        return {} if self.norms else {"static": rows, "w1": rows, "w2": self.each(dims, [k * k for k in sizes])}

    def weights(self, parameters: dict[str, Tensor], dims: Dims) -> Aggregates:
        """By t, the weights of each read, from which its mixing weights are computed."""
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
        """`mix` for a history of normed states; ``x`` is the newest state without the norm."""
        read = weights[t]
        scores, x = read_off_hidden(x, read.w1, read.w2, read.static.flatten(), _EPS)
        mixes = list(map(materialize, history.mixes(None, scores.unflatten(-1, read.static.shape))))
        if read.after is not None:  # norms the last way
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
        """a, averaged over the ways; with norms, these are weights of normed states, and the newest has 1 more."""
        read = weights[t]
        row = read.static.mean(0)
        return row if read.before is None else row + torch.eye(len(row), dtype=row.dtype, device=row.device)[-1]

    def _read_states(self, dims: Dims) -> list[int]:
        """The numbers of all states that some read mixes."""
        return sorted({i for t in self.mixing(dims) for i in self.sources_of(t, dims)})

    def _with_shortcut(self, dims: Dims) -> list[int]:
        """The reads with a way for the shortcut, or with one way for the whole unit."""
        return [t for t in self.mixing(dims) if "shortcut" in (self.separate(t, dims) or ("shortcut",))]

    def _scales(self, parameters: dict[str, Tensor], dims: Dims) -> list[tuple[Tensor, Tensor | None]]:
        """For each read, the scales of its norms: g of its sources, and h."""
        places = {i: place for place, i in enumerate(self._read_states(dims))}
        before = parameters["before"].float()
        after = dict(zip(self._with_shortcut(dims), parameters["after"].float(), strict=True))
        sources = [[places[i] for i in self.sources_of(t, dims)] for t in self.mixing(dims)]
        return [(before[own], after.get(t)) for own, t in zip(sources, self.mixing(dims), strict=True)]

    def _shapes(self, dims: Dims) -> list[tuple[int, int]]:
        """For each read, its number of ways, and of states that it mixes."""
        return list(zip(self.ways(dims), self.sizes(dims), strict=True))


def _sum(x: Tensor, mix: Tensor) -> Tensor:
    with sparing(x):
        total = x + mix
        remember_sums([total], (x, mix), (), lambda terms: [terms[0] + terms[1]])
        return total


def _normed(x: Tensor, scale: Tensor) -> Tensor:
    """The RMS norm of a state or a mix of states, in its dtype."""
    return made_again(lambda x: (rms_norm(x, _EPS) * scale).to(x.dtype), x)
