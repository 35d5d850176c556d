from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from models import NanoGPT, PreNorm, Stack, token_ids, vectors
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

import rewire
from rewire.patterns import tiny


class Logged(list[tuple[int, dict[str, Any]]]):
    def __call__(self, values: dict[str, Any], step: int) -> None:
        self.append((step, values))


def dense(topology: str = "denseformer") -> nn.Module:
    return rewire.compile(Stack(PreNorm), topology, validate=False)


def test_connection_weights_against_their_definitions() -> None:
    model, log = dense(), Logged()
    monitor = rewire.Monitor(model, log, every=1)
    (before,) = rewire.coefficients(model).values()
    with torch.no_grad():
        for parameter in rewire.connections(model)["layers"].parameters():
            parameter.add_(torch.linspace(-0.5, 0.7, parameter.numel()).view_as(parameter))
    monitor.step()
    ((step, values),) = log
    (matrix,) = rewire.coefficients(model).values()  # [3, 4]: destination j has sources 0..j
    rows = [row[: j + 2].tolist() for j, row in enumerate(matrix)]
    flat = [p for row in rows for p in row]
    shares = [[abs(p) / sum(map(abs, row)) for p in row] for row in rows]
    expected = {
        "min": min(flat),
        "max": max(flat),
        "mean": sum(flat) / len(flat),
        "input": sum(row[0] for row in shares) / 3,
        "previous": sum(row[-1] for row in shares) / 3,
        "sources": sum(math.exp(-sum(s * math.log(s) for s in row)) for row in shares) / 3,
        "change": float((matrix - before).norm() / before.norm()),
        "speed": float((matrix - before).norm() / before.norm()),
        "moved": 0.7,  # of what is stored
    }
    assert step == 1
    assert values == {f"rewire/layers/weights/{name}": pytest.approx(v, rel=1e-5) for name, v in expected.items()}


def test_connections_that_were_left_out_do_not_count() -> None:
    model, log = (
        rewire.compile(Stack(PreNorm), "denseformer", units=["output"], sources=["x0"], validate=False),
        Logged(),
    )
    monitor = rewire.Monitor(model, log, every=1)
    with torch.no_grad():
        for parameter in rewire.connections(model)["layers"].parameters():
            parameter.fill_(0.5)
    monitor.step()
    values = log[0][1]
    (matrix,) = rewire.coefficients(model).values()
    assert (matrix == 0).sum() > 6  # of those in front of their destination, too
    assert values["rewire/layers/weights/min"] == pytest.approx(float(matrix[matrix != 0].min())) != 0
    assert values["rewire/layers/weights/mean"] == pytest.approx(float(matrix[matrix != 0].mean()))


@pytest.mark.parametrize("topology", ["denseformer", "muddformer", "ancre-ingoing"])
def test_a_preserving_start_reads_the_newest_state_alone(topology: str) -> None:
    """Matrices with one source more than destinations, and those with as many."""
    log = Logged()
    rewire.Monitor(dense(topology), log, every=1).step()
    ((_, values),) = log
    assert values["rewire/layers/weights/previous"] == pytest.approx(1)


def test_what_has_stopped_and_what_still_has_a_gradient() -> None:
    model, log = dense("ancre-ingoing"), Logged()
    monitor = rewire.Monitor(model, log, every=1)
    (connection,) = rewire.connections(model).values()
    for logits in (0.5, 60.0, 70.0):  # the last two: softmaxes with one choice left
        with torch.no_grad():
            for parameter in connection.parameters():
                parameter.copy_(logits * torch.linspace(0, 1, parameter.numel()))
        model.zero_grad()
        model(vectors()).square().sum().backward()
        monitor.step()
    series = {
        name: [values[f"rewire/layers/weights/{name}"] for _, values in log] for name in ("moved", "speed", "gradient")
    }
    assert series["moved"] == pytest.approx([0.5, 60.0, 70.0])
    assert series["gradient"][0] > 1e3 * series["gradient"][2]
    assert series["speed"][1] > 1e3 * series["speed"][2]


def test_when_it_logs() -> None:
    log = Logged()
    monitor = rewire.Monitor(dense(), log, every=2, diagnose_every=3, batch=vectors(), probes=0)
    for _ in range(6):
        monitor.step()
    assert [step for step, _ in log] == [2, 3, 4, 6]
    kinds = [{"weights" if "/weights/" in name else "signals" for name in values} for _, values in log]
    assert kinds == [{"weights"}, {"signals"}, {"weights"}, {"weights", "signals"}]
    monitor.step(100)  # a number from elsewhere
    assert log[-1][0] == 100


