"""What `rewire.diagnose` measures: signals at residual adds, in blocks and in trunks."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

#: Outputs of a function with fewer numbers than this get the exact Jacobian.
EXACT_BELOW = 513


@dataclasses.dataclass(frozen=True)
class Chi:
    """Mean squared singular value of a Jacobian.

    Attributes:
        value: exact, or an unbiased estimate.
        error: standard error of the estimate; 0 if it is exact, nan with a single probe.
        probes: random probes that it was estimated with; 0 if it is exact.
    """

    value: float
    error: float
    probes: int

    def __str__(self) -> str:
        return f"{self.value:.3g}" + (f" ± {self.error:.1g}" if self.probes > 1 else "")


@dataclasses.dataclass(frozen=True)
class SiteSignals:
    """Signals at one residual add, site t of 1..T.

    ``h_{t-1}`` is what its branch reads, ``h_t`` what the next one reads, ``h_T`` the trunk's output. For an attention
    with separate q/k/v inputs it is the input of the residual. The norm of a hidden state is the L2 norm over its
    channels, averaged over all positions (examples, tokens, pixels; padding counts), in float32 or better.

    Attributes:
        name: path of the branch's main module from the model's root.
        kind: ``attention``, ``ffn``, ..., as `rewire.inspect` says.
        stream: norm of ``h_{t-1}``.
        branch: norm of ``f_t``, what the branch adds.
        update: norm of ``h_t - h_{t-1}``. In a plain pre-norm model it is that of ``f_t``; topologies and post-norms
            change more than the branch adds.
        cosine: of ``h_{t-1}`` and ``h_t`` over the channels, averaged over all positions.
        gradient: L2 norm, over everything, of the loss's gradient in ``f_t`` as the branch returned it (the first
            output, if several are added). In a plain pre-norm model it is that of the stream after the add. None if
            nothing in the branch has a gradient.
        weight_gradient: L2 norm of the loss's gradient in all weights of the branch's main module, all uses of a
            shared one together; None if none of them is trained.
    """

    name: str
    kind: str
    stream: float
    branch: float
    update: float
    cosine: float
    gradient: float | None
    weight_gradient: float | None


@dataclasses.dataclass(frozen=True)
class BlockSignals:
    """How much a block changes the hidden state.

    Attributes:
        path: of the block.
        influence: ``1 - cosine``, the Block Influence of ShortGPT (arXiv 2403.03853, Equation 1), accurate where the
            cosine rounds to 1.
    """

    path: str
    influence: float

    @property
    def cosine(self) -> float:
        """The cosine of the block's input and output: of what its first branch and that of the next block read.

        Over the channels, averaged over all positions.
        """
        return 1 - self.influence


@dataclasses.dataclass(frozen=True)
class TrunkSignals:
    """Signals in one trunk.

    Attributes:
        name: of the trunk.
        sites: its residual adds, in order.
        blocks: its blocks, in order, each as often as it is called.
        output: norm of the trunk's output ``h_T`` (see `SiteSignals`).
        input_gradient: L2 norm, over everything, of the loss's gradient in the trunk's input ``x_0``.
        chi: mean squared singular value of the Jacobian from ``x_0`` to ``h_T``, all positions of the batch together
            (examples do not interact, so it is their mean); None if it was not asked for.
        streams: of hyper-connections, how many of their n streams differ at the end, from 1 (all are multiples of one
            vector: they have collapsed) to n (of equal size, at right angles): ``exp(-sum_i p_i log p_i)`` with ``p_i``
            the shares of the squared singular values of a token's streams [n, D], averaged over tokens. None of others.
    """

    name: str
    sites: tuple[SiteSignals, ...]
    blocks: tuple[BlockSignals, ...]
    output: float
    input_gradient: float
    chi: Chi | None
    streams: float | None = None

    @property
    def effective_depth(self) -> float:
        """How many blocks do the work: from 1 (one block makes all changes) to the number of blocks (all alike).

        ``exp(-sum_b p_b log p_b)`` with ``p_b`` the block's share of the sum of all influences: the Hill number of
        order 1, as in the effective rank of Roy and Vetterli (EUSIPCO 2007). The notion is that of arXiv 2505.13898,
        which puts no number on it; this one is ours. 0 if no block changes anything.
        """
        influences = [block.influence for block in self.blocks]
        shares = [value / sum(influences) for value in influences if value > 0]
        return math.exp(-sum(share * math.log(share) for share in shares)) if shares else 0.0


def mean_squared_singular_value(
    function: Callable[[Tensor], Tensor], x: Tensor, probes: int = 16, seed: int = 0
) -> Chi:
    """``chi = ||J||_F^2 / min(m, n)`` for the Jacobian J [m, n] of ``function`` at ``x``.

    chi > 1: gradients grow on their way back; chi < 1: they vanish; 1 is the critical line (arXiv 2503.04626, Section
    2, after arXiv 1711.04735). With m <= 512 outputs, J is computed row by row. Else it is estimated: for v [m] of
    independent signs, ``E ||J^T v||^2 = ||J||_F^2`` (Hutchinson's estimator), one backward pass for each v. Rows, not
    columns: not all operations have forward-mode derivatives.

    Args:
        function: from a tensor to one tensor, differentiable.
        x: where; n numbers in any shape, floating dtype.
        probes: random vectors v, 1 or more.
        seed: of the probes, which are the same on all devices.

    Raises:
        ValueError: fewer than one probe.
    """
    if probes < 1:
        raise ValueError(f"probes={probes}: it takes at least one.")
    # Not torch.func.vjp, which supports neither old-style autograd functions nor the hooks of checkpointing.
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        y = function(x.clone())  # the function may write to it
        exact = y.numel() < EXACT_BELOW
        directions = _rows(y) if exact else _signs(y, probes, seed)
        squares = [
            float(precise(torch.autograd.grad(y, x, v, retain_graph=True)[0]).square().sum()) for v in directions
        ]
    values = min(x.numel(), y.numel())
    if exact:
        return Chi(sum(squares) / values, 0.0, 0)
    error = statistics.stdev(squares) / len(squares) ** 0.5 / values if probes > 1 else float("nan")
    return Chi(statistics.fmean(squares) / values, error, probes)


def precise(x: Tensor) -> Tensor:
    """The tensor in float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _rows(y: Tensor) -> Iterator[Tensor]:
    for number in range(y.numel()):
        one_hot = torch.zeros(y.numel(), dtype=y.dtype, device=y.device)
        one_hot[number] = 1
        yield one_hot.view(y.shape)


def _signs(y: Tensor, probes: int, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(probes):
        yield (2 * torch.randint(2, y.shape, generator=generator) - 1).to(y)
