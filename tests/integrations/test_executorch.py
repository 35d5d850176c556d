"""Frozen models as ExecuTorch programs, run by its runtime. Its packages are no part of the development environment."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from mixing import ids, llama, mixed
from models import PreNorm, Stack, vectors
from torch import Tensor, nn

import rewire

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it calls its own functions experimental
    exir = pytest.importorskip("executorch.exir", reason="ExecuTorch is not installed", exc_type=ImportError)
    runtime = pytest.importorskip("executorch.runtime")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class Logits(nn.Module):
    """A language model as a function of its token ids."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, use_cache=False).logits


def executed(model: nn.Module, x: Tensor) -> Any:
    exported = torch.export.export(model, (x,))
    program = exir.to_edge_transform_and_lower(exported).to_executorch()
    return runtime.Runtime.get().load_program(program.buffer).load_method("forward").execute([x])[0]


@pytest.mark.parametrize("topology", ["ancre-ingoing", "denseformer", "grn-v2", "hc-static"])
def test_frozen_models(topology: str) -> None:
    model, _ = rewire.freeze(mixed(Stack(PreNorm), topology).eval(), 0.02)
    torch.testing.assert_close(executed(model, vectors()), model(vectors()), rtol=1e-5, atol=1e-5)


def test_a_frozen_llama() -> None:
    model = Logits(rewire.freeze(mixed(llama(), "ancre-ingoing").eval(), 0.02)[0]).eval()
    torch.testing.assert_close(executed(model, ids(1)), model(ids(1)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("topology", ["dca", "mhc"])
def test_weights_per_token(topology: str) -> None:
    model = mixed(Stack(PreNorm), topology).eval()
    torch.testing.assert_close(executed(model, vectors()), model(vectors()), rtol=1e-5, atol=1e-5)


def test_what_it_lacks() -> None:
    """Only what is not frozen has such operations, and not all of it."""
    with pytest.raises(Exception, match="tril_indices"):
        executed(mixed(Stack(PreNorm), "ancre-ingoing").eval(), vectors())
