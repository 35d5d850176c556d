"""Pre-train a small Llama, plain and with learned depth connections, side by side.

    python examples/pretrain_llama.py --steps 400

Both start with the same weights, see the same batches, and compute the same function at the start. The text is that
behind Python's ``help()``, as bytes.
"""

import copy
from pathlib import Path
from pydoc_data.topics import topics
from typing import Annotated

import torch
import typer
from transformers import LlamaConfig, LlamaForCausalLM

import rewire
from rewire.plotting import plot_curves

LENGTH = 128


def text() -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes to train on, and every eighth topic to validate on."""
    names = sorted(topics)
    held_out = names[::8]
    train = "\n\n".join(topics[name] for name in names if name not in held_out)
    return torch.tensor(list(train.encode())), torch.tensor(list("\n\n".join(map(topics.get, held_out)).encode()))


def main(
    steps: Annotated[int, typer.Option(min=1)] = 400,
    topology: str = "ancre-ingoing",
    out: Path = Path("out/pretrain_llama"),
) -> None:
    torch.manual_seed(0)
    plain = LlamaForCausalLM(
        LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=344, num_hidden_layers=8, num_attention_heads=4)
    )
    with torch.no_grad():  # at Llama's 0.02 a topology gains by rescaling the embeddings, and by nothing else
        plain.model.embed_tokens.weight.mul_(10)
    models = {"plain": copy.deepcopy(plain), topology: rewire.compile(plain, topology)}
    optimizers = {
        name: torch.optim.AdamW(rewire.parameter_groups(model, lr=3e-3, weight_decay=0.1), betas=(0.9, 0.95))
        for name, model in models.items()
    }

    train, held_out = text()
    validation = held_out[: len(held_out) // LENGTH * LENGTH].view(-1, LENGTH)[:64]
    curves: dict[str, list[tuple[int, float]]] = {name: [] for name in models}
    for step in range(1, steps + 1):
        batch = train[torch.randint(len(train) - LENGTH, (8, 1)) + torch.arange(LENGTH)]
        for name, model in models.items():
            loss = model.train()(input_ids=batch, labels=batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizers[name].step()
            optimizers[name].zero_grad()
            if step % 25 == 0 or step == steps:
                with torch.no_grad():
                    curves[name].append((step, model.eval()(input_ids=validation, labels=validation).loss.item()))
        if step % 25 == 0 or step == steps:
            print(f"step {step}:", ", ".join(f"{name} {curve[-1][1]:.4f}" for name, curve in curves.items()))

    out.mkdir(parents=True, exist_ok=True)
    plot_curves(curves, out / "loss.png", "step", "validation loss (nats per byte)")
    rewire.plot(models[topology], out / "weights.png")
    rewire.save(models[topology], out / "model")


if __name__ == "__main__":
    typer.run(main)
