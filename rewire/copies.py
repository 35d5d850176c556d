"""Copies of a model: new modules around the caller's tensors."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CellType, FunctionType
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from rewire.attributes import COPIED
from rewire.code.functions import clone, contents
from rewire.errors import RewireError
from rewire.torch_internals import (
    TorchDispatchMode,
    Unseen,
    buffers_of,
    memory_of,
    parameters_of,
    process_groups,
    pytree,
    same_memory,
    writes_to_argument,
    written_by,
)

P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M", bound=nn.Module)

#: The positional and keyword arguments of a model's call.
Inputs: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]

#: Types whose values need not be copied.
_CONSTANTS = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size})

#: Types of the tables that every module has: hooks, parameters, buffers, children.
_TABLES = frozenset({dict, OrderedDict, set})

#: Modules whose ``train`` writes to no parameter: that of nn.Module, and that of transformers' models.
_SET_FLAGS = frozenset({"torch.nn.modules.module", "transformers.modeling_utils"})

#: Only one thread at a time may draw: torch's random state is shared by all threads.
_ONE_AT_A_TIME = threading.RLock()
#: torch.compile's switch is shared, too: when the last thread that runs models uncompiled ends, the stack restores it.
_SETTING, _BEFORE = threading.Lock(), contextlib.ExitStack()
_UNCOMPILED: list[None] = []


def outside_inference_mode(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: run a function outside of `torch.inference_mode`, so that the models it makes can be trained."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext():
            return function(*args, **kwargs)

    return called


def check_can_be_trained(model: nn.Module) -> None:
    """Raise RewireError if a tensor was made in `torch.inference_mode`: such a tensor can never have gradients."""
    if any(not is_lazy(tensor) and tensor.is_inference() for tensor in _tensors_in([*model.modules()])):
        name = next(name for name, tensor in _tensors_of(model) if not is_lazy(tensor) and tensor.is_inference())
        raise RewireError(
            f"'{name}' was made in torch.inference_mode(), and so can have no gradients. Make or load the model "
            "outside of it, or rewire copy.deepcopy(model), made outside of it. torch.no_grad() does no harm."
        )


def shared(model: M) -> M:
    """New modules around the same parameters and buffers."""
    modules = [*model.modules()]
    memo = {id(tensor): tensor for tensor in _tensors_in(modules)}
    memo |= {id(p): _same_kind(p) for p in _parameters_in(modules) if _is_special(p) and not p.requires_grad}
    return _copied(model, modules, memo)


def private(model: M, device: str | None = None) -> M:
    """A copy that can be run without any effect on ``model``.

    Its parameters are new leaves that share memory with the model's: gradients stay with the copy. Buffers are copied,
    and parameters to which the model's own ``train`` and ``eval`` write, or its forward (see `Writes`).

    Args:
        model: a module.
        device: device of the copy's tensors; None: the model's.
    """
    check_can_be_trained(model)
    modules = [*model.modules()]
    memo: dict[int, Any] = {}
    changed = _changed_by_modes(model, modules) if device is None else set()
    for buffer in _buffers_in(modules):
        memo[id(buffer)] = buffer.detach().clone() if device is None else buffer.to(device)
    for parameter in _parameters_in(modules):
        changes = device is None and (id(parameter) in changed or is_written(parameter))
        if _is_special(parameter) and device is None:
            memo[id(parameter)] = copy.deepcopy(parameter) if changes else _same_kind(parameter)
            continue
        value = parameter.detach().clone() if changes else parameter.detach()
        own = nn.Parameter(value if device is None else value.to(device), parameter.requires_grad)
        memo[id(parameter)] = _with_attributes(own, parameter) if type(own) is type(parameter) else parameter
    return _copied(model, modules, memo)


def _changed_by_modes(model: nn.Module, modules: Sequence[nn.Module]) -> set[int]:
    """Ids of parameters to which ``train`` and ``eval`` write: loralib merges low-rank matrices into weights so."""
    if all(getattr(type(module).train, "__module__", "") in _SET_FLAGS for module in modules):
        return set()
    probe = private(model, "meta")
    writes = Writes(probe)
    try:
        with writes:
            for mode in (True, False, True):
                probe.train(mode)
    except Exception:  # it reads values, or has none that are known: any may change
        return {*map(id, _parameters_in(modules))}
    return {*map(id, writes.seen_in(model))}


#: Parameters to which their model's forward writes, as some that normalise their weights do.
_WRITTEN: WeakIdKeyDictionary = WeakIdKeyDictionary()


def is_written(parameter: Tensor) -> bool:
    """Whether a run of a copy has shown that the parameter's model writes to it."""
    return parameter in _WRITTEN


@contextlib.contextmanager
def noting_writes(model: nn.Module, copied: nn.Module) -> Iterator[None]:
    """A context for a run of a private copy: if it writes to parameters, later copies of ``model`` have their own."""
    writes = Writes(copied)
    try:
        with writes:
            yield
    finally:
        _WRITTEN.update((parameter, None) for parameter in writes.seen_in(model))


