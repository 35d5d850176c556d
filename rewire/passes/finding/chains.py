"""Finder: follow the residual stream from one residual add to the next.

The result of an add is the state that the next add takes as its shortcut. Operations without weights (a norm, a scale,
a view) may come in between, anywhere in the model's code.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterable, Sequence, Set
from types import CodeType
from typing import TypeAlias

import torch

from rewire.passes.finding.adds import TURNS, Add, between, keeps_values, residual_adds, size_of
from rewire.passes.finding.channels import channels_of
from rewire.passes.finding.cuts import are_cut
from rewire.passes.finding.flow import Flow, Op, Place, Scope, around, reached
from rewire.trunk import Loops

LONG = "a shortcut around a whole trunk"
#: Operations that join tensors to a larger one, which a trace without shapes does not show.
_JOINS = ("cat", "concat", "stack")
NESTED = "inside the branch of another residual add"

_Written: TypeAlias = tuple[str, CodeType | None, Place | None, frozenset[str]]


@dataclasses.dataclass(eq=False)
class Chain:
    """Residual adds in a row, each of which continues the state that the one before it made.

    Attributes:
        adds: the adds.
        passages: for each add, the casts and views between the state that the add before it made and its own state, in
            order.
    """

    adds: list[Add]
    passages: list[list[Op]]

    @property
    def entry(self) -> Op:
        """The value at which the stream starts."""
        return self.adds[0].state

    def home(self) -> Scope:
        """The innermost function call that contains all adds."""
        return around(add.op.scope.chain() for add in self.adds)[-1]


def chains(flow: Flow, restart: bool = False) -> tuple[list[Chain], dict[Add, str]]:
    """The residual streams of a flow; and additions that belong to none, with the reason.

    Args:
        flow: what was run or traced.
        restart: whether a stream restarts in each pass of a loop; else it does where the loop makes its state anew.
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
    rows = _by_levels(rows)
    rejected.update(dict.fromkeys({*adds}.difference(*rows), LONG))
    rows = [piece for row in rows for piece in _cut(flow, row, restart)]
    rows = [piece for row in rows for part in _passes(row, rows) for piece in _by_width(flow, part)]
    linked = [chain for row in rows for chain in _rows(row)]
    sums = {add.op for chain in linked for add in chain.adds}
    for chain in linked:
        _close(flow, chain, sums)
    states = {op for chain in linked for add in chain.adds for op in (chain.entry, add.op, *add.post)}
    for add in (add for chain in linked for add in chain.adds):
        add.others = frozenset(add.region & states)
    return linked, rejected


def _by_levels(rows: list[list[Add]]) -> list[list[Add]]:
    """The rows, without the skips of a U-Net whose levels run in one loop down and one up.

    The streams of outer levels would wait there while those of inner ones begin and end in the same expressions.
    """
    parts = {id(row): [(0, len(row))] for row in rows}
    for outer, inner in itertools.permutations(rows, 2):
        for n, (last, first) in enumerate(itertools.pairwise(outer), start=1):
            if last.op.index > inner[0].op.index or first.op.index < inner[-1].op.index:
                continue
            home = around(add.op.scope.chain() for add in (*outer, *inner))[-1]
            down, up = _place_in(home, last), _place_in(home, first)
            levels = [_place_in(home, add) for add in inner]
            if down != up and {down, up} <= {*levels}:
                end = len(levels) - levels[::-1].index(down)
                parts[id(outer)] = [(0, n), (n, len(outer))]
                parts[id(inner)] = [(0, end), (levels.index(up, end), len(inner))] if up in levels[end:] else [(0, end)]
    return [row[start:end] for row in rows for start, end in parts[id(row)]]


