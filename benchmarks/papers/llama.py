"""LLaMA 60M to 1B with and without ANCRe (arXiv 2602.09009, Table 2, Figure 5; hyperparameters of Table 7).

    python benchmarks/papers/llama.py --size 60m --data FOLDER [--compile] [--resume]
    python benchmarks/papers/llama.py --small          # 4 layers, on the texts behind Python's help()

The folder holds C4, tokenised: see tokens.py for the format. The model has 32,000 tokens (the paper: T5's tokeniser).
What Table 7 leaves open is as in the code that the paper builds on (GaLore): AdamW with its usual betas, no weight
decay, no clipping, a cosine schedule down to a tenth. Of the paper's two optimisers, this is FullPT. ``ancre`` is the
paper's formula, ``ancre-keep`` the authors' released code, which keeps the block's own shortcut.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from tokens import Tokens, asked_for
from torch import Tensor, nn
from training import Log, Plan, adjusted, chosen, options, plot, train
from transformers import LlamaConfig, LlamaForCausalLM

import rewire
from rewire.bench.shapes import make_shape

LENGTH = 256
#: Table 7, FullPT: learning rate, steps, warm-up and micro-batch; the global batch is 512.
PLANS = {
    "60m": Plan(steps=10_000, warmup=1_000, batch=512, micro=256, rate=5e-3),
    "130m": Plan(steps=20_000, warmup=2_000, batch=512, micro=128, rate=1e-3),
    "350m": Plan(steps=60_000, warmup=6_000, batch=512, micro=64, rate=1e-3),
    "1b": Plan(steps=100_000, warmup=10_000, batch=512, micro=16, rate=5e-4),
    "small": Plan(steps=80, warmup=8, batch=16, micro=8, rate=5e-3, bf16=False, every=20),
}
#: Table 2: perplexity of residual connections and of ANCRe.
PAPER = {"60m": (30.39, 29.62), "130m": (25.07, 24.48), "350m": (19.00, 18.32), "1b": (16.64, 15.41)}
RUNS: dict[str, dict[str, Any] | None] = {
    "residual": None,
    "ancre": {"topology": "ancre-ingoing", "start": "paper"},
    "ancre-keep": {"topology": "ancre-ingoing", "start": "paper", "cascade": "keep"},
}


def small_model() -> nn.Module:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=4,
        num_attention_heads=4,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def build(size: str, run: str, seed: int, device: str) -> nn.Module:
    torch.manual_seed(seed)
    model = small_model() if size == "small" else make_shape(f"llama-{size}")
    compiled = RUNS[run]
    return (model if compiled is None else rewire.compile(model, **compiled)).to(device)


def language_model_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids).loss


def train_on(tokens: Tokens, model: nn.Module, plan: Plan, length: int, folder: Any, resume: bool) -> Log:
    """Train a causal language model of transformers on tokens; `Log.validation` is in nats per token."""
    device = next(model.parameters()).device

    def loss_of(model: nn.Module, step: int, index: int) -> Tensor:
        seed = (plan.seed * plan.steps + step) * (plan.batch // plan.micro) + index
        return language_model_loss(model, tokens.batch(plan.micro, length, seed, device))

    def validate(model: nn.Module) -> float:
        losses = [
            language_model_loss(model, batch).item()
            for batch in tokens.validation_batches(plan.micro, length, 40, device)
        ]
        return sum(losses) / len(losses)

    return train(model, loss_of, validate, plan, folder, resume)


def reached(log: Log) -> str:
    """How far a language model came, in words."""
    end = f"perplexity {math.exp(log.validation[-1][1]):.2f}" if log.validation else "diverged"
    return f"{end} after {len(log.losses)} steps, {log.seconds:.0f} s"


def main(arguments: list[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("--size", choices=[size for size in PLANS if size != "small"], default="60m")
    args = parser.parse_args(arguments)
    size = "small" if args.small else args.size
    plan, length = adjusted(PLANS[size], args), 64 if args.small else LENGTH
    tokens = asked_for(args, 256 if args.small else 32_000, length)
    out, logs = args.out / f"llama-{size}", {}
    for run in chosen(RUNS, args):
        model = build(size, run, args.seed, args.device)
        logs[run] = train_on(tokens, model, plan, length, out / run, args.resume)
    plot(logs, out / "loss.png")
    for run, log in logs.items():
        paper = f", paper: {PAPER[size][run != 'residual']}" if size in PAPER else ""
        print(f"{run}: {reached(log)}{paper}")


if __name__ == "__main__":
    main()
