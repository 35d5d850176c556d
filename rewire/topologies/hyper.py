"""Hyper-connections: parallel residual streams with learned reads, mixes and writes (arXiv 2409.19606, 2503.14125)."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from rewire.errors import UnsupportedTopology, check_choice, check_count
from rewire.mixes.gating import Gating, read_off_gates
from rewire.mixes.mix import Mix
from rewire.mixes.streams import (
    Claim,
    Projected,
    combine,
    read_off_streams,
    read_streams,
    write_and_project,
    write_and_read,
)
from rewire.topologies.base import Dims, Granularity, Start, States, Topology, in_increments, materialize, viewed
from rewire.topologies.program import Line, Program, Term, branch_of
from rewire.topologies.program import Unit as ProgramUnit
from rewire.topologies.registry import register_topology

Output = Literal["mean", "sum", "learned"]


class Gates(NamedTuple):
    """The gates of a unit, with leading dimensions if they depend on the token.

    Attributes:
        read: A_m [..., n, p], from stream i to part k of the branch's input.
        write: A_r and, below it, B, [..., n + 1, n]: from stream i, and in the last row from the branch output, to
            stream j.
    """

    read: Tensor
    write: Tensor


class Unit(NamedTuple):
    """Weights of one unit, as K values from which its `Gates` are made.

    Attributes:
        static: [..., K], the part that does not depend on the streams.
        dynamic: the scale [K] and the projection [channels, K] of the part that does; None if there is none.
    """

    static: Tensor
    dynamic: tuple[Tensor, Tensor] | None


class Weights(NamedTuple):
    """Weights of a trunk.

    Attributes:
        units: weights of each unit t that is here.
        last: weights of the read that is the output, if it is learned.
        constants: constants of the topology, if it has any.
        steps: for each unit whose next read depends only on these weights, float32 [n + 1, n + 1]: the weights of the
            streams and the branch (last column) in the new streams (rows) and in that read (last row).
        entry: scales of the trunk's input in each stream, [n, D]; None: the streams start as copies.
    """

    units: Mapping[int, Unit]
    last: Unit | None
    constants: Tensor | None = None
    steps: Mapping[int, Tensor] = {}
    entry: Tensor | None = None


class Streams(Topology[Weights]):
    """Base of all hyper-connections: ``r_t = A_m^T H``, ``H' = A_r^T H + B f_t^T`` (arXiv 2409.19606, Section 2).

    The state is H [..., n, D/p]: n streams, each as wide as one of the p parts of a hidden state. If a kernel wrote it,
    a second state is the projection that the kernel computed for the next unit. While a branch runs, the write gates
    are a state, too: all gates come from the same normalised H, but the mix waits for the branch, so that it rounds
    once and needs no second copy of the streams.
    """

    granularity: ClassVar[Granularity] = "sublayer"  # attention and feed-forward are connected separately

    @property
    @abstractmethod
    def parts(self) -> int:
        """p, the number of parts into which hidden states are split."""

    @property
    @abstractmethod
    def scaled(self) -> tuple[int, ...]:
        """For each learned scale, the number of the K values that it multiplies."""

    def unit_rows(self, dims: Dims) -> dict[str, list[int]]:
        """Rows are units; the weights of a learned output are all its own, and entry scales all belong to unit 1."""
        found = {name: [1] * dims.depth + [0] for name in ("static", "dynamic", "scale")}
        output = {name: [0] * dims.depth + [-1] for name in ("last_static", "last_dynamic", "last_scale")}
        return {**found, **output, "entry": [-1] + [0] * dims.depth}

    def weights(self, parameters: dict[str, Tensor], dims: Dims) -> Weights:
        """From ``static`` [T, ..., K] and, if there, ``dynamic`` [T, channels, K] and ``scale`` [T, number of scales].

        ``last_static`` [..., k], ``last_dynamic`` [channels, k] and ``last_scale`` [1] belong to a learned output;
        ``entry`` is as in `Weights`.
        """
        static = dict(zip(dims.units, parameters["static"].float().unbind(), strict=True))
        last = parameters["last_static"].float() if dims.has(dims.depth + 1) and "last_static" in parameters else None
        entry = parameters.get("entry")
        if "dynamic" not in parameters:
            units = {t: Unit(values, None) for t, values in static.items()}
            return Weights(units, None if last is None else Unit(last, None), entry=entry)
        scales = parameters["scale"].float().split(1, dim=-1)
        scale = torch.cat([s.expand(-1, size) for s, size in zip(scales, self.scaled, strict=True)], dim=-1)  # [T, K]
        dynamic = zip(scale.unbind(), parameters["dynamic"].float().unbind(), strict=True)
        units = {t: Unit(values, own) for (t, values), own in zip(static.items(), dynamic, strict=True)}
        if last is None:
            return Weights(units, None, entry=entry)
        of_last = Unit(last, (parameters["last_scale"].float(), parameters["last_dynamic"].float()))
        return Weights(units, of_last, entry=entry)

    @property
    def norm_eps(self) -> float:
        """The epsilon of the norm of the streams."""
        return 1e-6

    def signal(self, products: Tensor) -> Tensor:
        """The term that is scaled and added to the static values; by default row i of [..., n, K] is for stream i."""
        return torch.tanh(products)

    def gates(self, values: Tensor, weights: Weights) -> Gates:
        """The gates from their values; by default [..., n, K], with columns ``A_m | A_r | B``."""
        read, carry, write = values.split_with_sizes([self.parts, values.shape[-2], 1], dim=-1)
        return Gates(read, torch.cat([carry.mT, write], dim=-1).mT)  # in one tensor, as sums take them

    @property
    def gating(self) -> Gating | None:
        """Which gates kernels compute if values depend on the token; None: kernels compute none."""
        return None

    def values(self, streams: Tensor, unit: Unit) -> tuple[Tensor, Tensor, Claim | None]:
        """The values for the gates of ``unit``, per token if it is dynamic; and for `read_streams` the streams and a
        claim on them.
        """
        if unit.dynamic is None:
            return unit.static, streams, None
        scale, projection = unit.dynamic
        products, streams, claim = read_off_streams(streams, projection, self.norm_eps)
        return unit.static + scale * self.signal(products), streams, claim

    def opened(
        self, streams: Tensor, unit: Unit, weights: Weights, known: Projected | None = None
    ) -> tuple[Gates, Tensor, Claim | None]:
        """As `values`, with the unit's gates; ``known``: the projection, if it was computed with the last write."""
        if unit.dynamic is None:
            return self.gates(unit.static, weights), streams, None
        scale, projection = unit.dynamic

        def formula(products: Tensor, static: Tensor, scale: Tensor) -> Gates:
            return self.gates(static + scale * self.signal(products), weights)

        *gates, streams, claim = read_off_gates(
            self.gating, formula, streams, projection, unit.static, scale, self.norm_eps, known
        )
        return Gates(*gates), streams, claim

    def read(self, states: States, weights: Weights, t: int) -> tuple[Tensor | Mix, States]:
        streams, *known = states
        gates, streams, claim = self.opened(streams, weights.units[t], weights, *known)
        value, streams = read_streams(streams, gates.read, claim)
        return value, (streams, gates.write)

    def write(self, states: States, weights: Weights, t: int, *branches: Tensor) -> States:
        streams, table = states
        p = self.parts
        split = [f.unsqueeze(-2) if p == 1 else f.unflatten(-1, (p, -1)) for f in branches]  # [..., p, D/p]
        following = weights.units.get(t + 1)
        if following is None or following.dynamic is None:
            return (combine(streams, table, split),)
        return write_and_project(streams, table, split, following.dynamic[1], self.norm_eps)

    def drops(self, dims: Dims) -> tuple[()]:
        return ()

    def lasting(self, states: States) -> States:
        return states[:1]

    def viewed(self, states: States, view: Callable[[Tensor], Tensor]) -> States:
        streams, *rest = states
        channels = self.parts * streams.shape[-1]
        by_token = [viewed(x, channels, view, 2) if x.dim() > 2 else x for x in rest]  # or the same for all tokens
        return viewed(streams, channels, view, 2), *by_token

    def matrix(self, weights: Weights, dims: Dims) -> Tensor:
        """float32 [T + 1, T + 1], from the static values: row t - 1 is the read of unit t, the last row the output.

        Columns are f_0 .. f_T.
        """
        units = {t: unit._replace(dynamic=None) for t, unit in weights.units.items()}
        weights = weights._replace(units=units, last=weights.last and weights.last._replace(dynamic=None))
        return in_increments(self, weights, dims.depth, units[1].static.device, self.parts)


