"""The source text of calls in a flow and of the functions that they run, with the plan of each function."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import fx, nn

from rewire.code.functions import Decorated, forward_of, function_with, undecorated
from rewire.code.text import Span, Text, place_of, span_of, text_of
from rewire.errors import EditError
from rewire.passes.editing.edits import Callee, FunctionPlan, Plans
from rewire.passes.finding.flow import Op, Place, Scope
from rewire.runtime.reentrant import forwards
from rewire.torch_internals import uncompiled


class Sources:
    """The source text of calls (`Scope`).

    Args:
        definitions: functions that replace the forwards of modules of these classes.
        plans: plans of functions, by path of the module and code of the function.
    """

    def __init__(self, definitions: Mapping[type[nn.Module], FunctionType], plans: Plans) -> None:
        self.definitions, self.plans = definitions, plans

    def function(self, scope: Scope) -> tuple[str, Decorated, bool]:
        """The name of a call's function, the function, and whether it is a method of the scope's module.

        Raises:
            EditError: it is no Python function of its own.
        """
        module, code = scope.module, scope.code
        if module is not None and code is None and "forward" in vars(module):
            raise _replaced(scope)
        if module is None or code is None:
            raise EditError(f"the forward of '{scope.path}' is not a Python function")
        if not scope.helper and type(module) in self.definitions:
            return "forward", Decorated(self.definitions[type(module)]), True
        method = undecorated(getattr(type(module), code.co_name, None))
        if "forward" in vars(module) and (not scope.helper or (method.code is code and code.co_name == "forward")):
            raise _replaced(scope)
        if isinstance(module, fx.GraphModule):
            raise EditError(f"'{scope.path}' was traced by torch.fx, whose copies lose edits: rewire what was traced")
        if not scope.helper:
            return "forward", forward_of(module), True
        assert scope.parent is not None
        static = isinstance(inspect.getattr_static(type(module), code.co_name, None), staticmethod)
        holders = [getattr(wrapper, "__code__", None) for wrapper in method.wrappers]
        above = scope.parent.code
        wrapped = above is not None and (above in holders or above.co_filename == functools.__file__)
        if method.code is code and not static and not wrapped:  # otherwise its decorator holds it
            return code.co_name, method, True
        held: Any = _held_by_class(scope)
        helper = getattr(held, "__func__", held) or function_with(code, scope.namespace)
        return _helper_name(code), Decorated(helper), False

    def text(self, scope: Scope) -> Text:
        """The source of a call's function."""
        return text_of(self.function(scope)[1].function)  # type: ignore[arg-type]

    def call(self, scope: Scope, itself: bool = False) -> ast.Call:
        """The expression of a call. If a checkpoint runs a nested function that makes the call: the checkpoint's call.

        Args:
            scope: the call.
            itself: whether to return the call itself in any case.
        """
        parent = scope.parent
        if parent is None or scope.call is None:
            raise EditError(f"the call of '{scope.path}' was not found")
        text, place = self.text(parent), scope.call if itself else parent.again.get(scope.call[0], scope.call)
        calls = [node for node in text.at(*place) if isinstance(node, ast.Call)]
        if not calls:
            raise EditError(f"'{scope.path}' is called without a call expression in the source ({text.where()})")
        return calls[0]

    def callee(self, scope: Scope, call: ast.Call) -> Callee | None:
        """The helper to replace at a call, if it is edited and no method."""
        known = self.plans.get((scope.path, scope.code))  # type: ignore[arg-type]
        if known is None or self.function(scope)[2]:
            return None
        assert scope.parent is not None
        written, always = self._written(scope, call)
        above = self.plan(scope.parent)
        gate = above.helper(known.gate)
        if _is_of_super(written) and _gets_self(scope):
            return Callee(span_of(written), f"{gate}.on({above.text.receiver})", True)  # always this class's
        return Callee(span_of(written), gate, always)

    def check_called(self, scope: Scope) -> None:
        """Refuse a method that is called through an object that holds it, as that would still hold the unedited one.

        Raises:
            EditError: saying where.
        """
        by_name = scope.helper or scope.bare
        if scope.parent is None or scope.code is None or not by_name or not self.function(scope)[2]:
            return
        if runs_in_function(scope):
            return  # `check_add` refuses autograd functions
        try:
            call, above = self.call(scope), scope.parent
            while above.parent is not None and self._is_given(above, call):  # `apply(self.method, x)`
                call, above = self.call(above), above.parent
            caller, text = self.function(above)[1].function, self.text(above)
        except EditError:
            return  # in a library's text, for example
        if not any(_names_method(node, scope.code.co_name, caller) for node in ast.walk(text.tree)):
            if scope.code.co_name == "__call__":
                raise EditError(
                    f"the stream passes the `__call__` of '{scope.path}', which Python looks up on its class, where no "
                    "edit can be: add in its forward, and give the class `__call__ = torch.nn.Module.__call__`"
                )
            raise EditError(
                f"`{ast.unparse(call.func)}` at {text.where(call)} is the method '{scope.code.co_name}' of "
                f"'{scope.path}', as something holds it: call it by its name there, as `self.{scope.code.co_name}`"
            )

    def _is_given(self, scope: Scope, call: ast.Call) -> bool:
        """Whether a call, or a checkpoint's call, is of a parameter of the function, or of an element of one."""
        names = set() if scope.code is None else {*scope.code.co_varnames[: scope.code.co_argcount]}
        if not scope.helper or _gets_self(scope):
            names.discard(self.text(scope).receiver)  # for `Base.method(self, x)`
        for called in (call.func, *call.args[:1]):
            while isinstance(called, ast.Subscript):
                called = called.value
            if isinstance(called, ast.Name) and called.id in names and not scope.arguments.get(called.id):  # no tensor
                return True
        return False

    def _written(self, scope: Scope, call: ast.Call) -> tuple[ast.expr, bool]:
        """The expression that names a function at its call, and whether it always means that function.

        It is what is called; or the first argument, in ``checkpoint(function, x)`` under any name, or where what is
        called is another function.
        """
        assert scope.parent is not None
        caller = self.function(scope.parent)[1].function
        given = [*call.args[:1], *(keyword.value for keyword in call.keywords if keyword.arg == "function")]
        for node in given if scope.checkpointed else (call.func, *given):
            known = uncompiled(global_of(node, caller))
            if not isinstance(known, FunctionType):
                return node, False
            if known.__code__ is not scope.code and undecorated(known).code is scope.code:
                text = self.text(scope.parent)
                raise EditError(
                    f"'{known.__name__}', which adds to the stream and is called at {text.where(call)}, is decorated "
                    f"({known.__module__}.{known.__code__.co_qualname}), and its edited form would lose the "
                    "decorator: call the undecorated function"
                )
            if known.__code__ is scope.code:  # another name may mean a stand-in, whose defaults differ
                return node, not known.__closure__ and known is self.function(scope)[1].function
        return call.func, False

    def span(self, scope: Scope, op: Op) -> Span:
        """The expression of ``scope`` that ``op`` is part of."""
        if op.parameter:
            return self._read_of(op, scope)
        inner: Scope = op.scope
        place: Place | None = op.place
        while inner is not scope:
            place = inner.call
            if inner.parent is None:
                raise EditError(f"the source line of {op.name} was not found")
            inner = inner.parent
        where = scope.path or type(scope.module).__name__
        if place is None and op.name == "input":
            raise EditError(
                f"the residual stream in '{where}' starts with a tensor that no "
                "operation makes and no argument brings, as inside torch.vmap: transform the rewired model instead"
            )
        if place is None:
            raise EditError(
                f"the '{op.name}' in '{where}' is not written in its forward, nor in what that calls (in a decorator's "
                "wrapper, say): write it there"
            )
        return place_of(*place)

    def _read_of(self, weight: Op, scope: Scope) -> Span:
        """The expression of ``scope`` that reads a parameter: ``self.queries``."""
        text, path = self.text(scope), f"{scope.path}." if scope.path else ""
        receiver = scope.code.co_varnames[0] if scope.code is not None and scope.code.co_argcount else ""
        name = f"{receiver}.{weight.parameter.removeprefix(path)}"
        reads = [node for node in ast.walk(text.tree) if isinstance(node, ast.Attribute) and ast.unparse(node) == name]
        if len(reads) != 1:
            how = f"reads {len(reads)} times" if reads else "does not read as an attribute"
            raise EditError(
                f"the residual stream starts with '{weight.parameter}', which the code at {text.where()} {how}: read "
                f"it once, into a variable (`x = {name}`)"
            )
        return span_of(reads[0])

    def plan(self, scope: Scope) -> FunctionPlan:
        """The plan of a call's function, which all its calls share."""
        key = scope.path, scope.code
        if key not in self.plans:
            name, decorated, method = self.function(scope)
            assert decorated.function is not None
            taken = {plan.name for plan in self.plans.values() if plan.path == scope.path}
            while not method and name in taken:  # two decorators have an `inner`, two modules an `add`
                name += "_"
            self.plans[key] = FunctionPlan(  # type: ignore[index]
                scope.path, name, decorated, text_of(decorated.function), method, type(scope.module) in self.definitions
            )
        return self.plans[key]  # type: ignore[index]


