"""Pass: which expressions of which functions change, so that the residual adds of a trunk go through a stream.

A function is *opened* if its own code adds to the stream, or reads it: its variables hold tensors, and a `Depth` holds
the stream. A function that only hands the stream on, to the blocks that it calls, stays as it is.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterable, Mapping, Sequence, Set
from types import CodeType, FunctionType, MappingProxyType
from typing import Any, TypeAlias

from torch import nn

from rewire.errors import EditError
from rewire.kernels.norms import mark
from rewire.passes.adds import CASTS, VIEWS, Add, between
from rewire.passes.find import Found, FoundTrunk
from rewire.passes.flow import Flow, Op, Place, Scope, common
from rewire.passes.functions import Decorated, forward_of, undecorated
from rewire.passes.projections import Projections
from rewire.passes.streams import same_size
from rewire.passes.text import Place as Span
from rewire.passes.text import Text, place_of, text_of, within

#: A chain of attributes of ``self``, as it is written: ``self.norm``.
Written: TypeAlias = str


# -- what changes in a function ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter that brings the stream.

    Attributes:
        name: of the parameter.
        trunk: number of the trunk among those of the function.
        norm: what reads it first.
        ways: whether it brings values for queries, keys and values, rather than the stream.
        awaiting: whether the next state is yet to be made of what it brings.
        item: of a tuple of tensors, the number of the one at which the trunk starts.
    """

    name: str
    trunk: int = 0
    norm: Written | None = None
    ways: bool = False
    awaiting: bool = False
    item: int | None = None


@dataclasses.dataclass(frozen=True)
class Value:
    """An expression whose value is where the stream starts."""

    at: Span
    trunk: int = 0
    norm: Written | None = None


@dataclasses.dataclass(frozen=True)
class Sum:
    """A residual add.

    Attributes:
        at: the addition.
        first: whether its first operand is the shortcut.
        inner: an addition inside it that adds a parallel branch, and whether its first operand is the shortcut; ...
        last: whether its value is returned at once.
        norm: what reads the value first.
    """

    at: Span
    first: bool
    inner: tuple[tuple[Span, bool], ...] = ()
    last: bool = False
    norm: Written | None = None


@dataclasses.dataclass(frozen=True)
class Part:
    """A sum to which another statement adds a parallel branch: no residual add by itself.

    Attributes:
        at: the addition.
        first: whether its first operand is the shortcut.
    """

    at: Span
    first: bool


@dataclasses.dataclass(frozen=True)
class Carry:
    """A value on the way from a sum to the state that is made of it: other operations may follow, or not.

    Attributes:
        at: the expression that makes it.
        trunk: number of the trunk among those of the function.
    """

    at: Span
    trunk: int


@dataclasses.dataclass(frozen=True)
class Push:
    """An expression whose value is the state that follows from the last add.

    Attributes:
        at: the expression.
        trunk: number of the trunk among those of the function.
        norm: what reads the state first.
        item: of a call that returns several tensors, the number of the one that is the state.
    """

    at: Span
    trunk: int = 0
    norm: Written | None = None
    item: int | None = None


@dataclasses.dataclass(frozen=True)
class Reshape:
    """A view or a cast of the stream's value."""

    at: Span
    cast: bool


@dataclasses.dataclass(frozen=True)
class Through:
    """A call of a function that the stream goes through.

    Attributes:
        at: the call.
        given: the arguments that hold the stream: their positions, and the names of keywords.
        callee: what is called instead; None: what is written there.
        norm: what reads the stream's value first, afterwards.
        last: whether the function does nothing with what is returned but return it.
        awaiting: whether the next state is yet to be made of what is returned.
    """

    at: Span
    given: frozenset[int | str | None]
    callee: str | None = None
    norm: Written | None = None
    last: bool = False
    awaiting: bool = False


@dataclasses.dataclass(frozen=True)
class Normed:
    """A call of a norm on the stream's value."""

    at: Span


@dataclasses.dataclass(frozen=True)
class Each:
    """A call on the way to an attention's projections, made for each of the three."""

    at: Span


