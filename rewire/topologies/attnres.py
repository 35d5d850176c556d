"""Attention Residuals: every read attends over the outputs of earlier units (arXiv 2603.15031)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from rewire.kernels.mix import Mix, pending_mix
from rewire.kernels.tokens import project, rms_norm
from rewire.topologies.base import Dims, Granularity, Start, States, Topology, materialize, no_preserving_start, total
from rewire.topologies.registry import register_topology


@register_topology("attnres")
@dataclasses.dataclass(frozen=True)
class AttnRes(Topology[Tensor]):
    """Attention Residuals: every read is a softmax-weighted sum of all increments, per token (arXiv 2603.15031).

    ``r_t = sum_{i<t} a_ti f_i`` with ``f_0 = x_0`` and ``a_ti = softmax_i(w_t . rmsnorm(f_i))``; one more such read is
    the trunk's output. (The scale of the paper's RMSNorm only ever multiplies ``w_t``; here it is part of it.) Unit 1
    has a single source, thus weight 1 and no query.

    With ``block=S`` every S units form a group whose increments are summed: the sources of a read are ``x_0``, the
    sums of the finished groups and, if it has an increment yet, that of the current one.

    The states are the sources and then their scores ``w_t . rmsnorm(f_i)``, [..., later reads]: a source is normed
    and projected when it is first read, once for all queries.

    **Paper start.** ``w = 0``: each read is the average of its sources. A branch that begins with a norm does not see
    the difference to their sum.

    **Preserving start.** With ``scaled=True`` the weights of n sources add up to n: at ``w = 0`` they are exactly 1,
    and a read sums what the original network sums, in its order and thus bitwise in float32 and float64 (with groups
    of several units, to rounding). Without it there is none.

    From both, all queries have a gradient at once. If every branch starts at zero output, only the output's has one at
    first (the score of ``x_0``); all others move from the second step on.

    Args:
        block: S, 1 or more; None is 1, no groups.
        scaled: weights add up to the number of sources, not to 1.

    Raises:
        ValueError: block is below 1.
    """

    granularity: ClassVar[Granularity] = "sublayer"  # the paper's layers: attentions and MLPs, each by itself
    needs_width: ClassVar[bool] = True

    block: int | None = None
    scaled: bool = False

    def __post_init__(self) -> None:
        if self.block is not None and (not isinstance(self.block, int) or self.block < 1):
            raise ValueError(f"block={self.block!r}: it has to be a whole number, 1 or more, or None.")

    def parameters(self, dims: Dims, start: Start) -> dict[str, Tensor]:
        """``queries``, float32 [T, D]: w_t of units 2..T, then the output's.

        Raises:
            UnsupportedTopology: a preserving start without ``scaled``.
        """
        if start == "preserve" and not self.scaled:
            why = "its softmax starts as an average where that sums; the option scaled=True makes it a sum"
            raise no_preserving_start("attnres", why)
        return {"queries": torch.zeros(dims.depth, dims.width)}

    def weights(self, parameters: dict[str, Tensor], dims: Dims) -> Tensor:
        """The queries, float32 [T, D]."""
        return parameters["queries"].float()

    def read(self, states: States, weights: Tensor, t: int) -> tuple[Tensor | Mix, States]:
        """``r_t``, and the states with the scores of the sources that had none yet."""
        sources, scores = self._split(states, t)
        if t == 1:
            return sources[0], states
        later = weights[t - 2 :].T  # [D, reads], of unit t and all after it
        scores += tuple(project(rms_norm(source), later) for source in sources[len(scores) :])
        column = t - 2 - len(weights)  # from the end: earlier sources have scores of earlier reads, too
        logits = torch.stack([score[..., column] for score in scores])  # [n, ...]
        shares = _softmax(logits, len(sources) if self.scaled else 1)
        return pending_mix(sources, None, scores=shares.unsqueeze(-1).unbind()), sources + scores

    def write(self, states: States, weights: Tensor, t: int, *branches: Tensor) -> States:
        sources, scores = self._split(states, t)
        f = total(branches)
        if (t - 1) % self._group:  # the group has a sum, which becomes another source
            return (*sources[:-1], sources[-1] + f, *scores[:-1])
        return (*sources, f, *scores)

    def finish(self, states: States, weights: Tensor, dims: Dims) -> Tensor:
        return materialize(self.read(states, weights, dims.depth + 1)[0])

    def matrix(self, weights: Tensor, dims: Dims) -> Tensor:
        """float32 [T + 1, T + 1]: the weights where all scores are equal, as at the start."""
        table = torch.ones(dims.depth + 1, dims.depth + 1, device=weights.device).tril()
        if self.scaled:
            return table
        counts = [self._count(t) for t in range(1, dims.depth + 2)]
        return table / torch.tensor(counts, device=weights.device)[:, None]

    @property
    def _group(self) -> int:
        return self.block or 1

    def _count(self, t: int) -> int:
        """Sources of read t: x_0, and one for each group of units 1..t-1."""
        return 1 - (1 - t) // self._group

    def _split(self, states: States, t: int) -> tuple[States, States]:
        """Sources of read t, and the scores of those that have been read."""
        count = self._count(t)
        return states[:count], states[count:]


def _softmax(logits: Tensor, scale: int) -> Tensor:
    """``scale`` times the softmax over dimension 0 of [n, ...]; exactly 1 for equal logits and scale n."""
    e = (logits - logits.detach().amax(0)).exp()
    return e * scale / e.sum(0)  # in this order: n / n is exactly 1, n * (1 / n) is not
