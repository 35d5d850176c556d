"""Weights per token as matrices of their mean and spread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mixing import mixed
from models import PreNorm, Stack, vectors

import rewire
from rewire.diagnostics.averages import averages


def test_means_and_spreads_are_of_the_batch() -> None:
    model = mixed(Stack(PreNorm), "muddformer")
    depth = rewire.graph(model, (vectors(),))
    means, spreads = averages(model, (vectors(),))
    edges = {(u, v): data for u, v, data in depth.edges(data=True) if data["spread"]}
    for values, of in ((means["layers"], "weight"), (spreads["layers"], "spread")):
        assert values.abs().sum() == pytest.approx(sum(abs(data[of]) for data in edges.values()), rel=1e-4)
    assert means["layers"].shape == rewire.coefficients(model)["layers"].shape and spreads["layers"].max() > 0
    assert not torch.allclose(means["layers"], rewire.coefficients(model)["layers"])


def test_constant_weights_are_their_own_mean() -> None:
    model = mixed(Stack(PreNorm), "ancre-ingoing")
    means, spreads = averages(model, (vectors(),))
    assert torch.equal(means["layers"], rewire.coefficients(model)["layers"]) and spreads == {}


@pytest.mark.parametrize("options", [{"kind": "bars"}, {}])
def test_a_batch_is_for_heat_maps_and_arcs_of_a_model(options: Any, tmp_path: Path) -> None:
    source: Any = mixed(Stack(PreNorm), "muddformer") if options else tmp_path / "checkpoint.pt"
    with pytest.raises(ValueError, match="a batch is for heat maps and arcs of a model"):
        rewire.plot(source, tmp_path / "p.png", batch=(vectors(),), **options)
