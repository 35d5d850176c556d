"""What a model computes, as the finder sees it: operations on tensors, and the function calls in which they run.

All ways of looking at a model give a `Flow`: a run under the recorder (`record`), a symbolic trace (`follow`), and the
flat graphs of torch.compile and torch.export (`graphs`). Each operation knows its inputs, how many weight matrices it
reads, and, where the code is known, its expression in the source.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from rewire.runtime.nested import attributes, parts_by_name
from rewire.trunk import LeftAlone

#: Elementwise operations and the like: with a table of weights (a position embedding, a mask) they mix no channels.
ELEMENTWISE = frozenset(
    {"add", "sub", "rsub", "mul", "div", "true_divide", "floor_divide", "pow", "lerp", "addcmul", "addcdiv", "copy"}
    | {"where", "masked_fill", "maximum", "minimum", "clamp", "eq", "ne", "lt", "gt", "le", "ge"}
    | {"cat", "concat", "stack", "chunk", "split", "unbind", "narrow", "roll"}
    | {"index_select", "getitem", "setitem", "gather", "expand", "expand_as", "repeat"}
    | {"to", "type_as", "float", "contiguous", "clone", "detach", "requires_grad_"}
    | {"view", "reshape", "flatten", "unflatten", "transpose", "permute", "squeeze", "unsqueeze", "t"}
    | {"mean", "sum", "softmax", "norm", "layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm"}
)
#: Operations that mix positions without weights (FNet, PoolFormer). They make a branch as weights do.
MIXING = ("fft", "fourier", "pool")

_DRAWS = re.compile(r"^(rand|bernoulli|multinomial|normal$|uniform$|dropout|exponential$)")
_NEW = frozenset({"new_zeros", "new_ones", "new_empty", "new_full"})

#: An instruction: the code of a function, or of one nested in it (a comprehension), and the offset in it.
Place: TypeAlias = tuple[CodeType, int]
#: Arguments of a call, by position and by name.
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]


@dataclasses.dataclass(eq=False, slots=True)
class Scope:
    """One call of a function: a module's forward, or a function or method that it calls.

    Attributes:
        parent: the calling scope; None for the model's own forward.
        path: from the model's root, of the module whose forward this is or belongs to.
        module: that module; None where only its path is known.
        kind: class of that module, as text.
        code: of the function; None if it is no Python function, or unknown.
        call: the place of the call in the parent's code; None if unknown.
        helper: whether it is a function that a forward calls, rather than a forward.
        bare: whether it is a forward that was called as a function, rather than through its module.
        checkpointed: whether it is a helper that activation checkpointing runs, to which the parent passes it.
        arguments: parameters that hold tensors: name -> the operations that made them.
        places: of parameters that are containers: name -> the indices, keys and fields that lead to each of these.
        results: the operations that made the returned tensors, where known.
        returned: the indices, keys and fields that lead to each of these in what was returned.
        returns_more: whether it returned anything else than one tensor.
        namespace: globals of a helper.
        again: code of nested functions that activation checkpointing runs, and reruns -> where they are passed to it.
        key: distinguishes calls with the same parent.
    """

    parent: Scope | None
    path: str
    module: nn.Module | None = None
    kind: str = ""
    code: CodeType | None = None
    call: Place | None = None
    helper: bool = False
    bare: bool = False
    checkpointed: bool = False
    arguments: dict[str, list[Op]] = dataclasses.field(default_factory=dict)
    places: dict[str, list[tuple[Any, ...]]] = dataclasses.field(default_factory=dict)
    results: list[Op] = dataclasses.field(default_factory=list)
    returned: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)
    returns_more: bool = False
    namespace: dict[str, Any] = dataclasses.field(default_factory=dict)
    again: dict[CodeType, Place] = dataclasses.field(default_factory=dict)
    key: Any = None
    _modules: list[Scope] | None = dataclasses.field(default=None, init=False, repr=False)

    def outward(self) -> Iterator[Scope]:
        """This call and those around it, innermost first."""
        scope: Scope | None = self
        while scope is not None:
            yield scope
            scope = scope.parent

    def chain(self) -> list[Scope]:
        """This call and those around it, outermost first."""
        return [*self.outward()][::-1]

    def modules(self) -> list[Scope]:
        """The calls in `chain` that are forwards of modules."""
        if self._modules is None:
            self._modules = [scope for scope in self.chain() if not scope.helper]
        return self._modules

    def holds(self, other: Scope) -> bool:
        """Whether ``other`` is this call, or was made inside it."""
        scope: Scope | None = other
        while scope is not None:
            if scope is self:
                return True
            scope = scope.parent
        return False


#: Name of an operation inside an autograd function that a kernel or C++ does, so that no torch operations show it.
KERNEL = "kernel"


@dataclasses.dataclass(eq=False, slots=True)
class Op:
    """One tensor, and the operation that made it.

    Attributes:
        index: position in the order of execution.
        name: of the operation: ``add``, ``linear``; for a leaf, the path of the module relative to its caller.
        inputs: the operations that made its operands, without parameters and buffers.
        scope: the call in which it runs.
        place: its place in the scope's code; None if unknown.
        matrices: number of weight matrices that it reads.
        leaf: the module, if this is the call of a module that was not looked into.
        constant: whether it is made of parameters, buffers and numbers only.
        parameter: name of the parameter or buffer, if it is one.
        shape, dtype: of the tensor; None if unknown.
        sizes: the numbers among the arguments of a view, a split or a chunk.
        selected: the index of ``x[index]`` or ``x[index] = y``, with operations for its tensors; None if unknown, or if
            it names a place twice.
        scale: ``alpha`` of ``add(x, f, alpha=..)``, if it is given and not 1.
        call: if it was run: the function, and its arguments with operations for tensors.
        item: which tensor of the call's result this is; ~n if it is argument n, which the call has written to.
        recorded: whether autograd was on.
        reentrant: for an add inside an autograd function with autograd off: that function's call, as a sentence.
        node: in a torch.fx graph, if it is from one.
    """

    index: int
    name: str
    inputs: tuple[Op, ...]
    scope: Scope
    place: Place | None = None
    matrices: int = 0
    leaf: nn.Module | None = None
    constant: bool = False
    parameter: str = ""
    shape: torch.Size | None = None
    dtype: torch.dtype | None = None
    sizes: tuple[Any, ...] = ()
    selected: Any = None
    scale: Any = None
    call: tuple[Callable[..., Any], Args, Kwargs] | None = None
    item: int = 0
    recorded: bool = True
    reentrant: str = ""
    node: Any = None

    def __repr__(self) -> str:
        return f"%{self.index} = {self.name}({', '.join(f'%{op.index}' for op in self.inputs)}) in {self.scope.path}"

    @property
    def weighted(self) -> bool:
        """Whether the operation applies weights, or mixes positions."""
        if self.matrices:
            return True
        if self.leaf is None:
            return _names_mixing(self.name)
        return any(_mixes(type(module)) for module in self.leaf.modules())


def given(op: Op) -> tuple[Args, Kwargs]:
    """The arguments of an operation, with operations or nodes for tensors; empty if unknown."""
    if op.call is not None:
        return op.call[1:]
    return ((), {}) if op.node is None else (op.node.args, dict(op.node.kwargs))


@dataclasses.dataclass(frozen=True)
class Holder:
    """A variable of a running function that shares a tensor's memory and will be read again.

    Attributes:
        code: of the function.
        name: of the variable.
        op: what made the tensor in it; None if unknown.
    """

    code: CodeType
    name: str
    op: Op | None


@dataclasses.dataclass(eq=False)
class Flow:
    """All operations of one pass through a model, in order.

    Attributes:
        model: that was run or traced.
        before: for a run: a copy with the same parameters that has not run, as modules may cache what they computed.
        ops: the operations.
        outputs: what a traced model returns.
        unread: modules that could not be looked into, by path.
        unseen: in words, a tensor that no recorded operation made; empty if there is none.
        strange: whether a floating-point tensor without a gradient was read that no recorded operation made.
        guessed: for a run on the meta device: where the model first branches on the value of an input or a weight.
        containers: whether the module at a path is a list, a dict or a sequence of modules.
        held: for in-place operations: other variables with the same memory that are read afterwards.
        read_later: for in-place operations: those whose results variables hold that are read afterwards.
        casts: casts that returned their argument unchanged: where, and what made the argument.
        hooked: operations whose results got a gradient hook, and where.
        tensors: for a run that has just ended: the result of each operation.
    """

    model: nn.Module
    ops: list[Op]
    outputs: list[Op] = dataclasses.field(default_factory=list)
    unread: dict[str, LeftAlone] = dataclasses.field(default_factory=dict)
    unseen: str = ""
    strange: bool = False
    guessed: LeftAlone | None = None
    containers: Callable[[str], bool] = lambda path: False
    held: dict[Op, list[Holder]] = dataclasses.field(default_factory=dict)
    read_later: dict[Op, set[Op]] = dataclasses.field(default_factory=dict)
    casts: list[tuple[Scope, Place, Op]] = dataclasses.field(default_factory=list)
    hooked: dict[Op, Place | None] = dataclasses.field(default_factory=dict)
    before: nn.Module | None = None
    tensors: list[Tensor] = dataclasses.field(default_factory=list)

    def __iter__(self) -> Iterator[Op]:
        return iter(self.ops)

    def __str__(self) -> str:
        """The operations, grouped by function call, without parameters."""
        lines: list[str] = []
        scope: Scope | None = None
        for op in (op for op in self.ops if not op.parameter):
            if op.scope is not scope:
                scope = op.scope
                where = f"{scope.code.co_filename}:{scope.code.co_firstlineno}" if scope.code else ""
                lines.append(f"# {scope.path or '(the model)'} {where}".rstrip())
            shape = "" if op.shape is None else f"  {list(op.shape)}"
            inputs = ", ".join(f"%{source.index}" for source in op.inputs if not source.parameter)
            lines.append(f"  %{op.index} = {op.name}({inputs}){shape}")
        return "\n".join(lines)

    @functools.cached_property
    def calls(self) -> list[Scope]:
        """All function calls in which an operation runs, in order."""
        return [
            *dict.fromkeys(call for scope in dict.fromkeys(op.scope for op in self.ops) for call in scope.outward())
        ]

    @functools.cached_property
    def draws(self) -> list[Op]:
        """The operations that draw random numbers."""
        return [op for op in self.ops if _DRAWS.search(op.name)]

    @functools.cached_property
    def users(self) -> dict[Op, list[Op]]:
        """For each operation, those that read its result, in order."""
        users: dict[Op, list[Op]] = {op: [] for op in self.ops}
        for op in self.ops:
            for source in dict.fromkeys(op.inputs):
                users[source].append(op)
        return users


@functools.lru_cache(maxsize=4096)
def _names_mixing(name: str) -> bool:
    return any(word in name for word in MIXING)


def _mixes(cls: type[nn.Module]) -> bool:
    """Whether a module's class name, or a name that its forward uses, is that of an operation that mixes positions."""
    code = getattr(cls.forward, "__code__", None)
    names = (cls.__name__.lower(), *(code.co_names if isinstance(code, CodeType) else ()))
    return any(word in name for name in names for word in MIXING)


