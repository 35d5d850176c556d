"""Gated hyper-connections: parallel residual streams whose reads are gated channel by channel (Qwen4-Exp)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from rewire.errors import check_choice, check_count, check_small
from rewire.mixes.again import made_again, sparing
from rewire.mixes.streams import combine
from rewire.mixes.tokens import project, rms_norm
from rewire.topologies.base import Dims, Granularity, Named, Start, States, Topology, no_preserving_start, viewed
from rewire.topologies.registry import register_topology

Reads = Literal["normed", "streams"]
_STD = 0.02  # of the maps' start values, as in the code of Qwen4-Exp


@register_topology("hc-gated")
@dataclasses.dataclass(frozen=True)
class GatedHyperConnections(Topology[Named]):
    """Gated hyper-connections (Qwen4-Exp; transformers' ``Qwen4ExpTextGatedResidual``).

    ``H_0`` [n, D] is n copies of ``x_0``. With ``N = rms_norm(H_{t-1}) * (1 + w)``, a separate norm of each stream, and
    x, the rows of N concatenated to one vector of n D channels, unit t reads and writes

    - ``r_t = (1/n) sum_i g_i * N_i`` with ``g = sigmoid(silu(x W_down / n) W_up)`` [n, D], of rank r,
    - ``H_t = H_{t-1} + b f_t^T`` with ``b = 2 sigmoid(x W_inject / n)`` [n].

    The output is one more read. In Qwen4-Exp these normed reads replace the branches' norms: ``reads="normed"`` is for
    branches without a norm. ``reads="streams"``, ``r_t = (2/n) sum_i g_i * H_i``, is for networks that have norms.

    **Paper start.** w = 0, and the three maps normal with standard deviation 0.02, as in the code of Qwen4-Exp.

    **Preserving start.** It needs reads of streams, which `for_start` selects. ``W_down = W_inject = 0``, so that g is
    1/2 and b is 1: every stream is ``x_t``, bitwise, and so are the reads and the output for n = 2 and 4. W_up is drawn
    as above, so that streams can diverge. W_down and W_inject learn from the first step on, W_up and w from the second.
    If the branches start at zero, all weights but the output's need one step more.

    Args:
        streams: n, 2 or more.
        rank: r, 1 or more; Qwen4-Exp has 320 for 2,048 channels.
        reads: "normed" or "streams".
        norm_eps: epsilon of the norm.
    """

    granularity: ClassVar[Granularity] = "sublayer"
    needs_width: ClassVar[bool] = True
    by_token: ClassVar[bool] = True
    matrices: ClassVar[frozenset[str]] = frozenset({"down", "up", "inject"})
    of_states: ClassVar[frozenset[str]] = frozenset({"inject"})

    streams: int = 4
    rank: int = 16
    reads: Reads = "normed"
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        check_count("streams", self.streams, 2)
        check_count("rank", self.rank, 1)
        check_choice("reads", self.reads, get_args(Reads))
        check_small("norm_eps", self.norm_eps)

    def for_start(self, start: Start) -> GatedHyperConnections:
        return dataclasses.replace(self, reads="streams") if start == "preserve" else self

    def parameters(self, dims: Dims, start: Start) -> dict[str, Tensor]:
        """Float32: ``norm``, w [T + 1, n, D]; ``down`` [T + 1, n D, r]; ``up`` [T + 1, r, n D]; and for the writes
        ``inject`` [T, n D, n].
        """
        if start == "preserve" and self.reads == "normed":
            raise no_preserving_start(self, "its reads are normed; with reads='streams' they are not")
        reads, n, channels = dims.depth + 1, self.streams, self.streams * dims.width
        seed = torch.Generator().manual_seed(0)  # the same start on every rank, and again after a reset

        def drawn(*shape: int, zero: bool = False) -> Tensor:
            return torch.zeros(shape) if zero else _STD * torch.randn(shape, generator=seed, device="cpu")

        return {
            "norm": torch.zeros(reads, n, dims.width),
            "down": drawn(reads, channels, self.rank, zero=start == "preserve"),
            "up": drawn(reads, self.rank, channels),
            "inject": drawn(dims.depth, channels, n, zero=start == "preserve"),
        }

    def start(self, x: Tensor, weights: Named) -> States:
        return (x.unsqueeze(-2).expand(*x.shape[:-1], self.streams, x.shape[-1]),)

    def read(self, states: States, weights: Named, t: int) -> tuple[Tensor, States]:
        (streams,) = states
        value, vector = self._read(streams, weights, t - 1)
        write = 2 * torch.sigmoid(project(vector, weights["inject"][t - 1]) / self.streams)
        return value, (streams, write)

    def write(self, states: States, weights: Named, t: int, *branches: Tensor) -> States:
        streams, write = states
        kept = torch.eye(self.streams, dtype=write.dtype, device=write.device).expand(*write.shape, -1)
        table = torch.cat([kept, write.unsqueeze(-2)], dim=-2)
        return (combine(streams, table, [branch.unsqueeze(-2) for branch in branches]),)

    def drops(self, dims: Dims) -> tuple[()]:
        return ()

    def finish(self, states: States, weights: Named, dims: Dims) -> Tensor:
        return self._read(states[0], weights, dims.depth)[0]

    def viewed(self, states: States, view: Callable[[Tensor], Tensor]) -> States:
        streams, *rest = states
        channels = streams.shape[-1]
        return viewed(streams, channels, view, 2), *[viewed(x, channels, view) for x in rest]

    def template(self, states: States) -> Tensor:
        return states[0].select(-2, 0)

    def parallel(self, states: States) -> Tensor:
        return states[0]

    def matrix(self, weights: Named, dims: Dims) -> Tensor:
        """float32 [T + 1, T + 1]: row t - 1 is the read of unit t, the last row the output; columns f_0 .. f_T.

        All weights depend on the input; this is the matrix for half-open read gates and write weights of 1.
        """
        size = dims.depth + 1
        return torch.ones(size, size, dtype=torch.float32, device=weights["norm"].device).tril()

    def _read(self, streams: Tensor, weights: Named, number: int) -> tuple[Tensor, Tensor]:
        """A read, and x. Backward recomputes everything that is as large as the streams."""
        n, scale, up, dtype = self.streams, 1 + weights["norm"][number], weights["up"][number], streams.dtype
        with sparing(streams):
            normed = made_again(lambda streams: rms_norm(streams, self.norm_eps) * scale, streams)
            vector = normed.flatten(-2)
            hidden = torch.nn.functional.silu(project(vector, weights["down"][number]) / n)
            values, factor = (normed, 1 / n) if self.reads == "normed" else (streams, 2 / n)

            def read(values: Tensor) -> Tensor:
                gates = torch.sigmoid(project(hidden, up)).unflatten(-1, (n, -1))
                return (gates * values).sum(-2).mul(factor).to(dtype)

            return made_again(read, values), vector
