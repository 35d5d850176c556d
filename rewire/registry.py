"""A table of named things, with near names in its error and discovery through entry points."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterator
from importlib.metadata import entry_points as installed_entry_points
from typing import Generic, TypeVar

from rewire.errors import UnknownName

V = TypeVar("V")


class Registry(Generic[V]):
    """Names of one kind of thing.

    Args:
        kind: singular, for messages ("topology").
        plural: the public function that lists the names ("topologies").
        entry_points: group of entry points; each one is loaded, which registers what its module declares.
    """

    def __init__(self, kind: str, plural: str, entry_points: str) -> None:
        self.kind, self.plural, self.group = kind, plural, entry_points
        self._entries: dict[str, V] = {}

    def add(self, name: str, entry: V) -> None:
        if name in self._entries:
            raise ValueError(f"a {self.kind} named '{name}' is already registered.")
        self._entries[name] = entry

    def get(self, name: str) -> V:
        self._discover()
        if name in self._entries:
            return self._entries[name]
        near = difflib.get_close_matches(name, self._entries, n=3, cutoff=0.4)
        hint = f" Did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
        raise UnknownName(f"there is no {self.kind} '{name}'.{hint} rewire.{self.plural}() lists all of them.")

    def items(self) -> Iterator[tuple[str, V]]:
        self._discover()
        return iter(sorted(self._entries.items()))

    def in_order(self) -> list[V]:
        """Entries in the order of their registration."""
        self._discover()
        return list(self._entries.values())

    @functools.cached_property
    def _discovered(self) -> list[str]:
        found = installed_entry_points(group=self.group)
        for point in found:
            point.load()
        return [point.name for point in found]

    def _discover(self) -> None:
        _ = self._discovered
