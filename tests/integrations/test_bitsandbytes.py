"""bitsandbytes: weights in 4 and 8 bits, quantised after rewiring and before."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import rewire
from rewire.patterns.tiny import tiny_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:MatMul8bitLt. inputs will be cast"),
    pytest.mark.filterwarnings("ignore:bitsandbytes..*an autograd kernel was not registered"),
]
TOPOLOGIES = ["ancre-ingoing", "grn-v2", "grn-v3", "dca", "muddformer", "attnres", "hc-static", "mhc"]


def linear(layer: nn.Linear, bits: int) -> nn.Module:
    from bitsandbytes.nn import Linear4bit, Linear8bitLt  # here: the quick tests do not need it

    sizes, bias = (layer.in_features, layer.out_features), layer.bias is not None
    new: nn.Module
    if bits == 4:
        new = Linear4bit(*sizes, bias=bias, compute_dtype=torch.float32, quant_type="nf4")
    else:
        new = Linear8bitLt(*sizes, bias=bias, has_fp16_weights=False)
    new.load_state_dict(layer.state_dict())
    return new.to("cpu")  # quantises


def quantized(model: nn.Module, bits: int) -> nn.Module:
    model = copy.deepcopy(model)
    for name, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and "head" not in name:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, linear(layer, bits))
    return model.eval()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_after_rewiring(topology: str, bits: int) -> None:
    plain, ids = tiny_model("llama").eval(), torch.randint(3, 90, (8, 8))
    rewired = quantized(rewire.compile(plain, topology), bits)
    reference = quantized(plain, bits)
    assert type(rewired.get_submodule("model.layers.0.mlp.up_proj")).__module__.startswith("bitsandbytes")
    with torch.no_grad():
        exact, expected, found = (model(ids).logits for model in (plain, reference, rewired))
    rounding, difference = (expected - exact).abs().amax((1, 2)), (found - expected).abs().amax((1, 2))
    assert bool((rounding > 1e-3).all())
    # With 8 bits activations are rounded, too: one on the edge between two values may fall on either side.
    assert int((difference > 1e-5).sum()) <= (bits == 8)
    assert bool((difference < rounding).all())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("given", [False, True], ids=["own inputs", "example_inputs"])
def test_before_rewiring(bits: int, given: bool) -> None:
    """As models come from ``from_pretrained(.., quantization_config=..)``: connections train, the rest stays."""
    reference, ids = quantized(tiny_model("llama"), bits), torch.randint(3, 90, (2, 8))
    rewired = rewire.compile(reference, "ancre-ingoing", example_inputs={"input_ids": ids} if given else None)
    with torch.no_grad():
        torch.testing.assert_close(rewired(ids).logits, reference(ids).logits)
    rewired.requires_grad_(False)
    (connection,) = rewire.connections(rewired).values()
    connection.requires_grad_(True)
    rewired.train()(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in connection.parameters())
