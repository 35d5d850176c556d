"""Part of the runtime file: turns a plain model into a rewired one, given the edited functions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rewire.attributes import CONNECTIONS
from rewire.errors import RewireError
from rewire.passes.editing.connect import StreamsToTensors
from rewire.placement import is_dtensor
from rewire.runtime.connection import Connection, Connections, SeparateNorms
from rewire.runtime.gate import Gate
from rewire.runtime.hooks import registering, show_tensors
from rewire.runtime.layout import Layout
from rewire.runtime.live import Entry
from rewire.torch_internals import buffers_of, children_of, forward_hooks, forward_pre_hooks, parameters_of

CONFIG = "rewire_ejected"  # the config's entry for the digest
#: A placeholder, here and in other files, for which `rewire.eject` substitutes the digest of what it writes.
EJECTED = "digest of the ejected files"


class Ejected(Connection):
    """A connection whose state dict has the digest of the files to which the weights belong."""

    def get_extra_state(self) -> Tensor:
        return self._beside_weights(EJECTED)

    def set_extra_state(self, state: object) -> None:
        if isinstance(state, Tensor):  # else torch's placeholder for a key that a partial state dict does not have
            _check_weights(state)

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load weights by name, for serving engines that load each module, and return the names.

        vLLM and SGLang recreate parameters for which they have no layers, in the model's dtype; this makes them float32
        again. Parameters that are float32 already stay the same tensors, which CUDA graphs read.
        """
        loaded = set()
        for name, value in weights:
            loaded.add(name)
            if name == "_extra_state":
                _check_weights(value)
                continue
            own = {**parameters_of(self), **buffers_of(self)}.get(name)
            if own is None or own.shape != value.shape:
                raise RewireError(f"'{name}' {list(value.shape)} is no weight of trunk '{self.layout.trunk}'.")
            if own.dtype == torch.float32 and not own.is_meta:
                own.copy_(value)
            else:
                device = value.device if own.is_meta else own.device
                self.register_parameter(name, nn.Parameter(value.to(device, torch.float32), own.requires_grad))
        return loaded


def _check_weights(state: Any) -> None:
    own = state.to_local() if is_dtensor(state) else state
    check_ejected(bytes(own.byte().flatten().tolist()).decode(errors="replace"), "The weights")


def check_ejected(found: str, what: str) -> None:
    """Raise RewireError if a part has the digest of another ejected model; ``what`` begins the message."""
    if found != EJECTED:
        raise RewireError(
            f"{what} and rewire_runtime.py belong to two models: files were copied or left from an older model, or "
            "rewire.eject was interrupted. Eject the model once more, with force=True (--force)."
        )


