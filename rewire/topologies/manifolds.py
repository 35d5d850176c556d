"""Parametrisations of square matrices on manifolds, by which manifold hyper-connections mix their streams.

`MANIFOLDS` has them by name; one that is added there can be chosen by ``rewire.compile(model, "mhc", residual=name)``.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rewire.mixes.autograd import by_product, under_transforms
from rewire.mixes.tokens import compiled_sinkhorn, project

_MOST_PERMUTED = 8  # 8 streams have 40,320 permutations
_NEAR = 3.0  # log-odds of the identity at the preserving start


@dataclasses.dataclass(frozen=True)
class Manifold:
    """A parametrisation of matrices that mix n streams by unconstrained values.

    Attributes:
        values: n -> K, the number of values; raises ValueError for an n that it does not support.
        matrix: values [..., K], n, constants or None -> matrices [..., n, n] in the values' dtype, from stream i
            (column) to stream o (row).
        start: n -> values [K] of the preserving start: a matrix that is or nearly is the identity, with eigenvectors 1,
            of eigenvalue 1, and ``linspace(-1, 1, n)``.
        paper: the same for the paper start; None: zeros.
        constants: n, device -> a tensor that depends only on these, made once per forward; None: there is none.
    """

    values: Callable[[int], int]
    matrix: Callable[[Tensor, int, Tensor | None], Tensor]
    start: Callable[[int], Tensor]
    paper: Callable[[int], Tensor] | None = None
    constants: Callable[[int, torch.device], Tensor] | None = None


def _identity(values: Tensor, n: int, _: Tensor | None) -> Tensor:
    return torch.eye(n, dtype=values.dtype, device=values.device).expand(*values.shape[:-1], n, n)


def _permutations(n: int) -> int:
    if n > _MOST_PERMUTED:
        raise ValueError(f"streams={n}: more than {_MOST_PERMUTED} have too many permutations.")
    return math.prod(range(2, n + 1))  # not math.factorial, which torch.compile cannot trace


def _near_first(n: int) -> Tensor:
    count = _permutations(n)
    values = torch.zeros(count)
    values[0] = _NEAR + math.log(count - 1)
    return values


def _factors(n: int) -> int:
    """log2 of n, a power of 2."""
    if n & (n - 1):
        raise ValueError(f"streams={n}: Kronecker products of 2 x 2 matrices need a power of 2, like 4.")
    return n.bit_length() - 1


def kronecker(values: Tensor, n: int, _: Tensor | None = None) -> Tensor:
    """The Kronecker product of factors ``p I + (1 - p) S``, where S swaps two: doubly stochastic.

    Args:
        values: [..., 2 log2(n)]; for each factor, the logits of p and 1 - p.

    Returns:
        [..., n, n]
    """
    product = values.new_ones(*values.shape[:-1], 1, 1)
    for kept, swapped in values.unflatten(-1, (_factors(n), 2)).softmax(-1).movedim((-2, -1), (0, 1)).unbind():
        factor = torch.stack([kept, swapped, swapped, kept], -1).unflatten(-1, (2, 2))
        product = (product[..., :, None, :, None] * factor[..., None, :, None, :]).flatten(-4, -3).flatten(-2)
    return product


def permutations(n: int, device: torch.device) -> Tensor:
    """float32 [n!, n n]: all permutation matrices, row by row, the identity first."""
    orders = torch.zeros(1, 1, dtype=torch.long, device=device)
    for largest in range(1, n):  # insert it at each place of the permutations of smaller ones
        added = orders.new_full((len(orders), 1), largest)
        places = reversed(range(largest + 1))
        orders = torch.cat([torch.cat([orders[:, :place], added, orders[:, place:]], 1) for place in places])
    return (orders.unsqueeze(-1) == torch.arange(n, device=device)).flatten(1).float()


def convex(logits: Tensor, corners: Tensor) -> Tensor:
    """The mean of ``corners``, weighted by the softmax of the logits.

    Args:
        logits: [..., K].
        corners: float32 [K, n n], from `permutations`, so that the result is doubly stochastic.

    Returns:
        [..., n, n]
    """
    n = math.isqrt(corners.shape[-1])
    return project(logits.softmax(-1), corners).unflatten(-1, (n, n))


def cayley(values: Tensor, n: int) -> Tensor:
    """``(I - A/2)^-1 (I + A/2)``, a rotation, where ``values`` [..., n (n - 1) / 2] are the upper triangle of skew A.

    To first order, the values are angles. Rotations by 180 degrees are only reached by infinite values.

    Returns:
        [..., n, n], orthogonal
    """
    row, column = torch.triu_indices(n, n, 1, device=values.device)
    upper = values.new_zeros(*values.shape[:-1], n, n)
    upper[..., row, column] = values
    half, eye = (upper - upper.mT) / 2, torch.eye(n, dtype=values.dtype, device=values.device)
    return torch.linalg.solve(eye - half, eye + half)


def spectral(values: Tensor, n: int, _: Tensor | None = None) -> Tensor:
    """``1/n + Z U diag(s) V^T Z^T`` with rotations U and V, and Z an orthonormal basis of the complement of 1.

    Rows and columns sum to 1 and the largest singular value is 1, as for doubly stochastic matrices, but entries may be
    negative. From values a: ``s = tanh(a)``, and ``U = (I + A)^-1 (I - A)``, where A is skew with ``tanh(a)`` above its
    diagonal.

    Args:
        values: [..., (n - 1)^2]: those of U, then of V, then the n - 1 of s.

    Returns:
        [..., n, n]
    """
    m = n - 1
    basis = torch.ones(n, m, dtype=values.dtype, device=values.device).triu()
    row = torch.arange(1, n, dtype=values.dtype, device=values.device)
    basis = (basis - torch.diag_embed(row, -1)[:, :-1]) / (row * (row + 1)).sqrt()
    of_left, of_right, s = values.tanh().split([m * (m - 1) // 2, m * (m - 1) // 2, m], -1)
    left, right = ((basis[:, :, None] * cayley(-2 * a, m).unsqueeze(-3)).sum(-2) for a in (of_left, of_right))
    return ((left * s.unsqueeze(-2)).unsqueeze(-2) * right.unsqueeze(-3)).sum(-1) + 1 / n


def _not_turned(n: int) -> Tensor:
    """Values of identity rotations and singular values tanh(4), as in the authors' code."""
    return torch.cat([torch.zeros((n - 1) * (n - 2)), torch.full((n - 1,), 4.0)])


