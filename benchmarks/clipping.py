"""Whether connection weights leave `clip_grad_norm_` over all parameters to the model.

    PYTHONPATH=tests python benchmarks/clipping.py [--steps 60] [--models NAME ..] [--topologies NAME ..] [--out FILE]

Everybody clips the gradients of all parameters by one norm. Connections with large gradients then throttle the model,
also while they compute what the plain one does. Each topology, at both starts, is put into a small Llama, a GPT-2 and a
vision transformer, and trained with connection weights that get gradients and stand still:

- *share*: the norm of the connections' gradients over that of the model's, the largest of all steps;
- *behind*: by how much the loss of the last steps is above the plain model's, both clipped by one norm at 1.0; at a
  preserving start alone, where the two models are the same. *Noise* is how far the plain model's own loss goes, of
  three runs from weights that differ by 1e-6.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import rich.table
import torch
import torchvision_stub  # noqa: F401
from rich.console import Console
from sklearn.datasets import load_digits
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

import rewire
from rewire.bench.harness import machine

LAYERS, WIDTH, HEADS, LENGTH, BATCH = 8, 64, 4, 64, 8
LAST = 10  # steps whose mean loss counts
LIMIT = 1 / 3


def llama() -> nn.Module:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 172, "num_hidden_layers": LAYERS}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_attention_heads=HEADS, use_cache=False, **sizes))


def gpt2() -> nn.Module:
    sizes = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": LENGTH}
    dropped = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=256, use_cache=False, **sizes, **dropped))


def vit() -> nn.Module:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS}
    images = {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10}
    return ViTForImageClassification(ViTConfig(num_attention_heads=HEADS, **sizes, **images))


def text() -> Iterator[dict[str, Tensor]]:
    data = torch.tensor(list("\n".join(topics.values()).encode()))
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(data) - LENGTH, (BATCH, 1), generator=generator)
        pieces = data[starts + torch.arange(LENGTH)]
        yield {"input_ids": pieces, "labels": pieces}


def digits() -> Iterator[dict[str, Tensor]]:
    data = load_digits()
    images, labels = torch.tensor(data.images).float()[:, None] / 16, torch.tensor(data.target)
    generator = torch.Generator().manual_seed(0)
    while True:
        chosen = torch.randint(len(images), (4 * BATCH,), generator=generator)
        yield {"pixel_values": images[chosen], "labels": labels[chosen]}


#: Models, batches, and rates: GPT-2, without warm-up, has steps with gradients of a thousand at 3e-3.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Iterator[dict[str, Tensor]]], float]] = {
    "llama": (llama, text, 3e-3),
    "gpt2": (gpt2, text, 1e-3),
    "vit": (vit, digits, 3e-3),
}


def norm(parameters: list[nn.Parameter]) -> float:
    gradients = [p.grad.norm() for p in parameters if p.grad is not None]
    return float(torch.stack(gradients).norm()) if gradients else 0.0


def run(
    architecture: str, steps: int, topology: str = "", start: str = "preserve", noise: int | None = None
) -> tuple[float, float]:
    """The largest share of the connections' gradients, and the mean loss of the last steps.

    Args:
        noise: seed of noise on the model's weights; None: none.
    """
    make, batches, rate = MODELS[architecture]
    torch.manual_seed(0)
    model = make()
    if noise is not None:
        generator = torch.Generator().manual_seed(noise)
        for parameter in model.parameters():
            parameter.data += 1e-6 * torch.randn(parameter.shape, generator=generator)
    if topology:
        model = rewire.compile(model, topology, start=start, validate=False)  # type: ignore[arg-type]
    own = [p for connection in rewire.connections(model).values() for p in connection.parameters()]
    others = [p for p in model.parameters() if all(p is not one for one in own)]
    optimizer = torch.optim.AdamW(others, lr=rate)
    shares, losses = [], []
    for _, batch in zip(range(steps), batches(), strict=False):
        model.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        shares.append(norm(own) / norm(others))
        losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return max(shares), sum(losses[-LAST:]) / len(losses[-LAST:])


def rows(architecture: str, steps: int, topologies: list[str]) -> Iterator[dict[str, Any]]:
    _, plain = run(architecture, steps)
    noise = max(abs(run(architecture, steps, noise=seed)[1] - plain) for seed in range(3))
    yield {"model": architecture, "topology": "residual", "start": "preserve", "share": 0.0, "noise": noise}
    for topology in topologies:
        for start in ("preserve", "paper"):
            try:
                share, loss = run(architecture, steps, topology, start)
            except rewire.UnsupportedTopology:  # it has no such start
                continue
            behind = {"behind": loss - plain} if start == "preserve" else {}
            yield {"model": architecture, "topology": topology, "start": start, "share": share, **behind}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--topologies", nargs="+", default=[n for n in rewire.list_topologies() if n != "residual"])
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/clipping.json"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    table = rich.table.Table("model", "topology", "start", "share", "behind", "noise")
    found = []
    for architecture in given.models:
        for row in rows(architecture, given.steps, given.topologies):
            found.append(row)
            losses = [f"{row[column]:+.4f}" if column in row else "" for column in ("behind", "noise")]
            table.add_row(architecture, row["topology"], row["start"], f"{row['share']:.2f}", *losses)
            print(*row.values(), flush=True)
    console = Console()
    console.print(table)
    worst, above = max(found, key=lambda row: row["share"]), [row for row in found if row["share"] > LIMIT]
    console.print(f"{len(above)} of {len(found)} shares are above a third; the largest is {worst}.")
    given.out.parent.mkdir(parents=True, exist_ok=True)
    about = {"machine": machine(torch.device("cpu")), "steps": given.steps, "layers": LAYERS, "width": WIDTH}
    given.out.write_text(json.dumps({**about, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
