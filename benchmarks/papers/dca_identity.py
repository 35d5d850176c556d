"""Ten rank-3 layers learn the identity, or a random map, on R^100 (arXiv 2502.06785, Figure 1)

x ~ N(0, I), batches of 100, SGD, the loss ||f(x) - y||^2; GRN-v1 is the residual network, rewired. The paper gives
neither learning rates nor the start of the weights: each net takes the best of a grid of learning rates. The curves are
from Xavier's normal values, the start, of four tried, at which GRN-v1 is furthest ahead; torch's default is a claim of
its own. A residual network contains the identity (all layers zero): the claim is about
training, not about what can be expressed.
"""

from __future__ import annotations

import torch
from common import Claim, Outcome, axes, first_below, main
from torch import Tensor, nn

import rewire

WIDTH, RANK, LAYERS, BATCH = 100, 3, 10, 100
BATCHES, FEWER = 1000, 10  # 10^5 examples, and 100 times fewer
RATES = (3e-4, 1e-3, 3e-3, 8e-3)


class LowRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, RANK, bias=False), nn.Linear(RANK, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(self.down(x))


def network(topology: str, start: str) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(*(LowRank() for _ in range(LAYERS)))
    if start == "xavier":
        for weight in net.parameters():
            nn.init.xavier_normal_(weight)
    return rewire.compile(net, topology, example_inputs=(torch.randn(4, WIDTH),))


def train(topology: str, rate: float, task: str, batches: int, start: str) -> list[float]:
    """Losses before each step; ends where they explode."""
    generator = torch.Generator().manual_seed(1)
    matrix, bias = (torch.randn(*size, generator=generator) for size in ((WIDTH, WIDTH), (WIDTH,)))
    net, losses = network(topology, start), []
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    for _ in range(batches):
        x = torch.randn(BATCH, WIDTH, generator=generator)
        y = x if task == "identity" else x @ matrix.T + bias
        loss = (net(x) - y).square().sum(1).mean()
        losses.append(loss.item())
        if not losses[-1] < 1e9:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def best(topology: str, task: str, batches: int, start: str = "xavier") -> list[float]:
    """The curve of the rate that ends lowest."""
    curves = [train(topology, rate, task, batches, start) for rate in RATES]
    return min((curve for curve in curves if len(curve) == batches), key=lambda curve: sum(curve[-10:]))


def run() -> Outcome:
    curves = {
        (task, topology): best(topology, task, batches)
        for task, batches in (("identity", BATCHES), ("random", 200))
        for topology in ("residual", "grn-v1")
    }
    residual, grn = curves["identity", "residual"], curves["identity", "grn-v1"]
    quick = best("grn-v1", "identity", FEWER + 1)[-1]
    reached = first_below(grn, residual[-1])
    ahead = "never reaches that" if reached is None else f"is there after {reached} batches"
    default = {topology: best(topology, "identity", BATCHES, "default")[-1] for topology in ("residual", "grn-v1")}
    random = {topology: curves["random", topology][-1] for topology in ("residual", "grn-v1")}
    claims = (
        Claim(
            "GRN-v1 learns the identity",
            "extremely small loss",
            f"{grn[-1]:.1e} after {BATCHES} batches, from {grn[0]:.0f}",
            grn[-1] < 1e-4,
        ),
        Claim(
            "the residual network does not",
            f"not even after {BATCHES} batches",
            f"{residual[-1]:.1e}; GRN-v1 {ahead}",
            residual[-1] > 1e-3,
        ),
        Claim(
            "GRN-v1 is better with 100 times fewer examples",
            "extremely small loss with 100x fewer",
            f"{quick:.2g} after {FEWER} batches, the residual network {residual[-1]:.2g} after {BATCHES}",
            quick < residual[-1],
        ),
        Claim(
            "the same from torch's default weights",
            "the residual network does not learn it",
            f"{default['residual']:.1e}, GRN-v1 {default['grn-v1']:.1e} after {BATCHES} batches",
            default["grn-v1"] < default["residual"],
        ),
        Claim(
            "GRN-v1 learns a random map better",
            "lower loss",
            f"{random['grn-v1']:.0f} against {random['residual']:.0f} after 200 batches",
            random["grn-v1"] < random["residual"],
        ),
    )
    with axes(2) as (figure, panels):
        for ax, task in zip(panels, ("identity", "random"), strict=True):
            for topology in ("residual", "grn-v1"):
                ax.loglog(range(1, len(curves[task, topology]) + 1), curves[task, topology], label=topology)
            ax.set(xlabel="batches of 100 examples", ylabel="loss", title=task)
    return Outcome(claims, figure)


if __name__ == "__main__":
    main(run)
