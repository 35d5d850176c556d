"""quantize_ of torchao on rewired models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mixing import ids, learned, llama, mixed
from torch import Tensor, nn
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_
from torchao.utils import TorchAOBaseTensor

import rewire


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(ids()).logits


def quantised(model: nn.Module) -> set[str]:
    return {name for name, value in model.named_parameters() if isinstance(value, TorchAOBaseTensor)}


@pytest.mark.parametrize("config", [Int8WeightOnlyConfig, Int8DynamicActivationInt8WeightConfig])
@pytest.mark.parametrize("topology", ["ancre-ingoing", "grn-v3", "mhc"])
def test_linear_maps_are_quantised_and_connections_are_not(topology: str, config: type) -> None:
    model = mixed(llama(), topology)
    expected, coefficients = logits(model), rewire.coefficients(model)["model.layers"]
    quantize_(model, config())
    assert quantised(model) == {n for n, _ in llama().named_parameters() if "proj" in n or "lm_head" in n}
    assert {value.dtype for value in learned(model).values()} == {torch.float32}
    assert torch.equal(rewire.coefficients(model)["model.layers"], coefficients)
    error = (logits(model) - expected).norm() / expected.norm()
    assert 0 < error < 0.05


@pytest.mark.parametrize("topology", ["ancre-ingoing", "dca"])
def test_the_order_does_not_matter(topology: str) -> None:
    """Rewired and then quantised, or the other way round: the same numbers."""
    last, first = mixed(llama(), topology), llama()
    quantize_(last, Int8WeightOnlyConfig())
    quantize_(first, Int8WeightOnlyConfig())
    first = mixed(first, topology)
    assert quantised(first) == quantised(last)
    assert torch.equal(logits(first), logits(last))


def test_a_frozen_model() -> None:
    model, _ = rewire.freeze(mixed(llama()), 0.02)
    expected = logits(model)
    quantize_(model, Int8WeightOnlyConfig())
    assert quantised(model)
    assert (logits(model) - expected).norm() / expected.norm() < 0.05


def test_saving_is_refused_by_name(tmp_path: Path) -> None:
    model = mixed(llama())
    quantize_(model, Int8WeightOnlyConfig())
    with pytest.raises(rewire.RewireError, match=r"q_proj\.weight' is a Int8Tensor and no plain tensor"):
        rewire.save(model, tmp_path)
    rewire.save(model, tmp_path, weights="connections")
    base = llama()
    quantize_(base, Int8WeightOnlyConfig())
    assert torch.equal(logits(rewire.load(tmp_path, base, weights="connections")), logits(model))