@dataclasses.dataclass(frozen=True)
class ParallelStreams(Streams):
    """Base of hyper-connections whose H [..., n, D] starts as n copies of ``x_0``.

    The output is the mean of the streams, their sum, or ``"learned"``: one more read, with its own weights.
    """

    fewest_streams: ClassVar[int] = 1

    streams: int = 4
    output: Output = "mean"

    def __post_init__(self) -> None:
        check_count("streams", self.streams, self.fewest_streams)
        check_choice("output", self.output, get_args(Output))

    @property
    def parts(self) -> int:
        return 1

    def start(self, x: Tensor, weights: Weights) -> States:
        if weights.entry is not None:
            return ((x.unsqueeze(-2) * weights.entry).to(x.dtype),)
        return (x.unsqueeze(-2).expand(*x.shape[:-1], self.streams, x.shape[-1]),)

    def reading(self, values: Tensor) -> Tensor:
        """A_m [..., n, 1] from its values."""
        return values

    def finish(self, states: States, weights: Weights, dims: Dims) -> Tensor:
        (streams,) = states
        if weights.last is not None:
            values, streams, claim = self.values(streams, weights.last)
            return materialize(read_streams(streams, self.reading(values), claim)[0])
        # With an explicit dtype: autocast would make the sum float32.
        return streams.mean(-2) if self.output == "mean" else streams.sum(-2, dtype=streams.dtype)

    def template(self, states: States) -> Tensor:
        return states[0].select(-2, 0)

    @property
    def has_program(self) -> bool:
        """Whether `static_program` is complete: each unit has its own gates, and streams start as copies."""
        return True

    def static_program(self, weights: Weights, dims: Dims) -> Program:
        """The program of the static values, which are all weights if none depends on the streams."""
        units, streams = list[ProgramUnit](), ["x0"] * self.streams
        for t, unit in weights.units.items():
            read, write = self.gates(unit.static, weights)
            opened = Line(f"r{t}", _terms(streams, read[:, 0]))
            names = [f"s{t}_{j}" for j in range(self.streams)]
            written = [Line(name, _terms([*streams, branch_of(t)], write[:, j])) for j, name in enumerate(names)]
            units.append(ProgramUnit((opened,), opened.target, tuple(written)))
            streams = names
        share = 1 / self.streams if self.output == "mean" else 1.0
        shares = torch.full((self.streams,), share)
        if weights.last is not None:
            shares = self.reading(weights.last.static)[:, 0]
        output = Line("out", _terms(streams, shares))
        rows, columns = [unit.read for unit in units], [branch_of(t) for t in range(1, dims.depth + 1)]
        return Program(tuple(units), (output,), "out", (*rows, "out"), ("x0", *columns))

    def parallel(self, states: States) -> Tensor:
        return states[0]


