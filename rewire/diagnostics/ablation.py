"""rewire.ablate: what the loss is without an edge, a source or a unit."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from rewire.console import Shown, progress
from rewire.diagnostics.outline import about, mean_of, outline_of, preserved
from rewire.diagnostics.recording import (
    Change,
    Seen,
    plain_runs,
    recorder,
    rederive,
    replace,
    running_copy,
    sources_in,
)
from rewire.diagnostics.wired import Ends, Terms
from rewire.errors import BadExampleInputs, UnsupportedTopology
from rewire.freezing import constant_program
from rewire.passes.checks import check_loaded, check_unwrapped
from rewire.runtime.connection import Connection, connections, learned_connections
from rewire.runtime.layout import Layout
from rewire.studies.task import loss_of_model
from rewire.topologies.program import Program, branch_of, learned_terms

if TYPE_CHECKING:
    from rewire.diagnostics.depth_graph import DepthGraph

What = Literal["unit", "source", "edge"]
_SHOWN = 12  # edges in a printed report
_AT_ONCE = 8


@dataclasses.dataclass(frozen=True)
class Effect:
    """What one ablation does.

    Attributes:
        what: "unit": without what it adds; "source": without a value in all sums that learn how much of it they take;
            "edge": without it in one of them.
        trunk: its name.
        source: the value, or the unit's branch output ``f3``.
        destination: of an edge, the sum.
        path: of a unit.
        weight: of an edge, as `rewire.graph` has it.
        without: how much the loss rises with weight 0.
        plain: how much it rises with the weight of the plain network, that of the topology's preserving start; None if
            it has none, and of units.
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
        loss: the mean over the batches, nothing left out.
        effects: what was measured, units first, then sources, then edges.
        asked: how many there are.
        refused: by trunk, why it has no edges or sources that could be left out.
        in_turn: why sets of weights did not run at once, where they were to.
    """

    loss: float
    effects: tuple[Effect, ...]
    asked: int
    refused: Mapping[str, str]
    in_turn: str = ""

    @property
    def units(self) -> list[Effect]:
        """The units."""
        return [effect for effect in self.effects if effect.what == "unit"]

    @property
    def sources(self) -> list[Effect]:
        """The sources."""
        return [effect for effect in self.effects if effect.what == "source"]

    @property
    def edges(self) -> list[Effect]:
        """The edges."""
        return [effect for effect in self.effects if effect.what == "edge"]

    def correlation(self, trunk: str | None = None) -> float | None:
        """Spearman's, of ``|weight|`` and of the rise of the loss without it, over the measured edges.

        Args:
            trunk: of this one; None: of all.

        Returns:
            From -1 to 1; None where there are less than 3 edges, or all are alike.
        """
        edges = [effect for effect in self.edges if trunk in (None, effect.trunk) and effect.weight is not None]
        return spearman([abs(edge.weight or 0.0) for edge in edges], [edge.without for edge in edges])

    def strongest(self, k: int, by: Literal["without", "weight"] = "without") -> list[Effect]:
        """The k edges of all that were measured without which the loss rises most, or of the largest weight.

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
        """All numbers, as an object."""
        return json.dumps({**dataclasses.asdict(self), "correlation": self.correlation()}, indent=1)

    def onto(self, graph: DepthGraph) -> None:
        """Put ``without`` and ``plain`` on the edges, units and states of this model's graph."""
        for effect in self.effects:
            node, values = f"{effect.trunk}/{effect.source}", {"without": effect.without, "plain": effect.plain}
            if effect.what == "edge":
                graph.edges[node, f"{effect.trunk}/{effect.destination}"].update(values)
            else:
                graph.nodes[node].update(values)

    # -- shown ---------------------------------------------------------------------------------------------------------

    def __rich_console__(self, console: Console, options: object):  # type: ignore[no-untyped-def]
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
        table = Table("trunk", "unit", "path", "without", box=box.SIMPLE_HEAD)
        for unit in self.units:
            table.add_row(unit.trunk, unit.source[1:], unit.path, _signed(unit.without))
        return table

    def _sources(self) -> Table:
        table = Table("trunk", "source", "without", "as in the plain network", box=box.SIMPLE_HEAD)
        for source in self.sources:
            table.add_row(source.trunk, source.source, _signed(source.without), _signed(source.plain))
        return table

    def _edges(self) -> Table:
        title = f"The {_SHOWN} of {len(self.edges)} edges that count most" if len(self.edges) > _SHOWN else None
        table = Table("trunk", "from", "into", "weight", "without", "as in the plain network", box=box.SIMPLE_HEAD)
        table.title, table.title_justify = title, "left"
        for edge in self.strongest(min(_SHOWN, len(self.edges))):
            weight = "" if edge.weight is None else f"{edge.weight:.3g}"
            values = _signed(edge.without), _signed(edge.plain)
            table.add_row(edge.trunk, edge.source, edge.destination, weight, *values)
        return table

    def _told(self) -> Text:
        found = self.correlation()
        if found is None:
            return Text("Weights and ablations cannot be correlated: too few edges, or all alike.")
        return Text(f"Rank correlation of |weight| and rise: {found:.2f} (1: weights tell what counts; 0: nothing).")


