"""Finder's front end: trace a model symbolically with torch.fx, where it cannot be run.

Forwards are called with stand-ins: torch.fx proxies for tensors, and views for modules, whose calls are traced, too. A
forward that cannot be traced becomes one operation; if it calls blocks in a row, each block is traced by itself. No
class and no global is patched, so that other threads notice nothing, and the modules stay as they are.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import itertools
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType, MappingProxyType
from typing import Any

import torch
from torch import fx, nn

from rewire.attributes import MODULE
from rewire.code.functions import forward_of
from rewire.code.text import text_of, written_at
from rewire.errors import EditError, TraceError
from rewire.passes.finding.flow import CONTAINERS, Args, Flow, Kwargs, Place, Scope, kind_of, places_of
from rewire.passes.finding.frames import Frames
from rewire.passes.finding.graphs import flow_of
from rewire.passes.finding.standins import SIZES, Globals, Proxy, Weight, with_globals
from rewire.passes.finding.views import Views
from rewire.runtime.nested import attributes
from rewire.torch_internals import children_of
from rewire.trunk import LeftAlone

_ATTEMPTS = 12  # attempts to trace one forward
_CHOICES = 4  # choices of arguments for the model's forward
#: Folders whose code is not the user's.
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_FAILURES = 2  # failed modules of a class, after which no other of that class is tried


def follow(
    model: nn.Module,
    definitions: Mapping[type[nn.Module], FunctionType] = MappingProxyType({}),
) -> Flow:
    """The flow of ``model``, as far as its forwards can be traced without running them.

    Args:
        model: any module; parameters may be on the meta device.
        definitions: functions to trace in place of the forwards of modules of these classes.
    """
    flows = []
    for arguments in itertools.islice(_root_arguments(model), _CHOICES):
        flows.append(_Follower(model, definitions).run(arguments))
        if not flows[-1].unread:
            break
    return max(flows, key=_sums)


def _sums(flow: Flow) -> int:
    """The number of additions of two values."""
    return sum(op.name == "add" and len(op.inputs) == 2 for op in flow)


class _Follower(fx.Tracer):
    def __init__(self, model: nn.Module, definitions: Mapping[type[nn.Module], FunctionType]) -> None:
        super().__init__()
        self.model, self.definitions = model, definitions
        self.views, self.root = Views(self), model
        self.graph = fx.Graph(tracer_cls=_Follower)
        self.paths: dict[nn.Module, str] = {}
        for path, module in model.named_modules():
            self.paths.setdefault(module, path)
        self.tensors = {id(t): n for n, t in (*model.named_parameters(), *model.named_buffers())}
        self.constants: dict[str, torch.Tensor] = {}
        self.unread: dict[str, LeftAlone] = {}
        self.result: Any = None
        self.failures: dict[type, int] = {}
        self.scopes: list[Scope] = []
        self.frames = Frames(lambda value, _: self.nodes(value), self._module_of)
        self.decisions: list[list[bool]] = []  # assumed outcomes of tests, for each forward that is being traced
        self.tested: list[int] = []
        self.written: list[tuple[fx.Node, fx.Proxy, fx.Node]] = []  # in place: the operation, tensor, value before

    def _module_of(self, view: object) -> tuple[str, nn.Module] | None:
        module = vars(view).get(MODULE) if isinstance(view, nn.Module) else None
        return None if module is None else (self.paths[module], module)

    def run(self, arguments: Sequence[str]) -> Flow:
        """The flow of the model's own forward with these arguments."""
        view = self.views.of(self.model)
        args = {name: self.create_proxy("placeholder", name, (), {}) for name in arguments}
        try:
            self.result = self._inside(view, (), args, None)
        except TraceError as error:
            self._leave(self.model, error)
            self._rows(view)
        finally:
            self.views.put_back()
        return self._flow()

    def _flow(self) -> Flow:
        flow = flow_of(self.graph, self.model, self.constants)
        made = {op.node: op for op in flow.ops}
        for scope in {scope for op in flow.ops for scope in op.scope.chain()}:
            scope.arguments = {
                name: [made.get(node, node) for node in nodes] for name, nodes in scope.arguments.items()
            }
            results: list[Any] = scope.results
            scope.results = [made[node] for node in results if node in made and made[node].name not in SIZES]
        flow.outputs = [made[node] for node in self.nodes(self.result) if node in made]
        flow.unread = self.unread
        return flow

    def call_view(self, view: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        module: nn.Module = vars(view)[MODULE]
        if isinstance(module, nn.Identity) or _is_empty(module):
            return args[0] if args else None
        place = self._here()
        if self._enters(module):
            try:
                return self._inside(view, args, kwargs, place[1])
            except TraceError as error:
                self.failures[type(module)] = self.failures.get(type(module), 0) + 1
                self._leave(module, error)
                self._rows(view)
        return self.create_proxy("call_module", self.paths[module], args, kwargs)

    def _leave(self, module: nn.Module, error: TraceError) -> None:
        if next(module.parameters(), None) is None:
            return  # no branch of a residual add is in there
        why, remedy = f"its forward cannot be traced: {error}", "pass example_inputs, on which copies are run"
        path = self.paths[module]
        self.unread[path] = LeftAlone(path, why, *written_at(error.place), remedy)

    def _function(self, module: nn.Module) -> FunctionType | None:
        return self.definitions.get(type(module)) or forward_of(module).function

    def _enters(self, module: nn.Module) -> bool:
        """Whether to look into a module: those of torch are leaves, except its containers and transformers."""
        home = type(module).__module__
        leaf = home.startswith("torch.nn.") and not home.endswith((".container", ".transformer"))
        return not leaf and self.failures.get(type(module), 0) < _FAILURES

    def _inside(self, view: nn.Module, args: Args, kwargs: Kwargs, call: Place | None) -> Any:
        """Trace the forward of a module, record its operations and return its result.

        Raises:
            TraceError: it cannot be traced.
        """
        module: nn.Module = vars(view)[MODULE]
        function = self._function(module)
        if function is None:
            raise TraceError(f"forward of {type(module).__name__} is not a Python function")
        opaque: set[str] = set()
        decisions: list[bool] = []
        last = next(iter(reversed(self.graph.nodes)), None)
        for _ in range(_ATTEMPTS):
            try:
                return self._attempt(view, function, args, kwargs, call, opaque, decisions)
            except Exception as error:
                self._forget_since(last)
                callee = next((name for name in _failed_in(function, view, error) if name not in opaque), None)
                if callee is not None:
                    opaque.add(callee)
                    continue
                while decisions and decisions[-1]:
                    decisions.pop()
                if not decisions:
                    first = str(error).splitlines()[0] if str(error) else ""
                    why = first if isinstance(error, TraceError) else f"{type(error).__name__}: {first}"
                    raise TraceError(why, _failed_at(function, error)) from error
                decisions[-1] = True
        raise TraceError("its code branches too often on traced values", (function.__code__, 0))

    def _attempt(
        self,
        view: nn.Module,
        function: FunctionType,
        args: Args,
        kwargs: Kwargs,
        call: Place | None,
        opaque: set[str],
        decisions: list[bool],
    ) -> Any:
        module: nn.Module = vars(view)[MODULE]
        parent = self._here()[0] if self.scopes else None
        kind = kind_of(module)
        scope = Scope(parent, self.paths[module], module, kind, function.__code__, call, key=object())
        globals_ = Globals(function.__globals__, self, frozenset(opaque))
        traced = with_globals(function, globals_)
        bound = inspect.signature(traced).bind(view, *args, **kwargs)
        scope.arguments = {n: self.nodes(v) for n, v in list(bound.arguments.items())[1:]}
        scope.places = {n: places_of(v) for n, v in list(bound.arguments.items())[1:]}
        hidden = {name: vars(view).get(name) for name in opaque if hasattr(type(module), name)}
        for name in hidden:
            vars(view)[name] = functools.partial(self._opaque_method, self.paths[module], name)
        self.scopes.append(scope)
        self.decisions.append(decisions)
        self.tested.append(0)
        try:
            result = traced(view, *args, **kwargs)
            scope.results, scope.returned = self.nodes(result), places_of(result)
            return result
        finally:
            del decisions[self.tested.pop() :]
            self.decisions.pop()
            self.scopes.pop()
            for name, value in hidden.items():
                vars(view).pop(name)
                if value is not None:
                    vars(view)[name] = value

    def _opaque_method(self, path: str, name: str, *args: object, **kwargs: object) -> fx.Proxy:
        return self.create_proxy("call_method", name, (self.create_proxy("get_attr", path, (), {}), *args), kwargs)

    def _forget_since(self, last: fx.Node | None) -> None:
        """Erase the nodes after ``last``, and values that objects have cached since."""
        self.views.put_back()
        for node in reversed(list(self.graph.nodes)):
            if node is last:
                return
            if self.written and self.written[-1][0] is node:
                _, proxy, before = self.written.pop()
                proxy.node = before
            self.graph.erase_node(node)

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *more: Any, **named: Any) -> fx.Proxy:
        """Create a proxy; for an in-place operation (`h.add_(x)`), let it replace the tensor that is written to."""
        made = super().create_proxy(kind, target, args, kwargs, *more, **named)
        name = target if isinstance(target, str) else getattr(target, "__name__", "")
        called = kind in ("call_method", "call_function") and name.endswith("_") and not name.endswith("__")
        if called and args and isinstance(args[0], fx.proxy.Attribute):
            raise fx.proxy.TraceError(f"'{name}' writes to an attribute, which each access reads anew")
        if called and args and isinstance(args[0], fx.Proxy):
            self.written.append((made.node, args[0], args[0].node))
            args[0].node = made.node
        return made

    def _rows(self, view: nn.Module) -> None:
        """Follow the blocks of a module whose forward cannot be traced: each gets what the one before it returns."""
        module: nn.Module = vars(view)[MODULE]
        kind = kind_of(module)
        scope = Scope(self._here()[0] if self.scopes else None, self.paths[module], module, kind, key=object())
        self.scopes.append(scope)
        try:
            for child in (module,) if isinstance(module, CONTAINERS) else children_of(module).values():
                if isinstance(child, CONTAINERS):
                    handed: dict[str, Any] = {}
                    for element in children_of(child).values():
                        handed = self._block(self.views.of(element), handed) if element is not None else handed
                elif child is not None and any(isinstance(below, CONTAINERS) for below in child.modules()):
                    self._block(self.views.of(child), {})
        finally:
            self.scopes.pop()

    def _block(self, view: nn.Module, handed: dict[str, Any]) -> dict[str, Any]:
        """Trace a block on the values that the block before it returned and made-up other arguments; return its values.

        Two streams are named as they are returned (``return text, image``), and go to the parameters with these names.
        A single value has the empty name, and goes to the first parameter.
        """
        module: nn.Module = vars(view)[MODULE]
        function = self._function(module)
        if function is None or not self._enters(module):
            self._rows(view)
            return {}
        names = [p.name for p in list(inspect.signature(function).parameters.values())[1:] if p.default is p.empty
                 and p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY)] or ["x"]  # fmt: skip
        given = {names[0]: handed[""]} if "" in handed else handed
        values = [given[name] if name in given else self.create_proxy("placeholder", name, (), {}) for name in names]
        try:
            result = self._inside(view, tuple(values), {}, None)
        except TraceError as error:
            self._leave(module, error)
            self._rows(view)
            return {}
        streams = {
            name: value
            for name, value in zip(_returned_names(function), result if isinstance(result, tuple) else (), strict=False)
            if name in names and isinstance(value, fx.Proxy)
        }
        if len(streams) > 1:
            return streams
        while isinstance(result, (tuple, list)) and result:
            result = result[0]
        return {"": result} if isinstance(result, fx.Proxy) else {}

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        scope, place = self._here()
        node = super().create_node(*args, **kwargs)
        node.meta["scope"], node.meta["place"] = scope, place
        return node

    def _here(self) -> tuple[Scope, Place | None]:
        """The call that is being traced, and the place in its code."""
        return self.frames.caller(self.scopes, sys._getframe(2))

    def nodes(self, value: object) -> list[Any]:
        if isinstance(value, fx.Proxy):
            return [value.node]
        if isinstance(value, (tuple, list)):
            return [node for item in value for node in self.nodes(item)]
        if isinstance(value, dict):
            return [node for item in value.values() for node in self.nodes(item)]
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self.nodes(attributes(value))
        return []

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return Proxy(node, self)

    def weight(self, tensor: torch.Tensor) -> fx.Proxy:
        return Weight(self.create_arg(tensor), self, tensor)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """The outcome of a test on a traced value: False, until that leads nowhere."""
        if not self.decisions:
            raise TraceError("it tests a traced value")
        decisions, number = self.decisions[-1], self.tested[-1]
        self.tested[-1] += 1
        if number == len(decisions):
            decisions.append(False)
        return decisions[number]

    def create_arg(self, a: object) -> Any:
        if isinstance(a, fx.Proxy):
            return a.node
        if a is None or a is ... or isinstance(a, (bool, int, float, str, torch.dtype)):
            return a
        if isinstance(a, torch.Tensor):
            name = self.tensors.get(id(a))
            if name is None:
                name = f"_constant_{len(self.constants)}"
                self.constants[name] = a
            return self.create_node("get_attr", name, (), {})
        if isinstance(a, (tuple, list)):
            parts = [self.create_arg(item) for item in a]
            return tuple(parts) if hasattr(a, "_fields") else type(a)(parts)
        if isinstance(a, dict):
            return {str(key): self.create_arg(value) for key, value in a.items()}
        if isinstance(a, slice):
            return slice(*map(self.create_arg, (a.start, a.stop, a.step)))
        return None  # it makes no tensor