def _convex(values: Tensor, n: int, corners: Tensor | None) -> Tensor:
    assert corners is not None
    return convex(values, corners)


#: By name, for the option ``residual=`` of `mhc`, which also takes "sinkhorn"; that has options and kernels.
MANIFOLDS: dict[str, Manifold] = {
    "identity": Manifold(lambda n: 0, _identity, lambda n: torch.zeros(0)),
    "permutations": Manifold(_permutations, _convex, _near_first, constants=permutations),
    "cayley": Manifold(
        lambda n: n * (n - 1) // 2, lambda z, n, _: cayley(z, n), lambda n: torch.zeros(n * (n - 1) // 2)
    ),
    "kronecker": Manifold(
        lambda n: 2 * _factors(n),
        kronecker,
        lambda n: torch.tensor([_NEAR, 0.0], dtype=torch.float32).repeat(_factors(n)),
    ),
    "spectral": Manifold(lambda n: (n - 1) ** 2, spectral, _not_turned, _not_turned),
}


def _namespace(name: str) -> str:
    """A free namespace for this module's operators, which the copies in ejected models would otherwise overwrite.

    Torch frees an overwritten operator, although models may still call it.
    """
    name = re.sub(r"\W", "_", name.removesuffix(".topologies.manifolds"))
    while hasattr(getattr(torch.ops, name), "sinkhorn"):  # registered by another copy of this module
        name += "_"
    return name


_NAMESPACE = _namespace(__name__)


@torch.library.custom_op(f"{_NAMESPACE}::sinkhorn", mutates_args=())
def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """``exp(logits)`` with columns, then rows, divided by their sum, ``iterations`` times (Sinkhorn-Knopp).

    ``eps`` is used as in the code of DeepSeek-V4: it is added to the entries after the first division, of columns, and
    to the sums in all others.

    The first division is in the logarithmic domain, where logits neither overflow nor leave a row that is all zero.
    From there on sums stay between 1/n and n: columns that sum to 1 are divided by at most n. It is a custom operator,
    so that backward recomputes the steps instead of keeping them, and because torch.compile takes several times as long
    for a model with the unrolled loop in each unit. On CPUs it is a compiled loop; on GPUs it is part of the kernels
    that compute gates (`rewire.kernels.handwritten.gates`). Gradients of gradients use torch operations.

    Args:
        logits: [..., n, n], float32 or float64.
        iterations: 1 or more.
        eps: 0 or more.

    Returns:
        [..., n, n]: rows sum to 1, exactly for ``eps=0``; columns in the limit.
    """
    loop = compiled_sinkhorn(logits)
    return sinkhorn_steps(logits, iterations, eps) if loop is None else loop.forward(logits, iterations, eps)


