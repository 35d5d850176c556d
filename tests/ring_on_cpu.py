"""torch's context parallelism on a CPU: its ring attention, for the attention operator of CPUs, which it leaves out.

The ring, its rotation of keys and values, the load balancing and the merge of parts are torch's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental._context_parallel import _attention as ring

aten: Any = torch.ops.aten
SEQUENCE = 2


def enable() -> None:
    """Let context parallelism know the operator and its gradient, from now on in this process."""
    ring.custom_ops[aten._scaled_dot_product_flash_attention_for_cpu.default] = _handler(_forward)
    ring.custom_ops[aten._scaled_dot_product_flash_attention_for_cpu_backward.default] = _handler(_backward)


def _handler(call: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[DTensor, ...]]:
    """``call`` on this rank's part of tensors that are sharded along the sequence."""

    def handler(op: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[DTensor, ...]:
        mesh = args[0].device_mesh
        parts = call(mesh, op, *[x.to_local() if isinstance(x, DTensor) else x for x in args], **options)
        return tuple(DTensor.from_local(part, mesh, [Shard(SEQUENCE)], run_check=False) for part in parts)

    return handler


def _forward(
    mesh: DeviceMesh,
    op: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> tuple[Tensor, ...]:
    options |= {"dropout_p": dropout_p, "is_causal": is_causal}
    return ring._templated_ring_attention(mesh.get_group(), SEQUENCE, op, query, key, value, **options)


def _backward(
    mesh: DeviceMesh,
    op: Any,
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    **options: Any,
) -> tuple[Tensor, ...]:
    options |= {"dropout_p": dropout_p, "is_causal": is_causal}
    given = (grad.contiguous(), "grad_out", query, key, value, out, logsumexp)
    return ring._templated_ring_attention_backward(mesh.get_group(), SEQUENCE, op, *given, **options)