class Writes(TorchDispatchMode):
    """Notes which parameters of a private copy are written to, and before that gives them memory of their own."""

    supports_higher_order_operators = True

    def __init__(self, copied: nn.Module) -> None:
        super().__init__()
        self._seen, self._parameters = set[int](), _parameters_in([*copied.modules()])
        self._of: dict[int, list[nn.Parameter]] = {}
        self._own: dict[int, torch.UntypedStorage] = {}
        for parameter in self._parameters:
            with contextlib.suppress(NotImplementedError, RuntimeError):  # it has no storage
                self._of.setdefault(memory_of(parameter), []).append(parameter)

    def seen_in(self, model: nn.Module) -> list[nn.Parameter]:
        """The parameters of the copied model whose copies were written to."""
        pairs = zip(_parameters_in([*model.modules()]), self._parameters, strict=True)
        return [parameter for parameter, copied in pairs if id(copied) in self._seen]

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in written_by(func, args, kwargs):
            with contextlib.suppress(NotImplementedError, RuntimeError):
                self._separate(tensor, memory_of(tensor))
        with Unseen():  # operations of hidden code would be recorded as made here
            return func(*args, **kwargs)

    def _separate(self, written: Tensor, memory: int) -> None:
        """Let a tensor that is about to be written to, and all parameters around its memory, have a copy of that."""
        parameters = self._of.get(memory, [])
        self._seen |= {*map(id, parameters)}
        if parameters and not written.is_meta and type(written).__torch_dispatch__ is Tensor.__torch_dispatch__:
            if memory not in self._own:
                self._own[memory] = written.untyped_storage().clone()
            own = self._own[memory]
            for tensor in (written, *parameters):
                if memory_of(tensor) == memory:
                    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                    tensor.data = empty.set_(own, tensor.storage_offset(), tensor.shape, tensor.stride())


def _is_special(parameter: nn.Parameter) -> bool:
    """Whether its class derives from nn.Parameter, as quantised weights with attributes do (bitsandbytes)."""
    return nn.Parameter in type(parameter).__mro__[1:] and not is_lazy(parameter)


