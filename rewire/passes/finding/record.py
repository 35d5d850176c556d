"""Finder's front end: run a model and record what it computes.

The recorder is a torch function mode of this thread, on a private copy of the model (`copies.private`). Other threads
do not see it, and the caller's model does not change.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

from rewire.code.functions import forward_of
from rewire.code.text import written_at
from rewire.conventions import is_matrix
from rewire.copies import Inputs, shared
from rewire.errors import UnsupportedCall
from rewire.passes.finding.adds import ACCUMULATED, CASTS, UNSCALED, VIEWS
from rewire.passes.finding.flow import (
    CONTAINERS,
    ELEMENTWISE,
    KERNEL,
    Args,
    Flow,
    Holder,
    Kwargs,
    Op,
    Place,
    Scope,
    kind_of,
    makes_alike,
    places_of,
    plain_name,
    reached,
)
from rewire.passes.finding.frames import Frames
from rewire.passes.finding.holders import holders, storage
from rewire.runtime.nested import attributes, parts_by_name
from rewire.runtime.reentrant import forwards, where_reentrant
from rewire.torch_internals import HIGHER_ORDER, gradient_of, pytree, viewed, writes_to
from rewire.trunk import LeftAlone

_REFLECTED = {"radd", "rmul"}
#: Operators of torch's control flow that it traces even in eager mode.
_CONTROL_FLOW = {"cond", "while_loop", "map_impl", "scan"}
#: Functions that read the value of a tensor.
_DECIDED: dict[str, type] = {"item": int, "__bool__": bool, "__int__": int, "__float__": float, "__index__": int}
GUESSED = "it decides by the value of a tensor, which the meta device does not have: one way only was looked at"
#: Where keyword arguments stand among an operation's inputs: ``torch.index_add(x, dim=0, source=f, index=rows)``.
_KEYWORDS = {"input": 0, "source": 2, "src": 2, "values": 2}
_FACTORS = {"mul", "multiply", "div", "divide", "truediv", "true_divide"}
#: Functions that allocate memory. In an autograd function kernels fill it, and no operation shows how.
_MEMORY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "zeros", "zeros_like", "new_zeros"}
_SIZED = {"view", "reshape", "unflatten", "split", "chunk", "split_with_sizes", "tensor_split"}


def record(model: nn.Module, inputs: Inputs) -> Flow:
    """Run a private copy of a model in its present mode and record its operations; the run may write to ``inputs``."""
    before = shared(model)
    recorder = Recorder(model)
    with recorder.running():
        model(*inputs[0], **inputs[1])
    known = dict(model.named_modules())
    containers = lambda path: isinstance(known.get(path), CONTAINERS)  # noqa: E731
    flow = Flow(model, recorder.ops, containers=containers, held=recorder.held, casts=recorder.casts)
    flow.before, flow.hooked = before, recorder.hooked
    flow.tensors, flow.unseen, flow.guessed = recorder.made, recorder.unseen, recorder.guessed
    flow.strange, flow.read_later = recorder.strange, recorder.ops_read_later()
    return flow


class Recorder(TorchFunctionMode):
    """Records the torch functions that this thread calls, and the calls of a model's modules."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.ops: list[Op] = []
        self.known: dict[int, Op] = {}  # by the id of the tensor
        self.paths: dict[nn.Module, str] = {}
        for path, module in model.named_modules():
            self.paths.setdefault(module, path)
        weights = [*model.named_parameters(), *model.named_buffers()]
        self.weights = {id(tensor): name for name, tensor in weights}
        #: Keeps ids from being reused: some forwards replace a buffer.
        self.kept: list[Tensor] = [tensor for _, tensor in weights]
        self.held: dict[Op, list[Holder]] = {}
        self.read_later: dict[Op, set[int]] = {}  # for in-place operations: memory of tensors in variables
        self.casts: list[tuple[Scope, Place, Op]] = []
        self.hooked: dict[Op, Place | None] = {}
        #: The result of each operation.
        self.made: list[Tensor] = []
        self.stack: list[Scope] = []
        self.functions: dict[CodeType | None, bool] = {}  # helper code -> whether it is an autograd function's forward
        self.kernels: set[Scope] = set()  # calls of autograd functions that allocate memory for kernels
        self.unseen, self.strange = "", False
        self.guessed: LeftAlone | None = None
        self.frames = Frames(self._argument_ops, self._module_of)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Hook the modules and record what runs in this context."""
        handles: list[Any] = []
        for module in self.paths:
            handles.append(module.register_forward_pre_hook(self._entered, with_kwargs=True))
            handles.append(module.register_forward_hook(self._left, prepend=True, always_call=True))
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()
            self.frames.clear()

    def _entered(self, module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        caller, place = self.frames.caller(self.stack, sys._getframe(1))
        parent = caller if self.stack else None
        code = forward_of(module).code
        scope = Scope(parent, self.paths[module], module, kind_of(module), code, place, key=object())
        self.stack.append(scope)
        bound = dict(_bound(code, args, kwargs))
        scope.arguments = {name: self._argument_ops(value, caller) for name, value in bound.items()}
        scope.places = {name: places_of(value) for name, value in bound.items()}
        self.strange = self.strange and parent is not None  # what the model itself is given is not strange

    def _module_of(self, value: object) -> tuple[str, nn.Module] | None:
        return (self.paths[value], value) if isinstance(value, nn.Module) and value in self.paths else None

    def _left(self, module: nn.Module, args: Args, output: object) -> Any:
        scope = self.stack.pop()
        given = tuple(dict.fromkeys(op for ops in scope.arguments.values() for op in ops))
        for tensor in tensors_of(output):
            if id(tensor) not in self.weights and self._is_unseen(tensor, scope):  # the module is a leaf
                op = self._new(tensor, scope.path.rpartition(".")[2], given, scope, None)
                op.leaf = module
                op.matrices = sum(is_matrix(p.shape) or _is_packed(p) for p in module.parameters())
                if gradient_of(tensor) is not None and next(module.children(), None) is not None:
                    self.unseen = self.unseen or f"no operation made what '{scope.path}' returns (TorchScript?)"
        scope.results, scope.returned = self._ops(output), places_of(output)
        scope.returns_more = not isinstance(output, Tensor)

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = tensors_of(args) + tensors_of(kwargs)
        decided = _DECIDED.get(getattr(func, "__name__", ""))
        if decided is not None and given and given[0].is_meta:  # the value does not exist
            if self.guessed is None and _is_from_outside(self._op(given[0])):
                scope, place = self.frames.caller(self.stack, sys._getframe(1))
                self.guessed = LeftAlone(scope.path, GUESSED, *written_at(place))
            return decided(0)
        if isinstance(func, HIGHER_ORDER) and str(func) in _CONTROL_FLOW:
            raise UnsupportedCall(self._traced_by_torch(str(func)))
        before = [_version(tensor) for tensor in given]
        result = func(*args, **kwargs)
        name = plain_name(str(getattr(func, "__name__", func)))
        written = [t for t, v in zip(given, before, strict=True) if _version(t) != v and id(t) not in self.weights]
        if name == "setitem" and written:  # the stored value, perhaps a view of the target, is not written to
            written = [] if self._is_stored(args[0], args[2]) else written[:1]
        made = [t for t in tensors_of(result) if id(t) not in self.known and id(t) not in self.weights]
        if not written and not made:
            if name in CASTS and given and result is given[0] and id(result) in self.known:
                scope, place = self.frames.caller(self.stack, sys._getframe(1))
                self.casts += [(scope, place, self.known[id(result)])] if place else []
            if name == "register_hook" and id(args[0]) in self.known:
                self.hooked[self.known[id(args[0])]] = self.frames.caller(self.stack, sys._getframe(1))[1]
            return result
        scope, place = self.frames.caller(self.stack, sys._getframe(1))
        self.unseen = self.unseen or self._unseen(given, place)
        for tensor in given:
            self._look_for(tensor, scope)
        read = given[:1] if name.endswith("_as") else given  # the second operand only gives the size or dtype
        order = {id(kwargs[key]): place for key, place in _KEYWORDS.items() if key in kwargs}
        read = sorted(read, key=lambda tensor: order.get(id(tensor), 1))
        inputs = [self._op(tensor) for tensor in read]
        weights = sum(_is_weight(op, t) for op, t in zip(inputs, read, strict=True))
        constant = bool(inputs) and all(op.constant for op in inputs)
        if name in _REFLECTED:
            name, inputs = name[1:], inputs[::-1]
        if name in _FACTORS and _is_by_one(args):
            name = UNSCALED
        if isinstance(result, Tensor) and len(given) == 1 and not written and _is_whole(given[0], result, func):
            name = "view" if given[0].stride() == result.stride() else "permute"  # `x.mT`, einsum("bij->bji", x)
        if name == "index_put" and (True in args[3:] or kwargs.get("accumulate")):
            name = ACCUMULATED
        if makes_alike(name):
            inputs, constant, weights = [], False, 0
        if not inputs and name in _MEMORY and (function := self._function(scope)):
            self.kernels.add(function)
        count = 0 if name in ELEMENTWISE else weights
        call = (func, self._with_ops(args), self._with_ops(kwargs))
        places = {id(t): ~n for n, t in enumerate(given)} | {id(t): n for n, t in enumerate(tensors_of(result))}
        for tensor in {id(t): t for t in (*written, *made)}.values():
            over = any(tensor is t for t in written)
            wholes = self._viewed(tensor) if over else []
            op = self._new(tensor, name, tuple(inputs), scope, place)
            op.matrices, op.constant, op.call, op.item = count, constant, call, places[id(tensor)]
            op.scale = kwargs.get("alpha") if name == "add" else None
            if name in _SIZED:
                op.sizes = (*args[1:], *kwargs.values())
            if name in ("getitem", "setitem"):
                op.selected = (self._with_ops(args[1]),)
            if name == "setitem" and inputs[-1].name == "add" and _repeats(args[0], args[1]):
                op.selected = None
            if over:
                read_again = [*holders(sys._getframe(1), record.__code__, self.known)]
                self.held[op] = [holder for memory, holder in read_again if memory == storage(tensor)]
                self.read_later[op] = {memory for memory, _ in read_again}
            for whole in wholes:  # the tensors that it is a view of have changed, too
                op = self._new(whole, "setitem", (self.known[id(whole)], op), scope, place)
        return result

    def ops_read_later(self) -> dict[Op, set[Op]]:
        """See `Flow.read_later`."""
        of_memory: dict[int, set[Op]] = {}
        for op, tensor in zip(self.ops, self.made, strict=True) if self.read_later else ():
            of_memory.setdefault(storage(tensor), set()).add(op)
        return {
            op: set[Op]().union(*(of_memory.get(each, ()) for each in memory)) for op, memory in self.read_later.items()
        }

    def _traced_by_torch(self, name: str) -> str:
        where, written = written_at(self.frames.caller(self.stack, sys._getframe(2))[1])
        return (
            f"{type(self.model).__name__} calls torch's `{name.removesuffix('_impl')}`: `{written}` ({where}). torch "
            "traces such a call wherever it runs, so rewire cannot record what happens in it. Write it with Python's "
            "`if` or `for`."
        )

    def _look_for(self, tensor: Tensor, scope: Scope) -> None:
        """Register a tensor, passed to a call, that an autograd function or TorchScript made out of sight."""
        if id(tensor) in self.weights or isinstance(tensor, nn.Parameter):
            return
        op = self.known.get(id(tensor))
        made_in, here = None if op is None else self._function(op.scope), self._function(scope)
        if op is None and here is not None:
            self._new(tensor, KERNEL, (), scope, None)
            self.kernels.add(here)
        elif op is None:
            self._by_kernel(tensor, self._behind(tensor), scope, None)
        elif made_in is not None and made_in is not here and self._is_hidden(op, made_in):
            given = [source for ops in made_in.arguments.values() for source in ops]
            self._by_kernel(tensor, given, made_in.parent or scope, made_in.call)

    def _by_kernel(self, tensor: Tensor, given: Sequence[Op], scope: Scope, place: Place | None) -> None:
        """Register a result of an autograd function whose kernels compute it from ``given``, unless that is empty."""
        if given:
            op = self._new(tensor, KERNEL, tuple(dict.fromkeys(given)), scope, place)
            op.constant = all(source.constant for source in given)
            op.matrices = sum(_is_weight(source, self.made[source.index]) for source in given)

    def _function(self, scope: Scope) -> Scope | None:
        """The outermost autograd function's forward around ``scope`` with no module in between, if there is one."""
        found = None
        for call in itertools.takewhile(lambda call: call.helper and call.code is not None, scope.outward()):
            if call.code not in self.functions:
                self.functions[call.code] = call.code in forwards()
            found = call if self.functions[call.code] else found
        return found

    def _is_unseen(self, tensor: Tensor, scope: Scope) -> bool:
        """Whether a module itself, and not a child of it, made what it returns without visible operations."""
        op = self.known.get(id(tensor))
        if op is None or scope.module is None or next(scope.module.children(), None) is not None:
            return op is None
        made_in = self._function(op.scope)
        return made_in is not None and made_in.modules()[-1] is scope and self._is_hidden(op, made_in)

    def _is_hidden(self, op: Op, function: Scope) -> bool:
        """Whether an autograd function has arguments from which, as far as operations show, ``op`` is not computed."""
        if function not in self.kernels:
            return False
        inside = reached([op], lambda made: made.inputs if made is op or self._function(made.scope) is function else ())
        given = {source for ops in function.arguments.values() for source in ops}
        return any(not s.constant and self.made[s.index].is_floating_point() for s in given - inside)

    def _behind(self, tensor: Tensor) -> list[Op]:
        """The inputs of the autograd function or TorchScript that made a tensor, found through its gradient's node."""
        node: Any = gradient_of(tensor)
        if node is None:
            return []
        made = {gradient_of(t): self.known[id(t)] for t in self.made}
        made.pop(None, None)
        todo, found, seen = [node], list[Op](), set[Any]()
        while todo:
            for function, _ in todo.pop().next_functions:
                leaf: Any = getattr(function, "variable", None)
                if function in made or id(leaf) in self.weights or id(leaf) in self.known:
                    found.append(made[function] if function in made else self._op(leaf))
                elif function is not None and function not in seen:
                    seen.add(function)
                    todo.append(function)
        return [*dict.fromkeys(found)]

    def _unseen(self, given: Sequence[Tensor], place: Place | None) -> str:
        """Why tensors that nothing here made are a sign of unseen code, with the place that reads them; else empty."""
        unknown = [tensor for tensor in given if id(tensor) not in self.known and id(tensor) not in self.weights]
        unknown = [tensor for tensor in unknown if not isinstance(gradient_of(tensor), BackwardCFunction)]
        if not unknown:
            return ""
        where, written = written_at(place)
        if any(isinstance(tensor, nn.Parameter) for tensor in unknown):
            return (
                f"`{written}` ({where}) reads a parameter that does not belong to the model's copy: a closure, a list "
                "of functions or a global holds modules of the original"
            )
        if any(gradient_of(tensor) is not None for tensor in unknown):
            return (
                f"`{written}` ({where}) reads a value from code whose operations rewire cannot see (TorchScript, for "
                "example)"
            )
        return ""

    def _viewed(self, tensor: Tensor) -> list[Tensor]:
        """The tensors that a tensor is a view of, and whose operations are known, innermost first."""
        op, base, memory = self.known.get(id(tensor)), viewed(tensor), storage(tensor)
        if op is None or base is None:
            return []
        found: list[Tensor] = []
        while op.inputs and storage(self.made[op.inputs[0].index]) == memory:
            op = op.inputs[0]
            found += [self.made[op.index]]
        found += [base] if id(base) in self.known else []
        return [*{id(t): t for t in found if t is not tensor}.values()]

    def _is_stored(self, whole: Tensor, part: object) -> bool:
        """Whether ``part`` is an already updated view of ``whole``: ``x[:, 1:] += f`` stores it a second time."""
        known, stored = self.known.get(id(whole)), self.known.get(id(part))
        return stored is not None and known is not None and known.name == "setitem" and known.inputs[-1] is stored

    def _new(self, tensor: Tensor, name: str, inputs: tuple[Op, ...], scope: Scope, place: Place | None) -> Op:
        shape = None if tensor.is_nested else tensor.shape  # sizes of nested tensors are no numbers
        op = Op(len(self.ops), name, inputs, scope, place, shape=shape, dtype=tensor.dtype)
        op.recorded = torch.is_grad_enabled()
        if not op.recorded and name == "add":
            op.reentrant = where_reentrant()
        self.ops.append(op)
        self.made.append(tensor)
        self.known[id(tensor)] = op
        return op

    def _op(self, tensor: Tensor) -> Op:
        """The operation that made ``tensor``; a new one without inputs if the tensor comes from outside."""
        known = self.known.get(id(tensor))
        if known is None:
            scope = self.stack[0] if self.stack else Scope(None, "")
            weight = self.weights.get(id(tensor), "")
            self.strange = self.strange or (not weight and tensor.is_floating_point())
            known = self._new(tensor, "weight" if weight else "input", (), scope, None)
            known.constant, known.parameter = bool(weight), weight
        return known

    def _with_ops(self, value: Any) -> Any:
        """The arguments, with operations in place of tensors."""
        if isinstance(value, Tensor):
            return self._op(value)
        if type(value) in (tuple, list):
            return type(value)(map(self._with_ops, value))
        return {name: self._with_ops(item) for name, item in value.items()} if type(value) is dict else value

    def _argument_ops(self, value: object, scope: Scope) -> list[Op]:
        """The operations that made the tensors in a function's argument."""
        for tensor in tensors_of(value):
            self._look_for(tensor, scope)
        return self._ops(value)

    def _ops(self, value: object) -> list[Op]:
        return [self._op(tensor) for tensor in tensors_of(value)]


