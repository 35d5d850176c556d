"""What the benchmarks of single mixes measure: pieces of work, each with several ways to do it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from rewire import peers
from rewire.kernels.mix import mix
from rewire.kernels.spec import MixSpec
from rewire.peers import Results, Way
from rewire.topologies.attnres import AttnRes
from rewire.topologies.base import Dims, computed
from rewire.topologies.hyper import DynamicHyperConnections, ParallelStreams
from rewire.topologies.mhc import ManifoldHyperConnections

Kind = Literal["scalar", "channel", "scores"]

OURS, OURS_COMPILED, EAGER, COMPILED, RESIDUAL = "ours", "ours, compiled", "eager", "eager, compiled", "plain residual"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of the states x_i of a case: [batch, length, width].

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

    @property
    def accumulator(self) -> int:
        """Bytes of one state in float32."""
        return self.tokens * self.width * 4

    def states(self, count: int) -> list[Tensor]:
        shape = (self.batch, self.length, self.width)
        return [torch.randn(shape, dtype=self.dtype, device=self.device) for _ in range(count)]


@dataclasses.dataclass(frozen=True)
class Bytes:
    """What a pass has to move, or moves."""

    forward: int
    backward: int

    @property
    def both(self) -> int:
        return self.forward + self.backward


@dataclasses.dataclass(frozen=True)
class Case:
    """One piece of work.

    Attributes:
        name: what it is.
        sizes: of its states.
        inputs: makes its inputs, random, for any sizes; forward takes all of them, and backward returns a gradient for
            each.
        ways: by name. The results of "eager" in float64 are what those of all others have to be.
        floor: bytes if each input is read once and each output written once; see docs/benchmarks.md.
        moved: bytes that "ours" moves where the generated kernels run; None where nobody counted.
        remark: more about bytes.
    """

    name: str
    sizes: Sizes
    inputs: Callable[[Sizes], Sequence[Tensor]]
    ways: Mapping[str, Way]
    floor: Bytes
    moved: Bytes | None = None
    remark: str = ""


def default_cases(
    device: torch.device, dtype: torch.dtype | None = None, batch: int | None = None, length: int | None = None
) -> list[Case]:
    """2 to 32 sources, width 1024 to 8192, 16384 tokens, bfloat16; on a CPU fewer cases, 1024 tokens, float32."""
    small = device.type == "cpu"
    dtype = dtype or (torch.float32 if small else torch.bfloat16)
    length = length or (1024 if small else 16384)
    return make_cases(Sizes(batch or 1, length, 1024 if small else 2048, dtype, device), small)


def make_cases(sizes: Sizes, small: bool) -> list[Case]:
    """The cases at the width of ``sizes``; if not ``small``, more numbers of sources, and other widths."""
    if small:
        return [
            weighted_sum(sizes, 8, "scalar"),
            weighted_sum(sizes, 8, "channel"),
            sum_and_norm(sizes, 8),
            trunk(sizes, 6),
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
        trunk(sizes, 24),
        *(attention_residuals(sizes, n) for n in (4, 8, 16)),
        hyper_connections(sizes, 4),
        manifold_hyper_connections(sizes, 4),
    ]


def _only_eager(case: Case) -> Case:
    """Without what takes a CPU half a minute to compile; those ways are listed as not run."""
    late = {name: dataclasses.replace(way, status="not run: compiles too long") for name, way in case.ways.items()}
    return dataclasses.replace(case, ways={n: late[n] if way.compiled else way for n, way in case.ways.items()})


def weighted_sum(sizes: Sizes, n: int, kind: Kind) -> Case:
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
    ways = _ways(ours, plain) | {"stack, einsum": Way(stacked, note=rounded)}
    return Case(f"sum of {n}, {_label(kind)}, width {sizes.width}", sizes, inputs, ways, floor, _moved(floor, sizes, n))


def sum_and_norm(sizes: Sizes, n: int) -> Case:
    """The sum of n states and the RMSNorm of the next block on it; both are wanted, as the sum is a state."""

    def inputs(at: Sizes) -> list[Tensor]:
        return [*at.states(n), torch.randn(n, device=at.device), torch.randn(at.width, device=at.device).to(at.dtype)]

    def ours(*given: Tensor) -> Results:
        *xs, w, gain = given
        total = mix(xs, w)
        return total, F.rms_norm(total, gain.shape, gain, 1e-6)

    def plain(*given: Tensor) -> Results:
        *xs, w, gain = given
        total = sum(a * x for a, x in zip(w.unbind(), xs, strict=True)).to(xs[0].dtype)  # type: ignore[union-attr]
        return total, F.rms_norm(total, gain.shape, gain, 1e-6)

    weight = 4 * n + sizes.width * sizes.dtype.itemsize
    floor = Bytes((n + 2) * sizes.state + weight, (2 * n + 3) * sizes.state + 2 * weight)
    # The norm apart reads the sum again; its backward reads both gradients and the sum and leaves one, and the sum of
    # that with the gradient of the sum itself is one more operator.
    apart = Bytes(floor.forward + sizes.state, floor.backward + 4 * sizes.state)
    name = f"sum of {n}, RMSNorm after, width {sizes.width}"
    return Case(name, sizes, inputs, _ways(ours, plain), floor, _moved(apart, sizes, n))


def trunk(sizes: Sizes, depth: int) -> Case:
    """All mixes of a trunk, ``x_t = f_t + sum_{i<t} p_ti x_i`` for t = 1..depth (ANCRe), with branches f_t given.

    All states are results, as the branches of a model read them. A model's branches run in between, which keeps
    torch.compile from fusing the mixes; here it may.
    """

    def inputs(at: Sizes) -> list[Tensor]:
        weights = torch.rand(depth, depth, device=at.device) / depth
        return [*at.states(depth + 1), weights]

    def chain(step: Callable[[Sequence[Tensor], Tensor, Tensor], Tensor]) -> Callable[..., Results]:
        def function(*given: Tensor) -> Results:
            x, *branches, weights = given
            states = [x]
            for t, branch in enumerate(branches, start=1):
                states.append(step(states, weights[t - 1, :t], branch))
            return tuple(states[1:])

        return function

    def ours(states: Sequence[Tensor], weights: Tensor, branch: Tensor) -> Tensor:
        return mix(states, weights, (branch,))

    def plain(states: Sequence[Tensor], weights: Tensor, branch: Tensor) -> Tensor:
        total = branch + sum(a * x for a, x in zip(weights.unbind(), states, strict=True))
        return total.to(branch.dtype)

    def residual(*given: Tensor) -> Results:
        x, *branches, _ = given
        return tuple(itertools.accumulate(branches, torch.add, initial=x))[1:]

    floor = Bytes((2 * depth + 1) * sizes.state, (3 * depth + 1) * sizes.state)
    moved = Bytes(chain_bytes(sizes, depth), chain_backward_bytes(sizes, depth))
    best = min(range(1, depth + 1), key=lambda group: chain_bytes(sizes, depth, group))
    remark = (
        f"our kernels move {moved.forward / sizes.state:.0f} states forward and {moved.backward / sizes.state:.0f} "
        f"backward, unit by unit; the least forward is {chain_bytes(sizes, depth, best) / sizes.state:.0f}, in groups "
        f"of {best}"
    )
    ways = _ways(chain(ours), chain(plain)) | {RESIDUAL: Way(residual, other_work=True, used=depth + 1)}
    return Case(f"trunk of {depth} mixes, width {sizes.width}", sizes, inputs, ways, floor, moved, remark)


def chain_bytes(sizes: Sizes, depth: int, group: int = 1) -> int:
    """Bytes that the forward of `trunk` moves if ``group`` units share a pass over all states before them.

    That pass leaves a float32 sum for each of them; then every unit reads its sum, the states of its own group, and
    its branch. Alone (group 1), a unit reads all states and its branch, and writes.
    """
    if group == 1:
        plain = sum(t + 2 for t in range(1, depth + 1)) * sizes.state
        return plain + sum(_chained(sizes, t).forward for t in range(1, depth + 1))
    total = 0
    for start in range(1, depth + 1, group):  # `start` states come before the first unit of the group
        units = min(group, depth + 1 - start)
        total += start * sizes.state + 2 * units * sizes.accumulator
        total += sum(inside + 2 for inside in range(units)) * sizes.state
    return total


def chain_backward_bytes(sizes: Sizes, depth: int) -> int:
    """Bytes of the backward of `trunk`, unit by unit: gradients of t states, which autograd adds to earlier ones."""
    mixes = sum(2 * t + 1 for t in range(1, depth + 1)) * sizes.state
    # x_0 has a gradient from each unit, x_i from the units after it and its own as a result; x_depth only that.
    adds = 3 * (depth - 1 + sum(depth - i for i in range(1, depth))) * sizes.state
    return mixes + adds + sum(_chained(sizes, t).backward for t in range(1, depth + 1))


def attention_residuals(sizes: Sizes, n: int) -> Case:
    """One read of Attention Residuals: ``sum_i softmax_i(q . rmsnorm(x_i)) x_i`` over n states (arXiv 2603.15031)."""

    def inputs(at: Sizes) -> list[Tensor]:
        return [*at.states(n), torch.randn(at.width, device=at.device) / math.sqrt(at.width)]

    def ours(*given: Tensor) -> Results:
        *xs, query = given
        return (AttnRes().finish(tuple(xs), query.expand(n - 1, -1), Dims(n - 1)),)

    def plain(*given: Tensor) -> Results:
        *xs, query = given
        values = torch.stack(xs)
        precision = torch.promote_types(values.dtype, torch.float32)
        keys = F.rms_norm(values.to(precision), query.shape, eps=1e-6)
        shares = torch.einsum("d,nbtd->nbt", query, keys).softmax(0)
        return (torch.einsum("nbt,nbtd->btd", shares.to(values.dtype), values),)

    floor = Bytes((n + 1) * sizes.state, (2 * n + 1) * sizes.state)
    ways = _ways(ours, plain) | peers.attention_residuals(sizes.device)
    return Case(f"attention residuals over {n}, width {sizes.width}", sizes, inputs, ways, floor)


def hyper_connections(sizes: Sizes, n: int) -> Case:
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

    ways = _ways(_unit(topology), plain) | peers.hyper_connections(n, sizes.width, sizes.device)
    return Case(f"hyper-connections, {n} streams, width {sizes.width}", sizes, inputs, ways, _stream_bytes(sizes, n))


def manifold_hyper_connections(sizes: Sizes, n: int) -> Case:
    """One unit of mHC: read and new streams, for a branch output that is given."""
    topology = ManifoldHyperConnections(streams=n)
    sizes_of_gates = (n, n, n * n)

    def inputs(at: Sizes) -> list[Tensor]:
        return [
            *_streams(at, n),
            torch.randn(sum(sizes_of_gates), device=at.device),
            torch.randn(n * at.width, sum(sizes_of_gates), device=at.device) / math.sqrt(n * at.width),
            torch.ones(3, device=at.device),
        ]

    def plain(streams: Tensor, branch: Tensor, bias: Tensor, phi: Tensor, alpha: Tensor) -> Results:
        states = streams.to(bias.dtype)
        flat = states.flatten(-2)
        signal = F.rms_norm(flat, flat.shape[-1:], eps=1e-6) @ phi
        parts = zip(alpha, signal.split(sizes_of_gates, -1), bias.split(sizes_of_gates), strict=True)
        pre, post, res = (a * s + b for a, s, b in parts)
        carry = res.unflatten(-1, (n, n)).softmax(-1)  # [..., out, in]
        carry = carry / carry.sum(-2, keepdim=True)
        for _ in range(topology.iterations - 1):
            carry = carry / carry.sum(-1, keepdim=True)
            carry = carry / carry.sum(-2, keepdim=True)
        read = (torch.sigmoid(pre).unsqueeze(-2) @ states).squeeze(-2)
        new = carry @ states + 2 * torch.sigmoid(post).unsqueeze(-1) * branch.unsqueeze(-2)
        return read.to(streams.dtype), new.to(streams.dtype)

    ways = _ways(_unit(topology), plain) | peers.manifold_hyper_connections(n, topology.iterations, sizes.device)
    return Case(f"mHC, {n} streams, width {sizes.width}", sizes, inputs, ways, _stream_bytes(sizes, n))


def _ways(ours: Callable[..., Results], plain: Callable[..., Results]) -> dict[str, Way]:
    """Ours, a user's torch, and both under torch.compile; and the add that a mix replaces."""

    def residual(x: Tensor, *others: Tensor) -> Results:
        return (x + torch.broadcast_to(others[0].unsqueeze(-2) if x.dim() > others[0].dim() else others[0], x.shape),)

    return {
        RESIDUAL: Way(residual, other_work=True, used=2),
        EAGER: Way(plain),
        COMPILED: Way(plain, compiled=True),
        OURS: Way(ours),
        OURS_COMPILED: Way(ours, compiled=True),
    }


