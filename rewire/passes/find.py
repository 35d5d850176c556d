"""Finder: the trunks of a model, from the residual streams of its flows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from torch import nn

from rewire.passes.adds import Add
from rewire.passes.flow import Flow, Op
from rewire.passes.names import channels_of, named
from rewire.passes.streams import Chain, chains
from rewire.trunk import Report, Site, Trunk

SINGLE = "a single residual add: there is nothing to connect it with"


@dataclasses.dataclass(eq=False)
class FoundTrunk:
    """A trunk, and the residual adds that it is in a flow."""

    trunk: Trunk
    chain: Chain


@dataclasses.dataclass
class Found:
    """The trunks of a flow, and what was left alone: where, and why."""

    flow: Flow
    trunks: list[FoundTrunk]
    skipped: dict[str, str]

    @property
    def report(self) -> Report:
        return Report(tuple(found.trunk for found in self.trunks), dict(self.skipped))


def trunks_in(flow: Flow) -> Found:
    """All residual streams of at least two adds, in the order of the model's modules."""
    linked, rejected = chains(flow)
    skipped = dict(flow.unread)
    for one in rejected:
        skipped.setdefault(one.op.scope.path if one.add is None else _site(flow, one.add).name, one.why)
    position = {path: number for number, (path, _) in enumerate(flow.model.named_modules())}
    rows: list[tuple[Chain, list[Site]]] = []
    for chain in linked:
        for piece in _of_one_width(chain):
            sites = [_site(flow, add) for add in piece.adds]
            if len(sites) == 1:
                skipped.setdefault(sites[0].name, SINGLE)
            else:
                rows.append((piece, sites))
    trunks: list[FoundTrunk] = []
    for chain, sites in sorted(rows, key=lambda row: position.get(row[1][0].block, 0)):
        taken = {found.trunk.name for found in trunks}
        trunks.append(FoundTrunk(_trunk(flow, chain, sites, taken), chain))
    return Found(flow, trunks, skipped)


def _of_one_width(chain: Chain) -> list[Chain]:
    """The chain, cut where its states change their size."""
    pieces, start = [], 0
    for number in range(1, len(chain.adds) + 1):
        if number == len(chain.adds) or _size(chain.adds[number].op) != _size(chain.adds[number - 1].op):
            pieces.append(Chain(chain.adds[start:number], [[], *chain.passages[start + 1 : number]]))
            start = number
    return pieces


def _size(op: Op) -> int:
    return -1 if op.shape is None else op.shape.numel()


def _site(flow: Flow, add: Add) -> Site:
    scopes = add.block()
    block = scopes[-1].path
    branch, kind = named(add)
    name = f"{block}.{branch}" if block else branch
    post = tuple(dict.fromkeys(_called_in(op, block, len(scopes)) for op in add.post))
    return Site(name, block, branch, kind, post, *channels_of(add, flow.users[add.state]))


def _called_in(op: Op, block: str, depth: int) -> str:
    """Path, below the block, of the innermost module that ``op`` runs in; the operation's name if it is the block."""
    path = op.scope.path.removeprefix(block).lstrip(".")
    return path if len(op.calls()) > depth and path else op.name


def _trunk(flow: Flow, chain: Chain, sites: Sequence[Site], taken: set[str]) -> Trunk:
    prefix, above = common_path(sites, flow.containers)
    name = ".".join(prefix) or (type(flow.model).__name__ if isinstance(flow.model, nn.Module) else "trunk")
    while name in taken:
        name += "'"
    return Trunk(name, tuple(sites), _units(chain, sites, len(above)), _owner(flow, chain, sites))


def _units(chain: Chain, sites: Sequence[Site], depth: int) -> tuple[int, ...]:
    """A unit is an element of the container, or one more call of the same.

    Args:
        chain: the residual adds.
        sites: what is said of them.
        depth: parts of the container's path.
    """
    units: list[int] = []
    before: object = None
    seen: set[object] = set()
    for add, site in zip(chain.adds, sites, strict=True):
        path = parts(site.name)[: depth + 1]
        call = next((scope for scope in add.block() if len(path) > depth and parts(scope.path) == path), None)
        again = (site.name, add.op.scope.code, add.op.place)
        if not units or (path, call) != before or again in seen:
            units.append(units[-1] + 1 if units else 1)
            seen = set()
        else:
            units.append(units[-1])
        seen.add(again)
        before = path, call
    return tuple(units)


def _owner(flow: Flow, chain: Chain, sites: Sequence[Site]) -> str:
    """The nearest module around all adds that is no container; else the first block."""
    path = chain.home().path
    while flow.containers(path):
        if not path:
            return sites[0].block
        path = path.rpartition(".")[0]
    return path


def common_path(sites: Sequence[Site], is_container: Callable[[str], bool]) -> tuple[list[str], list[str]]:
    """The parts that all names of ``sites`` begin with, and the path of the container whose elements are the units."""
    prefix = common_parts([parts(site.name) for site in sites])
    in_one_element = prefix and prefix[-1].isdecimal() and not is_container(".".join(prefix))
    return prefix, prefix[:-1] if in_one_element else prefix


def common_parts(paths: list[list[str]]) -> list[str]:
    """The longest list that all ``paths`` begin with."""
    shortest = min(paths, key=len)
    differ = (n for n, part in enumerate(shortest) if any(path[n] != part for path in paths))
    return shortest[: next(differ, len(shortest))]


def parts(path: str) -> list[str]:
    return path.split(".") if path else []
