"""Give a trained language model learned depth connections, and fine-tune it with Hugging Face's Trainer.

    python examples/finetune_trainer.py --checkpoint meta-llama/Llama-3.2-1B
    python examples/finetune_trainer.py            # a small model, trained for a moment first

The rewired model begins as the function that was trained. The same training without connections is the control.
"""

from pathlib import Path
from pydoc_data.topics import topics
from typing import Annotated

import torch
import typer
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

import rewire
from rewire.plotting import plot_curves

TEXT = torch.tensor(list("\n\n".join(topics.values()).encode()))  # bytes stand for tokens
PIECES = [{"input_ids": piece, "labels": piece} for piece in TEXT.split(128)[:-1]]
TRAIN, HELD_OUT = PIECES[: -len(PIECES) // 8], PIECES[-len(PIECES) // 8 :]


def tune(model: PreTrainedModel, steps: int, rate: float, out: Path) -> list[tuple[int, float]]:
    """Steps and losses on held-out text, the first before the first step."""
    every = max(1, steps // 6)
    arguments = TrainingArguments(
        str(out), max_steps=steps, per_device_train_batch_size=8, eval_strategy="steps", eval_steps=every, seed=0,
        save_strategy="no", report_to=[], disable_tqdm=True, logging_strategy="no", lr_scheduler_type="constant",
    )  # fmt: skip
    groups = rewire.parameter_groups(
        model, lr=rate, weight_decay=0.1, connection_lr=3 * rate
    )  # works on plain ones, too
    trainer = Trainer(
        model, arguments, train_dataset=TRAIN, eval_dataset=HELD_OUT[:64], optimizers=(torch.optim.AdamW(groups), None)
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    later = [(entry["step"], entry["eval_loss"]) for entry in trainer.state.log_history if "eval_loss" in entry]
    return [(0, before), *(point for point in later if point[0])]


def small(steps: int, out: Path) -> Path:
    """A checkpoint to begin with."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=344, num_hidden_layers=6, num_attention_heads=4)
    )
    tune(model, steps, 3e-3, out)
    model.save_pretrained(out)
    return out


def main(
    checkpoint: str | None = None,
    topology: str = "dca",
    steps: Annotated[int, typer.Option(min=1)] = 120,
    out: Path = Path("out/finetune_trainer"),
) -> None:
    source = checkpoint or small(2 * steps, out / "plain")
    control = AutoModelForCausalLM.from_pretrained(source)
    rewired = rewire.compile(AutoModelForCausalLM.from_pretrained(source), topology)
    curves = {"plain": tune(control, steps, 5e-4, out), topology: tune(rewired, steps, 5e-4, out)}
    for name, points in curves.items():
        print(name, " ".join(f"{loss:.4f}" for _, loss in points))
    plot_curves(curves, out / "loss.png", "step", "loss on held-out text (nats per byte)")
    rewired.save_pretrained(out / "rewired")  # rewire.from_pretrained reads it


if __name__ == "__main__":
    typer.run(main)
