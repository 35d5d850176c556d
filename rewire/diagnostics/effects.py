"""The results of `rewire.ablate`: effects of ablations."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor

from rewire.console import Shown, table
from rewire.files import to_json

if TYPE_CHECKING:
    from rewire.diagnostics.depth_graph import DepthGraph

What = Literal["unit", "source", "edge"]
_SHOWN = 12  # edges in a printed report


@dataclasses.dataclass(frozen=True)
class Effect:
    """The effect of one ablation.

    Attributes:
        what: "unit": without its branch output; "source": without a value in all sums that learn a weight for it;
            "edge": without it in one of them.
        trunk: its name.
        source: the value, or the unit's branch output ``f3``.
        destination: of an edge, the sum.
        path: of a unit.
        weight: of an edge, as in `rewire.graph`.
        without: how much the loss rises with weight 0.
        plain: how much it rises with the weight of the plain network, that of the topology's preserving start; None if
            it has none, and for units.
    """

    what: What
    trunk: str
    source: str
    destination: str
    path: str
    weight: float | None
    without: float
    plain: float | None


@dataclasses.dataclass(frozen=True)
class Ablation(Shown):
    """What `rewire.ablate` measured. Printing it shows tables.

    Attributes:
        loss: the mean over the batches, with nothing left out.
        effects: the measured effects: units, then sources, then edges.
        asked: number of effects that were to be measured.
        refused: for each trunk, why it has no edges or sources that could be left out.
        in_turn: why sets of weights did not run at once, if they should have.
    """

    loss: float
    effects: tuple[Effect, ...]
    asked: int
    refused: Mapping[str, str]
    in_turn: str = ""

    @property
    def units(self) -> list[Effect]:
        """The effects of units."""
        return [effect for effect in self.effects if effect.what == "unit"]

    @property
    def sources(self) -> list[Effect]:
        """The effects of sources."""
        return [effect for effect in self.effects if effect.what == "source"]

    @property
    def edges(self) -> list[Effect]:
        """The effects of edges."""
        return [effect for effect in self.effects if effect.what == "edge"]

    def correlation(self, trunk: str | None = None) -> float | None:
        """Spearman's rank correlation of ``|weight|`` and the rise of the loss without it, over the measured edges.

        Args:
            trunk: only this one; None: all.

        Returns:
            From -1 to 1; None if there are fewer than 3 edges, or all are alike.
        """
        edges = [effect for effect in self.edges if trunk in (None, effect.trunk) and effect.weight is not None]
        return spearman([abs(edge.weight or 0.0) for edge in edges], [edge.without for edge in edges])

    def strongest(self, k: int, by: Literal["without", "weight"] = "without") -> list[Effect]:
        """The k measured edges without which the loss rises most, or those of the largest weight.

        Each was left out alone: together they may do less than their sum, or more.

        Raises:
            ValueError: there are not as many, or no such score.
        """
        if by not in ("without", "weight"):
            raise ValueError(f"by={by!r}: it has to be 'without' or 'weight'.")
        if not 0 < k <= len(self.edges):
            raise ValueError(f"k={k}: {len(self.edges)} edges were measured.")
        score = {"without": lambda edge: edge.without, "weight": lambda edge: abs(edge.weight or 0.0)}[by]
        return sorted(self.edges, key=score, reverse=True)[:k]

    def to_json(self) -> str:
        """All numbers as JSON."""
        return to_json({**dataclasses.asdict(self), "correlation": self.correlation()})

    def onto(self, graph: DepthGraph) -> None:
        """Put ``without`` and ``plain`` on the edges, units and states of this model's graph."""
        for effect in self.effects:
            node, values = f"{effect.trunk}/{effect.source}", {"without": effect.without, "plain": effect.plain}
            if effect.what == "edge":
                graph.edges[node, f"{effect.trunk}/{effect.destination}"].update(values)
            else:
                graph.nodes[node].update(values)

    def shown(self) -> Iterator[RenderableType]:
        known = f", {len(self.effects)} of {self.asked} measured" if len(self.effects) < self.asked else ""
        yield Text(f"Loss {self.loss:.4f}; how much it rises without a part, each alone{known}", style="bold")
        if self.units:
            yield self._units()
        if self.sources:
            yield self._sources()
        if self.edges:
            yield self._edges()
            yield self._told()
        for trunk, why in self.refused.items():
            yield Text(f"No edges in {trunk}: {why}", overflow="fold")
        if self.in_turn:
            yield Text(f"Sets of weights ran in turn, not at once: {self.in_turn}", overflow="fold")

    def _units(self) -> Table:
        rows = ((unit.trunk, unit.source[1:], unit.path, _signed(unit.without)) for unit in self.units)
        return table(("trunk", "unit", "path", "without"), rows)

    def _sources(self) -> Table:
        rows = ((one.trunk, one.source, _signed(one.without), _signed(one.plain)) for one in self.sources)
        return table(("trunk", "source", "without", "as in the plain network"), rows)

    def _edges(self) -> Table:
        title = f"The {_SHOWN} of {len(self.edges)} edges that count most" if len(self.edges) > _SHOWN else None
        rows = []
        for edge in self.strongest(min(_SHOWN, len(self.edges))):
            weight = "" if edge.weight is None else f"{edge.weight:.3g}"
            rows.append((edge.trunk, edge.source, edge.destination, weight, _signed(edge.without), _signed(edge.plain)))
        return table(("trunk", "from", "into", "weight", "without", "as in the plain network"), rows, title)

    def _told(self) -> Text:
        found = self.correlation()
        if found is None:
            return Text("Weights and ablations cannot be correlated: there are too few edges, or all are equal.")
        return Text(
            f"Rank correlation of |weight| and rise: {found:.2f} (1: weights show which edges matter; 0: they do not)."
        )


def check_ablation(given: object) -> None:
    """Raise TypeError if ``given`` is neither a result of `rewire.ablate` nor None."""
    if given is not None and not isinstance(given, Ablation):
        raise TypeError(f"ablation must be what rewire.ablate returned, not {type(given).__name__}.")


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Spearman's rank correlation; None for fewer than 3 pairs, or if all values of either are equal."""
    if len(a) < 3 or len(set(a)) == 1 or len(set(b)) == 1:
        return None
    ranks = torch.stack([_ranks(a), _ranks(b)])
    return float(torch.corrcoef(ranks)[0, 1])


def _ranks(values: Sequence[float]) -> Tensor:
    """Ranks in float64; equal values share the mean of their ranks."""
    _, group, counts = torch.tensor(values, dtype=torch.float64).unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts - 1) / 2)[group]


def _signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.2e}"
