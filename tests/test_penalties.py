from __future__ import annotations

import math

import pytest
import torch
from mixing import shaken
from models import PreNorm, Stack, vectors
from torch import nn

import rewire
from rewire.topologies import ANCRe


def rewired(topology: str = "ancre-ingoing", start: str = "paper", **options: object) -> nn.Module:
    return rewire.compile(Stack(PreNorm), topology, start=start, example_inputs=(vectors(),), **options)  # type: ignore[arg-type]


def naive(model: nn.Module, q: float, axis: int) -> float:
    """Mean entropy over rows (axis 1) or columns of the printed matrix, single entries left out."""
    (table,) = rewire.coefficients(model).values()
    entropies = []
    for line in table.double().unbind(1 - axis):
        p = [float(v) for v in line if v > 0]
        if len(p) > 1:
            entropies.append(-sum(v * math.log(v) for v in p) if q == 1 else (1 - sum(v**q for v in p)) / (q - 1))
    return sum(entropies) / len(entropies)


@pytest.mark.parametrize("q", [0.5, 1.0, 1.5, 2.0, 3.0])
@pytest.mark.parametrize(("topology", "axis"), [("ancre-ingoing", 1), ("ancre-outgoing", 0)])
def test_is_the_mean_tsallis_entropy(topology: str, axis: int, q: float) -> None:
    model = rewired(topology)
    shaken(model, 0.01)
    assert rewire.sparsity_penalty(model, q).item() == pytest.approx(naive(model, q, axis), rel=1e-5)


def test_zero_where_one_hot_and_largest_where_uniform() -> None:
    one_hot = rewired()
    rewire.connections(one_hot)["layers"].set_values({"logits": torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0, 1.0])})
    assert rewire.sparsity_penalty(one_hot).item() == pytest.approx(0, abs=1e-5)
    assert rewire.sparsity_penalty(rewired()).item() == pytest.approx((1 / 2 + 2 / 3) / 2)  # 1 - 1/n of n = 2, 3


@pytest.mark.parametrize("q", [0.5, 1.0, 2.0])
def test_descending_makes_connections_sparse(q: float) -> None:
    model = rewired()
    shaken(model, 0.001)
    optimizer = torch.optim.Adam(rewire.parameter_groups(model, lr=0.0, weight_decay=0.0, connection_lr=1e-2))
    for _ in range(400):
        optimizer.zero_grad()
        rewire.sparsity_penalty(model, q).backward()
        optimizer.step()
    (table,) = rewire.coefficients(model).values()
    assert table.isfinite().all()
    torch.testing.assert_close(table.max(dim=1).values, torch.ones(3), atol=1e-3, rtol=0)


def test_reaches_connection_weights_only_and_survives_underflow() -> None:
    model = rewired()
    (logits,) = rewire.connections(model)["layers"].parameters()
    with torch.no_grad():
        logits[1] = 0.01  # uniform weights are a maximum of the entropy
        logits[3] = 100.0  # the other entries of its row are exactly 0
    for q in (0.5, 1.0, 2.0):
        logits.grad = None
        rewire.sparsity_penalty(model, q).backward()
        assert logits.grad is not None and logits.grad.isfinite().all() and logits.grad.any()
    assert all(p.grad is None for name, p in model.named_parameters() if "depth_connections" not in name)


def test_trunks_without_a_softmax_do_not_count() -> None:
    one = rewire.compile(nn.ModuleList([Stack(PreNorm)]), ANCRe(), start="paper", validate=False)
    both = rewire.compile(
        nn.ModuleDict({"a": Stack(PreNorm), "b": Stack(PreNorm)}),
        {"a": ANCRe(), "b": "denseformer"},
        start="paper",
        validate=False,
    )
    assert rewire.sparsity_penalty(both).item() == rewire.sparsity_penalty(one).item()


def test_errors() -> None:
    with pytest.raises(rewire.RewireError, match="Stack was not rewired"):
        rewire.sparsity_penalty(Stack(PreNorm))
    for topology in ("denseformer", "ancre-none"):
        with pytest.raises(rewire.UnsupportedTopology, match=rf"softmax.*'layers' \({topology}\).*ancre-ingoing"):
            rewire.sparsity_penalty(rewired(topology))
    with pytest.raises(ValueError, match="q=0"):
        rewire.sparsity_penalty(rewired(), q=0)