def places_of(value: object) -> list[tuple[Any, ...]]:
    """The indices, keys and fields that lead to each tensor in an argument; none lead to one that is all of it."""
    if isinstance(value, (Tensor, fx.Proxy)):
        return [()]
    items: Iterable[tuple[Any, object]] = ()
    if isinstance(value, (tuple, list)):
        items = enumerate(value)
    elif isinstance(value, dict):
        items = value.items()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = attributes(value).items()
    else:
        items = parts_by_name(value).items()
    return [(key, *places) for key, item in items for places in places_of(item)]


def kind_of(module: nn.Module | None) -> str:
    """Class of a module, as text."""
    return "" if module is None else f"{type(module).__module__}.{type(module).__qualname__}"


def plain_name(name: str) -> str:
    """``add`` for every way of writing an addition: ``__add__``, ``add_``, ``iadd``, ``add.Tensor``."""
    name = name.partition(".")[0].strip("_")
    return name[1:] if name in ("iadd", "imul", "isub", "itruediv") else name


def makes_alike(name: str) -> bool:
    """Whether an operation takes the shape of a tensor but not its values: ``zeros_like``.

    Always False in distributed runs: there a collective may fill the new tensor with values that nobody sees.
    """
    alone = not (dist.is_available() and dist.is_initialized())
    return alone and (name.endswith("_like") or name in _NEW)


def reached(ops: Iterable[Op], following: Callable[[Op], Iterable[Op]]) -> set[Op]:
    """``ops``, and all operations that ``following`` leads to from them, step by step."""
    found = {*ops}
    todo = [*found]
    while todo:
        new = {*following(todo.pop())} - found
        found |= new
        todo += new
    return found


def around(chains: Iterable[Sequence[Scope]]) -> list[Scope]:
    """The common outermost calls of these chains of calls, outermost first."""
    levels = zip(*chains, strict=False)
    return [calls[0] for calls in itertools.takewhile(lambda calls: len({*calls}) == 1, levels)]


#: Modules that only hold others, or call them in a row.
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
