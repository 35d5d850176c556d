"""Weights in use: input-dependent ones recorded or replaced, constant ones in one tensor."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from rewire.attributes import REGISTERED_NAME
from rewire.copies import Writes, private, seeded, uncompiled
from rewire.diagnostics.observing import called, inputs_of
from rewire.diagnostics.outline import Outline
from rewire.diagnostics.signals import precise
from rewire.errors import UnsupportedTopology
from rewire.mixes.autograd import plainly
from rewire.mixes.streams import read_streams
from rewire.passes.checks import check_loaded
from rewire.runtime.connection import connections
from rewire.topologies import Topology
from rewire.topologies.base import Dims, QKVInputs, Start, materialize, total
from rewire.topologies.frozen import Constants, Frozen, coded
from rewire.topologies.program import Line, PerChannel, Program, Weight, learned_terms, operands, with_weights

#: Destination and source of an edge.
Ends = tuple[str, str]
#: Called with the name of a sum and the factors of its terms, in the program's order: [..., 1] or, per channel,
#: [..., D]. It returns other factors, or None to keep them. A read in several ways calls it once for each way.
Change = Callable[[str, list[Tensor]], Sequence[Tensor] | None]


@dataclasses.dataclass
class Seen:
    """Statistics of a weight over tokens and ways (per channel: of its mean).

    Attributes:
        count, total, squares: of float64 sums.
    """

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, weight: Tensor) -> None:
        values = weight.detach().double().mean(-1)
        self.count += values.numel()
        self.total += float(values.sum())
        self.squares += float(values.square().sum())

    @property
    def mean(self) -> float:
        return self.total / self.count

    @property
    def spread(self) -> float:
        """The standard deviation."""
        return max(0.0, self.squares / self.count - self.mean**2) ** 0.5


def recorded(
    model: nn.Module, outlines: Mapping[str, Outline], batch: object
) -> dict[str, dict[tuple[str, str], Seen]]:
    """The input-dependent weights on a batch, by trunk, and by destination and source.

    Raises:
        RewireError: the model is on the meta device.
        BadExampleInputs: it does not run on the batch.
    """
    check_loaded(model, "run on a batch")
    inputs = inputs_of(model, batch)
    found: dict[str, dict[tuple[str, str], Seen]] = {}
    copied = running_copy(model)
    for name, outline in outlines.items():
        if outline.kind in ("mixes", "streams"):
            found[name] = {}
            replace(copied, name, outline, recorder(found[name], outline.program))
    if found:
        with torch.no_grad(), plain_runs(copied):
            called(copied, inputs, seed=0)
    return found


def running_copy(model: nn.Module) -> nn.Module:
    """A copy in evaluation mode that shares the parameters' memory."""
    return private(model).eval()


@contextlib.contextmanager
def plain_runs(model: nn.Module, seed: int = 0) -> Iterator[None]:
    """A context for forwards of a private copy by plain torch operations, with random numbers of their own."""
    with seeded(seed, model), uncompiled(), plainly(), Writes(model):
        yield


def replace(
    copied: nn.Module, trunk: str, outline: Outline, change: Change, only: Collection[str] | None = None
) -> None:
    """Let ``change`` see the weights of a trunk of this copy, and replace them.

    Args:
        copied: a model that nobody else runs.
        trunk: its name.
        outline: of ``"mixes"`` or ``"streams"``.
        change: sees the weights.
        only: the present names of the sums that it sees; None: all.
    """
    base = {"mixes": _Mixes, "streams": _Streams}[outline.kind]
    lines = sources_in(outline.program)
    rederive(copied, trunk, base, lines=lines, change=change, only=lines if only is None else only)


def rederive(copied: nn.Module, trunk: str, base: type, **attributes: object) -> None:
    """Replace methods of a trunk's topology in this copy by those of ``base``."""
    connection = connections(copied)[trunk]
    layout = connection.layout
    connection.layout = layout.of(derived(layout.topology, base, **attributes), attention=layout.dims.attention)


def derived(topology: Topology, base: type, **attributes: object) -> Topology:
    """The topology with methods of ``base`` in place of its own."""
    cls = type(topology)
    made: Topology = object.__new__(type(cls.__name__, (base, cls), {"__module__": cls.__module__}))
    vars(made).update(vars(topology))
    vars(made).update({REGISTERED_NAME: topology.registered_name, **attributes})
    return made


def sources_in(program: Program) -> dict[str, list[str]]:
    """For each line, the sources of its terms."""
    found: dict[str, list[str]] = {}
    for line, term, _ in learned_terms(program):
        found.setdefault(line.target, []).append(term.source)
    return found


