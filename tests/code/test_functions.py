"""torch.func: gradients for each example, and forward-mode derivatives, through every topology."""

from __future__ import annotations

import pytest
import torch
from every_topology import EVERY, kinds_first, mixed
from models import PreNorm
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")


def rewired(key: str) -> tuple[nn.Module, dict[str, Tensor], Tensor]:
    plain, x = nn.Sequential(*(PreNorm() for _ in range(3))), torch.randn(3, 5, 32, dtype=torch.float64)
    model = mixed(plain.double().eval(), key)
    return model, {name: p.detach() for name, p in model.named_parameters()}, x


@pytest.mark.slow
@pytest.mark.parametrize("key", EVERY)
def test_gradients_for_each_example(key: str) -> None:
    model, parameters, x = rewired(key)

    def loss(given: dict[str, Tensor], x: Tensor) -> Tensor:
        y: Tensor = functional_call(model, given, (x[None],))
        return y.square().sum()

    found = vmap(grad(loss), (None, 0))(parameters, x)
    for number, one in enumerate(x):
        model.zero_grad()
        model(one[None]).square().sum().backward()
        for name, p in model.named_parameters():
            expected = torch.zeros_like(p) if p.grad is None else p.grad
            # Gradients of float32 weights are sums in another order than by hand.
            atol = 1e-8 if p.dtype == torch.float64 else 1e-8 + 1e-6 * float(expected.abs().max())
            torch.testing.assert_close(found[name][number], expected, rtol=1e-6, atol=atol, msg=name)


@pytest.mark.parametrize("key", kinds_first(key for key in EVERY if "gpas" not in key))  # not the gradients of a value
def test_forward_mode(key: str) -> None:
    model, parameters, x = rewired(key)
    v = torch.randn_like(x)
    with sdpa_kernel(SDPBackend.MATH):  # others have no forward mode
        _, along = jvp(lambda x: functional_call(model, parameters, (x,)), (x,), (v,))
    with torch.no_grad():
        expected = (model(x + 1e-5 * v) - model(x - 1e-5 * v)) / 2e-5
    torch.testing.assert_close(along, expected, rtol=1e-5, atol=1e-6)
