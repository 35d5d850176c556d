"""Weight decay of connection weights in other packages' trainers: none by `rewire.parameter_groups`, else a warning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mixing import ids, llama, mixed
from torch import Tensor, nn

import rewire

TOLD = r"AdamW decays connection weights of rewire .*Use the groups of rewire\.parameter_groups"


def optimizer_of(model: nn.Module, ours: bool) -> torch.optim.AdamW:
    given: Any = rewire.parameter_groups(model, lr=1e-3, weight_decay=0.5) if ours else model.parameters()
    return torch.optim.AdamW(given, lr=1e-3, weight_decay=0.5)


def train_with_trainer(model: Any, ours: bool, folder: Path) -> Any:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=2,
        per_device_train_batch_size=2,
        weight_decay=0.5,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        save_strategy="no",
        dataloader_pin_memory=False,
    )
    rows = [{"input_ids": row, "labels": row} for row in ids(batch=4)]
    own = (optimizer_of(model, True), None) if ours else (None, None)
    trainer = Trainer(model, arguments, train_dataset=rows, optimizers=own)  # type: ignore[arg-type]
    trainer.train()
    return trainer.optimizer


def train_with_accelerate(model: Any, ours: bool, folder: Path) -> Any:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer_of(model, ours))
    accelerator.backward(model(ids(), labels=ids()).loss)
    optimizer.step()
    return optimizer


def train_with_lightning(model: Any, ours: bool, folder: Path) -> Any:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Tensor, number: int) -> Tensor:
            loss: Tensor = self.model(batch, labels=batch).loss
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self.model, ours)

    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=2,
        default_root_dir=str(folder),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(list(ids(batch=2).split(1)), batch_size=None))
    return trainer.optimizers[0]


@pytest.mark.filterwarnings("ignore:.*(num_workers|GPU available|`isinstance).*")
@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("train", [train_with_trainer, train_with_accelerate, train_with_lightning])
def test_connection_weights_do_not_decay_or_it_is_told(train: Any, ours: bool, tmp_path: Path) -> None:
    model: Any = mixed(llama(), "grn-v2").train()  # its weights have two dimensions, as what trainers decay
    own = {id(p) for c in rewire.connections(model).values() for p in c.parameters()}
    if ours:
        optimizer = train(model, ours, tmp_path)  # no warning
    else:
        with pytest.warns(UserWarning, match=TOLD):
            optimizer = train(model, ours, tmp_path)
    decays = {g["weight_decay"] for g in optimizer.param_groups for p in g["params"] if id(p) in own}
    assert decays == ({0.0} if ours else {0.5})
