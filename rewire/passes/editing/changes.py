"""Changes to stretches of a text, which may be nested."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

from rewire.errors import EditError

#: Renders the text between two characters, with the changes inside it.
Render = Callable[[int, int], str]


@dataclasses.dataclass(frozen=True)
class Change:
    """A stretch of the text, and what to write in its place.

    Attributes:
        start, end: its first character, and the one after its last.
        write: makes the new text, given a function that renders the inside.
        argument: whether it is around an argument of a call.
        indent: of a new line. Among several lines in one place, those of inner blocks come first.
    """

    start: int
    end: int
    write: Callable[[Render], str]
    argument: bool = False
    indent: int = 0


def rendered(text: str, changes: Sequence[Change]) -> str:
    """The text with all changes, nested ones included.

    Raises:
        EditError: two changes exclude each other.
    """
    done: set[int] = set()

    def render(start: int, end: int, among: Sequence[Change]) -> str:
        rest = [change for change in among if start <= change.start and change.end <= end]
        rest.sort(key=lambda change: (change.start, change.end > change.start, -change.end))
        written, position = [], start
        while rest:
            change, *rest = rest
            inside = [c for c in rest if c.end <= change.end and change.start < change.end]
            rest = [c for c in rest if c not in inside]
            done.add(id(change))
            written += [text[position : change.start], change.write(functools.partial(render, among=inside))]
            position = change.end
        return "".join([*written, text[position:end]])

    result = render(0, len(text), list(changes))
    if len(done) != len(changes):
        raise EditError("the residual stream passes one expression in two ways that cannot be written together")
    return result
