"""Trunks of one model with different topologies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import PreNorm, Stack, token_ids, vectors
from torch import nn

import rewire
from rewire.code.edited import is_edited
from rewire.patterns.tiny import tiny_model
from rewire.topologies import ANCRe, DenseFormer
from rewire.topologies.ancre import ANCReCascaded


def topologies_of(model: nn.Module) -> dict[str, Any]:
    return {name: connection.layout.topology for name, connection in rewire.connections(model).items()}


def test_encoder_and_decoder_differ() -> None:
    model = tiny_model("t5").eval()
    for keys in (("encoder", "decoder"), ("encoder.block", "decoder.block")):
        chosen = {keys[0]: "dca", keys[1]: ANCRe(temperature=0.1)}
        rewired = rewire.compile(model, chosen)
        kinds = {name: type(topology).__name__ for name, topology in topologies_of(rewired).items()}
        assert kinds == {"encoder.block": "DCA", "decoder.block": "ANCRe"}
        assert topologies_of(rewired)["decoder.block"].temperature == 0.1
    inputs = {"input_ids": token_ids(2, 12, 97), "decoder_input_ids": token_ids(2, 7, 97)}
    with torch.no_grad():
        torch.testing.assert_close(rewired(**inputs).logits, model(**inputs).logits, rtol=1e-4, atol=1e-5)
    assert set(rewire.coefficients(rewired)) == {"encoder.block", "decoder.block"}
    assert not rewire.connections(rewire.restore(rewired))


def test_what_is_not_named_is_left_alone() -> None:
    rewired = rewire.compile(tiny_model("t5"), {"encoder": "denseformer"})
    assert topologies_of(rewired) == {"encoder.block": DenseFormer()}
    assert not any(is_edited(module) for module in rewired.decoder.modules())


def test_each_trunk_computes_its_own_formula() -> None:
    """Each of two nets in a row, rewired alone, is the reference for both at once."""
    torch.manual_seed(0)
    first, second = Stack(PreNorm), nn.Sequential(nn.Linear(5, 8), Stack(PreNorm))
    both = nn.Sequential(first, second)
    chosen = {"0.layers": ANCRe(), "1.1": ANCReCascaded()}
    kwargs: dict[str, Any] = {"start": "paper", "validate": False}
    rewired = rewire.compile(both, chosen, **kwargs)
    parts = [rewire.compile(first, ANCRe(), **kwargs), rewire.compile(second, ANCReCascaded(), **kwargs)]
    assert not torch.allclose(rewired(vectors()), both(vectors()), atol=1e-3)
    assert torch.equal(rewired(vectors()), parts[1](parts[0](vectors())))


@pytest.mark.parametrize(
    ("topology", "options", "error", "message"),
    [
        (
            {"encodr": "dca"},
            {},
            rewire.UnknownName,
            r"no trunk 'encodr'; its trunks are encoder\.block, decod",
        ),
        ({"encoder": "dcca"}, {}, rewire.UnknownName, "'dcca'.*'dca'"),
        ({"encoder": "dca", "encoder.block": "dca"}, {}, ValueError, "'encoder.block' is named by several keys"),
        ({}, {}, ValueError, "is empty"),
        ({"encoder": "dca"}, {"last": 2}, TypeError, r"options \['last'\] cannot be combined.*Topology objects"),
        ({"encoder": "dca"}, {"trunks": ["encoder.block"]}, TypeError, "trunks cannot be combined"),
        ({"encoder": 3}, {}, TypeError, "must be a name or a rewire.Topology, not int"),
        ({"code": "dca"}, {}, rewire.UnknownName, "no trunk 'code'"),
    ],
)
def test_errors(topology: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        rewire.compile(tiny_model("t5"), topology, **options)