def _is_empty(module: nn.Module) -> bool:
    """Whether a module is an empty sequence: an identity."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward and not len(module)


def _failed_at(function: FunctionType, error: Exception) -> Place:
    """The instruction of the user's code, of a forward or what it calls, at which tracing failed."""
    places, entry = [], error.__traceback__
    while entry is not None:
        places.append((entry.tb_frame.f_code, entry.tb_lasti))
        entry = entry.tb_next
    own = next((n for n, (code, _) in enumerate(places) if code is function.__code__), None)
    if own is None:
        return function.__code__, 0
    called = [place for place in places[own + 1 :] if not place[0].co_filename.startswith(_LIBRARIES)]
    return called[-1] if called else places[own]


def _failed_in(function: FunctionType, view: nn.Module, error: Exception) -> list[str]:
    """The module's methods, and functions of its file, in which a forward failed, innermost first."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    codes = [frame.f_code for frame in frames]
    if function.__code__ not in codes:
        return []
    names = []
    for code in codes[codes.index(function.__code__) + 1 :]:
        name = code.co_name
        if name.startswith("__") or name == "forward":
            break
        known = function.__globals__.get(name)
        if (
            getattr(known, "__code__", None) is code
            or getattr(getattr(type(view), name, None), "__code__", None) is code
        ):
            names.append(name)
    return names[::-1]


def _root_arguments(model: nn.Module) -> Iterator[list[str]]:
    """Choices of arguments for the model's own forward, one after the other."""
    function = forward_of(model).function
    if function is None or isinstance(model, CONTAINERS):
        yield ["input"] if isinstance(model, nn.Sequential) else []
        return
    parameters = [p for p in list(inspect.signature(function).parameters.values())[1:] if p.kind is not p.VAR_KEYWORD]
    named = [p for p in parameters if p.kind is not p.VAR_POSITIONAL]
    required = [p.name for p in named if p.default is p.empty]
    optional = [p.name for p in named if p.default is None]
    main = getattr(model, "main_input_name", None)
    choices: list[Sequence[str]] = [[*required, *optional[:count]] for count in range(min(len(optional), 6) + 1)]
    if main in optional:
        also = [n for n in ("decoder_input_ids",) if n in optional]
        choices.insert(0, [*required, main, *also])
    yield from (list(choice) for n, choice in enumerate(choices) if choice not in choices[:n])


def _returned_names(function: FunctionType) -> list[str]:
    """The variables that a function returns as a tuple; empty if its source does not show that."""
    with contextlib.suppress(EditError):
        returns = [node.value for node in ast.walk(text_of(function).tree) if isinstance(node, ast.Return)]
        if returns and isinstance(returns[-1], ast.Tuple):
            return [node.id if isinstance(node, ast.Name) else "" for node in returns[-1].elts]
    return []
