"""A Triton kernel, generated or written by hand, and how it is started."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import math
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: Programs among which a kernel that sums over rows is divided, about: a few for each processor of a large GPU. Fixed,
#: so that results do not depend on the device.
PROGRAMS = 1024

#: Routines, and kernels of each kind, that are kept: those of a few batch sizes of a deep model. The oldest goes first.
MOST_KEPT = 4096

#: Patterns of aligned pointers for which a launch keeps compiled kernels.
MOST_COMPILED = 16


class Code(NamedTuple):
    """A Triton kernel, and how it is divided.

    Attributes:
        jit: the decorated function; asked for when it is first started.
        programs: the grid.
        constants: arguments that are fixed when it is compiled, and options of the compiler.
        made_for: of a generated one, its `sums.grid.Grid`.
    """

    jit: Callable[[], Any]
    programs: tuple[int, int, int]
    constants: Mapping[str, Any]
    made_for: Any = None


class Launch(NamedTuple):
    """One kernel, and what it is started with."""

    code: Code
    arguments: dict[str, Any]


#: Where launches are noted, in place of being started.
_noted: contextvars.ContextVar[list[Launch]] = contextvars.ContextVar("noted")
#: How many threads do so.
_anywhere = 0
_COUNTING = threading.Lock()


@contextlib.contextmanager
def noted() -> Iterator[list[Launch]]:
    """The launches of this thread, in turn: they are noted, not started, and leave results as memory was.

    Mixes of all devices go the way of a GPU's, those of the meta device, too. (A kernel that has run on these tensors
    before is started, on a GPU.)
    """
    global _anywhere
    launches: list[Launch] = []
    token = _noted.set(launches)
    with _COUNTING:
        _anywhere += 1
    try:
        with torch.autograd.set_multithreading_enabled(False):  # a GPU's backward is in this thread, too
            yield launches
    finally:
        with _COUNTING:
            _anywhere -= 1
        _noted.reset(token)


def noting() -> bool:
    """Whether kernels are noted. torch.compile asks what it can guard: whether they are in any thread."""
    return _anywhere > 0 and (torch.compiler.is_compiling() or _noted.get(None) is not None)


def _without_memory(x: Tensor) -> Tensor:
    """What a launch depends on of a tensor, beside its strides: dtype, size of the memory, which addresses are even."""
    if x.is_meta:
        return x
    first = x.data_ptr() % 16 // x.itemsize
    return torch.empty(first + x.untyped_storage().nbytes() // x.itemsize, dtype=x.dtype, device="meta")[first:]


class Part(NamedTuple):
    """A part of one of the tensors of a list, which a kernel takes as a tensor of its own.

    Attributes:
        place: of that tensor in the list.
        offset: bytes from its first element to the part's.
        view: the part, given the tensor.
    """

    place: int
    offset: int
    view: Callable[[Tensor], Tensor]


#: Where a tensor is in a list.
At = int | Part


def taken(tensors: Sequence[Tensor], at: At) -> Tensor:
    """The tensor there."""
    return tensors[at] if isinstance(at, int) else at.view(tensors[at.place])


class WithoutMemory(RuntimeError):
    """A kernel was to read a tensor that stands for another, as of a collective that other ranks still compute."""


class Kernel:
    """A kernel with all of its arguments but the tensors, which it takes from a list.

    Triton looks a kernel up by the types and values of its arguments, and by which pointers are multiples of 16. All
    but the last is fixed here: what Triton has compiled is kept by that, and started directly from then on. (Not on AMD
    GPUs, where kernels also depend on the sizes of storages.)

    Attributes:
        code: the kernel, and how it is divided.
        device: of the tensors.
        numbers: by parameter, all that is no tensor.
        index: of a CUDA device.
        used: where the kernel's tensors are in the list.
        pointers: the same, as places and offsets.
        places: by parameter, where they are among those.
        compiled: kernels that were compiled, as functions of pointers; None is for pointers all of which are aligned.
    """

    __slots__ = ("code", "compiled", "device", "index", "numbers", "places", "pointers", "used")

    def __init__(
        self,
        code: Code,
        device: torch.device,
        tensors: Mapping[str, At | tuple[At, ...]],
        numbers: Mapping[str, Any],
    ) -> None:
        """
        Args:
            tensors: by parameter, where a tensor is in the list, or several are.
        """
        self.code, self.device, self.numbers = code, device, dict(numbers)
        self.index = device.index if device.type == "cuda" else None
        self.places: dict[str, int | slice] = {}
        flat: list[At] = []
        for name, at in tensors.items():
            first, several = len(flat), not isinstance(at, (int, Part))
            flat += [at] if isinstance(at, (int, Part)) else at
            self.places[name] = slice(first, len(flat)) if several else first
        self.used = tuple(flat)
        self.pointers = [(at, 0) if isinstance(at, int) else (at.place, at.offset) for at in flat]
        self.compiled: dict[tuple[bool, ...] | None, Callable[[tuple[int, ...]], None]] = {}

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        """Start it."""
        if self.compiled:
            pointers = tuple([tensors[i].data_ptr() + offset for i, offset in self.pointers])
            if 0 in pointers:
                _check_memory([tensors[i] for i, _ in self.pointers])
            known = self.compiled.get(_aligned(pointers))
            if known is not None:
                if self.index is None or self.index == torch.cuda.current_device():
                    known(pointers)
                else:
                    with on(self.device):
                        known(pointers)
                return
        self.start([taken(tensors, at) for at in self.used])

    def launch(self, used: Sequence[Tensor]) -> Launch:
        """What it is started with."""
        tensors = {name: tuple(used[at]) if isinstance(at, slice) else used[at] for name, at in self.places.items()}
        return Launch(self.code, tensors | self.numbers)

    def start(self, used: Sequence[Tensor]) -> None:
        """Through Triton, which compiles what it does not know; or it is noted."""
        launches, meta = _noted.get(None), self.device.type == "meta"
        if not math.prod(self.code.programs):  # there are no elements
            return
        if launches is not None:
            launches.append(self.launch([_without_memory(x) for x in used]))
        if launches is not None or meta:
            return
        _check_memory(used)
        jit = self.code.jit()
        with on(self.device):
            compiled = jit[self.code.programs](**self.launch(used).arguments, **self.code.constants)
        known = hasattr(type(compiled), "__getitem__")  # neither none, in the interpreter, nor one that is awaited
        if known and torch.version.hip is None and len(self.compiled) < MOST_COMPILED:
            aligned = _aligned(tuple([x.data_ptr() for x in used]))
            self.compiled[aligned] = self._direct(launcher(compiled, self.code.programs), jit.arg_names)

    def _direct(self, runner: Callable[..., None], parameters: Sequence[str]) -> Callable[[tuple[int, ...]], None]:
        """Triton's launcher of a compiled kernel, given pointers: they take their places among the other arguments."""
        fixed = self.numbers | dict(self.code.constants)
        others = [None if name in self.places else fixed[name] for name in parameters]
        places = [(parameters.index(name), at) for name, at in self.places.items()]

        def start(pointers: tuple[int, ...]) -> None:
            arguments: list[Any] = others.copy()
            for parameter, at in places:
                arguments[parameter] = pointers[at]
            runner(*arguments)

        return start


