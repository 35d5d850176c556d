"""Finder: follow the residual stream from one residual add to the next.

The value that an add makes is the state that the next add takes as its shortcut: as it is, or after operations without
weights (a norm, a scale, a view), wherever in the model's code they stand.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Sequence, Set
from types import CodeType
from typing import TypeAlias

from rewire.passes.finding.adds import TURNS, Add, between, keeps_values, residual_adds, size_of
from rewire.passes.finding.cuts import are_cut
from rewire.passes.finding.flow import Flow, Op, Place, Scope, around, reached
from rewire.trunk import Loops

LONG = "a shortcut around a whole trunk"
#: Operations that make a larger tensor of several, which a trace without shapes does not tell.
_JOINS = ("cat", "concat", "stack")
NESTED = "inside the branch of another residual add"

_Written: TypeAlias = tuple[str, CodeType | None, Place | None, frozenset[str]]


@dataclasses.dataclass(eq=False)
class Chain:
    """Residual adds in a row, each of which takes up what the one before it made.

    Attributes:
        adds: the adds.
        passages: for each of them, the casts and views between the state that the one before it made and its own
            state, in order.
    """

    adds: list[Add]
    passages: list[list[Op]]

    @property
    def entry(self) -> Op:
        """The value at which the stream starts."""
        return self.adds[0].state

    def home(self) -> Scope:
        """The innermost call of a function that holds all adds."""
        return around(add.op.scope.chain() for add in self.adds)[-1]


def chains(flow: Flow, restart: bool = False) -> tuple[list[Chain], dict[Add, str]]:
    """The residual streams of a flow; and additions that belong to none, with the reason.

    Args:
        flow: what was run or traced.
        restart: whether a stream begins anew in each pass of a loop; else where the loop makes its state anew.
    """
    found, rejected = residual_adds(flow)
    adds = _without_nested(flow, found, rejected)
    follows = _links(flow, adds)
    taken: set[Add] = set()
    rows: list[list[Add]] = []
    lengths = _lengths(adds, follows)
    for add in adds:
        if add in taken:
            continue
        row = [add]
        while (following := _next(row[-1], adds, follows, lengths)) is not None:
            row.append(following)
        taken.update(row)
        rows.append(row)
    rows = [piece for row in rows for piece in _around_others(flow, row, rows)]
    rows = [piece for row in rows for piece in _cut(flow, row, restart)]
    linked = [chain for row in rows for part in _passes(row, rows) for chain in _rows(part)]
    sums = {add.op for chain in linked for add in chain.adds}
    for chain in linked:
        _close(flow, chain, sums)
        for add in chain.adds:
            add.others = frozenset(add.region & sums)
    return linked, rejected


def _around_others(flow: Flow, row: list[Add], rows: Sequence[list[Add]]) -> list[list[Add]]:
    """A row, cut where a skip leads it around another one whose blocks get its state, too, in the same loop (Funnel).

    To hand a state to these blocks is written as to hand a stream to its own.
    """
    others = [add for other in rows if other is not row and len(other) > 1 for add in other]
    ends = [0]
    for n, (add, following) in enumerate(itertools.pairwise(row), start=1):
        way = between(add.op, following.state)
        inside = [other for other in others if other.op in way]
        state = {add.op, *_after(flow, add.op, {other.op for other in inside})}
        places = {scope.call for scope in add.op.scope.chain() if scope.call is not None}
        calls = {scope for other in inside for scope in other.op.scope.chain() if scope.call in places}
        given = (ops for call in calls if not call.holds(add.op.scope) for ops in call.arguments.values())
        ends += [n] if any(not state.isdisjoint(ops) for ops in given) else []
    parts = [row[start:end] for start, end in itertools.pairwise((*ends, len(row)))]
    return parts if all(len(part) > 1 for part in parts) else [row]


def _cut(flow: Flow, row: list[Add], restart: bool) -> list[list[Add]]:
    """A row, cut in front of each pass through a loop in which the stream begins anew, and behind the last one."""
    ends = [0]
    for first, adds, passes in loops_in(row):
        starts = range(first, first + adds * passes + 1, adds)
        if restart or any(_made_anew(flow, row[start - 1], row[start]) for start in starts[1:-1]):
            ends += starts
    if len(ends) == 1:
        return [row]
    parts = (row[start:end] for start, end in itertools.pairwise((*ends, len(row))))
    return [piece for part in parts if part for piece in _cut(flow, part, restart)]


def loops_in(row: Sequence[Add]) -> Loops:
    """See `Trunk.loops`."""
    places, loops, first = [_written(add) for add in row], list[tuple[int, int, int]](), 0
    while first < len(row):
        adds, passes = _repeated(places, first)
        loops += [(first, adds, passes)] if passes > 1 else []
        first += adds * passes
    return tuple(loops)


def _repeated(places: Sequence[_Written], first: int) -> tuple[int, int]:
    """How many residual adds from the first one on are those of one pass through a loop, and the number of passes."""
    again = (n for n in range(first + 1, len(places)) if places[n] == places[first])
    for end in again if places[first][2] is not None else ():
        loop, passes = places[first:end], 1
        while places[first + passes * len(loop) : first + (passes + 1) * len(loop)] == loop:
            passes += 1
        if passes > 1:
            return len(loop), passes
    return 1, 1


def _made_anew(flow: Flow, add: Add, following: Add) -> bool:
    """Whether a pass through a loop begins with more than what the one before it has made, or without its gradients.

    Where one call makes both adds there is no place at which a stream could begin anew.
    """
    if add.op.scope is following.op.scope:
        return False
    way = between(add.op, following.state)
    sums = (op for op in way - {add.op} if op.name == "add")
    others = ((op, source) for op in sums for source in op.inputs if not source.constant and source not in way)
    return any(None in (op.shape, source.shape) or op.shape == source.shape for op, source in others) or are_cut(
        flow, add, following
    )


def _passes(row: list[Add], rows: Sequence[list[Add]]) -> list[list[Add]]:
    """A row, cut where it runs through the code of another one: the last pass through a loop goes on with what follows.

    So all passes through a loop whose state begins anew are streams of the same blocks, and what follows is another.
    """
    places = [_written(add) for add in row]
    for other in rows:
        loop = [_written(add) for add in other]
        starts = [n for n in range(len(row) - len(loop) + 1) if places[n : n + len(loop)] == loop]
        if len(loop) < len(row) and starts and None not in [place for _, _, place, _ in loop]:
            end = starts[0] + len(loop)
            parts = row[: starts[0]], row[starts[0] : end], row[end:]
            return [piece for part in parts if part for piece in _passes(part, rows)]
    return [row]


def _written(add: Add) -> _Written:
    """The expression and the module that make an add, and the modules of its branches."""
    modules = frozenset(op.scope.path for op in add.region if op.weighted)
    return add.op.scope.path, add.op.scope.code, add.op.place, modules


def _links(flow: Flow, adds: Sequence[Add]) -> dict[Add, Add]:
    """For adds whose state another add made, that one."""
    by_op = {add.op: add for add in adds}
    origin: dict[Op, Add] = {}
    for op in flow:
        if op in by_op:
            origin[op] = by_op[op]
        elif not op.weighted and op.name not in _JOINS:
            sources = [origin[source] for source in op.inputs if source in origin]
            latest = max(sources, key=lambda add: add.op.index, default=None)
            if latest is not None and same_size(op, latest.op):
                origin[op] = latest
    return {add: origin[add.state] for add in adds if add.state in origin}


def same_size(op: Op, other: Op) -> bool:
    return op.shape is None or other.shape is None or op.shape.numel() == other.shape.numel()


def _without_nested(flow: Flow, adds: list[Add], rejected: dict[Add, str]) -> list[Add]:
    """The adds that are no part of another one's branch, or make a trunk there; and no long skips around trunks."""
    alive = set(adds)
    follows = _links(flow, adds)
    by_op = {add.op: add for add in adds}
    for add in sorted(adds, key=lambda add: len(add.region)):
        inner = {by_op[op] for op in add.region if op in by_op and by_op[op] is not add and by_op[op] in alive}
        inner = {one for one in inner if _starts_inside(one, inner, add, follows)}
        if not inner:
            continue
        linked = [(follows[one], one) for one in inner if follows.get(one) in inner]
        beside = [one for one in alive - inner if follows.get(one) is add or follows.get(add) is one]
        outside = bool(beside)
        body = any(_place(first) != _place(second) or not outside for first, second in linked)
        skip = any(_goes_on(add, follows[one], one) for one in inner if follows.get(one) in alive - inner)
        if skip or (body and not (outside and _holds(add, inner, beside))):
            dead, why = [add], LONG
        else:  # of blocks that are whole trunks, all
            dead, why = [] if body else sorted(inner, key=lambda one: one.op.index), NESTED
        alive.difference_update(dead)
        rejected.update(dict.fromkeys(dead, why))
    return [add for add in adds if add in alive]


