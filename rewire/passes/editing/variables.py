"""Data flow in the text of a function: which variables are only passed on, only returned, or set on one path."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterable, Sequence, Set

from rewire.code.text import Span, Text, span_of, within
from rewire.passes.editing.additions import written_to
from rewire.passes.editing.ends import ends

#: Attributes of a stream that do not read it.
_FREE = {"shape", "dtype", "device", "ndim", "size", "dim"}


def hands_on(text: Text, calls: Sequence[ast.Call], given: Set[str]) -> bool:
    """Whether a function only passes the variables in ``given`` from one of these calls to the next.

    Between the first call and the last, such a variable may be an argument of one of them, or of a call that gets their
    function (``checkpoint(block, x)``). Its shape may be read, and it may get another name, also in a loop over several
    streams (``[block(x) for x in xs]``). Other functions may inspect their arguments, and a stream is no tensor. The
    same holds for the result of a call: ``block(x).float()``, ``dropout(block(x))``.
    """
    statements, parents = _statements(text, calls), text.parents
    names = set(given).union(*(_targets(text, call) for call in calls))
    reads = [node for s in statements for node in ast.walk(s) if isinstance(node, ast.Name)]
    reads = [node for node in reads if isinstance(node.ctx, ast.Load)]
    for _ in reads:  # aliases
        held = [node for node in reads if node.id in names]
        more = names.union(*(_targets(text, node) for node in held if _renamed(node, parents)))
        more |= {name.id for node in held for name in _looped(node, parents)}
        if more == names:
            break
        names = more
    return all(_harmless(text, node, calls) for node in reads if node.id in names) and not any(
        _read_at_once(text, call, calls) for call in calls
    )


def behind(text: Text, calls: Sequence[Span]) -> tuple[Span, tuple[str, ...]] | None:
    """The last statement that calls blocks, and the variables in which it may leave a stream."""
    nodes = _calls_at(text, calls)
    statements = _statements(text, nodes)
    if not statements or isinstance(statements[-1], ast.Return):
        return None
    last = statements[-1]
    given = [arg for call in nodes for arg in (*call.args, *(keyword.value for keyword in call.keywords))]
    names = {arg.id for arg in given if isinstance(arg, ast.Name)}
    made = _made_of(text, nodes, last)
    if isinstance(last, (ast.Assign, ast.AnnAssign)):
        names = made & _targets(text, last)
    else:  # a loop or an `if`, after which what they alone bind may have no value
        before = bound_before(text, last)
        names = made & names & (before | _bound_outside(text, last)) or made & before
    found = _attributes(nodes, last) or sorted(names)
    return (span_of(last), tuple(found)) if found else None


def _attributes(calls: Sequence[ast.Call], statement: ast.stmt) -> list[str]:
    """``self.h`` of ``self.h = block(self.h)``, if a statement assigns the result of one of some calls to it."""
    assigned = [node for node in ast.walk(statement) if isinstance(node, ast.Assign) and len(node.targets) == 1]
    made = [node.targets[0] for node in assigned if any(each in calls for each in ast.walk(node.value))]
    return sorted({ast.unparse(target) for target in made if isinstance(target, ast.Attribute)})


def returned_calls(text: Text, calls: Sequence[Span]) -> list[Span]:
    """The calls in expressions that are returned, or in the last statement that makes one, if no other call is around.

    Not calls in loops, nor in nested functions.
    """
    nodes = [node for at in calls for node in text.nodes.get(at, []) if isinstance(node, ast.Call)]
    last = _statements(text, nodes)[-1:]
    found = [node for node in nodes if isinstance(text.statement(node), ast.Return) or [text.statement(node)] == last]
    found = [node for node in found if {*nodes}.isdisjoint(text.above(node))]
    again = (*_LOOPS, *COMPREHENSIONS)
    found = [node for node in found if not any(isinstance(each, again) for each in text.above(node))]
    return [span_of(node) for node in found if _nested_function(text, node) is None]


def _bound_outside(text: Text, statement: ast.stmt) -> set[str]:
    """Variables to which code outside a statement assigns."""
    inside = set(ast.walk(statement))
    names = [node for node in ast.walk(text.tree) if isinstance(node, ast.Name) and node not in inside]
    return {node.id for node in names if isinstance(node.ctx, ast.Store)}


def _made_of(text: Text, calls: Sequence[ast.Call], statement: ast.stmt) -> set[str]:
    """Variables to which a statement may assign the result of some calls, or a value made from it."""
    inner = [node for node in ast.walk(statement) if isinstance(node, ast.stmt)]
    made = {node: _targets(text, node) | _bound(node) for node in inner if not getattr(node, "body", None)}
    found = set().union(*(made.get(text.statement(call), set()) for call in calls))
    for _ in made:
        found |= set().union(*(targets for node, targets in made.items() if any(_mentions(node, n) for n in found)))
    return found


def ended(text: Text, calls: Sequence[Span], names: Sequence[str]) -> list[tuple[Span, tuple[str, ...]]]:
    """The statements, inside others, at which a trunk ends early, and the variables that have a value there."""
    nodes = [node for at in calls for node in text.nodes.get(at, []) if isinstance(node, ast.Call)]
    every = [each for each in ast.walk(text.tree) if isinstance(each, ast.Call)]
    alike = [span_of(each) for each in every if any(_alike(text, each, node) for node in nodes)]
    found = [node for node in ends(text, _calls_at(text, [*calls, *alike]), {*names}) if node not in text.tree.body]
    bound = [(span_of(node), bound_before(text, node)) for node in found]
    return [(place, kept) for place, known in bound if (kept := tuple(name for name in names if name in known))]


def _calls_at(text: Text, places: Iterable[Span]) -> list[ast.Call]:
    """Calls at these places; in place of one in a nested function, those that call that function, or get it."""
    nodes = [node for at in places for node in text.nodes.get(at, []) if isinstance(node, ast.Call)]
    return [call for node in nodes for call in _called_by(text, node)]


def _called_by(text: Text, node: ast.AST, seen: Set[ast.AST] = frozenset()) -> list[ast.Call]:
    """The call ``node``; or the calls outside of nested functions at which a node inside one may run."""
    inner = _nested_function(text, node)
    if inner is None:
        return [node] if isinstance(node, ast.Call) else []
    if inner in seen:  # functions that call each other
        return []
    named = isinstance(inner, ast.Lambda) and getattr(text.parents[inner], "value", None) is inner
    names = {inner.name} if isinstance(inner, ast.FunctionDef) else _targets(text, inner) if named else set()
    uses = [each for each in ast.walk(text.tree) if isinstance(each, ast.Name) and each.id in names]
    uses = [each for each in uses if isinstance(each.ctx, ast.Load) and inner not in text.above(each)]
    above = [each for use in (*uses, inner) for each in text.above(use) if isinstance(each, ast.Call)]
    return [call for each in dict.fromkeys(above) for call in _called_by(text, each, seen | {inner})]


#: Methods by which an object stores a value: ``hidden.append(x)``.
_KEPT = {"append", "appendleft", "extend", "insert", "add", "update", "setdefault", "put"}


def _harmless(text: Text, node: ast.Name, calls: Sequence[ast.Call]) -> bool:
    """Whether a variable, or an element of it, is only passed on where it is read."""
    read: ast.expr = node
    parents = text.parents
    parent = parents[read]
    if isinstance(parent, ast.Subscript) and isinstance(parent.slice, ast.Constant):
        read, parent = parent, parents[parent]
    if isinstance(parent, (ast.keyword, ast.Starred)):
        parent = parents[parent]
    if _looped(node, parents):
        return True
    if isinstance(parent, ast.Call):
        if read is not parent.func and _collects(parent):
            return parent.func.value.id in _local(text)  # type: ignore[attr-defined]
        return read is not parent.func and any(_alike(text, parent, call) for call in calls)
    if isinstance(parent, ast.Attribute):
        return parent.attr in _FREE
    if isinstance(parent, (ast.Tuple, ast.List)):  # states + (x,): streams become tensors when they are returned
        around = parents[parent]
        if isinstance(around, ast.AugAssign):
            return isinstance(around.target, ast.Name) and around.target.id in _local(text)
        return isinstance(around, ast.BinOp)
    return _renamed(node, parents)


def _local(text: Text) -> set[str]:
    """The variables that hold nothing that the function's caller, or another function, has made."""
    given = {node.arg for node in ast.walk(text.tree) if isinstance(node, ast.arg)}
    names = [node for node in ast.walk(text.tree) if isinstance(node, ast.Name)]
    return {node.id for node in names if isinstance(node.ctx, ast.Store)} - given


