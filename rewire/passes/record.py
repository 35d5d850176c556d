"""Finder's front end: run a model and record what it computes.

The recorder is a mode of this thread and looks at a copy of the model (`copies.private`): nobody else sees it, and
nothing of the caller's changes.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from rewire.passes.flow import CONTAINERS, ELEMENTWISE, Flow, Op, Place, Scope, is_matrix, matrices, plain_name
from rewire.passes.functions import forward_of
from rewire.passes.text import holds
from rewire.patterns.pattern import Inputs

#: Where frames are not the user's: torch's own functions between a forward and an operation.
_LIBRARY = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)
_REFLECTED = {"radd", "rmul"}
_SIZED = {"view", "reshape", "unflatten", "split", "chunk", "split_with_sizes", "tensor_split"}


def record(model: nn.Module, inputs: Inputs) -> Flow:
    """Run ``model`` on ``inputs``, in its present mode, and record its operations.

    Args:
        model: a copy that nobody else uses: hooks are put on its modules.
        inputs: positional and keyword arguments; they may be written to.
    """
    recorder = Recorder(model)
    handles = recorder.attach()
    try:
        with recorder:
            model(*inputs[0], **inputs[1])
    finally:
        for handle in handles:
            handle.remove()
        recorder.frames.clear()
    known = dict(model.named_modules())
    return Flow(model, recorder.ops, containers=lambda path: isinstance(known.get(path), CONTAINERS))


class Recorder(TorchFunctionMode):
    """Records the torch functions that this thread calls, and the calls of a model's modules."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.ops: list[Op] = []
        self.known: dict[int, Op] = {}  # by the tensor's id
        self.kept: list[Tensor] = []  # so that ids are not used again
        self.paths: dict[nn.Module, str] = {}
        for path, module in model.named_modules():
            self.paths.setdefault(module, path)
        weights = (*model.parameters(), *model.buffers())
        self.weights = {id(tensor): tensor for tensor in weights}
        self.stack: list[Scope] = []
        self.helpers: dict[tuple[Scope, int], Scope] = {}  # by the frame's id
        self.frames: list[FrameType] = []  # so that those are not used again either

    def attach(self) -> list[Any]:
        """Hook the modules: what follows `__enter__` is recorded; the handles undo it."""
        handles: list[Any] = []
        for module in self.paths:
            handles.append(module.register_forward_pre_hook(self._entered, with_kwargs=True))
            handles.append(module.register_forward_hook(self._left, prepend=True, always_call=True))
        return handles

    # -- calls of modules ----------------------------------------------------------------------------------------------

    def _entered(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        parent, place = self._caller(sys._getframe(1))
        code = forward_of(module).code
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        scope = Scope(parent, self.paths[module], module, kind, code, place, key=len(self.helpers))
        self.helpers[scope, 0] = scope  # counts the calls
        self.stack.append(scope)
        scope.arguments = {name: self._ops(value) for name, value in _bound(code, module, args, kwargs)}

    def _left(self, module: nn.Module, args: Any, output: Any) -> None:
        scope = self.stack.pop()
        given = tuple(dict.fromkeys(op for ops in scope.arguments.values() for op in ops))
        for tensor in _tensors(output):
            if id(tensor) not in self.known and id(tensor) not in self.weights:  # made by what the recorder does not see: the module is a leaf
                caller = scope.parent or scope
                name = scope.path.removeprefix(caller.path).lstrip(".")
                op = self._new(tensor, name, given, caller, scope.call)
                op.leaf, op.matrices = module, matrices(module)

    # -- operations ----------------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = _tensors(args) + _tensors(kwargs)
        before = [_version(tensor) for tensor in given]
        result = func(*args, **kwargs)
        name = plain_name(str(getattr(func, "__name__", func)))
        written = [t for t, v in zip(given, before, strict=True) if _version(t) != v and id(t) not in self.weights]
        made = [t for t in _tensors(result) if id(t) not in self.known and id(t) not in self.weights]
        if not written and not made:
            return result
        scope, place = self._caller(sys._getframe(1))
        inputs = [self._op(tensor) for tensor in given]
        weights = sum(op.constant and is_matrix(t.shape) for op, t in zip(inputs, given, strict=True))
        constant = bool(inputs) and all(op.constant for op in inputs)
        if name in _REFLECTED:
            name, inputs = name[1:], inputs[::-1]
        count = 0 if name in ELEMENTWISE else weights
        for tensor in {id(t): t for t in (*written, *made)}.values():
            overwrites = any(tensor is t for t in written)
            op = self._new(tensor, name, tuple(inputs), scope, place)
            op.matrices, op.constant, op.overwrites = count, constant, overwrites
            op.scale = kwargs.get("alpha") if name == "add" else None
            if name in _SIZED:
                op.sizes = (*args[1:], *kwargs.values())
            base = tensor._base if overwrites else None
            if base is not None and id(base) in self.known:  # a view: what it is a view of has changed
                whole = self._new(base, name, (self.known[id(base)], op), scope, place)
                whole.overwrites = True
        return result

    def _new(self, tensor: Tensor, name: str, inputs: tuple[Op, ...], scope: Scope, place: Place | None) -> Op:
        op = Op(len(self.ops), name, inputs, scope, place, shape=tensor.shape, dtype=tensor.dtype)
        self.ops.append(op)
        self.kept.append(tensor)
        self.known[id(tensor)] = op
        return op

    def _op(self, tensor: Tensor) -> Op:
        """The operation that made ``tensor``; one without inputs if it comes from outside."""
        known = self.known.get(id(tensor))
        if known is None:
            scope = self.stack[0] if self.stack else Scope(None, "")
            weight = id(tensor) in self.weights
            known = self._new(tensor, "weight" if weight else "input", (), scope, None)
            known.constant = weight
        return known

    def _ops(self, value: Any) -> list[Op]:
        return [self._op(tensor) for tensor in _tensors(value)]

    # -- where ---------------------------------------------------------------------------------------------------------

    def _caller(self, frame: FrameType | None) -> tuple[Scope, Place | None]:
        """The call of a function that ``frame`` was called from, and where in that function."""
        if not self.stack:
            return Scope(None, ""), None
        scope = self.stack[-1]
        frames: list[FrameType] = []
        while frame is not None and frame.f_code is not scope.code and scope.code is not None:
            if not frame.f_code.co_filename.startswith(_LIBRARY) or _is_method(scope, frame.f_code):
                frames.append(frame)
            frame = frame.f_back
        if frame is None or scope.code is None:  # its forward is no Python function
            return scope, None
        place = frame.f_code, frame.f_lasti
        for inner in reversed(frames):
            if scope.code is None or not holds(scope.code, inner.f_code):  # else it is a comprehension, or a closure
                scope = self._helper(scope, place, inner)
            place = inner.f_code, inner.f_lasti
        return scope, place

    def _helper(self, scope: Scope, place: Place, frame: FrameType) -> Scope:
        """The call of a function that a forward calls."""
        key = scope, id(frame)
        if key not in self.helpers:
            self.frames.append(frame)
            helper = Scope(scope, scope.path, scope.module, scope.kind, frame.f_code, place, True, key=len(self.helpers))
            self.helpers[key] = helper
            helper.arguments = {name: self._ops(value) for name, value in _locals(frame)}
        return self.helpers[key]


def _is_method(scope: Scope, code: CodeType) -> bool:
    """Whether a function of torch's is a method of the module whose forward calls it (`_sa_block`)."""
    if hasattr(nn.Module, code.co_name):
        return False
    return getattr(getattr(type(scope.module), code.co_name, None), "__code__", None) is code


def _bound(
    code: CodeType | None, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[str, Any]]:
    """The arguments of a forward by the names of its parameters."""
    if code is None:
        yield from (("", value) for value in (*args, *kwargs.values()))
        return
    names = code.co_varnames[1 : code.co_argcount]
    yield from zip(names, args, strict=False)
    if len(args) > len(names) and code.co_flags & inspect.CO_VARARGS:
        yield code.co_varnames[code.co_argcount + code.co_kwonlyargcount], args[len(names) :]
    yield from kwargs.items()


def _locals(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """The parameters of a function that has just been entered."""
    code, values = frame.f_code, frame.f_locals
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    yield from ((name, values[name]) for name in code.co_varnames[:count] if name in values)


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in arguments or a result: in containers, and in dataclasses (which pytrees may not know)."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in _tensors(item)]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [tensor for field in dataclasses.fields(value) for tensor in _tensors(getattr(value, field.name, None))]
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)] if _is_node(value) else []


def _is_node(value: Any) -> bool:
    return type(value) in torch.utils._pytree.SUPPORTED_NODES


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