def _around_others(flow: Flow, row: list[Add], rows: Sequence[list[Add]]) -> list[list[Add]]:
    """A row, cut where it skips another row whose blocks, called in the same loop, read the same state (Funnel).

    The source passes a state to these blocks in the way in which it passes a stream to the row's own blocks.
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


def _by_width(flow: Flow, row: list[Add]) -> list[list[Add]]:
    """A row, cut between stages where a view gives the states another width: they have no channels in common."""
    widths: dict[torch.Size | None, set[int | None]] = {add.shape: set() for add in row}
    if len(widths) > 1:
        for add in row:
            widths[add.shape].add(channels_of(flow, add)[0])
    pairs = enumerate(itertools.pairwise(row), start=1)
    ends = [n for n, (add, following) in pairs if _are_apart(widths[add.shape], widths[following.shape])]
    parts = [row[start:end] for start, end in itertools.pairwise((0, *ends, len(row)))]
    return parts if any(len(part) > 1 for part in parts) else [row]


def _are_apart(widths: Set[int | None], others: Set[int | None]) -> bool:
    return bool(widths - {None}) and bool(others - {None}) and widths.isdisjoint(others)


def _cut(flow: Flow, row: list[Add], restart: bool) -> list[list[Add]]:
    """A row, cut before each pass of a loop in which the stream restarts, and after the last pass."""
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
    """The loops of a row: see `Trunk.loops`."""
    places, loops, first = [_written(add) for add in row], list[tuple[int, int, int]](), 0
    while first < len(row):
        adds, passes = _repeated(places, first)
        loops += [(first, adds, passes)] if passes > 1 else []
        first += adds * passes
    return tuple(loops)


def _repeated(places: Sequence[_Written], first: int) -> tuple[int, int]:
    """The number of residual adds in one pass of the loop that starts at ``first``, and the number of passes."""
    again = (n for n in range(first + 1, len(places)) if places[n] == places[first])
    for end in again if places[first][2] is not None else ():
        loop, passes = places[first:end], 1
        while places[first + passes * len(loop) : first + (passes + 1) * len(loop)] == loop:
            passes += 1
        if passes > 1:
            return len(loop), passes
    return 1, 1


def _made_anew(flow: Flow, add: Add, following: Add) -> bool:
    """Whether a pass of a loop starts with more than the result of the pass before it, or without its gradients.

    False if one call makes both adds: then there is no place at which a stream could restart.
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
    """A row, cut where it runs through another row's code, as the last pass of a loop does before it goes on.

    So if a loop restarts its state, all its passes are streams of the same blocks, and what follows is another stream.
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
    """Where an add is written: its module, code and expression, and the modules of its branches."""
    modules = frozenset(op.scope.path for op in add.region if op.weighted)
    return add.op.scope.path, add.op.scope.code, add.op.place, modules


def _links(flow: Flow, adds: Sequence[Add]) -> dict[Add, Add]:
    """Each add whose state another add made -> that other add."""
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
    """The adds without those inside another add's branch that form no trunk there, and without skips around trunks."""
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
        else:  # the branch contains whole blocks of an outer trunk
            dead, why = [] if body else sorted(inner, key=lambda one: one.op.index), NESTED
        alive.difference_update(dead)
        rejected.update(dict.fromkeys(dead, why))
    return [add for add in adds if add in alive]


def _holds(add: Add, inner: Collection[Add], beside: Collection[Add]) -> bool:
    """Whether a module adds around a whole trunk that it calls, in a place where it calls no blocks of the outer trunk.

    One loop over several levels (Funnel) passes the state of one level to the next.
    """
    home = add.op.scope.modules()[-1]
    inside, others = ({_call_below(home, one) for one in adds} for adds in (inner, beside))
    return None not in inside and inside.isdisjoint(others)


def _call_below(scope: Scope, add: Add) -> Place | None:
    """The place in ``scope`` of the call in which an add runs; None if there is none."""
    return next((inner.call for inner in add.op.scope.chain() if inner.parent is scope), None)


def _place_in(scope: Scope, add: Add) -> Place | None:
    """The place in ``scope`` of an add, or of the call in which it runs."""
    return add.op.place if add.op.scope is scope else _call_below(scope, add)


def _starts_inside(one: Add, inner: set[Add], around: Add, follows: dict[Add, Add]) -> bool:
    """Whether the stream of an add in a branch starts in that branch, and does not only pass by (SAM, Evoformer)."""
    while follows.get(one) in inner:
        one = follows[one]
    return one.source in around.region or one.source in (around.state, around.source)


def _goes_on(around: Add, before: Add, inner: Add) -> bool:
    """Whether the code of ``before`` makes ``inner``, too: then a shortcut skips a block of a trunk."""
    one, other = _place(before), _place(inner)
    if not _place(around).holds(one):
        return False
    if one is not other:
        return one.code is other.code is not None
    return before.op.scope is inner.op.scope and before.op.place == inner.op.place is not None


def _place(add: Add) -> Scope:
    return add.block()[-1]


def _lengths(adds: Sequence[Add], follows: dict[Add, Add]) -> dict[Add, int]:
    """The length of the longest chain of adds from each add on."""
    lengths = dict.fromkeys(adds, 1)
    for add in reversed(adds):
        before = follows.get(add)
        if before is not None:
            lengths[before] = max(lengths[before], lengths[add] + 1)
    return lengths


def _next(add: Add, adds: Sequence[Add], follows: dict[Add, Add], lengths: dict[Add, int]) -> Add | None:
    """The add that continues ``add``; if there are several, the one with the longest stream.

    Among equal ones it is the last, as the next state may be made of several. An add that starts a trunk in another
    candidate's branch does not count.
    """
    following = [other for other in adds if follows.get(other) is add]
    following = [other for other in following if not any(other.op in around.region for around in following)]
    return max(following, key=lambda other: (lengths[other], other.op.index), default=None)


