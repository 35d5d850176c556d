"""The first training forward of a connection: whether the ranks that go on together have rewired alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes

from rewire.placement import is_dtensor
from rewire.ranks.meeting import PATIENCE, Meeting, alone
from rewire.ranks.watch import Watched, watch_values


class _Known:
    """What is known of a connection: its meetings, by group (None: all have come), and where FSDP was looked for."""

    def __init__(self) -> None:
        self.meetings: dict[Any, Meeting | None] = {}
        self.looked: tuple[list[int], Any] = ([], None)


_KNOWN: WeakKeyDictionary[nn.Module, _Known] = WeakKeyDictionary()


def compare(connection: Watched, x: Tensor, mesh: Any) -> None:
    """Compare with the ranks that run this forward, too, as far as that is known; once for each group.

    Args:
        connection: its parameters say whether FSDP or DTensor have placed them.
        x: the trunk's input.
        mesh: on which hidden states lie, if that is declared.

    Raises:
        RewireError: they differ.
    """
    if alone() or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    with _disable_current_modes():  # which may count operations, and would miss these when a block is computed again
        watch_values(connection, x)
        _compare(connection, mesh, _KNOWN.setdefault(connection, _Known()))


def _compare(connection: Watched, mesh: Any, known: _Known) -> None:
    for group, replicated in _groups(connection, mesh, known):
        if group not in known.meetings:
            ranks = _ranks(group)
            facts = connection.facts() | (_sums(connection) if replicated else {})
            meeting = Meeting("forward", ranks, facts) if len(ranks) > 1 else None
            known.meetings[group] = meeting if meeting is not None and not meeting.wait(PATIENCE) else None
        else:
            later = known.meetings[group]
            if later is not None and later.wait(0):
                known.meetings[group] = None


def _groups(connection: nn.Module, mesh: Any, known: _Known) -> Iterator[tuple[Any, bool]]:
    """Meshes and process groups whose ranks run this forward together, and whether each has all of the weights."""
    weights: list[Any] = list(connection.parameters())
    own = next((weight.device_mesh for weight in weights if is_dtensor(weight)), None)
    sharding = own if own is not None else _fsdp_mesh(connection, known)
    if sharding is not None:
        yield sharding, False
    if mesh is not None and mesh is not sharding:
        yield mesh, sharding is None
    ddp = DistributedDataParallel._get_active_ddp_module()
    if ddp is not None:
        yield ddp.process_group, sharding is None


def _fsdp_mesh(connection: nn.Module, known: _Known) -> Any:
    """The mesh of a module around the connection that FSDP2 shards together with it: its weights are gathered now."""
    parameters = [id(parameter) for parameter in connection.parameters()]
    if parameters != known.looked[0]:
        known.looked = parameters, next(_sharding(connection), None)
    return known.looked[1]


def _sharding(connection: nn.Module) -> Iterator[Any]:
    from torch.distributed._composable_state import _module_state_mapping

    for reference in list(_module_state_mapping.values()):
        for group in getattr(reference(), "_fsdp_param_groups", ()):
            if any(one._module_info.module is connection for one in group.fsdp_params):
                yield group.mesh_info.mesh


def _ranks(group: Any) -> list[int]:
    found = group.mesh.flatten().tolist() if hasattr(group, "mesh") else dist.get_process_group_ranks(group)
    return [int(rank) for rank in found]


def _sums(connection: nn.Module) -> dict[str, str]:
    """What tells apart weights of the same recipe: replicas begin with the same."""
    weights: list[Tensor] = [parameter.detach().double() for parameter in connection.parameters()]
    total = sum(float(weight.sum()) for weight in weights)
    squares = sum(float(weight.square().sum()) for weight in weights)
    return {"connection weights with sum, sum of squares": f"{total:.6g}, {squares:.6g}"}