def _read_at_once(text: Text, call: ast.Call, calls: Sequence[ast.Call]) -> bool:
    """Whether a call's result is passed to another function than ``calls``, or one of its methods is called."""
    parents = text.parents
    parent = parents[call]
    if isinstance(parent, (ast.keyword, ast.Starred)):
        parent = parents[parent]
    if isinstance(parent, ast.Attribute):
        return parent.attr not in _FREE and isinstance(parents[parent], ast.Call)
    if not isinstance(parent, ast.Call) or parent.func is call or _collects(parent):
        return False
    return not any(_alike(text, parent, each) for each in calls)


def _collects(call: ast.Call) -> bool:
    """Whether a call collects values in a variable: hidden states in it become tensors when they are returned."""
    return isinstance(call.func, ast.Attribute) and call.func.attr in _KEPT and isinstance(call.func.value, ast.Name)


def calls_like(text: Text, call: ast.Call) -> list[ast.Call]:
    """The other calls of the same function on other paths: see `_alike`.

    What a function does that the call is given is no other path: ``sublayer(x, lambda y: self.attention(y))``.
    """
    given = (node for arg in call.args for node in (arg, *_wrapped(text, arg)))
    own = {call, *(node for function in given for node in ast.walk(function))}
    calls = (node for node in ast.walk(text.tree) if isinstance(node, ast.Call) and node not in own)
    return [other for other in calls if _alike(text, other, call)]