@register_topology("hc-static")
@dataclasses.dataclass(frozen=True)
class HyperConnections(ParallelStreams):
    """Hyper-connections with learned constants: n parallel residual streams (arXiv 2409.19606).

    ``H_0`` is n copies of ``x_0``; unit t reads ``r_t = A_m^T H_{t-1}`` and writes ``H_t = A_r^T H_{t-1} + B f_t^T``
    with its own ``A_m`` [n], ``A_r`` [n, n], ``B`` [n], all unconstrained; `mhc` constrains them. The output is the
    mean of the streams, their sum as in the paper, or one more read ``A_m^T H_T`` (``"learned"``).

    **Paper start.** ``A_m = e_{t mod n}`` with streams counted from 0 and units from 1, ``A_r = I``, ``B = 1``: a plain
    residual network in each stream. A learned output starts as the mean.

    **Preserving start.** The same: every stream is ``x_t``, bitwise, and so is the output for n = 1, 2 and 4. If the
    output is the sum, unit T has ``A_r = I/n`` and ``B = 1/n``. All weights learn: A_r through the output, A_m and B
    through the branches (before a norm, A_m hardly learns in the first step, as all streams are equal).

    Args:
        streams: n, 1 or more.
        output: "mean", "sum" as in the paper, or "learned".
    """

    of_states: ClassVar[frozenset[str]] = frozenset({"static", "last_static"})

    @property
    def scaled(self) -> tuple[int, ...]:
        return 1 + self.streams, 1

    def parameters(self, dims: Dims, start: Start) -> dict[str, Tensor]:
        """``static``, float32 [T, n, 1 + n + 1]: for each unit the columns ``A_m | A_r | B``.

        With a learned output also its A_m, ``last_static``, float32 [n, 1].
        """
        depth, n = dims.depth, self.streams
        read = torch.eye(n)[torch.arange(1, depth + 1) % n].unsqueeze(-1)  # [T, n, 1]
        static = torch.cat([read, torch.eye(n).expand(depth, n, n), torch.ones(depth, n, 1)], dim=-1)
        if start == "preserve" and self.output == "sum":
            static[-1, :, 1:] /= n
        return {"static": static} | ({"last_static": torch.full((n, 1), 1 / n)} if self.output == "learned" else {})

    def weights(self, parameters: dict[str, Tensor], dims: Dims) -> Weights:
        found = super().weights(parameters, dims)
        if "dynamic" in parameters:
            return found
        steps = dict(zip(dims.units, _steps(parameters["static"].float()), strict=False))
        return Weights(found.units, found.last, steps=steps)  # not _replace, which Dynamo of torch 2.11 cannot trace

    def read(self, states: States, weights: Weights, t: int) -> tuple[Tensor | Mix, States]:
        if not weights.steps or len(states) == 1:
            return super().read(states, weights, t)
        streams, value = states
        if t in weights.steps:
            return value, (streams,)
        return value, (streams, self.gates(weights.units[t].static, weights).write)

    def write(self, states: States, weights: Weights, t: int, *branches: Tensor) -> States:
        if t not in weights.steps:
            return super().write(states, weights, t, *branches)
        return write_and_read(states[0], weights.steps[t], weights.units[t + 1].static[:, :1], branches)

    def program(self, weights: Weights, dims: Dims) -> Program:
        if any(unit.dynamic is not None for unit in weights.units.values()):
            return super().program(weights, dims)
        return self.static_program(weights, dims)


