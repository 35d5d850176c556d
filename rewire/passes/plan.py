"""Pass: which expressions of which functions change, so that the residual adds of a trunk go through a stream.

A function is *opened* if its own code adds to the stream, or reads it: its variables hold tensors, and a `Depth` holds
the stream. A function that only hands the stream on, to the blocks that it calls, stays as it is.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping, Sequence
from types import CodeType, FunctionType, MappingProxyType
from typing import Any

from torch import nn

from rewire.errors import EditError, UnsupportedTopology
from rewire.kernels.norms import mark
from rewire.passes.adds import CASTS, VIEWS, Add, between
from rewire.passes.edits import (
    Carry,
    Each,
    Ended,
    FunctionPlan,
    Key,
    Normed,
    Parameter,
    Part,
    Plans,
    Projected,
    Push,
    Reshape,
    Separate,
    Sum,
    Through,
    Value,
    Written,
)
from rewire.passes.find import Found
from rewire.passes.flow import Op, Place, Scope, common
from rewire.passes.functions import Decorated, forward_of, function_with, undecorated
from rewire.passes.projections import Projections
from rewire.passes.streams import same_size
from rewire.passes.text import Place as Span
from rewire.passes.text import Text, is_call_of_one, place_of, span_of, text_of, within
from rewire.passes.variables import assigned, behind, hands_on, only_returned


def plan(
    found: Found,
    name: str,
    plans: Plans,
    definitions: Mapping[type[nn.Module], FunctionType] = MappingProxyType({}),
    separate: Mapping[int, Projections] = MappingProxyType({}),
    opened: Collection[Key] = (),
    separate_norms: bool = False,
) -> set[Key]:
    """Add what changes for one trunk of one flow to ``plans``.

    Args:
        found: what was found in the flow.
        name: of the trunk.
        plans: by path of a module and code of a function.
        definitions: functions that take the place of the forwards of modules of these classes.
        separate: for residual adds whose attention has separate q/k/v inputs: where it projects them.
        opened: functions that hold tensors where streams run, because of other trunks.
        separate_norms: whether the norms before such attentions get copies for keys and values.

    Returns:
        Functions that only hand this trunk's stream on.

    Raises:
        EditError: a function that would have to change cannot be edited.
        UnsupportedTopology: q, k and v of an attention cannot be taken apart.
    """
    return _Planner(found, name, plans, definitions, separate, opened, separate_norms).run()


class _Planner:
    def __init__(
        self,
        found: Found,
        name: str,
        plans: Plans,
        definitions: Mapping[type[nn.Module], FunctionType],
        separate: Mapping[int, Projections],
        opened: Collection[Key],
        separate_norms: bool,
    ) -> None:
        self.found, self.others, self.separate_norms = found, opened, separate_norms
        self.flow, self.plans, self.definitions, self.separate = found.flow, plans, definitions, separate
        self.name, self.chain = name, found.chains[name]
        self.adds = self.chain.adds
        self.stage: dict[Op, int] = {}  # for values of the stream, the number of adds before
        self.on_way: set[Op] = set()  # operations of the stream's own way
        self.unfinished: set[Op] = set()  # those of which the next state is yet to be made
        self._values()
        self.begin = self._beginning()
        self.carriers = dict.fromkeys(self._carriers())  # in order, and quickly looked up

    def run(self) -> set[Key]:
        opened = self._opened()
        handed = {(scope.path, scope.code) for scope in self.carriers if scope not in opened and scope.code is not None}
        # a function that only hands a stream on would not notice that it lost it: then none may run without one
        outside = set() if handed else _outside(self.found)
        for scope in opened:
            known = self._function(scope).outside
            known[self.name] = known.get(self.name, True) and (scope.path, scope.code) in outside
        for scope in opened:
            self._entry(scope)
            for child in self.carriers:
                if child.parent is scope:
                    self._through(scope, child)
        for number, add in enumerate(self.adds):
            self._add(number, add)
        self._passages()
        self._end(opened)
        for number, projections in self.separate.items():
            self._attention(number, projections)
        return handed

    # -- what the stream is --------------------------------------------------------------------------------------------

    def _values(self) -> None:
        for number, (add, passage) in enumerate(zip(self.adds, self.chain.passages, strict=True)):
            casts = _casts(add)
            for op in (add.state, *casts, *passage):
                self.stage[op] = number
            self.on_way.update(casts, passage if number else ())
            self.stage[add.op] = self.stage[add.result] = number + 1
            self.on_way.update((add.op, *add.inner, *add.post))
            self.unfinished.update((add.op, *add.post[:-1]) if add.post else ())
            self.stage.update(dict.fromkeys(add.post, number + 1))

    def _beginning(self) -> Scope:
        """The innermost call that holds the first add and all that its branches read the stream with."""
        first = self.adds[0]
        scopes = first.op.scope.chain()
        for op in (first.state, *_casts(first)):
            for user in self.flow.users[op]:
                if user in first.region or user in self.on_way:
                    scopes = common(scopes, user.scope.chain())
        return scopes[-1]

    def _carriers(self) -> list[Scope]:
        """Calls that the stream runs through, outermost first: within the innermost one that holds it whole."""
        home = self.begin.chain()
        for add in self.adds:
            home = common(home, add.op.scope.chain())
        found: dict[Scope, None] = {}
        for scope in (self.begin, *(add.op.scope for add in self.adds)):
            found.update(dict.fromkeys(scope.chain()[len(home) - 1 :]))
        return list(found)

    def _carrier(self, op: Op) -> Scope | None:
        """The innermost carrier in which ``op`` runs."""
        scope: Scope | None = op.scope
        while scope is not None and scope not in self.carriers:
            scope = scope.parent
        return scope

    def _opened(self) -> list[Scope]:
        """The carriers whose own code adds to the stream or reads it."""
        opened = {self.begin, *(add.op.scope for add in self.adds)}
        for op, stage in self.stage.items():
            for user in self.flow.users[op]:
                if stage == len(self.adds) and user not in self.on_way:
                    continue  # the trunk has ended
                scope = self._carrier(user) or next(iter(self.carriers))
                if stage or self.begin.holds(scope):
                    opened.add(scope)
        for scope in self.carriers:
            if (scope.path, scope.code) in self.others or (scope not in opened and not self._hands_on(scope)):
                opened.add(scope)
        for scope in reversed(self.carriers):
            if scope in opened and scope.helper and scope.parent in self.carriers and not self._decorated(scope)[2]:
                opened.add(scope.parent)  # which has to call another function
        functions = {(scope.path, scope.code) for scope in opened}  # one text for all calls of a function
        opened.update(scope for scope in self.carriers if (scope.path, scope.code) in functions)
        for scope in reversed(self.begin.chain()[:-1]):
            if scope in opened and self._brought(scope, self.chain.entry, 0) and not self._holds_all(scope):
                self.begin = scope
        return [scope for scope in self.carriers if scope in opened]

    def _holds_all(self, scope: Scope) -> bool:
        return all(scope.holds(add.op.scope) for add in self.adds)

    def _hands_on(self, scope: Scope) -> bool:
        """Whether a function does nothing with the stream but hand it from block to block."""
        if scope.module is None or type(scope.module).__module__.startswith("torch.nn.modules.container"):
            return True
        try:
            text = self._text(scope)
        except EditError:
            return True  # what reads the stream there gets its value, or an error
        children = [child for child in self.carriers if child.parent is scope and child.call is not None]
        calls = [self._call(child) for child in children]
        given = {name for child, call in zip(children, calls, strict=True) for name in self._variables(child, call)}
        return hands_on(text, calls, given)

    def _variables(self, child: Scope, call: ast.Call) -> set[str]:
        """The variables that are handed to a call and hold the stream."""
        given = self._given(child, call)
        arguments: list[tuple[Any, ast.expr]] = [*enumerate(call.args), *((k.arg, k.value) for k in call.keywords)]
        return {node.id for key, node in arguments if key in given and isinstance(node, ast.Name)}

    # -- functions -----------------------------------------------------------------------------------------------------

    def _text(self, scope: Scope) -> Text:
        return text_of(self._decorated(scope)[1].function)  # type: ignore[arg-type]

    def _decorated(self, scope: Scope) -> tuple[str, Decorated, bool]:
        """Name, function, and whether it is a method of the scope's module."""
        module, code = scope.module, scope.code
        if module is None or code is None:
            raise EditError(f"the forward of '{scope.path}' is not a Python function")
        if not scope.helper:
            if type(module) in self.definitions:
                return "forward", Decorated(self.definitions[type(module)]), True
            if "forward" in vars(module):
                raise EditError(f"the forward of '{scope.path}' was replaced on this one module")
            return "forward", forward_of(module), True
        method = undecorated(getattr(type(module), code.co_name, None))
        if method.code is code:
            return code.co_name, method, True
        assert scope.parent is not None
        return code.co_name, Decorated(function_with(code, scope.namespace)), False

    def _by_name(self, scope: Scope, call: ast.Call) -> bool:
        """Whether a function is called by its name, which always stands for it."""
        if scope.code is None or scope.parent is None or scope.code.co_freevars:
            return False
        caller = self._decorated(scope.parent)[1].function
        known = caller is not None and isinstance(call.func, ast.Name) and caller.__globals__.get(call.func.id)
        return isinstance(known, FunctionType) and known.__code__ is scope.code

    def _call(self, scope: Scope) -> ast.Call:
        """The expression that made a call."""
        parent = scope.parent
        if parent is None or scope.call is None:
            raise EditError(f"it is not known where '{scope.path}' is called")
        text = self._text(parent)
        calls = [node for node in text.at(*scope.call) if isinstance(node, ast.Call)]
        if not calls:
            raise EditError(f"no call is written where '{scope.path}' is called ({text.where()})")
        return calls[0]

    def _function(self, scope: Scope) -> FunctionPlan:
        key = scope.path, scope.code
        if key not in self.plans:
            name, decorated, method = self._decorated(scope)
            assert decorated.function is not None
            self.plans[key] = FunctionPlan(  # type: ignore[index]
                scope.path, name, decorated, text_of(decorated.function), method, type(scope.module) in self.definitions
            )
        return self.plans[key]  # type: ignore[index]

    # -- edits ---------------------------------------------------------------------------------------------------------

    def _entry(self, scope: Scope) -> None:
        """How the stream gets into an opened function, and how many adds it makes."""
        function = self._function(scope)
        inside = [number for number, add in enumerate(self.adds) if scope.holds(add.op.scope)]
        start = inside[0] if inside else self._adds_before(scope)
        if scope is not self.begin and scope.holds(self.begin):
            function.adds.setdefault(self.name, {})
            return  # the stream starts in what it calls
        function.adds.setdefault(self.name, {})[start] = len(inside)
        number = function.trunks.index(self.name)
        value = self.chain.entry if scope is self.begin else None
        names = self._brought(scope, value, start)
        if value is not None and not self._starts(function, self._place_of_start(scope, value, names)):
            return  # another place comes after it
        for name in names:
            awaiting = not self.unfinished.isdisjoint(scope.arguments[name])
            norm = None if awaiting else self._norm(scope, start, value)
            brought = scope.arguments[name]
            item = brought.index(value) if value in brought and len(brought) > 1 else None
            function.put(("parameter", name), Parameter(name, number, norm, awaiting=awaiting, item=item))
        if not names:
            if value is None or not scope.holds(value.scope):
                raise EditError(f"the residual stream does not come into {function.text.where()} as an argument")
            at = self._span(scope, value)
            norm = self._norm(scope, start, value)
            function.put(("value", at), Value(at, number, norm, self._number_made(value, scope)))

    def _number_made(self, value: Op, scope: Scope) -> int | None:
        """Which of several tensors that an expression in ``scope`` makes ``value`` is; None if it is the only one."""
        if value.scope is not scope:
            return _number_among_results(value, scope)
        made = [op for op in self.flow if op.scope is scope and op.place == value.place and op.inputs == value.inputs]
        return made.index(value) if len(made) > 1 and value.place is not None else None

    def _adds_before(self, scope: Scope) -> int:
        first = min((op.index for op in self.flow if scope.holds(op.scope)), default=0)
        return sum(add.op.index < first for add in self.adds)

    def _place_of_start(self, scope: Scope, value: Op, names: list[str]) -> tuple[str, ...] | Span | None:
        """The parameters, or the expression, that the trunk starts with."""
        if names:
            return tuple(names)
        return self._span(scope, value) if scope.holds(value.scope) else None

    def _starts(self, function: FunctionPlan, place: Any) -> bool:
        """Note where the trunk starts in a function; of two places, in two calls, the later one counts.

        Returns:
            Whether that is ``place``.

        Raises:
            EditError: the later one does not take up what the earlier one has made.
        """
        known = function.opens.setdefault(self.name, place)
        if known == place or known is None or place is None:
            return True
        text = function.text
        earlier, later = sorted((known, place), key=lambda p: (0, 0, 0) if isinstance(p[0], str) else (1, p[0], p[2]))
        names = earlier if isinstance(earlier[0], str) else (_variable(text, earlier),)
        if isinstance(later[0], str) or _variable(text, later) not in names:
            raise EditError(
                f"the residual stream starts in different places of {text.where()}, in evaluation and in training "
                "mode or in two calls"
            )
        function.opens[self.name] = later
        if later == place:
            function.edits.pop(("value", earlier), None)
        return later == place or isinstance(earlier[0], str)

    def _brought(self, scope: Scope, value: Op | None, start: int) -> list[str]:
        """The parameters that are the stream's value when the function is called."""
        wanted = {value} if value is not None else {op for op, stage in self.stage.items() if stage == start}
        return [name for name, ops in scope.arguments.items() if name and not wanted.isdisjoint(ops)]

    def _through(self, scope: Scope, child: Scope) -> None:
        function, call = self._function(scope), self._call(child)
        _, _, method = self._decorated(child)
        key = child.path, child.code
        callee = None
        if key in self.plans and not method:
            callee = function.helper(self.plans[key].gate)
            if not self._by_name(child, call):
                callee += f".of({function.text.text[slice(*function.text.span(call.func))]})"
        after = max((n for n, add in enumerate(self.adds) if child.holds(add.op.scope)), default=-1) + 1
        at, last = span_of(call), self._returned(self.adds[after - 1], scope, [call])
        post = self.adds[after - 1].post if after else []
        awaiting = bool(post) and not child.holds(post[-1].scope)
        norm = None if last or awaiting else self._norm(scope, after, None)
        trunk = function.trunks.index(self.name)
        kept = frozenset((trunk, n) for n, op in enumerate(child.results) if self.stage.get(op, after) < after)
        function.put(("through", at), Through(at, self._given(child, call), callee, norm, last, awaiting, kept))

    def _given(self, child: Scope, call: ast.Call) -> frozenset[int | str | None]:
        """The arguments of a call that hold the stream."""
        return self._arguments_of(
            child, call, {name for name, ops in child.arguments.items() if not self.stage.keys().isdisjoint(ops)}
        )

    def _arguments_of(self, child: Scope, call: ast.Call, names: set[str]) -> frozenset[int | str | None]:
        """Positions and keywords of a call that become these parameters."""
        code = child.code
        written = {k.arg for k in call.keywords}
        given: set[int | str | None] = set(names & written)
        found = set(given)
        if code is not None:
            bound = not child.helper or isinstance(call.func, ast.Attribute)
            positional = code.co_varnames[bound : code.co_argcount]
            for number, argument in enumerate(call.args):
                name = positional[number] if number < len(positional) else ""
                if isinstance(argument, ast.Starred) or not name or name in names:
                    given.add(number)
                    found.add(name)
        if None in written and names - found:  # the others are in a dictionary: **arguments
            given.add(None)
        return frozenset(given or {*range(len(call.args)), *written})

    def _add(self, number: int, add: Add) -> None:
        function = self._function(add.op.scope)
        inner = []
        shortcut = add.shortcut
        at = self._span(add.op.scope, add.op)
        for op in add.inner:
            part = Part(self._span(add.op.scope, op), op.inputs[0] is shortcut)
            if within(part.at, at):
                inner.append((part.at, part.first))
            else:
                function.put(("sum", part.at), part)
            shortcut = op
        nodes = [] if add.op.place is None else self._text(add.op.scope).at(*add.op.place)
        last = self._returned(add, add.op.scope, nodes)
        norm = None if add.post or last else self._norm(add.op.scope, number + 1, None)
        function.put(("sum", at), Sum(at, add.op.inputs[0] is shortcut, tuple(inner), last, norm))
        self._states_after(number, add)

    def _states_after(self, number: int, add: Add) -> None:
        """The operations behind an add, up to the one that makes the next state."""
        made: dict[tuple[Scope, Span], Op] = {}  # by the expression, the last of what it does
        for op in add.post:
            scope = self._carrier(op)
            if scope is None:
                raise EditError("what makes the next state stands outside the functions that the stream runs through")
            made[scope, self._span(scope, op)] = op
        for (scope, at), op in made.items():
            function = self._function(scope)
            trunk, item = function.trunks.index(self.name), _number_among_results(op, scope)
            inside = any(other is scope and within(at, span) for other, span in made if span != at)
            unseen = item is None and bool(_among_results(op, scope))  # by the function: the call keeps it to itself
            if op.name in VIEWS and op.scope is scope:
                function.put(("reshape", at), Reshape(at, False))
            elif op is add.post[-1]:
                function.put(("push", at), Push(at, trunk, self._norm(scope, number + 1, None), item))
            elif same_size(op, add.op) and not inside and not unseen:
                function.put(("push", at), Carry(at, trunk, item))

    def _returned(self, add: Add, scope: Scope, nodes: Sequence[ast.AST]) -> bool:
        """Whether a function does nothing with the value of an add, that of these expressions, but return it."""
        if add.post or any(scope.holds(user.scope) for user in self.flow.users[add.op]):
            return False
        return only_returned(self._text(scope), nodes)

    def _passages(self) -> None:
        for number, (add, passage) in enumerate(zip(self.adds, self.chain.passages, strict=True)):
            casts = _casts(add)
            for op in (*(passage if number else ()), *casts):
                scope = self._carrier(op)
                if scope is None:
                    raise EditError("the residual stream is reshaped outside the functions that it runs through")
                at = self._span(scope, op)
                same = op.name in CASTS and (op in casts or op.dtype == op.inputs[0].dtype)
                self._function(scope).put(("reshape", at), Reshape(at, same))

    def _end(self, opened: Sequence[Scope]) -> None:
        """Where the function that calls the blocks only hands the stream on: look behind them whether it has ended."""
        home = next(iter(self.carriers))
        if home in opened or not self._holds_all(home):
            return
        calls = [place_of(*child.call) for child in self.carriers if child.parent is home and child.call is not None]
        try:
            function = self._function(home)
        except EditError:
            return
        last = behind(function.text, calls)
        if last is not None:
            function.adds.setdefault(self.name, {})
            function.put(("ended", last[0]), Ended(*last, (function.trunks.index(self.name),)))

    def _norm(self, scope: Scope, stage: int, value: Op | None) -> Written | None:
        """The norm that reads the stream's value first in ``scope``, if a kernel may compute both together."""
        if stage >= len(self.adds) or stage in self.separate or (stage and self.chain.passages[stage]):
            return None  # what is read first passes a view or a cast
        values = [value or self.adds[stage].state]
        readers = sorted((user for op in values for user in self.flow.users[op]), key=lambda op: op.index)
        for reader in readers:
            child = reader.scope
            if reader in self.on_way or not scope.holds(child):
                continue
            while child.parent is not None and child.parent is not scope:
                child = child.parent
            if child.parent is not scope or child.helper or child.module is None or child.call is None:
                continue
            function = self._function(scope)
            path = child.path.removeprefix(scope.path).lstrip(".")
            if path not in function.norms:
                looks = [op for ops in child.arguments.values() for op in ops] == values
                function.norms[path] = mark(child.module) if looks else "it reads more than the stream"
            call = self._call(child)
            written = _chain(call.func, function.text)
            if function.norms[path] is None and written and len(call.args) == 1 and not call.keywords:
                at = span_of(call)
                function.put(("normed", at), Normed(at))
                return written
            return None
        return None

    # -- queries, keys and values --------------------------------------------------------------------------------------

    def _attention(self, number: int, projections: Projections) -> None:
        """Let each projection of an attention have its own read."""
        add = self.adds[number]
        try:
            calls = self._projection_calls(add, projections)
            ways = {op for _, entries in calls for op in entries}
            way: set[Op] = set().union(*(between(add.state, op) for op in ways))
            if any(op.weighted for op in way - {add.state}):
                raise EditError("what it projects passes other weights first")
            reads = self._reader(add, way)
            for scope, _ in calls:
                self._hand_down(reads, scope, {add.state, *way}, self.found.trunks[self.name].sites[number].width)
                self._project(scope, projections)
            functions = {scope for call, _ in calls for scope in call.chain()[:-1] if reads.holds(scope)}
            copied = 0
            for op in sorted(way - {add.state}, key=lambda op: op.index):
                scope = next(scope for scope in reversed(op.scope.chain()) if scope in functions)
                function, at = self._function(scope), self._span(scope, op)
                function.edits.pop(("normed", at), None)
                function.put(("each", at), Each(at))
                if self.separate_norms:
                    copied += self._copy(function, scope, op)
        except EditError as error:
            raise projections.error(str(error)) from error
        if self.separate_norms and not copied:
            raise UnsupportedTopology(
                f"the attention '{projections.where}' cannot have separate norms for q, k and v: none stands between "
                "the residual stream and its projections. Leave out separate_norms=True."
            )

    def _copy(self, function: FunctionPlan, scope: Scope, op: Op) -> bool:
        """Let keys and values have a copy of the module that ``op`` is part of in ``scope``, if that has weights."""
        inside = [inner for inner in op.scope.chain() if inner.parent is scope]
        if inside and not inside[0].helper:
            path, module = inside[0].path, inside[0].module
        else:
            path, module = ".".join(filter(None, (scope.path, op.name))), op.leaf
        if module is None or not any(True for _ in module.parameters()):
            return False
        if not any(is_call_of_one(node) for node in function.text.nodes.get(self._span(scope, op), [])):
            raise EditError(f"'{path}' is not called as a function of what was read alone, and cannot have copies")
        function.copied.add(path)
        return True

    def _projection_calls(self, add: Add, projections: Projections) -> list[tuple[Scope, list[Op]]]:
        """The calls of projections in a branch, with what they project of the stream's value."""
        found: dict[Scope, list[Op]] = {}
        for op in add.region:
            scope: Scope | None = op.scope
            while scope is not None and (scope.helper or scope.path not in projections.ways):
                scope = scope.parent
            if scope is not None:
                entries = [source for source in op.inputs if not scope.holds(source.scope)]
                found.setdefault(scope, []).extend(o for o in entries if o is add.state or o in add.region)
        missing = [path for path in projections.ways if not any(s.path == path and e for s, e in found.items())]
        if missing:
            raise EditError(f"its block does not call {', '.join(missing)} on what it reads")
        return [(scope, entries) for scope, entries in found.items() if entries]

    def _reader(self, add: Add, way: set[Op]) -> Scope:
        """The function in which the stream is read for an attention."""
        users = [user for user in self.flow.users[add.state] if user in add.region]
        scopes = users[0].scope.chain()
        for user in users[1:]:
            scopes = common(scopes, user.scope.chain())
        while scopes[-1] not in self.carriers:
            scopes.pop()
        return scopes[-1]

    def _hand_down(self, reads: Scope, projection: Scope, values: set[Op], width: int | None) -> None:
        """Hand what was read to the function that calls a projection."""
        scope = projection.parent
        while scope is not None and scope is not reads:
            function = self._function(scope)
            brought = {op for ops in scope.arguments.values() for op in ops} & values
            if not brought or scope.parent is None:
                raise EditError(f"what it reads does not come into {function.text.where()} as an argument")
            last = max(brought, key=lambda op: op.index)  # not the shortcut, which comes along in some
            names = [name for name, ops in scope.arguments.items() if last in ops]
            for name in names:
                function.put(("parameter", name), Parameter(name, qkv=True, width=width))
            above, call = self._function(scope.parent), self._call(scope)
            at = span_of(call)
            above.put(("separate", at), Separate(at, self._arguments_of(scope, call, set(names))))
            scope = scope.parent

    def _project(self, scope: Scope, projections: Projections) -> None:
        assert scope.parent is not None
        function, at = self._function(scope.parent), span_of(self._call(scope))
        if isinstance(scope.module, nn.MultiheadAttention):
            edit = Projected(at, "multihead")
        elif projections.fused is not None:
            edit = Projected(at, "fused", projections.fused.groups, projections.fused.sizes)
        else:
            edit = Projected(at, projections.ways[scope.path])
        function.put(("projected", at), edit)

    # -- where ---------------------------------------------------------------------------------------------------------

    def _span(self, scope: Scope, op: Op) -> Span:
        """The expression of ``scope`` that ``op`` is part of."""
        inner: Scope = op.scope
        place: Place | None = op.place
        while inner is not scope:
            place = inner.call
            if inner.parent is None:
                raise EditError(f"it is not known where {op.name} runs")
            inner = inner.parent
        if place is None:
            raise EditError(f"it is not known where '{op.name}' is written in the forward of '{scope.path}'")
        return place_of(*place)