def _is_of_super(node: ast.expr) -> bool:
    """Whether an expression is a method of ``super()``."""
    of = node.value if isinstance(node, ast.Attribute) else None
    return isinstance(of, ast.Call) and isinstance(of.func, ast.Name) and of.func.id == "super" and not of.args


def _gets_self(scope: Scope) -> bool:
    """Whether a function without free variables is a method, and no static one, of its module's class or of a base."""
    held = _held_by_class(scope)
    return isinstance(held, FunctionType) and not held.__code__.co_freevars


def _held_by_class(scope: Scope) -> FunctionType | staticmethod[..., Any] | classmethod[Any, ..., Any] | None:
    """The function of a call as the class of its module, or a base, holds it; None if none does."""
    name = "" if scope.code is None else scope.code.co_name
    own = (vars(cls).get(name) for cls in type(scope.module).__mro__)
    found = (held for held in own if getattr(getattr(held, "__func__", held), "__code__", None) is scope.code)
    return next(found, None) if name else None


def _names_method(node: ast.AST, name: str, function: FunctionType | None) -> bool:
    """Whether an expression may look up the method of this name on an object: ``self.step``.

    ``Block.step`` and ``super().step`` find the method of that class instead.
    """
    if isinstance(node, ast.Attribute) and node.attr == name:
        return not isinstance(global_of(node.value, function), type) and not _is_of_super(node)
    return isinstance(node, ast.Constant) and node.value == name  # getattr(self, "step")


