"""rewire.sparsify: connections that were planted are found, and kept alone they give the same model."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from models import PreNorm, Stack, vectors
from scipy.stats import spearmanr
from torch import Tensor, nn

import rewire
from rewire.diagnostics.ablating import Bench
from rewire.topologies.base import Dims

DEPTH = 6
PLANTED: list[tuple[int | str, int]] = [(3, 0), (6, 2), (6, 4)]


def stack() -> nn.Module:
    torch.manual_seed(0)
    return Stack(PreNorm, DEPTH)


def planted(name: str, **options: Any) -> nn.Module:
    """Rewired, with all weights those of the plain network, but for some."""
    rewired = rewire.compile(stack(), name, validate=False, **options)
    (connection,) = rewire.connections(rewired).values()
    topology: Any = connection.layout.topology
    (key,) = connection.values()
    flat, at = connection.values()[key].clone(), 0
    dims: Dims = connection.layout.dims
    for t, size in zip(topology.mixing(dims), topology.sizes(dims), strict=True):
        for n, i in enumerate(topology.sources_of(t, dims)):
            flat[at + n] += 0.5 * ((t, i) in PLANTED)
        at += size
    connection.set_values({key: flat})
    return rewired


def targets(model: nn.Module) -> Any:
    """A loss that is 0 for the model as it is, and its batches."""
    batches = [vectors(), 2 * vectors()]
    with torch.no_grad():
        wanted = {id(batch): model(batch) for batch in batches}

    def loss(model: Any, batch: Tensor) -> Tensor:
        return (model(batch) - wanted[id(batch)]).square().mean()

    return loss, batches


@pytest.mark.parametrize("name", ["denseformer", "ancre-none", "grn-v1"])
def test_planted_connections_are_found(name: str) -> None:
    model = planted(name)
    loss, batches = targets(model)
    found = rewire.sparsify(model, batches, keep=3, loss=loss)
    assert {(c.unit, c.source) for c in found.candidates[:3]} == set(PLANTED)
    assert found.sources() == {3: [0], 6: [2, 4]}
    assert all(c.score > 1e-5 for c in found.candidates[:3]) and all(abs(c.score) < 1e-9 for c in found.candidates[3:])
    losses = {point.k: point.loss for point in found.curve}
    assert losses[3] < 1e-9 < 1e-5 < losses[2] < losses[0]
    assert found.loss == pytest.approx(0, abs=1e-12) and losses[len(found.candidates)] == found.loss
    weighed = rewire.sparsify(model, batches, keep=3, loss=loss, by="weight")
    assert weighed.sources() == found.sources()


@pytest.mark.parametrize("name", ["denseformer", "grn-v1"])
def test_gradients_are_those_of_small_moves(name: str) -> None:
    """Towards the plain network, of a loss that is not at its minimum; others than the planted ones are there."""
    model = planted(name)

    def loss(model: Any, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    found = rewire.sparsify(model, [vectors(), 2 * vectors()], keep=3, loss=loss, by="gradient")
    slopes = {(c.unit, c.source): c.score for c in found.candidates}
    assert [slope for at, slope in slopes.items() if at not in PLANTED] == pytest.approx([0] * (len(slopes) - 3))
    (connection,) = rewire.connections(model).values()
    topology: Any = connection.layout.topology
    key, at, small = next(iter(connection.values())), 0, 1e-2
    whole = connection.values()[key].clone()
    base = (loss(model, vectors()) + loss(model, 2 * vectors())).detach() / 2
    for t, size in zip(topology.mixing(connection.layout.dims), topology.sizes(connection.layout.dims), strict=True):
        for n, i in enumerate(topology.sources_of(t, connection.layout.dims)):
            if (t, i) in PLANTED:
                moved = whole.clone()
                moved[at + n] -= small * 0.5
                connection.set_values({key: moved})
                rise = (loss(model, vectors()) + loss(model, 2 * vectors())).detach() / 2 - base
                assert slopes[t, i] == pytest.approx(float(rise) / small, rel=0.05)
        at += size


@pytest.mark.parametrize(("name", "options"), [("muddformer", {}), ("attnres", {"qkv": True})])
def test_gradients_of_weights_per_token_are_those_of_small_ablations(name: str, options: dict[str, Any]) -> None:
    """In all that the loss depends on a weight by: later weights of the same token, too."""
    torch.manual_seed(0)
    model = rewire.compile(Stack(PreNorm, 3).double(), name, granularity="block", validate=False, **options)
    (connection,) = rewire.connections(model).values()
    connection.set_values({key: x + 0.2 * torch.randn_like(x) for key, x in connection.values().items()})
    batches, small = [vectors().double(), 2 * vectors().double()], torch.tensor(1e-5).double()

    def loss(model: Any, batch: Tensor) -> Tensor:
        return (model(batch) - 1).square().mean()

    bench = Bench(model, rewire.connections(model), batches, loss, 1, 0)
    bench.base()
    ((trunk, of_trunk),) = bench.trunks.items()
    edges = [part for part in bench.parts() if part.what == "edge"]
    slopes, fractions = bench.slopes(trunk, edges), list[float]()
    for edge in edges:
        changes, losses = of_trunk.changes(edge, plain=True), list[float]()
        for way in (small, -small):
            of_trunk.set(changes, bench.copied, moved=dict.fromkeys(changes, way))
            losses.append(bench._loss())
        fractions.append((losses[0] - losses[1]) / (2 * float(small)))
    assert slopes == pytest.approx(fractions, rel=1e-4, abs=1e-7) and max(map(abs, slopes)) > 1e-2
    of_trunk.set({}, bench.copied)
    whole = [effect.plain for effect in bench.run(edges, None, lambda: None)]
    assert spearmanr(slopes, whole).statistic > 0.8


def test_kept_alone_they_are_the_same_model() -> None:
    model = planted("denseformer")
    loss, batches = targets(model)
    found = rewire.sparsify(model, batches, keep=3, loss=loss)
    few = found.compile(rewire.restore(model), validate=False)
    (connection,) = rewire.connections(few).values()
    assert connection.values()["alpha"].tolist() == [0, 1, 0, 0, 1]  # the preserving start: x0, x2; x2, x4, x5
    torch.testing.assert_close(few(vectors()), stack()(vectors()))
    connection.set_values({"alpha": torch.tensor([0.5, 1, 0.5, 0.5, 1])})
    torch.testing.assert_close(few(vectors()), model(vectors()))
    held = {point.k: point.states for point in found.curve}
    assert held[0] == 1 and held[3] == 3  # the newest; x2 and x4 beside it, as x0 was read before


def test_a_score_is_what_one_connection_adds_to_the_plain_network() -> None:
    model = planted("denseformer")
    loss, batches = targets(model)
    found = rewire.sparsify(model, batches, keep=1, loss=loss)
    losses = {point.k: point.loss for point in found.curve}
    best, second = found.candidates[:2]
    assert losses[0] - losses[1] == pytest.approx(best.score, rel=1e-5)
    assert losses[0] - losses[2] != pytest.approx(best.score + second.score, rel=1e-2)


def test_what_is_told() -> None:
    model = planted("denseformer")
    loss, batches = targets(model)
    found = rewire.sparsify(model, batches, keep=2, loss=loss)
    text, told = str(found), json.loads(found.to_json())
    assert "unit 6" in text and "hidden states held" in text and "not trained" in text
    assert told["keep"] == 2 and dict(told["sources"]) == found.sources() != found.sources(1)
    with pytest.raises(ValueError, match="k=99: there are 21 connections"):
        found.sources(99)


def test_weights_per_token() -> None:
    model = rewire.compile(stack(), "muddformer", validate=False)
    (connection,) = rewire.connections(model).values()
    values = connection.values()
    connection.set_values({"w2": values["w2"] + 0.1 * torch.randn(values["w2"].shape)})
    loss, batches = targets(model)
    found = rewire.sparsify(model, batches, keep=4, loss=loss)
    assert len(found.candidates) == 21 and found.candidates[0].score > 0
    curve = [point.loss for point in found.curve]
    assert curve[0] > curve[-1] == pytest.approx(0, abs=1e-12)
    assert len(rewire.connections(found.compile(stack(), validate=False))) == 1


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("hc-static", {}, "cannot be limited to some connections"),
        ("denseformer", {"block": 2}, "with block=2 chooses its sources already"),
        ("denseformer", {"period": 2}, "with period=2 chooses its sources already"),
        ("grn-v1", {"last": 1}, "with last=1 chooses its sources already"),
        ("muddformer", {"norms": True}, "more than add up states with weights"),
        ("attnres", {"normed": True, "start": "paper"}, "has no preserving start"),
    ],
)
def test_what_cannot_be_limited(name: str, options: dict[str, Any], message: str) -> None:
    model = rewire.compile(stack(), name, validate=False, **options)
    with pytest.raises(rewire.UnsupportedTopology, match=message):
        rewire.sparsify(model, [vectors()], keep=1, loss=lambda model, batch: model(batch).mean())


def test_what_is_asked_wrongly() -> None:
    model = rewire.compile(stack(), "denseformer", validate=False)
    loss = lambda model, batch: model(batch).square().mean()  # noqa: E731
    with pytest.raises(ValueError, match="by='size'"):
        rewire.sparsify(model, [vectors()], keep=1, loss=loss, by="size")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"keep=50: trunk .* has 21 connections"):
        rewire.sparsify(model, [vectors()], keep=50, loss=loss)
    with pytest.raises(rewire.BadExampleInputs, match="no batches"):
        rewire.sparsify(model, [], keep=1, loss=loss)
    with pytest.raises(rewire.UnknownName, match="no rewired trunk 'decoder'"):
        rewire.sparsify(model, [vectors()], keep=1, loss=loss, trunk="decoder")