@dataclasses.dataclass(frozen=True)
class Apart:
    """A call of what holds projections: some arguments are the values for all three."""

    at: Span
    given: frozenset[int | str | None]


@dataclasses.dataclass(frozen=True)
class Projected:
    """A call of a projection.

    Attributes:
        at: the call.
        way: ``q``, ``k`` or ``v``; ``fused``, or ``multihead`` for a torch.nn.MultiheadAttention.
        groups, sizes: of a fused one.
    """

    at: Span
    way: str
    groups: int = 0
    sizes: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Ended:
    """A statement behind which the trunk has ended: a stream that is left in these variables has not."""

    at: Span
    names: tuple[str, ...]


Edit: TypeAlias = (
    Carry | Ended | Part | Parameter | Value | Sum | Push | Reshape | Through | Normed | Each | Apart | Projected
)


@dataclasses.dataclass(eq=False)
class FunctionPlan:
    """What changes in one function of one module.

    Attributes:
        path: of the module.
        name: of the method or function; ``forward`` for most.
        decorated: the function.
        text: its source.
        method: whether it is a method of the module's class; else a function that another one calls.
        substituted: whether it takes the place of the class's own method (see `Pattern.forwards`).
        edits: by where they are.
        adds: for each trunk, position of the stream when the function is called -> adds that it makes.
        opens: the trunks that start in it, and where: the names of parameters, or the place of an expression.
        norms: paths, below the module, of norms that are computed with a read, and what stands in the way.
    """

    path: str
    name: str
    decorated: Decorated
    text: Text
    method: bool
    substituted: bool = False
    edits: dict[Any, Edit] = dataclasses.field(default_factory=dict)
    adds: dict[str, dict[int, int]] = dataclasses.field(default_factory=dict)
    opens: dict[str, Any] = dataclasses.field(default_factory=dict)
    norms: dict[str, str | None] = dataclasses.field(default_factory=dict)

    @property
    def trunks(self) -> list[str]:
        return list(self.adds)

    @property
    def opened(self) -> bool:
        """Whether its variables hold tensors where streams run."""
        return any(not isinstance(edit, Ended) for edit in self.edits.values())

    @property
    def gate(self) -> str:
        """Attribute of the module that holds the gate of this function."""
        return "_depth" if self.name == "forward" else f"_depth_{self.name}"

    def put(self, key: Any, edit: Edit) -> None:
        """Add an edit.

        Raises:
            EditError: the same expression would have to be two things.
        """
        known = self.edits.get(key)
        if known is not None and known != edit:
            merged = _merged(known, edit)
            if merged is None:
                raise EditError(
                    f"the expression at {self.text.file}:{key[1][0]} takes part in the residual stream in two ways "
                    f"({type(known).__name__.lower()}: {known}, and {edit})"
                )
            edit = merged
        self.edits[key] = edit


def _merged(a: Any, b: Any) -> Any:
    """One edit that serves for both; None if there is none."""
    if {type(a), type(b)} == {Push, Carry} and a.trunk == b.trunk:  # in one of two calls another function goes on
        return a if isinstance(a, Carry) else b
    if type(a) is not type(b):
        return None
    if isinstance(a, (Through, Apart)):
        given = a.given | b.given
        a, b = dataclasses.replace(a, given=given), dataclasses.replace(b, given=given)
    if isinstance(a, Parameter) and None in (a.item, b.item):  # the trunk starts in one of two calls
        item = a.item if b.item is None else b.item
        a, b = dataclasses.replace(a, item=item), dataclasses.replace(b, item=item)
    loose = {"norm": None, "last": False, "awaiting": True}
    loose = {name: value for name, value in loose.items() if hasattr(a, name)}
    return (
        dataclasses.replace(a, **loose) if dataclasses.replace(a, **loose) == dataclasses.replace(b, **loose) else None
    )


Plans: TypeAlias = dict[tuple[str, CodeType], FunctionPlan]


