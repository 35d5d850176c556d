"""Attention Residuals: every read attends over the outputs of earlier units (arXiv 2603.15031)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from rewire.errors import UnsupportedTopology, check_choice, check_count
from rewire.mixes.attended import EPS, AttendedHistory, AttendedTable
from rewire.mixes.history import History
from rewire.mixes.mix import Mix, softmax
from rewire.mixes.several import mixes
from rewire.mixes.tokens import inverse_rms, project_normed
from rewire.topologies.base import (
    OF_STATES,
    Dims,
    Granularity,
    QKVInputs,
    Start,
    States,
    no_attention,
    no_preserving_start,
    total,
)
from rewire.topologies.dense import DenseIncrements
from rewire.topologies.registry import register_topology
from rewire.topologies.wiring import QKV, Channel, Few

Form = Literal["softmax", "difference"]


@register_topology("attnres")
@dataclasses.dataclass(frozen=True)
class AttnRes(DenseIncrements[AttendedTable | Few]):
    """Attention Residuals: every read is a softmax-weighted sum of all increments, per token (arXiv 2603.15031).

    ``r_t = sum_{i<t} a_ti f_i`` with ``f_0 = x_0`` and ``a_ti = softmax_i(w_t . rmsnorm(f_i))``; one more such read is
    the trunk's output. (The scale of the paper's RMSNorm only multiplies ``w_t``, and is part of it here.) Unit 1 has a
    single source, so its weight is 1, without a query.

    With ``block=S``, Block AttnRes, every S units form a group whose increments are summed: the sources of a read are
    ``x_0``, the sums of the finished groups, and that of the current group if it has an increment yet (see `dense`).

    A source is normed and projected once for all queries, when it is first read, and each read takes its own scores
    ``w_t . rmsnorm(f_i)``. A single softmax over the unchanged sources is computed by `rewire.mixes.attended`; with
    ``qkv``, ``heads``, ``normed`` or another form, the weights are computed here from the scores.

    - ``qkv=True``: a unit that begins with an attention has three queries, for its queries, keys and values. The
      shortcut inside the unit, if there is one, takes the read of the queries.
    - ``heads=H``: H softmaxes for each read, one for each H-th of the channels, from the scores of these channels
      (Multi-Head Attention Residuals, arXiv 2607.27230). The norm is over all channels, and H = 1 means no heads.
    - ``normed=True``: a read sums ``rmsnorm(f_i)`` instead of ``f_i``. With ``qkv`` and ``block``, this is Inkling 2
      (``Inkling2BlockAttentionResidual`` in transformers; its ``query`` is ``sqrt(D) w_t``).
    - ``rank=R``: keys are the last R channels of a source, ``a_ti = softmax_i(w_t . rmsnorm(f_i[D-R:]))`` with ``w_t``
      in R^R; all channels are summed (sliced low-rank Attention Residuals, arXiv 2607.09694 and fast-attnres).
    - ``additive=True``: the weights are ``1 + a_ti``, so that a read is the plain stream plus a softmax-weighted sum of
      its increments; the output is the plain stream, ``f_0 + .. + f_T``, without a query. These are Delta Attention
      Residuals (arXiv 2605.18855), ``h + sum_i a_i v_i``, as in their authors' code. With ``block``, that code sums
      only finished groups; here the sum of the current one is a source, too.

    **Paper start.** ``w = 0``: each read is the average of its sources; in the additive form, ``1 + 1/n`` times their
    sum. For a branch that begins with a norm this is the same as their sum.

    **Preserving start.** ``w = 0``, in one of two forms whose weights are then exactly 1: a read sums what the original
    network sums, in the same order and so bitwise in float32 and float64 (with groups of several units, to rounding).

    - ``scaled=True``: ``n a_ti``, so that the weights of n sources add up to n. ``start="preserve"`` takes it unless
      additive. A norm after a read removes the factor n: gradients of the queries are those of the paper's start.
    - ``form="difference"``: ``1 + a_ti - 1/n``, the original network plus the softmax's change since its start. It is
      the additive form's preserving start. Before a norm, gradients are ``1 + 1/n`` times those of its paper start.

    With ``normed`` there is no preserving start.

    With ``units`` and ``sources`` (ours; see `dense`) only some units read a mix, of the sources that are named and the
    sum of all other increments; other units read the plain sum of all. With ``qkv`` and ``channels`` only the named
    inputs of attentions have a read, and the shortcut takes that of q.

    From all starts, all queries have a gradient in the first step. If every branch starts at zero output, only the
    output's query has one at first (by the score of ``x_0``; none in the additive form), and the others one step later.

    Args:
        block: S, 1 or more; None is 1, no groups.
        scaled: whether weights add up to the number of sources, not to 1.
        form: "softmax", the paper's, or "difference".
        additive: whether weights are added to those of the plain stream.
        qkv: whether q, k and v have separate queries.
        heads: H, 1 or more; has to divide the width.
        normed: whether normed sources are summed.
        rank: R, 1 or more; cut to D, which is also what None means.
        separate_norms: with ``qkv``, whether each of the three reads passes through its own norm, at first a copy.
        channels: with ``qkv``, some of "q", "k", "v", "shortcut"; None: all.

    Raises:
        ValueError: an option is out of its range, or two exclude each other.
    """

    granularity: ClassVar[Granularity] = "sublayer"  # the paper's layers: attentions and MLPs, each by itself
    needs_width: ClassVar[bool] = True
    by_token: ClassVar[bool] = True
    first: ClassVar[int] = 2
    inputs: ClassVar[tuple[Channel, ...]] = QKV

    block: int | None = None
    scaled: bool = False
    form: Form = "softmax"
    additive: bool = False
    qkv: bool = False
    heads: int = 1
    normed: bool = False
    separate_norms: bool = False
    channels: tuple[Channel, ...] | None = None
    rank: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("heads", self.heads, 1)
        check_count("rank", self.rank, 1, optional=True)
        check_choice("form", self.form, get_args(Form))
        if self.rank is not None and self.heads > 1:
            raise ValueError(
                "rank= takes keys from the last channels alone, and heads= splits all channels: pass one of them."
            )
        if self.scaled and (self.additive or self.form == "difference"):
            raise ValueError("scaled=True is another form of the weights than additive=True or form='difference'.")
        if self.separate_norms and not self.qkv:
            raise ValueError("separate_norms=True gives the reads of q, k and v a norm each: pass qkv=True, too.")
        if self.channels and not self.qkv:
            raise ValueError("channels= chooses among the reads of q, k and v: pass qkv=True, too.")

    def reads(self, dims: Dims) -> range:
        """As in `Dense`, without the output if that is the plain stream."""
        return range(self.first, dims.depth + 2 - self.additive)

    @property
    def reads_qkv(self) -> bool:  # type: ignore[override]
        return self.qkv

    def for_start(self, start: Start) -> AttnRes:
        if start == "paper" or self.scaled or self.form == "difference" or self.normed:
            return self
        return dataclasses.replace(self, form="difference") if self.additive else dataclasses.replace(self, scaled=True)

    def parameters(self, dims: Dims, start: Start) -> dict[str, Tensor]:
        """``queries``, float32 [rows, D], with ``rank`` [rows, R]: w_t for units 2..T and then the output, with ``qkv``
        one for each way.

        Raises:
            UnsupportedTopology: there is no such start; with ``qkv``, no unit begins with an attention; or the heads do
                not divide the width.
        """
        if start == "preserve" and self.normed:
            raise no_preserving_start(self, "with normed=True it sums other sources")
        if start == "preserve" and not self.scaled and self.form == "softmax":
            raise no_preserving_start(self, "its softmax is an average; with scaled=True it is a sum")
        if self.qkv and not (dims.attention or self.few):
            raise no_attention(self, dims.depth, "leave out qkv=True")
        if dims.width % self.heads:
            raise UnsupportedTopology(
                f"topology 'attnres' with heads={self.heads} cannot split hidden states of {dims.width} channels: pass "
                "a number of heads that divides it."
            )
        return {"queries": torch.zeros(sum(self.ways(dims)), self._keys(dims))}

    def natural_scales(self, dims: Dims) -> dict[str, float]:
        """Queries multiply normed vectors, whose size is the square root of the width."""
        return {"queries": OF_STATES * self._keys(dims) ** -0.5}

    def unit_rows(self, dims: Dims) -> dict[str, list[int]]:
        return {"queries": self.each(dims, self.ways(dims))}

    def weights(self, parameters: dict[str, Tensor], dims: Dims) -> AttendedTable | Few:
        """w of each read, for each of its ways; with heads, one row for each head, zero in other heads' channels."""
        w, rows = parameters["queries"].float(), [ways * self.heads for ways in self.ways(dims)]
        if self.heads > 1:
            own = w.new_ones(self.heads).diag().repeat_interleave(dims.width // self.heads, dim=1)  # [H, D]
            w = (w.unsqueeze(1) * own).flatten(0, 1)
        if self.few:
            return self.by_read(dims, w.split(rows))
        first, softmax = next(iter(self.mixing(dims)), dims.depth + 2), self._one_softmax()
        return AttendedTable(
            w,
            self.scaled,
            group=self.group,
            ways=rows,
            normed=self.normed,
            only_scores=not softmax,
            rank=self.rank,
            first=first,
        )

    def mix(self, history: History, weights: AttendedTable | Few, t: int) -> Tensor | Mix | QKVInputs:
        if isinstance(weights, Few):
            query = weights[t].T  # [D, ways], or [R, ways]
            logits = torch.stack([project_normed(x[..., -len(query) :], query, EPS) for x in history.states])
            inverse_norms = torch.stack([inverse_rms(x, EPS) for x in history.states]) if self.normed else None
        elif self._one_softmax():
            return history.mix(weights[t])
        else:
            assert isinstance(history, AttendedHistory)
            logits, inverse_norms = history.scores_of(weights[t]), history.inverse_norms if self.normed else None
        shares = self._shares(logits)  # [n, ..., rows]
        if inverse_norms is not None:
            shares = shares * inverse_norms
        ways = self._mixes(history, shares)
        return self.seen(ways, weights, t, history.newest)

    def finish(self, states: States, weights: AttendedTable | Few, dims: Dims) -> Tensor:
        if not self.additive:
            return super().finish(states, weights, dims)
        if isinstance(weights, Few):
            return states[0]
        newest, history = states
        return total((*history.states, newest))

    def matrix(self, weights: AttendedTable | Few, dims: Dims) -> Tensor:
        """float32 [T + 1, T + 1]: the weights if all scores are equal, as at the start."""
        like = weights[self.mixing(dims)[0]] if isinstance(weights, Few) else weights.queries[0]
        table = torch.ones(dims.depth + 1, dims.depth + 1, dtype=torch.float32, device=like.device).tril()
        if self.scaled or self.form == "difference":
            return table
        for t, size in zip(self.mixing(dims), self.sizes(dims), strict=True):  # unit 1 reads the plain stream
            table[t - 1] = table[t - 1] / size + self.additive * table[t - 1]
        return table

    def is_static(self, weights: AttendedTable | Few) -> bool:
        return False

    def _one_softmax(self) -> bool:
        plain = self.heads == 1 and self.form == "softmax"
        return plain and not (self.qkv or self.normed or self.additive)

    def _keys(self, dims: Dims) -> int:
        """Number of channels from which scores are computed."""
        return min(self.rank or dims.width, dims.width)

    def _shares(self, logits: Tensor) -> Tensor:
        """Weights of n sources from logits [n, ...]; if all are equal, exactly those of the original network."""
        if self.form == "difference":
            e = (logits - logits.detach().amax(0)).exp()
            return 1 + (e - e.mean(0)) / e.sum(0)
        shares, _ = softmax(logits, self.scaled)
        return 1 + shares if self.additive else shares

    def _mixes(self, history: History, shares: Tensor) -> Sequence[Tensor]:
        """For each way, the sum of the n sources with ``shares`` [n, ..., rows]."""
        per_token = shares.movedim(0, -1)  # [..., rows, n]
        if self.heads == 1:
            return history.mixes(None, per_token)  # type: ignore[return-value]
        per_head = per_token.unflatten(-2, (-1, self.heads)).transpose(-3, -2)  # [..., H, ways, n]
        apart = [source.unflatten(-1, (self.heads, -1)) for source in history.states]  # [..., H, D / H]
        found, handed_on = mixes(apart, None, per_head)
        history.states = tuple([one.flatten(-2) for one in handed_on])
        return [one.flatten(-2) for one in found]
