"""rewire.sparsify: choose the few connections of a dense topology that are worth keeping."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

from rich.console import RenderableType
from rich.text import Text
from torch import nn

import rewire.compiler as compiler
from rewire.console import Shown, progress, table
from rewire.diagnostics.ablating import Bench, Part
from rewire.diagnostics.losses import Loss, loss_of_model
from rewire.errors import BadExampleInputs, UnknownName, UnsupportedTopology, check_choice
from rewire.files import to_json
from rewire.passes.checks import check_loaded, check_unwrapped
from rewire.runtime.connection import Connection, learned_connections
from rewire.topologies import Topology
from rewire.topologies.base import Dims
from rewire.topologies.dense import Dense, DenseIncrements
from rewire.topologies.registry import name_and_options, named_topology
from rewire.topologies.wiring import OUTPUT

_SHOWN = 12  # connections in a printed report
AnyDense: TypeAlias = Dense[Any] | DenseIncrements[Any]
#: How connections are ranked.
Score = Literal["loss", "gradient", "weight"]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A connection that can be kept or left out.

    Attributes:
        unit: the unit that reads, or "output".
        source: the number of the state that it reads, as in `sources=`.
        weight: as in `rewire.graph`; for weights per token the mean.
        score: how much lower the loss is with this connection than with the plain network's only; or another ranking's
            score.
    """

    unit: int | str
    source: int
    weight: float | None
    score: float


@dataclasses.dataclass(frozen=True)
class Kept:
    """A point of the curve.

    Attributes:
        k: number of connections that are kept, those with the highest scores.
        loss: of the model as it is trained, with the others those of the plain network.
        states: hidden states that are held at once, including the newest.
    """

    k: int
    loss: float
    states: int


@dataclasses.dataclass(frozen=True)
class Sparsity(Shown):
    """What `rewire.sparsify` found. Printing it shows tables.

    Attributes:
        trunk: its name.
        topology: of the few connections: its name, and its options but for `sources`.
        loss: of the model as it is.
        candidates: by score, the highest first.
        curve: for 0, 1, 2, 4, .. connections, and for all.
        keep: number of connections that `sources` and `compile` keep by default.
    """

    trunk: str
    topology: tuple[str, Mapping[str, Any]]
    loss: float
    candidates: tuple[Candidate, ...]
    curve: tuple[Kept, ...]
    keep: int

    def sources(self, k: int | None = None) -> dict[int | str, list[int]]:
        """The k connections with the highest scores, as ``sources=`` takes them; by default as many as were asked for.

        Raises:
            ValueError: there are not as many.
        """
        return _by_unit(self.candidates[: self._checked(k)])

    def compile(self, model: nn.Module, k: int | None = None, **options: Any) -> nn.Module:
        """Rewire a plain model with these k connections only, from the preserving start.

        Args:
            model: as it was before it was rewired; `rewire.restore` gives that.
            k: see `sources`.
            options: of `rewire.compile`, but topologies and trunks.
        """
        name, own = self.topology
        few = named_topology(name, {**own, "sources": self.sources(k)})
        return compiler.compile(model, {self.trunk: few}, **options)

    def to_json(self) -> str:
        """All numbers as JSON."""
        return to_json({**dataclasses.asdict(self), "sources": list(self.sources().items())})

    def _checked(self, k: int | None) -> int:
        k = self.keep if k is None else k
        if not 0 < k <= len(self.candidates):
            raise ValueError(f"k={k}: there are {len(self.candidates)} connections that can be kept.")
        return k

    def shown(self) -> Iterator[RenderableType]:
        yield Text(
            f"Connections of '{self.trunk}' by score; the loss with all of them is {self.loss:.4f}", style="bold"
        )
        ranked = table(("", "from", "into", "weight", "score"), ())
        for number, found in enumerate(self.candidates[: max(self.keep, _SHOWN)], start=1):
            into = found.unit if found.unit == OUTPUT else f"unit {found.unit}"
            weight = "" if found.weight is None else f"{found.weight:.3g}"
            style = "" if number <= self.keep else "dim"
            ranked.add_row(str(number), f"x{found.source}", str(into), weight, f"{found.score:+.2e}", style=style)
        yield ranked
        yield table(("kept", "loss", "hidden states held"), ((p.k, f"{p.loss:.4f}", p.states) for p in self.curve))
        yield Text(
            "The model was trained with all connections; losses with fewer use the same weights, not trained again. "
            "To know what few connections are worth, train a model with them from the start.",
            overflow="fold",
        )