def plan(
    found: Found,
    trunk: FoundTrunk,
    plans: Plans,
    definitions: Mapping[type[nn.Module], FunctionType] = MappingProxyType({}),
    apart: Mapping[int, Projections] = MappingProxyType({}),
) -> None:
    """Add what changes for one trunk of one flow to ``plans``.

    Args:
        found: what was found in the flow.
        trunk: the trunk.
        plans: by path of a module and code of a function.
        definitions: functions that take the place of the forwards of modules of these classes.
        apart: for residual adds whose attention reads q, k and v apart: where it projects them.

    Raises:
        EditError: a function that would have to change cannot be edited.
        UnsupportedTopology: q, k and v of an attention cannot be taken apart.
    """
    _Planner(found.flow, trunk, plans, definitions, apart).run()


class _Planner:
    def __init__(
        self,
        flow: Flow,
        found: FoundTrunk,
        plans: Plans,
        definitions: Mapping[type[nn.Module], FunctionType],
        apart: Mapping[int, Projections],
    ) -> None:
        self.flow, self.plans, self.definitions, self.apart = flow, plans, definitions, apart
        self.name, self.chain = found.trunk.name, found.chain
        self.adds = found.chain.adds
        self.stage: dict[Op, int] = {}  # for values of the stream, the number of adds before
        self.on_way: set[Op] = set()  # operations of the stream's own way
        self.unfinished: set[Op] = set()  # those of which the next state is yet to be made
        self._values()
        self.begin = self._beginning()
        self.carriers = self._carriers()

    def run(self) -> None:
        opened = self._opened()
        for scope in opened:
            self._function(scope)
        for scope in opened:
            self._entry(scope)
            for child in self.carriers:
                if child.parent is scope:
                    self._through(scope, child)
        for number, add in enumerate(self.adds):
            self._add(number, add)
        self._passages()
        self._end(opened)
        for number, projections in self.apart.items():
            self._attention(number, projections)

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
        while scope is not None and scope not in self._carrier_set:
            scope = scope.parent
        return scope

    @property
    def _carrier_set(self) -> set[Scope]:
        if not hasattr(self, "_known_carriers"):
            self._known_carriers = set(self.carriers)
        return self._known_carriers

    def _opened(self) -> list[Scope]:
        """The carriers whose own code adds to the stream or reads it."""
        opened = {self.begin, *(add.op.scope for add in self.adds)}
        for op, stage in self.stage.items():
            for user in self.flow.users[op]:
                if stage == len(self.adds) and user not in self.on_way:
                    continue  # the trunk has ended
                scope = self._carrier(user) or self.carriers[0]
                if stage or self.begin.holds(scope):
                    opened.add(scope)
        for scope in self.carriers:
            if scope not in opened and not self._hands_on(scope):
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
        call = self._call(scope)
        function: Any = None
        if isinstance(call.func, ast.Name):
            function = self._decorated(scope.parent)[1].function
            function = function and function.__globals__.get(call.func.id)
        if undecorated(function).code is not code:
            raise EditError(
                f"the function {code.co_name} ({code.co_filename}:{code.co_firstlineno}), which adds to the residual "
                f"stream of '{scope.path}', is not called by its name there"
            )
        return code.co_name, undecorated(function), False

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
        first = min((op.index for op in self.flow if scope.holds(op.scope)), default=0)
        start = inside[0] if inside else sum(add.op.index < first for add in self.adds)
        if scope is not self.begin and scope.holds(self.begin):
            function.adds.setdefault(self.name, {})
            return  # the stream starts in what it calls
        function.adds.setdefault(self.name, {})[start] = len(inside)
        number = function.trunks.index(self.name)
        value = self.chain.entry if scope is self.begin else None
        names = self._brought(scope, value, start)
        if value is not None:
            place = names or (self._span(scope, value) if scope.holds(value.scope) else None)
            if function.opens.setdefault(self.name, place) != place:
                raise EditError(
                    f"the residual stream starts in different places of {function.text.where()}, in evaluation and in "
                    "training mode or in two calls"
                )
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
            function.put(("value", at), Value(at, number, self._norm(scope, start, value)))

    def _brought(self, scope: Scope, value: Op | None, start: int) -> list[str]:
        """The parameters that are the stream's value when the function is called."""
        wanted = {value} if value is not None else {op for op, stage in self.stage.items() if stage == start}
        return [name for name, ops in scope.arguments.items() if name and not wanted.isdisjoint(ops)]

    def _through(self, scope: Scope, child: Scope) -> None:
        function, call = self._function(scope), self._call(child)
        name, _, method = self._decorated(child)
        key = child.path, child.code
        callee = None
        if key in self.plans and not method:
            first = function.text.tree.args.args[:1]
            if not function.method or not first:
                raise EditError(f"{name}, which adds to the residual stream, is called by another such function")
            callee = f"{first[0].arg}.{self.plans[key].gate}"
        after = max((n for n, add in enumerate(self.adds) if child.holds(add.op.scope)), default=-1) + 1
        at, last = _span(call), self._returned(self.adds[after - 1], scope, [call])
        post = self.adds[after - 1].post if after else []
        awaiting = bool(post) and not child.holds(post[-1].scope)
        norm = None if last or awaiting else self._norm(scope, after, None)
        function.put(("through", at), Through(at, self._given(child, call), callee, norm, last, awaiting))

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
        if code is not None:
            bound = not child.helper or isinstance(call.func, ast.Attribute)
            positional = code.co_varnames[bound : code.co_argcount]
            for number, argument in enumerate(call.args):
                name = positional[number] if number < len(positional) else ""
                if isinstance(argument, ast.Starred) or not name or name in names:
                    given.add(number)
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
        scopes = {op: self._carrier(op) for op in add.post}
        spans: dict[Scope | None, list[Span]] = {}
        for op, scope in scopes.items():
            if scope is None:
                raise EditError("what makes the next state stands outside the functions that the stream runs through")
            spans.setdefault(scope, []).append(self._span(scope, op))
        for op, scope in scopes.items():
            assert scope is not None
            function = self._function(scope)
            at, trunk = self._span(scope, op), function.trunks.index(self.name)
            if op.name in VIEWS and op.scope is scope:
                function.put(("reshape", at), Reshape(at, False))
            elif op is add.post[-1]:
                norm = self._norm(scope, number + 1, None)
                function.put(("push", at), Push(at, trunk, norm, _number_among_results(op, scope)))
            elif same_size(op, add.op) and not any(within(at, other) for other in spans[scope] if other != at):
                function.put(("push", at), Carry(at, trunk))

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
        home = self.carriers[0]
        if home in opened or not self._holds_all(home):
            return
        calls = [place_of(*child.call) for child in self.carriers if child.parent is home and child.call is not None]
        try:
            function = self._function(home)
        except EditError:
            return
        ended = behind(function.text, calls)
        if ended is not None:
            function.adds.setdefault(self.name, {})
            function.put(("ended", ended.at), ended)

    def _norm(self, scope: Scope, stage: int, value: Op | None) -> Written | None:
        """The norm that reads the stream's value first in ``scope``, if a kernel may compute both together."""
        if stage >= len(self.adds) or stage in self.apart or (stage and self.chain.passages[stage]):
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
                at = _span(call)
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
                self._hand_down(reads, scope, {add.state, *way})
                self._project(scope, projections)
            functions = {scope for call, _ in calls for scope in call.chain()[:-1] if reads.holds(scope)}
            for op in sorted(way - {add.state}, key=lambda op: op.index):
                scope = next(scope for scope in reversed(op.scope.chain()) if scope in functions)
                function, at = self._function(scope), self._span(scope, op)
                function.edits.pop(("normed", at), None)
                function.put(("each", at), Each(at))
        except EditError as error:
            raise projections.error(str(error)) from error

    def _projection_calls(self, add: Add, projections: Projections) -> list[tuple[Scope, list[Op]]]:
        """The calls of projections in a branch, with what they project of the stream's value."""
        found: dict[Scope, list[Op]] = {}
        for op in add.region:
            scope: Scope | None = op.scope
            while scope is not None and (scope.helper or scope.path not in projections.paths):
                scope = scope.parent
            if scope is not None:
                entries = [source for source in op.inputs if not scope.holds(source.scope)]
                found.setdefault(scope, []).extend(o for o in entries if o is add.state or o in add.region)
        missing = [path for path in projections.paths if not any(s.path == path and e for s, e in found.items())]
        if missing:
            raise EditError(f"its block does not call {', '.join(missing)} on what it reads")
        return [(scope, entries) for scope, entries in found.items() if entries]

    def _reader(self, add: Add, way: set[Op]) -> Scope:
        """The function in which the stream is read for an attention."""
        users = [user for user in self.flow.users[add.state] if user in add.region]
        scopes = users[0].scope.chain()
        for user in users[1:]:
            scopes = common(scopes, user.scope.chain())
        while scopes[-1] not in self._carrier_set:
            scopes.pop()
        return scopes[-1]

    def _hand_down(self, reads: Scope, projection: Scope, values: set[Op]) -> None:
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
                function.put(("parameter", name), Parameter(name, ways=True))
            above, call = self._function(scope.parent), self._call(scope)
            at = _span(call)
            above.put(("apart", at), Apart(at, self._arguments_of(scope, call, set(names))))
            scope = scope.parent

    def _project(self, scope: Scope, projections: Projections) -> None:
        assert scope.parent is not None
        function, at = self._function(scope.parent), _span(self._call(scope))
        if isinstance(scope.module, nn.MultiheadAttention):
            edit = Projected(at, "multihead")
        elif projections.fused is not None:
            edit = Projected(at, "fused", projections.fused.groups, projections.fused.sizes)
        else:
            edit = Projected(at, "qkv"[projections.paths.index(scope.path)])
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