def runs_in_function(scope: Scope) -> bool:
    """Whether a call runs in a forward of an autograd function."""
    helpers = {call.code for call in scope.outward() if call.helper}
    return bool(helpers) and not forwards().isdisjoint(helpers)


def global_of(node: ast.expr, function: FunctionType | None) -> object:
    """The object that an expression names in a function, if it is a global or in a module: ``utils.checkpoint``."""
    if isinstance(node, ast.Attribute):
        module = global_of(node.value, function)
        return getattr(module, node.attr, None) if isinstance(module, ModuleType) else None
    return function.__globals__.get(node.id) if function is not None and isinstance(node, ast.Name) else None


def _helper_name(code: CodeType) -> str:
    """``Base_forward`` for a method that another one calls by ``super()``; otherwise the function's name."""
    holder, _, name = code.co_qualname.rpartition(".")
    holder = holder.rpartition(".")[2]
    return name if holder in ("", "<locals>") else f"{holder}_{name}"


def _replaced(scope: Scope) -> EditError:
    return EditError(
        f"the forward of '{scope.path or type(scope.module).__name__}' was replaced on this one module, as "
        "`self.forward = self.other` does: make it the forward of a class, or let the forward of its class call the "
        "other one. To checkpoint it, write checkpoint(module, x, use_reentrant=False) where it is called"
    )