def test_diagnoses() -> None:
    model, log = dense(), Logged()
    rewire.Monitor(model, log, every=9, diagnose_every=1, batch=vectors(), probes=3, seed=4).step()
    ((_, values),) = log
    (trunk,) = rewire.diagnose(model, vectors(), probes=3, seed=4).trunks
    assert trunk.chi is not None and values["rewire/layers/chi"] == trunk.chi.value
    assert values["rewire/layers/effective_depth"] == trunk.effective_depth
    assert values["rewire/layers/stream/output"] == trunk.output
    assert values["rewire/layers/gradient/input"] == trunk.input_gradient
    assert values["rewire/layers/branch/002 0.mlp"] == trunk.sites[1].branch
    assert values["rewire/layers/influence/003 2"] == trunk.blocks[2].influence
    assert len(values) == 4 + 6 * 6 + 3


def test_a_plain_model_has_signals_only() -> None:
    log = Logged()
    rewire.Monitor(Stack(PreNorm), log, every=1, diagnose_every=1, batch=vectors(), probes=0).step()
    ((_, values),) = log
    assert not any("/weights/" in name for name in values) and "rewire/layers/effective_depth" in values


def test_training_is_not_disturbed() -> None:
    def trained(monitored: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = rewire.compile(NanoGPT(), "ancre-ingoing", validate=False).train()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        monitor = rewire.Monitor(model, Logged(), 1, 1, batch=token_ids(), probes=2) if monitored else None
        for _ in range(2):
            optimizer.zero_grad()
            model(token_ids(), token_ids())[1].backward()
            optimizer.step()
            if monitor:
                monitor.step()
        return [parameter.detach() for parameter in model.parameters()]

    for plain, monitored in zip(trained(False), trained(True), strict=True):
        assert torch.equal(plain, monitored)


def test_matrices_go_to_callables() -> None:
    model, log = dense(), Logged()
    rewire.Monitor(model, log, every=1, matrices=True).step()
    assert torch.equal(log[0][1]["rewire/layers/weights/matrix"], rewire.coefficients(model)["layers"])


def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model = dense()
    with SummaryWriter(str(tmp_path)) as writer:
        monitor = rewire.Monitor(model, writer, every=2, matrices=True)
        for _ in range(4):
            monitor.step()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    scalars = events.Scalars("rewire/layers/weights/max")
    assert [event.step for event in scalars] == [2, 4]
    assert scalars[0].value == pytest.approx(float(rewire.coefficients(model)["layers"].max()))
    pictures = events.Images("rewire/layers/weights/matrix")
    assert [picture.step for picture in pictures] == [2, 4]
    assert min(pictures[0].width, pictures[0].height) > 200


@pytest.mark.slow
def test_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real package, offline: what is logged ends in the run."""
    monkeypatch.setenv("WANDB_SILENT", "true")
    import wandb

    model = dense()
    with wandb.init(mode="offline", dir=tmp_path) as run:
        monitor = rewire.Monitor(model, lambda values, step: run.log(values, step, commit=True), every=2, matrices=True)
        for _ in range(4):
            monitor.step()
        found = dict(run.summary)
    assert found["_step"] == 4
    assert found["rewire/layers/weights/max"] == pytest.approx(float(rewire.coefficients(model)["layers"].max()))
    assert "rewire/layers/weights/matrix" in found
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


@pytest.mark.slow
def test_as_a_callback_of_the_trainer(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    model, log = rewire.compile(tiny.tiny_model("llama"), "ancre-ingoing", validate=False), Logged()
    arguments = TrainingArguments(
        str(tmp_path), max_steps=4, per_device_train_batch_size=1, report_to="none", save_strategy="no", use_cpu=True
    )
    rows = [{"input_ids": ids, "labels": ids} for ids in token_ids(4)]
    monitor = rewire.Monitor(model, log, every=2)
    Trainer(model, arguments, train_dataset=rows, callbacks=[monitor.callback()]).train()  # type: ignore[arg-type]
    assert [step for step, _ in log] == [2, 4]
    assert log[1][1]["rewire/model.layers/weights/change"] > 0


def test_only_the_first_process_logs() -> None:
    from transformers import TrainerControl, TrainerState

    log = Logged()
    callback = rewire.Monitor(dense(), log, every=1).callback()
    for first in (True, False):
        state = TrainerState(global_step=7, is_world_process_zero=first)
        callback.on_step_end(None, state, TrainerControl())
    assert [step for step, _ in log] == [7]


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match="log is a dict: it has to be a SummaryWriter, or a callable"):
        rewire.Monitor(dense(), {})
    for name in ("every", "diagnose_every"):
        with pytest.raises(ValueError, match=f"{name}=0: it has to be 1 or more"):
            rewire.Monitor(dense(), Logged(), **{name: 0})  # type: ignore[arg-type]
