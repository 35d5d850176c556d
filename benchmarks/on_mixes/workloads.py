"""What the benchmarks of single mixes measure: pieces of work, each with several implementations to do it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from on_mixes import peers
from on_mixes.peers import Implementation, Results
from rewire.mixes.attended import AttendedTable
from rewire.mixes.claimed import Table
from rewire.mixes.mix import mix, pending_mix, softmax
from rewire.mixes.norms import mark
from rewire.mixes.several import mixes
from rewire.topologies.base import Dims, materialize
from rewire.topologies.hyper import DynamicHyperConnections, ParallelStreams
from rewire.topologies.mhc import ManifoldHyperConnections

Kind = Literal["scalar", "channel", "scores"]

OURS, OURS_COMPILED, EAGER, COMPILED, RESIDUAL = "ours", "ours, compiled", "eager", "eager, compiled", "plain residual"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The shape of the states x_i of a workload: [batch, length, width].

    Attributes:
        dtype: of the states; weights and scores are float32.
    """

    batch: int
    length: int
    width: int
    dtype: torch.dtype
    device: torch.device

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def state(self) -> int:
        """Bytes of one state."""
        return self.tokens * self.width * self.dtype.itemsize

    def states(self, count: int) -> list[Tensor]:
        shape = (self.batch, self.length, self.width)
        return [torch.randn(shape, dtype=self.dtype, device=self.device) for _ in range(count)]


@dataclasses.dataclass(frozen=True)
class Bytes:
    """What a pass has to move."""

    forward: int
    backward: int

    @property
    def both(self) -> int:
        return self.forward + self.backward


@dataclasses.dataclass(frozen=True)
class Workload:
    """One piece of work.

    Attributes:
        name: what it is.
        sizes: of its states.
        inputs: makes its inputs, random, for any sizes; forward takes all of them, and backward returns a gradient for
            each.
        implementations: by name. The results of "eager" in float64 are what those of all others have to be.
        floor: bytes if each input is read once and each output written once; see docs/benchmarks.md.
    """

    name: str
    sizes: Sizes
    inputs: Callable[[Sizes], Sequence[Tensor]]
    implementations: Mapping[str, Implementation]
    floor: Bytes


def default_workloads(
    device: torch.device, dtype: torch.dtype | None = None, batch: int | None = None, length: int | None = None
) -> list[Workload]:
    """2 to 32 sources, width 1024 to 8192, 16384 tokens, bfloat16; on a CPU fewer workloads, 1024 tokens, float32."""
    small = device.type == "cpu"
    dtype = dtype or (torch.float32 if small else torch.bfloat16)
    length = length or (1024 if small else 16384)
    return make_workloads(Sizes(batch or 1, length, 1024 if small else 2048, dtype, device), small)


def make_workloads(sizes: Sizes, small: bool) -> list[Workload]:
    """The workloads at the width of ``sizes``; if not ``small``, more numbers of sources, and other widths."""
    if small:
        return [
            weighted_sum(sizes, 8, "scalar"),
            weighted_sum(sizes, 8, "channel"),
            sum_and_norm(sizes, 8),
            three_reads(sizes, 4),
            trunk(sizes, 12),
            attention_residuals(sizes, 8),
            _only_eager(hyper_connections(sizes, 4)),
            _only_eager(manifold_hyper_connections(sizes, 4)),
        ]
    others = [dataclasses.replace(sizes, width=width) for width in (1024, 4096, 8192)]
    return [
        *(weighted_sum(sizes, n, "scalar") for n in (2, 4, 8, 16, 32)),
        *(weighted_sum(other, n, "scalar") for other in others for n in (2, 8, 32)),
        *(weighted_sum(sizes, n, "channel") for n in (2, 8, 32)),
        *(weighted_sum(sizes, n, "scores") for n in (2, 8, 32)),
        *(sum_and_norm(sizes, n) for n in (2, 8)),
        *(trunk(sizes, depth) for depth in (12, 24)),
        *(three_reads(sizes, n) for n in (4, 12)),
        *(attention_residuals(sizes, n) for n in (4, 8, 16)),
        hyper_connections(sizes, 4),
        manifold_hyper_connections(sizes, 4),
    ]


def _only_eager(workload: Workload) -> Workload:
    """The workload without implementations that a CPU compiles for half a minute. They are listed as not run."""
    implementations = dict(workload.implementations)
    for name, one in implementations.items():
        if one.compiled:
            implementations[name] = dataclasses.replace(one, status="not run: compiles too long")
    return dataclasses.replace(workload, implementations=implementations)