def _is_whole(x: Tensor, view: Tensor, function: Callable[..., Any]) -> bool:
    """Whether ``view`` is all of ``x`` in the same memory, through a function whose name does not say so.

    Functions that cut gradients do not count; nor does ``as_strided``, as other states may have other strides.
    """
    attribute = getattr(getattr(function, "__self__", None), "__name__", "")  # for ``Tensor.mT.__get__``
    name = attribute or plain_name(str(getattr(function, "__name__", "")))
    if name in (*VIEWS, "detach", "data", "getitem", "as_strided") or x.numel() != view.numel():
        return False
    return x.dtype == view.dtype and x.requires_grad == view.requires_grad and storage(x) == storage(view)


def _is_by_one(args: Args) -> bool:
    """Whether a product or quotient has the Python number 1 as its second operand, and so changes nothing."""
    return len(args) == 2 and isinstance(args[0], Tensor) and isinstance(args[1], int | float) and args[1] == 1


def _repeats(x: Tensor, index: Any) -> bool:
    """Whether ``x[index]`` names a place of ``x`` twice; False on the meta device, where that is unknown."""
    if not any(t.dtype not in (torch.bool, torch.uint8) for t in tensors_of(index)) or x.is_meta:
        return False
    places = torch.arange(x.numel(), device=x.device).view(x.shape)[index]
    return places.unique().numel() < places.numel()


