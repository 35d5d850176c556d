"""Launching Triton kernels, generated or handwritten."""

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

#: Approximate number of programs of a kernel that sums over rows: a few for each multiprocessor of a large GPU. Fixed,
#: so that results do not depend on the device.
PROGRAMS = 1024

#: Most routines, and kernels of each kind, to cache: enough for a few batch sizes of a deep model. The oldest go first.
MOST_KEPT = 4096

#: Most patterns of aligned pointers for which a `Kernel` caches compiled kernels.
MOST_COMPILED = 16


class Code(NamedTuple):
    """A Triton kernel and its grid.

    Attributes:
        jit: a function that returns the decorated function; called at the first launch.
        programs: the grid.
        constants: compile-time arguments, and options of the compiler.
        made_for: the `sums.grid.Grid` of a generated kernel.
    """

    jit: Callable[[], Any]
    programs: tuple[int, int, int]
    constants: Mapping[str, Any]
    made_for: Any = None


class Launch(NamedTuple):
    """A launch of a kernel: the kernel and its arguments."""

    code: Code
    arguments: dict[str, Any]


#: The list to which launches are recorded instead of being executed.
_noted: contextvars.ContextVar[list[Launch]] = contextvars.ContextVar("noted")
#: Number of threads that record launches.
threads_noting = 0
_COUNTING = threading.Lock()


@contextlib.contextmanager
def noted() -> Iterator[list[Launch]]:
    """A context that records this thread's launches instead of executing them, so that results are uninitialised.

    Mixes on all devices, including meta, use a GPU's kernels. (On a GPU, a kernel that has already run on these tensors
    is executed.)
    """
    global threads_noting
    launches: list[Launch] = []
    token = _noted.set(launches)
    with _COUNTING:
        threads_noting += 1
    try:
        with torch.autograd.set_multithreading_enabled(False):  # keeps a GPU's backward in this thread
            yield launches
    finally:
        with _COUNTING:
            threads_noting -= 1
        _noted.reset(token)


def noting() -> bool:
    """Whether launches are recorded; for torch.compile, which needs something to guard on, whether any thread does."""
    return threads_noting > 0 and (torch.compiler.is_compiling() or _noted.get(None) is not None)