def recorder(found: dict[tuple[str, str], Seen], program: Program) -> Change:
    sources = sources_in(program)

    def record(target: str, weights: list[Tensor]) -> None:
        by_source: dict[str, Tensor] = {}
        for source, weight in zip(sources[target], weights, strict=True):
            by_source[source] = by_source[source] + weight if source in by_source else weight
        for source, weight in by_source.items():
            found.setdefault((target, source), Seen()).add(weight)

    return record


class _Mixes(Topology):
    """The recorder for dense topologies: with its weights held constant, a read is linear in its sources."""

    lines: dict[str, list[str]]
    change: Change
    only: Collection[str]

    def mix(self, history: Any, weights: object, t: int) -> Any:
        if f"r{t}" not in self.only:
            return super().mix(history, weights, t)  # type: ignore[misc]
        read, factors = self._factors(copy.copy(history), weights, t)
        changed = {way: self.change(f"r{t}", of_way) for way, of_way in factors.items()}
        value: Any = super().mix(history, weights, t)  # type: ignore[misc]
        if all(new is None for new in changed.values()):
            return value
        given, middle = [*map(precise, history.states)], self._middle(t, history)
        given = [given[0], *([total(tuple(given[middle]))] if given[middle] else []), *given[middle.stop :]]
        ways = [
            self._moved(materialize(own), factors.get(id(way), []), changed.get(id(way)), given)
            for way, own in zip(ways_of(read), ways_of(value), strict=True)
        ]
        return QKVInputs(*ways) if len(ways) > 1 else ways[0]

    def _moved(self, own: Tensor, old: list[Tensor], new: Sequence[Tensor] | None, sources: list[Tensor]) -> Tensor:
        """The read itself, plus the difference that replaced factors make."""
        apart = [(b - a, x) for a, b, x in zip(old, new or (), sources, strict=new is not None) if b is not a]
        return (precise(own) + added_up(*zip(*apart, strict=True))).to(own.dtype) if apart else own

    def _factors(self, history: Any, weights: object, t: int) -> tuple[Any, dict[int, list[Tensor]]]:
        """A read, and for each of its ways, by identity, the factors of the sources, [..., D].

        They are gradients with weights held constant: if the sum of the products is not the read, the weights were not.
        """
        leaves = [precise(state.detach()).requires_grad_() for state in history.states]
        history.states = tuple(leaves)
        with torch.enable_grad(), _Constant():
            read = super().mix(history, weights, t)  # type: ignore[misc]
            read = read if isinstance(read, QKVInputs) else materialize(read)
        factors: dict[int, list[Tensor]] = {}
        plain = {id(x) for x in (history.newest, *leaves)}  # inputs of the read without a way
        for way in {id(way): way for way in ways_of(read) if id(way) not in plain}.values():
            ones = torch.ones_like(way)
            found = torch.autograd.grad(way, leaves, ones, retain_graph=True, allow_unused=True)
            each = [torch.zeros_like(way) if one is None else one for one in found]
            again, middle = added_up(each, leaves), self._middle(t, history)
            factors[id(way)] = [each[0], *each[middle][:1], *each[middle.stop :]]
            close = torch.allclose(again, way, rtol=1e-4, atol=1e-4 * float(way.detach().abs().max()))
            if not close or any(not torch.allclose(one, each[middle][0]) for one in each[middle]):
                raise UnsupportedTopology(
                    f"read {t} of topology '{self.registered_name}' is no weighted sum of its sources: it has no edges."
                )
        return read, factors

    def _middle(self, t: int, history: Any) -> slice:
        """The range of states that count as one source: several, if older ones are summed before they are read."""
        return slice(1, 2 + len(history.states) - len(self.lines[f"r{t}"]))


def ways_of(read: Tensor | QKVInputs) -> list[Tensor]:
    """The inputs of queries, keys and values and the residual, or the only one."""
    return [read.q, read.k, read.v, read.residual] if isinstance(read, QKVInputs) else [read]


def added_up(weights: Sequence[Tensor], sources: Sequence[Tensor]) -> Tensor:
    """``sum_i w_i x_i``"""
    return functools.reduce(torch.add, [w * x for w, x in zip(weights, sources, strict=True)])


class _Constant(TorchFunctionMode):
    """Treats sums over channels as weights, and so as constants."""

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.detach() if func in _OVER_CHANNELS and isinstance(result, Tensor) else result