def _casts(add: Add) -> list[Op]:
    """The casts and views that make an add's shortcut of the state, in order."""
    ops: list[Op] = []
    op = add.shortcut
    while op is not add.state:
        ops.append(op)
        op = op.inputs[0]
    return ops[::-1]


def _variable(text: Text, at: Span) -> str | None:
    """The variable that gets the value of an expression."""
    nodes = text.nodes.get(at, [])
    return assigned(text, nodes[0]) if nodes else None


def _outside(found: Found) -> set[tuple[str, CodeType | None]]:
    """Functions that also run on other values than streams: some call of theirs makes none of the adds."""
    scopes: set[Scope] = set()
    for op in found.flow:
        scope: Scope | None = op.scope
        while scope is not None and scope not in scopes:
            scopes.add(scope)
            scope = scope.parent
    adding = {scope for chain in found.chains.values() for add in chain.adds for scope in add.op.scope.chain()}
    return {(scope.path, scope.code) for scope in scopes - adding}


def _among_results(op: Op, scope: Scope) -> list[Op]:
    """Of an operation in what ``scope`` calls, which returns several tensors: what makes these."""
    inner: Scope | None = op.scope
    while inner is not None and inner is not scope:
        if inner.parent is scope and len(inner.results) > 1:
            return inner.results
        inner = inner.parent
    return []


def _number_among_results(op: Op, scope: Scope) -> int | None:
    """Which of several tensors that a call returns an operation in it makes; None if it makes none, or the only one."""
    results = _among_results(op, scope)
    return results.index(op) if op in results else None


def _chain(node: ast.expr, text: Text) -> Written | None:
    """``self.a.b`` or ``self.a[0]`` as it is written; None for anything else."""
    inner = node
    while isinstance(inner, ast.Attribute) or (
        isinstance(inner, ast.Subscript) and isinstance(inner.slice, ast.Constant)
    ):
        inner = inner.value
    arguments = text.tree.args.args
    if not isinstance(inner, ast.Name) or not arguments or inner.id != arguments[0].arg or inner is node:
        return None
    start, end = text.span(node)
    return text.text[start:end] if "\n" not in text.text[start:end] else None