def calls_around(text: Text, node: ast.AST) -> list[ast.Call]:
    """The calls, in a function itself, of nested functions that contain a node or call one that does."""
    calls = [n for n in ast.walk(text.tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    reached, todo = {node}, [node]
    while todo:
        each = todo.pop()
        function = next((n for n in text.above(each) if isinstance(n, (ast.FunctionDef, ast.Lambda))), text.tree)
        name = "" if function is text.tree else getattr(function, "name", "")
        todo += [call for call in calls if getattr(call.func, "id", "") == name and call not in reached]
        reached.update(todo)
    return [call for call in calls if call in reached and call is not node and _nested_function(text, call) is None]


def _nested_function(text: Text, node: ast.AST) -> ast.FunctionDef | ast.Lambda | None:
    """The innermost nested function around a node."""
    around = (each for each in text.above(node) if isinstance(each, (ast.FunctionDef, ast.Lambda)))
    return next((each for each in around if each is not text.tree), None)


def _alike(text: Text, one: ast.Call, other: ast.Call) -> bool:
    """Whether two calls run the same function: ``block(x)`` and ``checkpoint(block, x, mask)``, or the reverse."""
    if text.written(one.func) == text.written(other.func):
        return [*map(text.written, one.args[:1])] == [*map(text.written, other.args[:1])]
    return _is_given(text, one, other.func) or _is_given(text, other, one.func)


def _is_given(text: Text, call: ast.Call, function: ast.expr) -> bool:
    """Whether a function, a method of it (``block.__call__``), or what wraps it is an argument of a call."""
    if len(call.args) + len(call.keywords) < 2:
        return False  # nothing is passed to the function
    given = [arg.value if isinstance(arg, ast.Attribute) and arg.attr == "__call__" else arg for arg in call.args]
    known = text.written(function)
    return known in map(text.written, given) or (
        _takes_the_place(text, call) and any(known in map(text.written, _wrapped(text, arg)) for arg in given)
    )


def _takes_the_place(text: Text, call: ast.Call) -> bool:
    """Whether a call's result is returned, or assigned to a variable that the call was given: a block's result is."""
    statement = text.statement(call)
    if not isinstance(statement, ast.Return | ast.Assign) or statement.value is not call:
        return False
    given = {arg.id for arg in call.args if isinstance(arg, ast.Name)}
    return isinstance(statement, ast.Return) or not given.isdisjoint(_targets(text, call))


def _wrapped(text: Text, wrapper: ast.AST) -> Iterable[ast.AST]:
    """What a wrapper may call: ``f`` of ``wrap(f)`` and of ``lambda x: f(x, mask)``, and of a name for one of these.

    Activation checkpointing is written so: ``checkpoint(create_custom_forward(self._forward), x)``.
    """
    found: dict[ast.AST, None] = {}
    todo = [wrapper]
    while todo:
        each = todo.pop()
        inner: list[ast.AST] = []
        if isinstance(each, ast.Call):
            inner = [*each.args]
        elif isinstance(each, (ast.Lambda, ast.FunctionDef)):
            inner = [node.func for node in ast.walk(each) if isinstance(node, ast.Call)]
        elif isinstance(each, ast.Name):
            inner = text.named.get(each.id, [])
        todo += [node for node in inner if node not in found]
        found |= dict.fromkeys(inner)
    return found


def _renamed(node: ast.Name, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether a variable is read as in ``y = x``, or ``y = x[0]`` for a tuple that a call returned."""
    parent = parents[node]
    if isinstance(parent, ast.Subscript) and isinstance(parent.slice, ast.Constant):
        parent = parents[parent]
    return isinstance(parent, ast.Assign) and all(isinstance(target, ast.Name) for target in parent.targets)


def _looped(node: ast.Name, parents: dict[ast.AST, ast.AST]) -> list[ast.Name]:
    """``x`` of ``for x in xs``, in a loop or a comprehension, or of ``for x, y in zip(xs, ys)``; otherwise empty."""
    read: ast.expr = node
    parent = parents[read]
    if isinstance(parent, ast.Call) and isinstance(parent.func, ast.Name) and parent.func.id in ("zip", "enumerate"):
        read, parent = parent, parents[parent]
    if not isinstance(parent, (ast.For, ast.comprehension)) or parent.iter is not read:
        return []
    return [name for name in ast.walk(parent.target) if isinstance(name, ast.Name)]


def _targets(text: Text, node: ast.AST) -> set[str]:
    """Variables that the statement around ``node`` assigns it to."""
    node = text.statement(node)
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {n.id for target in targets if target is not None for n in ast.walk(target) if isinstance(n, ast.Name)}


def _bound(node: ast.AST) -> set[str]:
    """Variables that an expression or statement binds, other than those of a comprehension."""
    inner = {name for part in ast.walk(node) if isinstance(part, ast.comprehension) for name in ast.walk(part.target)}
    stored = (n for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    return {name.id for name in stored if name not in inner}


def _statements(text: Text, nodes: Sequence[ast.AST]) -> list[ast.stmt]:
    """The statements of the function's body from that of the first node to that of the last."""
    around = {each for node in nodes for each in (node, *text.above(node))}
    rows = [row for row, statement in enumerate(text.tree.body) if statement in around]
    return text.tree.body[rows[0] : rows[-1] + 1] if rows else []


def returns_a_value(text: Text) -> bool:
    """Whether a function has its own ``return`` with a value; nested functions do not count."""
    return any(isinstance(node, ast.Return) and node.value is not None for node in ast.walk(text.tree))


def changed_dict(text: Text) -> list[ast.expr]:
    """``state`` if a function ends with ``state["x"] = x`` and has no return."""
    if any(isinstance(node, ast.Return) for node in ast.walk(text.tree)):
        return []
    last = text.tree.body[-1]
    items = [target for target in getattr(last, "targets", []) if isinstance(target, ast.Subscript)]
    return [item.value for item in items if isinstance(getattr(item.slice, "value", None), str)][:1]


def only_returned(text: Text, nodes: Sequence[ast.AST]) -> bool:
    """Whether the value of an expression is returned unchanged, by the same or a later ``return``."""
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


def is_one_of_several(text: Text, node: ast.AST) -> bool:
    """Whether a value is taken from the result of a call: ``x, cache = f(x)``, ``f(x)[0]``."""
    parent = text.parents[node]
    unpacked = isinstance(parent, ast.Assign) and any(isinstance(t, (ast.Tuple, ast.List)) for t in parent.targets)
    picked = isinstance(parent, ast.Subscript) and parent.value is node and isinstance(parent.slice, ast.Constant)
    return isinstance(node, ast.Call) and (unpacked or picked)


def place_returned(text: Text, node: ast.AST) -> int | None:
    """The index of a value in the tuple or list that a function returns; None if its returns differ.

    Args:
        text: the function.
        node: the expression that makes the value there, in a return or in an assignment to a variable.
    """
    name = assigned(text, node)

    def is_it(element: ast.expr) -> bool:
        return element is node or (isinstance(element, ast.Name) and element.id == name)

    returns = [each.value for each in ast.walk(text.tree) if isinstance(each, ast.Return)]
    places = {
        next((n for n, element in enumerate(value.elts) if is_it(element)), None)
        for value in returns
        if isinstance(value, (ast.Tuple, ast.List))
    }
    return places.pop() if len(places) == 1 and all(isinstance(v, (ast.Tuple, ast.List)) for v in returns) else None


def assigned(text: Text, node: ast.AST) -> str | None:
    """The variable that gets an expression's value, or is changed by it; None if there is not exactly one."""
    statement = text.statement(node)
    while isinstance(text.parents.get(node), ast.IfExp):
        node = text.parents[node]
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    if node not in (statement, getattr(statement, "value", None), *targets):
        return None  # it is only a part of the value
    if isinstance(statement, ast.Expr):  # x.mul_(2)
        targets = [written_to(statement.value)]
    target = targets[0] if len(targets) == 1 else None
    while isinstance(target, ast.Subscript):  # x[mask] = y
        target = target.value
    return target.id if isinstance(target, ast.Name) else None


_IFS = (ast.If, ast.IfExp, ast.Try, ast.Match)
_LOOPS = (ast.For, ast.AsyncFor, ast.While, ast.comprehension)
#: Expressions that evaluate a part of themselves again.
COMPREHENSIONS = (ast.ListComp, ast.GeneratorExp, ast.DictComp, ast.SetComp)


def is_conditional(text: Text, places: Sequence[Span], loops: bool = True) -> bool:
    """Whether a call may skip one of these expressions: through an ``if``, an earlier ``return``, or perhaps a loop."""
    nodes = [node for at in places for node in text.nodes.get(at, [])[:1]]
    if any(isinstance(parent, (*_IFS, *(_LOOPS if loops else ()))) for node in nodes for parent in text.above(node)):
        return True
    last = max((getattr(node, "lineno", 0) for node in nodes), default=0)
    return any(isinstance(node, ast.Return) and node.lineno < last for node in ast.walk(text.tree))


def loops_around(text: Text, node: ast.AST) -> list[ast.For | ast.AsyncFor | ast.While]:
    """The loops that run a node again, innermost first."""
    return [each for each in text.above(node) if isinstance(each, (ast.For, ast.AsyncFor, ast.While))]


def kept_in(loop: ast.AST, name: str) -> set[str]:
    """The variables in which a loop keeps the value of another one: ``y = x``, ``seen.append(x)``, ``seen += (x,)``."""
    found = set[str]()
    for node in ast.walk(loop):
        if isinstance(node, ast.Call) and _collects(node) and any(_returns(arg, name) for arg in node.args):
            found.add(node.func.value.id)  # type: ignore[attr-defined]
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and _is_kept(node.value, name):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found - {name}


def _is_kept(value: ast.expr | None, name: str) -> bool:
    """Whether a value is a variable's, or a list or tuple with it, perhaps added to another one."""
    if isinstance(value, ast.BinOp):
        parts = [part for part in (value.left, value.right) if isinstance(part, (ast.List, ast.Tuple))]
        return any(_is_kept(part, name) for part in parts)
    items = value.elts if isinstance(value, (ast.List, ast.Tuple)) else [value]
    return any(isinstance(item, ast.Name) and item.id == name for item in items)


def names_behind(text: Text, loop: ast.stmt, name: str) -> list[str]:
    """The variables that keep another one's value in a loop, are read behind it, and surely have a value there."""
    siblings = getattr(text.parents[loop], "body", [])
    behind = siblings[siblings.index(loop) + 1 :] if loop in siblings else []
    read = [each for each in behind if not isinstance(each, (*_IFS, *_LOOPS, ast.Try))]
    known = bound_before(text, loop)
    kept = (each for each in kept_in(loop, name) if any(_mentions(statement, each) for statement in behind))
    return sorted(each for each in kept if each in known or any(_mentions(statement, each) for statement in read))


def may_be_left_out(text: Text, call: ast.Call) -> bool:
    """Whether a function may skip a call. A loop whose only purpose is the call does not count."""
    for parent in text.above(call):
        skips = any(isinstance(node, (ast.Continue, ast.Break)) for node in ast.walk(parent))
        if isinstance(parent, _IFS) and not _on_both_ways(text, parent, call):
            return True
        if isinstance(parent, _LOOPS) and (skips or _is_cut(parent)):
            return True
    return False


def _on_both_ways(text: Text, parent: ast.AST, call: ast.Call) -> bool:
    """Whether both ways of an ``if`` make the same call: ``checkpoint(block, x) if self.training else block(x)``."""
    ways = [getattr(parent, "body", None), getattr(parent, "orelse", None)]
    nodes = (
        [node for root in (way if isinstance(way, list) else [way]) if root for node in ast.walk(root)] for way in ways
    )
    return all(any(isinstance(node, ast.Call) and _alike(text, node, call) for node in among) for among in nodes)


def _is_cut(loop: ast.AST) -> bool:
    """Whether a loop may skip the first elements: ``self.blocks[start:]``."""
    slices = (node for node in ast.walk(getattr(loop, "iter", loop)) if isinstance(node, ast.Slice))
    return any(node.lower is not None for node in slices)


def on_one_way(text: Text, node: ast.AST, others: Iterable[Span], either: bool = False) -> ast.If | None:
    """The outermost ``if`` around an assignment after which its variable has a value on every path.

    Args:
        text: of the function.
        node: part of the assignment.
        either: whether the other path may be the one that assigns it.
        others: places that must not come after ``node`` in that ``if``; nor anywhere in it, if it runs repeatedly.
    """
    name, found = assigned(text, node), None
    looped = bool(loops_around(text, node))
    later = [at for at in others if looped or (at[0], at[2]) >= span_of(node)[1::2]]
    for inner in text.above(text.statement(node)):
        if not isinstance(inner, (ast.If, ast.With)):
            break
        if any(within(at, span_of(inner)) for at in later):
            break
        elif_ = isinstance(inner, ast.If) and text.text.startswith("elif", text.span(inner)[0])
        if not isinstance(inner, ast.If) or elif_ or name is None:
            continue
        if name in bound_before(text, inner) or (either and _binds([inner], name)):
            found = inner
    return found


def bound_before(text: Text, statement: ast.AST) -> set[str]:
    """Variables that have a value when a statement is reached."""
    arguments = text.tree.args
    names = {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    while statement is not text.tree:
        parent = text.parents[statement]
        for field in ("body", "orelse", "finalbody"):
            body = getattr(parent, field, [])
            if isinstance(body, list) and statement in body:
                for before in body[: body.index(statement)]:
                    if isinstance(before, (ast.Assign, ast.AnnAssign)):
                        names |= _targets(text, before)
        statement = parent
    return names


def statements_behind(text: Text, node: ast.AST) -> list[ast.stmt]:
    """The statements that follow the one of ``node``, in the same body and behind each ``if`` around it."""
    statement, found = text.statement(node), list[ast.stmt]()
    while True:
        around = text.parents[statement]
        lists = [getattr(around, field, None) for field in ("body", "orelse", "finalbody")]
        body = next((each for each in lists if isinstance(each, list) and statement in each), [statement])
        found += body[body.index(statement) + 1 :]
        if not isinstance(around, ast.If | ast.With):
            return found
        statement = around


def read_behind_ifs(name: str, statements: Sequence[ast.stmt], reads: Set[int]) -> ast.stmt | None:
    """The first of some statements that reads a variable, if an ``if`` among those before it may change that.

    Args:
        name: of the variable.
        statements: of one body.
        reads: the lines with operations that have read its value.
    """

    def passed(each: ast.stmt) -> bool:
        return not _mentions(each, name) or (isinstance(each, ast.If) and reads.isdisjoint(_lines(each)))

    before = [*itertools.takewhile(passed, statements)]
    stored = (n for each in before for n in ast.walk(each) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    changes = len(before) < len(statements) and any(n.id == name for n in stored)
    return statements[len(before)] if changes else None


def _lines(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _binds(statements: Sequence[ast.stmt], name: str) -> bool:
    """Whether statements give a variable a value on every path through them."""
    for statement in statements:
        if isinstance(statement, ast.If) and _binds(statement.body, name) and _binds(statement.orelse, name):
            return True
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and any(
            isinstance(target, ast.Name) and target.id == name for target in targets
        ):
            return True
    return False


def _returns(value: ast.expr | None, name: str) -> bool:
    """Whether the returned value is ``name``, or a tuple with it."""
    if isinstance(value, ast.Tuple):
        return all(_returns(item, name) or not _mentions(item, name) for item in value.elts)
    return isinstance(value, ast.Name) and value.id == name


def _mentions(node: ast.AST, name: str) -> bool:
    """Whether the value of a variable is used, rather than its shape or type alone."""
    described = {inner.value for inner in ast.walk(node) if isinstance(inner, ast.Attribute) and inner.attr in _FREE}
    names = (inner for inner in ast.walk(node) if isinstance(inner, ast.Name) and inner.id == name)
    return any(inner not in described for inner in names)
