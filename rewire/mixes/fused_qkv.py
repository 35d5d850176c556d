"""One fused projection, applied to three inputs: each takes its own rows of the weight."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rewire.torch_internals import has_global_hooks, has_hooks


@dataclasses.dataclass(frozen=True)
class Fused:
    """Layout of the output of a fused projection: ``groups`` times (queries, keys, values).

    One group is ``[q | k | v]``; interleaved heads have one group for each head, grouped-query attention one for each
    key-value head.

    Attributes:
        groups: number of groups.
        sizes: numbers of features of q, k and v in one group; 0 for those that another projection makes.

    Example:
        >>> rewire.Fused(groups=8, sizes=(64, 64, 64)).rows  # 8 heads, each with its q, k and v
        1536
    """

    groups: int
    sizes: tuple[int, int, int]

    @property
    def rows(self) -> int:
        """Number of features of the whole output."""
        return self.groups * sum(self.sizes)


def project_fused(
    projection: Callable[[Tensor], Tensor],
    groups: int,
    sizes: tuple[int, int, int],
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> Tensor:
    """The output of ``projection``, with the features of queries, keys and values computed from different inputs.

    The weight is sliced, not copied. A projection that is not a plain linear map (wrapped by an adapter, quantised,
    hooked) is called on each of the three inputs, and the features of that input are taken.

    Args:
        projection: maps [..., D] to [..., groups * sum(sizes)].
        groups: see `Fused`.
        sizes: see `Fused`.
        q, k, v: [..., D], the inputs from which queries, keys and values are projected.

    Returns:
        [..., groups * sum(sizes)], laid out as the projection's own output.
    """
    weight = _plain_weight(projection)  # [groups * sum(sizes), D]
    if weight is None:
        inputs = ((n, x) for n, x in enumerate((q, k, v)) if sizes[n])
        features = [projection(x).unflatten(-1, (groups, -1)).split(sizes, -1)[n] for n, x in inputs]
        return torch.cat(features, dim=-1).flatten(-2)
    return fused_linear(weight, projection.bias, groups, sizes, q, k, v)  # type: ignore[attr-defined]


def fused_linear(
    weight: Tensor, bias: Tensor | None, groups: int, sizes: tuple[int, int, int], q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """`project_fused` for a linear map with this weight [groups * sum(sizes), D] and bias [groups * sum(sizes)]."""
    weights = weight.unflatten(0, (groups, -1)).split(sizes, 1)  # each [groups, size, D]
    biases = (None,) * 3 if bias is None else bias.unflatten(0, (groups, -1)).split(sizes, 1)
    features = [_linear(x, w, b) for x, w, b in zip((q, k, v), weights, biases, strict=True) if w.shape[1]]
    return torch.cat(features, dim=-1).flatten(-2)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[..., D] times [groups, size, D] to [..., groups, size], reading the slice of the weight in place."""
    if weight.shape[0] == 1:
        return F.linear(x, weight[0], None if bias is None else bias[0]).unsqueeze(-2)
    rows = x.reshape(-1, x.shape[-1])  # [N, D]
    y = torch.bmm(rows.expand(weight.shape[0], -1, -1), weight.transpose(1, 2))  # [groups, N, size]
    y = y if bias is None else y + bias.unsqueeze(1).to(y.dtype)
    return y.transpose(0, 1).unflatten(0, x.shape[:-1])


def _plain_weight(projection: object) -> Tensor | None:
    """Weight [out, in] of a plain linear map; None for anything else."""
    if not isinstance(projection, nn.Module) or has_hooks(projection) or has_global_hooks():
        return None
    cls, linear = type(projection), cast("nn.Linear", projection)
    if cls is nn.Linear or (cls.__name__ == "FalconLinear" and cls.__module__.startswith("transformers.")):
        return linear.weight
    if cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils":
        return linear.weight.t()
    return None