def ablate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    loss: Callable[[Any, Any], Tensor] = loss_of_model,
    of: Sequence[What] | None = None,
    seconds: float | None = None,
    at_most: int | None = None,
    at_once: int = _AT_ONCE,
    seed: int = 0,
) -> Ablation:
    """Measure the loss of a rewired model without each edge, each source and each unit.

    Weights mislead: one may be large where nothing listens. Here a weight is set to 0, and to that of the plain
    network, exactly and with all others as they are (a softmax is not made anew), and the loss is measured again. Edges
    are those that `rewire.freeze` counts: terms of the sums with learned weights. A unit is left out by setting what it
    adds to 0; that works for every topology.

    Where all weights are constant, several sets of them run at once (`torch.func.vmap`); weights that depend on the
    token are set where they are used, in turn. The model stays as it is: a copy runs, in evaluation mode, without
    gradients, by plain torch operations.

    Args:
        model: a rewired or frozen model.
        batches: what the loss is the mean over; kept.
        loss: of (model, batch), a scalar; default: ``model(**batch).loss``. It may call the model, and read its
            attributes.
        of: "unit", "source", "edge", or some of these; None: all that a trunk has.
        seconds: stop after that time; one pass is always made. What is left out then is a random part of the edges.
        at_most: measure no more edges than that, chosen at random.
        at_once: sets of weights that run at once; fewer where memory does not suffice.
        seed: of the choice, and of what is random in the model.

    Raises:
        RewireError: the model was not rewired, or is on the meta device.
        UnsupportedTopology: sources or edges were asked for, and a trunk has none that could be set.
        WrappedModel: the model is sharded or compiled.
        BadExampleInputs: there are no batches, or the model does not run on one.
        ValueError: an option is not one of those values.

    Example:
        >>> found = rewire.ablate(rewired, [x], loss=lambda model, batch: model(batch).square().mean())
        >>> len(found.units), found.units[0].path
        (6, 'blocks.0.attn')
    """
    unknown = set(of or ()) - set(get_args(What))
    if unknown or at_once < 1 or (at_most is not None and at_most < 0):
        raise ValueError(f"of={of!r}, at_most={at_most!r}, at_once={at_once!r}: 'unit', 'source' or 'edge'; 0 or more.")
    learned = learned_connections(model, "there is nothing to ablate")
    check_unwrapped(model)
    check_loaded(model, "ablated")
    kept = list(batches)
    if not kept:
        raise BadExampleInputs("there are no batches: the loss is measured on them.")
    bench = _Bench(model, learned, kept, loss, at_once, seed)
    base = bench.base()
    refused = {name: trunk.refused for name, trunk in bench.trunks.items() if trunk.refused}
    if refused and {"source", "edge"} & set(of or ()):
        raise UnsupportedTopology("; ".join(f"trunk '{name}': {why}" for name, why in refused.items()))
    wanted = [ablation for ablation in bench.ablations() if of is None or ablation.what in of]
    chosen = _chosen(wanted, at_most, seconds is not None, seed)
    end = None if seconds is None else time.monotonic() + seconds
    with progress(f"ablating {type(model).__name__}", len(chosen)) as tick:
        effects = tuple(bench.run(chosen, end, tick))
    return Ablation(base, effects, len(wanted), refused, bench.in_turn)


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Spearman's rank correlation; None of fewer than 3 pairs, or where all of either are equal."""
    if len(a) < 3 or len(set(a)) == 1 or len(set(b)) == 1:
        return None
    ranks = torch.stack([_ranks(a), _ranks(b)])
    return float(torch.corrcoef(ranks)[0, 1])