def _without_memory(x: Tensor) -> Tensor:
    """A stand-in with the properties on which a launch depends: dtype, size of the memory, and aligned addresses."""
    if x.is_meta:
        return x
    first = x.data_ptr() % 16 // x.itemsize
    return torch.empty(first + x.untyped_storage().nbytes() // x.itemsize, dtype=x.dtype, device="meta")[first:]


class Part(NamedTuple):
    """A part of a tensor in a list, which a kernel takes as a separate tensor.

    Attributes:
        place: place of the tensor in the list.
        offset: bytes from the tensor's first element to the part's.
        view: function from the tensor to the part.
    """

    place: int
    offset: int
    view: Callable[[Tensor], Tensor]


#: Place of a tensor in a list.
At = int | Part


def taken(tensors: Sequence[Tensor], at: At) -> Tensor:
    """The tensor at a place."""
    return tensors[at] if isinstance(at, int) else at.view(tensors[at.place])


class WithoutMemory(RuntimeError):
    """A kernel was given a tensor without memory, such as the result of a collective that is still running."""


class Kernel:
    """A kernel with all of its arguments but the tensors, which it takes from a list.

    Triton looks kernels up by the types and values of their arguments, and by which pointers are multiples of 16. Only
    the latter can vary here, so compiled kernels are cached by it, and launched directly from then on. (Not on AMD
    GPUs, where kernels also depend on the sizes of storages.)

    Attributes:
        code: the kernel and its grid.
        device: device of the tensors.
        numbers: arguments that are not tensors, by parameter.
        index: index of the CUDA device.
        used: places of the kernel's tensors in the list.
        pointers: the same, as places and offsets.
        places: by parameter, indices into ``used``.
        compiled: compiled kernels, as functions of pointers; the key None is for pointers that are all aligned.
    """

    __slots__ = ("code", "compiled", "device", "index", "numbers", "places", "pointers", "used")

    def __init__(
        self,
        code: Code,
        device: torch.device,
        tensors: Mapping[str, At | tuple[At, ...]],
        numbers: Mapping[str, object],
    ) -> None:
        """
        Args:
            tensors: by parameter, the place of a tensor in the list, or places of several.
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
        """Launch the kernel."""
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
        """The launch with these tensors."""
        tensors = {name: tuple(used[at]) if isinstance(at, slice) else used[at] for name, at in self.places.items()}
        return Launch(self.code, tensors | self.numbers)

    def start(self, used: Sequence[Tensor]) -> None:
        """Launch through Triton, which compiles new kernels; or record the launch."""
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
        known = hasattr(type(compiled), "__getitem__")  # not in the interpreter, nor while it is being compiled
        if known and torch.version.hip is None and len(self.compiled) < MOST_COMPILED:
            aligned = _aligned(tuple([x.data_ptr() for x in used]))
            self.compiled[aligned] = self._direct(launcher(compiled, self.code.programs), jit.arg_names)

    def _direct(self, runner: Callable[..., None], parameters: Sequence[str]) -> Callable[[tuple[int, ...]], None]:
        """A function of pointers that calls Triton's launcher of a compiled kernel with all arguments."""
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
    numbers: Mapping[str, object],
    constants: Mapping[str, object],
    **several: int,
) -> Kernel:
    """A handwritten kernel, which takes a list of its tensors in the order of its parameters.

    Args:
        jit: the decorated function.
        programs: the grid; missing dimensions are 1.
        device: device of the tensors.
        numbers: arguments that are not tensors, by parameter.
        constants: as in `Code`.
        several: number of tensors for each parameter that is a tuple of them.
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
    """A handwritten kernel for tensors of given metadata.

    Attributes:
        kernel: the kernel, which takes tensors in the order of its parameters.
        copied: which of the tensors [..., D] have to be copied, as their rows are not evenly spaced.
        programs: numbers of programs over rows and over columns, each of which leaves partial sums.
    """

    kernel: Kernel
    copied: tuple[bool, ...] = ()
    programs: tuple[int, int] = (1, 1)

    def even(self, *tensors: Tensor) -> list[Tensor]:
        """The tensors, with copies where they are needed."""
        return [x.contiguous() if copy else x for x, copy in zip(tensors, self.copied, strict=True)]


def _check_memory(tensors: Sequence[Tensor]) -> None:
    for x in tensors:
        if x.numel() and not x.data_ptr():
            raise WithoutMemory(f"A kernel cannot read {type(x).__name__}: it has no memory of its own.")


#: The parameters of Triton's launch function that are supported here.
_RUN = (
    *("gridX", "gridY", "gridZ", "stream", "function", "kernel_metadata"),
    *("launch_metadata", "launch_enter_hook", "launch_exit_hook", "args"),
)


def launcher(compiled: Any, programs: tuple[int, int, int]) -> Callable[..., None]:
    """``compiled[programs]``, a function that launches a kernel on the current stream.

    Most of its time goes into arguments for hooks; without hooks, this calls the function below it, as Triton does.
    """
    through_hooks: Callable[..., None] = compiled[programs]  # this loads the kernel
    run: Any = getattr(compiled, "run", None)
    if run is None or tuple(inspect.signature(run).parameters) != _RUN:
        return through_hooks
    from triton import knobs
    from triton.runtime import driver

    runtime, function, metadata = knobs.runtime, compiled.function, compiled.packed_metadata
    current_device, current_stream = driver.active.get_current_device, driver.active.get_current_stream

    def start(*arguments: object) -> None:
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            through_hooks(*arguments)
        else:
            run(*programs, current_stream(current_device()), function, metadata, None, None, None, *arguments)

    return start


def _aligned(pointers: tuple[int, ...]) -> tuple[bool, ...] | None:
    """Which pointers are multiples of 16; None if all are."""
    if not functools.reduce(operator.or_, pointers) % 16:
        return None
    return tuple([pointer % 16 == 0 for pointer in pointers])


_THERE = contextlib.nullcontext()


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A context in which ``device`` is the current one, on which Triton launches."""
    there = device.type != "cuda" or device.index == torch.cuda.current_device()
    return _THERE if there else torch.cuda.device(device)
