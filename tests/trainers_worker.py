"""One of two processes: rewired models under other packages' trainers, with FSDP2, against one process. A script.

Accelerate, and with it the Trainer of transformers, take up FSDP on accelerators only: `on_cpu` makes them do so here.
"""

from __future__ import annotations

import copy
import os
from typing import Any
from unittest import mock

import pytest
import torch
import torchvision_stub  # noqa: F401
from torch import Tensor, nn

os.environ["ACCELERATE_USE_CPU"] = "true"

import lightning
import torch.distributed as dist
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from lightning.pytorch.strategies import ModelParallelStrategy
from mixing import ids, llama, mixed
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainingArguments
from worker import folder, play

import rewire

STEPS, RATE, MOMENTUM = 4, 0.05, 0.9


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(rewire.parameter_groups(model, lr=RATE, weight_decay=0.1), momentum=MOMENTUM)


def batches() -> list[Tensor]:
    """STEPS of [4, 12]: two rows for each rank."""
    return list(ids(batch=4 * STEPS).chunk(STEPS))


def expected() -> dict[str, Tensor]:
    """The weights after training in one process."""
    model = mixed(llama())
    optimizer = optimizer_of(model)
    for batch in batches():
        optimizer.zero_grad()
        model(batch, labels=batch).loss.backward()
        optimizer.step()
    return dict(model.named_parameters())


def compare(model: nn.Module, wanted: dict[str, Tensor]) -> None:
    found = dict(model.named_parameters())
    assert found.keys() == wanted.keys()
    assert any("depth_connections" in name for name in found)
    for name, weight in wanted.items():
        value = found[name]
        assert isinstance(value, DTensor), name
        torch.testing.assert_close(value.full_tensor(), weight, rtol=1e-5, atol=1e-6, msg=name)


def on_cpu() -> Any:
    """Accelerate's state with FSDP, though the device is a CPU."""
    original = AcceleratorState.__init__

    def patched(self: AcceleratorState, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            PartialState._shared_state["distributed_type"] = self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)

    return mock.patch.object(AcceleratorState, "__init__", patched)


def accelerator_of(precision: str, loading: bool) -> Accelerator:
    AcceleratorState._reset_state(reset_partial_state=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type="SHARDED_STATE_DICT",
        cpu_ram_efficient_loading=loading,
    )
    return Accelerator(cpu=True, fsdp_plugin=plugin, mixed_precision=precision)


def steps(accelerator: Accelerator, model: nn.Module, optimizer: Any, rows: list[Tensor]) -> None:
    for batch in rows:
        mine = batch.chunk(2)[dist.get_rank()]
        optimizer.zero_grad()
        accelerator.backward(model(mine, labels=mine).loss)
        optimizer.step()


def accelerate(loading: bool = False) -> None:
    """Trained, saved halfway, resumed by another model."""
    with on_cpu():
        accelerator = accelerator_of("no", loading)
        model = mixed(llama())
        model, optimizer = accelerator.prepare(model, optimizer_of(model))
        steps(accelerator, model, optimizer, batches()[:2])
        accelerator.save_state(str(folder() / f"accelerate-{loading}"))
        steps(accelerator, model, optimizer, batches()[2:])
        compare(model, expected())

        accelerator = accelerator_of("no", loading)
        model = mixed(llama())
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(0.5)
        model, optimizer = accelerator.prepare(model, optimizer_of(model))
        accelerator.load_state(str(folder() / f"accelerate-{loading}"))
        steps(accelerator, model, optimizer, batches()[2:])
        compare(model, expected())


def accelerate_loading() -> None:
    """The same where only the first rank has the weights at first."""
    accelerate(loading=True)


def accelerate_bfloat16() -> None:
    """Connections need a group of their own, made before; they stay float32."""
    with on_cpu():
        accelerator = accelerator_of("bf16", loading=False)
        model = mixed(llama())
        model, optimizer = accelerator.prepare(model, optimizer_of(model))
        with pytest.raises(rewire.RewireError, match="a group of their own"):
            steps(accelerator, model, optimizer, batches()[:1])

        accelerator = accelerator_of("bf16", loading=False)
        model = mixed(llama())
        twin = copy.deepcopy(model)
        for connection in rewire.connections(model).values():
            fully_shard(connection)
        model, optimizer = accelerator.prepare(model, optimizer_of(model))
        steps(accelerator, model, optimizer, batches()[:1])
        batch = batches()[0]
        twin(batch, labels=batch).loss.backward()
        for connection, other in zip(*(rewire.connections(m).values() for m in (model, twin)), strict=True):
            for weight, reference in zip(connection.parameters(), other.parameters(), strict=True):
                assert weight.dtype == torch.float32
                error = (weight.grad.full_tensor() - reference.grad).norm() / reference.grad.norm()
                assert error < 0.05, float(error)  # of bfloat16


class OurTrainer(Trainer):
    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        self.optimizer = optimizer_of(self.model if model is None else model)
        return self.optimizer


def trainer_of(model: nn.Module) -> Trainer:
    AcceleratorState._reset_state(reset_partial_state=True)
    rows = torch.cat([batch[order] for batch in batches() for order in ([0, 2, 1, 3],)])  # a rank takes every other row
    arguments = TrainingArguments(
        output_dir=str(folder() / "trainer"),
        max_steps=STEPS,
        save_steps=2,
        per_device_train_batch_size=2,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo",
        train_sampling_strategy="sequential",
        dataloader_pin_memory=False,
        fsdp=True,
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    )
    return OurTrainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])


def trainer() -> None:
    with on_cpu():
        first = trainer_of(mixed(llama()))
        first.train()
        compare(first.model, expected())
        resumed = trainer_of(mixed(llama()))
        resumed.train(resume_from_checkpoint=str(folder() / "trainer/checkpoint-2"))
        compare(resumed.model, expected())


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = mixed(llama())

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for module in (*rewire.connections(self.model).values(), *self.model.model.layers, self.model):
            fully_shard(module, mesh=mesh)

    def training_step(self, batch: Tensor, number: int) -> Tensor:
        loss: Tensor = self.model(batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self.model)


def lightning_trainer(epochs: int) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo"),
        max_epochs=epochs,
        default_root_dir=str(folder() / "lightning"),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
    )


def lightning_fsdp() -> None:
    """An epoch has two batches."""
    mine = [batch.chunk(2)[dist.get_rank()] for batch in batches()]
    loaders = [torch.utils.data.DataLoader(part, batch_size=None) for part in (mine[:2], mine[2:])]
    first = lightning_trainer(epochs=1)
    first.fit(Module(), loaders[0])
    first.save_checkpoint(folder() / "halfway")
    module = Module()
    lightning_trainer(epochs=2).fit(module, loaders[1], ckpt_path=str(folder() / "halfway"))
    compare(module.model, expected())


if __name__ == "__main__":
    play(globals())