@register_topology("hc-dynamic")
@dataclasses.dataclass(frozen=True)
class DynamicHyperConnections(HyperConnections):
    """Hyper-connections whose weights also depend on the token (arXiv 2409.19606).

    `HyperConnections` with ``s tanh(norm(H) W)`` added to A_m, A_r and B: one row for each stream, with W
    [D, 1 + n + 1] and two scales s (one for A_m and A_r, one for B) for each unit. The norm is over the channels of
    each stream: an RMS norm without a learned scale, which W absorbs (the authors' listing has a layer norm).

    **Both starts** are those of `HyperConnections` with ``W = 0`` and ``s = 0.01``: exactly the same function. W learns
    from the first step on, s from the second, as its gradient is a multiple of ``tanh(norm(H) W)``. If the branches
    start at zero, W of A_m and of B learn one step later, and the scale of B two. Options are those of
    `HyperConnections`.
    """

    needs_width: ClassVar[bool] = True
    by_token: ClassVar[bool] = True
    matrices: ClassVar[frozenset[str]] = frozenset({"dynamic", "last_dynamic"})

    @property
    def gating(self) -> Gating:
        return Gating(self.streams)

    def parameters(self, dims: Dims, start: Start) -> dict[str, Tensor]:
        """``static`` as in `HyperConnections`; ``dynamic``, W, float32 [T, D, 1 + n + 1]; ``scale``, s, float32 [T, 2].

        With a learned output also its W, ``last_dynamic``, float32 [D, 1], and s, ``last_scale``, float32 [1].
        """
        found = super().parameters(dims, start) | _dynamic_start(dims.depth, dims.width, 1 + self.streams + 1)
        if self.output == "learned":
            found |= {"last_dynamic": torch.zeros(dims.width, 1), "last_scale": torch.full((1,), 0.01)}
        return found