def _number_among_results(op: Op, scope: Scope) -> int | None:
    """Of an operation in what ``scope`` calls, which returns several tensors: which of them it makes."""
    inner: Scope | None = op.scope
    while inner is not None and inner is not scope:
        if inner.parent is scope and len(inner.results) > 1 and op in inner.results:
            return inner.results.index(op)
        inner = inner.parent
    return None


def _span(node: Any) -> Span:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


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


# -- what the text says ------------------------------------------------------------------------------------------------

#: Attributes that a stream has without being read.
_FREE = {"shape", "dtype", "device", "ndim", "size", "dim"}


def hands_on(text: Text, calls: Sequence[ast.Call], given: Set[str]) -> bool:
    """Whether a function only hands variables, those that are ``given``, from one of these calls to the next.

    Between the first and the last of them, the variable may be an argument of a call, be asked for its shape, and be
    given another name.
    """
    parents = text.parents
    statements = list(_statements(text.tree, calls, parents))
    names = set(given).union(*(_targets(call, parents) for call in calls))
    reads = [node for s in statements for node in ast.walk(s) if isinstance(node, ast.Name)]
    reads = [node for node in reads if isinstance(node.ctx, ast.Load)]
    for _ in reads:  # other names of it
        more = names.union(*(_targets(node, parents) for node in reads if node.id in names and _renamed(node, parents)))
        if more == names:
            break
        names = more
    return all(_harmless(node, parents) for node in reads if node.id in names)


