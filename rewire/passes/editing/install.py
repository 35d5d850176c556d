"""Pass: give modules their edited functions.

A module keeps its identity: its ``__class__`` becomes a generated subclass of the same name. Parameters, children,
hooks, checkpointing and ``isinstance`` stay as they were.

Each module gets a class and code objects of its own. torch.compile counts the versions of one code object, and after
``recompile_limit`` (8) of them runs the rest eagerly, without an error. Streams differ from block to block, so that
each needs a version; eight blocks that share their code would use up the limit. Modules that get no stream share one
class, and one version.
"""

from __future__ import annotations

import weakref
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from rewire.attributes import CONNECTIONS, EDITED, SHARED, gate_of
from rewire.code.edited import Edited, edits_of, original_class
from rewire.code.functions import clone, redecorated
from rewire.code.text import compiled, shown
from rewire.errors import EditError, RewireError
from rewire.passes.editing.backward_hooks import REFUSING
from rewire.runtime.hooks import as_registered, registering, show_tensors
from rewire.torch_internals import forward_hooks, forward_pre_hooks


def install(module: nn.Module, methods: dict[str, Edited], shared: bool = False) -> None:
    """Make the texts methods of ``module``, in place; ``shared``: equal modules get the same class.

    Raises:
        EditError: the class cannot be derived from.
    """
    module.__class__ = _class(type(module), tuple(methods.values()), shared)
    show_tensors(forward_pre_hooks(module), forward_hooks(module))


def uninstall(module: nn.Module) -> None:
    """Give ``module`` its original methods back."""
    module.__class__ = type(module).__mro__[1]
    as_registered(module)


def edited_function(original: FunctionType, source: str) -> FunctionType:
    """``original`` with another text, and its own globals, closure and defaults."""
    code = _compiled(original, source)
    cells = dict(zip(original.__code__.co_freevars, original.__closure__ or (), strict=True))
    return clone(original, code.replace(), tuple(cells[name] for name in code.co_freevars))


_CODES: weakref.WeakKeyDictionary[FunctionType, dict[str, CodeType]] = weakref.WeakKeyDictionary()


def _compiled(original: FunctionType, source: str) -> CodeType:
    known = _CODES.setdefault(original, {})
    if source not in known:
        first = original.__code__.co_firstlineno
        name = f"{original.__code__.co_filename} (rewired {abs(hash(source)):x})"
        shown(name, source, first)  # so that tracebacks, inspect.getsource and debuggers find the text
        code = compiled(original, source, first, name)
        assert code is not None  # edits keep the function's name
        known[source] = code
    return known[source]


_SHARED: weakref.WeakValueDictionary[tuple[type, tuple[Edited, ...]], type] = weakref.WeakValueDictionary()


def _class(base: type, methods: tuple[Edited, ...], shared: bool) -> type:
    """The subclass of ``base`` with these methods; ``shared``: the same one for equal arguments."""
    if not shared:
        return _generated(base, methods, shared)
    known = _SHARED.get((base, methods))
    if known is None:
        known = _SHARED[base, methods] = _generated(base, methods, shared)
    return known


def _generated(base: type, methods: tuple[Edited, ...], shared: bool) -> type:
    """A new subclass of ``base`` with these methods."""

    def no_weight_decay(self: nn.Module) -> set[str]:
        known = getattr(super(generated, self), "no_weight_decay", set)
        return {*known(), *(name for name, _ in self.named_parameters() if CONNECTIONS in name.split("."))}

    def init_subclass(cls: type, **kwargs: object) -> None:
        super(generated, cls).__init_subclass__(**kwargs)  # type: ignore[arg-type]
        _own_code(cls)

    members: dict[str, Any] = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__reduce_ex__": _reduce,
        "__init_subclass__": classmethod(init_subclass),
        **registering(base),
        "no_weight_decay": no_weight_decay,
        **REFUSING,
        **{gate_of(edited.name): _NoGate() for edited in methods},
        EDITED: {edited.name: edited for edited in methods},
        SHARED: shared,
    }
    metaclass: Any = type(base)
    try:
        generated: type = metaclass(base.__name__, (base,), members)
    except Exception as error:
        raise EditError(f"{base.__name__} cannot be derived from ({type(error).__name__}: {error})") from error
    for edited in methods:  # after creation: bases may decorate the methods of new subclasses, and ours are decorated
        original = edited.original(base)
        assert original.function is not None
        setattr(generated, edited.name, redecorated(original, edited_function(original.function, edited.source)))
    return generated


class _NoGate:
    """What a generated class has in place of the gate that each module has that was rewired."""

    def __get__(self, module: nn.Module | None, cls: type) -> _NoGate:
        if module is None:
            return self
        raise RewireError(
            f"this {cls.__name__} is a new instance of a rewired model's class, as `type(model)(..)` or a slice of a "
            "rewired nn.Sequential makes, and has no connections: copy the model by copy.deepcopy, or make the "
            f"instance of the plain model's class, {original_class(module).__module__}.{cls.__qualname__}."
        )


def _own_code(cls: type) -> None:
    """Give the forward of a subclass of a generated class its own code object.

    transformers and FSDP2 wrap the forward of each subclass of their layers, and these wrappers share their code.
    """
    forward = vars(cls).get("forward")
    if isinstance(forward, FunctionType):
        forward.__code__ = forward.__code__.replace()


def _reduce(self: nn.Module, protocol: object) -> tuple[Any, ...]:
    """Let pickle and copy rebuild the class: a generated class cannot be imported."""
    state = self.__getstate__()  # without the result of `self.compile()`, which calls this module, not the copy
    return _rebuild, (original_class(self), tuple(edits_of(self).values()), getattr(type(self), SHARED)), state


def _rebuild(base: type, methods: tuple[Edited, ...], shared: bool) -> nn.Module:
    module: nn.Module = object.__new__(_class(base, methods, shared))
    return module