def sparsify(
    model: nn.Module,
    batches: Iterable[object],
    *,
    keep: int,
    loss: Loss = loss_of_model,
    by: Score = "loss",
    trunk: str | None = None,
    at_once: int = 8,
    seed: int = 0,
) -> Sparsity:
    """Rank the connections of a trained dense topology, to train again with the best ones only.

    For each learned connection in turn, all others are set to those of the plain network, and the loss is measured.
    Those that lower it most are kept. (It is another question what raises it most when left out, as in `rewire.ablate`:
    trained connections compensate for each other, and a few chosen so were seen to be no better than random.)

    In topologies that mix states (ANCRe, DenseFormer, MUDDFormer), connections are all but those to the newest state;
    in those that mix increments (GRN, DCA, `attnres`) all.

    Args:
        model: rewired with a dense topology without options that choose sources, and trained, if only for a while.
        batches: losses are means over these; they are kept.
        keep: number of connections to keep; the others can be inspected, too.
        loss: of (model, batch), a scalar; default: ``model(**batch).loss``.
        by: what ranks connections: "loss"; "gradient", how much the loss rises without each by itself, to first order,
            by one backward pass for all; or "weight", the distance from the plain network's.
        trunk: which one; None: the only one.
        at_once: sets of weights that run at once, if they are constant.
        seed: of random numbers in the model.

    Raises:
        UnsupportedTopology: it is not a dense topology, or has groups already; it does more than add up states, or has
            no preserving start.
        UnknownName: there is no such trunk, or there are several and none was named.
        BadExampleInputs: there are no batches.
        ValueError: there are not as many connections, or no such score.

    Example:
        >>> found = rewire.sparsify(rewired, [x], keep=2, loss=lambda model, batch: model(batch).square().mean())
        >>> few = found.compile(rewire.restore(rewired), example_inputs=(x,))
    """
    check_choice("by", by, get_args(Score))
    learned = learned_connections(model, "there is nothing to sparsify", one_model=True)
    check_unwrapped(model)
    check_loaded(model, "sparsified")
    name = _named(trunk, learned)
    topology, dims = _dense(learned[name]), learned[name].layout.dims
    kept_batches = list(batches)
    if not kept_batches:
        raise BadExampleInputs("there are no batches: the loss is measured on them.")
    bench = Bench(model, learned, kept_batches, loss, at_once, seed)
    if bench.trunks[name].plain is None:
        raise UnsupportedTopology(
            bench.trunks[name].refused
            or (
                f"topology '{topology.registered_name}' has no preserving start with these options, and connections "
                "are compared with those of the plain network."
            )
        )
    base = bench.base()
    parts = {_ends(part, dims): part for part in bench.parts() if part.what == "edge" and part.trunk == name}
    parts = {ends: part for ends, part in parts.items() if ends in _wanted(topology, dims)}
    if not 0 < keep <= len(parts):
        raise ValueError(f"keep={keep}: trunk '{name}' has {len(parts)} connections that can be kept.")
    ends, edges = list(parts), list(parts.values())
    with progress(f"sparsifying {type(model).__name__}", len(edges)) as tick:
        scores = _scores(bench, edges, by, topology.states, tick)
    found = [Candidate(*at, edge.weight, score) for at, edge, score in zip(ends, edges, scores, strict=True)]
    order = sorted(range(len(found)), key=lambda n: found[n].score, reverse=True)
    ranked = [found[n] for n in order]
    steps = sorted({0, len(found), keep, *(2**n for n in range(len(found).bit_length()) if 2**n < len(found))})
    dropped = [_together(name, [edges[n] for n in order[k:]]) for k in steps if k < len(found)]
    rises = [effect.plain or 0.0 for effect in bench.run(dropped, None, lambda: None)] + [0.0]
    title, options = name_and_options(topology)
    options = {key: value for key, value in options.items() if key not in ("units", "sources")}
    curve = [
        Kept(k, base + rise, _held(title, options, ranked[:k], dims)) for k, rise in zip(steps, rises, strict=True)
    ]
    return Sparsity(name, (title, options), base, tuple(ranked), tuple(curve), keep)