def _holds(add: Add, inner: Collection[Add], beside: Collection[Add]) -> bool:
    """Whether a module makes an add around a whole trunk that it calls, and where it calls no blocks beside that.

    One loop over several levels (Funnel) hands the state of the one to the other.
    """
    home = add.op.scope.modules()[-1]
    inside, others = ({_call_below(home, one) for one in adds} for adds in (inner, beside))
    return None not in inside and inside.isdisjoint(others)


def _call_below(scope: Scope, add: Add) -> Place | None:
    """Where a call calls what makes an add; None if it does not."""
    return next((inner.call for inner in add.op.scope.chain() if inner.parent is scope), None)


def _starts_inside(one: Add, inner: set[Add], around: Add, follows: dict[Add, Add]) -> bool:
    """Whether the stream of an add in a branch starts there, and does not come by from elsewhere (SAM, Evoformer)."""
    while follows.get(one) in inner:
        one = follows[one]
    return one.source in around.region or one.source in (around.state, around.source)


def _goes_on(around: Add, before: Add, inner: Add) -> bool:
    """Whether the code that made an add makes the one that follows it, too: a trunk of which one block is skipped."""
    one, other = _place(before), _place(inner)
    if not _place(around).holds(one):
        return False
    if one is not other:
        return one.code is other.code is not None
    return before.op.scope is inner.op.scope and before.op.place == inner.op.place is not None