def _unit(topology: ParallelStreams) -> Callable[..., Results]:
    """One unit of ``topology``, opened and written to."""

    def function(streams: Tensor, branch: Tensor, static: Tensor, dynamic: Tensor, scale: Tensor) -> Results:
        parameters = {"static": static[None], "dynamic": dynamic[None], "scale": scale[None]}
        weights = topology.weights(parameters, Dims(1, branch.shape[-1]))
        read, states = topology.open((streams,), weights, 1)
        (new,) = topology.write(states, weights, 1, branch)
        return computed(read), new

    return function


def _streams(sizes: Sizes, n: int) -> list[Tensor]:
    """H [batch, length, n, width], and a branch output."""
    return [torch.stack(sizes.states(n), -2), *sizes.states(1)]


def _stream_bytes(sizes: Sizes, n: int) -> Bytes:
    """Of a read and a write, between which the branch runs: both need the streams, in both passes."""
    return Bytes((3 * n + 2) * sizes.state, (6 * n + 3) * sizes.state)


def _chained(sizes: Sizes, n: int) -> Bytes:
    """What more kernels than one move on top: a float32 accumulator between two; in backward the gradient again."""
    more = len(MixSpec(n).chunks()) - 1
    return Bytes(2 * more * sizes.accumulator, more * sizes.state)


def _moved(single: Bytes, sizes: Sizes, n: int) -> Bytes:
    more = _chained(sizes, n)
    return Bytes(single.forward + more.forward, single.backward + more.backward)


def _label(kind: Kind) -> str:
    return {"scalar": "a weight each", "channel": "weights per channel", "scores": "weights per token"}[kind]
