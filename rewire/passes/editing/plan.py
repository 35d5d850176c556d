"""Pass: plan which expressions of which functions change, so that a trunk's residual adds go through a stream."""

from __future__ import annotations

import ast
import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence
from types import FunctionType, MappingProxyType
from typing import Any

from torch import nn

from rewire.code.text import Span, Text, place_of, span_of, within
from rewire.errors import EditError
from rewire.mixes.norms import mark
from rewire.passes.editing.additions import addition_at
from rewire.passes.editing.attention import plan_attention
from rewire.passes.editing.carriers import Carriers, casts_of
from rewire.passes.editing.edits import (
    Apply,
    FunctionPlan,
    Key,
    Open,
    Parameter,
    Plans,
    Push,
    Reach,
    Sum,
    Through,
    View,
    Written,
)
from rewire.passes.editing.iterations import plan_iterations
from rewire.passes.editing.refused import (
    check_add,
    check_drawn,
    check_hook,
    check_hooked,
    check_in_place,
    check_returns,
    check_whole,
)
from rewire.passes.editing.sources import Sources
from rewire.passes.editing.variables import (
    assigned,
    behind,
    calls_around,
    ended,
    is_conditional,
    is_one_of_several,
    may_be_left_out,
    only_returned,
    place_returned,
    read_behind_ifs,
    returned_calls,
    statements_behind,
)
from rewire.passes.find import Finding, overwritten
from rewire.passes.finding.adds import CASTS, UNSCALED, Add, is_view
from rewire.passes.finding.chains import rearranged, same_size
from rewire.passes.finding.flow import Op, Scope
from rewire.passes.finding.projections import Projections
from rewire.runtime.nested import Item


def plan(
    found: Finding,
    name: str,
    plans: Plans,
    definitions: Mapping[type[nn.Module], FunctionType] = MappingProxyType({}),
    separate: Mapping[int, Projections] = MappingProxyType({}),
    entered: Collection[Key] = (),
    separate_norms: bool = False,
) -> tuple[set[Key], dict[int, int]]:
    """Add the edits for one trunk in one flow to ``plans``.

    Args:
        found, name, plans: the flow, the trunk, and the plans to add to.
        definitions: functions that replace the forwards of modules of these classes.
        separate: for residual adds whose attention has separate q/k/v inputs: where it projects them.
        entered: functions that other trunks enter (see `Carriers`).
        separate_norms: whether the norms before such attentions get copies for keys and values.

    Returns:
        Functions that only pass this trunk's stream on; and `Layout.repeated`.

    Raises:
        EditError: a function that would have to change cannot be edited.
        UnsupportedTopology: q, k and v of an attention cannot be taken apart.
    """
    sources = Sources(definitions, plans)
    carriers = Carriers(found, name, sources, entered)
    planner = _Planner(found, name, carriers, separate)
    handed = planner.run()
    for number, projections in separate.items():
        plan_attention(carriers, number, found.trunks[name].sites[number].width, projections, separate_norms)
    return handed, planner.repeated()


