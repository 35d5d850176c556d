"""Preserving starts, on a net with ReLUs and without norms: what it computes at the start is the original network's."""

from __future__ import annotations

import pytest
import torch
from every_topology import PRESERVING, compiled, kinds_first, learned
from torch import Tensor, nn

#: Starts that round otherwise than the plain network: sums in groups, weights that are no powers of 2.
ROUNDED = {key for key in PRESERVING if key.startswith("mhc") or key.endswith("-last")}
ROUNDED |= {"grn-v1-groups", "dca-groups", "attnres-groups", "grn-v2-few", "grn-v3-few", "attnres-few"}
#: Those whose reads sum all that the branches added: in bfloat16 they round once, the plain network after each add.
SUMMED = {key for key in PRESERVING if key.startswith(("grn", "dca", "attnres"))}

WIDTH, DEPTH = 16, 3


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        y: Tensor = self.o_proj((q @ k.mT / WIDTH).relu() @ v)
        return y


class Block(nn.Module):
    """Attention and MLP without norms, each with a residual add of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.inner, self.outer = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        y: Tensor = x + self.outer(self.inner(x).relu())
        return y


def net(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(DEPTH))).to(dtype)


def run(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Output, and the gradients of all weights but the learned connections'."""
    y = model(x)
    weights = {name: weight for name, weight in model.named_parameters() if name not in learned(model)}
    return y.detach(), dict(zip(weights, torch.autograd.grad(y.float().square().sum(), weights.values()), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("key", kinds_first(key for key in PRESERVING if key != "dca-norms"))  # it has none
def test_it_is_the_original_network(key: str, dtype: torch.dtype) -> None:
    plain = net(dtype)
    rewired = compiled(plain, key, granularity="sublayer", validate=False)
    x = torch.randn(2, 5, WIDTH, dtype=dtype)
    (wanted, wanted_gradients), (found, gradients) = run(plain, x), run(rewired, x)
    if key not in (ROUNDED | SUMMED if dtype == torch.bfloat16 else ROUNDED):
        assert torch.equal(found, wanted)
    tolerance = 50 * torch.finfo(torch.float32 if key in ROUNDED and dtype == torch.float64 else dtype).eps
    assert (found - wanted).abs().max() <= tolerance * wanted.abs().max()
    for name, gradient in gradients.items():
        difference = (gradient - wanted_gradients[name]).abs().max()
        assert difference <= tolerance * wanted_gradients[name].abs().max(), name
