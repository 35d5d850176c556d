"""LAuReL: learned augmented residual layers (arXiv 2411.07501)."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from rewire.errors import check_choice, check_count, check_positive
from rewire.mixes.mix import mix
from rewire.mixes.tokens import project
from rewire.topologies.base import Dims, Granularity, Recurrence, Start, States, no_preserving_start, repeatable, total
from rewire.topologies.registry import register_topology
from rewire.topologies.scaled_sum import ScaledSum, Scales

Form = Literal["softmax", "difference"]

# In the paper, f may be an attention, an MLP or a group of them. Its language models add 2N and 2rND parameters for N
# layers (Section 3.2.1; Table 5 agrees), which means one connection for each transformer block.
_GRANULARITY: Granularity = "block"


@register_topology("laurel-rw")
@dataclasses.dataclass(frozen=True)
class LaurelRW(ScaledSum):
    """LAuReL with residual weights: learned scalars on branch and shortcut (LAuReL-RW, arXiv 2411.07501).

    ``x_t = a_t f_t + b_t x_{t-1}`` (Section 2.1). States: see `ScaledSum`.

    The paper bounds a and b by "a normalization function such as softmax or sigmoid"; here
    ``(a_t, b_t) = total * softmax(c_t)``. **Both starts** are ``c = 0``, so ``a = b = total / 2``: with ``total=2``
    exactly the original network (bitwise in float32 and float64), where the softmax is steepest. With ``total=1``, the
    plain softmax, each unit halves branch and shortcut.

    For any other total, ``start="preserve"`` takes ``form="difference"``, which is ours:
    ``(a_t, b_t) = 1 + total * (softmax(c_t) - 1/2)``. At ``c = 0`` this is the original network, bitwise, and c has the
    same gradient as in the other form. a and b add up to 2, and stay between ``1 - total / 2`` and ``1 + total / 2``;
    for ``total=2`` both forms are the same.

    Args:
        total: a positive number, the sum of a and b; in difference form, the largest difference between them.
        form: "softmax", the paper's, or "difference".
    """

    granularity: ClassVar[Granularity] = _GRANULARITY
    of_states: ClassVar[frozenset[str]] = frozenset({"logits"})

    total: float = 2.0
    form: Form = "softmax"

    def __post_init__(self) -> None:
        _check_residual_weights(self.total, self.form)

    def for_start(self, start: Start) -> LaurelRW:
        return dataclasses.replace(self, form="difference") if start == "preserve" and self.total != 2 else self

    def parameters(self, dims: Dims, start: Start) -> dict[str, Tensor]:
        """``logits``, float32 [T, 2]: c_t for t = 1..T, with the branch's entry first."""
        return {"logits": _start_logits(self, dims, start)}

    def weights(self, parameters: dict[str, Tensor], dims: Dims) -> Scales:
        """a and b, float32 [T]."""
        return _residual_weights(parameters["logits"], self.total, self.form)


class LowRank(NamedTuple):
    """Weights of LAuReL-LR and -PA, float32.

    Attributes:
        down: A^T for each unit, [T, D, r].
        up: B^T for each unit, [T, r, D].
        scales: a and b; None: all 1.
        gains: for each t = 1..T, the weights of unit t's states, oldest first; empty in LAuReL-LR.
    """

    down: Tensor
    up: Tensor
    scales: Scales | None = None
    gains: tuple[Tensor, ...] = ()