def weighted_sum(sizes: Sizes, n: int, kind: Kind) -> Workload:
    """``sum_i w_i x_i`` of n states, with a weight each, one per channel, or one per token."""

    def inputs(at: Sizes) -> list[Tensor]:
        shape = {"scalar": (n,), "channel": (n, at.width), "scores": (n, at.batch, at.length, 1)}[kind]
        return [*at.states(n), torch.randn(shape, device=at.device)]

    def ours(*given: Tensor) -> Results:
        *xs, w = given
        return (mix(xs, None, scores=w.unbind()) if kind == "scores" else mix(xs, w),)

    def plain(*given: Tensor) -> Results:
        *xs, w = given
        return (sum(a * x for a, x in zip(w.unbind(), xs, strict=True)).to(xs[0].dtype),)  # type: ignore[union-attr]

    def stacked(*given: Tensor) -> Results:
        *xs, w = given
        formula = {"scalar": "n,nbtd->btd", "channel": "nd,nbtd->btd", "scores": "nbts,nbtd->btd"}[kind]
        return (torch.einsum(formula, w.to(xs[0].dtype), torch.stack(xs)),)

    weight = {"scalar": 4 * n, "channel": 4 * n * sizes.width, "scores": 4 * n * sizes.tokens}[kind]
    floor = Bytes((n + 1) * sizes.state + weight, (2 * n + 1) * sizes.state + 2 * weight)
    rounded = "" if sizes.dtype == torch.float32 else "weights rounded to the states' dtype"
    implementations = _implementations(ours, plain) | {"stack, einsum": Implementation(stacked, note=rounded)}
    return Workload(f"sum of {n}, {_label(kind)}, width {sizes.width}", sizes, inputs, implementations, floor)


