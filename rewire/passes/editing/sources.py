"""Where the calls of a flow, and the functions that they run, are written; and what changes in each of these."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from types import CodeType, FunctionType

from torch import nn

from rewire.code.functions import Decorated, forward_of, function_with, undecorated
from rewire.code.text import Span, Text, place_of, text_of
from rewire.errors import EditError
from rewire.passes.editing.edits import FunctionPlan, Plans
from rewire.passes.finding.flow import Op, Place, Scope


class Sources:
    """What is written for a call (`Scope`).

    Args:
        definitions: functions that take the place of the forwards of modules of these classes.
        plans: what changes in functions, by path of a module and code of a function.
    """

    def __init__(self, definitions: Mapping[type[nn.Module], FunctionType], plans: Plans) -> None:
        self.definitions, self.plans = definitions, plans

    def function(self, scope: Scope) -> tuple[str, Decorated, bool]:
        """Its name, the function, and whether it is a method of the scope's module.

        Raises:
            EditError: it is no Python function of its own.
        """
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
        return _helper_name(code), Decorated(function_with(code, scope.namespace)), False

    def text(self, scope: Scope) -> Text:
        """The source of a call's function."""
        return text_of(self.function(scope)[1].function)  # type: ignore[arg-type]

    def call(self, scope: Scope) -> ast.Call:
        """The expression that made a call."""
        parent = scope.parent
        if parent is None or scope.call is None:
            raise EditError(f"it is not known where '{scope.path}' is called")
        text = self.text(parent)
        calls = [node for node in text.at(*scope.call) if isinstance(node, ast.Call)]
        if not calls:
            raise EditError(f"no call is written where '{scope.path}' is called ({text.where()})")
        return calls[0]

    def by_name(self, scope: Scope, call: ast.Call) -> bool:
        """Whether a function is called by its name, which always stands for it."""
        if scope.code is None or scope.parent is None or scope.code.co_freevars:
            return False
        caller = self.function(scope.parent)[1].function
        known = caller is not None and isinstance(call.func, ast.Name) and caller.__globals__.get(call.func.id)
        return isinstance(known, FunctionType) and known.__code__ is scope.code

    def span(self, scope: Scope, op: Op) -> Span:
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

    def arguments(self, child: Scope, call: ast.Call, names: set[str]) -> frozenset[int | str | None]:
        """Positions and keywords of a call that become these parameters."""
        code = child.code
        written = {k.arg for k in call.keywords}
        given: set[int | str | None] = set(names & written)
        found = set(given)
        if code is not None:
            positional = code.co_varnames[child.bound : code.co_argcount]
            for number, argument in enumerate(call.args):
                name = positional[number] if number < len(positional) else ""
                if isinstance(argument, ast.Starred) or not name or name in names:
                    given.add(number)
                    found.add(name)
        if None in written and names - found:  # the others are in a dictionary: **arguments
            given.add(None)
        return frozenset(given or {*range(len(call.args)), *written})

    def plan(self, scope: Scope) -> FunctionPlan:
        """What changes in a call's function: the same for all calls of it."""
        key = scope.path, scope.code
        if key not in self.plans:
            name, decorated, method = self.function(scope)
            assert decorated.function is not None
            self.plans[key] = FunctionPlan(  # type: ignore[index]
                scope.path, name, decorated, text_of(decorated.function), method, type(scope.module) in self.definitions
            )
        return self.plans[key]  # type: ignore[index]


def _helper_name(code: CodeType) -> str:
    """``Base_forward`` for the method of a class, which another one calls by ``super()``; else the function's name."""
    holder, _, name = code.co_qualname.rpartition(".")
    holder = holder.rpartition(".")[2]
    return name if holder in ("", "<locals>") else f"{holder}_{name}"
