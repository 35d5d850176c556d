"""Tensor functions, entry by entry against the papers' equations."""

import math

import pytest
import torch
from torch import Tensor

from rewire.init import identity_, idi_, idic_, idiz_, idizc_, near_identity_, zero_hadamard_

SHAPES = [(4, 4), (3, 7), (7, 3), (5, 4), (4, 5), (1, 6), (6, 1), (1, 1), (12, 5), (5, 12)]


def idi(rows: int, columns: int, tau: float) -> Tensor:
    """Equation 3, written with its own indices, from 1."""
    matrix = torch.zeros(rows, columns)
    for m in range(1, rows + 1):
        for j in range(1, columns + 1):
            if (m - j) % columns == 0:
                matrix[m - 1, j - 1] = tau
    return matrix


def idiz(rows: int, columns: int, eps: float) -> Tensor:
    """Section 3.2, with indices from 1."""
    matrix = idi(rows, columns, eps)
    if rows < columns:
        matrix[:, rows:] = idi(rows, columns - rows, -eps)
    else:
        for m in range(1, rows + 1):
            for j in range(1, columns + 1):
                if m % columns == j - 1:
                    matrix[m - 1, j - 1] = -eps
    return matrix


def as_matrix(kernel: Tensor) -> Tensor:
    """out x (k * k * in), inputs fastest: the order that Equation 10 names."""
    return kernel.movedim(1, -1).reshape(kernel.shape[0], -1)


@pytest.mark.parametrize("shape", SHAPES)
def test_idi(shape: tuple[int, int]) -> None:
    assert torch.equal(idi_(torch.randn(shape), 1.5, loose=0), idi(*shape, 1.5))


@pytest.mark.parametrize("shape", SHAPES)
def test_idiz(shape: tuple[int, int]) -> None:
    assert torch.equal(idiz_(torch.randn(shape), 0.5), idiz(*shape, 0.5))


@pytest.mark.parametrize(
    "shape",
    [(4, 4, 3), (8, 3, 3, 3), (40, 2, 3, 3), (3, 8, 2, 2), (6, 1, 7, 7), (60, 1, 5, 5), (4, 2, 2, 3, 2), (1, 1, 1)],
)
def test_kernels_are_matrices(shape: tuple[int, ...]) -> None:
    columns = math.prod(shape[1:])
    assert torch.equal(as_matrix(idic_(torch.randn(shape), 2.0, loose=0)), idi(shape[0], columns, 2.0))
    assert torch.equal(as_matrix(idizc_(torch.randn(shape), 0.5)), idiz(shape[0], columns, 0.5))


def test_a_depthwise_kernel_gives_each_channel_another_tap() -> None:
    kernel = idic_(torch.empty(9, 1, 3, 3), loose=0)
    assert torch.equal(kernel.flatten(1), torch.eye(9))


def test_idic_shifts_the_image() -> None:
    image = torch.randn(1, 4, 6, 6)
    out = torch.nn.functional.conv2d(image, idic_(torch.empty(4, 4, 3, 3), loose=0), padding=1)
    assert torch.equal(out[..., 1:, 1:], image[..., :-1, :-1])


def test_loose_condition() -> None:
    weight = idi_(torch.empty(4000, 1000), 2.0, torch.Generator().manual_seed(0))
    diagonal = weight[weight != 0]
    assert len(diagonal) == 4000 and len(diagonal.unique()) > 2000
    assert abs(diagonal.mean() - 2) < 1e-4 and 0.9e-3 < diagonal.std() < 1.1e-3
    again = idi_(torch.empty(4000, 1000), 2.0, torch.Generator().manual_seed(0))
    assert torch.equal(weight, again)


