"""A topology of your own: each block reads the stream, and one scalar of the input of the whole trunk.

    python examples/own_topology.py

Twenty lines are the topology. It then works on any model that rewire can connect; here on a GPT-2 of transformers.
"""

import dataclasses
from pathlib import Path
from pydoc_data.topics import topics
from typing import Annotated

import torch
import typer
from transformers import GPT2Config, GPT2LMHeadModel

import rewire


@rewire.register_topology("anchor")
@dataclasses.dataclass(frozen=True)
class Anchor(rewire.Recurrence):
    """x_t = x_{t-1} + f_t(x_{t-1} + a_t x_0), with a learned scalar a_t."""

    def parameters(self, dims, start):  # 0: the plain network, at both starts
        return {"anchors": torch.zeros(dims.depth)}

    def weights(self, parameters, dims):
        return parameters["anchors"]

    def read(self, states, weights, t):  # states: x_{t-1}, and x_0 from the second unit on
        x, first = states[0], states[-1]
        return x + weights[t - 1].to(x.dtype) * first, (x, first)

    def merge(self, states, weights, t, *branches):
        return states[0] + sum(branches)

    def push(self, states, weights, t, x):
        return x, states[1]

    def finish(self, states, weights, dims):
        return states[0]

    def matrix(self, weights, dims):  # [destination, source], for pictures
        table = torch.eye(dims.depth, device=weights.device)
        table[:, 0] += weights
        return table


def main(steps: Annotated[int, typer.Option(min=1)] = 200, out: Path = Path("out/own_topology")) -> None:
    torch.manual_seed(0)
    text = torch.tensor(list("\n\n".join(topics.values()).encode()))
    plain = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=128, n_embd=128, n_layer=8, n_head=4))
    model = rewire.compile(plain, "anchor", granularity="block")
    print(rewire.diff(model)[:600], "...")
    optimizer = torch.optim.AdamW(rewire.parameter_groups(model, lr=1e-3, weight_decay=0.1, connection_lr=1e-2))
    model.train()
    for step in range(1, steps + 1):
        batch = text[torch.randint(len(text) - 128, (8, 1)) + torch.arange(128)]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == steps:
            print(f"step {step}: {loss.item():.3f}")
    out.mkdir(parents=True, exist_ok=True)
    rewire.plot(model, out / "weights.png", "bars")


if __name__ == "__main__":
    typer.run(main)