def _same_kind(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter around the same memory, with its own attributes: some change when a layer is first called."""
    return _with_attributes(same_memory(parameter), parameter)


def _with_attributes(made: nn.Parameter, parameter: nn.Parameter) -> nn.Parameter:
    """``made``, with copies of the attributes of a parameter: the forward may ask for them (muP's ``infshape``)."""
    for name, value in vars(parameter).items():
        vars(made)[name] = value if isinstance(value, (Tensor, nn.Module)) else copy.copy(value)
    return made


def _copied(model: M, modules: Sequence[nn.Module], memo: dict[Any, Any]) -> M:
    """A deep copy, including functions whose closures hold modules."""
    if any(map(is_lazy, _tensors_in(modules))):
        name = next(name for name, tensor in _tensors_of(model) if is_lazy(tensor))
        raise RewireError(
            f"'{name}' is not initialised yet: {type(model).__name__} has lazy modules. Call the model once on an "
            "input, which sets their sizes, and then rewire it."
        )
    memo |= {id(one): one for one in [*process_groups(), *_global_generators()]}
    memo[COPIED] = {*map(id, modules)}
    bound = list[tuple[nn.Module, str, FunctionType]]()
    try:
        for module in modules:
            for name, value in vars(module).items():
                if type(value) in _TABLES and not value:  # most are: copying them would take most of the time
                    memo[id(value)] = type(value)()
                elif isinstance(value, FunctionType) and value.__closure__:
                    bound.append((module, name, value))
                elif type(value) not in _CONSTANTS and not name.startswith("_"):
                    # hidden states of its last call, which deepcopy refuses: copy their values
                    hidden = (x for x in pytree.tree_leaves(value) if isinstance(x, Tensor) and not x.is_leaf)
                    memo |= {id(tensor): tensor.detach().clone() for tensor in hidden if id(tensor) not in memo}
        plain = {kind for kind in {*map(type, modules)} if _is_plain(kind)}
        own = [(module, _empty_of(module, memo)) for module in modules if type(module) in plain]
        for module, empty in reversed(own):  # from the inside: a child that copies itself finds its own children whole
            state = module.__getstate__()
            empty.__setstate__(_copy_into({}, state, memo))
        copied: M = copy.deepcopy(model, memo)
        if issubclass(type(model), type(copied)):  # its `__reduce__` names a class; ours would be lost
            copied.__class__ = type(model)
        for module, name, function in bound:
            cells = tuple(CellType(copy.deepcopy(contents(cell), memo)) for cell in function.__closure__ or ())
            memo[id(module)].__dict__[name] = clone(function, function.__code__, cells)
    except RewireError:
        raise
    except Exception as error:
        raise RewireError(
            f"{type(model).__name__} cannot be copied, and rewire works on a copy: {type(error).__name__}: {error}. "
            "copy.deepcopy(model) has to work; look for attributes that are files, locks or tensors with a history."
        ) from error
    return copied


def _global_generators() -> list[Any]:
    """What `torch.manual_seed`, `random.seed` and `numpy.random.seed` seed: they would have no effect on a copy.

    A distribution of SciPy holds NumPy's.
    """
    numpy: Any = sys.modules.get("numpy")
    methods = [random.random, *([numpy.random.random] if numpy else [])]
    of_gpus: Any = torch.cuda.default_generators
    return [torch.default_generator, *of_gpus, *(getattr(method, "__self__", None) for method in methods)]


def _is_plain(cls: type[nn.Module]) -> bool:
    """Whether `copy.deepcopy` would only copy the attributes of such modules, which is done here, faster.

    All modules are made before any is filled, whereas `copy.deepcopy` recurses into everything that a module holds.
    """
    slots = any("__slots__" in vars(base) for base in cls.__mro__)
    own = ("__deepcopy__", "__reduce_ex__", "__reduce__", "__getstate__", "__getnewargs__", "__getnewargs_ex__")
    return not slots and all(getattr(cls, name, None) is getattr(nn.Module, name, None) for name in own)


def _copy_into(made: dict[str, Any], table: dict[str, Any], memo: dict[int, Any]) -> dict[str, Any]:
    """Fill ``made`` with copies of a table's values. Most are constants or known: a call for each takes longer."""
    for name, value in table.items():
        if type(value) not in _CONSTANTS:
            known = memo.get(id(value))
            value = _copy_of(value, memo) if known is None else known
        made[name] = value
    return made


def _copy_of(value: Any, memo: dict[int, Any]) -> Any:
    """`copy.deepcopy`, but faster for a module's parameters, buffers and children."""
    if type(value) is dict and all(type(key) is str for key in value):
        memo[id(value)] = made = dict[str, Any]()
        return _copy_into(made, value, memo)
    return copy.deepcopy(value, memo)


def _empty_of(module: nn.Module, memo: dict[int, Any]) -> Any:
    memo[id(module)] = made = type(module).__new__(type(module))
    return made


def _parameters_in(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    return [tensor for module in modules for tensor in parameters_of(module).values() if tensor is not None]


def _buffers_in(modules: Iterable[nn.Module]) -> list[Tensor]:
    return [tensor for module in modules for tensor in buffers_of(module).values() if tensor is not None]


def _tensors_in(modules: Sequence[nn.Module]) -> list[Tensor]:
    return [*_parameters_in(modules), *_buffers_in(modules)]


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def own_inputs(inputs: Inputs, device: str | None = None) -> Inputs:
    """A copy of example inputs, since a model may write to them; on another device if one is given."""

    def own(value: Any) -> Any:
        if isinstance(value, Tensor):
            copied = value.detach().clone() if device is None else value.detach().to(device)
            return copied.requires_grad_(value.requires_grad)
        return copy.deepcopy(value)

    args, kwargs = pytree.tree_map(own, inputs)
    return args, kwargs


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """A context in which torch.compile runs models as Python, in all threads: torch has one switch for all of them."""
    with _SETTING:
        if not _UNCOMPILED:
            _BEFORE.enter_context(torch.compiler.set_stance("force_eager"))
        _UNCOMPILED.append(None)
    try:
        yield
    finally:
        with _SETTING:
            _UNCOMPILED.pop()
            if not _UNCOMPILED:
                _BEFORE.close()


@contextlib.contextmanager
def seeded(seed: int, model: nn.Module) -> Iterator[None]:
    """A context that seeds torch, ``random`` and NumPy, and restores the state of all three when it ends."""
    devices = {t.device for t in _tensors_in([*model.modules()]) if t.device.type not in ("cpu", "meta")}
    numpy: Any = sys.modules.get("numpy")
    with contextlib.ExitStack() as stack:
        stack.enter_context(_ONE_AT_A_TIME)
        state, numpy_state = random.getstate(), numpy.random.get_state() if numpy else None
        stack.enter_context(torch.random.fork_rng([]))
        for kind in {device.type for device in devices}:
            of_kind = [device for device in devices if device.type == kind]
            stack.enter_context(torch.random.fork_rng(of_kind, device_type=kind))
        try:
            torch.default_generator.manual_seed(seed)
            for device in devices:
                seeded_state = torch.Generator(device).manual_seed(seed).get_state()
                torch.get_device_module(device).set_rng_state(seeded_state, device)
            random.seed(seed)
            if numpy:
                numpy.random.seed(seed)
            yield
        finally:
            random.setstate(state)
            if numpy:
                numpy.random.set_state(numpy_state)


class ByPlace(TorchDispatchMode):
    """Draws random numbers in the order of a tensor's elements; PyTorch draws them in the order of its memory.

    This gives two models the same dropout masks even if their activations have different strides.
    """

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        ordered = [arg.contiguous() if isinstance(arg, Tensor) else arg for arg in args]
        drawn = func(*ordered, **kwargs)
        return args[0].copy_(drawn) if writes_to_argument(func) else drawn
