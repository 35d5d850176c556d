"""The arithmetic of docs/scale.md about large models, against what crosses in small ones."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pipeline_worker as worker
import pytest

import rewire

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("scale")


@pytest.mark.parametrize("key", ["residual", "ancre-ingoing", "grn-v3", "dca", "muddformer", "attnres", "hc-dynamic"])
def test_what_crosses(script: Any, key: str) -> None:
    model = worker.make(key)
    first = worker.cut(model, 0, 2)
    rewire.pipeline_stage(first)
    (connection,) = rewire.connections(first).values()
    tokens = worker.BATCH * worker.LENGTH
    (per_token,) = script.crossing(connection, [2])
    (message,) = first(worker.tokens())
    padding = 2 * tokens * bool(connection.travelling)  # a few weights, as columns of every token
    assert tokens * per_token + padding == message.numel()


@pytest.mark.parametrize(("key", "states"), [("residual", 3), ("ancre-ingoing", 3), ("attnres", 5), ("hc-dynamic", 9)])
def test_what_checkpoints_keep(script: Any, key: str, states: int) -> None:
    """In hidden states: of three layers what they take; of attentions and feed-forwards, and of four streams, more."""
    (connection,) = rewire.connections(worker.make(key)).values()
    assert script.checkpointed(connection, 3) == pytest.approx(2 * states * worker.WIDTH, rel=0.1)


def test_the_page_has_the_result(script: Any) -> None:
    rows = json.loads((BENCHMARKS / "results" / "scale.json").read_text())
    assert script.table(rows) in (BENCHMARKS.parent / "docs" / "scale.md").read_text()


def test_sizes(script: Any) -> None:
    assert [cluster.gpus for cluster in script.CLUSTERS] == [1024, 16384]
    small, large = script.CLUSTERS
    assert small.cuts() == [10, 20, 30, 40, 50, 60, 70] and len(large.cuts()) == 15
    assert large.state == 8192 // 8 * 16384 * 2
    weights = [sum(p.numel() for p in cluster.model().parameters()) for cluster in script.CLUSTERS]
    assert weights == [70553706496, 405853388800]  # as published: 70B and 405B
    # a step is three forwards, of 16 million tokens: 6 operations for each weight and token, and attention's
    least = 6 * weights[1] * 2048 * 8192 / (16384 * script.WORK)
    assert 1 < large.micro_batches * 3 * large.forward_seconds(large.model()) / least < 1.1
