"""accelerate: preparing, accumulating, saving and resuming, and spreading a model over devices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator, cpu_offload, load_checkpoint_in_model
from accelerate.state import AcceleratorState, GradientState
from mixing import ids, learned, llama, mixed
from torch import Tensor, nn

import rewire
from rewire.patterns.tiny import tiny_model


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(ids()).logits


def prepared(model: nn.Module, **options: object) -> tuple[Accelerator, nn.Module, torch.optim.Optimizer]:
    accelerator = Accelerator(cpu=True, **options)  # type: ignore[arg-type]
    groups = rewire.parameter_groups(model, lr=1e-2, weight_decay=0.1)
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(groups))


def step(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    with accelerator.accumulate(model):
        accelerator.backward(model(batch, labels=batch).loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def test_training_saving_and_resuming(tmp_path: Path) -> None:
    accelerator, model, optimizer = prepared(mixed(llama()))
    start = {name: value.detach().clone() for name, value in learned(model).items()}
    step(accelerator, model, optimizer, ids())
    accelerator.save_state(str(tmp_path))
    step(accelerator, model, optimizer, ids())
    expected = logits(model)
    assert all(not torch.equal(value, start[name]) for name, value in learned(model).items())
    step(accelerator, model, optimizer, ids())
    accelerator.load_state(str(tmp_path))
    step(accelerator, model, optimizer, ids())
    assert torch.equal(logits(model), expected)


def test_accumulated_gradients_are_those_of_the_whole_batch() -> None:
    batch = ids(batch=4)
    accelerator, model, optimizer = prepared(mixed(llama()), gradient_accumulation_steps=2)
    for half in batch.chunk(2):
        step(accelerator, model, optimizer, half)
    whole = mixed(llama())
    reference = torch.optim.AdamW(rewire.parameter_groups(whole, lr=1e-2, weight_decay=0.1))
    whole(batch, labels=batch).loss.backward()
    nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
    reference.step()
    torch.testing.assert_close(logits(model), logits(whole), rtol=1e-4, atol=1e-4)


def test_mixed_precision_keeps_the_connections_in_float32() -> None:
    accelerator, model, optimizer = prepared(mixed(llama()), mixed_precision="bf16")
    step(accelerator, model, optimizer, ids())
    unwrapped = accelerator.unwrap_model(model)
    assert {value.dtype for value in learned(unwrapped).values()} == {torch.float32}
    assert list(rewire.connections(unwrapped)) == ["model.layers"]


def test_save_model_and_load_checkpoint(tmp_path: Path) -> None:
    accelerator, model, _ = prepared(mixed(llama()))
    accelerator.save_model(model, str(tmp_path))
    other = mixed(tiny_model("llama", seed=5).eval())
    load_checkpoint_in_model(other, str(tmp_path), strict=True)
    assert torch.equal(logits(other), logits(model))


def test_weights_that_are_fetched_block_by_block() -> None:
    model = mixed(llama())
    expected = logits(model)
    offloaded = cpu_offload(model, torch.device("cpu"))
    assert torch.equal(logits(offloaded), expected)
