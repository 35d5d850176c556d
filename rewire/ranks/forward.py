"""The first training forward of a connection: check that the ranks that run it have rewired alike."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rewire.placement import is_dtensor
from rewire.ranks.meeting import PATIENCE, Meeting, alone
from rewire.ranks.watch import Watched, watch_values
from rewire.torch_internals import is_fake, running_ddp, under_functorch, without_dispatch_modes

#: Meetings of connections, by group; None: everyone has come.
_MEETINGS: WeakKeyDictionary[nn.Module, dict[Any, Meeting | None]] = WeakKeyDictionary()


def compare(connection: Watched, x: Tensor, mesh: object) -> None:
    """In a training forward, compare with the other ranks that run it, as far as these are known; once for each group.

    Args:
        connection: its parameters show whether DTensor has placed them.
        x: the trunk's input.
        mesh: the mesh of the hidden states, if declared.

    Raises:
        RewireError: they differ.
    """
    if alone() or not (torch.is_grad_enabled() and any(weight.requires_grad for weight in connection.parameters())):
        return
    if x.is_meta or is_fake(x) or under_functorch():
        return  # there are no values
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    sharding = _sharding(connection)
    ddp = running_ddp()
    watch_values(connection, x)
    for group in (sharding, mesh, None if ddp is None else ddp.process_group):
        if group is not None:
            _meet(connection, group, replicated=sharding is None)


def compare_sharded(connection: Watched) -> None:
    """Compare with the ranks that hold parts of the weights, before these are gathered for the first time.

    Raises:
        RewireError: they differ.
    """
    sharding = _sharding(connection)
    if sharding is not None and not alone():
        _meet(connection, sharding, replicated=False)


def _sharding(connection: nn.Module) -> Any:
    weights: list[Any] = list(connection.parameters())
    return next((weight.device_mesh for weight in weights if is_dtensor(weight)), None)


def _meet(connection: Watched, group: object, replicated: bool) -> None:
    """Compare with a mesh or process group; ``replicated``: the values of the weights, too."""
    meetings = _MEETINGS.setdefault(connection, {})
    if group in meetings:
        later = meetings[group]
        if later is not None and later.wait(0):
            meetings[group] = None
        return
    ranks, meetings[group] = _ranks(group), None
    if len(ranks) > 1:
        meeting = Meeting("forward", ranks, connection.facts() | (_sums(connection) if replicated else {}))
        if not meeting.wait(PATIENCE):
            meetings[group] = meeting


def _ranks(group: Any) -> list[int]:
    found = group.mesh.flatten().tolist() if hasattr(group, "mesh") else dist.get_process_group_ranks(group)
    return [int(rank) for rank in found]


def _sums(connection: nn.Module) -> dict[str, str]:
    """Checksums that distinguish weights with the same recipe: replicas start with equal ones."""
    with without_dispatch_modes():  # see Watch.step
        weights: list[Tensor] = [parameter.detach().double() for parameter in connection.parameters()]
        total = sum(float(weight.sum()) for weight in weights)
        squares = sum(float(weight.square().sum()) for weight in weights)
    return {"connection weights with sum, sum of squares": f"{total:.6g}, {squares:.6g}"}
