"""The finder's report: trunks, their residual adds, and what was left alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAlias

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from rewire.console import Shown, table

#: Whether one stream continues through all passes of blocks that run several times, or begins anew in each pass.
Loop: TypeAlias = Literal["continue", "restart"]
#: See `Trunk.loops`.
Loops: TypeAlias = tuple[tuple[int, int, int], ...]


@dataclasses.dataclass(frozen=True)
class Site:
    """One residual add.

    Attributes:
        name: path of the branch from the model's root, ``model.layers.0.self_attn``.
        block: path of the module whose forward has the add, ``model.layers.0``.
        branch: path of the branch's main module, relative to the block: ``self_attn``.
        kind: ``attention``, ``cross-attention``, ``linear-attention`` (without a softmax), ``ffn``, ``parallel``,
            ``conv`` or ``branch``.
        post: modules and operations between the add and the new state (post-norm, ``relu(x + f)``).
        affine: whether ``post`` only scales the state and adds to it (``l * x + m * x0`` between blocks).
        in_place: whether ``post`` writes to the sum in place.
        overwritten: whether the next add writes to the result of ``post`` in place.
        read_later: if the add writes in place, the adds before it whose shortcuts are in variables that are read later:
            it would change these if all adds in between were left out.
        width: number of channels of the stream; None if the structure does not tell.
        channel_dim: dimension of the channels: -1 if they come last, -3 in an image; 1 counts from the front.
    """

    name: str
    block: str
    branch: str
    kind: str
    post: tuple[str, ...] = ()
    width: int | None = None
    channel_dim: int = -1
    affine: bool = False
    in_place: bool = False
    overwritten: bool = False
    read_later: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Trunk:
    """One residual stream: residual adds in the order in which they run.

    Attributes:
        name: path of the container of its blocks, ``model.layers``.
        sites: the residual adds; if a block is called several times, its adds are repeated.
        units: for each site the number (from 1) of its block.
        owner: path of the module on which the connection weights are registered.
        loops: the loops through which the stream continues, each as (adds before the loop, adds of one pass, number of
            passes).
        turned: whether views between its adds move the channels to another dimension, and back.
    """

    name: str
    sites: tuple[Site, ...]
    units: tuple[int, ...]
    owner: str
    loops: Loops = ()
    turned: bool = False

    @property
    def post_norm(self) -> bool:
        """Whether states pass through a norm or an activation between the residual adds."""
        return any(site.post and not site.affine for site in self.sites)

    @property
    def widths(self) -> set[int]:
        """The known widths of its states; several only if no run has shown their shapes."""
        return {site.width for site in self.sites if site.width is not None}

    @property
    def width(self) -> int:
        """Number of channels of its states; 0 if unknown."""
        return next((site.width for site in self.sites if site.width), 0)

    @property
    def channel_dim(self) -> int:
        """Dimension of the channels, as in a `Site`."""
        return next((site.channel_dim for site in self.sites if site.width), -1)

    @property
    def posts(self) -> tuple[int, ...]:
        """Numbers, from 0, of the residual adds whose sum passes through a norm or another operation."""
        return tuple(number for number, site in enumerate(self.sites) if site.post)

    @property
    def facts(self) -> dict[str, Any]:
        """The arguments of a `Layout` that describe the trunk's states, by name."""
        overwritten = tuple(number for number, site in enumerate(self.sites) if site.overwritten)
        read_later = {number: site.read_later for number, site in enumerate(self.sites) if site.read_later}
        facts = {"channel_dim": self.channel_dim, "posts": self.posts, "loops": self.loops}
        return {**facts, "overwritten": overwritten, "read_later": read_later}

    @property
    def blocks(self) -> int:
        """Number of blocks, each counted as often as it is called."""
        return self.units[-1]


@dataclasses.dataclass(frozen=True)
class LeftAlone:
    """A residual add that was left alone, or a module that could not be read.

    Attributes:
        path: path of the branch or the module, from the model's root.
        why: the reason, in words.
        place: file and line of the user's source; empty if unknown.
        written: the expression at that place.
        remedy: what to do about it; empty if nothing can be done.
    """

    path: str
    why: str
    place: str = ""
    written: str = ""
    remedy: str = ""


def told(left: Sequence[LeftAlone]) -> list[tuple[str, str, str]]:
    """Path, reason and place of what was left alone; modules with the same reason and place share one row."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for one in left:
        why = f"{one.why}; {one.remedy}" if one.remedy else one.why
        rows.setdefault((why, one.place, one.written), []).append(one.path or "(the model)")
    return [
        (
            paths[0] + (f" and {len(paths) - 1} more" if len(paths) > 1 else ""),
            why,
            f"{place}: {written}" if written else place,
        )
        for (why, place, written), paths in rows.items()
    ]


@dataclasses.dataclass(frozen=True)
class Report(Shown):
    """What `rewire.inspect` found. Printing it shows a table.

    Attributes:
        trunks: the residual streams that can be rewired.
        left: what was left alone.
        dropped: branches that some runs in training mode skipped, as layer dropping does. They are connected, and add
            nothing when they are skipped.
    """

    trunks: tuple[Trunk, ...]
    left: tuple[LeftAlone, ...] = ()
    dropped: tuple[str, ...] = ()

    @property
    def skipped(self) -> dict[str, str]:
        """Module path -> the reason why a residual add there was left alone, or why the module could not be read."""
        return {one.path: one.why for one in reversed(self.left)}

    def shown(self) -> Iterator[RenderableType]:
        if not self.trunks:
            yield "No residual stream was found."
        for trunk in self.trunks:
            yield self._headline(trunk)
            yield self._table(trunk)
        if self.dropped:
            names = ", ".join(self.dropped)
            yield Text(f"Layer dropping, in training mode: {names} did not run in each of two runs", overflow="fold")
        if self.left:
            yield Text("Left alone", style="bold")
            yield table(("module", "reason", "where"), told(self.left))

    @staticmethod
    def _headline(trunk: Trunk) -> Text:
        width, norm = trunk.width or "unknown", "post-norm" if trunk.post_norm else "pre-norm"
        text = f"{trunk.name}: {len(trunk.sites)} residual adds in {trunk.blocks} blocks, width {width}, {norm}"
        text += "".join(f", a loop of {passes} passes" for _, _, passes in trunk.loops)
        return Text(text, style="bold", overflow="fold")

    @staticmethod
    def _table(trunk: Trunk) -> Table:
        rows = []
        for number, (site, unit) in enumerate(zip(trunk.sites, trunk.units, strict=True), 1):
            new_block = number == 1 or trunk.units[number - 2] != unit
            rows.append((number, site.block if new_block else "", site.branch, site.kind, ", ".join(site.post)))
        return table(("#", "block", "branch", "kind", "followed by"), rows)
