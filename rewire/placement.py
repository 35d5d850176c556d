"""Sharded hidden states: sequence parallelism, and models whose hidden states are DTensors.

Streams hold plain local tensors, the only ones that kernels take. Each rank computes its own tokens without the other
ranks, forward and backward. Only the gradients of connection weights have to be summed, over the mesh dimensions along
which hidden states are sharded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rewire.errors import RewireError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: A DTensor's placements, one for each dimension of its mesh.
Placements = tuple[Any, ...]

#: How many autograd nodes to search for the operation that sharded a tensor: past dropouts, casts and sums.
FURTHEST = 64


class Placement:
    """Where the hidden states of a trunk lie on a device mesh.

    A plain class, not a dataclass: FSDP2 rebuilds every dataclass that it meets in a block's inputs.

    Args:
        mesh: the devices.
        sharded: dimensions of the mesh along which ranks have different parts of the hidden states.
        placements: placements of hidden states that are DTensors; None if they are plain tensors.
        shape: global shape of these DTensors.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        sharded: tuple[int, ...],
        placements: Placements | None = None,
        shape: torch.Size | None = None,
    ) -> None:
        self.mesh, self.sharded, self.placements, self.shape = mesh, sharded, placements, shape

    def local(self, x: Any) -> Tensor:
        """This rank's part of a hidden state, as a plain tensor."""
        return x.redistribute(self.mesh, self.placements).to_local() if is_dtensor(x) else x

    @classmethod
    def of_tokens(cls, x: Any, local: torch.Size) -> Placement:
        """The placement of hidden states of local shape ``local``, from one that is a DTensor."""
        tokens = len(local) - 1
        return cls(x.device_mesh, _sharded(x.placements), x.placements, torch.Size([*x.shape[:tokens], local[-1]]))

    def wrapped(self, x: Tensor) -> Tensor:
        """A local hidden state, or another tensor with the same tokens, as the model has it: perhaps a DTensor."""
        if self.placements is None:
            return x
        from torch.distributed.tensor import DTensor

        assert self.shape is not None
        tokens = len(self.shape) - 1
        shape = torch.Size([*self.shape[:tokens], *x.shape[tokens:]])
        made = DTensor.from_local(x, self.mesh, self.placements, run_check=False)
        if made.shape == shape:
            return made
        stride = torch.empty(shape, device="meta").stride()  # shards of different sizes
        return DTensor.from_local(
            x.contiguous(), self.mesh, self.placements, run_check=False, shape=shape, stride=stride
        )

    def reduced(self, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        """The same weights, with gradients that are summed over the ranks that have different tokens."""
        learned = {name: p for name, p in parameters.items() if p.requires_grad}
        if not (self.sharded and learned and torch.is_grad_enabled()):
            return parameters
        groups = [self.mesh.get_group(number) for number in self.sharded]
        return {**parameters, **dict(zip(learned, _Reduced.apply(groups, *learned.values()), strict=True))}


class _Reduced(torch.autograd.Function):
    """The identity, whose backward sums gradients over process groups, with one all-reduce for each group."""

    @staticmethod
    def forward(ctx: Any, groups: list[dist.ProcessGroup], *tensors: Tensor) -> tuple[Tensor, ...]:
        # No views: a compiled block that returns one makes it anew from the parameter, and bypasses this sum.
        ctx.groups = groups
        return tuple(x.clone() for x in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        flat = torch.cat([grad.flatten() for grad in grads])
        for group in ctx.groups:
            dist.all_reduce(flat, group=group)
        parts = flat.split([grad.numel() for grad in grads])
        return (None, *(part.view_as(grad) for part, grad in zip(parts, grads, strict=True)))


def is_dtensor(x: object) -> bool:
    """Whether ``x`` is a DTensor; by name, as most models need no import of torch.distributed.tensor."""
    return type(x).__name__ == "DTensor"


def unwrapped(x: Any, channel_dim: int, trunk: str) -> tuple[Tensor, Placement]:
    """This rank's part of a trunk's input that is a DTensor, and the placement of it and of all later states.

    Raises:
        RewireError: the input is sharded along its channels.
    """
    from torch.distributed.tensor import Replicate

    placements: Placements = tuple(Replicate() if p.is_partial() else p for p in x.placements)
    placement = Placement(x.device_mesh, _sharded(placements), placements, x.shape)
    if any(placements[number].dim in (channel_dim, channel_dim + x.dim()) for number in placement.sharded):
        raise RewireError(
            f"the hidden states of trunk '{trunk}' are sharded along their channels ({x.placements}), and connections "
            "need all channels of a token. Let the modules around the trunk return them replicated, or sharded along "
            "the sequence."
        )
    return placement.local(x), placement


def check_whole(x: Tensor, channel_dim: int, trunk: str) -> None:
    """Raise RewireError if a plain tensor is known to be one rank's part of a hidden state.

    Only its autograd graph can tell, if a DTensor or a reduce-scatter made it.
    """
    if torch.compiler.is_compiling() or not (dist.is_available() and dist.is_initialized()):
        return
    how = _how_sharded(x, channel_dim)
    if how:
        raise _undeclared(trunk, how)


def check_norm(norm: nn.Module, trunk: str) -> None:
    """Raise RewireError if a norm reads plain hidden states and has replicated weights: PyTorch's SequenceParallel.

    `check_whole` cannot see that after frozen layers, where hidden states have no autograd graph. Skipped while
    compiling: an error would break the graph, which fails in torch after an embedding that is a DTensor.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    weights: list[Any] = [p for p in norm.parameters(recurse=False) if is_dtensor(p)]
    if weights and not any(_sharded(weight.placements) for weight in weights):
        raise _undeclared(trunk, "its first norm has the weights of SequenceParallel")


def _undeclared(trunk: str, how: str) -> RewireError:
    return RewireError(
        f"each rank has only part of the tokens in trunk '{trunk}' ({how}), so each would train different connection "
        "weights. Call rewire.parallelize(model, mesh, sequence=True) with the mesh of these ranks: the gradients of "
        "connection weights are then summed over it. If all ranks have all tokens, pass sequence=False."
    )


def _how_sharded(x: Tensor, channel_dim: int) -> str:
    nodes = [x.grad_fn]
    for node in nodes:  # breadth-first: the list grows
        name = type(node).__name__.replace("_", "").lower()
        spec = getattr(node, "dtensor_spec", None)  # set by DTensor.to_local
        if "reducescatter" in name:
            return type(node).__name__
        if spec is not None:
            dims = {spec.placements[number].dim for number in _sharded(spec.placements)}
            whole = [d for d in range(x.dim()) if d not in dims]
            same = len(spec.shape) == x.dim() and all(spec.shape[d] == x.shape[d] for d in whole)
            if same and dims and channel_dim % x.dim() not in dims:
                return f"a DTensor, {spec.placements} over {spec.mesh}"
        elif node is not None and not ("allgather" in name or "allreduce" in name) and len(nodes) < FURTHEST:
            nodes.extend(source for source, _ in node.next_functions if source not in nodes)
    return ""


def _sharded(placements: Placements) -> tuple[int, ...]:
    """The dimensions of a mesh along which a tensor of these placements is sharded."""
    return tuple(number for number, placement in enumerate(placements) if hasattr(placement, "dim"))
