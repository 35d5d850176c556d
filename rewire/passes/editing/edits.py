"""Changes in the functions of a model as data: the planner makes them, the editor writes them."""

from __future__ import annotations

import dataclasses
from types import CodeType
from typing import Any, TypeAlias

from rewire.attributes import gate_of
from rewire.code.functions import Decorated
from rewire.code.text import Span, Text, within
from rewire.errors import EditError
from rewire.runtime.nested import Item

#: A chain of attributes of ``self`` as it is written: ``self.norm``.
Written: TypeAlias = str


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter that brings the stream.

    Attributes:
        name: of the parameter.
        trunk: index of the trunk among those of the function.
        norm: the norm that is the first to read it.
        qkv: whether it brings values for queries, keys and values, rather than the stream.
        width: in that case, the number of channels of each, if known.
        post: whether it brings a value from which the next state has yet to be computed.
        item: for a container of tensors, what leads to the one at which the trunk starts, or its number among them.
        told: if the method is called several times, how a module is written that is another one in each call.
        reader: the statement that first reads it, if the trunk starts there and operations that did not run stand
            before: the trunk starts with what the parameter has there.
    """

    name: str
    trunk: int = 0
    norm: Written | None = None
    qkv: bool = False
    width: int | None = None
    post: bool = False
    item: Item | None = None
    told: Written = ""
    reader: Span | None = None


@dataclasses.dataclass(frozen=True)
class Open:
    """An expression that makes the value with which a trunk starts.

    Attributes:
        at: the expression.
        trunk: index of the trunk among those of the function.
        norm: the norm that is the first to read the value.
        item: if a call returns several tensors, what leads to the value, or its number among them.
        overwritten: whether the first add overwrites the value in place.
        reader: the statement that first reads the variable that holds the value, if operations that did not run stand
            between: the trunk starts with what the variable has there.
    """

    at: Span
    trunk: int = 0
    norm: Written | None = None
    item: Item | None = None
    overwritten: bool = False
    reader: Span | None = None


@dataclasses.dataclass(frozen=True)
class Push(Open):
    """An expression that makes the next state after an add.

    Attributes:
        more: whether further operations may follow before the value is the next state.
        others: indices of other trunks whose streams pass the expression, one at a time.
    """

    more: bool = False
    others: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Sum:
    """A residual add.

    Attributes:
        at: the addition.
        first: whether its first operand is the shortcut.
        inner: additions inside it that add parallel branches, each with whether its first operand is the shortcut.
        more: whether another statement adds a parallel branch: then this is only a part of a residual add.
        last: whether its value is returned at once.
        norm: the norm that is the first to read its value.
        site: number of the function's adds before it; None if that differs between calls, as in a loop.
        branches: number of parallel branches that a loop adds one by one; the last one completes the residual add.
        part: whether it adds to a part of the value: ``x[rows] += f``.
        trunks: indices of its trunks among those of the function.
    """

    at: Span
    first: bool
    inner: tuple[tuple[Span, bool], ...] = ()
    more: bool = False
    last: bool = False
    norm: Written | None = None
    site: int | None = None
    branches: int = 1
    part: bool = False
    trunks: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class View:
    """A view or a cast of the stream's value, or its product with a factor that was 1."""

    at: Span
    cast: bool
    factor: bool = False


@dataclasses.dataclass(frozen=True)
class Callee:
    """A helper that is no method, at the place of its call.

    Attributes:
        at: the expression that names the helper.
        gate: the source text of the helper's gate, which is called in its place.
        always: whether the expression always means this helper; otherwise ``gate.of(..)`` checks in each call.
        others: gates of other helpers that the expression means in other calls.
    """

    at: Span
    gate: str
    always: bool
    others: tuple[str, ...] = ()

    def written_for(self, called: str) -> str:
        """The source text of what is called in place of ``called``."""
        if self.always:
            return self.gate
        for gate in (self.gate, *self.others):
            called = f"{gate}.of({called})"
        return called


@dataclasses.dataclass(frozen=True)
class Through:
    """A call of a function that the stream goes through.

    Attributes:
        at: the call.
        callee: the helper to replace, which is called there or passed to what is called; None if there is none.
        norm: the norm that is the first to read the stream's value after the call.
        last: whether the function only returns the call's result.
        post: whether the next state has yet to be computed from the result.
        kept: returned tensors that are earlier states (U-nets): index of the trunk, and the tensor's `Item`.
        qkv: whether the called function holds projections of an attention, and gets what these read.
        again: whether the function is called several times to make adds, and so does not know which call this is.
        adds: whether the function makes adds.
        passed: if so, number of the caller's adds up to the end of the call; None if that differs, as in a loop.
    """

    at: Span
    callee: Callee | None = None
    norm: Written | None = None
    last: bool = False
    post: bool = False
    kept: frozenset[tuple[int, Item]] = frozenset()
    qkv: bool = False
    again: bool = False
    adds: bool = False
    passed: int | None = None