def by_hand(
    jit: Any,
    programs: tuple[int, ...],
    device: torch.device,
    numbers: Mapping[str, Any],
    constants: Mapping[str, Any],
    **several: int,
) -> Kernel:
    """A kernel that is written by hand, of a list of its tensors in the order of its parameters.

    Args:
        jit: the decorated function.
        programs: the grid, as far as it is not 1.
        device: of the tensors.
        numbers: by parameter, all that is no tensor.
        constants: as in `Code`.
        several: how many tensors there are of a parameter that is a tuple of them.
    """
    places: dict[str, At | tuple[At, ...]] = {}
    first = 0
    for name in (name for name in jit.arg_names if name not in numbers and name not in constants):
        count = several.get(name)
        places[name] = first if count is None else tuple(range(first, first + count))
        first += 1 if count is None else count
    rows, columns = (*programs, 1)[:2]
    return Kernel(Code(lambda: jit, (rows, columns, 1), constants), device, places, numbers)


class Fitted(NamedTuple):
    """A kernel that is written by hand, for tensors of given metadata.

    Attributes:
        kernel: of a list of tensors, in the order of its parameters.
        copied: which of the tensors [..., D] are, their rows not being even.
        programs: of rows and of columns, of which each leaves partial sums.
    """

    kernel: Kernel
    copied: tuple[bool, ...] = ()
    programs: tuple[int, int] = (1, 1)

    def even(self, *tensors: Tensor) -> list[Tensor]:
        """These, of which some are copied."""
        return [x.contiguous() if copy else x for x, copy in zip(tensors, self.copied, strict=True)]


def _check_memory(tensors: Sequence[Tensor]) -> None:
    for x in tensors:
        if x.numel() and not x.data_ptr():
            raise WithoutMemory(f"A kernel cannot read {type(x).__name__}: it has no memory of its own.")


#: Parameters of the function that Triton makes for a compiled kernel, as far as it is known here.
_RUN = (
    *("gridX", "gridY", "gridZ", "stream", "function", "kernel_metadata"),
    *("launch_metadata", "launch_enter_hook", "launch_exit_hook", "args"),
)


def launcher(compiled: Any, programs: tuple[int, int, int]) -> Callable[..., None]:
    """``compiled[programs]``, what starts a kernel on the current stream.

    Most of that prepares what hooks are told: without any, the function below it is called, as Triton does itself.
    """
    through_hooks: Callable[..., None] = compiled[programs]  # which loads the kernel
    run: Any = getattr(compiled, "run", None)
    if run is None or tuple(inspect.signature(run).parameters) != _RUN:
        return through_hooks
    from triton import knobs
    from triton.runtime import driver

    runtime, function, metadata = knobs.runtime, compiled.function, compiled.packed_metadata
    current_device, current_stream = driver.active.get_current_device, driver.active.get_current_stream

    def start(*arguments: Any) -> None:
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            through_hooks(*arguments)
        else:
            run(*programs, current_stream(current_device()), function, metadata, None, None, None, *arguments)

    return start


def _aligned(pointers: tuple[int, ...]) -> tuple[bool, ...] | None:
    """Which are multiples of 16; None: all."""
    if not functools.reduce(operator.or_, pointers) % 16:
        return None
    return tuple([pointer % 16 == 0 for pointer in pointers])


_THERE = contextlib.nullcontext()


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device."""
    there = device.type != "cuda" or device.index == torch.cuda.current_device()
    return _THERE if there else torch.cuda.device(device)
