"""REWIRE_LOGS shows what each stage saw and did."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from rewire import logs

PROGRAM = """
import torch, rewire
layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
rewire.compile(model, example_inputs=(torch.randn(2, 4, 8),))
"""


def printed(stages: str) -> str:
    environment = {**os.environ, "REWIRE_LOGS": stages}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True, timeout=300
    )
    return done.stderr


@pytest.fixture
def as_before() -> Iterator[None]:
    loggers = [logging.getLogger(f"rewire.{stage}") for stage in logs.STAGES]
    kept = [(logger.level, logger.propagate, list(logger.handlers)) for logger in loggers]
    yield
    for logger, (level, propagate, handlers) in zip(loggers, kept, strict=True):
        logger.setLevel(level)
        logger.propagate, logger.handlers = propagate, handlers


def test_each_stage_is_shown() -> None:
    text = printed("find,rewrite,validate")
    assert "[rewire.find] looked for residual streams in TransformerEncoder, in " in text
    assert "[rewire.find] TransformerEncoder was run in evaluation and training mode" in text
    assert "[rewire.rewrite] trunk 'layers': " in text and "3 units, start='preserve'" in text
    assert "layers: 6 residual adds in 3 blocks" in text and "= linear(" not in text
    assert "+    src = depth.open(src, norm=self.norm1)\n" in text and "\n-    return x\n" in text
    assert "[rewire.validate] training mode, perturbed weights: 1 outputs, 36 gradients agree" in text
    assert "[rewire.validate] validated TransformerEncoder, in " in text


@pytest.mark.usefixtures("as_before")
def test_the_graph_is_shown_where_that_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    logs.show("+find")
    exec(PROGRAM)
    text = capsys.readouterr().err
    assert "= layer_norm(" in text and "# layers.1 " in text
    assert "rewire.rewrite" not in text and "rewire.validate" not in text


def test_a_typo_is_said_and_nothing_fails(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("REWIRE_LOGS", "fnd")
    logs.show_those_of_the_environment()
    assert "there is no stage 'fnd'. Did you mean 'find'? Stages are find, rewrite, validate" in caplog.text


@pytest.mark.slow
def test_nothing_is_printed_unasked() -> None:
    assert "rewire" not in printed("")


@pytest.mark.usefixtures("as_before")
def test_all_stages_at_once() -> None:
    logs.show("all, +find")
    levels = [logging.getLogger(f"rewire.{stage}").level for stage in logs.STAGES]
    assert levels == [logging.DEBUG, logging.INFO, logging.INFO, logging.INFO]
    logs.show("all")
    assert all(len(logging.getLogger(f"rewire.{stage}").handlers) == 1 for stage in logs.STAGES)