def _named(trunk: str | None, learned: Mapping[str, Connection]) -> str:
    if trunk is None and len(learned) == 1:
        return next(iter(learned))
    if isinstance(trunk, str) and trunk in learned:
        return trunk
    known = ", ".join(learned)
    told = "there are several trunks" if trunk is None else f"the model has no rewired trunk '{trunk}'"
    raise UnknownName(f"{told}: pass trunk= one of {known}.")


def _dense(connection: Connection) -> AnyDense:
    topology: Topology = connection.layout.topology
    if not isinstance(topology, Dense | DenseIncrements):
        raise UnsupportedTopology(
            f"topology '{topology.registered_name}' cannot be limited to some connections: dense ones can, like "
            "'denseformer', 'ancre-ingoing', 'grn-v1' or 'muddformer'."
        )
    usual = {"block": (None, 1), "last": (None,), "dilation": (1,), "period": (1,)}
    chosen = [name for name, values in usual.items() if getattr(topology, name, values[0]) not in values]
    if chosen:
        raise UnsupportedTopology(
            f"topology '{topology.registered_name}' with {chosen[0]}={getattr(topology, chosen[0])} chooses its "
            "sources already: train it without, and sparsify that."
        )
    return topology


def _wanted(topology: AnyDense, dims: Dims) -> set[tuple[int | str, int]]:
    """The unit and source of each connection that can be left out."""
    newest = 1 if isinstance(topology, Dense) else 0
    return {
        (OUTPUT if t > dims.depth else t, i)
        for t in topology.mixing(dims)
        for i in topology.sources_of(t, dims)
        if i < t - newest and t > 1  # unit 1 has no choice
    }


def _ends(part: Part, dims: Dims) -> tuple[int | str, int]:
    """The unit and source of an edge, from the names in its program."""
    t = int(part.destination[1:]) if part.destination[1:].isdecimal() else 0
    i = int(part.source[1:]) if part.source[0] in "xf" and part.source[1:].isdecimal() else -1
    return (OUTPUT if t > dims.depth else t), i


def _scores(bench: Bench, edges: Sequence[Part], by: Score, states: bool, tick: Callable[[], None]) -> list[float]:
    """The score of each edge; ``states``: the plain network's weights are 0, else 1."""
    trunk = edges[0].trunk
    if by == "weight":
        return [abs((edge.weight or 0.0) - (not states)) for edge in edges]
    if by == "loss":
        left_out = [_together(trunk, [other for other in edges if other is not edge]) for edge in edges]
        rises = bench.run([_together(trunk, edges), *left_out], None, tick)
        none, *alone = [effect.plain or 0.0 for effect in rises]
        return [none - with_it for with_it in alone]
    return bench.slopes(trunk, edges)


def _together(trunk: str, parts: Sequence[Part]) -> Part:
    return Part("edge", trunk, "", edges=tuple(ends for part in parts for ends in part.edges))


def _by_unit(candidates: Iterable[Candidate]) -> dict[int | str, list[int]]:
    found: dict[int | str, list[int]] = {}
    for candidate in sorted(candidates, key=lambda c: (isinstance(c.unit, str), c.unit, c.source)):
        found.setdefault(candidate.unit, []).append(candidate.source)
    return found


def _held(name: str, options: Mapping[str, object], candidates: Sequence[Candidate], dims: Dims) -> int:
    """The number of hidden states that a trunk with these connections holds at once."""
    if not candidates:
        return 1
    topology = named_topology(name, {**options, "sources": _by_unit(candidates)})
    assert isinstance(topology, Dense | DenseIncrements)
    few = topology.by_read(dims, [None] * len(topology.mixing(dims)))
    return 1 + max(len(few.held(t, t - 2)) for t in range(1, dims.depth + 2))
