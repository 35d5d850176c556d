"""The copy of a model that runs without a part, and the parts that can be left out."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from rewire.diagnostics.effects import Effect, What
from rewire.diagnostics.losses import Loss, scalar
from rewire.diagnostics.outline import about, mean_of, outline_of, preserved
from rewire.diagnostics.recording import (
    Change,
    Ends,
    Seen,
    Terms,
    plain_runs,
    recorder,
    rederive,
    replace,
    running_copy,
    sources_in,
)
from rewire.errors import UnsupportedTopology
from rewire.freezing import constant_program
from rewire.runtime.connection import Connection, connections
from rewire.topologies.program import Program, branch_of, learned_terms

#: For each destination and source, a weight for each of its terms; None leaves a weight as it is.
Weights: TypeAlias = dict[Ends, list[Any]]


@dataclasses.dataclass(frozen=True)
class Part:
    """What is left out: edges, whose weights are set, or a unit. For attributes see `Effect`."""

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


class Trunk:
    """One trunk of the copy that runs.

    Attributes:
        outline: its sums; for the terms of each destination and source, `weights`, and whether they are `learned`.
        terms: for a static trunk, the terms of its program, whose weights are a buffer of the connection.
        now: for other trunks, what is set: for each destination and source, the new weights of its terms; `only` has
            the destinations, `moved` how far weights are on their way if not at its end, and `off` the units that are
            left out.
        seen: for these trunks, the weights in the first pass.
        plain: the weights of the plain network; None if unknown.
        refused: why there are no edges to set; empty if there are.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection, self.layout = connection, connection.layout
        self.terms: Terms | None = None
        self.refused, self.outline = "", outline_of(connection)
        self.weights, self.learned = _weights(self.outline.program), dict[Ends, list[bool]]()
        for line, term, is_learned in learned_terms(self.outline.program):
            self.learned.setdefault((line.target, term.source), []).append(is_learned)
        self.now, self.only, self.off = dict[Ends, list[Any]](), set[str](), set[int]()
        self.moved: Mapping[Ends, Tensor] = {}
        self.seen, self.sources = dict[Ends, Seen](), sources_in(self.outline.program)
        self.record: Change | None = recorder(self.seen, self.outline.program)
        try:
            if self.outline.kind == "static":
                self.terms = Terms(constant_program(connection)[0])
        except UnsupportedTopology as error:
            self.refused = str(error)
        if self.outline.kind == "matrix":
            self.refused = (
                f"topology '{self.layout.topology.registered_name}' does more than add up states with weights, so "
                "single weights cannot be changed. Its units can be left out"
            )
        self.plain = self._plain()

    def _plain(self) -> Weights | None:
        outline = None if self.refused else preserved(self.layout.topology, self.layout.dims)
        plain = None if outline is None else _weights(outline.program)
        return plain if plain and {*plain} == {*self.weights} else None

    def install(self, copied: nn.Module) -> None:
        """Let this trunk of the copy use the weights that are set."""
        name, old = self.layout.trunk, self.layout
        if self.terms is not None:
            topology = self.terms.topology(repr(old.topology))
            connections(copied)[name].become(old.of(topology))
            self.set({}, copied)
            return
        if not self.refused:
            self.only.update(self.sources)
            replace(copied, name, self.outline, self._change, self.only)
        rederive(copied, name, _Skips, off=self.off)

    def _change(self, target: str, weights: list[Tensor]) -> list[Tensor] | None:
        """Called by `recording` if weights depend on the input."""
        if self.record is not None:
            self.record(target, weights)
            return None
        found, counts = list[Tensor](), dict[str, int]()
        for source, weight in zip(self.sources[target], weights, strict=True):
            number = counts[source] = counts.get(source, -1) + 1
            new = self.now.get((target, source))
            if new is None or new[number] is None:
                found.append(weight)
                continue
            end, way = torch.full_like(weight, float(new[number])), self.moved.get((target, source))
            found.append(end if way is None else weight.lerp(end, way.to(weight)))
        return found

    def changes(self, part: Part, plain: bool) -> Weights:
        """The new weights for each destination and source; None keeps that of a shortcut beside them."""
        if part.what == "unit":
            return {ends: [0.0] * len(terms) for ends, terms in self.weights.items() if ends[1] == part.source}
        zero = {ends: [0.0] * len(self.weights[ends]) for ends in part.edges}
        new = self.plain if plain and self.plain is not None else zero
        return {
            ends: [value if learned else None for value, learned in zip(new[ends], self.learned[ends], strict=True)]
            for ends in part.edges
        }

    def differs(self, part: Part, plain: bool) -> bool:
        """Whether a part changes weights, and in another way than the other value of ``plain`` does."""
        if plain and (self.plain is None or part.what == "unit"):
            return False
        new = self.changes(part, plain)
        if plain and _same(new, self.changes(part, False)):
            return False
        return self.terms is None or not _same(new, self.weights)

    def is_plain(self, part: Part) -> bool:
        """Whether the weights of a part are those of the plain network, and constant."""
        known = self.terms is not None and self.plain is not None and part.what != "unit"
        return known and _same(self.changes(part, True), self.weights)

    def set(
        self,
        changes: Weights,
        copied: nn.Module,
        unit: int | None = None,
        moved: Mapping[Ends, Tensor] | None = None,
    ) -> None:
        """Run with these weights and without this unit. ``moved``: how far input-dependent weights go on their way."""
        if self.terms is not None:
            connections(copied)[self.layout.trunk].get_buffer("terms").copy_(self.terms.set(changes))
            return
        self.record, self.now, self.moved = None, changes if unit is None else {}, moved or {}
        self.only.clear()
        self.only.update(target for target, _ in self.now)
        self.off.clear()
        self.off.update(() if unit is None else (unit,))

    def parts(self) -> Iterator[Part]:
        name, program = self.layout.trunk, self.outline.program
        for t in range(1, len(program.units) + 1):
            yield Part("unit", name, branch_of(t), path=about(self.connection, t)["path"])
        if self.refused:
            return
        edges: dict[Ends, float] = {}
        for line, term, learned in learned_terms(program):
            if learned:
                ends = line.target, term.source
                edges[ends] = edges.get(ends, 0.0) + mean_of(term.weight)
        if self.terms is None:  # a source that was not seen has no weight, such as a first read, which is the input
            edges = {ends: self.seen[ends].mean for ends in edges if ends in self.seen}
        for source in dict.fromkeys(source for _, source in edges):
            if not source.startswith("f"):  # leaving out a branch output is leaving out its unit
                yield Part("source", name, source, edges=tuple(ends for ends in edges if ends[1] == source))
        for ends, weight in edges.items():
            yield Part("edge", name, ends[1], ends[0], weight=weight, edges=(ends,))


