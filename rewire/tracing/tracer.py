"""A torch.fx tracer for the forward of one module: every child is a leaf, every branch is a decision.

One run of the tracer follows one path through the Python code. `rewire.tracing.explore` runs it until all paths are
known. What cannot be followed (a method that needs real numbers, say) becomes one opaque call of that method.
"""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import functools
import inspect
import operator
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import fx, nn

from rewire.errors import TraceError
from rewire.tracing.forwards import attributes_set_in_calls, parameters_of, plain_forward
from rewire.tracing.guards import refuse

#: Keyword under which all of ``**kwargs`` travels during tracing, and name prefix of the placeholder of ``*args``.
KEYWORDS = "__keywords__"
STAR = "__star__"

MAX_DECISIONS = 24
#: Creation functions: the only torch functions that ignore a proxy among their arguments.
_CREATION = ("arange", "empty", "finfo", "full", "linspace", "ones", "tensor", "zeros")


def star(values: Any) -> Any:
    """Stands in a graph for ``*values`` among the elements of a tuple or a call's arguments."""
    raise AssertionError("printed as *values, never called")


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An attribute of a library that tracing replaces, so that what it leads to is recorded as one call.

    Attributes:
        owner: returns the class or module that has the attribute; called when tracing, to import nothing early.
        name: name of the attribute.
        replacement: makes the value to use while tracing, from a function that makes a recording one of a function.
    """

    owner: Callable[[], Any]
    name: str
    replacement: Callable[[Callable[..., Any]], Any]


class Opaque(Exception):
    """Raised to start over with the method or function ``name`` as one opaque call."""

    def __init__(self, name: str, is_method: bool, error: BaseException) -> None:
        super().__init__(name)
        self.name, self.is_method, self.error = name, is_method, error


@functools.cache
def _instructions(code: CodeType) -> dict[int, dis.Instruction]:
    return {instruction.offset: instruction for instruction in dis.get_instructions(code)}


class _Unpacked:
    """How traced values are unpacked: ``a, b = x`` element by element, and ``(*x, 1)`` as such; loops are refused."""

    def __iter__(self) -> Iterator[Any]:
        frame = sys._getframe(1)
        current = _instructions(frame.f_code).get(frame.f_lasti)
        if current is not None and current.opname == "UNPACK_SEQUENCE":
            return iter([self[index] for index in range(current.argval)])  # type: ignore[index]
        length = _parts(self.node)  # type: ignore[attr-defined]
        if length:
            return iter([self[index] for index in range(length)])  # type: ignore[index]
        if current is None or current.opname not in ("LIST_EXTEND", "CALL_FUNCTION_EX"):
            raise TraceError("it loops over a traced value")
        return iter([self.tracer.create_proxy("call_function", star, (self,), {})])  # type: ignore[attr-defined]

    def __len__(self) -> int:
        # ``(*x, 1)`` asks for a length hint, and only a TypeError means that there is none
        raise TypeError("the length of a traced value is not known")


def _parts(node: fx.Node) -> int:
    """Into how many parts ``node`` takes a tensor apart; 0 if it does not, or does not say."""
    if node.target in ("chunk", torch.chunk) and len(node.args) > 1 and isinstance(node.args[1], int):
        return node.args[1]
    if node.target in ("split", torch.split) and len(node.args) > 1 and isinstance(node.args[1], (list, tuple)):
        return len(node.args[1])
    return 0


class _Proxy(_Unpacked, fx.Proxy):
    def __getattr__(self, name: str) -> Any:
        return _Attribute(self, name)


class _Attribute(_Unpacked, fx.proxy.Attribute):
    def __getattr__(self, name: str) -> Any:
        return _Attribute(self, name)


@contextlib.contextmanager
def child_calls_recorded() -> Iterator[list[PathTracer]]:
    """Record calls of modules, as torch.fx does: by patching ``nn.Module.__call__``.

    Patching a class with thousands of subclasses takes time, so that one patch serves many traces: calls are recorded
    by the last tracer in the list that this yields.
    """
    running: list[PathTracer] = []
    original = nn.Module.__call__

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return running[-1].call_child(module, args, kwargs) if running else original(module, *args, **kwargs)

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield running
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]


class PathTracer(fx.Tracer):
    """Traces one path of one module's forward.

    Args:
        root: the module; neither it nor its children are changed.
        function: the forward to trace, called with a stand-in for ``root`` as ``self``.
        nones: parameters that are None on this path.
        decisions: outcomes of the first tests on traced values; further tests are decided False.
        opaque: names of methods, and of functions, that are recorded as one call.
        inline: says whether to trace through a child instead of recording its call.
        leaves: library attributes to replace meanwhile.
        running: the tracers that record calls of modules now; see `child_calls_recorded`.
        varying: attributes of the module that are read when the forward runs, as they differ between equal modules.
    """

    def __init__(
        self,
        root: nn.Module,
        function: FunctionType,
        nones: frozenset[str],
        decisions: Sequence[bool],
        opaque: frozenset[tuple[str, bool]],
        inline: Callable[[nn.Module], bool],
        leaves: Sequence[Leaf],
        running: list[PathTracer],
        varying: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__()
        self.varying = varying
        self.running = running
        self.leaves = leaves
        self.function, self.nones, self.decisions, self.opaque, self.inline = function, nones, decisions, opaque, inline
        self._tensors: dict[str, fx.Proxy] = {}
        self._originals: dict[Any, FunctionType] = {}  # of functions that are recorded
        self.taken: list[tuple[fx.Node, bool]] = []
        self.root = root
        self.graph = fx.Graph(tracer_cls=PathTracer)
        self.paths = {module: path for path, module in root.named_modules()}
        self.self_view = self.view_of(root, "")

    # -- running -------------------------------------------------------------------------------------------------

    def run(self) -> fx.Graph:
        """Trace, and return the graph.

        Raises:
            Opaque: this path needs one more opaque call.
            TraceError: this path cannot be traced.
        """
        args, kwargs = self._placeholders()
        try:
            with self._recording():
                result = self.function(self.self_view, *args, **kwargs)
            output = self.create_node("output", "output", (self.create_arg(result),), {})
            if isinstance(result, dict) and type(result) is not dict:
                output.meta["returns"] = type(result).__name__  # a subclass that a printed dict would not be
        except Opaque:
            raise
        except Exception as error:
            self._blame(error)
            if isinstance(error, TraceError):
                raise
            raise TraceError(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}") from error
        return self.graph

    def _placeholders(self) -> tuple[list[Any], dict[str, Any]]:
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for parameter in parameters_of(self.function):
            kind, name = parameter.kind, parameter.name
            if kind is parameter.VAR_POSITIONAL:
                args.append(self.create_proxy("placeholder", STAR + name, (), {}))
            elif kind is parameter.VAR_KEYWORD:
                kwargs[KEYWORDS] = self.create_proxy("placeholder", KEYWORDS + name, (), {})
            else:
                value = None if name in self.nones else self.create_proxy("placeholder", name, (), {})
                if kind is parameter.KEYWORD_ONLY:
                    kwargs[name] = value
                else:
                    args.append(value)
        return args, kwargs

    @contextlib.contextmanager
    def _recording(self) -> Iterator[None]:
        """Record calls of modules, of creation functions and of opaque functions."""
        patches: list[tuple[Any, str, Any]] = [
            (leaf.owner(), leaf.name, leaf.replacement(self._recorded)) for leaf in self.leaves
        ]
        patches += [(torch, name, self._recorded(getattr(torch, name))) for name in _CREATION]
        with contextlib.ExitStack() as stack:
            self.running.append(self)
            stack.callback(self.running.pop)
            for owner, name, value in patches:
                original = getattr(owner, name)
                setattr(owner, name, value)
                stack.callback(setattr, owner, name, original)
            namespace = self.function.__globals__
            if "isinstance" not in namespace:  # a proxy is an instance of nothing: the question is one for later
                namespace["isinstance"] = _isinstance
                stack.callback(namespace.__delitem__, "isinstance")
            for name, is_method in self.opaque:
                if not is_method and name in namespace:
                    original = namespace[name]
                    recorded = functools.wraps(original)(self._recorded(original, always=True))
                    namespace[name], self._originals[recorded] = recorded, original
                    stack.callback(namespace.__setitem__, name, original)
            yield

    def _recorded(self, function: Callable[..., Any], always: bool = False) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            if always or _has_proxy((args, kwargs)):
                return self.create_proxy("call_function", function, args, kwargs)
            return function(*args, **kwargs)

        return record

    def _blame(self, error: BaseException) -> None:
        """Raise `Opaque` if the error came from inside a method of the module or a function of its file."""
        callee = self._called_by_forward([frame for frame, _ in traceback.walk_tb(error.__traceback__)])
        if callee is not None:
            raise Opaque(*callee, error)

    def _called_by_forward(self, frames: Sequence[FrameType]) -> tuple[str, bool] | None:
        """The method of the module, or the function of its file, that ``forward`` called, given outermost first."""
        codes = [frame.f_code for frame in frames]
        if self.function.__code__ not in codes:
            return None
        for frame in frames[codes.index(self.function.__code__) + 1 :][:1]:
            name = frame.f_code.co_name
            first = frame.f_code.co_varnames[:1]
            if first and frame.f_locals.get(first[0]) is self.self_view and hasattr(type(self.root), name):
                return None if name == "forward" or name.startswith("__") else (name, True)
            function = self.function.__globals__.get(name)
            if isinstance(function, FunctionType) and function.__code__ is frame.f_code:
                return name, False
        return None

    # -- what the traced code sees --------------------------------------------------------------------------------

    def view_of(self, module: nn.Module, path: str) -> nn.Module:
        """A stand-in for ``self``: the module's own attributes, except that what can change is read when called."""
        cls: type = type(module)
        names = attributes_set_in_calls(cls) | (self.varying if path == "" else frozenset())
        dynamic = {"training"} | {n for n in names if _is_plain(vars(module).get(n, self))}
        prefix = f"{path}." if path else ""
        namespace: dict[str, Any] = {
            name: property(functools.partial(self._read_attribute, prefix + name)) for name in sorted(dynamic)
        }
        for name, is_method in self.opaque:
            if is_method and path == "":
                namespace[name] = self._opaque_method(name)
        namespace["__getattr__"] = functools.partialmethod(_ViewedTensors.read, self, prefix)
        namespace["__setattr__"] = _refuse_assignment
        metaclass: Any = type(cls)
        view_class = metaclass(cls.__name__, (_Quiet, cls), namespace)
        view = object.__new__(view_class)
        vars(view).update(vars(module), _rewire_path=path)
        return view

    def tensor(self, path: str) -> fx.Proxy:
        """A parameter or buffer, read once."""
        if path not in self._tensors:
            self._tensors[path] = self.create_proxy("get_attr", path, (), {})
        return self._tensors[path]

    def _read_attribute(self, path: str, view: nn.Module) -> Any:
        """An attribute that may change between calls, as it is when the forward runs."""
        proxy = self.create_proxy("get_attr", path, (), {})
        name = path.rpartition(".")[2]
        proxy.node.meta["dynamic"] = name != "training"
        if name in view.__dict__ and view.__dict__[name] is None:
            # ``is None`` cannot be traced: take the branch of today, and refuse to run once it is another.
            changed = self.create_proxy("call_function", operator.is_not, (proxy, None), {})
            self.create_proxy("call_function", refuse, (changed, True, f"'{name}' was set after the rewrite"), {})
            return None
        return proxy

    def _opaque_method(self, name: str) -> Callable[..., fx.Proxy]:
        def record(_view: nn.Module, *args: Any, **kwargs: Any) -> fx.Proxy:
            # A method of the module prints like a call of a child of that name.
            return self.create_proxy("call_module", name, args, kwargs)

        return record

    def call_child(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        path = self.paths.get(module)
        if path is None:
            raise TraceError(f"it calls a {type(module).__name__} that is not one of its children")
        if sum(map(_has_proxy, (*args, *kwargs.values()))) > 1 and self.inline(module):
            function, wrappers = plain_forward(type(module))
            if not (wrappers or module._forward_hooks or module._forward_pre_hooks):
                return function(self.view_of(module, path), *args, **kwargs)
        return self.create_proxy("call_module", path, args, kwargs)

    def branches(self) -> list[tuple[fx.Node, bool]]:
        """The tests on traced values that were decided, in order."""
        return [(node, outcome) for node, outcome in self.taken if not _tests_float16(node)]

    # -- torch.fx hooks ---------------------------------------------------------------------------------------------

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Decide a test on a traced value; the same value is decided once."""
        node = obj.node
        for known, outcome in self.taken:
            if known is node:
                return outcome
        if _tests_float16(node):
            # Blocks clamp their states in float16 only. One guard instead of a second copy of the rest of the block.
            outcome = node.target is operator.ne
            self.taken.append((node, outcome))
            self.create_proxy(
                "call_function", refuse, (obj, not outcome, "float16 states; use bfloat16 or float32"), {}
            )
            return outcome
        callee = self._called_by_forward([frame for frame, _ in traceback.walk_stack(None)][::-1])
        if callee is not None:  # tests inside helpers would multiply the paths
            raise Opaque(*callee, TraceError("it tests a traced value"))
        asked = self.branches()
        if len(asked) >= MAX_DECISIONS:
            raise TraceError("it tests traced values too often (a loop over a traced value?)")
        outcome = self.decisions[len(asked)] if len(asked) < len(self.decisions) else False
        node.meta["tested"] = True
        self.taken.append((node, outcome))
        return outcome

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, fx.Proxy):
            return a.node
        if a is None or isinstance(a, (bool, int, float, str)):
            return a
        if isinstance(a, nn.Module):
            path = a.__dict__.get("_rewire_path", self.paths.get(a))
            if path is None:
                raise TraceError(f"it hands on a {type(a).__name__} that is not one of its children")
            return self.create_node("get_attr", path, (), {})
        if isinstance(a, torch.Tensor):
            tensors = (*self.root.named_parameters(remove_duplicate=False), *self.root.named_buffers())
            path = next((path for path, tensor in tensors if tensor is a), None)
            if path is None:
                raise TraceError("it makes a constant tensor")
            return self.create_node("get_attr", path, (), {})
        if dataclasses.is_dataclass(a) and not isinstance(a, (type, dict)):
            raise TraceError(f"it hands on a {type(a).__name__}")  # torch.fx would construct a new one
        if isinstance(a, (FunctionType, type)) or inspect.isbuiltin(a):
            return self._originals.get(a, a)
        return super().create_arg(a)


class _ViewedTensors:
    """Attribute lookup of a stand-in: its parameters and buffers are traced values."""

    @staticmethod
    def read(view: nn.Module, tracer: PathTracer, prefix: str, name: str) -> Any:
        for table in ("_parameters", "_buffers"):
            if view.__dict__.get(table, {}).get(name) is not None:
                return tracer.tensor(prefix + name)
        return nn.Module.__getattr__(view, name)


def _refuse_assignment(view: nn.Module, name: str, value: Any) -> None:
    raise TraceError(f"it assigns self.{name}, which a traced forward would leave out")


class _Quiet:
    """Keeps base classes' ``__init_subclass__`` from acting on the stand-ins for ``self``."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass


def _isinstance(value: Any, classes: Any) -> Any:
    """``isinstance``, recorded for a traced value by the value's own tracer: traces may be nested."""
    if isinstance(value, fx.Proxy):
        return value.tracer.create_proxy("call_function", isinstance, (value, classes), {})
    return isinstance(value, classes)


def _has_proxy(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_has_proxy, value))
    if isinstance(value, dict):
        return any(map(_has_proxy, value.values()))
    return isinstance(value, fx.Proxy)


def _is_plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str, tuple, type(None)))


def _tests_float16(node: fx.Node) -> bool:
    return node.target in (operator.eq, operator.ne) and torch.float16 in node.args