def _is_from_outside(op: Op) -> bool:
    """Whether an operation depends on inputs or weights, rather than on numbers alone."""
    return any(each.constant or each.name == "input" for each in reached([op], lambda each: each.inputs))


def _bound(code: CodeType | None, args: Args, kwargs: Kwargs) -> Iterator[tuple[str, Any]]:
    """The arguments of a forward with the names of their parameters."""
    if code is None:
        yield from (("", value) for value in (*args, *kwargs.values()))
        return
    names = code.co_varnames[1 : code.co_argcount]
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    yield from zip(names, args, strict=False)
    if len(args) > len(names) and code.co_flags & inspect.CO_VARARGS:
        yield code.co_varnames[len(parameters)], args[len(names) :]
    yield from ((name, value) for name, value in kwargs.items() if name in parameters)
    keywords = {name: value for name, value in kwargs.items() if name not in parameters}
    if keywords:
        place = len(parameters) + bool(code.co_flags & inspect.CO_VARARGS)
        yield code.co_varnames[place] if code.co_flags & inspect.CO_VARKEYWORDS else "", keywords


def tensors_of(value: object) -> list[Tensor]:
    """The tensors in arguments or a result, also in dataclasses, which pytrees may not know."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors_of(item)]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in tensors_of(item)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # getattr may run the user's code (per-layer configs of transformers raise): read the stored attributes
        return [tensor for item in attributes(value).values() for tensor in tensors_of(item)]
    known = type(value) in pytree.SUPPORTED_NODES
    leaves = pytree.tree_leaves(value) if known else parts_by_name(value).values()
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _is_weight(op: Op, tensor: Tensor) -> bool:
    """Whether a tensor mixes channels: a matrix of the model, or bytes of a packed one, wherever a layer keeps them."""
    return (op.constant and is_matrix(tensor.shape)) or (_is_packed(tensor) and (op.constant or op.name == "input"))


def _is_packed(tensor: Tensor) -> bool:
    """Whether a tensor may be a matrix of a quantised layer, which packs it into one column of bytes."""
    return tensor.dtype in (torch.uint8, torch.int8) and tensor.numel() > 1


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else writes_to(tensor)
