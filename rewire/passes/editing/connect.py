"""Pass: register connection weights in the model, and keep streams inside it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from rewire.attributes import CONNECTIONS
from rewire.errors import RewireError
from rewire.patterns import is_pretrained
from rewire.runtime.connection import Connection, Connections, SeparateNorms
from rewire.runtime.nested import mapped
from rewire.runtime.stream import Stream
from rewire.torch_internals import children_of, forward_hooks
from rewire.trunk import Trunk


def register(model: nn.Module, trunk: Trunk, connection: Connection) -> None:
    """Make ``connection`` a child of the module that owns ``trunk``."""
    connection.others = connection.others or plain_parameters(model)
    owner, name = model.get_submodule(trunk.owner), place(trunk).rpartition(".")[2]
    if CONNECTIONS not in children_of(owner):
        if hasattr(owner, CONNECTIONS):
            raise RewireError(f"'{trunk.owner}' already has an attribute '{CONNECTIONS}'.")
        owner.add_module(CONNECTIONS, Connections())
    owner.get_submodule(CONNECTIONS).add_module(name, connection)
    owner.get_submodule(CONNECTIONS).train(owner.training)


def plain_parameters(model: nn.Module) -> int:
    """The number of a model's parameters that are not connection weights; tied ones count once for each use."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return sum(CONNECTIONS not in name.split(".") for name in names)


def copy_norms(model: nn.Module, paths: Collection[str]) -> None:
    """Give the norms at ``paths`` copies for keys and values."""
    for path in sorted(paths):
        norm = model.get_submodule(path)
        if hasattr(norm, CONNECTIONS):
            raise RewireError(f"'{path}' already has an attribute '{CONNECTIONS}'.")
        norm.add_module(CONNECTIONS, SeparateNorms(norm))


def drop_copies(model: nn.Module) -> None:
    """Remove the copies of norms: one norm serves queries, keys and values again."""
    for module in model.modules():
        if isinstance(children_of(module).get(CONNECTIONS), SeparateNorms):
            del children_of(module)[CONNECTIONS]


def place(trunk: Trunk) -> str:
    """Path of the connection of ``trunk`` in a rewired model."""
    below = trunk.name.removeprefix(trunk.owner).strip(".") or "trunk"
    return ".".join(filter(None, (trunk.owner, CONNECTIONS, below.replace(".", "_"))))


class StreamsToTensors:
    """Forward hook that turns hidden states, which a model collected between the blocks of ``trunks``, into tensors."""

    takes_streams = True

    def __init__(self) -> None:
        self.trunks: set[str] = set()

    def __call__(self, _module: nn.Module, _args: object, output: object) -> Any:
        return mapped(output, lambda x: x.value() if isinstance(x, Stream) and x.layout.trunk in self.trunks else x)


def convert_collected(model: nn.Module, trunk: Trunk) -> None:
    """Hook the modules that may return collected hidden states of a trunk.

    These are the module that calls the blocks, and in Hugging Face models the nearest model around it, whose decorated
    forward collects them.
    """
    parts = trunk.owner.split(".") if trunk.owner else []
    above = [model.get_submodule(".".join(parts[:count])) for count in range(len(parts), -1, -1)]
    above = [module for module in above if not isinstance(module, (nn.ModuleList, nn.ModuleDict))]
    collecting = next((module for module in above if is_pretrained(module)), above[0])
    for module in {above[0]: None, collecting: None}:
        if any(module is model.get_submodule(site.block) for site in trunk.sites):
            continue
        hook = next((h for h in forward_hooks(module).values() if isinstance(h, StreamsToTensors)), None)
        if hook is None:
            hook = StreamsToTensors()
            module.register_forward_hook(hook)
        hook.trunks.add(trunk.name)