class Function(NamedTuple):
    """The data of an edited function's `Gate`.

    Attributes:
        where: file and line of the original, for messages.
        trunks: for each trunk, the arguments of an `Entry`.
        helper: the edited function, if it is not a method.
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
    lists: Mapping[str, int],
) -> None:
    """Give a plain model its edited functions and connection weights, in place.

    Args:
        model: a new plain model; its weights may still be on the meta device.
        trunks: path under which a trunk's weights are registered -> its layout.
        modules: path of each module that streams pass -> its edited class (None: it has none), and the data of its
            gates, by attribute name.
        collecting: modules that may return collected hidden states -> the trunks of these.
        norms: paths of norms with copies for keys and values.
        lists: paths of lists of blocks -> their lengths.

    Raises:
        RewireError: the model is not the one that was ejected.
    """
    for path, length in lists.items():
        blocks: Any = _found(model, path)
        if len(blocks) > length:  # a shorter one lacks a module that is looked up below
            raise RewireError(
                f"'{path}' has {len(blocks)} modules, and had {length} when the model was ejected: those behind them "
                "would not be connected. Make the model with the same arguments as then."
            )
    check_ejected(getattr(getattr(model, "config", None), CONFIG, EJECTED), "The config")
    connections: dict[str, Connection] = {}
    holders: dict[str, tuple[nn.Module, str]] = {}
    for path, layout in trunks.items():
        holder, _, name = path.rpartition(".")
        owner = _found(model, holder.removesuffix(CONNECTIONS).rstrip("."))
        if CONNECTIONS not in children_of(owner):
            owner.add_module(CONNECTIONS, Connections())
        connections[layout.trunk] = Ejected(layout, "paper")
        holders[layout.trunk] = owner, name
        owner.get_submodule(CONNECTIONS).add_module(name, connections[layout.trunk])
    for path in norms:
        norm = _found(model, path)
        norm.add_module(CONNECTIONS, SeparateNorms(norm))
    for path, (edited, functions) in modules.items():
        module = _found(model, path)
        if edited is not None and not isinstance(module, edited):  # the model's own class already derives from it
            base = edited.__bases__[0]  # engines add other bases
            if type(module) is not base:
                raise RewireError(
                    f"'{path}' is of class {type(module).__qualname__} here, and was of class {base.__qualname__} "
                    "when the model was ejected. Make the model with the same arguments as then."
                )
            module.__class__ = edited
            for name, method in registering(base).items():
                setattr(edited, name, method)
            show_tensors(forward_pre_hooks(module), forward_hooks(module))
            _remember_outputs(module)
        gates = {
            name: Gate(path, function.where, _entries(module, function, connections, holders), function.helper)
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


def part_of(
    model: Any,
    base: str,
    trunks: Mapping[str, Layout],
    modules: Mapping[str, tuple[type[nn.Module] | None, Mapping[str, Function]]],
    collecting: Mapping[str, Sequence[str]],
    norms: Sequence[str],
    lists: Mapping[str, int],
) -> tuple[Any, ...]:
    """The arguments of `connect` for another transformers model with the same base model, or a part of it.

    Args:
        model: the other model, with another head or none.
        base: path of the ejected model's base model.
        trunks, modules, collecting, norms, lists: the arguments for the ejected model.

    Raises:
        RewireError: the other model has only a part of a trunk, or has it in another place.
    """
    here = model.base_model_prefix if model.base_model is not model else ""
    there = dict(model.named_modules())

    def moved(path: str) -> str | None:
        """The path in this model of a module of the ejected model."""
        if base and not f"{path}.".startswith(f"{base}."):
            return None
        found = ".".join(filter(None, (here, path[len(base) :].lstrip("."))))
        return found if found in there else None

    kept: dict[str, Layout] = {}
    for path, layout in trunks.items():
        holder, name = path.split(CONNECTIONS)
        owner = moved(holder.rstrip("."))
        if owner is not None:
            kept[f"{owner}.{CONNECTIONS}{name}".lstrip(".")] = layout
    names = {layout.trunk for layout in kept.values()}
    places = {path: place for path in (*modules, *collecting, *norms, *lists) if (place := moved(path)) is not None}
    connected = {places[path]: known for path, known in modules.items() if path in places}
    for path, (edited, functions) in modules.items():
        elsewhere = path not in places and edited is not None and edited.__bases__[0]
        strays = any(type(module) is elsewhere and place not in connected for place, module in there.items())
        for function in functions.values():
            if strays or any((trunk["trunk"] in names) != (path in places) for trunk in function.trunks):
                told = ", ".join(f"'{trunk['trunk']}'" for trunk in function.trunks)
                raise RewireError(
                    f"{type(model).__name__} has trunk {told} of the ejected model in part only, or blocks of its "
                    "class in other places. Load the ejected class, which config.json names first in auto_map."
                )
    collectors = {
        places[path]: [n for n in given if n in names] for path, given in collecting.items() if path in places
    }
    lengths = {places[path]: length for path, length in lists.items() if path in places}
    return kept, connected, collectors, [places[path] for path in norms if path in places], lengths


def _remember_outputs(module: Any) -> None:
    """Register which outputs a model collects: transformers looks that up by the name of the class."""
    if getattr(module, "_can_record_outputs", None):
        with contextlib.suppress(ImportError):  # other versions look it up on the class
            from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

            _CAN_RECORD_REGISTRY[module] = module._can_record_outputs


def _entries(
    module: nn.Module,
    function: Function,
    connections: Mapping[str, Connection],
    holders: Mapping[str, tuple[nn.Module, str]],
) -> list[Entry]:
    def entry(trunk: dict[str, Any]) -> Entry:
        name, told = trunk["trunk"], (*trunk.get("iterations", ()), *trunk.get("calls", ()))
        told_apart = {path: _found(module, path) for path in told}
        held = holders[name] if trunk["begins"] else None
        return Entry(connection=connections[name], told_apart=told_apart, held=held, **trunk)

    return [entry(trunk) for trunk in function.trunks]


def _found(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError:
        raise RewireError(
            f"{type(model).__name__} has no module '{path}', but had one when it was ejected. Make the model with the "
            "same arguments as then."
        ) from None
