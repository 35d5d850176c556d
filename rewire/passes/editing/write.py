"""Pass: write the planned edits into the text of a function."""

from __future__ import annotations

import ast
import dataclasses
import io
import tokenize
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeGuard

from torch import Tensor

from rewire.code.text import Span, is_call_of_one, parsed, span_of, within
from rewire.errors import EditError
from rewire.passes.editing.additions import Addition, addition_at, written_to
from rewire.passes.editing.changes import Change, Render, rendered
from rewire.passes.editing.edits import (
    Apply,
    Callee,
    Edit,
    FunctionPlan,
    Iteration,
    Open,
    Parameter,
    Project,
    Push,
    Reach,
    Sum,
    Through,
    View,
)
from rewire.passes.editing.variables import (
    assigned,
    calls_like,
    changed_dict,
    is_conditional,
    is_one_of_several,
    loops_around,
    on_one_way,
    only_returned,
)


def edited(plan: FunctionPlan) -> str:
    """The edited text of a function. The lines before its ``def`` stay.

    Raises:
        EditError: an expression is written in a way that cannot be changed.
    """
    source = _Editor(plan).run()
    try:
        parsed(f"if 1:\n{source}" if source[:1].isspace() else source)
    except SyntaxError as error:
        raise EditError(
            f"the residual stream passes {plan.text.where()} in a way that rewire cannot edit: {error}"
        ) from error
    return source