def balanced(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """`sinkhorn`, in plain torch where the operator is not supported or takes longer than the loop.

    An exported program has to run where rewire is not, and ONNX knows no operators of others.
    """
    if under_transforms() or torch.compiler.is_exporting():
        return sinkhorn_steps(logits, iterations, eps)
    loop = compiled_sinkhorn(logits) if by_product(logits) else None
    return sinkhorn(logits, iterations, eps) if loop is None else loop.forward(logits, iterations, eps)


def sinkhorn_steps(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """`sinkhorn` in plain torch, which any transformation supports."""
    *_, steps = _normalised(logits, iterations, eps)
    return steps[-1].movedim((0, 1), (-2, -1)).contiguous()


@torch.library.custom_op(f"{_NAMESPACE}::sinkhorn_backward", mutates_args=())
def sinkhorn_backward(grad: Tensor, logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Gradient of the logits of `sinkhorn` from the gradient of its result."""
    loop = compiled_sinkhorn(logits)
    return (_gradient if loop is None else loop.backward)(grad, logits, iterations, eps)


def _gradient(grad: Tensor, logits: Tensor, iterations: int, eps: float) -> Tensor:
    """`sinkhorn_backward`, in logarithms: each step ``log p - log(sum p + eps)`` has the gradient ``g - q sum g``."""
    columns, padded, steps = _normalised(logits, iterations, eps)
    grad = grad.movedim((-2, -1), (0, 1)) * steps[-1]
    for step, dim in zip(reversed(steps), (1, *(0, 1) * (iterations - 1)), strict=True):
        grad = grad - step * grad.sum(dim, keepdim=True)
    grad = grad * (columns - padded).exp()
    grad = grad - columns.exp() * grad.sum(0, keepdim=True)
    return grad.movedim((0, 1), (-2, -1)).contiguous()  # in the memory layout of the fake implementation


def _normalised(logits: Tensor, iterations: int, eps: float) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Logarithms of the matrix with normalised columns, and of this plus eps; then the matrix after each later step.

    Shapes are [n, n, ...]: on a CPU, sums over the slowest-varying dimensions take a tenth of the time.
    """
    floor = logits.new_full((), math.log(eps) if eps > 0 else -math.inf)
    columns = torch.log_softmax(logits.movedim((-2, -1), (0, 1)).contiguous(), 0)
    padded = torch.logaddexp(columns, floor) if eps > 0 else columns
    rows = padded - torch.logaddexp(padded.logsumexp(1, keepdim=True), floor) if eps > 0 else padded.log_softmax(1)
    steps = [rows.exp()]
    for dim in (0, 1) * (iterations - 1):
        total = steps[-1].sum(dim, keepdim=True)
        steps.append(steps[-1] / (total + eps if eps > 0 else total))
    return columns, padded, steps


def _setup(ctx: Any, inputs: tuple[Tensor, int, float], output: Tensor) -> None:
    logits, ctx.iterations, ctx.eps = inputs
    ctx.save_for_backward(logits)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (logits,) = ctx.saved_tensors
    return sinkhorn_backward(grad, logits, ctx.iterations, ctx.eps), None, None


def _setup_twice(ctx: Any, inputs: tuple[Tensor, Tensor, int, float], output: Tensor) -> None:
    *tensors, ctx.iterations, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _backward_twice(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None, None]:
    again = torch.is_grad_enabled()  # true with create_graph=True
    with torch.enable_grad():
        grad, logits = (x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in ctx.saved_tensors)
        result = _gradient(grad, logits, ctx.iterations, ctx.eps)
    of_grad, of_logits = torch.autograd.grad(result, (grad, logits), upstream, create_graph=again)
    return of_grad, of_logits, None, None


sinkhorn.register_fake(lambda logits, iterations, eps: logits.new_empty(logits.shape))
sinkhorn_backward.register_fake(lambda grad, logits, iterations, eps: logits.new_empty(logits.shape))
sinkhorn.register_autograd(_backward, setup_context=_setup)
sinkhorn_backward.register_autograd(_backward_twice, setup_context=_setup_twice)
