"""Few tokens without gradients take shorter ways: they compute the same."""

from __future__ import annotations

import copy

import pytest
import torch
from mixing import llama

import rewire
from rewire.kernels.cpu import plain

NAMES = ["ancre-ingoing", "attnres", "denseformer", "grn-v3", "hc-dynamic", "hc-static", "mhc", "muddformer"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_a_token_without_gradients_is_as_with_them(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        plain, "WORTHWHILE", 1 << 18
    )  # as for users: with 0, other tests' value, a token goes their way
    torch.manual_seed(0)
    model = rewire.compile(copy.deepcopy(llama()), name, start="paper", validate=False).eval()
    for connection in rewire.connections(model).values():
        for weight in connection.parameters():
            torch.nn.init.normal_(weight, std=0.1)
    for module in model.modules():
        if not hasattr(module, "layout"):
            for weight in module.parameters(recurse=False):
                weight.data = weight.to(dtype)
    ids = torch.tensor([[3]])
    want = model(ids).logits
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            got = model(ids).logits
        assert want.requires_grad and not got.requires_grad
        torch.testing.assert_close(got.clone(), want.detach(), rtol=0, atol=2e-5 if dtype == torch.float32 else 1e-12)
