"""Warnings, at an optimiser's first step, if it treats connection weights wrongly."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

_CONNECTIONS: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_SEEN: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def known(connection: nn.Module) -> None:
    """Have optimisers checked that get the weights of this connection."""
    _CONNECTIONS.add(connection)
    _watch()


@functools.cache
def _watch() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    if torch.compiler.is_compiling() or optimizer in _SEEN:
        return
    _SEEN.add(optimizer)
    for what, names in _mistakes(optimizer).items():
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        warnings.warn(
            f"{type(optimizer).__name__} {what} connection weights of rewire ({shown}). {_WHY[what]} Use the groups "
            "of rewire.parameter_groups(model, lr=.., weight_decay=..), for Muon with muon_lr=.. as well.",
            stacklevel=2,
        )


_WHY = {
    "decays": "That pulls them to 0, which is not a neutral value: it switches branches off, or makes weights equal.",
    "orthogonalises": "Muon is for matrices that map hidden states. Connection weights are not: train them with Adam.",
}


def _mistakes(optimizer: Optimizer) -> dict[str, list[str]]:
    """What an optimiser wrongly does to connection weights -> their names."""
    named = {id(parameter): (name, matrix) for name, parameter, matrix in _weights()}
    found: dict[str, list[str]] = {}
    for group in optimizer.param_groups:
        muon = "muon" in type(optimizer).__name__.lower() and group.get("use_muon", True)
        for name, matrix in (named[id(p)] for p in group["params"] if id(p) in named):
            if muon:
                found.setdefault("orthogonalises", []).append(name)
            elif group.get("weight_decay", 0) and not matrix:
                found.setdefault("decays", []).append(name)
    return found


def _weights() -> Iterator[tuple[str, Any, bool]]:
    """All learned connection weights: name, parameter, and whether it is a matrix, whose decay may be intended."""
    connections: list[Any] = [*_CONNECTIONS]
    for connection in connections:
        layout = connection.layout
        for name, parameter in connection.named_parameters():
            yield f"{layout.trunk}: {name}", parameter, connection.weight_of(name) in layout.topology.matrices