class _SumAndNorm(nn.Module):
    """The sum of states, and its RMSNorm: by one kernel, as in a rewired model."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-6, device="meta")  # its weight comes with each call
        refused = mark(self.norm)
        assert refused is None, refused

    def forward(self, states: Sequence[Tensor], weights: Tensor) -> Results:
        return pending_mix(states, weights).normed(self.norm)


def sum_and_norm(sizes: Sizes, n: int) -> Workload:
    """The sum of n states and the RMSNorm of the next block on it; both are wanted, as the sum is a state."""
    module = _SumAndNorm(sizes.width)

    def inputs(at: Sizes) -> list[Tensor]:
        return [*at.states(n), torch.randn(n, device=at.device), torch.randn(at.width, device=at.device).to(at.dtype)]

    def ours(*given: Tensor) -> Results:
        *xs, w, gain = given
        done: Results = torch.func.functional_call(module, {"norm.weight": gain}, (xs, w))
        return done

    def plain(*given: Tensor) -> Results:
        *xs, w, gain = given
        total = sum(a * x for a, x in zip(w.unbind(), xs, strict=True)).to(xs[0].dtype)  # type: ignore[union-attr]
        return total, F.rms_norm(total, gain.shape, gain, 1e-6)

    weight = 4 * n + sizes.width * sizes.dtype.itemsize
    floor = Bytes((n + 2) * sizes.state + weight, (2 * n + 3) * sizes.state + 2 * weight)
    name = f"sum of {n}, RMSNorm after, width {sizes.width}"
    return Workload(name, sizes, inputs, _implementations(ours, plain), floor)


def three_reads(sizes: Sizes, n: int) -> Workload:
    """Queries, keys and values, each from a mix of its own of n states, per channel and per token (DCA)."""

    def inputs(at: Sizes) -> list[Tensor]:
        return [
            *at.states(n),
            torch.randn(3, n, at.width, device=at.device),
            torch.randn(at.batch, at.length, 3, n, device=at.device),
        ]

    def ours(*given: Tensor) -> Results:
        *xs, weights, scores = given
        return tuple(mixes(xs, weights, scores)[0])

    def plain(*given: Tensor) -> Results:
        *xs, weights, scores = given
        per_token = scores.unsqueeze(-1).unbind(-3)  # for each mix, [..., n, 1]
        return tuple(
            sum((w + s) * x for w, s, x in zip(of_all.unbind(), of_one.unbind(-2), xs, strict=True)).to(xs[0].dtype)
            for of_all, of_one in zip(weights, per_token, strict=True)
        )

    weight = 4 * 3 * n * (sizes.width + sizes.tokens)
    floor = Bytes((n + 3) * sizes.state + weight, (2 * n + 3) * sizes.state + 2 * weight)
    return Workload(
        f"queries, keys, values of {n}, width {sizes.width}", sizes, inputs, _implementations(ours, plain), floor
    )


def trunk(sizes: Sizes, depth: int) -> Workload:
    """All mixes of a trunk, ``x_t = f_t + sum_{i<t} p_ti x_i`` for t = 1..depth (ANCRe), with branches f_t given.

    All states are results, as the branches of a model read them. A model's branches run in between, which keeps
    torch.compile from fusing the mixes; here it may.
    """

    def inputs(at: Sizes) -> list[Tensor]:
        weights = torch.rand(depth, depth, device=at.device) / depth
        return [*at.states(depth + 1), weights]

    def ours(*given: Tensor) -> Results:
        x, *branches, weights = given
        row, column = torch.tril_indices(depth, depth, device=weights.device)
        table, states = Table(weights[row, column], depth), [x]
        history = table.history()
        for t, branch in enumerate(branches, start=1):
            history = history.read(t, states[-1])
            states.append(materialize(history.mix(table[t], added=(branch,))))
        return tuple(states[1:])

    def plain(*given: Tensor) -> Results:
        x, *branches, weights = given
        states = [x]
        for t, branch in enumerate(branches, start=1):
            terms = zip(weights[t - 1, :t].unbind(), states, strict=True)
            states.append((branch + sum(a * y for a, y in terms)).to(branch.dtype))
        return tuple(states[1:])

    def residual(*given: Tensor) -> Results:
        x, *branches, _ = given
        return tuple(itertools.accumulate(branches, torch.add, initial=x))[1:]

    floor = Bytes((2 * depth + 1) * sizes.state, (3 * depth + 1) * sizes.state)
    implementations = _implementations(ours, plain) | {
        RESIDUAL: Implementation(residual, other_work=True, used=depth + 1)
    }
    return Workload(f"trunk of {depth} mixes, width {sizes.width}", sizes, inputs, implementations, floor)


def attention_residuals(sizes: Sizes, n: int) -> Workload:
    """One read of Attention Residuals: ``sum_i softmax_i(q . rmsnorm(x_i)) x_i`` over n states (arXiv 2603.15031)."""

    def inputs(at: Sizes) -> list[Tensor]:
        return [*at.states(n), torch.randn(at.width, device=at.device) / math.sqrt(at.width)]

    def ours(*given: Tensor) -> Results:
        *xs, query = given
        table = AttendedTable(query.unsqueeze(0), ways=[*[0] * (n - 2), 1], only_scores=True)  # of read n alone
        history = table.history().after(xs)
        shares, _ = softmax(history.scores_of(table[n]), scaled=False)
        return tuple(map(materialize, history.mixes(None, shares.movedim(0, -1))))

    def plain(*given: Tensor) -> Results:
        *xs, query = given
        values = torch.stack(xs)
        precision = torch.promote_types(values.dtype, torch.float32)
        keys = F.rms_norm(values.to(precision), query.shape, eps=1e-6)
        shares = torch.einsum("d,nbtd->nbt", query, keys).softmax(0)
        return (torch.einsum("nbt,nbtd->btd", shares.to(values.dtype), values),)

    floor = Bytes((n + 1) * sizes.state, (2 * n + 1) * sizes.state)
    implementations = _implementations(ours, plain) | peers.attention_residuals(sizes.device)
    return Workload(f"attention residuals over {n}, width {sizes.width}", sizes, inputs, implementations, floor)


def hyper_connections(sizes: Sizes, n: int) -> Workload:
    """One unit of dynamic hyper-connections: read and new streams, for a branch output that is given."""
    topology = DynamicHyperConnections(streams=n)

    def inputs(at: Sizes) -> list[Tensor]:
        return [
            *_streams(at, n),
            torch.cat([torch.full((n, 1), 1 / n), torch.eye(n), torch.ones(n, 1)], 1).to(at.device),
            torch.randn(at.width, n + 2, device=at.device) / math.sqrt(at.width),
            torch.full((2,), 0.3, device=at.device),
        ]

    def plain(streams: Tensor, branch: Tensor, static: Tensor, dynamic: Tensor, scale: Tensor) -> Results:
        states = streams.to(static.dtype)
        signal = torch.tanh(F.rms_norm(states, states.shape[-1:], eps=1e-6) @ dynamic)
        gates = static + signal * torch.cat([scale[:1].expand(n + 1), scale[1:]])
        mixed = gates[..., :-1].mT @ states
        new = mixed[..., 1:, :] + gates[..., -1:] * branch.unsqueeze(-2)
        return mixed[..., 0, :].to(streams.dtype), new.to(streams.dtype)

    implementations = _implementations(_unit(topology), plain) | peers.hyper_connections(n, sizes.width, sizes.device)
    return Workload(
        f"hyper-connections, {n} streams, width {sizes.width}", sizes, inputs, implementations, _stream_bytes(sizes, n)
    )


def manifold_hyper_connections(sizes: Sizes, n: int) -> Workload:
    """One unit of mHC: read and new streams, for a branch output that is given."""
    topology = ManifoldHyperConnections(streams=n)
    sizes_of_gates = (n, n, n * n)

    def inputs(at: Sizes) -> list[Tensor]:
        return [
            *_streams(at, n),
            torch.randn(sum(sizes_of_gates), device=at.device) / 2,
            torch.randn(n * at.width, sum(sizes_of_gates), device=at.device) / math.sqrt(n * at.width),
            torch.full((3,), 0.5, device=at.device),  # so small that Sinkhorn converges: liger-kernel ends with columns
        ]

    def plain(streams: Tensor, branch: Tensor, bias: Tensor, phi: Tensor, alpha: Tensor) -> Results:
        states = streams.to(bias.dtype)
        flat = states.flatten(-2)
        signal = F.rms_norm(flat, flat.shape[-1:], eps=1e-6) @ phi
        parts = zip(alpha, signal.split(sizes_of_gates, -1), bias.split(sizes_of_gates), strict=True)
        pre, post, res = (a * s + b for a, s, b in parts)
        carry = res.unflatten(-1, (n, n)).softmax(-2)  # [..., out, in]
        carry = carry / carry.sum(-1, keepdim=True)
        for _ in range(topology.iterations - 1):
            carry = carry / carry.sum(-2, keepdim=True)
            carry = carry / carry.sum(-1, keepdim=True)
        read = (torch.sigmoid(pre).unsqueeze(-2) @ states).squeeze(-2)
        new = carry @ states + 2 * torch.sigmoid(post).unsqueeze(-1) * branch.unsqueeze(-2)
        return read.to(streams.dtype), new.to(streams.dtype)

    implementations = _implementations(_unit(topology), plain) | peers.manifold_hyper_connections(
        n, topology.iterations, sizes.device
    )
    return Workload(f"mHC, {n} streams, width {sizes.width}", sizes, inputs, implementations, _stream_bytes(sizes, n))


def _implementations(ours: Callable[..., Results], plain: Callable[..., Results]) -> dict[str, Implementation]:
    """Ours, a user's torch, and both under torch.compile; and the add that a mix replaces."""

    def residual(x: Tensor, *others: Tensor) -> Results:
        return (x + torch.broadcast_to(others[0].unsqueeze(-2) if x.dim() > others[0].dim() else others[0], x.shape),)

    return {
        RESIDUAL: Implementation(residual, other_work=True, used=2),
        EAGER: Implementation(plain),
        COMPILED: Implementation(plain, compiled=True),
        OURS: Implementation(ours),
        OURS_COMPILED: Implementation(ours, compiled=True),
    }


def _unit(topology: ParallelStreams) -> Callable[..., Results]:
    """One unit of ``topology``, opened and written to."""

    def function(streams: Tensor, branch: Tensor, static: Tensor, dynamic: Tensor, scale: Tensor) -> Results:
        parameters = {"static": static[None], "dynamic": dynamic[None], "scale": scale[None]}
        weights = topology.weights(parameters, Dims(1, branch.shape[-1]))
        read, states = topology.read((streams,), weights, 1)
        (new,) = topology.write(states, weights, 1, branch)
        return materialize(read), new

    return function


def _streams(sizes: Sizes, n: int) -> list[Tensor]:
    """H [batch, length, n, width], and a branch output."""
    return [torch.stack(sizes.states(n), -2), *sizes.states(1)]


def _stream_bytes(sizes: Sizes, n: int) -> Bytes:
    """The bytes of a read and a write, between which the branch runs: both passes of both need the streams."""
    return Bytes((3 * n + 2) * sizes.state, (6 * n + 3) * sizes.state)


def _label(kind: Kind) -> str:
    return {"scalar": "a weight each", "channel": "weights per channel", "scores": "weights per token"}[kind]
