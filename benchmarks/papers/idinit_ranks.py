"""IDI breaks the rank bound that zero padding sets (arXiv 2503.04626, Figure 4b, Theorem 3.1)

The middle weight of a 3-layer linear network on scikit-learn's digits (the paper: MNIST), 64 inputs and 170 hidden
units, the paper's ratio of 768 to 2,048. SGD at rate 0.1, batches of 64, 16 epochs, float64. The first weight is padded
with zeros or is IDI, the others are IDI; with and without the loose condition. Counted is the rank of what the middle
weight has learned, W - W(0), at machine precision.
"""

from __future__ import annotations

import itertools

import torch
from common import Claim, Outcome, axes, digits, main
from torch import Tensor, nn
from torch.nn import functional as F

from rewire.init import identity_, idi_

INPUTS, HIDDEN, EPOCHS, RATE = 64, 170, 16, 0.1
STARTS = {  # first weight, variance of the loose condition
    "zeros": ("zeros", 0.0),
    "zeros, loose": ("zeros", 1e-6),
    "IDI, exact": ("idi", 0.0),
    "IDI": ("idi", 1e-6),
}


def network(first: str, loose: float, generator: torch.Generator) -> nn.Sequential:
    sizes = (INPUTS, HIDDEN, HIDDEN, 10)
    net = nn.Sequential(*(nn.Linear(i, o, bias=False, dtype=torch.float64) for i, o in itertools.pairwise(sizes)))
    weights: list[Tensor] = [layer.weight.data for layer in net]
    for weight in weights:
        idi_(weight, generator=generator, loose=loose)
    if first == "zeros":
        diagonal = weights[0].diagonal().clone()
        identity_(weights[0]).diagonal().copy_(diagonal)  # the rows below the identity are zero
    return net


def learned_ranks(first: str, loose: float) -> list[int]:
    """Rank of the middle weight's change after each epoch."""
    images, classes, _, _ = digits()
    inputs, generator = images.flatten(1).double(), torch.Generator().manual_seed(0)
    net = network(first, loose, generator)
    start = net[1].weight.detach().clone()
    optimizer, ranks = torch.optim.SGD(net.parameters(), lr=RATE), []
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(inputs), generator=generator).split(64):
            loss = F.cross_entropy(net(inputs[batch]), classes[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ranks.append(int(torch.linalg.matrix_rank(net[1].weight.detach() - start)))
    return ranks


def run() -> Outcome:
    ranks = {name: learned_ranks(*start) for name, start in STARTS.items()}
    last = {name: found[-1] for name, found in ranks.items()}
    padded = max(max(found) for name, found in ranks.items() if name.startswith("zeros"))
    claims = (
        Claim(
            "zero padding keeps the rank at the input's size",
            "rank <= D0 = 768",
            f"at most {padded}, D0 = {INPUTS}",
            padded <= INPUTS,
        ),
        Claim(
            "the loose condition does not change that",
            "still under D0",
            f"{last['zeros, loose']}",
            last["zeros, loose"] <= INPUTS,
        ),
        Claim(
            "IDI breaks the bound",
            "rank above D0",
            f"{last['IDI']}; {last['IDI, exact']} without the loose condition",
            min(last["IDI"], last["IDI, exact"]) > INPUTS,
        ),
        Claim(
            "the loose condition adds rank to IDI",
            "higher with it",
            f"{last['IDI']} against {last['IDI, exact']}",
            last["IDI"] > last["IDI, exact"],
        ),
    )
    with axes() as (figure, (ax,)):
        for name, found in ranks.items():
            ax.plot(range(1, EPOCHS + 1), found, marker="o", markersize=3, label=name)
        ax.axhline(INPUTS, color="k", linestyle="--", linewidth=0.8, label="size of the input")
        ax.set(xlabel="epoch", ylabel="rank of the learned change")
    return Outcome(claims, figure)


if __name__ == "__main__":
    main(run)
