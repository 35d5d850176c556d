"""What makes a rewired model of a plain one, where its edited functions are there already: part of the runtime file."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from rewire.attributes import CONNECTIONS
from rewire.errors import RewireError
from rewire.passes.editing.connect import StreamsToTensors
from rewire.placement import is_dtensor
from rewire.runtime.connection import Connection, SeparateNorms
from rewire.runtime.gate import Gate
from rewire.runtime.hooks import registering, show_tensors
from rewire.runtime.layout import Layout
from rewire.runtime.live import Entry
from rewire.torch_internals import children_of, forward_hooks, forward_pre_hooks

CONFIG = "rewire_ejected"  # the entry of a config with what follows
#: `rewire.eject` puts the digest of what it writes in its place: here, and where it writes this.
EJECTED = "digest of the ejected files"


class Ejected(Connection):
    """A connection in whose state dict it says which texts the weights belong to."""

    def get_extra_state(self) -> Tensor:
        return self._beside_weights(EJECTED)

    def set_extra_state(self, state: Any) -> None:
        if isinstance(state, Tensor):  # else torch's placeholder for a key that a partial state dict does not have
            own: Any = state.to_local() if is_dtensor(state) else state  # type: ignore[attr-defined]
            check_ejected(bytes(own.byte().flatten().tolist()).decode(errors="replace"), "The weights")


def check_ejected(found: str, what: str) -> None:
    """Refuse, by its digest, a part of another model than this file is of; ``what`` begins the message."""
    if found != EJECTED:
        raise RewireError(
            f"{what} and rewire_runtime.py belong to two models: files were copied or left from an older model, or "
            "rewire.eject was ended while it replaced them. Eject the model once more, with force=True (--force)."
        )


class Function(NamedTuple):
    """What an edited function knows of the streams that run through it.

    Attributes:
        where: file and line of the original, for messages.
        trunks: for each trunk, the arguments of an `Entry`.
        helper: the edited function, if it is no method.
    """

    where: str
    trunks: Sequence[dict[str, Any]]
    helper: Callable[..., Any] | None = None


def connect(
    model: nn.Module,
    trunks: Mapping[str, Layout],
    modules: Mapping[str, tuple[type[nn.Module] | None, Mapping[str, Function]]],
    collecting: Mapping[str, Sequence[str]],
    norms: Sequence[str],
) -> None:
    """Give a plain model its edited functions and connection weights, in place.

    Args:
        model: as it was made; its weights may still be on the meta device.
        trunks: where the weights of a trunk are registered, and what connects its residual adds.
        modules: for each module that streams run through its edited class (None: that of ``model`` itself, or none),
            and what its functions know, by the name of the attribute that holds it.
        collecting: modules that may return hidden states that they collected, and of which trunks.
        norms: those that keys and values have copies of.

    Raises:
        RewireError: the model is another one than the one that was ejected.
    """
    check_ejected(getattr(getattr(model, "config", None), CONFIG, EJECTED), "The config")
    connections: dict[str, Connection] = {}
    for path, layout in trunks.items():
        holder, _, name = path.rpartition(".")
        owner = _found(model, holder.removesuffix(CONNECTIONS).rstrip("."))
        if CONNECTIONS not in children_of(owner):
            owner.add_module(CONNECTIONS, nn.ModuleDict())
        connections[layout.trunk] = Ejected(layout, "paper")
        owner.get_submodule(CONNECTIONS).add_module(name, connections[layout.trunk])
    for path in norms:
        norm = _found(model, path)
        norm.add_module(CONNECTIONS, SeparateNorms(norm))
    for path, (edited, functions) in modules.items():
        module = _found(model, path)
        if edited is not None:
            (base,) = edited.__bases__
            if type(module) is not base:
                raise RewireError(
                    f"'{path}' is of class {type(module).__qualname__} here, and was of class {base.__qualname__} when "
                    "the model was ejected: make the model with the arguments that it had then."
                )
            module.__class__ = edited
            for name, method in registering(base).items():
                setattr(edited, name, method)
            show_tensors(forward_pre_hooks(module), forward_hooks(module))
            _remember_outputs(module)
        gates = {
            name: Gate(path, function.where, [_entry(given, connections) for given in function.trunks], function.helper)
            for name, function in functions.items()
        }
        helpers = {name: gate for name, gate in gates.items() if gate.function is not None}
        for gate in helpers.values():
            gate.helpers = helpers
        module.__dict__.update(gates)
    for path, names in collecting.items():
        hook = StreamsToTensors()
        hook.trunks.update(names)
        _found(model, path).register_forward_hook(hook)


def _remember_outputs(module: Any) -> None:
    """Tell transformers which outputs its models collect: it looks that up by the class's name."""
    if getattr(module, "_can_record_outputs", None):
        with contextlib.suppress(ImportError):  # other versions ask the class itself
            from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

            _CAN_RECORD_REGISTRY[module] = module._can_record_outputs


def _entry(given: dict[str, Any], connections: Mapping[str, Connection]) -> Entry:
    return Entry(connection=connections[given["trunk"]], **given)


def _found(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError:
        raise RewireError(
            f"{type(model).__name__} has no module '{path}', which it had when it was ejected: make the model with the "
            "arguments that it had then."
        ) from None