def _place(add: Add) -> Scope:
    return add.block()[-1]


def _lengths(adds: Sequence[Add], follows: dict[Add, Add]) -> dict[Add, int]:
    """How many adds follow each other from each add on, at most."""
    lengths = dict.fromkeys(adds, 1)
    for add in reversed(adds):
        before = follows.get(add)
        if before is not None:
            lengths[before] = max(lengths[before], lengths[add] + 1)
    return lengths


def _next(add: Add, adds: Sequence[Add], follows: dict[Add, Add], lengths: dict[Add, int]) -> Add | None:
    """The add that takes up what ``add`` made; the one with which the stream is longest, if there are several.

    Of equal ones it is the last, as of several that the next state is made of. Not one that begins a trunk in the
    branch of another that does.
    """
    following = [other for other in adds if follows.get(other) is add]
    following = [other for other in following if not any(other.op in around.region for around in following)]
    return max(following, key=lambda other: (lengths[other], other.op.index), default=None)


def _rows(adds: list[Add]) -> list[Chain]:
    """The chain of ``adds``, cut where states before could not be mixed with those behind.

    Views behind what changes values go with all states. Before it they go with one: then states differ in their order.
    """
    rows = [Chain(adds[:1], [[]])]
    for add, following in itertools.pairwise(adds):
        post, passage = _split(between(add.op, following.state, weights=False) - {add.op}, add.op)
        if size_of(add.op) != size_of(following.op) or rearranged(post, add.op):
            rows.append(Chain([following], [[]]))
        else:
            add.post = post
            rows[-1].adds.append(following)
            rows[-1].passages.append(passage)
    return rows


def rearranged(post: Sequence[Op], before: Op) -> bool:
    """Whether a state is in another order behind ``post``: turned, and not turned back, or of another shape."""
    turns = sum((op.name in TURNS or _reorders(op)) and same_size(op, before) for op in post)
    shaped = any(bool(op.inputs) and op.shape != op.inputs[0].shape for op in post)
    return turns % 2 == 1 or (shaped and before.shape != post[-1].shape)


def _reorders(op: Op) -> bool:
    """Whether it is ``x[order]``, or another index with lists or tensors."""
    if op.name in ("index_select", "gather"):
        return True
    index = op.selected[0] if op.name == "getitem" and op.selected else ()
    parts = index if isinstance(index, tuple) else (index,)
    return not all(part is None or part is Ellipsis or isinstance(part, (int, slice)) for part in parts)


def _split(way: Iterable[Op], before: Op) -> tuple[list[Op], list[Op]]:
    """The operations on the way from one state to the next: up to the last that changes values, and the rest.

    Views that turn back what was turned before such a change belong to the first.
    """
    ops = sorted(way, key=lambda op: op.index)
    count = max((n for n, op in enumerate(ops, start=1) if not keeps_values(op)), default=0)
    back = (n for n in range(count, len(ops) + 1) if not rearranged(ops[:n], before))
    count = next(back, count)
    return ops[:count], ops[count:]


def _close(flow: Flow, chain: Chain, sums: Set[Op]) -> None:
    """The norms and activations behind the last add that belong to its block, as in post-norm blocks.

    Args:
        flow: what was run or traced.
        chain: a stream.
        sums: the residual adds of all streams: behind another one nothing is of this stream's.
    """
    last = chain.adds[-1]
    block, after = last.block()[-1], _after(flow, last.op, sums)
    if len(chain.adds) > 1 and block.holds(chain.home()):
        # All adds stand in one forward, and the network's final norm follows: only what followed the others counts.
        alike = [a for a in chain.adds[:-1] if (a.op.scope.code, a.op.place) == (last.op.scope.code, last.op.place)]
        names = [op.name for op in alike[-1].post] if alike else []
        if names and [op.name for op in after[: len(names)]] == names:
            last.post = after[: len(names)]
        return
    leaving = (op for op in (last.op, *after) if block.holds(op.scope) and _leaves(flow, op, block))
    last.post, _ = _split(between(last.op, next(leaving, last.op), weights=False) - {last.op}, last.op)


def _leaves(flow: Flow, op: Op, block: Scope) -> bool:
    """Whether the value of ``op`` is used outside ``block``, or returned by it: as far as is known, if used nowhere."""
    users = flow.users[op]
    returned = op in block.results if block.results else not users
    return returned or any(not block.holds(user.scope) for user in users)


def _after(flow: Flow, op: Op, until: Set[Op]) -> list[Op]:
    """Operations without weights on what ``op`` made, of its size, in order; up to others."""
    goes_on = lambda user: user not in until and not user.weighted and same_size(user, op)  # noqa: E731
    behind = reached([op], lambda made: filter(goes_on, flow.users[made]))
    return sorted(behind - {op}, key=lambda other: other.index)