class Bench:
    """A copy of the model that runs on the batches.

    Attributes:
        trunks: by name.
        in_turn: why sets of weights did not run at once, if they should have.
    """

    def __init__(
        self,
        model: nn.Module,
        learned: Mapping[str, Connection],
        batches: Sequence[object],
        loss: Loss,
        at_once: int,
        seed: int,
    ) -> None:
        self.batches, self.loss, self.at_once, self.seed, self.in_turn = batches, scalar(loss), at_once, seed, ""
        self.copied = running_copy(model)
        self.trunks = {name: Trunk(connection) for name, connection in learned.items()}
        for trunk in self.trunks.values():
            trunk.install(self.copied)

    def parts(self) -> Iterator[Part]:
        """All parts, in the order of the report."""
        found = [part for trunk in self.trunks.values() for part in trunk.parts()]
        for what in get_args(What):
            yield from (part for part in found if part.what == what)

    def base(self) -> float:
        """The loss with nothing left out. It has to run first, and records the weights."""
        self.whole = self._loss()
        for trunk in self.trunks.values():
            trunk.set({}, self.copied)
        return self.whole

    def run(self, chosen: Sequence[Part], end: float | None, tick: Callable[[], None]) -> Iterator[Effect]:
        """The effects, one after the other, until the time is up."""
        for name, group in itertools.groupby(chosen, lambda part: part.trunk):
            waiting = [*group]
            while waiting and (end is None or time.monotonic() < end):
                some, waiting = waiting[: self.at_once], waiting[self.at_once :]
                yield from self._measured(self.trunks[name], some)
                for _ in some:
                    tick()

    def _measured(self, trunk: Trunk, some: Sequence[Part]) -> Iterator[Effect]:
        runs = [(part, plain) for part in some for plain in (False, True) if trunk.differs(part, plain)]
        rises = dict(zip(runs, self._rises(trunk, runs), strict=True))
        for part in some:
            without = rises.get((part, False), 0.0)
            plain = rises.get((part, True), 0.0 if trunk.is_plain(part) else without)
            known = trunk.plain is not None and part.what != "unit"
            yield part.measured(without, plain if known else None)

    def _rises(self, trunk: Trunk, runs: Sequence[tuple[Part, bool]]) -> list[float]:
        if trunk.terms is not None and self.at_once > 1 and runs:
            sets = [trunk.terms.values, *(trunk.terms.set(trunk.changes(*run)) for run in runs)]
            while self.at_once > 1:
                try:
                    return self._together(trunk, sets)
                except torch.OutOfMemoryError:
                    self.at_once //= 2
                except Exception as error:  # vmap does not support an operation of the model, or its control flow
                    self.in_turn, self.at_once = f"{type(error).__name__}: {error}", 1
        found = []
        for part, plain in runs:
            trunk.set(trunk.changes(part, plain), self.copied, part.unit)
            found.append(self._loss() - self.whole)
        trunk.set({}, self.copied)
        return found

    def slopes(self, name: str, parts: Sequence[Part]) -> list[float]:
        """For each part, the slope of the loss as its weights move to those of the plain network, at distance 1.

        One backward pass serves all parts. With a weight a for each token, and w of the plain network, the copy runs
        with ``a + m (w - a)``. At m = 0, where the slope is taken, all else depends on a source as usual.
        """
        trunk, total = self.trunks[name], torch.zeros(len(parts), dtype=torch.float64)
        changes = [trunk.changes(part, True) for part in parts]
        for batch in self.batches:
            moved = torch.zeros(len(parts), requires_grad=True)
            with torch.enable_grad(), plain_runs(self.copied, self.seed):
                loss = self.loss(self._moved(trunk, changes, moved), batch)
            total += torch.autograd.grad(loss, moved)[0].double()
        trunk.set({}, self.copied)
        return (total / len(self.batches)).tolist()

    def _moved(self, trunk: Trunk, changes: Sequence[Weights], moved: Tensor) -> Any:
        """The model with weights moved so far towards each of these changes."""
        if trunk.terms is None:
            on_the_way = {ends: way for new, way in zip(changes, moved, strict=True) for ends in new}
            trunk.set({ends: new[ends] for new in changes for ends in new}, self.copied, moved=on_the_way)
            return self.copied
        away = torch.stack([trunk.terms.set(new) - trunk.terms.values for new in changes])
        now = trunk.terms.values + (moved.view(-1, *[1] * (away.dim() - 1)) * away).sum(0)
        device = connections(self.copied)[trunk.layout.trunk].get_buffer("terms").device
        return _With(self.copied, {self._path(trunk): now.to(device)})

    def _path(self, trunk: Trunk) -> str:
        """The path of the buffer with a static trunk's weights."""
        connection = connections(self.copied)[trunk.layout.trunk]
        (path,) = (path for path, module in self.copied.named_modules() if module is connection)
        return f"{path}.terms"

    def _together(self, trunk: Trunk, sets: Sequence[Tensor]) -> list[float]:
        """How much the loss rises from the first of these sets of weights to each of the others, all run at once."""
        connection = connections(self.copied)[trunk.layout.trunk]
        found = list[float]()
        for first in range(1, len(sets), self.at_once):
            some = torch.stack([sets[0], *sets[first : first + self.at_once]])
            some = some.to(connection.get_buffer("terms").device)
            losses = self._mean(functools.partial(self._of_each, self._path(trunk), some))
            found += (losses[1:] - losses[0]).tolist()
        return found

    def _of_each(self, name: str, sets: Tensor, batch: object) -> Tensor:
        """The loss with each of these sets in place of the buffer of that name."""

        def loss(values: Tensor) -> Tensor:
            return self.loss(_With(self.copied, {name: values}), batch)

        # The only attention kernel on CPUs that vmap knows.
        with sdpa_kernel(SDPBackend.MATH) if sets.device.type == "cpu" else contextlib.nullcontext():
            losses: Tensor = torch.func.vmap(loss, randomness="same")(sets)
        return losses

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
    """The model with other buffers, as a loss may call it."""

    def __init__(self, model: nn.Module, buffers: dict[str, Tensor]) -> None:
        self._model, self._buffers = model, buffers

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return torch.func.functional_call(self._model, self._buffers, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class _Skips:
    """Ablates units under any topology: their branch outputs are set to 0."""

    off: set[int]

    def merge(self, states: object, weights: object, t: int, *branches: Tensor) -> Any:
        return super().merge(states, weights, t, *self._left(t, branches))  # type: ignore[misc]

    def write(self, states: object, weights: object, t: int, *branches: Tensor) -> Any:
        return super().write(states, weights, t, *self._left(t, branches))  # type: ignore[misc]

    def _left(self, t: int, branches: Sequence[Tensor]) -> Sequence[Tensor]:
        return [torch.zeros_like(branch) for branch in branches] if t in self.off else branches


def _same(some: Weights, all_: Weights) -> bool:
    """Whether the terms in ``some`` have the same weights in ``all_``."""
    pairs = (pair for ends, weights in some.items() for pair in zip(weights, all_[ends], strict=True))
    return all(a is None or b is None or bool((torch.as_tensor(a) == torch.as_tensor(b)).all()) for a, b in pairs)


def _weights(program: Program) -> Weights:
    """The weights of a program's terms, by destination and source."""
    found: Weights = {}
    for line, term, _ in learned_terms(program):
        found.setdefault((line.target, term.source), []).append(term.weight)
    return found
