"""Registries of named objects and factories: errors suggest similar names, and entry points add entries."""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points as installed_entry_points
from typing import Any, Generic, TypeAlias, TypeVar

from rewire.errors import UnknownName, check_type

V = TypeVar("V")
F = TypeVar("F", bound=Callable[..., object])
Options: TypeAlias = dict[str, Any]  #: keyword arguments of a factory


def _letters(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower()).removesuffix("s")


def said(text: str) -> tuple[str, Options]:
    """The name and the options in ``name:option=value,option=value``; values are Python literals or strings.

    Raises:
        ValueError: an option has no value, or two.
    """
    name, _, rest = text.partition(":")
    options = {}
    for part in re.split(r"[,:](?=[^,:=]*=)", rest) if rest else ():
        option, separator, value = part.partition("=")
        if not (option.strip() and separator and value):
            raise ValueError(f"'{text}': an option is written name=value, as in 'ancre-ingoing:block=2,cascade=keep'.")
        if option.strip() in options:
            raise ValueError(f"'{text}': {option.strip()} is given twice.")
        options[option.strip()] = value_of(value)
    return name, options


def with_said(kind: str, text: str, options: Options) -> tuple[str, Options]:
    """The name in ``text``, and ``options`` together with the options in ``text``.

    Raises:
        ValueError, TypeError: an option has no value, or two.
    """
    name, more = said(text)
    if twice := more.keys() & options.keys():
        raise TypeError(f"options {sorted(twice)} of {kind} '{name}' are given twice.")
    return name, options | more


def value_of(text: str) -> Any:
    """``text`` as a Python literal if it is one, or as ``true`` or ``false``; else as a string."""
    try:
        return ast.literal_eval(text.capitalize() if text in ("true", "false") else text)
    except (SyntaxError, ValueError):
        return text.strip()


class Registry(Generic[V]):
    """Objects of one kind by name.

    Args:
        kind: singular, for messages ("topology").
        plural: for messages ("topologies"): `rewire.list_<plural>` lists the names.
        entry_points: group of entry points; loading one registers what its module declares.
    """

    def __init__(self, kind: str, plural: str, entry_points: str) -> None:
        self.kind, self.plural, self.group = kind, plural, entry_points
        self._entries: dict[str, V] = {}

    def add(self, name: str, entry: V) -> None:
        check_type("name", name, str)
        if name in self._entries:
            raise ValueError(f"a {self.kind} named '{name}' is already registered.")
        self._entries[name] = entry

    def get(self, name: str) -> V:
        self._discover()
        if name in self._entries:
            return self._entries[name]
        near = self._near(name)
        hint = f" Did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
        raise UnknownName(f"there is no {self.kind} '{name}'.{hint} rewire.list_{self.plural}() lists all of them.")

    def _near(self, name: str) -> list[str]:
        """Names that may be meant: similar ones, of the same family, or with a class or description that matches."""
        if near := difflib.get_close_matches(name, self._entries, n=3, cutoff=0.85):
            return near
        words: dict[str, list[str]] = {}
        for known, entry in self.items():
            line = (inspect.getdoc(entry) or "").split("\n")[0]
            of_class = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", getattr(entry, "__name__", ""))
            for word in (known.partition("-")[0], of_class, *re.findall(r"\(([^()]+)\)|(?:^|, )([A-Z][\w -]+)", line)):
                for each in [word] if isinstance(word, str) else word:
                    words.setdefault(_letters(each), []).append(known)
        found = difflib.get_close_matches(_letters(name), [word for word in words if word], n=3, cutoff=0.6)
        meant = [known for word in found for known in words[word]]
        return list(dict.fromkeys([*meant, *difflib.get_close_matches(name, self._entries, n=3, cutoff=0.4)]))[:4]

    def items(self) -> Iterator[tuple[str, V]]:
        self._discover()
        return iter(sorted(self._entries.items()))

    def in_order(self) -> list[V]:
        """All entries, in the order of registration."""
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


class Factories(Registry[Callable[..., V]]):
    """Factories of one kind of object by name: their parameters are the options, their docstring the description.

    Args:
        product: class of the objects that the factories make.
        public: public name of that class, for messages ("rewire.Topology").
    """

    def __init__(self, kind: str, plural: str, entry_points: str, product: type[V], public: str) -> None:
        super().__init__(kind, plural, entry_points)
        self.product, self.public = product, public

    def register(self, name: str) -> Callable[[F], F]:
        """Decorator: register a class, or a function that returns an object of it, under ``name``."""

        def registered(factory: F) -> F:
            self.add(name, factory)  # type: ignore[arg-type]
            return factory

        return registered

    def descriptions(self) -> dict[str, str]:
        return {name: (inspect.getdoc(factory) or "").split("\n")[0] for name, factory in self.items()}

    def make(self, given: str | V, options: Options) -> V:
        """An object from the factory named ``given``, called with ``options``; or ``given`` if it is such an object.

        The name may be followed by options, as `said` parses them.

        Raises:
            UnknownName: no such name; the message suggests similar ones.
            TypeError: neither a name nor such an object; no such option; or an option is given twice.
            ValueError: an option in the name has no value.
        """
        if isinstance(given, self.product):
            if options:
                raise TypeError(f"options {sorted(options)} can only be passed with a name; set them on the object.")
            return given
        if not isinstance(given, str):
            raise TypeError(f"{self.kind} must be a name or a {self.public}, not {type(given).__name__}.")
        given, options = with_said(self.kind, given, options)
        factory = self.get(given)
        allowed = inspect.signature(factory).parameters
        for option, value in options.items():
            if option not in allowed:
                takes = f"it takes {', '.join(allowed)}" if allowed else "it takes none"
                raise TypeError(f"{self.kind} '{given}' has no option '{option}': {takes}.")
            if allowed[option].annotation in (bool, "bool") and not isinstance(value, bool):  # "no" is true in Python
                raise ValueError(f"{option}={value!r}: it has to be True or False.")
        return factory(**options)
