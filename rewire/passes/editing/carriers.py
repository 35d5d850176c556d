"""Pass: which calls carry a trunk's stream, and which of their functions are entered.

A function is *entered* if its own code adds to the stream or reads it: its variables then hold tensors, and a `Depth`
holds the stream. A function that only passes the stream on to the blocks that it calls stays as it is.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Collection
from types import CodeType

from rewire.code.text import span_of, within
from rewire.errors import EditError
from rewire.passes.editing.edits import Key
from rewire.passes.editing.sources import Sources
from rewire.passes.editing.told import module_of_call
from rewire.passes.editing.variables import hands_on, loops_around, may_be_left_out
from rewire.passes.find import Finding, not_run
from rewire.passes.finding.adds import Add, between
from rewire.passes.finding.chains import Chain
from rewire.passes.finding.flow import Flow, Op, Scope, around


class Carriers:
    """The calls that carry the stream of one trunk.

    Args:
        found: the search result for the flow.
        name: of the trunk.
        sources: the source text of the calls.
        others: functions that other trunks enter.

    Attributes:
        stage: values of the stream -> number of adds before.
        on_way: operations on the stream itself.
        in_post: operations after an add from which the next state has yet to be made.
        begin: the call in which the stream starts.
        first: the block with which it starts, if that is another call: called alone, it begins a stream, too.
        read_below: calls that get the stream before it is read first, in a function that they call.
        scopes: the calls, outermost first.
        entered: the calls whose functions are entered.
        times: functions -> how often they are called.
        told: methods that are called several times to make adds, and run another module in each call -> how that is
            written, and for each of its paths below the method's module, the number of adds before the call.
        again: calls -> functions that they call several times to make adds, and that do not know which call is which.
        outside: functions of these calls that also run without a stream.
    """

    def __init__(self, found: Finding, name: str, sources: Sources, others: Collection[Key]) -> None:
        self.flow, self.chain, self.sources, self.others = found.flow, found.chains[name], sources, others
        self.trunk = found.trunks[name]
        self.adds = self.chain.adds
        self.stage: dict[Op, int] = {}
        self.on_way: set[Op] = set()
        self.in_post: set[Op] = set()
        self._values()
        self.begin = self.first = self._beginning()
        self.read_below: set[Scope] = set()
        self.scopes = dict.fromkeys(self._carriers())  # in order, with fast lookup
        self.times = collections.Counter((scope.path, scope.code) for scope in self.scopes)
        adding = {(scope.path, scope.code) for add in self.adds for scope in add.op.scope.outward()}
        known = ((key, self._told(key)) for key in adding if self.times[key] > 1)
        self.told = {key: told for key, told in known if told is not None}
        self.again = self._called_again()
        ours = {(scope.path, scope.code) for scope in self.scopes}
        self.outside = _outside(found, name) & ours
        self.entered = self._entered()
        if not all(_is_container(scope) for scope in self.scopes if scope not in self.entered):
            self.outside = set()  # they would not notice a lost stream, so that no function may run without one

    def _values(self) -> None:
        for number, (add, passage) in enumerate(zip(self.adds, self.chain.passages, strict=True)):
            casts = casts_of(add)
            for op in (add.state, *casts, *passage):
                self.stage[op] = number
            self.on_way.update(casts, passage if number else ())
            self.stage[add.op] = self.stage[add.result] = number + 1
            self.on_way.update((add.op, *add.inner, *add.post))
            self.in_post.update((add.op, *add.post[:-1]) if add.post else ())
            self.stage.update(dict.fromkeys(add.post, number + 1))

    def _beginning(self) -> Scope:
        """The innermost call that contains the first add and all reads of its branches from the stream."""
        first = self.adds[0]
        readers = first_readers(self.flow, self.chain, {*first.region, *self.on_way})
        return around(op.scope.chain() for op in (first.op, *readers))[-1]

    def _carriers(self) -> list[Scope]:
        """The calls that the stream runs through, outermost first, from the innermost one that contains all of it."""
        home = around(scope.chain() for scope in (self.begin, *(add.op.scope for add in self.adds)))
        while self._is_function(home[-1]):  # its caller has to call another function
            home.pop()
        found: dict[Scope, None] = {}
        others = (*self._casting(), *self._reading(home[-1]))
        for scope in (self.begin, *others, *(add.op.scope for add in self.adds)):
            found.update(dict.fromkeys(scope.chain()[len(home) - 1 :]) if home[-1].holds(scope) else ())
        return list(found)

    def calls_of(self, add: Add) -> list[Scope]:
        """The calls that make an add, up to that of a function that knows what it is, as it is called only once."""
        keys = ((scope, (scope.path, scope.code)) for scope in add.op.scope.outward())
        unknown = itertools.takewhile(lambda pair: self.times[pair[1]] > 1 and pair[1] not in self.told, keys)
        return [scope for scope, _ in unknown]

    def _called_again(self) -> dict[Scope, set[tuple[str, CodeType | None]]]:
        adding = {scope for add in self.adds for scope in self.calls_of(add)}
        called: dict[Scope, list[tuple[str, CodeType | None]]] = {}
        for scope in self.scopes:
            if scope.parent is not None and scope in adding:
                called.setdefault(scope.parent, []).append((scope.path, scope.code))
        again = {scope: {key for key in keys if keys.count(key) > 1} for scope, keys in called.items()}
        for scope, keys in called.items():  # and those that call themselves
            again[scope].update({(above.path, above.code) for above in scope.outward()}.intersection(keys))
        return {scope: keys for scope, keys in again.items() if keys}

    def _told(self, key: tuple[str, CodeType | None]) -> tuple[str, dict[str, int]] | None:
        scopes = [scope for scope in self.scopes if (scope.path, scope.code) == key]
        if not self._has_text(scopes[0]) or not self.sources.function(scopes[0])[2]:
            return None
        return module_of_call(self.flow, scopes, self.sources.text(scopes[0]), self.adds)

    def _casting(self) -> list[Scope]:
        """Calls without an add that cast or view the stream's value, of functions that do add in other calls.

        The first block of Mamba is such a call: its ``residual`` is None, and is made from its input.
        """
        adding = {scope for add in self.adds for scope in add.op.scope.outward()}
        posts = {scope for add in self.adds for op in add.post for scope in op.scope.outward()}
        code = {scope.code for scope in adding} - {None}
        scopes = [op.scope for op in self.stage if op in self.on_way]
        scopes += [scope for scope, _, op in self.flow.casts if op in self.stage]

        def hands_back(call: Scope) -> bool:  # unlike a norm, or a helper, that only reads it
            return not self.stage.keys().isdisjoint(call.results)

        calls = (call for scope in scopes for call in itertools.takewhile(hands_back, scope.outward()))
        return [call for call in calls if call.code in code and call not in adding and call not in posts]

    def _reading(self, home: Scope) -> list[Scope]:
        """Blocks of other streams that read this one, too, and return it: the edge blocks of a graph network."""
        own = {add.op.scope for add in self.adds}
        adding = {scope for each in own for scope in each.outward()}
        places = {scope.call for scope in adding}
        users = (user for op in self.stage for user in self.flow.users[op] if user not in self.on_way)
        calls = dict.fromkeys(call for user in users for call in user.scope.outward() if home.holds(call))
        given = {call: {op for ops in call.arguments.values() for op in ops if op in self.stage} for call in calls}
        returned = [call for call in calls if call not in adding and not given[call].isdisjoint(call.results)]
        # A function that adds holds tensors, and passes them on, unless the same expression calls blocks.
        return [call for call in returned if (call.parent not in own or call.call in places) and self._has_text(call)]

    def _is_function(self, scope: Scope) -> bool:
        """Whether a call is of a helper that is no method."""
        return scope.helper and scope.parent is not None and not self.sources.function(scope)[2]

    def _entered(self) -> list[Scope]:
        """The carriers whose own code adds to the stream or reads it."""
        while (self.begin.path, self.begin.code) in self.outside:
            above = self.begin.parent
            if above not in self.scopes or not self._has_text(above):
                break
            self.begin = self.first = above  # it runs without a stream elsewhere, and knows which call is which
        entered = {self.begin, *(add.op.scope for add in self.adds)}
        for op, stage in self.stage.items():
            for user in self.flow.users[op]:
                if stage == len(self.adds) and user not in self.on_way:
                    continue  # the trunk has ended
                scope = self.innermost(user) or next(iter(self.scopes))
                if stage or self.begin.holds(scope):
                    entered.add(scope)
        helpers = {scope for scope in self.scopes if self._is_function(scope) and scope not in entered}
        helpers = {scope for scope in helpers if self._hands_on(scope)}  # their callees may begin several trunks
        entered.update(scope for scope in self.scopes if self._is_function(scope))
        home = [scope for scope in self.scopes if self.hold_all(scope)][-1]
        if home is not self.begin and self._may_skip_the_first(home):
            entered.add(home)
            if self.times[self.begin.path, self.begin.code] > 1:
                self.first = home  # of its other calls, each would begin a stream, too
            self.read_below = {scope for scope in self.begin.chain()[:-1] if home.holds(scope)}
            self.begin = home
        if not_run([self.flow], self.trunk):
            entered.add(home)  # blocks that run later will not return the stream, which is noticed there
        if self.trunk.loops and not _is_container(home):
            entered.add(home)  # it notices further passes
        for scope in self.scopes:
            if (scope.path, scope.code) in self.others or (scope not in entered and not self._hands_on(scope)):
                entered.add(scope)
            elif self.outside and not _is_container(scope) and self._has_text(scope):
                entered.add(scope)  # so that it notices a lost stream
        for scope in reversed(self.scopes):
            if scope in entered and scope.parent in self.scopes and self._is_function(scope):
                entered.add(scope.parent)  # it has to call another function
        functions = {(scope.path, scope.code) for scope in entered}  # all calls of a function share one text
        entered.update(scope for scope in self.scopes if (scope.path, scope.code) in functions)
        for scope in reversed(self.begin.chain()[:-1]):
            brings = scope in entered - helpers and self.brought(scope, self.chain.entry, 0)
            if brings and not self.hold_all(scope):
                self.begin = scope
        return [scope for scope in self.scopes if scope in entered]

    def _may_skip_the_first(self, home: Scope) -> bool:
        """Whether a function may skip the block with which the stream begins: then it begins before that block."""
        first = next((scope for scope in self.begin.chain() if scope.parent is home), None)
        entry = self.chain.entry
        if first is None or home.code is None or first.holds(entry.scope):  # the block itself makes the first state
            return False
        if not home.holds(entry.scope) and not self.brought(home, entry, 0):
            return False
        try:
            text, call = self.sources.text(home), self.sources.call(first)
            for loop in loops_around(text, call)[:1]:
                made = entry.place is not None and home.holds(entry.scope)  # else the model was given it
                if made and within(self.sources.span(home, entry), span_of(loop)):
                    return False  # the loop makes the first state, too: the stream would begin in each iteration
            below = [scope for scope in self.begin.chain() if first.holds(scope)]
            return (
                (first.path, first.code) in self.told
                or may_be_left_out(text, call)
                or any(
                    self._loops_over(scope, called) for scope, called in itertools.pairwise(below) if not called.helper
                )
            )
        except EditError:
            return False

    def _loops_over(self, scope: Scope, called: Scope) -> bool:
        """Whether a function calls a module in a loop that may leave out its first iterations."""
        text, call = self.sources.text(scope), self.sources.call(called)
        return bool(loops_around(text, call)) and may_be_left_out(text, call)

    def _hands_on(self, scope: Scope) -> bool:
        """Whether a function only passes the stream on from block to block."""
        if _is_container(scope):
            return True
        try:
            text = self.sources.text(scope)
        except EditError:
            return True  # code that reads the stream there gets its value, or an error
        children = [child for child in self.scopes if child.parent is scope and child.call is not None]
        given = {name for name, ops in scope.arguments.items() if not self.stage.keys().isdisjoint(ops)}
        return hands_on(text, [self.sources.call(child) for child in children], given)

    def _has_text(self, scope: Scope) -> bool:
        try:
            self.sources.text(scope)
        except EditError:
            return False
        return True

    def brought(self, scope: Scope, value: Op | None, start: int) -> list[str]:
        """The parameters that hold the stream's value when the function is called."""
        wanted = {value} if value is not None else {op for op, stage in self.stage.items() if stage == start}
        return [name for name, ops in scope.arguments.items() if name and not wanted.isdisjoint(ops)]

    def hold_all(self, scope: Scope) -> bool:
        return all(scope.holds(add.op.scope) for add in self.adds)

    def innermost(self, op: Op) -> Scope | None:
        """The innermost carrier in which ``op`` runs."""
        return next((scope for scope in op.scope.outward() if scope in self.scopes), None)