@pytest.mark.parametrize("shape", [(4, 4), (32, 128), (96, 64), (64, 65)])
def test_idiz_has_mean_zero_and_variance_2_phi_eps_squared(shape: tuple[int, int]) -> None:
    x = 3.0 + 0.7 * torch.randn(20000, shape[1], dtype=torch.float64)
    y = x @ idiz_(torch.empty(shape, dtype=torch.float64), 1e-6).T
    assert float(y.mean(0).abs().max()) < 0.05e-6
    assert torch.allclose(y.var(0), torch.tensor(2 * 0.49e-12, dtype=torch.float64), rtol=0.1, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    for made, wanted in (
        (idi_(torch.empty(5, 3, dtype=dtype), loose=0), idi(5, 3, 1.0)),
        (idiz_(torch.empty(5, 3, dtype=dtype)), idiz(5, 3, 1e-6)),
    ):
        assert made.dtype == dtype and torch.allclose(made.float(), wanted, rtol=0.02, atol=1e-12)
    assert idi_(torch.empty(5, 3, dtype=dtype)).count_nonzero() == 5
    assert idiz_(torch.empty(5, 3, dtype=dtype)).count_nonzero() == 10


def test_views_are_filled_in_place() -> None:
    stored = torch.zeros(6, 4)
    idi_(stored.t()[:, 2:], loose=0)
    assert torch.equal(stored[2:], torch.eye(4)) and not stored[:2].any()


def test_zero_hadamard() -> None:
    assert torch.equal(zero_hadamard_(torch.randn(3, 5)), torch.eye(3, 5))
    assert torch.equal(zero_hadamard_(torch.randn(2, 1)), torch.full((2, 1), 0.5).sqrt())
    tall = zero_hadamard_(torch.randn(8, 3))
    assert torch.allclose(tall.T @ tall, torch.eye(3))
    odd = zero_hadamard_(torch.randn(6, 3))  # the first rows and columns of the matrix of size 8
    assert torch.equal(odd, tall[:6])
    kernel = zero_hadamard_(torch.randn(8, 3, 3, 3))
    assert torch.equal(kernel[:, :, 1, 1], tall) and kernel.count_nonzero() == 24


def test_identity_in_groups() -> None:
    image = torch.randn(1, 6, 5, 5)
    for groups in (1, 2, 6):
        kernel = identity_(torch.randn(6, 6 // groups, 3, 3), groups)
        assert torch.equal(torch.nn.functional.conv2d(image, kernel, padding=1, groups=groups), image)
    assert torch.equal(identity_(torch.randn(5, 3)), torch.eye(5, 3))


def test_near_identity() -> None:
    noise = near_identity_(torch.empty(200, 200), 0.1) - torch.eye(200)
    assert abs(noise.mean()) < 2e-3 and 0.098 < noise.std() < 0.102


@pytest.mark.parametrize("unit", [idi_, idiz_])
def test_matrix_functions_refuse_kernels(unit: object) -> None:
    with pytest.raises(ValueError, match=r"takes a matrix; .*; this tensor is \(2, 2, 3\)"):
        unit(torch.empty(2, 2, 3))  # type: ignore[operator]


@pytest.mark.parametrize("unit", [idic_, idizc_])
def test_kernel_functions_refuse_matrices(unit: object) -> None:
    with pytest.raises(ValueError, match="takes a kernel"):
        unit(torch.empty(2, 2))  # type: ignore[operator]


def test_groups_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match="divide into 4 groups"):
        identity_(torch.empty(6, 1, 3), 4)


def test_idi_breaks_the_rank_bound_that_zero_padding_has() -> None:
    """Theorem 3.1 (Figure 4b): a three-layer linear net after some steps of gradient descent."""

    def rank(padded_with_identities: bool) -> int:
        torch.manual_seed(0)
        weights = [torch.empty(n, m, dtype=torch.float64) for n, m in ((24, 8), (24, 24), (8, 24))]
        for weight in weights:
            idi_(weight, loose=0) if padded_with_identities else torch.nn.init.eye_(weight)
            weight.requires_grad_()
        data = torch.randn(10, 64, 8, dtype=torch.float64)
        target = torch.randn(8, 8, dtype=torch.float64)
        for x in data:
            y = x @ weights[0].T @ weights[1].T @ weights[2].T
            gradients = torch.autograd.grad((y - x @ target).square().mean(), weights)
            with torch.no_grad():
                for weight, gradient in zip(weights, gradients, strict=True):
                    weight -= 0.1 * gradient
        return int(torch.linalg.matrix_rank(weights[1].detach() - torch.eye(24, dtype=torch.float64), rtol=1e-9))

    assert rank(padded_with_identities=False) <= 8 < rank(padded_with_identities=True)