@register_topology("laurel-lr")
@dataclasses.dataclass(frozen=True)
class LaurelLR(Recurrence[LowRank]):
    """LAuReL, low rank: the shortcut is the identity plus a learned low-rank map (LAuReL-LR, arXiv 2411.07501).

    ``x_t = f_t + x_{t-1} + B_t A_t x_{t-1}`` (Equation 3), where A is r x D and B is D x r. Unit t reads ``x_{t-1}``,
    the only state; the trunk's output is ``x_T``. Post-norm blocks norm the sum.

    **Both starts** are the paper's for language models (Section 3.3): ``B = 0``, the original network, bitwise, and
    ``A_ji = 1 / sqrt(r D)`` where ``i mod r = j``, else 0. B has a gradient from the first step on; A one step later,
    through B. The product is computed in float32, also under autocast.

    **With residual weights** (``total``), LAuReL-RW+LR: ``x_t = a_t f_t + b_t (x_{t-1} + B_t A_t x_{t-1})``
    (Equation 5), with a and b, their starts and forms as in `LaurelRW`.

    Args:
        rank: r, 1 or more; cut to D, beyond which it adds nothing.
        total: a positive number, the sum of a and b; None: without a and b.
        form: form of a and b.
    """

    granularity: ClassVar[Granularity] = _GRANULARITY
    needs_width: ClassVar[bool] = True
    matrices: ClassVar[frozenset[str]] = frozenset({"down", "up"})
    of_states: ClassVar[frozenset[str]] = frozenset({"logits", "gains"})

    rank: int = 16
    total: float | None = dataclasses.field(default=None, kw_only=True)
    form: Form = dataclasses.field(default="softmax", kw_only=True)

    def __post_init__(self) -> None:
        check_count("rank", self.rank, 1)
        _check_residual_weights(self.total, self.form)

    def for_start(self, start: Start) -> LaurelLR:
        given = self.total not in (None, 2)
        return dataclasses.replace(self, form="difference") if start == "preserve" and given else self

    def parameters(self, dims: Dims, start: Start) -> dict[str, Tensor]:
        """``down``, float32 [T, D, r], and ``up``, float32 [T, r, D]: ``A_t^T`` and ``B_t^T``.

        With residual weights also ``logits``, as in `LaurelRW`.
        """
        rank = min(self.rank, dims.width)
        down = torch.zeros(dims.width, rank)
        channels = torch.arange(dims.width)
        down[channels, channels % rank] = (rank * dims.width) ** -0.5
        values = {"down": down.repeat(dims.depth, 1, 1), "up": torch.zeros(dims.depth, rank, dims.width)}
        return values if self.total is None else {**values, "logits": _start_logits(self, dims, start)}

    def weights(self, parameters: dict[str, Tensor], dims: Dims) -> LowRank:
        scales = None if self.total is None else _residual_weights(parameters["logits"], self.total, self.form)
        return LowRank(parameters["down"], parameters["up"], scales)

    def read(self, states: States, weights: LowRank, t: int) -> tuple[Tensor, States]:
        return states[-1], states

    @repeatable
    def merge(self, states: States, weights: LowRank, t: int, *branches: Tensor) -> Tensor:
        x, scales = states[-1], weights.scales
        low = project(self._mapped(states, weights, t), weights.down[t - 1])  # [..., r]
        change = project(low, weights.up[t - 1]).to(x.dtype)
        if scales is None or scales.branch is None:
            return total((x, *branches)) + change  # in the model's own order: bitwise equality at B = 0
        a, b = scales.branch[t - 1], scales.shortcut[t - 1]
        return mix((x, *branches, change), (b, *[a] * len(branches), b))

    def push(self, states: States, weights: LowRank, t: int, x: Tensor) -> States:
        return (x,)

    def drops(self, dims: Dims) -> Collection[int]:
        return ()

    def newest(self, states: States, weights: LowRank, t: int) -> tuple[int, ...]:
        return (-1,)

    def finish(self, states: States, weights: LowRank, dims: Dims) -> Tensor:
        return states[-1]

    def matrix(self, weights: LowRank, dims: Dims) -> Tensor:
        """float32 [T, T]: the mean diagonal of the D x D matrix that multiplies each state."""
        diagonal = 1 + _mean_diagonal(weights, dims)
        return torch.diag(diagonal if weights.scales is None else diagonal * weights.scales.shortcut)

    def _mapped(self, states: States, weights: LowRank, t: int) -> Tensor:
        """The input of unit t's low-rank map."""
        return states[-1]


