"""The demo, with a few steps."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import math
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import rewire
from rewire.saving.checkpoint import matrices

STEPS = 6


@pytest.fixture(scope="module")
def example() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "train_lm.py"
    spec = importlib.util.spec_from_file_location("train_lm_example", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)

    @dataclasses.dataclass(frozen=True)
    class Config(module.Config):  # type: ignore[name-defined, misc]
        batch: int = 2
        validation_batch: int = 4

    module.Config = Config  # type: ignore[attr-defined]
    return module


@pytest.fixture(scope="module")
def out(example: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("train_lm") / "not there yet"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several would wait for each other where tests run in parallel
    try:
        with (out.parent / "log").open("w") as log, contextlib.redirect_stdout(log):
            example.main(steps=STEPS, seed=0, runs="ancre,ancre-fixed", out=out)
    finally:
        torch.set_num_threads(threads)
    return out


@pytest.fixture(scope="module")
def results(out: Path) -> dict[str, Any]:
    return json.loads((out / "results.json").read_text())


def test_everything_is_written(out: Path) -> None:
    pictures, checkpoints = {"loss.png", "heatmap.png", "arcs.png"}, {"ancre.pt", "ancre-fixed.pt"}
    assert {path.name for path in out.iterdir()} == {"results.json", *pictures, *checkpoints}
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in pictures)


def test_a_log_shows_how_far_it_is(out: Path) -> None:
    log = (out.parent / "log").read_text()
    assert re.match(rf"step 1 of {STEPS}: loss of residual \d\.\d+, ancre \d\.\d+, ancre-fixed \d\.\d+\n", log)
    assert "\x1b" not in log and "validation" in log


def test_what_the_results_say(results: dict[str, Any]) -> None:
    assert list(results["runs"]) == ["residual", "ancre", "ancre-fixed"]
    assert results["config"]["steps"] == STEPS
    assert results["versions"]["torch"] == torch.__version__
    assert results["machine"]["threads"] == 1
    assert len(results["findings"]) == 2
    for name, run in results["runs"].items():
        numbers = [*run["losses"], *(loss for _, loss in run["validation"]), run["median_step_seconds"]]
        assert all(math.isfinite(number) and number > 0 for number in numbers)
        assert len(run["losses"]) == STEPS
        assert [step for step, _ in run["validation"]] == [0, STEPS]
        assert run["kept_for_backward_bytes"] > 1e6
        assert run["connection_weights"] == (36 if name == "ancre" else 0)
    assert results["runs"]["residual"]["steps_to_baseline"] == STEPS


def test_runs_start_alike_and_see_the_same_batches(example: ModuleType, results: dict[str, Any]) -> None:
    baseline, preserving = results["runs"]["residual"], results["runs"]["ancre"]
    assert preserving["validation"][0][1] == pytest.approx(baseline["validation"][0][1], rel=1e-5)
    assert preserving["losses"][0] == pytest.approx(baseline["losses"][0], rel=1e-5)
    assert preserving["losses"] != pytest.approx(baseline["losses"], rel=1e-5)  # and learn at once
    config = example.Config(steps=STEPS, seed=3)
    weights = [dict(example.build(name, config).named_parameters()) for name in example.RUNS]
    assert all(torch.equal(value, other[name]) for name, value in weights[0].items() for other in weights)
    assert weights[0]["model.layers.0.mlp.down_proj.weight"].std().item() == pytest.approx(4 * 0.02, rel=0.05)
    assert weights[0]["model.embed_tokens.weight"].std().item() == pytest.approx(config.embedding, rel=0.05)


def test_the_fixed_rule_has_nothing_to_learn(example: ModuleType, out: Path) -> None:
    run = example.Run("ancre-fixed", example.Config(steps=STEPS, seed=0))
    assert not any(p.requires_grad for c in rewire.connections(run.model).values() for p in c.parameters())
    mean = torch.ones(8, 8).tril() / torch.arange(1, 9)[:, None]
    torch.testing.assert_close(matrices(out / "ancre-fixed.pt")["model.layers"], 2 * torch.eye(8) - mean)


def test_what_stands_still_gets_gradients_and_trains_as_the_plain_model(example: ModuleType) -> None:
    config = example.Config(steps=STEPS, seed=0)
    still, plain = (example.Run(name, config) for name in ("ancre-still", "residual"))
    (connection,) = rewire.connections(still.model).values()
    gradients: list[torch.Tensor] = []
    connection.logits.register_post_accumulate_grad_hook(lambda p: gradients.append(p.grad.clone()))
    for seed in range(STEPS):
        batch = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(seed))
        still.train(batch), plain.train(batch)
    assert len(gradients) == STEPS and all(gradient.any() for gradient in gradients)
    assert not connection.logits.any()
    assert still.losses == pytest.approx(plain.losses, rel=1e-3)


def test_the_connection_logits_learn_without_weight_decay(example: ModuleType, out: Path) -> None:
    run = example.Run("ancre", example.Config(steps=STEPS, seed=0))
    weights, logits = run.optimizer.param_groups
    assert [tuple(p.shape) for p in logits["params"]] == [(36,)]
    assert logits["weight_decay"] == 0 < weights["weight_decay"]
    assert len(weights["params"]) + 1 == len(list(run.model.parameters()))
    learned = matrices(out / "ancre.pt")["model.layers"]
    assert (learned - torch.eye(8)).abs().max() > 1e-3


def test_the_text_is_split_by_topics(example: ModuleType) -> None:
    train, held_out = (bytes(part.tolist()) for part in example.read_text())
    assert 6 < len(train) / len(held_out) < 40
    assert held_out[:2000] not in train


def test_an_unknown_run(example: ModuleType, tmp_path: Path) -> None:
    app = example.typer.Typer()
    app.command()(example.main)
    result = CliRunner().invoke(app, ["--runs", "ancre-other", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "ancre-paper" in result.output


@pytest.mark.parametrize(("at", "written"), [(0, False), (3, True)])
def test_an_interrupted_run_leaves_what_it_has(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, written: bool
) -> None:
    @dataclasses.dataclass(frozen=True)
    class Small(example.Config):  # type: ignore[name-defined, misc]
        evaluate_every: int = 2
        layers: int = 2
        length: int = 16

    train = example.Run.train

    def interrupted(run: Any, batch: Any) -> None:
        if run.name == "ancre" and len(run.losses) == at:  # the plain run is a step ahead
            raise KeyboardInterrupt
        train(run, batch)

    monkeypatch.setattr(example.Run, "train", interrupted)
    monkeypatch.setattr(example, "Config", Small)
    with pytest.raises(typer.Exit) as stopped:
        example.main(steps=STEPS, seed=0, runs="ancre", out=tmp_path)
    assert stopped.value.exit_code == 130
    assert (tmp_path / "heatmap.png").exists() == written
    if written:
        found = json.loads((tmp_path / "results.json").read_text())
        assert found["config"]["steps"] == 2
        assert [run["validation"][-1][0] for run in found["runs"].values()] == [2, 2]