class _Planner:
    def __init__(self, found: Finding, name: str, carriers: Carriers, separate: Collection[int]) -> None:
        self.found, self.flow, self.name, self.separate = found, found.flow, name, separate
        self.chain, self.adds = carriers.chain, carriers.adds
        self.carriers, self.sources = carriers, carriers.sources
        self.made_by_calls: set[tuple[int, Scope, Span]] = set()  # (number of an add, scope, call that makes its state)

    def run(self) -> set[Key]:
        """Plan all edits but those of attentions; return the functions that only pass the stream on."""
        carriers, entered = self.carriers, self.carriers.entered
        check_in_place(carriers)
        check_hooked(carriers)
        check_hook(carriers)
        closed = [scope for scope in carriers.scopes if scope not in entered]
        handed = {(scope.path, scope.code) for scope in closed if scope.code is not None}
        for scope in entered:
            known = self.sources.plan(scope).outside
            known[self.name] = known.get(self.name, True) and (scope.path, scope.code) in carriers.outside
        for scope in entered:
            self.sources.check_called(scope)
            self._entry(scope)
            for child in carriers.scopes:
                if child.parent is scope:
                    self._through(scope, child)
        for number, add in enumerate(self.adds):
            self._add(number, add)
        for scope in entered:
            plan_iterations(carriers, self.name, scope)
        self._given()
        self._passages()
        self._casts()
        self._end(entered)
        self._ran()
        return handed

    def repeated(self) -> dict[int, int]:
        """The adds of which nothing tells which they are, and the first that each may be instead.

        They are made by one expression that runs several times between two blocks, or by a function that is called
        several times.
        """
        found: dict[int, int] = {}
        for scope in self.carriers.entered:
            found |= self._unknown_in(scope)
        for scope, keys in self.carriers.again.items():
            if scope in self.carriers.entered and self.sources.plan(scope).ordered:
                continue
            for key in keys:
                itself = key == (scope.path, scope.code)
                made = ([c for c in self.carriers.calls_of(add) if (c.path, c.code) == key] for add in self.adds)
                numbers = [n for n, calls in enumerate(made) if any(itself or call.parent is scope for call in calls)]
                found |= {number: min(found.get(number, number), numbers[0]) for number in numbers}
        return found

    def _unknown_in(self, scope: Scope) -> dict[int, int]:
        """Those of the adds that a function makes itself."""
        unknown, found, first = self.sources.plan(scope).unordered, dict[int, int](), None
        for number, add in enumerate(self.adds) if unknown else ():
            if not scope.holds(add.op.scope):
                continue
            if self._made_by_a_sure_call(add, scope):
                first = None  # by a block that knows where it belongs
                continue
            first = number if first is None else first
            if add.op.scope is scope and self.sources.span(scope, add.op) in unknown:
                found[number] = first
        return found

    def _made_by_a_sure_call(self, add: Add, scope: Scope) -> bool:
        """Whether an add is made by a function that ``scope`` calls whenever it runs."""
        called = next((call for call in add.op.scope.outward() if call.parent is scope), None)
        if called is None or called.call is None:
            return False
        return not may_be_left_out(self.sources.text(scope), self.sources.call(called))

    def _ran(self) -> None:
        """Note which expressions of entered functions ran: a call that did not run may call a block, too."""
        plans = {scope: self.sources.plan(scope) for scope in self.carriers.entered}
        for op in self.flow:
            place = op.place
            for scope in op.scope.outward():
                if scope in plans and place is not None:
                    plans[scope].ran.add(place_of(*place))
                place = scope.call

    def _entry(self, scope: Scope) -> None:
        """Plan how the stream gets into an entered function, and count the adds that the function makes."""
        function = self.sources.plan(scope)
        inside = [number for number, add in enumerate(self.adds) if scope.holds(add.op.scope)]
        start = inside[0] if inside else self._adds_before(scope)
        if scope is not self.carriers.begin and scope.holds(self.carriers.begin):
            function.adds.setdefault(self.name, {})[0] = len(inside)
            function.begins_inside.add(self.name)  # the stream starts in a function that this one calls
            self._check_one_start(function)
            return
        function.adds.setdefault(self.name, {})[start] = len(inside)
        if inside and not all(scope.holds(op.scope) for op in self.adds[start].own):
            function.branch_given.add(self.name)
        check_returns(self.carriers, scope)
        number = function.trunks.index(self.name)
        value = self.chain.entry if scope in (self.carriers.begin, self.carriers.first) else None
        names = self.carriers.brought(scope, value, start)
        if value is not None and not self._starts(function, self._place_of_start(scope, value, names)):
            return  # the stream starts at a later place
        if scope in self.carriers.read_below:
            function.read_below.add(self.name)
        sums = {add.op for add in self.adds}
        for name in sorted(names, key=lambda name: sums.isdisjoint(scope.arguments[name])):  # the stream itself first
            post = not self.carriers.in_post.isdisjoint(scope.arguments[name])
            norm = None if post else self._norm(scope, start, value)
            item = None
            if value is not None:
                item = _item(value, scope.arguments[name], scope.places.get(name, ()))
                self._check_start(scope, name, item)
            told, calls = self.carriers.told.get((scope.path, scope.code), ("", {}))
            function.calls.setdefault(self.name, {}).update(calls)
            reader = None
            if scope is self.carriers.begin and value is not None and len(names) == 1 and item is None and not post:
                reader = self._reader_behind_ifs(scope, value, name, function.text.tree.body)
            brought = Parameter(name, number, norm, post=post, item=item, told=told, reader=reader)
            function.put(("parameter", name, number), brought)
        if not names:
            if value is None or not (value.parameter or scope.holds(value.scope)):
                raise EditError(
                    f"the residual stream does not enter {function.text.where()} as an argument, or in a tuple, list, "
                    "dict or object that is an argument: it is read from another object. Pass it as a tensor, and "
                    "return the new one"
                )
            at = self.sources.span(scope, value)
            if any((op.scope, op.place) == (value.scope, value.place) for add in self.adds for op in add.post):
                raise EditError(
                    f"the residual stream starts in an expression of {function.text.where()} that a loop runs again "
                    "between two residual adds"
                )
            self._check_one_first(value, scope)
            check_whole(value, function.text, at)
            norm, item = self._norm(scope, start, value), self._item_made(value, scope)
            self._check_started_once(scope, at, item)
            over = overwritten(self.flow, [value], self.adds[0])
            node, reader = next(iter(function.text.nodes.get(at, ())), None), None
            variable = assigned(function.text, node) if node is not None and item is None else None
            if node is not None and variable is not None:
                reader = self._reader_behind_ifs(scope, value, variable, statements_behind(function.text, node))
            function.put(("open", at, item), Open(at, number, norm, item, over, reader))

    def _reader_behind_ifs(self, scope: Scope, value: Op, name: str, statements: Sequence[ast.stmt]) -> Span | None:
        """The one of some statements that first reads ``value``, if an ``if`` before it may change the variable."""
        users = self.flow.users[value]
        calls = (call for user in users for call in user.scope.outward() if call.parent is scope)
        places = [user.place for user in users if user.scope is scope] + [call.call for call in calls]
        lines = {0 if place is None else place_of(*place)[0] or 0 for place in places}
        reader = read_behind_ifs(name, statements, lines)
        return None if reader is None or any(line < reader.lineno for line in lines) else span_of(reader)

    def _check_one_first(self, value: Op, scope: Scope) -> None:
        """Refuse a first state that a lambda or a comprehension makes among others."""
        if value.place is None or scope.code is None or value.place[0] not in scope.code.co_consts:
            return
        runs = [op for op in self.flow if scope.holds(op.scope) and op.place == value.place and op.name == value.name]
        if len(runs) > 1:
            raise EditError(
                f"the residual stream starts in a function inside {self.sources.plan(scope).text.where()} that runs "
                f"{len(runs)} times, of which one makes its first state: make that in a statement by itself"
            )

    def _check_started_once(self, scope: Scope, at: Span, item: Item | None) -> None:
        """Refuse an expression that a loop runs again to start another trunk, which is left alone."""
        others = [*(chain for name, chain in self.found.chains.items() if name != self.name), *self.found.gone]
        for op in (chain.entry for chain in others if scope.holds(chain.entry.scope)):
            place = op.place
            for inner in itertools.takewhile(lambda inner: inner is not scope, op.scope.outward()):
                place = inner.call
            if place is not None and place_of(*place) == at and self._item_made(op, scope) == item:
                text = self.sources.text(scope)
                raise EditError(
                    f"the expression at {text.where(text.nodes[at][0])}, where the residual stream starts, runs again "
                    "and starts another one: make what the loop around it runs a module or a method"
                )

    def _check_start(self, scope: Scope, name: str, item: Item | None) -> None:
        """Refuse a parameter at which another trunk starts, or may start, too: nothing would tell them apart."""
        function = self.sources.plan(scope)
        for number, trunk in enumerate(function.trunks):
            other = function.edits.get(("parameter", name, number))
            starts = trunk != self.name and function.begins.get(trunk) == (name,)
            if starts and isinstance(other, Parameter) and other.item == item:
                raise EditError(f"'{name}' at {function.text.where()} is where another trunk starts, too: '{trunk}'")
        places = {(add.op.scope.path, add.op.place) for add in self.adds if add.op.place is not None}
        own = {op for chain in self.found.passes(self.name) for add in chain.adds for op in (add.op, *add.inner)}
        for op in (op for op in self.flow if (op.scope.path, op.place) in places and op not in own):
            for call in op.scope.chain():
                if (call.path, call.code) == (scope.path, scope.code) and call not in self.carriers.scopes:
                    raise EditError(f"the function at {function.text.where()} adds to another stream, too")

    def _item_made(self, value: Op, scope: Scope) -> Item | None:
        """What leads to ``value`` among what an expression in ``scope`` makes, or its number; None if that is all."""
        inner = _called(value, scope)
        if inner is not None:
            item = _item(value, inner.results, inner.returned)
            return item if isinstance(item, tuple) else self._item_returned(value, scope)
        made = [op for op in self.flow if op.scope is scope and op.place == value.place and op.inputs == value.inputs]
        return made.index(value) if len(made) > 1 and value.place is not None else None

    def _number_returned(self, op: Op, scope: Scope) -> int | None:
        """The index of ``op`` among the tensors that a call in ``scope`` returns; None if the call returns it alone."""
        results = _among_results(op, scope)
        if results or op.scope is scope:
            return results.index(op) if op in results else None
        text = self.sources.plan(scope).text
        nodes = text.nodes.get(self.sources.span(scope, op), [])
        return 0 if any(is_one_of_several(text, node) for node in nodes) else None

    def _item_returned(self, op: Op, scope: Scope) -> Item | None:
        """What leads to ``op`` in the tuple that a call in ``scope`` returns, or its number; None if that is all."""
        inner = _called(op, scope)
        item = None if inner is None else _item(op, inner.results, inner.returned)
        if isinstance(item, tuple) and all(isinstance(key, int) for key in item):
            return item
        index = self._index_returned(op, scope)
        return self._number_returned(op, scope) if index is None else (index,)

    def _index_returned(self, op: Op, scope: Scope) -> int | None:
        """The index of ``op`` among all values that a helper returns, by the helper's text; None if unclear."""
        inner = _called(op, scope)
        if inner is None or inner.results:
            return None
        try:
            text = self.sources.text(inner)
            nodes = text.nodes.get(self.sources.span(inner, op), [])
        except EditError:
            return None
        return place_returned(text, nodes[0]) if nodes else None

    def _adds_before(self, scope: Scope) -> int:
        first = min((op.index for op in self.flow if scope.holds(op.scope)), default=0)
        return sum(add.op.index < first for add in self.adds)

    def _place_of_start(self, scope: Scope, value: Op, names: list[str]) -> tuple[str, ...] | Span | None:
        """The parameters, or the expression, at which the trunk starts."""
        if names:
            return tuple(names)
        return self.sources.span(scope, value) if value.parameter or scope.holds(value.scope) else None

    def _starts(self, function: FunctionPlan, place: object) -> bool:
        """Note where the trunk starts in a function. If two calls of it differ, the later place counts.

        Returns:
            Whether ``place`` is where the trunk starts.

        Raises:
            EditError: the later place does not continue the value of the earlier one.
        """
        known = function.begins.setdefault(self.name, place)
        self._check_one_start(function)
        if known == place or known is None or place is None:
            return True
        text = function.text
        earlier, later = sorted((known, place), key=lambda p: (0, 0, 0) if isinstance(p[0], str) else (1, p[0], p[2]))
        names = earlier if isinstance(earlier[0], str) else (_variable(text, earlier),)
        if isinstance(later[0], str) or not _continues(text, later, {name for name in names if name}):
            raise _two_starts(text, None if isinstance(later[0], str) else later)
        function.begins[self.name] = later
        if later == place:
            for key in [key for key in function.edits if key[:2] == ("open", earlier)]:
                del function.edits[key]
        return later == place or isinstance(earlier[0], str)

    def _check_one_start(self, function: FunctionPlan) -> None:
        """Refuse a trunk that starts in an expression of a function and, in another call, in a function called by it.

        A trunk that starts at a parameter is no problem: the parameter is then left as it is (`write`).
        """
        place = function.begins.get(self.name)
        if self.name in function.begins_inside and place is not None and not isinstance(place[0], str):
            raise _two_starts(function.text)

    def _through(self, scope: Scope, child: Scope) -> None:
        function, call = self.sources.plan(scope), self.sources.call(child)
        callee = self.sources.callee(child, call)
        after = max((n for n, add in enumerate(self.adds) if child.holds(add.op.scope)), default=-1) + 1
        at, last = span_of(call), self._returned(self.adds[after - 1], scope, [call])
        behind = self.adds[after - 1].post if after else []
        post = bool(behind) and not child.holds(behind[-1].scope)
        norm = None if last or post else self._norm(scope, after, None)
        trunk = function.trunks.index(self.name)
        earlier = [op for op in child.results if self.carriers.stage.get(op, after) < after]
        kept = frozenset((trunk, _place(op, child.results, child.returned)) for op in earlier)
        again = after > 0 and (child.path, child.code) in self.carriers.again.get(scope, ())
        before = next((n for n, add in enumerate(self.adds) if scope.holds(add.op.scope)), after)
        passed = after - before if after else None
        through = Through(at, callee, norm, last, post, kept, again=again, adds=after > 0, passed=passed)
        function.put(("through", at), through)
        function.passed.setdefault(at, set()).add(trunk)
        if child.call is not None and child.call[0] in scope.again:  # it may also be called without checkpoint
            for other in calls_around(function.text, self.sources.call(child, itself=True)):
                last = self._returned(self.adds[after - 1], scope, [other])
                function.put(("through", span_of(other)), Through(span_of(other), None, norm, last, post, kept))

    def _given(self) -> None:
        """Note the calls in entered functions that read this trunk's state but carry at most another trunk's stream."""
        carriers = self.carriers
        values = {op for op, stage in carriers.stage.items() if stage < len(self.adds)}
        readers = {user.scope for op in values for user in self.flow.users[op]}
        for call in {call for reader in readers for call in reader.chain() if call not in carriers.scopes}:
            above, given = call.parent, [op for ops in call.arguments.values() for op in ops]
            if above in carriers.entered and call.call is not None and not values.isdisjoint(given):
                function = self.sources.plan(above)
                function.given.setdefault(place_of(*call.call), set()).add(function.trunks.index(self.name))

    def _add(self, number: int, add: Add) -> None:
        function = self.sources.plan(add.op.scope)
        at = self.sources.span(add.op.scope, add.op)
        check_add(self.found, add)
        parts, shortcut = [], add.shortcut
        for op in add.inner:
            if op.place != add.op.place:
                parts.append(Sum(self.sources.span(add.op.scope, op), op.inputs[0] is shortcut, more=True))
            shortcut = op
        inner = _operands(function.text, at, add.first, parts)
        for part in parts[: len(parts) - len(inner)]:
            function.put(("sum", part.at), part)
        nodes = [] if add.op.place is None else self.sources.text(add.op.scope).at(*add.op.place)
        last = self._returned(add, add.op.scope, nodes)
        norm = None if add.post or last else self._norm(add.op.scope, number + 1, None)
        site = number - next(n for n, other in enumerate(self.adds) if add.op.scope.holds(other.op.scope))
        branches, trunks = len(add.branches) if len(parts) < len(add.inner) else 1, (function.trunks.index(self.name),)
        added = Sum(at, add.first, inner, False, last, norm, site, branches, add.part is not None, trunks)
        function.put(("sum", at), added)
        self._states_after(number, add)

    def _states_after(self, number: int, add: Add) -> None:
        """Plan the operations after an add, up to the one that makes the next state."""
        made: dict[tuple[Scope, Span], Op] = {}  # for each expression, its last operation
        for op in add.post:
            scope = self.carriers.innermost(op)
            if scope is None:
                raise EditError(
                    "the operation that makes the next state is outside the functions that the residual stream passes"
                )
            if op.name == "setitem" and op.place == add.op.place is not None and scope is add.op.scope:
                text = self.sources.text(scope)
                raise EditError(
                    f"the add at {text.where(text.at(*add.op.place)[0])} writes into a view of the state of the block "
                    "before it: make a new tensor there, as `x = x.index_add(..)` does"
                )
            made[scope, self.sources.span(scope, op)] = op
        views = {op for (scope, _), op in made.items() if is_view(op) and op.scope is scope}  # apply to all states
        state = max((op for op in made.values() if op not in views), key=lambda op: op.index, default=None)
        for (scope, at), op in made.items():
            function = self.sources.plan(scope)
            trunk, item = function.trunks.index(self.name), self._item_returned(op, scope)
            around = [o for (where, span), o in made.items() if where is scope and span != at and within(at, span)]
            unseen = item is None and bool(_among_results(op, scope))  # the call keeps the value to itself
            unseen = unseen or (op.scope is scope and is_one_of_several(function.text, function.text.nodes[at][0]))
            if op in views:
                function.put(("view", at), View(at, False))
                continue
            times = function.posts.setdefault(trunk, set())
            times.add((id(self.flow), add.op.index, add.post[-1].index))
            if op is state:
                self._check_made_once(op, add, scope, at)
                norm = self._norm(scope, number + 1, None) if op is add.post[-1] else None
                function.put(("push", at), Push(at, trunk, norm, item))
            elif same_size(op, add.op) and views.issuperset(around) and not unseen and _replaces(op, add):
                function.put(("push", at), Push(at, trunk, item=item, more=True))
            if op.scope is not scope:
                self.made_by_calls.add((number, scope, at))

    def _check_made_once(self, state: Op, add: Add, scope: Scope, at: Span) -> None:
        """Refuse a state that a loop makes in one of several passes: the source does not say in which.

        The other passes may make values that are no states of this stream: skips of a U-net, added in the same loop.
        """
        place = (scope, state.place)
        between = [op for op in self.flow.ops[add.op.index + 1 : state.index] if op.place is not None]
        elsewhere = max((op.index for op in between if (op.scope, op.place) != place), default=0)
        alike = [op for op in add.post if (op.scope, op.place) == place and op.name == state.name]
        others = [op for op in between if (op.scope, op.place) == place and op.index < elsewhere and op not in add.post]
        runs = len({id(op.call) for op in (*alike, *others) if op.call is not None})
        if runs > 1:
            text = self.sources.text(scope)
            remedy = (
                ", for other streams, too: make what the loop runs a module or a method"
                if others
                else ". If the loop around it adds branches to a state that it scales, only sums without a factor on "
                "the state are residual adds; else put the loop into a method of its own"
            )
            raise EditError(
                f"the expression at {text.where(text.nodes[at][0])} makes the next state, and runs {runs} times "
                f"between two residual adds{remedy}"
            )

    def _returned(self, add: Add, scope: Scope, nodes: Sequence[ast.AST]) -> bool:
        """Whether a function only returns the value of an add, which ``nodes`` make."""
        if add.post or any(scope.holds(user.scope) for user in self.flow.users[add.op]):
            return False
        return only_returned(self.sources.text(scope), nodes)

    def _passages(self) -> None:
        for number, (add, passage) in enumerate(zip(self.adds, self.chain.passages, strict=True)):
            casts, passage = casts_of(add), passage if number else []
            for op in (*passage[self._of_calls(number - 1, passage) :], *casts):
                scope = self.carriers.innermost(op)
                if scope is None:
                    raise EditError("the residual stream is reshaped outside the functions that it passes")
                if self._in_hook(op, scope):
                    continue  # hooks get tensors, and their results are used
                at = self.sources.span(scope, op)
                check_drawn(self.carriers, op, scope)
                beside = op in casts and scope is self.carriers.innermost(add.op)  # else another call gets the result
                same = op.name in CASTS and (beside or op.dtype == op.inputs[0].dtype)
                same = same or (add.flattened and op in casts)
                self.sources.plan(scope).put(("view", at), View(at, same, op.name == UNSCALED))

    def _of_calls(self, number: int, views: Sequence[Op]) -> int:
        """The number of leading ``views`` that the call which makes the next state applies to that state alone.

        Raises:
            EditError: the state then has its dimensions in another order.
        """
        add, scopes = self.adds[number], list[Scope]()
        for op in views:
            scope = self.carriers.innermost(op)
            if scope is None or (number, scope, self.sources.span(scope, op)) not in self.made_by_calls:
                break
            scopes.append(scope)
        own = views[: len(scopes)]
        if own and rearranged([*add.post, *own], add.op):
            text = self.sources.text(scopes[-1])
            at = text.where(text.nodes[self.sources.span(scopes[-1], own[-1])][0])
            raise EditError(
                f"the call at {at} makes the next state, and changes its dimensions or their order: earlier states "
                "would have to be changed alike. Do that outside the call"
            )
        return len(own)

    def _in_hook(self, op: Op, scope: Scope) -> bool:
        """Whether an operation runs in a hook of a block that ``scope`` calls, and so at the block's call."""
        called = [inner for inner in op.scope.chain() if inner.parent is scope]
        blocks = [child for child in self.carriers.scopes if child.parent is scope and child not in called]
        return any(inner.helper and inner.call == child.call for inner in called for child in blocks)

    def _casts(self) -> None:
        """Plan casts that returned their argument: in another precision they copy the stream's value."""
        for scope, place, op in self.flow.casts:
            if scope in self.carriers.entered and self.carriers.stage.get(op, len(self.adds)) < len(self.adds):
                nodes = self.sources.text(scope).at(*place)
                if any(isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) for node in nodes):
                    at = place_of(*place)
                    self.sources.plan(scope).edits.setdefault(("view", at), View(at, True))

    def _end(self, entered: Sequence[Scope]) -> None:
        """Let the function that calls the blocks check after them whether the stream has ended."""
        around = [scope for scope in self.carriers.scopes if self.carriers.hold_all(scope)]
        if not around or self.adds[-1].op.scope is around[-1]:
            return
        home = around[-1]
        inside = {place_of(*child.call): child for child in self.carriers.scopes if child.parent is home and child.call}
        calls = [*inside]
        try:
            function = self.sources.plan(home)
        except EditError:
            return
        last = behind(function.text, calls)
        if last is None:
            left_out = [at for at in returned_calls(function.text, calls) if self._may_leave_out(inside[at])]
            self._put_around(function, left_out)
        elif home not in entered or self._may_leave_out(home):  # else all of them run
            function.adds.setdefault(self.name, {})
            trunks = (function.trunks.index(self.name),)
            function.put(("reach", last[0]), Reach(*last, trunks))
            for at, names in ended(function.text, calls, last[1]):
                function.put(("reach before", at), Reach(at, names, trunks, before=True))

    def _put_around(self, function: FunctionPlan, calls: Sequence[Span]) -> None:
        """Let calls check this whose results get no name."""
        for at in calls:
            function.adds.setdefault(self.name, {})
            function.put(("reach", at), Reach(at, (), (function.trunks.index(self.name),), called=True))
            through = function.edits.get(("through", at))
            if isinstance(through, Through):  # it sees values, not streams
                function.edits["through", at] = dataclasses.replace(through, last=False)

    def _may_leave_out(self, scope: Scope) -> bool:
        """Whether a function may leave out some of its adds and blocks, or one that it calls may."""
        inside = [child for child in self.carriers.scopes if child.parent is scope and child.call]
        own = [add.op for add in self.adds if add.op.scope is scope]
        places = [place_of(*at) for at in (*(child.call for child in inside), *(op.place for op in own)) if at]
        try:
            text = self.sources.text(scope)
        except EditError:
            return True
        return is_conditional(text, places) or any(map(self._may_leave_out, inside))

    def _norm(self, scope: Scope, stage: int, value: Op | None) -> Written | None:
        """The norm that is first to read the stream's value in ``scope``, if a kernel may compute it with the read."""
        if stage >= len(self.adds) or stage in self.separate or (stage and self.chain.passages[stage]):
            return None  # the first reader is a view or a cast
        values = [value or self.adds[stage].state]
        readers = sorted((user for op in values for user in self.flow.users[op]), key=lambda op: op.index)
        for reader in readers:
            child = reader.scope
            if reader in self.carriers.on_way or not scope.holds(child):
                continue
            while child.parent is not None and child.parent is not scope:
                child = child.parent
            if child.parent is not scope or child.helper or child.module is None or child.call is None:
                continue
            function = self.sources.plan(scope)
            if scope.path and not child.path.startswith(f"{scope.path}."):
                return None  # the module was passed as an argument
            path = child.path.removeprefix(scope.path).lstrip(".")
            if path not in function.norms:
                looks = [op for ops in child.arguments.values() for op in ops] == values
                function.norms[path] = mark(child.module) if looks else "it reads more than the stream"
            call = self.sources.call(child)
            written = _chain(call.func, function.text)
            if function.norms[path] is None and written and len(call.args) == 1 and not call.keywords:
                at = span_of(call)
                function.put(("apply", at), Apply(at, norm=True))
                return written
            return None
        return None


