"""Sums of states in plain torch for ejected models, with the interface of those that use kernels.

Names defined here replace the same names of `rewire.mixes`, `rewire.kernels` and `rewire.ranks`: see
`rewire.ejecting.runtime`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from rewire.mixes.attended import AttendedHistory
from rewire.mixes.blocks import Blocks
from rewire.mixes.by_state import first_mixes, parts
from rewire.mixes.history import Free, History, Row
from rewire.mixes.mix import _by_autograd, mix
from rewire.mixes.tokens import _Project, _ProjectNormed, at_least_zero, outside_autocast, project

UnitsLeft = contextlib.nullcontext  # nothing is recomputed here


class Watched(nn.Module):
    """Base of connections, which are not watched here."""


def compare(connection: Watched, x: Tensor, mesh: object) -> None:
    """Compare nothing: all ranks have the same files."""


def uses_kernels(x: Tensor) -> bool:
    """False: there are no kernels here."""
    return False


def compiled_sinkhorn(logits: Tensor) -> Any:
    """None: there is no compiled loop of Sinkhorn-Knopp here."""
    return None


def read_off(x: Tensor, weight: Tensor, eps: float | None = None, clamped: bool = False) -> tuple[Tensor, Tensor]:
    """``x @ weight`` in float32, with ``eps`` of the normed x, and with ``clamped`` at least 0; and ``x``."""
    with outside_autocast(x.device):
        scores = _Project.apply(x, weight) if eps is None else _ProjectNormed.apply(x, weight, eps)
    return at_least_zero(scores) if clamped else scores, x


def read_off_hidden(x: Tensor, weight: Tensor, out: Tensor, static: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``gelu(rms_norm(x) @ weight) @ out + static``, and ``x``."""
    hidden, x = read_off(x, weight, eps)
    return project(F.gelu(hidden), out) + static, x


def read_off_streams(streams: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, None]:
    """`read_off` of streams [..., n, D], each or concatenated; the streams; and no claim on them."""
    products, x = read_off(streams if weight.shape[0] == streams.shape[-1] else streams.flatten(-2), weight, eps)
    return products, x.view(streams.shape), None


def read_off_gates(
    gating: object,
    formula: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
    streams: Tensor,
    weight: Tensor,
    static: Tensor,
    scale: Tensor,
    eps: float,
    known: None = None,
) -> tuple[Tensor, Tensor, Tensor, None]:
    """``formula`` of the scores of `read_off_streams`, static and scale; and what else that returns."""
    products, streams, claim = read_off_streams(streams, weight, eps)
    return *formula(products, static, scale), streams, claim


def sparing(x: Tensor) -> contextlib.AbstractContextManager[None]:
    """An empty context: autograd saves everything."""
    return contextlib.nullcontext()


