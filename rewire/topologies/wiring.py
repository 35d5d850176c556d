"""Few connections: the options ``units=``, ``sources=`` and ``channels=`` of dense topologies.

Units, sources and channels that are not named stay as in the plain network: without mixes, held states or weights.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor

from rewire.errors import UnsupportedTopology
from rewire.mixes.history import Free, History
from rewire.topologies.base import total

OUTPUT = "output"
Unit = int | str  #: number from either end, or "output"; before the trunk is known, also a kind of branch
Channel = Literal["q", "k", "v", "shortcut"]
#: The same sources for all units, or pairs of a unit and its sources; "x0" is already 0.
Named = tuple[int, ...] | tuple[tuple[Unit, tuple[int, ...]], ...]
#: The forms of the option.
Units = Unit | Sequence[Unit] | None
Sources = Unit | Sequence[Unit] | Mapping[Unit, Sequence[Unit]] | Named | None
#: The kinds of branches, as `rewire.inspect` shows them.
KINDS = ("attention", "cross-attention", "linear-attention", "ffn", "parallel", "conv", "branch")
#: Used as the number of a source: the sum of all increments that are not named.
REST = -1
#: The inputs of an attention.
QKV: tuple[Channel, ...] = ("q", "k", "v")
CHANNELS: tuple[Channel, ...] = (*QKV, "shortcut")


class Few(Free):
    """Weights of some reads, each of some sources: a dense topology's table with few connections.

    Args:
        sources: by read t, the numbers of its sources, ascending, as `wired` returns them.
        rows: by read t, its weights.
        channels: by read t, the inputs of the unit that have separate reads; empty if it has one read for all.
        states: whether sources are states rather than increments.

    Attributes:
        sources, channels, states: the arguments.
    """

    def __init__(
        self,
        sources: Mapping[int, tuple[int, ...]],
        rows: Mapping[int, object],
        channels: Mapping[int, tuple[Channel, ...]],
        states: bool,
    ) -> None:
        super().__init__()
        self.sources, self.channels, self.states, self._rows = sources, channels, states, rows
        self._last = dict(sorted((i, t) for t, numbers in sorted(sources.items()) for i in numbers))

    def __contains__(self, t: int) -> bool:
        """Whether read t is a mix."""
        return t in self.sources

    def passes_by(self, t: int) -> bool:
        """Whether read t is the newest state, and no later read mixes that: the history stays as it is."""
        return t not in self.sources and not (self.states and self._last.get(t - 1, 0) > t)

    def __getitem__(self, t: int) -> Any:
        """The weights of read t."""
        return self._rows[t]

    def held(self, t: int, newest: int) -> list[int]:
        """The sources up to ``newest`` that read t or a later read mixes."""
        return [i for i, last in self._last.items() if 0 <= i <= newest and last >= t]

    def history(self) -> FewHistory:
        return FewHistory(self)


class _Reading(NamedTuple):
    """The newest state at a read, and the sources held then, by number."""

    t: int
    newest: Tensor
    known: dict[int, Tensor]


class FewHistory(History):
    """The sources that later reads mix; during a unit's read, those that it mixes.

    The topology holds the newest state, or the sum of all increments, separately.

    Attributes:
        reading: during a unit's read, the newest state and all held sources.
    """

    __slots__ = ("reading",)

    table: Few

    def __init__(self, table: Few, states: Iterable[Tensor] = (), reading: _Reading | None = None) -> None:
        super().__init__(table, tuple(states))
        self.reading = reading

    def read(self, t: int, x: Tensor) -> FewHistory:
        few = self.table
        known = dict(zip(few.held(t, t - 1 - few.states), self.states, strict=True))
        if few.states:
            known[t - 1] = x
        numbers = few.sources.get(t, (t - 1,) if few.states else ())
        if REST in numbers:
            known[REST] = x - total(tuple([known[i] for i in numbers if i != REST]))
        return FewHistory(few, [known[i] for i in numbers], _Reading(t, x, known))

    @property
    def kept(self) -> FewHistory:
        if self.reading is None:
            return self
        t, _, known = self.reading
        known = {**known, **dict(zip(self.table.sources.get(t, ()), self.states, strict=False))}  # see `History`
        return FewHistory(self.table, [known[i] for i in self.table.held(t + 1, t - 1)])

    @property
    def newest(self) -> Tensor:
        assert self.reading is not None
        return self.states[-1] if self.table.states else self.reading.newest

    @newest.setter
    def newest(self, x: Tensor) -> None:
        self.states = (*self.states[:-1], x)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return self.states if self.reading is None else (*self.states, *self.reading.known.values())

    def written(self, t: int, increment: Tensor) -> FewHistory:
        """The history with the increment of unit t, if a later read mixes it."""
        return FewHistory(self.table, (*self.states, increment)) if t in self.table.held(t + 1, t) else self

    def after(self, states: Sequence[Tensor]) -> FewHistory:
        return FewHistory(self.table, states)

    def viewed(self, view: Callable[[Tensor], Tensor]) -> FewHistory:
        reading = self.reading
        if reading is not None:
            known = {i: view(x) for i, x in reading.known.items()}
            reading = _Reading(reading.t, view(reading.newest), known)
        return FewHistory(self.table, map(view, self.states), reading)


def checked_units(units: Any, option: str = "units") -> tuple[Unit, ...] | None:
    """The option ``units=``, or another one that names units, in the form in which topologies keep it.

    Raises:
        ValueError: it has anything but numbers, "output" and kinds.
    """
    if units is None:
        return None
    given = units if isinstance(units, Iterable) and not isinstance(units, str) else [units]
    found = tuple(_unit(unit, option, units) for unit in given)
    if not found:
        raise ValueError(f"{option} is empty, so no unit would read. Leave it out to let all units read.")
    return tuple(dict.fromkeys(found))


def _unit(unit: Any, option: str, given: object) -> Unit:
    """A number, perhaps written as a string, as in keys of JSON; or a name."""
    if isinstance(unit, str) and (unit == OUTPUT or unit in KINDS):
        return unit
    try:
        number = int(unit) if isinstance(unit, str) else operator.index(unit)
    except (TypeError, ValueError):
        number = 0
    if number == 0 or isinstance(unit, bool):
        raise ValueError(
            f"{option}={given!r}: a unit is its number (from 1, or negative from the end), 'output', or a kind of "
            f"branch, one of {', '.join(map(repr, KINDS))}."
        )
    return number


def checked_sources(sources: Any) -> Named | None:
    """The option ``sources=`` in the form in which topologies keep it: a dict becomes pairs, which files have as lists.

    Raises:
        ValueError: it is neither numbers and names of sources, nor a dict of these by unit.
    """
    if sources is None:
        return None
    given = sources.items() if isinstance(sources, Mapping) else sources
    given = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    if not given:
        raise ValueError(
            "sources is empty: there would be nothing to read. Leave it out to let units read all sources."
        )
    if all(isinstance(one, list | tuple) for one in given):
        return tuple(_of_unit(pair, sources) for pair in given)
    return tuple(dict.fromkeys(_number(one, sources) for one in given))


def _of_unit(pair: Any, given: object) -> tuple[Unit, tuple[int, ...]]:
    if len(pair) != 2 or isinstance(pair[0], list | tuple):
        raise _wrong(given)
    unit, numbers = _unit(pair[0], "sources", given), checked_sources(pair[1])
    if unit in KINDS or not numbers or isinstance(numbers[0], tuple):
        raise _wrong(given)
    return unit, numbers


def checked_channels(channels: Any) -> tuple[Channel, ...] | None:
    """The option ``channels=`` in the form in which topologies keep it, in the order of `CHANNELS`.

    Raises:
        ValueError: it is empty, or has an unknown name.
    """
    if channels is None:
        return None
    given = list(channels) if isinstance(channels, Iterable) and not isinstance(channels, str) else [channels]
    if not given or any(channel not in CHANNELS for channel in given):
        raise ValueError(f"channels={channels!r}: it has to name some of {', '.join(map(repr, CHANNELS))}.")
    return tuple(channel for channel in CHANNELS if channel in given)


def placed(units: Any, kinds: Sequence[str]) -> tuple[Unit, ...]:
    """``units`` with numbers in place of kinds, for a trunk whose units begin with branches of these kinds.

    Kinds do not select unit 1, which has only one source.

    Raises:
        UnsupportedTopology: no unit is of a kind that is named.
    """
    found: list[Unit] = []
    for unit in units:
        own = [t for t, kind in enumerate(kinds, start=1) if kind == unit and t > 1] if unit in KINDS else [unit]
        if not own:
            raise UnsupportedTopology(
                f"units={unit!r}: no unit of this trunk begins with such a branch; they begin with "
                f"{', '.join(sorted(set(kinds)))}. With granularity='sublayer', attentions and feed-forwards are "
                "separate units."
            )
        found += own
    return tuple(dict.fromkeys(found))


def wired(
    name: str, units: Units, sources: Sources, depth: int, reads: Collection[int], states: bool
) -> dict[int, tuple[int, ...]]:
    """By read t, the numbers i < t of its sources, ascending; for increments with `REST` first, if some are not named.

    Args:
        name: name of the topology, for errors.
        units, sources: the options, checked.
        depth: T, the number of units.
        reads: the t that may have weights.
        states: whether sources are states, which always include the newest, rather than increments.

    Raises:
        UnsupportedTopology: the trunk has no such unit or source, or none that could be read.
    """
    numbers = _numbers(name, units, sources, depth, reads)
    implied = 1 if states else 0
    found: dict[int, tuple[int, ...]] = {}  # not dict[..](), which Dynamo does not know
    for t in sorted(numbers):
        own = {i if i >= 0 else t + i for i in numbers[t]}
        if not _by_unit(sources):  # a list for all units may have sources that come after a unit
            own = {i for i in own if 0 <= i < t}
        if own and (min(own) < 0 or max(own) >= t):
            raise UnsupportedTopology(
                f"topology '{name}': unit {_name(t, depth)} reads sources before it, x0 to x{t - 1}, and not "
                f"{', '.join(f'x{i}' for i in sorted(own) if not 0 <= i < t)}."
            )
        if own - set(range(t - implied, t)):
            rest = () if states or len(own) == t else (REST,)
            found[t] = (*rest, *sorted(own | set(range(t - implied, t))))
        elif units is not None:
            raise UnsupportedTopology(
                f"topology '{name}': of these sources, unit {_name(t, depth)} can read none beside the newest state, "
                "as in the plain network: name others for it, or leave it out."
            )
    missing = {i for i in _everywhere(sources) if i >= 0} - {i for own in found.values() for i in own}
    if missing or not found:
        raise UnsupportedTopology(
            f"topology '{name}': no unit of a trunk of {depth} units can read "
            f"{', '.join(f'x{i}' for i in sorted(missing)) or 'such sources'} beside the newest state."
        )
    return found


def _numbers(name: str, units: Units, sources: Sources, depth: int, reads: Collection[int]) -> dict[int, Sequence[int]]:
    """By read t, the sources that the options name, as numbers from either end."""
    of_unit, everywhere = _by_unit(sources), _everywhere(sources)
    if of_unit and units is not None:
        raise ValueError("sources= already has the sources of each unit: leave out units=.")
    if of_unit:
        return {_read(name, unit, depth, reads): own for unit, own in of_unit}
    named: Any = units
    chosen = sorted(reads) if named is None else [_read(name, unit, depth, reads) for unit in named]
    return {t: everywhere or range(t) for t in chosen}


def _by_unit(sources: Any) -> tuple[tuple[Unit, tuple[int, ...]], ...]:
    """The pairs of a dict of sources by unit; else empty."""
    return sources if sources is not None and isinstance(sources[0], tuple) else ()


def _everywhere(sources: Any) -> tuple[int, ...]:
    """The sources of all units, if they are the same; else empty."""
    return () if sources is None or isinstance(sources[0], tuple) else sources


def _read(name: str, unit: Unit, depth: int, reads: Collection[int]) -> int:
    """The number t of the read that ``unit`` names."""
    t = depth + 1 if unit == OUTPUT else 0
    if isinstance(unit, int):
        t = unit if unit > 0 else depth + 1 + unit
    if t not in reads:
        raise UnsupportedTopology(
            f"topology '{name}' has no connections at unit {unit!r} of a trunk of {depth} units; it can have them at "
            f"{', '.join(_name(t, depth) for t in sorted(reads)) or 'none'}."
        )
    return t


def _name(t: int, depth: int) -> str:
    return str(t) if t <= depth else repr(OUTPUT)


def _number(source: Any, given: object) -> int:
    text = source[1:] if isinstance(source, str) and source.startswith("x") else source
    try:
        number = int(text) if isinstance(text, str) else operator.index(text)
    except (TypeError, ValueError):
        raise _wrong(given) from None
    if isinstance(source, bool) or (text is not source and number < 0):
        raise _wrong(given)
    return number


def _wrong(given: object) -> ValueError:
    return ValueError(
        f"sources={given!r}: a source is the number of a unit, 0 or 'x0' for the trunk's input, or negative, counted "
        "from the unit that reads: -1 is the newest. A dict has such a list for each unit."
    )
