"""Manifold hyper-connections: gates that are sigmoids, and a constrained mix of the streams (arXiv 2512.24880)."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch
from torch import Tensor

from rewire.errors import check_choice, check_count, check_positive, check_small
from rewire.mixes.gating import Gating
from rewire.mixes.mix import Mix
from rewire.mixes.streams import read_streams
from rewire.topologies.base import Dims, Start, States, materialize, no_preserving_start
from rewire.topologies.hyper import Gates, ParallelStreams, Weights
from rewire.topologies.manifolds import MANIFOLDS, balanced
from rewire.topologies.registry import register_topology

_PHI_STD = 0.02  # as in the code of DeepSeek-V4
_DIAGONAL = 4.0  # Sinkhorn-Knopp's diagonal logits at the preserving start


class Waiting:
    """The weights of the streams in the next unit's read, float32 [..., n, 1].

    A plain class: FSDP2 casts every tensor in tuples and dataclasses that a block gets.
    """

    __slots__ = ("weights",)

    def __init__(self, weights: Tensor) -> None:
        self.weights = weights


@register_topology("mhc")
@dataclasses.dataclass(frozen=True)
class ManifoldHyperConnections(ParallelStreams):
    """mHC: hyper-connections that mix the streams by a constrained matrix (arXiv 2512.24880).

    ``H_0`` is n copies of ``x_0``; unit t reads ``r_t = H_pre H_{t-1}`` and writes ``H_t = H_res H_{t-1} + H_post^T
    f_t`` (eq. 3), where for ``x = rms_norm(vec(H_{t-1}))`` over all n D channels (eq. 7-8)

    - ``H_pre = sigmoid(alpha_pre x phi_pre + b_pre)`` [n],
    - ``H_post = 2 sigmoid(alpha_post x phi_post + b_post)`` [n],
    - ``H_res`` [n, n], from stream i (column) to stream o (row), is computed from ``z = alpha_res x phi_res + b_res``.

    The norm has no learned scale: phi absorbs it. ``residual`` selects ``H_res``:

    - ``"sinkhorn"``: z is n x n, and columns and rows of ``exp(z)`` are normalised alternately, ``iterations`` times
      (eq. 9), rows last: rows sum to 1, columns in the limit. DeepSeek-V4 and GLM-5 Next.
    - ``"identity"``: I, without z. Hunyuan V4.
    - ``"permutations"``: ``sum_k softmax(z)_k P_k`` over all n! permutation matrices (mHC-lite, arXiv 2601.05732):
      doubly stochastic, without iterations. For few streams, as z has n! values.
    - ``"cayley"``: ``(I - A/2)^-1 (I + A/2)``, a rotation; A is skew, and z its upper triangle (JPmHC, arXiv
      2602.18308, which approximates the inverse by iterations).
    - ``"kronecker"``: the Kronecker product of ``log2(n)`` 2 x 2 matrices ``p I + (1 - p) S``, where S swaps two and
      ``(p, 1 - p)`` is a softmax of two values of z (KromHC, arXiv 2601.21579): doubly stochastic, without iterations,
      from few values.
    - ``"spectral"``: ``1/n + Z U diag(s) V^T Z^T`` with rotations U and V, ``-1 < s < 1``, and Z a basis of the
      complement of 1 (sHC, arXiv 2603.20896; its authors' code has a separate scale for each of the three): rows and
      columns sum to 1, and no direction grows, but entries may be negative. z has ``(n - 1)^2`` values.
    - any other name in `MANIFOLDS`.

    For an unconstrained matrix and gates, use `HyperConnections` or `DynamicHyperConnections`. A learned output is one
    more read, ``H_pre H_T``, as in DeepSeek-V4 and Hunyuan V4; GLM-5 Next has the mean, the paper the sum.

    With ``delayed=True, output="learned"`` (Single-Pass mHC, DeepSeek-V4.1) a unit reads with the weights that the
    previous unit computed, so that streams are read and written once between two branches. Unit 1 reads the first
    stream, and the last unit's weights read the output, which has no weights of its own.

    With ``entry_scales=True`` (Learned Stream Scaling, arXiv 2606.03483) the streams start differently: stream i is
    ``s_i * x_0`` with a learned s_i [D]. Streams that start equal only diverge by what is written to them, and many
    models end up using one of them.

    **Paper start.** ``alpha = 0.01``; the paper does not give the others: phi is normal with standard deviation 0.02
    and b is 0, as in the code of DeepSeek-V4, or for ``"identity"`` that of Hunyuan V4, where ``H_pre`` is 1/n; for
    ``"spectral"`` s is tanh(4). (With phi zero, the streams would stay equal forever.) So H_pre is about 1/2, H_post 1,
    and H_res 1/n; for cayley it is I, and for spectral nearly so.
    Entry scales are 0.6 plus Xavier's uniform noise, as in their authors' code.

    **Preserving start.** ``H_t = 1 x_t^T + v y_t^T``: all streams are ``x_t``, up to multiples of some ``y_t`` that no
    read sees. ``H_post = 1 + v/2`` with ``v = linspace(-1, 1, n)``, with less of v if magnitude < 2; ``H_pre`` and a
    learned output are ``(1 + u/2) / n`` with ``u = v^2 - mean(v^2)``: 1, u and v are orthogonal. ``H_res`` is a
    multiple of I plus a constant, or another matrix with eigenvectors 1 and v: Sinkhorn's logits are 4 on the diagonal,
    else 0; the identity has weight ``e^3 / (1 + e^3)`` among permutations, and in each Kronecker factor; ``A = 0``; U
    and V are I, and s is tanh(4). (Closer to the identity, the gradients of the first two would vanish, and `sinkhorn`
    would hardly converge.) phi is 0; ``s_i = 1 + v_i / 2``. This is the original network to rounding, and with `eps` to
    T eps, delayed or not. With ``output="sum"`` the result would be n times as large, which no constrained H_res can
    undo: `for_start` takes the mean instead, which is the sum of streams that each hold ``1/n`` of ``x_t``.

    - *Learning*: b and phi learn from the first step on, alpha from the second. For n = 2, u is 0, and H_res learns one
      step later, as it does for "kronecker". If the branches start at zero, all but a learned output needs one step
      more. Gradients of H_res may be small: use Adam rather than plain SGD.
    - *No gradient by construction*, with either start: H_res of unit 1, which mixes equal streams (except cayley), and
      that of unit T before a mean or sum (except cayley; hardly any for sinkhorn).

    Args:
        streams: n, 2 or more; for "permutations" at most 8, for "kronecker" a power of 2.
        output: "mean", "sum" as in the paper, or "learned".
        iterations: how often `sinkhorn` normalises columns and rows, 1 or more.
        residual: "sinkhorn", or a name in `MANIFOLDS`: "identity", "permutations", "cayley", "kronecker" or
            "spectral".
        magnitude: the factor of H_post, 2 in the paper; an option of Hunyuan V4.
        eps: added to H_pre, in `sinkhorn`, and for "identity" to H_post, as in the released models, which have 1e-6.
        norm_eps: epsilon of the norm; 1e-5 in GLM-5 Next and Hunyuan V4.
        delayed: whether units read with the weights of the previous unit; only with ``output="learned"``.
        entry_scales: whether the streams start as ``x_0`` times learned scales instead of copies; not if delayed, where
            unit 1 reads just one stream.
    """

    needs_width: ClassVar[bool] = True
    by_token: ClassVar[bool] = True
    matrices: ClassVar[frozenset[str]] = frozenset({"dynamic", "last_dynamic"})
    of_states: ClassVar[frozenset[str]] = frozenset({"entry"})
    fewest_streams: ClassVar[int] = 2  # a sigmoid is never 1

    iterations: int = 20
    residual: str = "sinkhorn"
    magnitude: float = 2.0
    eps: float = 0.0
    norm_eps: float = 1e-6
    delayed: bool = False
    entry_scales: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("iterations", self.iterations, 1)
        check_choice("residual", self.residual, ("sinkhorn", *MANIFOLDS))
        assert self.scaled  # raises for an unsupported number of streams
        if self.delayed and self.output != "learned":
            raise ValueError("delayed=True: the output is the read that the last unit computed: pass output='learned'.")
        if self.delayed and self.entry_scales:
            raise ValueError("entry_scales=True: with delayed=True unit 1 would read a scaled input. Leave out one.")
        check_positive("magnitude", self.magnitude, 2.0)
        check_small("eps", self.eps)
        check_small("norm_eps", self.norm_eps)

    def for_start(self, start: Start) -> ManifoldHyperConnections:
        return dataclasses.replace(self, output="mean") if start == "preserve" and self.output == "sum" else self

    @property
    def scaled(self) -> tuple[int, ...]:
        n = self.streams
        values = n * n if self.residual == "sinkhorn" else MANIFOLDS[self.residual].values(n)
        return (n, n, values) if values else (n, n)

    def parameters(self, dims: Dims, start: Start) -> dict[str, Tensor]:
        """``static``, b, float32 [T, K]; ``dynamic``, phi, float32 [T, n D, K]; ``scale``, alpha, float32 [T, 3].

        The K columns are n of H_pre, n of H_post, and those of z, a matrix z row by row (o n + i). Rows of phi are
        stream by stream; alpha is that of pre, post, res (if there is a z). A learned output, if not delayed, has
        ``last_static`` [n], ``last_dynamic`` [n D, n] and ``last_scale`` [1]. Entry scales are ``entry``, s [n, D].

        Raises:
            UnsupportedTopology: ``start="preserve"`` with the sum of the streams as output, or a magnitude up to 1.
        """
        depth, n, columns = dims.depth, self.streams, sum(self.scaled)
        seed = torch.Generator().manual_seed(0)  # the same start on every rank, and again after a reset
        phi = _PHI_STD * torch.randn(depth, n * dims.width, columns, generator=seed, device="cpu")
        last_phi = _PHI_STD * torch.randn(n * dims.width, n, generator=seed, device="cpu")
        last = pre = post = torch.zeros(n)
        res = torch.zeros(columns - 2 * n)
        if start == "preserve":
            self._check_preserves()
            odd = torch.linspace(-1, 1, n, dtype=torch.float64)
            even = odd**2 - (odd**2).mean()  # its sum is 0, and so is that of its product with odd
            last = pre = _logit((1 + even / 2) / n - self.eps)
            spread = min(0.5, (self.magnitude - 1) / 2)
            post = _logit((1 + spread * odd - self._added) / self.magnitude)
            res = self._near_identity()
            phi, last_phi = torch.zeros_like(phi), torch.zeros_like(last_phi)
        elif self.residual == "identity":
            last = pre = torch.full((n,), -math.log(n - 1))  # its sigmoid is 1/n
        elif self.residual != "sinkhorn" and (paper := MANIFOLDS[self.residual].paper):
            res = paper(n)
        static = torch.cat([part.expand(depth, -1) for part in (pre, post, res)], dim=-1)
        found = {"static": static, "dynamic": phi, "scale": torch.full((depth, len(self.scaled)), 0.01)}
        if self.entry_scales:
            bound = math.sqrt(6 / (n + dims.width))  # Xavier's
            entry = 0.6 + bound * (2 * torch.rand(n, dims.width, generator=seed, device="cpu") - 1)
            if start == "preserve":
                entry = (1 + torch.linspace(-0.5, 0.5, n)).unsqueeze(1).repeat(1, dims.width)
            found["entry"] = entry
        if self.output == "learned" and not self.delayed:
            found |= {"last_static": last, "last_dynamic": last_phi, "last_scale": torch.full((1,), 0.01)}
        return found

    def _check_preserves(self) -> None:
        if self.output == "sum":
            raise no_preserving_start(self, f"output='sum' makes its output {self.streams} times as large")
        if self.magnitude <= 1:
            raise no_preserving_start(self, f"magnitude={self.magnitude} times a sigmoid is less than 1")

    def _near_identity(self) -> Tensor:
        """Preserving start of b_res."""
        if self.residual == "sinkhorn":
            return _DIAGONAL * torch.eye(self.streams).flatten()
        return MANIFOLDS[self.residual].start(self.streams)

    def matrix(self, weights: Weights, dims: Dims) -> Tensor:
        if weights.entry is not None:
            like = weights.units[1].static  # drawn values are on the CPU even if the model is built on the meta device
            weights = weights._replace(entry=weights.entry.mean(1, keepdim=True).to(like.device))
        return super().matrix(weights, dims)

    def weights(self, parameters: dict[str, Tensor], dims: Dims) -> Weights:
        found = super().weights(parameters, dims)
        constants = None if self.residual == "sinkhorn" else MANIFOLDS[self.residual].constants
        if constants is None:
            return found
        return Weights(found.units, found.last, constants(self.streams, parameters["static"].device), entry=found.entry)

    def start(self, x: Tensor, weights: Weights) -> States:
        if not self.delayed:
            return super().start(x, weights)
        first = torch.zeros(*x.shape[:-1], self.streams, 1, dtype=torch.float32, device=x.device)
        first[..., 0, :] = 1
        return (*super().start(x, weights), Waiting(first))

    def read(self, states: States, weights: Weights, t: int) -> tuple[Tensor | Mix, States]:
        if not self.delayed:
            return super().read(states, weights, t)
        streams, *known, waiting = states
        gates, streams, claim = self.opened(streams, weights.units[t], weights, *known)
        value, streams = read_streams(streams, _weights_of(waiting), claim)
        return value, (streams, gates.write, gates.read)

    def write(self, states: States, weights: Weights, t: int, *branches: Tensor) -> States:
        if not self.delayed:
            return super().write(states, weights, t, *branches)
        streams, table, following = states
        return (*super().write((streams, table), weights, t, *branches), Waiting(following))

    def finish(self, states: States, weights: Weights, dims: Dims) -> Tensor:
        if self.delayed:
            return materialize(read_streams(states[0], _weights_of(states[-1]))[0])
        return super().finish(states, weights, dims)

    def lasting(self, states: States) -> States:
        return (states[0], _weights_of(states[-1])) if self.delayed else super().lasting(states)

    @property
    def has_program(self) -> bool:
        return not (self.delayed or self.entry_scales)

    @property
    def gating(self) -> Gating | None:
        if self.residual != "sinkhorn":
            return None
        return Gating(self.streams, self.iterations, self.eps, self.magnitude)

    def signal(self, products: Tensor) -> Tensor:
        return products

    def reading(self, values: Tensor) -> Tensor:
        return (torch.sigmoid(values) + self.eps).unsqueeze(-1)

    def gates(self, values: Tensor, weights: Weights) -> Gates:
        pre, post, res = values.tensor_split((self.streams, 2 * self.streams), dim=-1)
        write = self.magnitude * torch.sigmoid(post) + self._added
        # In one tensor, as sums take them
        return Gates(self.reading(pre), torch.cat([self._mixed(res, weights), write.unsqueeze(-1)], dim=-1).mT)

    def _mixed(self, res: Tensor, weights: Weights) -> Tensor:
        """H_res [..., out, in]."""
        n = self.streams
        if self.residual != "sinkhorn":
            return MANIFOLDS[self.residual].matrix(res, n, weights.constants)
        return balanced(res.unflatten(-1, (n, n)), self.iterations, self.eps)

    @property
    def _added(self) -> float:
        """The number that is added to H_post's sigmoid: only Hunyuan V4 adds eps there."""
        return self.eps if self.residual == "identity" else 0.0


def _logit(shares: Tensor) -> Tensor:
    """The logits of ``shares``, float32."""
    return torch.logit(shares).float()


def _weights_of(waiting: Waiting | Tensor) -> Tensor:
    """The waiting weights, which are a plain tensor at the start of a pipeline stage."""
    if isinstance(waiting, Tensor):
        return waiting.to(torch.promote_types(waiting.dtype, torch.float32))
    return waiting.weights
