from __future__ import annotations

import json
import time
from pathlib import Path

import matplotlib.image
import pytest
import torch
from models import PreNorm, Stack, vectors
from slow_cases import one_in
from torch import nn

import rewire
from rewire.bench import harness
from rewire.bench.harness import Timing
from rewire.bench.shapes import batch_for, make_shape, shapes
from rewire.errors import RewireError, UnknownName
from rewire.patterns.tiny import tiny_model
from rewire.plotting import plot_times

CPU = torch.device("cpu")


def test_everything_runs_in_turn() -> None:
    calls: list[str] = []
    steps = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    timings = harness.side_by_side(steps, rounds=3, device=CPU, warmup=2)
    assert calls == list("abc") * 5
    assert [len(timing.seconds) for timing in timings.values()] == [3, 3, 3]
    assert all(timing.peak is None for timing in timings.values())


def test_times_are_seconds() -> None:
    steps = {"short": lambda: time.sleep(0.002), "long": lambda: time.sleep(0.02)}
    timings = harness.side_by_side(steps, rounds=3, device=CPU, warmup=0)
    assert 0.02 <= timings["long"].median < 1
    assert timings["long"].ratio(timings["short"]) > 2


def test_ratios_are_taken_round_by_round() -> None:
    """A machine that is three times slower in one round changes no ratio."""
    a, b = Timing((2.0, 6.0, 2.0, 2.2)), Timing((1.0, 3.0, 1.0, 1.1))
    assert a.ratio(b) == 2.0
    assert (a.median, b.median) == (2.1, 1.05)
    assert a.quartiles == (2.0, pytest.approx(3.15))
    assert Timing((1.5,)).quartiles == (1.5, 1.5)
    assert Timing((1.0, 5.0)).quartiles == (2.0, 4.0)  # those of few rounds do not lie outside of them, below 0 say


def test_progress_is_told_after_every_step() -> None:
    ticks: list[int] = []
    harness.side_by_side({"a": int, "b": int}, 3, CPU, tick=lambda: ticks.append(1))
    assert len(ticks) == 2 * (harness.WARMUP + 3)


def test_a_training_step_leaves_gradients() -> None:
    model = Stack(PreNorm)
    harness.training_step(model, ((vectors(),), {}))()
    want = torch.autograd.grad(model(vectors()).square().mean(), list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), want, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    language = tiny_model("llama")
    args, kwargs = batch_for(language, 2, 7)
    assert kwargs["input_ids"].shape == (2, 7)
    harness.training_step(language, (args, kwargs))()
    assert all(parameter.grad is not None for parameter in language.parameters())


def test_saved_results(tmp_path: Path) -> None:
    timings = {"plain": Timing((1.0, 2.0)), "other": Timing((2.0, 4.0), peak=5)}
    harness.save(tmp_path / "new" / "times.json", [harness.as_json(timings)], CPU)
    saved = json.loads((tmp_path / "new" / "times.json").read_text())
    assert saved["results"] == [
        {"plain": {"seconds": [1.0, 2.0], "peak bytes": None}, "other": {"seconds": [2.0, 4.0], "peak bytes": 5}}
    ]
    assert saved["machine"]["torch"] == torch.__version__
    assert saved["machine"]["rewire"]


def test_a_chart(tmp_path: Path) -> None:
    plot_times({"plain": (0.1, 0.12, 0.11), "ancre-ingoing, compiled": (0.2,)}, tmp_path / "times.png")
    picture = matplotlib.image.imread(tmp_path / "times.png")
    assert picture.shape[0] > 200 and picture[..., :3].min() < 0.3
    for nothing in ({}, {"plain": ()}):
        with pytest.raises(ValueError, match="nothing to plot"):
            plot_times(nothing, tmp_path / "none.png")  # type: ignore[arg-type]
    assert not (tmp_path / "none.png").exists()


#: Name -> parameters and blocks; of the DiTs the blocks alone: diffusers embeds time and class in each of them anew.
PAPERS = {"llama-60m": (58e6, 8), "llama-130m": (134e6, 12), "llama-350m": (368e6, 24), "llama-1b": (1.34e9, 24)}
PAPERS["llama-1b-5504"] = PAPERS["llama-1b"]
BLOCKS = {"dit-s2": 12, "dit-b2": 12, "dca-24x512": 24, "resnet-64": 16, "llama-12x256": 12}


@pytest.mark.parametrize("name", one_in(3, shapes()))
def test_shapes_have_the_papers_sizes(name: str) -> None:
    model = make_shape(name, device="meta")
    (trunk,) = rewire.inspect(model).trunks
    if name in PAPERS:
        assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(PAPERS[name][0], rel=0.03)
    assert trunk.blocks == (PAPERS[name][1] if name in PAPERS else BLOCKS[name])


def test_small_shapes_train() -> None:
    for name in ("llama-12x256", "resnet-64"):
        model = make_shape(name)
        harness.training_step(model, batch_for(model, 2, 5))()
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_an_unknown_shape() -> None:
    with pytest.raises(UnknownName, match=r"no shape 'lama-60m'.*'llama-60m'"):
        make_shape("lama-60m")


def test_inputs_that_nothing_tells() -> None:
    with pytest.raises(RewireError, match="no inputs are known for Conv2d"):
        batch_for(torch.nn.Conv2d(3, 4, 3), 2, 5)


def test_what_a_forward_keeps() -> None:
    x, layer = torch.randn(10, 8), nn.Linear(8, 4)
    assert harness.kept_for_backward(layer, lambda: layer(x).exp().sum()) == (x.numel() + 40) * 4


def test_an_accelerator_without_a_driver_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch built for CUDA names it on machines without a GPU, too, unless it is asked to check."""

    def current_accelerator(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
    assert harness.default_device() == torch.device("cpu")
