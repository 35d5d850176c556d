"""The papers' experiments: their parts, quick ones as a whole, and the large ones scaled down."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

ROOT = Path(__file__).parents[2]
PAPERS = ROOT / "benchmarks" / "papers"


@pytest.fixture(autouse=True)
def papers_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PAPERS))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for name, repeats in (("train_00.bin", 200), ("train_01.bin", 100), ("val_00.bin", 40)):
        np.tile(np.arange(40), repeats).astype("<u2").tofile(folder / name)
    return folder


@pytest.mark.parametrize("holds", [True, False])
def test_exit_status_says_whether_the_claims_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], holds: bool
) -> None:
    name = f"toy_that_holds_{holds}".lower()
    (tmp_path / f"{name}.py").write_text(
        '"""A toy\n\nIts setup."""\nfrom common import Claim, Outcome, axes, main\n'
        "def run():\n"
        "    with axes() as (figure, (ax,)):\n        ax.plot([1, 2], label='a')\n"
        f"    return Outcome([Claim('it is so', '1', '2', True), Claim('and so', '3', '4', {holds})], figure)\n"
        "main(run)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", [name, "--results", str(tmp_path), "--figures", str(tmp_path)])
    with pytest.raises(SystemExit) as stop:
        importlib.import_module(name)
    assert stop.value.code == (not holds)
    report = json.loads((tmp_path / f"{name}.json").read_text())
    assert (report["title"], report["setup"]) == ("A toy", "Its setup.")
    assert [claim["holds"] for claim in report["claims"]] == [True, holds]
    assert (tmp_path / f"{name}.png").stat().st_size > 1000 and ("NO" in capsys.readouterr().out) != holds


def test_two_numbers_per_singular_value_are_the_zas_network() -> None:
    from common import fit_linear
    from zas_depth import linear_net, zas_steps

    target = torch.diag(torch.tensor([1.5, 0.7, 0.2], dtype=torch.float64)).flip(0)
    rate = 0.05
    losses = fit_linear(linear_net("zas", 0, depth=4, width=3), target, rate, 3000, stop=1e-10)
    steps = zas_steps(torch.linalg.svdvals(target), 4, torch.tensor([rate], dtype=torch.float64))
    assert losses[-1] <= 1e-10 and int(steps) == len(losses) - 1


def test_shortcuts_of_linear_networks() -> None:
    from linear_nets import LinearNet, ancre_net, small_weights

    first, second = weights = small_weights(2, 3, 1.0, seed=0)
    eye = torch.eye(3, dtype=torch.float64)
    torch.testing.assert_close(LinearNet(weights)(eye).T, second @ first)
    torch.testing.assert_close(LinearNet(weights, [(0, 1), (0, 2)])(eye).T, second @ (first + eye) + eye)
    mixed = second @ (first + eye) + (eye + first + eye) / 2  # ANCRe: the shortcut 0:1, then half of each
    torch.testing.assert_close(ancre_net(weights, 1.0)(eye).T, mixed)


def test_excess_risk_bounds_of_a_diagonal_matrix() -> None:
    from dca_excess_risk import bounds

    matrix = torch.diag(torch.tensor([6.0, 3.0, 2.0], dtype=torch.float64))  # A - I = diag(5, 2, 1)
    found = bounds(matrix, rank=1)
    assert found["residual"] == pytest.approx(4 + 1)
    assert found["grn-v1"] == pytest.approx(5 - 9 / 2)
    assert found["grn-v2"] == pytest.approx(0)


def test_the_page_has_every_claim() -> None:
    from run import SCRIPTS, page

    claims = [{"text": f"claim {n}", "paper": "p", "ours": "o", "holds": n == 0} for n in range(2)]
    report = {"name": "toy", "title": "T", "setup": "S", "claims": claims, "seconds": 3.0, "machine": "M"}
    written = page([report])
    assert (
        "1 of 2 claims hold" in written and "| claim 1 | p | o | **no** |" in written and "figures/toy.png" in written
    )
    assert all((PAPERS / f"{name}.py").exists() for name in SCRIPTS)


def test_plans_are_table_7() -> None:
    from llama import PLANS

    plan = PLANS["350m"]
    assert (plan.rate, plan.steps, plan.warmup, plan.batch, plan.micro) == (1e-3, 60_000, 6_000, 512, 64)
    assert plan.factor(2_999) == pytest.approx(0.5) and plan.factor(5_999) == 1
    assert plan.factor(33_000) == pytest.approx(0.55) and plan.factor(60_000) == pytest.approx(0.1)


def test_accumulated_gradients_are_those_of_the_whole_batch(text: Path) -> None:
    from llama import PLANS, build, train_on
    from tokens import read_tokens

    data = read_tokens(text, 256, 16)
    plan = dataclasses.replace(PLANS["small"], steps=1, warmup=1, batch=8, micro=8, every=1)
    whole = data.batch(8, 16, 0, torch.device("cpu"))

    class Parts:  # the same sequences in two micro-batches
        def batch(self, size: int, length: int, seed: int, device: torch.device) -> torch.Tensor:
            return whole[seed * size : (seed + 1) * size]

        validation_batches = data.validation_batches

    one = train_on(data, build("small", "ancre", 0, "cpu"), plan, 16, text / "one", False)
    two = train_on(
        Parts(), build("small", "ancre", 0, "cpu"), dataclasses.replace(plan, micro=4), 16, text / "two", False
    )
    assert one.losses == pytest.approx(two.losses, rel=1e-5)
    assert one.validation[0][1] == pytest.approx(two.validation[0][1], rel=1e-4)


def test_llama_learns_and_resumes_exactly(text: Path, tmp_path: Path) -> None:
    from llama import PLANS, build, train_on
    from tokens import read_tokens

    data = read_tokens(text, 256, 16)
    plan = dataclasses.replace(PLANS["small"], steps=8, warmup=1, batch=8, micro=4, every=4)

    def run(folder: str, resume: bool = False, stop: bool = False) -> list[float]:
        model = build("small", "ancre-keep", 0, "cpu")
        if stop:
            calls = iter(range(8 + 1))  # two micro-batches a step: the fifth step fails
            forward = model.forward

            def interrupted(*args: object, **kwargs: object) -> object:
                if model.training and next(calls) == 8:
                    raise KeyboardInterrupt
                return forward(*args, **kwargs)

            model.forward = interrupted
        return train_on(data, model, plan, 16, tmp_path / folder, resume).losses

    straight = run("straight")
    assert straight[-1] < straight[0] - 0.5
    with pytest.raises(KeyboardInterrupt):
        run("stopped", stop=True)
    assert run("stopped", resume=True) == straight
    plan = dataclasses.replace(plan, rate=1.0)
    with pytest.raises(SystemExit, match="other options"):
        run("stopped", resume=True)


@pytest.mark.slow
def test_small_forms_of_the_large_experiments(text: Path, tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    save_file({"latents": torch.randn(40, 1, 8, 8), "labels": torch.arange(40) % 10}, images / "a.safetensors")
    for script, folder, name, runs in (
        ("llama", text, "llama-small", ["residual", "ancre"]),
        ("dca_sweeps", text, "dca-small", ["dca", "dca-k1"]),
        ("dit", images, "dit-small", ["residual", "ancre-keep"]),
    ):
        arguments = ("--small", "--data", folder, "--steps", 2, "--out", tmp_path, "--device", "cpu", "--runs", *runs)
        importlib.import_module(script).main(list(map(str, arguments)))
        for run in runs:
            log = json.loads((tmp_path / name / run / "log.json").read_text())
            assert len(log["losses"]) == 2 and log["validation"][-1][0] == 2
        assert (tmp_path / name / "loss.png").exists()


def test_what_is_wrong_with_the_data_is_said(text: Path, tmp_path: Path) -> None:
    from dit import read_images
    from tokens import read_tokens

    with pytest.raises(SystemExit, match="no such folder"):
        read_tokens(tmp_path / "absent", 256, 16)
    with pytest.raises(SystemExit, match="token 39 is outside of the model's vocabulary of 30"):
        read_tokens(text, 30, 16)
    with pytest.raises(SystemExit, match="no file for training has more than 9000 tokens"):
        read_tokens(text, 256, 9000)
    with pytest.raises(SystemExit, match=r"no files \*\.safetensors"):
        read_images(tmp_path, (1, 8, 8))
    save_file({"latents": torch.zeros(2, 4, 4), "labels": torch.zeros(2)}, tmp_path / "a.safetensors")
    with pytest.raises(SystemExit, match=r"a\.safetensors: needs 'latents' \[n, 1, 8, 8\]"):
        read_images(tmp_path, (1, 8, 8))