def _outside(found: Finding, name: str) -> set[tuple[str, CodeType | None]]:
    """Functions that also run without the trunk's stream: some call of theirs makes none of the adds."""
    adding = {scope for chain in found.passes(name) for add in chain.adds for scope in add.op.scope.chain()}
    return {(scope.path, scope.code) for scope in found.flow.calls if scope not in adding}


def _is_container(scope: Scope) -> bool:
    return scope.module is None or type(scope.module).__module__.startswith("torch.nn.modules.container")


def casts_of(add: Add) -> list[Op]:
    """The casts and views that turn an add's state into its shortcut, in order."""
    ops: list[Op] = []
    op = add.shortcut
    while op is not add.state:
        ops.append(op)
        op = op.inputs[0]
    return ops[::-1]


def first_readers(flow: Flow, chain: Chain, own: Collection[Op]) -> list[Op]:
    """What reads a stream's first state: ``own`` operations, and those that prepare the first branch.

    A block may compute a part of its branch, and hand that and the state to a function that completes and adds it. So
    may the function that calls the blocks, if it computes that part for the first block alone.
    """
    first = chain.adds[0]
    states = (first.state, *casts_of(first))
    region = {op for branch in first.branches for op in between(first.state, branch)}
    blocks = [
        scope
        for scope in first.op.scope.outward()
        if any(state in ops for ops in scope.arguments.values() for state in states)
        and not all(scope.holds(add.op.scope) for add in chain.adds)
    ]
    users = dict.fromkeys(user for state in states for user in flow.users[state])
    known = [user for user in users if user in own]
    others = [user for user in users if user in region and user not in own]
    return known + [op for op in others if any(b.holds(op.scope) for b in blocks) or _only_for(first, op, region, flow)]


def _only_for(add: Add, op: Op, region: Collection[Op], flow: Flow) -> bool:
    """Whether an operation is a part of one add's branch, with weights behind it, and of nothing else."""
    reached, todo = {op}, [op]
    while todo:
        users = set(flow.users[todo.pop()]) - reached - {add.op, *add.inner}
        if not users <= {*region}:
            return False
        reached |= users
        todo += users
    return any(op.weighted and op not in add.region for op in reached)
