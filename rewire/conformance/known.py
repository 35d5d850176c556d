"""Mistakes that people make, as changes to the text of a reference, in files in ``mistakes``.

A file has a line in words for each mistake. Below it is the text in the reference (``-``) and the text with the mistake
(``+``), perhaps several of both.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from pathlib import Path

from rewire.conformance.schemes import Reference

_FOLDER = Path(__file__).parent / "mistakes"


@dataclasses.dataclass(frozen=True)
class Mistake:
    """A known mistake.

    Attributes:
        says: what is wrong, in words.
        changes: pairs of the text in the reference and the text with the mistake.
    """

    says: str
    changes: tuple[tuple[str, str], ...]


@functools.cache
def mistakes_of(file: str) -> tuple[Mistake, ...]:
    """The known mistakes in implementing a reference."""
    path = _FOLDER / f"{file}.txt"
    return tuple(map(_mistake, path.read_text().rstrip("\n").split("\n\n"))) if path.exists() else ()


def _mistake(paragraph: str) -> Mistake:
    says, *lines = paragraph.split("\n")
    runs = ["\n".join(line[2:] for line in run) for _, run in itertools.groupby(lines, lambda line: line[0])]
    return Mistake(says, tuple(zip(runs[::2], runs[1::2], strict=True)))


def mistaken(known: Reference, chosen: Sequence[Mistake]) -> Reference | None:
    """The reference with these mistakes; None if they change the same text."""
    text = known.text
    for old, new in (change for mistake in chosen for change in mistake.changes):
        if old not in text:
            return None
        text = text.replace(old, new)
    return dataclasses.replace(known, text=text)
