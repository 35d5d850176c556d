"""DeepCrossAttention by depth, width and k (arXiv 2502.06785, Figure 6, Tables 1 and 2).

    python benchmarks/papers/dca_sweeps.py --sweep depth --data FOLDER [--compile] [--resume]
    python benchmarks/papers/dca_sweeps.py --small     # 3 layers, one k, on the texts behind Python's help()

The folder holds LM1B, tokenised: see tokens.py for the format. Sequences of 128 tokens, batches of 2,048, 500,000
steps, AdamW (0.9, 0.98), weight decay 0.1, rate 0.0016 with 1,000 steps of warm-up and an inverse square root after it.
The paper does not describe its decoder; here it is a LLaMA with feed-forwards of four times the width and heads of 64.
"""

from __future__ import annotations

import dataclasses

import torch
from llama import reached, train_on
from tokens import asked_for
from torch import nn
from training import Plan, adjusted, chosen, options, plot
from transformers import LlamaConfig, LlamaForCausalLM

import rewire

LENGTH, VOCABULARY = 128, 32_000
PLAN = Plan(
    steps=500_000,
    warmup=1_000,
    batch=2048,
    micro=128,
    rate=0.0016,
    schedule="inverse-sqrt",
    betas=(0.9, 0.98),
    weight_decay=0.1,
)
SMALL = dataclasses.replace(PLAN, steps=60, warmup=6, batch=16, micro=8, bf16=False, every=20)


@dataclasses.dataclass(frozen=True)
class Model:
    """A decoder of a sweep, and the paper's perplexity (None: only in a figure); ``k`` None is the transformer."""

    layers: int
    width: int = 512
    k: int | None = None
    paper: float | None = None
    vocabulary: int = VOCABULARY

    def build(self, seed: int, device: str) -> nn.Module:
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            intermediate_size=4 * self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=max(1, self.width // 64),
            use_cache=False,
        )
        model = LlamaForCausalLM(config)
        if self.k is not None:
            model = rewire.compile(model, "dca", last=self.k if self.k < self.layers else None)
        return model.to(device)


def _widths(width: int, plain: float, dca: float) -> dict[str, Model]:
    models = (Model(24, width, paper=plain), Model(24, width, 24, dca))
    return {f"transformer-{width}": models[0], f"dca-{width}": models[1]}


_TABLE_2 = ((64, 41.231, 38.141), (192, 22.534, 21.169), (384, 16.609, 15.988), (768, 13.750, 12.968))
_TABLE_1 = {1: 14.478, 2: 14.386, 4: 14.494, 8: 14.482, 16: 14.407, 24: 14.346}
SWEEPS: dict[str, dict[str, Model]] = {
    "depth": {
        name: model
        for layers in (6, 12, 18, 24, 30, 36, 42)
        for name, model in ((f"transformer-{layers}", Model(layers)), (f"dca-{layers}", Model(layers, k=layers)))
    },
    "width": {name: model for row in (*_TABLE_2, (1024, 12.630, 12.399)) for name, model in _widths(*row).items()},
    "k": {
        "transformer": Model(24, paper=15.126),
        **{f"dca-k{k}": Model(24, k=k, paper=value) for k, value in _TABLE_1.items()},
    },
    "small": {
        "transformer": Model(3, 64, vocabulary=256),
        "dca": Model(3, 64, 3, vocabulary=256),
        "dca-k1": Model(3, 64, 1, vocabulary=256),
    },
}


def main(arguments: list[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("--sweep", choices=[sweep for sweep in SWEEPS if sweep != "small"], default="k")
    args = parser.parse_args(arguments)
    sweep = "small" if args.small else args.sweep
    plan, length = adjusted(SMALL if args.small else PLAN, args), 64 if args.small else LENGTH
    tokens = asked_for(args, 256 if args.small else VOCABULARY, length)
    out, logs = args.out / f"dca-{sweep}", {}
    models = chosen(SWEEPS[sweep], args)
    for name, model in models.items():
        logs[name] = train_on(tokens, model.build(args.seed, args.device), plan, length, out / name, args.resume)
    plot(logs, out / "loss.png")
    for name, log in logs.items():
        paper = models[name].paper
        print(f"{name}: {reached(log)}" + (f", paper: {paper}" if paper else ""))


if __name__ == "__main__":
    main()