@register_topology("frac-hc")
@dataclasses.dataclass(frozen=True)
class FracConnections(Streams):
    """Frac-connections: hyper-connections between m fractions of one hidden state (arXiv 2503.14125).

    ``x_0`` is split into m fractions of D/m channels, H [m, D/m]; no state grows. Unit t reads ``A_m^T H_{t-1}``
    with its m fractions concatenated, and writes ``H_t = A_r^T H_{t-1} + diag(B) F_t``, where F_t [m, D/m] are the
    fractions of ``f_t``; A_m and A_r are [m, m], B is [m]. The output is H_T, with its fractions concatenated.
    ``dynamic`` adds ``s tanh(norm(H) W)`` to all three as in `DynamicHyperConnections`; the norm is over each fraction,
    and W [D/m, m + m + 1] is shared by the fractions.

    **Both starts** are ``A_m = A_r = I``, ``B = 1``, ``W = 0`` and ``s = 0.01``: the original network, bitwise. All
    weights learn from the first step on, except s, which learns from the second; if the branches start at zero, A_m, B
    and their W learn one step later, and the scale of B two.

    Args:
        fractions: m, 1 or more; has to divide the width.
        dynamic: whether the weights also depend on the token.
    """

    needs_width: ClassVar[bool] = True
    by_token: ClassVar[bool] = True
    matrices: ClassVar[frozenset[str]] = frozenset({"dynamic"})
    of_states: ClassVar[frozenset[str]] = frozenset({"static"})

    fractions: int = 4
    dynamic: bool = True

    def __post_init__(self) -> None:
        check_count("fractions", self.fractions, 1)
        if not isinstance(self.dynamic, bool):
            raise ValueError(f"dynamic={self.dynamic!r}: it has to be True or False.")

    @property
    def parts(self) -> int:
        return self.fractions

    @property
    def scaled(self) -> tuple[int, ...]:
        return 2 * self.fractions, 1

    def parameters(self, dims: Dims, start: Start) -> dict[str, Tensor]:
        """``static``, float32 [T, m, m + m + 1]: for each unit the columns ``A_m | A_r | B``.

        With ``dynamic``: W, float32 [T, D/m, m + m + 1]; ``scale``, s, float32 [T, 2], of A_m and A_r and of B.

        Raises:
            UnsupportedTopology: the width is not a multiple of m.
        """
        depth, m = dims.depth, self.fractions
        if dims.width % m:
            raise UnsupportedTopology(
                f"topology 'frac-hc' with fractions={m} cannot split hidden states of {dims.width} channels: pass "
                "a number of fractions that divides it."
            )
        eye = torch.eye(m).expand(depth, m, m)
        static = {"static": torch.cat([eye, eye, torch.ones(depth, m, 1)], dim=-1)}
        return static | _dynamic_start(depth, dims.width // m, 2 * m + 1) if self.dynamic else static

    def start(self, x: Tensor, weights: Weights) -> States:
        return (x.unflatten(-1, (self.fractions, -1)),)

    def finish(self, states: States, weights: Weights, dims: Dims) -> Tensor:
        return states[0].flatten(-2)

    def template(self, states: States) -> Tensor:
        return states[0].flatten(-2)


def _steps(static: Tensor) -> tuple[Tensor, ...]:
    """`Weights.steps` for all units but the last, from static values ``A_m | A_r | B``, [T, n, 1 + n + 1]."""
    _, carry, write = static[:-1].tensor_split((1, -1), dim=-1)
    written = torch.cat([carry.mT, write], dim=-1)  # [T - 1, n, n + 1]
    read = (static[1:, :, :1] * written).sum(-2, keepdim=True)  # not a matrix product: TF32 would round
    return torch.cat([written, read], dim=-2).unbind()


def _terms(streams: Sequence[str], weights: Tensor) -> tuple[Term, ...]:
    return tuple(Term(name, weight) for name, weight in zip(streams, weights.tolist(), strict=True))


def _dynamic_start(depth: int, channels: int, columns: int) -> dict[str, Tensor]:
    return {"dynamic": torch.zeros(depth, channels, columns), "scale": torch.full((depth, 2), 0.01)}