def behind(text: Text, calls: Sequence[Span]) -> Ended | None:
    """The last statement that calls blocks, and the variables in which it may leave a stream."""
    nodes = [node for span in calls for node in text.nodes.get(span, []) if isinstance(node, ast.Call)]
    parents = text.parents
    statements = list(_statements(text.tree, nodes, parents))
    if not statements or isinstance(statements[-1], ast.Return):
        return None
    last = statements[-1]
    names = {arg.id for call in nodes for arg in _arguments(call) if isinstance(arg, ast.Name)}
    if isinstance(last, (ast.Assign, ast.AnnAssign)):  # in other statements they may not be bound
        names = _targets(last, parents)
    assigned = {n.id for n in ast.walk(last) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    names &= assigned
    return Ended(_span(last), tuple(sorted(names))) if names else None


#: Functions that tell a stream from a tensor.
_ASKED = {"isinstance", "issubclass", "is_tensor", "type", "id", "hasattr", "callable"}


#: Methods by which an object keeps a value: ``self.hidden.append(x)``.
_KEPT = {"append", "appendleft", "extend", "insert", "add", "update", "setdefault", "put"}


def _harmless(node: ast.Name, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether a variable, or an element of it, is only handed on where it is read."""
    read: ast.expr = node
    parent = parents[read]
    if isinstance(parent, ast.Subscript) and isinstance(parent.slice, ast.Constant):
        read, parent = parent, parents[parent]
    if isinstance(parent, ast.Call):
        called = parent.func.attr if isinstance(parent.func, ast.Attribute) else getattr(parent.func, "id", "")
        kept = called in _KEPT and isinstance(getattr(parent.func, "value", None), ast.Attribute)
        return read is not parent.func and called not in _ASKED and not kept
    if isinstance(parent, ast.Attribute):
        return parent.attr in _FREE
    if isinstance(parent, ast.Tuple):  # hidden states + (x,): what was collected becomes tensors when it is returned
        return isinstance(parents[parent], (ast.BinOp, ast.AugAssign))
    return isinstance(parent, ast.keyword) or _renamed(node, parents)


def _renamed(node: ast.Name, parents: dict[ast.AST, ast.AST]) -> bool:
    """``y = x``, or ``y = x[0]`` of a tuple that a call returned."""
    parent = parents[node]
    if isinstance(parent, ast.Subscript) and isinstance(parent.slice, ast.Constant):
        parent = parents[parent]
    return isinstance(parent, ast.Assign) and all(isinstance(target, ast.Name) for target in parent.targets)


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _targets(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> set[str]:
    """Variables to which what ``node`` is part of is assigned."""
    while node in parents and not isinstance(node, ast.stmt):
        node = parents[node]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {n.id for target in targets if target is not None for n in ast.walk(target) if isinstance(n, ast.Name)}


def _statements(tree: ast.AST, nodes: Sequence[ast.AST], parents: dict[ast.AST, ast.AST]) -> Iterable[ast.stmt]:
    """The statements of the function's body from that of the first node to that of the last."""
    body: list[ast.stmt] = tree.body  # type: ignore[attr-defined]
    rows = []
    for node in nodes:
        while node in parents and parents[node] is not tree:
            node = parents[node]
        if node in body:
            rows.append(body.index(node))
    return body[min(rows) : max(rows) + 1] if rows else []


def only_returned(text: Text, nodes: Sequence[ast.AST]) -> bool:
    """Whether the value of an expression is returned as it is, by the same or a following ``return``."""
    parents = text.parents
    node = next((n for n in nodes if isinstance(n, (ast.BinOp, ast.Call, ast.AugAssign))), None)
    if node is None:
        return False
    parent = parents[node]
    if isinstance(parent, ast.Return):
        return True
    if isinstance(node, ast.AugAssign):
        statement: ast.stmt = node
        target: ast.expr = node.target
    elif isinstance(parent, ast.Assign) and len(parent.targets) == 1:
        statement, target = parent, parent.targets[0]
    else:
        return False
    body = getattr(parents[statement], "body", [])
    if not isinstance(target, ast.Name) or parents[statement] is not text.tree or statement not in body:
        return False
    rest = body[body.index(statement) + 1 :]
    return all(
        isinstance(after, ast.Return) and _returns(after.value, target.id)
        for after in rest
        if _mentions(after, target.id)
    )


def _returns(value: ast.expr | None, name: str) -> bool:
    """Whether ``name``, or a tuple with it, is what is returned."""
    if isinstance(value, ast.Tuple):
        return all(_returns(item, name) or not _mentions(item, name) for item in value.elts)
    return isinstance(value, ast.Name) and value.id == name


def _mentions(node: ast.AST, name: str) -> bool:
    return any(isinstance(inner, ast.Name) and inner.id == name for inner in ast.walk(node))
