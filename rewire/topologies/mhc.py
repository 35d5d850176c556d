"""mHC: hyper-connections whose mix of the streams is doubly stochastic (arXiv 2512.24880)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from rewire.kernels.tokens import project, rms_norm
from rewire.topologies.base import Dims, Start
from rewire.topologies.hyper import Gates, ParallelStreams, check_count
from rewire.topologies.registry import register_topology

_PHI_STD = 0.02
_DIAGONAL = 4.0


@register_topology("mhc")
@dataclasses.dataclass(frozen=True)
class ManifoldHyperConnections(ParallelStreams):
    """mHC: hyper-connections whose mix of the streams is doubly stochastic (arXiv 2512.24880).

    ``H_0`` is n copies of ``x_0``; unit t reads ``r_t = H_pre H_{t-1}`` and writes ``H_t = H_res H_{t-1} + H_post^T
    f_t`` (eq. 3), where for ``x = rms_norm(vec(H_{t-1}))`` over all n D channels, without a learned scale (eq. 7-9)

    - ``H_pre = sigmoid(alpha_pre x phi_pre + b_pre)`` [n],
    - ``H_post = 2 sigmoid(alpha_post x phi_post + b_post)`` [n],
    - ``H_res = sinkhorn(alpha_res mat(x phi_res) + b_res)`` [n, n], from stream i (column) to stream o (row).

    The paper normalises columns, then rows; here rows come first, so that the columns of H_res sum to 1 however
    far from its limit `sinkhorn` stops, and H_res never changes the mean of the streams. The limit is the same.

    **Paper start.** ``alpha = 0.01``. The paper does not give the others: b is 0 and phi normal with standard
    deviation 0.02, as in the code of DeepSeek-V4. (With phi zero, the streams would stay equal forever.) So H_pre is
    about 1/2, H_post 1 and H_res 1/n. The paper sums the streams for its output: ``output="sum"``, see
    `HyperConnections`.

    **Preserving start.** Reads and the output are the mean of the streams, and the mean stays ``x_t``: ``H_pre = 1/n``;
    H_post is spread over the streams, ``2 sigmoid(linspace(-1, 1, n))``, with mean 1; H_res keeps the mean whatever
    it is. It starts near the identity (logits 4 on the diagonal, else 0): nearer, its gradient, proportional to the
    off-diagonal entries, would vanish, and `sinkhorn` hardly converge. phi is 0 for H_pre and H_post, and drawn as
    above for H_res.

    - *Still learning*: H_pre and H_post learn at once. As the function does not depend on H_res, its b, phi and
      alpha learn from the second step on, when reads have left the mean; the streams differ by then, thanks to the
      spread of H_post. So do the other two alphas, when their phi has left 0. Where the branches start at zero, all
      that waits one step more. These gradients are small at first: use Adam rather than plain SGD.
    - *No gradient by construction*, with either start: H_res of unit T, as only the mean (or the sum) comes after it.
      That of unit 1 mixes equal streams; all that it learns from is how far its rows are from a sum of 1.

    Args:
        streams: n, 2 or more.
        output: "mean", or "sum" as in the paper.
        iterations: how often `sinkhorn` normalises rows and columns, 1 or more.

    Raises:
        ValueError: an option is not one of those values.
    """

    name: ClassVar[str] = "mhc"
    needs_width: ClassVar[bool] = True
    matrices: ClassVar[frozenset[str]] = frozenset({"dynamic"})
    fewest: ClassVar[int] = 2  # a sigmoid is never 1

    iterations: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("iterations", self.iterations, 1)

    @property
    def groups(self) -> tuple[int, ...]:
        return self.streams, self.streams, self.streams**2

    def parameters(self, dims: Dims, start: Start) -> dict[str, Tensor]:
        """K = n + n + n^2 columns: of H_pre, of H_post, and of H_res row by row (o n + i).

        ``static``, b, float32 [T, K]; ``dynamic``, phi, float32 [T, n D, K], its rows stream by stream; ``scale``,
        alpha, float32 [T, 3]: pre, post, res.

        Raises:
            UnsupportedTopology: ``start="preserve"`` with the sum of the streams as output.
        """
        self.check_start(start)
        depth, n, columns = dims.depth, self.streams, sum(self.groups)
        static = torch.zeros(depth, columns)
        seed = torch.Generator().manual_seed(0)  # the same start on every rank, and again after a reset
        dynamic = _PHI_STD * torch.randn(depth, n * dims.width, columns, generator=seed, device="cpu")
        if start == "preserve":
            pre = torch.full((n,), -math.log(n - 1))  # its sigmoid is 1/n
            res = _DIAGONAL * torch.eye(n).flatten()
            static += torch.cat([pre, torch.linspace(-1, 1, n), res])
            dynamic[..., : 2 * n] = 0
        return {"static": static, "dynamic": dynamic, "scale": torch.full((depth, 3), 0.01)}

    def signal(self, streams: Tensor, projection: Tensor) -> Tensor:
        return project(rms_norm(streams.flatten(-2)), projection)

    def gates(self, values: Tensor) -> Gates:
        pre, post, res = values.split(self.groups, dim=-1)
        mixed = sinkhorn(res.unflatten(-1, (self.streams, self.streams)), self.iterations)  # [..., out, in]
        return Gates(torch.sigmoid(pre).unsqueeze(-1), mixed.mT, 2 * torch.sigmoid(post))


@torch.library.custom_op("rewire::sinkhorn", mutates_args=())
def sinkhorn(logits: Tensor, iterations: int) -> Tensor:
    """``exp(logits)`` with rows, then columns, divided by their sum, ``iterations`` times (Sinkhorn-Knopp).

    In the logarithmic domain, where no logits overflow or leave a row that is all zero. It is an operator of its own,
    so that the backward recomputes the steps instead of keeping them, and because torch.compile takes several times as
    long for a model with the unrolled loop in each unit.

    Args:
        logits: [..., n, n], float32 or float64.
        iterations: 1 or more.

    Returns:
        [..., n, n]: columns sum to 1 exactly, rows in the limit.
    """
    return _normalised(logits, iterations)[-1].exp()


@torch.library.custom_op("rewire::sinkhorn_backward", mutates_args=())
def sinkhorn_backward(grad: Tensor, logits: Tensor, iterations: int) -> Tensor:
    """Gradient of the logits of `sinkhorn` from that of its result."""
    steps = _normalised(logits, iterations)
    grad = grad.contiguous() * steps[-1].exp()  # in the layout that the fake promises
    for step, dim in zip(reversed(steps), (-2, -1) * iterations, strict=True):
        grad = grad - step.exp() * grad.sum(dim, keepdim=True)
    return grad


def _normalised(logits: Tensor, iterations: int) -> list[Tensor]:
    """Logarithms of the matrix after each normalisation: of rows, of columns, of rows, ..."""
    steps: list[Tensor] = []
    for dim in (-1, -2) * iterations:
        logits = torch.log_softmax(logits, dim)
        steps.append(logits)
    return steps


def _setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    logits, ctx.iterations = inputs
    ctx.save_for_backward(logits)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (logits,) = ctx.saved_tensors
    return sinkhorn_backward(grad, logits, ctx.iterations), None


sinkhorn.register_fake(lambda logits, iterations: logits.new_empty(logits.shape))
sinkhorn_backward.register_fake(lambda grad, logits, iterations: logits.new_empty(logits.shape))
sinkhorn.register_autograd(_backward, setup_context=_setup_context)