@dataclasses.dataclass(frozen=True)
class Apply:
    """An expression between a read and its branch.

    Attributes:
        at: the expression.
        norm: whether it calls a norm that may be computed with the read; otherwise it runs for queries, keys and values
            separately.
        calls: whether it calls a function or a module, rather than a method of a tensor.
        joins: whether it takes several values that come from the read: ``x.masked_scatter(mask, self.norm(x[mask]))``.
    """

    at: Span
    norm: bool = False
    calls: bool = False
    joins: bool = False


@dataclasses.dataclass(frozen=True)
class Project:
    """A call of a projection, or a product with a weight.

    Attributes:
        at: the call, or the product.
        way: ``q``, ``k`` or ``v``; ``fused``, or ``qkv`` for a torch.nn.MultiheadAttention.
        groups, sizes: the layout of a fused one.
        module: how a projection that is a module is written in a method of the function's own: ``self.q_proj``; else
            empty.
        others: if one call stands for several projections, the others and their ways.
    """

    at: Span
    way: str
    groups: int = 0
    sizes: tuple[int, ...] = ()
    module: Written = ""
    others: tuple[tuple[Written, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class Reach:
    """A statement after which trunks have ended; streams that are left in these variables are not complete.

    Attributes:
        names: of the variables, or attributes as they are written.
        trunks: indices of the trunks among those of the function.
        before: whether they have ended before the statement, an early exit's first.
        to: number of the function's adds that have run or been skipped by then; -1: all of the trunk.
        called: whether the place is a call, in no statement that gives its result a name.
    """

    at: Span
    names: tuple[str, ...]
    trunks: tuple[int, ...]
    before: bool = False
    to: int = -1
    called: bool = False


@dataclasses.dataclass(frozen=True)
class Iteration:
    """The start of an iteration of a loop that makes adds, if iterations may be skipped.

    Attributes:
        at: the loop.
        name: of the variable that holds the stream.
        module: how a module is written that is another one in each iteration; empty if two calls differ in that.
        sites: these modules' paths below the function's module -> number of the function's adds before.
        ifs: each ``if`` in the loop, or ``x + f if .. else x``, that may leave out adds before others -> number of the
            iteration's adds up to its end.
        trunk: index of the trunk among those of the function.
    """

    at: Span
    name: str
    module: Written
    sites: tuple[tuple[str, int], ...]
    ifs: tuple[tuple[Span, int], ...] = ()
    trunk: int = 0


Edit: TypeAlias = Parameter | Open | Push | Sum | View | Through | Apply | Project | Reach | Iteration


@dataclasses.dataclass(eq=False)
class FunctionPlan:
    """The edits of one function of one module.

    Attributes:
        path: of the module.
        name: of the method or function; mostly ``forward``.
        decorated: the function.
        text: its source.
        method: whether it is a method of the module's class; otherwise it is a helper.
        substituted: whether it replaces the class's own method (see `Pattern.forwards`).
        edits: by kind and place.
        adds: for each trunk: number of adds before a call of the function -> number of adds that the call makes.
        calls: for each trunk, the modules by which calls of the method are told apart -> number of adds before that.
        begins: where trunks begin in it: names of parameters, or the place of an expression.
        begins_inside: trunks that, in some calls, begin in a function that it calls.
        read_below: trunks that it gets, or that begin in it, before a function that it calls is the first to read them.
        branch_given: trunks of which the first branch that it adds is computed before it is called, in some calls.
        norms: paths, below the module, of norms that follow a read, and why one cannot be fused.
        outside: for each trunk, whether some calls have no stream, in all flows.
        ran: expressions that ran.
        copied: paths, from the model's root, of norms that are copied for keys and values.
        passed: calls -> indices of the trunks whose streams go through them.
        given: calls -> indices of the trunks whose present state they only read.
        posts: trunk index -> when its next states were being computed: the flow, first and last operation.
    """

    path: str
    name: str
    decorated: Decorated
    text: Text
    method: bool
    substituted: bool = False
    edits: dict[Any, Edit] = dataclasses.field(default_factory=dict)
    adds: dict[str, dict[int, int]] = dataclasses.field(default_factory=dict)
    calls: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    begins: dict[str, Any] = dataclasses.field(default_factory=dict)
    begins_inside: set[str] = dataclasses.field(default_factory=set)
    read_below: set[str] = dataclasses.field(default_factory=set)
    branch_given: set[str] = dataclasses.field(default_factory=set)
    norms: dict[str, str | None] = dataclasses.field(default_factory=dict)
    outside: dict[str, bool] = dataclasses.field(default_factory=dict)
    ran: set[Span] = dataclasses.field(default_factory=set)
    copied: set[str] = dataclasses.field(default_factory=set)
    passed: dict[Span, set[int]] = dataclasses.field(default_factory=dict)
    given: dict[Span, set[int]] = dataclasses.field(default_factory=dict)
    posts: dict[int, set[tuple[int, int, int]]] = dataclasses.field(default_factory=dict)

    @property
    def trunks(self) -> list[str]:
        return list(self.adds)

    @property
    def entered(self) -> bool:
        """Whether the function holds tensors where streams run."""
        return any(not isinstance(edit, Reach) for edit in self.edits.values())

    @property
    def ordered(self) -> bool:
        """Whether each of its adds has a known position, so that the stream can tell which one a call skipped."""
        return not self.unordered

    @property
    def unordered(self) -> list[Span]:
        """The expressions that make adds of which nothing tells the position."""
        sums = [edit for edit in self.edits.values() if isinstance(edit, Sum) and not edit.more]
        unknown = [edit.at for edit in sums if edit.site is None]
        calls = [edit for edit in self.edits.values() if isinstance(edit, Through) and edit.again]
        unknown += [edit.at for edit in calls if edit.passed is None]
        known = [edit.at for edit in self.edits.values() if isinstance(edit, Iteration)] if self.iterates else []
        return [at for at in unknown if not any(within(at, loop) for loop in known)]

    @property
    def runs_blocks(self) -> bool:
        """Whether all its adds are made by functions that it calls, and that know which ones they make."""
        return not any(isinstance(edit, Sum) or getattr(edit, "again", False) for edit in self.edits.values())

    @property
    def iterates(self) -> bool:
        """Whether it is known which iterations of its loops run."""
        return all(edit.module for edit in self.edits.values() if isinstance(edit, Iteration))

    def iterations(self, trunk: str) -> dict[str, int]:
        """For a trunk, modules by which iterations of loops are told apart -> number of the function's adds before."""
        edits = [edit for edit in self.edits.values() if isinstance(edit, Iteration)] if self.iterates else []
        return dict(pair for edit in edits if self.trunks[edit.trunk] == trunk for pair in edit.sites)

    @property
    def gate(self) -> str:
        """The module's attribute that holds the gate of this function."""
        return gate_of(self.name)

    @property
    def parameter(self) -> str:
        """Name of the first parameter of a helper that is no method: its gate."""
        return self.text.unused("gate")

    def helper(self, gate: str) -> str:
        """The source text for a called function's gate."""
        if not self.method:
            return f"{self.parameter}.helpers['{gate}']"
        if not self.text.receiver:
            raise EditError(f"the function at {self.text.where()} has no 'self'")
        return f"{self.text.receiver}.{gate}"

    def put(self, key: Any, edit: Edit) -> None:
        """Add an edit.

        Raises:
            EditError: the expression would have to be edited in two ways.
        """
        known = self.edits.get(key)
        if known is not None and known != edit:
            merged = None if self._at_once(known, edit) else _merged(known, edit)
            if merged is None:
                raise EditError(
                    f"the expression at {self.text.file}:{key[1][0]} takes part in {self._parts(known, edit)}"
                )
            edit = merged
        self.edits[key] = edit

    def _at_once(self, one: Edit, other: Edit) -> bool:
        """Whether two streams would wait for their next states at once: nothing would tell which one gets it."""
        if not (isinstance(one, Push) and isinstance(other, Push)):
            return False
        mine, theirs = ({number for push in pair for number in (push.trunk, *push.others)} for pair in ([one], [other]))
        times = [(a, b) for m in mine for n in theirs - mine for a in self.posts[m] for b in self.posts[n]]
        return any(a[0] == b[0] and a[1] < b[2] and b[1] < a[2] for a, b in times)

    def _parts(self, one: Edit, other: Edit) -> str:
        """The conflicting roles of an expression, in words."""
        if isinstance(one, Project) and isinstance(other, Project):
            return "several projections with weights: give each of queries, keys and values an expression of its own"
        streams = {self.trunks[edit.trunk] for edit in (one, other) if self.trunks and hasattr(edit, "trunk")}
        if len(streams) > 1:
            return f"two residual streams, those of trunks {' and '.join(map(repr, sorted(streams)))}"
        kinds = " and ".join(type(edit).__name__.lower() for edit in (one, other))
        return f"the residual stream in two ways ({kinds})"


def _merged(a: Any, b: Any) -> Any:
    """One edit that serves for both; None if there is none."""
    if isinstance(a, Push) and isinstance(b, Push):
        a, b = _of_both(a, b)
    if type(a) is not type(b):
        return None
    if isinstance(a, Reach) and isinstance(b, Reach):  # several trunks end there
        if a.to != b.to:  # two calls make different numbers of adds: only the gate knows how many
            return dataclasses.replace(a, names=())
        names, trunks = {*a.names, *b.names}, {*a.trunks, *b.trunks}
        return dataclasses.replace(a, names=tuple(sorted(names)), trunks=tuple(sorted(trunks)))
    if isinstance(a, Iteration) and isinstance(b, Iteration):
        sites = {*a.sites, *b.sites}
        alike = (a.name, a.module, a.ifs, len(dict(sites))) == (b.name, b.module, b.ifs, len(sites))
        return dataclasses.replace(a, module=a.module if alike else "", sites=tuple(sorted(sites)))
    if isinstance(a, Project) and a.module and b.module and a.way in "qkv" and b.way in "qkv":
        ways = dict([(a.module, a.way), *a.others, (b.module, b.way), *b.others])
        return dataclasses.replace(a, others=tuple((m, way) for m, way in ways.items() if m != a.module))
    if isinstance(a, Through):
        both: dict[str, Any] = {"kept": a.kept | b.kept, "callee": _either(a.callee, b.callee)}
        both |= {
            "again": a.again or b.again,
            "adds": a.adds or b.adds,
            "passed": a.passed if a.passed == b.passed else None,
        }
        a, b = dataclasses.replace(a, **both), dataclasses.replace(b, **both)
    if isinstance(a, Sum):
        of_both = tuple(sorted({*a.trunks, *b.trunks}))
        a, b = dataclasses.replace(a, trunks=of_both), dataclasses.replace(b, trunks=of_both)
    if isinstance(a, Parameter) and None in (a.item, b.item):  # the trunk starts there in one of two calls
        item = a.item if b.item is None else b.item
        a, b = dataclasses.replace(a, item=item), dataclasses.replace(b, item=item)
    if isinstance(a, Parameter) and "" in (a.told, b.told):  # the other brings the stream in a single call
        told = a.told or b.told
        a, b = dataclasses.replace(a, told=told), dataclasses.replace(b, told=told)
    if isinstance(a, Parameter) and a.reader != b.reader:  # the stream comes in from outside in one of two calls
        a, b = dataclasses.replace(a, reader=None), dataclasses.replace(b, reader=None)
    loose = {"norm": None, "last": False, "post": True, "calls": False, "site": None, "joins": True}
    if getattr(a, "site", None) == getattr(b, "site", None):
        del loose["site"]
    loose = {name: value for name, value in loose.items() if hasattr(a, name)}
    return (
        dataclasses.replace(a, **loose) if dataclasses.replace(a, **loose) == dataclasses.replace(b, **loose) else None
    )


def _either(a: Callee | None, b: Callee | None) -> Callee | None:
    """The callee of a place that names different helpers, or one that is not edited, in different calls."""
    if a is None or b is None or a.always or b.always or a.at != b.at:
        return a or b
    gates = dict.fromkeys([a.gate, *a.others, b.gate, *b.others])
    return dataclasses.replace(a, others=tuple(gate for gate in gates if gate != a.gate))


def _of_both(a: Push, b: Push) -> tuple[Push, Push]:
    """Two pushes, each for the trunks of both; if in either further operations may follow, in both."""
    trunk, *others = sorted({a.trunk, *a.others, b.trunk, *b.others})
    both: dict[str, Any] = {"trunk": trunk, "others": tuple(others), "more": a.more or b.more}
    return dataclasses.replace(a, **both), dataclasses.replace(b, **both)


#: Path of a module, and code of a function in it.
Key: TypeAlias = tuple[str, CodeType]
Plans: TypeAlias = dict[Key, FunctionPlan]