_OVER_CHANNELS = {
    *(torch.Tensor.__matmul__, torch.Tensor.__rmatmul__, torch.Tensor.matmul, torch.matmul, F.linear, torch.einsum),
    *(torch.Tensor.mean, torch.mean, torch.Tensor.sum, torch.sum, torch.linalg.vector_norm, torch.Tensor.norm),
    *(torch.Tensor.amax, torch.softmax, torch.Tensor.softmax, F.softmax, F.rms_norm, F.layer_norm),
}


class _Streams(Topology):
    """The recorder for parallel streams: it sees the gates of each unit, and those of a learned output."""

    change: Change
    only: Collection[str]

    def opened(self, streams: Tensor, unit: object, weights: Any, known: object = None) -> Any:
        gates, streams, _ = super().opened(streams, unit, weights, known)  # type: ignore[misc]
        t = next(number for number, each in weights.units.items() if each is unit)
        read, write = gates.read, gates.write
        new = self._columns(f"r{t}", read)
        columns = [self._columns(f"s{t}_{j}", write[..., j : j + 1]) for j in range(write.shape[-1])]
        return gates._replace(read=new, write=torch.cat(columns, -1)), streams, None

    def _columns(self, target: str, column: Tensor) -> Tensor:
        """A column of gates, [..., n, 1]."""
        new = self.change(target, [*column.unbind(-2)]) if target in self.only else None
        return column if new is None else torch.stack([*new], -2)

    def finish(self, states: Any, weights: Any, dims: Any) -> Tensor:
        if weights.last is None:
            return super().finish(states, weights, dims)  # type: ignore[safe-super]
        values, streams, claim = self.values(states[0], weights.last)  # type: ignore[attr-defined]
        read = self._columns("out", self.reading(values))  # type: ignore[attr-defined]
        return materialize(read_streams(streams, read, claim)[0])


@dataclasses.dataclass(frozen=True, repr=False)
class Wired(Frozen):
    """A topology that runs a program; the weight of term n is entry n of a buffer.

    Args:
        of, lines, shape: as for `Frozen`; weights are rows of the buffer.
        channels: D, if there are weights per channel; else 0.
    """

    channels: int = 0

    @property
    def needs_width(self) -> bool:  # type: ignore[override]
        return self.channels > 0

    def parameters(self, dims: Dims, start: Start) -> dict[str, Tensor]:
        """``terms``, float32 [N] or [N, D], zeros."""
        return {"terms": nn.Buffer(torch.zeros(self._rows, *([self.channels] if self.channels else [])))}

    def weights(self, parameters: dict[str, Tensor], dims: Dims) -> Constants:
        return Constants(parameters["terms"], parameters["terms"])

    def summed(
        self,
        line: Line,
        values: Mapping[str, Tensor],
        weights: Constants,
        own: str = "",
        branches: Sequence[Tensor] = (),
    ) -> Tensor:
        """The sum in operations that `torch.func.vmap` supports, in float32 at least as in a mix."""
        sources, factors, _ = operands(line, values, own, branches)
        dtype, rows = functools.reduce(torch.promote_types, [x.dtype for x in sources]), weights.channels
        assert rows is not None
        return added_up([rows[w.row] for w in factors], [*map(precise, sources)]).to(dtype)  # type: ignore[union-attr]


class Terms:
    """The terms of a program, by number.

    Attributes:
        values: their weights, float32 [N] or [N, D].
        of: the numbers of the terms, by destination and source.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.of: dict[Ends, list[int]] = {}
        weights: list[Weight] = []
        for line, term, _ in learned_terms(program):
            self.of.setdefault((line.target, term.source), []).append(len(weights))
            weights.append(term.weight)
        width = max((w.shape[0] for w in weights if isinstance(w, Tensor)), default=0)
        rows = [torch.as_tensor(w, dtype=torch.float32) for w in weights]
        self.values = torch.stack([row.expand(width) if width else row for row in rows])

    def topology(self, of: str) -> Wired:
        """The topology that runs the program; its buffer has to hold `values`."""
        numbers = iter(range(len(self.values)))
        numbered = with_weights(self.program, lambda weight: PerChannel(next(numbers)))
        width = self.values.shape[1] if self.values.dim() > 1 else 0
        return Wired(of, coded(numbered), [0, 0], width)

    def set(self, changes: Mapping[Ends, Any]) -> Tensor:
        """The weights with changes: for each destination and source, one for each of its terms; None: unchanged."""
        values = self.values.clone()
        for ends, given in changes.items():
            for number, value in zip(self.of[ends], given, strict=True):
                values[number] = values[number] if value is None else value
        return values