@register_topology("laurel-pa")
@dataclasses.dataclass(frozen=True)
class LaurelPA(LaurelLR):
    """LAuReL with previous activations: a low-rank map of the last k states (LAuReL-PA, arXiv 2411.07501).

    ``x_t = f_t + x_{t-1} + sum_j g_tj h_t(x_j)`` over the last k states ``x_{t-k} .. x_{t-1}`` (Equation 4; fewer
    while t < k), with one map ``h_t(x) = B_t A_t x`` for all k. As h is linear, the states are summed first and mapped
    once. Only these k states are kept; everything else is as in `LaurelLR`. With residual weights (``total``) it is
    LAuReL-RW+LR+PA: ``x_t = a_t f_t + b_t (x_{t-1} + sum_j g_tj h_t(x_j))`` (Equation 6, where each j has its own map).

    **Both starts**: A and B as in `LaurelLR`, so again the original network, bitwise. The paper gives no start for g;
    here it is 1, so that B has a gradient from the first step on. A and g have one a step later, through B.

    Args:
        rank: r, 1 or more; cut to D, beyond which it adds nothing.
        last: k, 1 or more.
        total, form: as in `LaurelLR`.
    """

    last: int = 3  # Section 4.3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("last", self.last, 1)

    def parameters(self, dims: Dims, start: Start) -> dict[str, Tensor]:
        """``down`` and ``up`` as in `LaurelLR`, and ``gains``.

        ``gains`` is float32, flat: for each t = 1..T, one entry for each of its states, oldest first.
        """
        return {**super().parameters(dims, start), "gains": torch.ones(sum(self._counts(dims)))}

    def weights(self, parameters: dict[str, Tensor], dims: Dims) -> LowRank:
        found = super().weights(parameters, dims)
        return LowRank(found.down, found.up, found.scales, parameters["gains"].split(self._counts(dims)))

    def push(self, states: States, weights: LowRank, t: int, x: Tensor) -> States:
        return (*states, x)[-self.last :]

    def drops(self, dims: Dims) -> Collection[int]:
        return range(self.last, dims.depth + 1) if self.last > 1 else ()

    def matrix(self, weights: LowRank, dims: Dims) -> Tensor:
        """float32 [T, T]: the mean diagonal of the D x D matrix that multiplies each state."""
        table = torch.eye(dims.depth, dtype=torch.float32, device=weights.up.device)
        for row, (gains, diagonal) in enumerate(zip(weights.gains, _mean_diagonal(weights, dims), strict=True)):
            table[row, row + 1 - len(gains) : row + 1] += gains * diagonal
        return table if weights.scales is None else table * weights.scales.shortcut[:, None]

    def _mapped(self, states: States, weights: LowRank, t: int) -> Tensor:
        return mix(states, weights.gains[t - 1])

    def _counts(self, dims: Dims) -> list[int]:
        """For each t = 1..T, the number of states that are mapped."""
        return [min(t, self.last) for t in range(1, dims.depth + 1)]


def _start_logits(topology: LaurelRW | LaurelLR, dims: Dims, start: Start) -> Tensor:
    if start == "preserve" and topology.form == "softmax" and topology.total != 2:
        why = f"with total={topology.total} a and b start at {(topology.total or 0) / 2}; form='difference' starts at 1"
        raise no_preserving_start(topology, why)
    return torch.zeros(dims.depth, 2)


def _residual_weights(logits: Tensor, total: float, form: Form) -> Scales:
    """a and b from c, [T, 2]."""
    shares = torch.softmax(logits, dim=1)
    branch, shortcut = (total * shares if form == "softmax" else 1 + total * (shares - 0.5)).unbind(1)
    return Scales(shortcut, branch)


def _mean_diagonal(weights: LowRank, dims: Dims) -> Tensor:
    """float32 [T]: the mean diagonal of ``B_t A_t``."""
    return (weights.down * weights.up.transpose(1, 2)).sum((1, 2)) / dims.width


def _check_residual_weights(total: float | None, form: Form) -> None:
    check_positive("total", total, 2.0, optional=True)
    check_choice("form", form, get_args(Form))