def _ranks(values: Sequence[float]) -> Tensor:
    """Ranks in float64; equal values share the mean of theirs."""
    _, group, counts = torch.tensor(values, dtype=torch.float64).unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts - 1) / 2)[group]


def _signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.2e}"


def _chosen(wanted: Sequence[_Ablation], at_most: int | None, stops: bool, seed: int) -> list[_Ablation]:
    """Edges last, and in random order if some may be left out: what is measured is then a fair sample."""
    edges = [ablation for ablation in wanted if ablation.what == "edge"]
    if stops or (at_most is not None and at_most < len(edges)):
        random.Random(seed).shuffle(edges)
    return [ablation for ablation in wanted if ablation.what != "edge"] + edges[:at_most]


# -- what is changed ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Ablation:
    """One ablation: the edges that it sets, or the unit that it leaves out."""

    what: What
    trunk: str
    source: str
    destination: str = ""
    path: str = ""
    weight: float | None = None
    edges: tuple[Ends, ...] = ()

    @property
    def unit(self) -> int | None:
        return int(self.source[1:]) if self.what == "unit" else None

    def measured(self, without: float, plain: float | None) -> Effect:
        return Effect(self.what, self.trunk, self.source, self.destination, self.path, self.weight, without, plain)


class _Trunk:
    """One trunk of the copy that runs.

    Attributes:
        outline: its sums.
        terms: of a static one, the terms of its program, whose weights are a buffer of the connection.
        now: of others, what is set: by destination and source, of each term the new weight; `only` has the
            destinations, and `off` units that are left out.
        seen: of these, weights as they were in the first pass.
        plain: the same of the plain network; None where it is not known.
        refused: why there are no edges to set; empty if there are.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection, self.layout = connection, connection.layout
        self.terms: Terms | None = None
        self.refused, self.outline = "", outline_of(connection)
        self.now, self.only, self.off = dict[Ends, list[Any]](), set[str](), set[int]()
        self.seen, self.sources = dict[Ends, Seen](), sources_in(self.outline.program)
        self.record: Change | None = recorder(self.seen, self.outline.program)
        try:
            if self.outline.kind == "static":
                self.terms = Terms(constant_program(connection)[0])
        except UnsupportedTopology as error:
            self.refused = str(error)
        if self.outline.kind == "matrix":
            self.refused = (
                f"topology '{self.layout.topology.registered_name}' does more than add up states with weights, so that "
                "none of them can be set alone. Its units can be left out"
            )
        self.plain = self._plain()

    def _plain(self) -> dict[Ends, list[Any]] | None:
        outline = None if self.refused else preserved(self.layout.topology, self.layout.dims)
        plain = None if outline is None else _weights(outline.program)
        return plain if plain and {*plain} == {*_weights(self.outline.program)} else None

    def install(self, copied: nn.Module) -> None:
        """Let this trunk of the copy take what is set."""
        name, old = self.layout.trunk, self.layout
        if self.terms is not None:
            topology = self.terms.topology(repr(old.topology))
            layout = Layout(name, topology, old.units, old.dims.width, (), old.channel_dim, old.posts, old.loops)
            connections(copied)[name].become(layout)
            self.set({}, copied)
            return
        if not self.refused:
            self.only.update(self.sources)
            replace(copied, name, self.outline, self._change, self.only)
        rederive(copied, name, _Skips, off=self.off)

    def _change(self, target: str, weights: list[Tensor]) -> list[Tensor] | None:
        """What `recording` calls where weights depend on the input."""
        if self.record is not None:
            self.record(target, weights)
            return None
        found, counts = list[Tensor](), dict[str, int]()
        for source, weight in zip(self.sources[target], weights, strict=True):
            number = counts[source] = counts.get(source, -1) + 1
            new = self.now.get((target, source))
            found.append(weight if new is None else torch.full_like(weight, float(new[number])))
        return found

    def changes(self, ablation: _Ablation, plain: bool) -> dict[Ends, list[Any]]:
        """By destination and source, new weights of its terms."""
        numbers = _weights(self.outline.program)
        edges = ablation.edges
        if ablation.what == "unit":
            edges = tuple(ends for ends in numbers if ends[1] == ablation.source)
        if plain:
            assert self.plain is not None
            return {ends: self.plain[ends] for ends in edges}
        return {ends: [0.0] * len(numbers[ends]) for ends in edges}

    def differs(self, ablation: _Ablation, plain: bool) -> bool:
        """Whether an ablation sets weights to others than they have, and not to those that the other one sets."""
        if plain and (self.plain is None or ablation.what == "unit"):
            return False
        new = self.changes(ablation, plain)
        if plain and _same(new, self.changes(ablation, False)):
            return False
        return self.terms is None or not _same(new, _weights(self.outline.program))

    def is_plain(self, ablation: _Ablation) -> bool:
        """Whether the weights of an ablation are those of the plain network, and constant."""
        known = self.terms is not None and self.plain is not None and ablation.what != "unit"
        return known and _same(self.changes(ablation, True), _weights(self.outline.program))

    def set(self, changes: dict[Ends, list[Any]], copied: nn.Module, unit: int | None = None) -> None:
        """Run with these weights; without this unit."""
        if self.terms is not None:
            connections(copied)[self.layout.trunk].get_buffer("terms").copy_(self.terms.set(changes))
            return
        self.record, self.now = None, changes if unit is None else {}
        self.only.clear()
        self.only.update(target for target, _ in self.now)
        self.off.clear()
        self.off.update(() if unit is None else (unit,))

    def ablations(self) -> Iterator[_Ablation]:
        name, program = self.layout.trunk, self.outline.program
        for t in range(1, len(program.units) + 1):
            yield _Ablation("unit", name, branch_of(t), path=about(self.connection, t)["path"])
        if self.refused:
            return
        edges: dict[Ends, float] = {}
        for line, term, learned in learned_terms(program):
            if learned:
                ends = line.target, term.source
                edges[ends] = edges.get(ends, 0.0) + mean_of(term.weight)
        edges |= {ends: seen.mean for ends, seen in self.seen.items() if ends in edges}
        for source in dict.fromkeys(source for _, source in edges):
            if not source.startswith("f"):  # without a branch output: that is its unit
                yield _Ablation("source", name, source, edges=tuple(ends for ends in edges if ends[1] == source))
        for ends, weight in edges.items():
            yield _Ablation("edge", name, ends[1], ends[0], weight=weight, edges=(ends,))


class _Bench:
    """What runs: a copy of the model, on the batches.

    Attributes:
        trunks: by name.
        in_turn: why sets of weights did not run at once, where they were to.
    """

    def __init__(
        self,
        model: nn.Module,
        learned: Mapping[str, Connection],
        batches: Sequence[Any],
        loss: Callable[[Any, Any], Tensor],
        at_once: int,
        seed: int,
    ) -> None:
        self.batches, self.loss, self.at_once, self.seed, self.in_turn = batches, loss, at_once, seed, ""
        self.copied = running_copy(model)
        self.trunks = {name: _Trunk(connection) for name, connection in learned.items()}
        for trunk in self.trunks.values():
            trunk.install(self.copied)

    def ablations(self) -> Iterator[_Ablation]:
        """All that there are, in the order in which they are told."""
        found = [ablation for trunk in self.trunks.values() for ablation in trunk.ablations()]
        for what in get_args(What):
            yield from (ablation for ablation in found if ablation.what == what)

    def base(self) -> float:
        """The loss with nothing left out. It comes first, and sees the weights."""
        loss = self._loss()
        for trunk in self.trunks.values():
            trunk.set({}, self.copied)
        return loss

    def run(self, chosen: Sequence[_Ablation], end: float | None, tick: Callable[[], None]) -> Iterator[Effect]:
        """The effects, in turn, until the time is over."""
        self.loss_now = self._loss()
        for name, group in itertools.groupby(chosen, lambda ablation: ablation.trunk):
            waiting = [*group]
            while waiting and (end is None or time.monotonic() < end):
                some, waiting = waiting[: self.at_once], waiting[self.at_once :]
                yield from self._measured(self.trunks[name], some)
                for _ in some:
                    tick()

    def _measured(self, trunk: _Trunk, some: Sequence[_Ablation]) -> Iterator[Effect]:
        runs = [(ablation, plain) for ablation in some for plain in (False, True) if trunk.differs(ablation, plain)]
        rises = dict(zip(runs, self._rises(trunk, runs), strict=True))
        for ablation in some:
            without = rises.get((ablation, False), 0.0)
            plain = rises.get((ablation, True), 0.0 if trunk.is_plain(ablation) else without)
            known = trunk.plain is not None and ablation.what != "unit"
            yield ablation.measured(without, plain if known else None)

    def _rises(self, trunk: _Trunk, runs: Sequence[tuple[_Ablation, bool]]) -> list[float]:
        if trunk.terms is not None and self.at_once > 1 and runs:
            sets = [trunk.terms.values, *(trunk.terms.set(trunk.changes(*run)) for run in runs)]
            while self.at_once > 1:
                try:
                    return self._together(trunk, sets)
                except torch.OutOfMemoryError:
                    self.at_once //= 2
                except Exception as error:  # vmap does not know an operation of the model, or follow it
                    self.in_turn, self.at_once = f"{type(error).__name__}: {error}", 1
        found = []
        for ablation, plain in runs:
            trunk.set(trunk.changes(ablation, plain), self.copied, ablation.unit)
            found.append(self._loss() - self.loss_now)
        trunk.set({}, self.copied)
        return found

    def _together(self, trunk: _Trunk, sets: Sequence[Tensor]) -> list[float]:
        """How much the loss rises from the first of these sets of weights to each of the others: with all at once."""
        connection = connections(self.copied)[trunk.layout.trunk]
        (path,) = (path for path, module in self.copied.named_modules() if module is connection)
        device = connection.get_buffer("terms").device
        found = list[float]()
        for first in range(1, len(sets), self.at_once):
            some = torch.stack([sets[0], *sets[first : first + self.at_once]]).to(device)
            losses = self._mean(
                lambda batch, some=some: torch.func.vmap(  # type: ignore[misc]
                    lambda values: self.loss(_With(self.copied, {f"{path}.terms": values}), batch), randomness="same"
                )(some)
            )
            found += (losses[1:] - losses[0]).tolist()
        return found

    def _loss(self) -> float:
        return float(self._mean(lambda batch: self.loss(self.copied, batch)))

    def _mean(self, loss: Callable[[Any], Tensor]) -> Tensor:
        """The mean over the batches, float64."""
        losses = list[Tensor]()
        for batch in self.batches:
            with torch.no_grad(), plain_runs(self.copied, self.seed):
                losses.append(loss(batch).detach().double().cpu())
        return torch.stack(losses).mean(0)


class _With:
    """The model with other buffers: what a loss may call."""

    def __init__(self, model: nn.Module, buffers: dict[str, Tensor]) -> None:
        self._model, self._buffers = model, buffers

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(self._model, self._buffers, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class _Skips:
    """Of any topology: what some units add is 0."""

    off: set[int]

    def merge(self, states: Any, weights: Any, t: int, *branches: Tensor) -> Any:
        return super().merge(states, weights, t, *self._left(t, branches))  # type: ignore[misc]

    def write(self, states: Any, weights: Any, t: int, *branches: Tensor) -> Any:
        return super().write(states, weights, t, *self._left(t, branches))  # type: ignore[misc]

    def _left(self, t: int, branches: Sequence[Tensor]) -> Sequence[Tensor]:
        return [torch.zeros_like(branch) for branch in branches] if t in self.off else branches


def _same(some: Mapping[Ends, list[Any]], all_: Mapping[Ends, list[Any]]) -> bool:
    """Whether the terms of the former have the same weights in the latter."""
    pairs = (pair for ends, weights in some.items() for pair in zip(weights, all_[ends], strict=True))
    return all(bool((torch.as_tensor(a) == torch.as_tensor(b)).all()) for a, b in pairs)


def _weights(program: Program) -> dict[Ends, list[Any]]:
    """By destination and source, the weights of the terms."""
    found: dict[Ends, list[Any]] = {}
    for line, term, _ in learned_terms(program):
        found.setdefault((line.target, term.source), []).append(term.weight)
    return found