def _rows(adds: list[Add]) -> list[Chain]:
    """The chain of ``adds``, cut where states before and after an add cannot be mixed.

    Views after the last change of values apply to all states. Views before it apply to one, whose order then differs.
    Views inside the call that makes the next state cannot be applied to all states either. Blocks that all end in such
    a call are refused later, with the reason; here the chain is cut where the call only stands between two stages.
    """
    pairs = [*itertools.pairwise(adds)]
    ways = [_split(between(add.op, following.state, weights=False) - {add.op}, add.op) for add, following in pairs]
    turned = [_turned_by_call(*way, *pair) for way, pair in zip(ways, pairs, strict=True)]
    lines = [(add.op.scope.code, add.op.place) for add, _ in pairs]
    unturned = {line for line, call in zip(lines, turned, strict=True) if not call}
    rows = [Chain(adds[:1], [[]])]
    for (add, following), (post, passage), call, line in zip(pairs, ways, turned, lines, strict=True):
        between_stages = call and line in unturned
        if size_of(add.op) != size_of(following.op) or rearranged(post, add.op) or between_stages:
            rows.append(Chain([following], [[]]))
        else:
            add.post = post
            rows[-1].adds.append(following)
            rows[-1].passages.append(passage)
    return rows


def _turned_by_call(post: Sequence[Op], passage: Sequence[Op], *adds: Add) -> bool:
    """Whether the call between two adds that makes the next state also turns it, as a norm over channels does."""
    scopes = post[-1].scope.outward() if post else ()
    calls = [scope for scope in scopes if not any(scope.holds(add.op.scope) for add in adds)]
    own = [*itertools.takewhile(lambda op: calls[-1].holds(op.scope), passage)] if calls else []
    return bool(own) and rearranged([*post, *own], adds[0].op)


def rearranged(post: Sequence[Op], before: Op) -> bool:
    """Whether ``post`` leaves a state in another order (turned and not turned back) or in another shape."""
    turns = sum((op.name in TURNS or _reorders(op)) and same_size(op, before) for op in post)
    shaped = any(bool(op.inputs) and op.shape != op.inputs[0].shape for op in post)
    return turns % 2 == 1 or (shaped and before.shape != post[-1].shape)


def _reorders(op: Op) -> bool:
    """Whether an operation is ``x[order]``, or indexes with lists or tensors in another way."""
    if op.name in ("index_select", "gather"):
        return True
    index = op.selected[0] if op.name == "getitem" and op.selected else ()
    parts = index if isinstance(index, tuple) else (index,)
    return not all(part is None or part is Ellipsis or isinstance(part, (int, slice)) for part in parts)


def _split(way: Iterable[Op], before: Op) -> tuple[list[Op], list[Op]]:
    """The operations between two states, split after the last one that changes values.

    Views after it that undo a reordering from before it belong to the first part.
    """
    ops = sorted(way, key=lambda op: op.index)
    count = max((n for n, op in enumerate(ops, start=1) if not keeps_values(op)), default=0)
    back = (n for n in range(count, len(ops) + 1) if not rearranged(ops[:n], before))
    count = next(back, count)
    return ops[:count], ops[count:]


def _close(flow: Flow, chain: Chain, sums: Set[Op]) -> None:
    """Set the last add's ``post``: the norms and activations after it that belong to its block, as in post-norm blocks.

    Args:
        flow: what was run or traced.
        chain: a stream.
        sums: the residual adds of all streams, at which the search stops.
    """
    last = chain.adds[-1]
    block, after = last.block()[-1], _after(flow, last.op, sums)
    if len(chain.adds) > 1 and block.holds(chain.home()):
        # All adds are in one forward, and the final norm follows: only what follows the other adds, too, counts.
        written = functools.partial(_expression, chain.home())
        alike = [add for add in chain.adds[:-1] if written(add.op) == written(last.op)]
        post = [written(op) for op in alike[-1].post] if alike else []
        if [written(op) for op in after[: len(post)]] == post:
            last.post = after[: len(post)]
        return
    leaving = (op for op in (last.op, *after) if block.holds(op.scope) and _leaves(flow, op, block))
    last.post, _ = _split(between(last.op, next(leaving, last.op), weights=False) - {last.op}, last.op)


def _expression(home: Scope, op: Op) -> tuple[str, list[Place | None]]:
    """An operation's name, and where ``home`` calls it: the same in each pass of a loop."""
    inside = itertools.takewhile(lambda scope: scope is not home, op.scope.outward())
    return op.name, [op.place, *(scope.call for scope in inside)]


def _leaves(flow: Flow, op: Op, block: Scope) -> bool:
    """Whether ``op`` is used outside ``block``, or returned by it: if the results are unknown, if nothing uses it."""
    users = flow.users[op]
    returned = op in block.results if block.results else not users
    return returned or any(not block.holds(user.scope) for user in users)


def _after(flow: Flow, op: Op, until: Set[Op]) -> list[Op]:
    """The operations after ``op`` without weights and of the same size, in order, as far as those in ``until``."""
    goes_on = lambda user: user not in until and not user.weighted and same_size(user, op)  # noqa: E731
    behind = reached([op], lambda made: filter(goes_on, flow.users[made]))
    return sorted(behind - {op}, key=lambda other: other.index)