def norm_again(norm: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return norm(x)


made_again = norm_again


def keep_some(streams: Sequence[Tensor]) -> Sequence[Tensor]:
    return streams


def merged_again(merge: Callable[..., Tensor], x: Tensor, branches: Sequence[Tensor]) -> Tensor:
    return merge(x, *branches)


@dataclasses.dataclass(eq=False)
class Mix:
    """A weighted sum that has not been computed yet.

    Attributes:
        sources, weights, scores, added: as in `mix`.
        again: not used here.
    """

    sources: tuple[Tensor, ...] = ()
    weights: Sequence[Tensor | float] | Tensor | None = None
    scores: tuple[Tensor, ...] = ()
    added: tuple[Tensor, ...] = ()
    again: bool = False

    def value(self) -> Tensor:
        """The sum, [..., D]."""
        if self.sources:
            return _by_autograd(self.sources, self.weights, self.scores, self.added)
        total = self.added[0]
        for branch in self.added[1:]:
            total = total + branch
        return total

    def normed(self, module: nn.Module, _: Callable[[Tensor], Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """The sum, and the output of the norm ``module`` for it."""
        total = self.value()
        return total, module(total)


class Table(Free):
    """Weights of successive reads, each of all states so far, with one or more ways: see `rewire.mixes.claimed`.

    Attributes:
        rows: for each read its weights, [ways, n] or [ways, n, D].
        first: for each read, the number of its first query.
        queries: for each state, the queries of the reads that have it, [m, D]; empty without queries.
        own: for each read, its own queries, [ways, D].
    """

    def __init__(
        self, flat: Tensor, ways: int | Sequence[int], first: int = 1, group: int = 1, queries: Tensor | None = None
    ) -> None:
        ways = [1] * ways if isinstance(ways, int) else ways
        self._ask(queries, ways, first, group)
        rows = parts(flat, [way * self.blocks.count(number) for number, way in enumerate(ways)])
        self.rows = [row.unflatten(0, (way, -1)) for row, way in zip(rows, ways, strict=True)]

    def __getitem__(self, t: int) -> Row:
        """The weights of read t."""
        return Row(self, t - self.blocks.first)

    def _ask(self, queries: Tensor | None, ways: Sequence[int], first: int, group: int) -> None:
        self.blocks, self.first = Blocks(len(ways), first, len(ways), len(ways), group), first_mixes(ways)
        if queries is not None:
            self.starts = [self.first[self.blocks.first_mix(state)] for state in range(self.blocks.states)]
            self.queries, self.own = tuple([queries[start:] for start in self.starts]), queries.split(list(ways))

    def history(self) -> Any:
        return History(self)


class AttendedTable(Table):
    """Queries of successive reads, each of all states so far; arguments as in `rewire.mixes.attended`."""

    def __init__(
        self,
        queries: Tensor,
        scaled: bool,
        group: int,
        ways: Sequence[int],
        normed: bool,
        only_scores: bool,
        rank: int | None,
        first: int,
    ) -> None:
        self._ask(queries, [0, *ways], first - 1, group)
        self.scaled, self.normed, self.rank = scaled, normed, rank

    def history(self) -> Any:
        return AttendedHistory(self)


def mixes(
    sources: Sequence[Tensor], weights: Tensor | None, scores: Tensor | None = None
) -> tuple[list[Tensor], Sequence[Tensor]]:
    """``y_m = sum_i (w_mi + s_mi) x_i`` for each m.

    Args:
        sources: N of [..., D], of one shape.
        weights: float32 [M, N] or, per channel, [M, N, D]; None: zero.
        scores: weights per token, float32 [..., M, N].

    Returns:
        M of [..., D], rounded once, in the dtype of plain adds; and the sources.
    """
    outputs = len(weights) if weights is not None else scores.shape[-2]  # type: ignore[union-attr]
    of_all = [None] * outputs if weights is None else weights
    per_token = [None] * outputs if scores is None else [way.split(1, dim=-1) for way in scores.unbind(-2)]
    return [mix(sources, w, scores=s) for w, s in zip(of_all, per_token, strict=True)], sources


def read_streams(streams: Tensor, weights: Tensor, claim: None = None) -> tuple[Tensor, Tensor]:
    """`combine` without branches, [..., k C], and the streams."""
    return combine(streams, weights).flatten(-2), streams


def write_and_read(
    streams: Tensor, table: Tensor, weights: Tensor, branches: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """`combine`, and a read of the new streams.

    Args:
        streams: H [..., n, C].
        table: float32 [n + 1, n + 1]: row j has the weights of H and, in the last column, of each branch in H'_j.
        weights: float32 [n, 1], the weights of H' in the read.
        branches: f [..., C].

    Returns:
        H' [..., n, C], and the read, [..., C].
    """
    streams = combine(streams, table[:-1].mT, [f.unsqueeze(-2) for f in branches])
    return streams, combine(streams, weights).squeeze(-2)


def write_and_project(
    streams: Tensor, weights: Tensor, branches: Sequence[Tensor], projection: Tensor, eps: float
) -> tuple[Tensor]:
    """`combine`, without a projection of the new streams."""
    return (combine(streams, weights, branches),)


def combine(streams: Tensor, weights: Tensor, branches: Sequence[Tensor] = ()) -> Tensor:
    """``H'_j = sum_i w_ij H_i + w_nj sum_f f_j``, in float32 (float64 for float64), rounded once.

    Args:
        streams: H [..., n, C].
        weights: w [..., n + 1, k], from stream i, and in the last row from each branch, to row j of the result;
            [n + 1, k] if it does not depend on the token. Without branches there are n rows.
        branches: f [..., k, C] or, the same for all j, [..., 1, C].

    Returns:
        [..., k, C]
    """
    sources = streams.unsqueeze(-2).unbind(-3)  # n of [..., 1, C]
    scores = weights.unsqueeze(-1).unbind(-3)  # n + 1 of [..., k, 1]
    n = len(sources)
    return mix((*sources, *branches), None, scores=(*scores[:n], *scores[n:] * len(branches)))