class _Editor:
    def __init__(self, plan: FunctionPlan) -> None:
        self.plan, self.text = plan, plan.text
        code = plan.decorated.code
        self.variables = self.text.variables | {*(code.co_freevars if code else ())}
        self.depth = self.text.unused("depth")
        self.parents = self.text.parents
        self.edits = [*plan.edits.values()]
        self.edits += self._on_other_ways()
        adding = [e.at for e in self.edits if isinstance(e, Sum) and not e.more]
        adding += [e.at for e in self._adding_calls()]
        self.conditional = is_conditional(self.text, adding)
        # Where calls make different numbers of adds, one that makes fewer has left none out.
        self.conditional &= all(len({*adds.values()}) < 2 for adds in plan.adds.values())

    def run(self) -> str:
        changes = [self._entry()] if self.plan.entered else []
        if self.plan.entered and self.plan.adds:
            changes += [self._leave(node) for node in ast.walk(self.text.tree) if self._is_own_return(node)]
            changes += [self._end(state) for state in changed_dict(self.text)]
        # If an expression changes several times, outer changes come first: arguments, then kinds in their order.
        own = [
            change
            for kind, writer in _WRITERS.items()
            for edit in self.edits
            if type(edit) is kind
            for change in writer(self, edit)
        ]
        changes += sorted([*own, *self._reached()], key=lambda change: (not change.argument, -change.indent))
        changes += self._data() if self.plan.entered and self.plan.adds else []
        changes += self._supers()
        if not self.plan.method:
            changes.append(self._gate_parameter())
        return rendered(self.text.text, changes)

    def _on_other_ways(self) -> list[Through]:
        """Calls that did not run, of functions through which a stream went elsewhere."""
        seen = {edit.at: edit for edit in self.edits if isinstance(edit, Through) and not edit.qkv}
        found: dict[Span, Through] = {}
        for edit in seen.values():
            call = self._call(edit.at)
            for other in calls_like(self.text, call):
                at, callee, last = span_of(other), edit.callee, edit.last and only_returned(self.text, [other])
                if callee is not None:
                    known = ast.dump(self._expression(callee.at))
                    same = (node for node in (other.func, *other.args) if ast.dump(node) == known)
                    found_at = next(map(span_of, same), None)
                    callee = None if found_at is None else dataclasses.replace(callee, at=found_at)
                found.setdefault(at, dataclasses.replace(edit, at=at, last=last, callee=callee))
        return [edit for at, edit in found.items() if at not in self.plan.ran and not self._calls_what_ran(at)]

    def _calls_what_ran(self, at: Span) -> bool:
        """Whether a call is of a nested function that ran."""
        name = getattr(self._call(at).func, "id", "")
        inner = [node for node in ast.walk(self.text.tree) if isinstance(node, ast.FunctionDef) and node.name == name]
        return any(within(place, span_of(node)) for node in inner for place in self.plan.ran)

    @property
    def _gate(self) -> str:
        """The source text for the function's gate."""
        return f"{self.text.receiver}.{self.plan.gate}" if self.plan.method else self.plan.parameter

    def _entry(self) -> Change:
        """The lines at the start of the function's body."""
        tree, text = self.text.tree, self.text.text
        lines = [f"{self.depth} = {self._gate}.enter()"]
        lines += [self._brings(edit) for edit in self.edits if isinstance(edit, Parameter) and edit.reader is None]
        body = tree.body[1:] if ast.get_docstring(tree, clean=False) is not None and len(tree.body) > 1 else tree.body
        start = self.text.start(body[0])
        line = text.rfind("\n", 0, start) + 1
        indent = text[line:start]
        if indent.strip():  # on the same line as the ``def``
            return Change(start, start, lambda _: "".join(f"{statement}; " for statement in lines))
        return Change(line, line, lambda _: "".join(f"{indent}{statement}\n" for statement in lines))

    def _brings(self, edit: Parameter) -> str:
        """The line that opens what a parameter brings."""
        how = [edit.name, *self._how(edit), *["begin=False"] * self._begins_later(edit)]
        how += [f"width={edit.width}"] if edit.qkv and edit.width else []
        how += [f"before=({self.text.receiver}, {edit.told})"] if edit.told else []
        return f"{edit.name} = {self.depth}.open({', '.join(how)})"

    def _begins_later(self, edit: Parameter) -> bool:
        """Whether the trunk of a parameter may start further on: at an expression, or in a called function."""
        its = self.plan.trunks[edit.trunk : edit.trunk + 1]  # none for an attention, which only reads
        return not self.plan.begins_inside.isdisjoint(its) or any(
            type(other) is Open and other.trunk == edit.trunk for other in self.edits
        )

    def _how(self, edit: Parameter | Open | Sum | Through) -> list[str]:
        """The keyword arguments for a method of `Depth`."""
        norm = getattr(edit, "norm", None)
        how = [] if norm is None else [f"norm={norm}"]
        how += [f"{name}=True" for name in ("post", "more", "last", "qkv") if getattr(edit, name, False)]
        item = getattr(edit, "item", None)
        how += [] if item is None else [f"item={item}"]
        how += ["again=True"] if type(edit) is Open and self._is_repeated(edit) else []
        trunk, others = getattr(edit, "trunk", 0), getattr(edit, "others", ())
        if others:
            return [*how, f"trunk={(trunk, *others)}"]
        return [*how, f"trunk={trunk}"] if trunk else how

    def _is_repeated(self, edit: Open) -> bool:
        """Whether a loop runs the expression with which a trunk starts."""
        return any(loops_around(self.text, node) for node in self.text.nodes.get(edit.at, ())[:1])

    def _gate_parameter(self) -> Change:
        """Add the gate as first parameter of a helper that is no method."""
        header = self.text.text.index("(", self.text.span(self.text.tree)[0]) + 1
        return Change(header, header, lambda _: f"{self.plan.parameter}, ")

    def _supers(self) -> list[Change]:
        """Spell out ``super()`` where the first argument is not the object: in a helper, and in a new lambda."""
        sums = (addition_at(self.text, edit.at, edit.part) for edit in self.edits if isinstance(edit, Sum))
        moved = [each.whole for each in sums if each.scattered] if self.plan.method else [self.text.tree]
        calls = [node for part in moved for node in ast.walk(part) if isinstance(node, ast.Call) and not node.args]
        named = (node for node in calls if isinstance(node.func, ast.Name) and node.func.id == "super")
        return [Change(*self.text.span(node), lambda _: f"super(__class__, {self.text.receiver})") for node in named]

    def _is_own_return(self, node: ast.AST) -> bool:
        functions = (n for n in self.text.above(node) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
        return isinstance(node, ast.Return) and node.value is not None and next(functions, None) is self.text.tree

    def _data(self) -> list[Change]:
        """Write ``depth.data(x)`` for ``x.data``, so that writes to a stream's value are noticed."""
        nodes = [n for n in ast.walk(self.text.tree) if isinstance(n, ast.Attribute) and n.attr == "data"]
        return [change for node in nodes if self._is_value(node.value) for change in self._data_of(node)]

    def _data_of(self, node: ast.Attribute) -> list[Change]:
        span, of, statement = self.text.span(node), self.text.span(node.value), self.parents[node]
        if isinstance(statement, ast.Assign) and statement.targets == [node]:
            whole, value = self.text.span(statement), self.text.span(statement.value)
            return [Change(*whole, lambda render: f"{self.depth}.data({render(*of)}, {render(*value)})")]
        if not isinstance(node.ctx, ast.Load) and not isinstance(statement, ast.AugAssign):
            return []
        all_of_it = "" if isinstance(node.ctx, ast.Load) else "[...]"
        return [Change(*span, lambda render: f"{self.depth}.data({render(*of)}){all_of_it}")]

    def _leave(self, node: ast.AST) -> Change:
        assert isinstance(node, ast.Return) and node.value is not None
        start, end = self.text.span(node)
        start += len("return")
        bare = isinstance(node.value, ast.Tuple) and self._is_bare(node.value)

        def write(render: Render) -> str:
            value = render(start, end).strip()
            return f" {self.depth}.leave({f'({value})' if bare else value})"

        return Change(start, end, write)

    def _end(self, state: ast.expr) -> Change:
        """A line after the body of a function that leaves the stream in a dict."""
        (start, end), last = self.text.span(state), self.text.tree.body[-1]
        return self._line_behind(last, f"{self.depth}.leave(None, {self.text.text[start:end]})")[0]

    def _is_bare(self, node: ast.Tuple) -> bool:
        """Whether a tuple has no brackets of its own: ``(x, y), mask``."""
        start, end = self.text.span(node)
        depth = 0
        for token in tokenize.generate_tokens(io.StringIO(self.text.text[start:end]).readline):
            depth += (token.string in ("(", "[", "{")) - (token.string in (")", "]", "}"))
            if token.string == "," and depth == 0:
                return True
        return False

    def _reach(self, edit: Reach) -> list[Change]:
        """A ``reach`` line after a statement, or before it; or a call of it, around an expression."""
        if edit.to >= 0 and not self.plan.iterates:
            return []
        to = str(edit.to) if edit.trunks == (0,) else ", ".join(map(str, (edit.to, *edit.trunks)))
        if edit.called:
            of = self.depth if self.plan.entered else self._gate
            return [self._wrapped(self._expression(edit.at), "reach", [to], of=of)]
        statement = self._statement(edit.at)
        if self.plan.entered:
            lines = [f"{name} = {self.depth}.reach({name}, {to})" for name in edit.names]
        else:  # which of them holds the newest state is told from all of them
            names, several = ", ".join(edit.names), len(edit.names) > 1
            lines = [f"{names} = {self._gate}.reach({f'({names})' if several else names}, {to})"]
        return self._before(statement, *lines) if edit.before else self._line_behind(statement, *lines)

    def _iteration(self, edit: Iteration) -> list[Change]:
        """A ``reach`` line at the start of a loop's body."""
        if not self.plan.iterates:
            return []
        loop = self._statement(edit.at)
        assert isinstance(loop, ast.For)
        how = f"before=({self.text.receiver}, {edit.module})" + f", trunk={edit.trunk}" * bool(edit.trunk)
        changes = self._before(loop.body[0], f"{edit.name} = {self.depth}.reach({edit.name}, {how})")
        for at, adds in edit.ifs:
            line = f"{edit.name} = {self.depth}.reach({edit.name}, {adds}, {how})"
            changes += self._line_behind(self._statement(at), line)
        return changes

    def _parameter(self, edit: Parameter) -> list[Change]:
        """The line before a later statement; that at the start of the body is one of `_entry`."""
        return [] if edit.reader is None else self._before(self._statement(edit.reader), self._brings(edit))

    def _open(self, edit: Open) -> list[Change]:
        if edit.reader is not None:
            name = str(assigned(self.text, self.text.nodes[edit.at][0]))
            line = f"{name} = {self.depth}.open({', '.join([name, *self._how(edit)])})"
            return self._before(self._statement(edit.reader), line)
        return [*self._made("open", edit), *self._behind_if(edit)]

    def _push(self, edit: Push) -> list[Change]:
        crossed = ("through", edit.at) in self.plan.edits and not edit.more
        made = [] if crossed else self._made("push", edit)
        return made if edit.more else [*made, *self._behind_if(edit)]

    def _behind_if(self, edit: Open) -> list[Change]:
        """A line after an ``if`` in which the state is made: on other paths it keeps its value."""
        node = next(iter(self.text.nodes.get(edit.at, [])), None)
        name = None if node is None else assigned(self.text, node)
        others = [e.at for e in self.edits if _moves(e)]
        around = None if node is None else on_one_way(self.text, node, others)
        if name is None or around is None:
            return []
        how = f", trunk={edit.trunk}" * bool(edit.trunk) + ", begin=False" * edit.overwritten  # holders are unknown
        call = f"open({name}{how}{', again=True' * self._is_repeated(edit)})"
        if isinstance(edit, Push):
            call = f"reach({name}{self._of([edit.trunk, *edit.others], ', None')})"
        return self._line_behind(around, f"{name} = {self.depth}.{call}")

    def _made(self, method: str, edit: Open) -> list[Change]:
        """Wrap an expression in a method of `Depth`; the target of an in-place operation gets the result."""
        nodes = self.text.nodes.get(edit.at, [])
        element = next((node for node in nodes if _is_stored(node)), None)
        if element is not None:
            return self._made_of_elements(method, element, self._how(edit))
        assignment = next((node for node in nodes if isinstance(node, ast.AugAssign)), None)
        if assignment is None:
            node = self._expression(edit.at)
            while isinstance(self.parents[node], ast.IfExp) and not getattr(edit, "more", False):  # both values
                node = self.parents[node]  # type: ignore[assignment]
            if edit.item is None:
                self._check_one_value(node)
            inner = type(edit) is Open and ("push", edit.at) in self.plan.edits  # the outer call is assigned
            return [self._wrapped(node, method, self._how(edit), "" if inner else self._written_to(node))]
        how = "".join(f", {argument}" for argument in self._how(edit))

        def write(render: Render) -> str:
            target, value = render(*self.text.span(assignment.target)), render(*self.text.span(assignment.value))
            return f"{target} = {self.depth}.{method}({target} {_symbol(assignment.op)} ({value}){how})"

        return [Change(*self.text.span(assignment), write)]

    def _check_one_value(self, node: ast.expr) -> None:
        """Refuse calls that return the stream's value among others."""
        if is_one_of_several(self.text, node):
            raise EditError(
                f"the call at {self.text.where(node)} makes the next state of the residual stream, and returns it "
                "among other values"
            )

    def _made_of_elements(self, method: str, element: ast.AST, how: Sequence[str]) -> list[Change]:
        """A line after ``x[mask] = y``, which has changed elements of the value."""
        name: Any = written_to(element) or element
        while isinstance(name, ast.Subscript):
            name = name.value
        used = isinstance(element, ast.Call) and not isinstance(self.parents[element], ast.Expr)
        if not isinstance(name, ast.Name) or used:
            raise EditError(
                f"elements of the residual stream are written to at {self.text.where(element)}: write them in a "
                "statement by itself, where the stream is a variable (`x[rows] = y`)"
            )
        call = f"{name.id} = {self.depth}.{method}({', '.join([name.id, *how])})"
        return self._line_behind(element, call)

    def _before(self, statement: ast.stmt, *lines: str) -> list[Change]:
        """Lines before a statement: on its own line if it is a ``return``, or if something stands before it there."""
        start = self.text.start(statement)
        first = self.text.text.rfind("\n", 0, start) + 1
        indent = self.text.text[first:start]
        if indent.strip() or isinstance(statement, ast.Return):
            return [Change(start, start, lambda _: "".join(f"{line}; " for line in lines))]
        return [Change(first, first, lambda _: "".join(f"{indent}{line}\n" for line in lines), indent=len(indent))]

    def _line_behind(self, node: ast.AST, *lines: str) -> list[Change]:
        """Lines after the statement that contains ``node``, unless nothing can run there."""
        statement, text = self.text.statement(node), self.text.text
        if _leaves([statement]):
            return []
        start, end = self.text.span(statement)
        indent = text[text.rfind("\n", 0, start) + 1 : start]
        if indent.strip():
            raise EditError(f"there are several statements on one line at {self.text.where(node)}: write one per line")
        end = text.find("\n", end) + 1 or len(text)
        return [Change(end, end, lambda _: "".join(f"{indent}{line}\n" for line in lines), indent=len(indent))]

    def _through(self, edit: Through) -> list[Change]:
        how = self._how(dataclasses.replace(edit, last=False) if edit.kept else edit)
        how += [f"kept={sorted(edit.kept, key=str)}"] if edit.kept else []
        ways = [method for method in ("view", "push") if not edit.qkv and (method, edit.at) in self.plan.edits]
        how += [f'otherwise="{method}"' for method in ways]
        made = self.plan.edits.get(("push", edit.at)) if "push" in ways else None
        item = getattr(made, "item", None)
        how += [] if item is None else [f"item={item}"]
        read = self.plan.given.get(edit.at, set()) - self.plan.passed.get(edit.at, set())
        how += [f"read={sorted(read)}"] if read else []
        around = self._wrapped(self._call(edit.at).func, "through", how)
        return [around] if edit.callee is None else [around, self._gated(edit.callee)]

    def _gated(self, callee: Callee) -> Change:
        """Put a helper's gate in its place."""
        start, end = self.text.span(self._expression(callee.at))

        def write(render: Render) -> str:
            return callee.written_for(render(start, end))  # with the changes inside it

        return Change(start, end, write)

    def _call(self, at: Span) -> ast.Call:
        node = self._expression(at)
        if not isinstance(node, ast.Call):
            raise EditError(f"the expression at {self.text.where(node)} is not a call")
        return node

    def _apply(self, edit: Apply) -> list[Change]:
        node = self._expression(edit.at)
        if edit.norm:
            return [self._function_first(self._call(edit.at), "apply")]
        if isinstance(node, ast.Call) and is_call_of_one(node) and self._operands(node, edit.calls) == node.args:
            return [self._function_first(node, "apply")]
        return [self._as_function(edit.at, "apply", edit.calls, joins=edit.joins)]

    def _view(self, edit: View) -> list[Change]:
        if edit.factor:  # inside a call, the product applies to all states, as a view does
            if isinstance(self._expression(edit.at), ast.BinOp):
                return [self._as_function(edit.at, "copy", more=", factor=True")]
            return [self._as_function(edit.at, "view")]
        if ("through", edit.at) in self.plan.edits:
            return []
        return [self._as_function(edit.at, "copy" if edit.cast else "view")]

    def _as_function(self, at: Span, method: str, calls: bool = False, more: str = "", joins: bool = False) -> Change:
        """Write ``depth.view(lambda value: value.flatten(2), x)`` for ``x.flatten(2)``.

        The function runs once for each state. An expression with side effects or random numbers is evaluated once, as a
        default argument: ``depth.view(lambda value, once=(torch.randperm(n)): value[once], x)``.
        """
        node = self._expression(at)
        operands = self._operands(node, calls, joins)
        (start, end), spans = self.text.span(node), [*map(self.text.span, operands)]
        names = [self.text.unused(f"value{number or ''}") for number in range(len(spans))]
        fixed = [*map(self.text.span, _effects(node, operands))]
        once = [self.text.unused(f"once{number or ''}") for number in range(len(fixed))]
        places = sorted(zip([*spans, *fixed], [*names, *once], strict=True))

        def write(render: Render) -> str:
            body, at = "", start
            for (first, last), name in places:
                body, at = f"{body}{render(at, first)}{name}", last
            parameters = [*names, *(f"{name}=({render(*span)})" for name, span in zip(once, fixed, strict=True))]
            given = ", ".join(render(*span) for span in spans)
            return f"{self.depth}.{method}(lambda {', '.join(parameters)}: {body}{render(at, end)}, {given}{more})"

        return Change(start, end, write)

    def _project(self, edit: Project) -> list[Change]:
        what = repr((edit.groups, edit.sizes)) if edit.way == "fused" else f'"{edit.way}"'
        product = self._expression(edit.at)
        if isinstance(product, ast.BinOp):
            return [self._operator(product, what)]
        called = self._call(edit.at).func
        if edit.others or (edit.module and ast.unparse(called) != edit.module):  # several, perhaps in a loop
            ways = ((edit.module, what), *((module, f'"{way}"') for module, way in edit.others))
            what = "{" + ", ".join(f"{module}: {way}" for module, way in ways) + "}"
        if isinstance(called, ast.Attribute) and hasattr(Tensor, called.attr) and self._is_value(called.value):
            return [self._method(self._call(edit.at), called, what)]
        return [self._wrapped(called, "project", [what])]

    def _operator(self, product: ast.BinOp, what: str) -> Change:
        """``x @ weight``, applied to what queries, keys or values read."""
        (start, end), left, right = map(self.text.span, (product, product.left, product.right))
        function = f"lambda x, weight: x {_symbol(product.op)} weight"
        before = f"{self.depth}.project({function}, {what})"
        return Change(start, end, lambda render: f"{before}({render(*left)}, {render(*right)})")

    def _method(self, product: ast.Call, called: ast.Attribute, what: str) -> Change:
        """``x.matmul(weight)``, applied to what queries, keys or values read."""
        (start, end), x, function = map(self.text.span, (product, called.value, called))
        rest = "*rest, **named" if product.keywords else "*rest"
        before = f"{self.depth}.project(lambda x, {rest}: x.{called.attr}({rest}), {what})"
        behind = lambda render: render(function[1], end).lstrip()[1:]  # noqa: E731
        return Change(start, end, lambda render: f"{before}({render(*x)}, {behind(render)}")

    def _function_first(self, call: ast.Call, method: str) -> Change:
        """Replace a call by a method of `Depth` that gets the function and its argument."""
        (start, end), function, (argument, _) = map(self.text.span, (call, call.func, call.args[0]))
        return Change(start, end, lambda render: f"{self.depth}.{method}({render(*function)}, {render(argument, end)}")

    def _operands(self, node: ast.expr, calls: bool = False, joins: bool = False) -> list[ast.expr]:
        """The possible operands of an operation: ``x`` of ``x.flatten(2)``, ``torch.flatten(x, 2)``, ``x.T``.

        Which of several is the stream's value shows when the operation runs.

        Args:
            node: the operation.
            calls: whether it calls a function or a module, and so no method of a tensor.
            joins: whether a method takes further values besides its own tensor.
        """
        if isinstance(node, ast.Attribute | ast.Subscript):
            return [node.value]
        if isinstance(node, ast.Call):
            method = node.func if isinstance(node.func, ast.Attribute) and not calls else None
            receiver = [] if method is None else [method.value]
            of_tensor = method is not None and hasattr(Tensor, method.attr) and self._is_value(method.value)
            if of_tensor and not joins:
                return receiver
            arguments = [a.value if isinstance(a, ast.Starred) else a for a in node.args]
            arguments += [keyword.value for keyword in node.keywords]
            found = [operand for operand in receiver + arguments if self._is_value(operand)]
            if found:
                return sorted(found, key=self.text.span)
        if isinstance(node, ast.BinOp):
            return [operand for operand in (node.left, node.right) if self._is_value(operand)]
        if isinstance(node, ast.UnaryOp):
            return [node.operand]
        raise EditError(
            f"the operation on the residual stream at {self.text.where(node)} is written in an unsupported way"
        )

    def _is_value(self, node: ast.expr) -> bool:
        """Whether an expression may hold the stream's value: it is no constant, no attribute of ``self``, no global."""
        inner: ast.expr = node
        while isinstance(inner, ast.Attribute):
            inner = inner.value
        if not isinstance(inner, ast.Name):
            return not isinstance(inner.operand if isinstance(inner, ast.UnaryOp) else inner, ast.Constant)
        of_self = self.plan.method and inner.id == self.text.receiver
        return not of_self and inner.id in self.variables

    def _wrapped(
        self, node: ast.expr, method: str, how: Sequence[str] = (), before: str = "", of: str | None = None
    ) -> Change:
        start, end = self.text.span(node)
        more = "".join(f", {argument}" for argument in how)
        return Change(start, end, lambda render: f"{before}{of or self.depth}.{method}({render(start, end)}{more})")

    def _written_to(self, node: ast.expr) -> str:
        """``x = `` for the statement ``x.mul_(2)``, so that the variable gets the result."""
        target = written_to(node) if isinstance(self.parents[node], ast.Expr) else None
        return f"{target.id} = " if isinstance(target, ast.Name) else ""

    def _statement(self, at: Span) -> ast.stmt:
        return next(node for node in self.text.nodes[at] if isinstance(node, ast.stmt))

    def _expression(self, at: Span) -> ast.expr:
        nodes = [node for node in self.text.nodes.get(at, []) if isinstance(node, ast.expr)]
        if not nodes:
            raise EditError(f"the residual stream passes {self.text.file}:{at[0]}, where there is no expression")
        return nodes[0]

    def _sum(self, edit: Sum) -> list[Change]:
        """Replace an addition, and those inside it that add parallel branches, by a method of `Depth`."""
        addition = addition_at(self.text, edit.at, edit.part)
        shortcut, *branches = addition.operands(edit.first)
        for at, first in reversed(edit.inner):
            shortcut, branch = addition_at(self.text, at).operands(first)
            branches.insert(0, branch)
        if addition.part is not None:
            shortcut = addition.part.value
        how = [self.text.text[slice(*self.text.span(option))] for option in addition.options] + self._how(edit)
        how += [f"site={edit.site}"] if edit.site is not None and self.conditional else []
        how += [f"of={edit.branches}"] if edit.branches > 1 else []

        def write(render: Render) -> str:
            (start, end), (first, last) = self.text.span(addition.whole), self.text.span(shortcut)
            operands = [render(*self.text.span(branch)) for branch in branches]
            if addition.scattered:
                value = self.text.unused("value")
                operands = [f"lambda {value}: {render(start, first)}{value}{render(last, end)}"]
            if addition.part is not None:
                operands = [f"{self.depth}.at[{render(*self.text.span(addition.part.slice))}]({operands[0]})"]
            call = f"{self.depth}.add({', '.join([render(first, last), *operands, *how])})"
            stated = isinstance(self.parents[addition.node], ast.Expr)
            if stated and any(key[:2] in (("push", edit.at), ("open", edit.at)) for key in self.plan.edits):
                return call  # the outer call is assigned
            return self._assigned(addition, call, render)

        return [Change(*self.text.span(addition.whole), write)]

    def _reached(self) -> list[Change]:
        """Lines after an ``if`` that contains adds: on other paths the stream has to pass these adds, too."""
        found: dict[tuple[Span, str], list[Sum | Through]] = {}
        ways: dict[Span, list[Sum | Through]] = {}
        adding: list[Sum | Through] = [e for e in self.edits if isinstance(e, Sum) and e.site is not None]
        adding += [e for e in self._adding_calls() if e.passed is not None]
        others = [edit.at for edit in self.edits if _moves(edit)]
        for edit in adding if self.conditional else ():
            node, way = self.text.nodes[edit.at][0], self._way(edit.at)
            name = assigned(self.text, node)
            around = on_one_way(self.text, node, [at for at in others if at != edit.at], either=True)
            if any(loops_around(self.text, each) for each in (way, around) if each is not None):
                continue  # earlier iterations come by there, too
            if way is not None:
                ways.setdefault(span_of(way), []).append(edit)
            if around is not None and name is not None:
                found.setdefault((span_of(around), name), []).append(edit)
        lines = [(at, f"{name} = {self.depth}.reach({name}, {self._passed(s)})") for (at, name), s in found.items()]
        changes = [change for at, line in lines for change in self._line_behind(self.text.nodes[at][0], line)]
        return changes + [self._wrapped(self._expression(at), "reach", [self._passed(s)]) for at, s in ways.items()]

    def _adding_calls(self) -> list[Through]:
        """Calls of functions that make adds, where these or the function's own do not know what was left out before."""
        own = any(isinstance(edit, Sum) for edit in self.edits)
        calls = (edit for edit in self.edits if isinstance(edit, Through))
        return [edit for edit in calls if edit.again or (own and edit.adds)]

    def _passed(self, adding: Sequence[Sum | Through]) -> str:
        """Arguments of `Depth.reach` for adds of which one runs: the number of adds passed by then, and the trunks."""
        counts = [(edit.site or 0) + 1 if isinstance(edit, Sum) else edit.passed or 0 for edit in adding]
        trunks = (edit.trunks if isinstance(edit, Sum) else self.plan.passed[edit.at] for edit in adding)
        return f"{max(counts)}{self._of(number for each in trunks for number in each)}"

    def _of(self, trunks: Iterable[int], without: str = "") -> str:
        """Arguments that name trunks, if the function has others, too."""
        numbers = sorted({*trunks})
        several = len(self.plan.trunks) > 1 and len(numbers) < len(self.plan.trunks)
        return "".join((without, *(f", {number}" for number in numbers))) if several else ""

    def _way(self, at: Span) -> ast.IfExp | None:
        """The outermost ``x + f if .. else x`` of which an expression is an alternative."""
        node, found = self.text.nodes[at][0], None
        parent = self.parents.get(node)
        while isinstance(parent, ast.IfExp) and node is not parent.test:
            node = found = parent
            parent = self.parents.get(node)
        return found

    def _assigned(self, addition: Addition, call: str, render: Render) -> str:
        """The call in place of an addition, assigned to the addition's target if it is in place."""
        target = addition.target
        if target is None:
            return call
        if isinstance(addition.whole, ast.AugAssign | ast.Assign) or isinstance(self.parents[addition.node], ast.Expr):
            return f"{render(*self.text.span(target))} = {call}"
        return f"({target.id} := {call})" if isinstance(target, ast.Name) else call


#: Kind of edit -> how it is written.
_WRITERS: dict[type, Callable[..., list[Change]]] = {
    Reach: _Editor._reach,
    Iteration: _Editor._iteration,
    Push: _Editor._push,
    Parameter: _Editor._parameter,
    Open: _Editor._open,
    View: _Editor._view,
    Through: _Editor._through,
    Apply: _Editor._apply,
    Project: _Editor._project,
    Sum: _Editor._sum,
}


def _leaves(statements: Sequence[ast.stmt]) -> bool:
    """Whether control never goes on after these statements."""
    last = statements[-1] if statements else None
    if isinstance(last, ast.If):
        return _leaves(last.body) and _leaves(last.orelse)
    return isinstance(last, (ast.Return, ast.Raise, ast.Continue, ast.Break))


def _moves(edit: Edit) -> TypeGuard[Sum | Through]:
    """Whether the stream advances there, through an add or a call."""
    return isinstance(edit, Sum) or (isinstance(edit, Through) and not edit.qkv)


def _is_stored(node: ast.AST) -> bool:
    """Whether elements of a variable are written to: ``x[mask]`` of ``x[mask] = y``, ``x[:, 0].mul_(2)``."""
    stored = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
    return stored or isinstance(written_to(node), ast.Subscript)


def _symbol(operator: ast.operator) -> str:
    return ast.unparse(ast.BinOp(ast.Name("a"), operator, ast.Name("b")))[2:-2]


#: Functions and methods without side effects.
_LOOKS = frozenset({"size", "dim", "numel", "len", "int"})


def _effects(node: ast.AST, operands: Collection[ast.AST]) -> list[ast.expr]:
    """The expressions in an operation, other than its operands, that call something or bind a name."""
    inside = {inner for operand in operands for inner in ast.walk(operand) if isinstance(inner, ast.expr)}
    found: list[ast.expr] = []
    for child in ast.iter_child_nodes(node):
        parts = {*ast.walk(child)}
        if child in inside or not any(map(_has_effects, parts)):
            continue
        whole = isinstance(child, ast.expr) and not isinstance(child, (ast.Slice, ast.Starred))
        sliced = isinstance(child, ast.Tuple) and any(isinstance(part, (ast.Slice, ast.Starred)) for part in child.elts)
        found += [child] if whole and not sliced and inside.isdisjoint(parts) else _effects(child, operands)  # type: ignore[list-item]
    return found


def _has_effects(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        return name not in _LOOKS
    return isinstance(node, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom))
