"""Initialisers of single tensors, usable alone like those of `torch.nn.init`.

Weights are [out, in], convolution kernels [out, in / groups, *kernel], as `torch.nn.Linear` and `torch.nn.Conv2d` store
them. All functions work in place, on any dtype and device, and return their argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Generator, Tensor

#: IDInit's variance of the loose condition, and its scale of zero-preserving weights.
LOOSE = 1e-6
EPSILON = 1e-6


@torch.no_grad()
def idi_(tensor: Tensor, tau: float = 1.0, generator: Generator | None = None, *, loose: float = LOOSE) -> Tensor:
    """IDI: identity matrices one below the other (IDInit, arXiv 2503.04626, Equation 3).

    ``W[m, j] = tau`` where ``m = j (mod in)``, else 0. A wide weight is the identity padded with zero columns.

    Args:
        tensor: [out, in].
        tau: the value on the diagonals.
        generator: source of the loose condition's noise.
        loose: variance of the loose condition (Section 3.1.2): each tau is drawn from N(tau, loose), which tells the
            copies of an input apart. The paper writes N(tau, 1e-6), and elsewhere the variance as second argument. 0
            turns it off.

    Raises:
        ValueError: the tensor has not two dimensions.
    """
    _expect(tensor, tensor.ndim == 2, "idi_", "a matrix; idic_ takes kernels")
    rows, columns = tensor.shape
    diagonal = torch.full((rows,), tau, dtype=tensor.dtype, device=tensor.device)
    if loose:
        noise = torch.empty(rows, dtype=torch.promote_types(tensor.dtype, torch.float32), device=tensor.device)
        diagonal = (tau + noise.normal_(0.0, math.sqrt(loose), generator=generator)).to(tensor.dtype)
    m = torch.arange(rows, device=tensor.device)
    tensor.zero_()
    tensor[m, m % columns] = diagonal
    return tensor


@torch.no_grad()
def idic_(tensor: Tensor, tau: float = 1.0, generator: Generator | None = None, *, loose: float = LOOSE) -> Tensor:
    """IDIC: IDI on the kernel as a matrix, which keeps patches (IDInit, arXiv 2503.04626, Equation 10).

    The kernel is the matrix ``out x (k * k * in)``, inputs running fastest: output m is input ``m % in`` at tap
    ``m // in``, taps in row-major order and starting again after the last. Kernels of any number of dimensions and any
    size are taken, even ones, too. The paper leaves grouped kernels open; here they are the same matrix, with
    ``in / groups`` inputs, so that a depthwise kernel gives each channel another tap.

    Args:
        tensor: [out, in / groups, *kernel].
        tau: see `idi_`.
        generator: see `idi_`.
        loose: see `idi_`.

    Raises:
        ValueError: the tensor has less than three dimensions.
    """
    _expect(tensor, tensor.ndim > 2, "idic_", "a kernel; idi_ takes matrices")
    return _fill_patches(tensor, lambda matrix: idi_(matrix, tau, generator, loose=loose))


@torch.no_grad()
def idiz_(tensor: Tensor, eps: float = EPSILON) -> Tensor:
    """IDIZ: differences of two inputs, scaled by eps (IDInit, arXiv 2503.04626, Section 3.2).

    IDI_eps; then, where out < in, the columns after the first ``out`` become IDI_{-eps}; else ``W[m, j] = -eps`` where
    ``m % in = j - 1`` (counted from 1): the next input, cyclically. For independent inputs of one mean and of variance
    phi, each output has mean 0 and variance ``2 phi eps^2`` (Equation 12). With a single input there is no difference
    to take: all entries are -eps, as the equation says.

    Args:
        tensor: [out, in].
        eps: the scale. float16 holds 1e-6 as a subnormal number.

    Raises:
        ValueError: the tensor has not two dimensions.
    """
    _expect(tensor, tensor.ndim == 2, "idiz_", "a matrix; idizc_ takes kernels")
    rows, columns = tensor.shape
    idi_(tensor, eps, loose=0.0)
    if rows < columns:
        idi_(tensor[:, rows:], -eps, loose=0.0)
        return tensor
    m = torch.arange(rows, device=tensor.device)
    tensor[m, (m + 1) % columns] = -eps
    return tensor


@torch.no_grad()
def idizc_(tensor: Tensor, eps: float = EPSILON) -> Tensor:
    """IDIZC: IDIZ on the kernel as a matrix, which is that of `idic_` (IDInit, arXiv 2503.04626, Section 3.2).

    Args:
        tensor: [out, in / groups, *kernel].
        eps: see `idiz_`.

    Raises:
        ValueError: the tensor has less than three dimensions.
    """
    _expect(tensor, tensor.ndim > 2, "idizc_", "a kernel; idiz_ takes matrices")
    return _fill_patches(tensor, lambda matrix: idiz_(matrix, eps))


@torch.no_grad()
def identity_(tensor: Tensor, groups: int = 1) -> Tensor:
    """The identity, padded with zeros; in kernels at the centre, in each group by itself.

    Args:
        tensor: [out, in] or [out, in / groups, *kernel]; the centre of an even kernel is the tap ``k // 2``.
        groups: groups of the convolution.

    Raises:
        ValueError: the tensor is a vector, or its outputs cannot be divided into the groups.
    """
    for block in _centres(tensor, groups, "identity_"):
        block.fill_diagonal_(1.0)
    return tensor


@torch.no_grad()
def near_identity_(tensor: Tensor, std: float, generator: Generator | None = None, groups: int = 1) -> Tensor:
    """The identity plus N(0, std^2) everywhere (ZAS's baseline, arXiv 1911.00645, Equation 5.1).

    Args:
        tensor: see `identity_`.
        std: standard deviation; the paper's is ``1 / sqrt(d L)`` at width d and depth L.
        generator: source of the noise.
        groups: see `identity_`.

    Raises:
        ValueError: see `identity_`.
    """
    identity_(tensor, groups)
    wide = torch.empty(tensor.shape, dtype=torch.promote_types(tensor.dtype, torch.float32), device=tensor.device)
    return tensor.add_(wide.normal_(0.0, std, generator=generator))


@torch.no_grad()
def zero_hadamard_(tensor: Tensor, groups: int = 1) -> Tensor:
    """ZerO: the identity, or part of a Hadamard matrix where out > in (arXiv 2110.12661, Algorithm 1).

    A weight with out > in is ``c I* H_m I*``, the first ``in`` columns and ``out`` rows of the Hadamard matrix of size
    ``2^m``, ``m = ceil(log2(out))``. ``c = 2^(-m/2)``, which makes its columns orthonormal at powers of two (the
    authors' code; the paper prints ``2^(-(m-1)/2)``). Kernels have it at the centre, as in Algorithm 2.

    Args:
        tensor: see `identity_`.
        groups: see `identity_`.

    Raises:
        ValueError: see `identity_`.
    """
    for block in _centres(tensor, groups, "zero_hadamard_"):
        rows, columns = block.shape
        if rows <= columns:
            block.fill_diagonal_(1.0)
        else:
            size = 2 ** math.ceil(math.log2(rows))
            block.copy_(_hadamard(size, block.device)[:rows, :columns] / math.sqrt(size))
    return tensor


def _hadamard(size: int, device: torch.device) -> Tensor:
    """Sylvester's Hadamard matrix of a size that is a power of two: [size, size] of 1 and -1."""
    matrix = torch.ones(1, 1, device=device)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def _fill_patches(tensor: Tensor, fill: Callable[[Tensor], Tensor]) -> Tensor:
    """Let ``fill`` make the matrix [out, taps * in] of a kernel [out, in, *kernel]."""
    taps_first = tensor.movedim(1, -1)  # [out, *kernel, in]
    matrix = torch.empty(tensor.shape[0], taps_first[0].numel(), dtype=tensor.dtype, device=tensor.device)
    taps_first.copy_(fill(matrix).view(taps_first.shape))
    return tensor


def _centres(tensor: Tensor, groups: int, name: str) -> tuple[Tensor, ...]:
    """Matrices at the centre of a kernel, one for each group; all of the tensor is zero afterwards."""
    divides = tensor.ndim > 1 and tensor.shape[0] % groups == 0
    _expect(tensor, divides, name, f"a matrix or a kernel whose outputs divide into {groups} groups")
    tensor.zero_()
    centre = tensor
    for size in tensor.shape[2:]:
        centre = centre.select(2, size // 2)
    return centre.chunk(groups)


def _expect(tensor: Tensor, fits: bool, name: str, wanted: str) -> None:
    if not fits:
        raise ValueError(f"{name} takes {wanted}; this tensor is {tuple(tensor.shape)}.")