def _replaces(op: Op, add: Add) -> bool:
    """Whether the later operations after the add read ``op``, and no earlier value of its size.

    Otherwise it could not be the next state: ``y = w * x`` in ``x = x + y``.
    """
    before = {o for o in (add.op, *add.post) if o.index < op.index and same_size(o, add.op)}
    return all(before.isdisjoint(other.inputs) for other in add.post if other.index > op.index)


def _operands(text: Text, at: Span, first: bool, parts: Sequence[Sum]) -> tuple[tuple[Span, bool], ...]:
    """The last sums before an addition, as far as they are written as its operands: ``(x + f) + g``."""
    inner: list[tuple[Span, bool]] = []
    for part in reversed(parts):
        shortcut, _ = addition_at(text, at).operands(first)
        if span_of(shortcut) != part.at:
            break
        inner.insert(0, (part.at, part.first))
        at, first = part.at, part.first
    return tuple(inner)


def _continues(text: Text, at: Span, names: set[str]) -> bool:
    """Whether an expression makes a new value of a variable among ``names``, or of another name for one.

    If that gets a name of its own, every call has to make it.
    """
    for node in ast.walk(text.tree):  # in the order of the statements of one list
        if isinstance(node, ast.Assign):
            ways = (node.value.body, node.value.orelse) if isinstance(node.value, ast.IfExp) else (node.value,)
            if any(isinstance(way, ast.Name) and way.id in names for way in ways):
                names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    nodes = text.nodes.get(at, [])[:1]
    read = {inner.id for node in nodes for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    return _variable(text, at) in names or not (read.isdisjoint(names) or is_conditional(text, [at], loops=False))


def _two_starts(text: Text, at: Span | None = None) -> EditError:
    where = text.where(text.nodes[at][0]) if at in text.nodes else text.where()
    return EditError(
        f"the residual stream starts in different places, in evaluation and in training mode or in two calls, one of "
        f"which is {where}: make the state that the trunk starts with in one expression, or keep it in one variable"
    )


def _variable(text: Text, at: Span) -> str | None:
    """The variable to which an expression is assigned."""
    nodes = text.nodes.get(at, [])
    return assigned(text, nodes[0]) if nodes else None


def _place(value: Op, tensors: Sequence[Op], places: Sequence[tuple[Any, ...]]) -> Item:
    """What leads to one of the tensors in an argument or a result, or its number among them if that cannot be written.

    The number is second best: others may be None, or missing, in another call.
    """
    number = tensors.index(value)
    written = len(places) == len(tensors) and all(isinstance(key, (int, str)) for key in places[number])
    return places[number] if written else number


def _item(value: Op, tensors: Sequence[Op], places: Sequence[tuple[object, ...]]) -> Item | None:
    """The `_place` of a value; None if it is not there, or all that is there."""
    place = _place(value, tensors, places) if value in tensors else None
    return None if place == () or (place == 0 and len(tensors) == 1) else place


def _called(op: Op, scope: Scope) -> Scope | None:
    """The call in ``scope`` inside of which ``op`` runs; None if it runs in ``scope`` itself, or elsewhere."""
    return next((inner for inner in op.scope.outward() if inner.parent is scope), None)


def _among_results(op: Op, scope: Scope) -> list[Op]:
    """The operations that make what the call around ``op`` in ``scope`` returns, if it returns several tensors."""
    inner = _called(op, scope)
    return inner.results if inner is not None and len(inner.results) > 1 else []


def _chain(node: ast.expr, text: Text) -> Written | None:
    """``self.a.b`` or ``self.a[0]`` as it is written; None for any other expression."""
    inner = node
    while isinstance(inner, ast.Attribute) or (
        isinstance(inner, ast.Subscript) and isinstance(inner.slice, ast.Constant)
    ):
        inner = inner.value
    if not isinstance(inner, ast.Name) or inner.id != text.receiver or inner is node:
        return None
    start, end = text.span(node)
    return text.text[start:end] if "\n" not in text.text[start:end] else None
