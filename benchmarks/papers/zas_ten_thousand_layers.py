"""mZAS trains 10,000 residual layers (arXiv 1911.00645, Figure 4)

z_l = z_{l-1} + U_l relu(V_l z_{l-1}), width 16, without biases; 200 of scikit-learn's digits (the paper: 1,000 of
Fashion-MNIST), full-batch gradient descent on the cross-entropy, 48 steps: the beginning of training only. The paper
tunes the learning rate of each depth; here mZAS's rates were chosen by hand, after several that blew up: at 0.002 the
loss of 10,000 layers is no number after 20 steps, at 0.001 it rises again near step 35 and ends at 2.21. Xavier's is
the largest of 1/L, 0.01/L, .. 1e-8/L at which the loss falls.
"""

from __future__ import annotations

import itertools
import math

import torch
from common import Claim, Outcome, axes, digits, main
from torch import Tensor, nn
from torch.nn import functional as F

import rewire

WIDTH, STEPS = 16, 48
RATES = {100: 0.008, 2000: 0.0015, 10_000: 0.0006}  # of mZAS, by depth
DEPTHS = tuple(RATES)


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.v, self.u = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, z: Tensor) -> Tensor:
        return z + self.u(torch.relu(self.v(z)))


def network(depth: int) -> nn.Sequential:
    layers = (Layer(WIDTH) for _ in range(depth))
    return nn.Sequential(nn.Linear(64, WIDTH, bias=False), *layers, nn.Linear(WIDTH, 10, bias=False))


def descend(net: nn.Module, rate: float, steps: int = STEPS) -> list[float]:
    """Losses before each step; shorter where they are no numbers any more."""
    images, classes, _, _ = digits()
    inputs, classes, losses = images[:200].flatten(1), classes[:200], []
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    for _ in range(steps):
        loss = F.cross_entropy(net(inputs), classes)
        losses.append(loss.item())
        if not math.isfinite(losses[-1]) or losses[-1] > 1e30:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def curves_of(depth: int) -> dict[str, list[float]]:
    """The losses of both initialisers, each at its best rate."""
    net = network(depth)
    roles = rewire.roles(net)

    def descent(init: str, rate: float) -> list[float]:
        rewire.initialize(net, init, roles=roles, generator=torch.Generator().manual_seed(0))
        return descend(net, rate)

    curves = {"mZAS": descent("mzas", RATES[depth])}
    for exponent in (0, -2, -4, -6, -8):
        curves["Xavier"] = descent("xavier", 10.0**exponent / depth)
        if curves["Xavier"][-1] < curves["Xavier"][0] or not math.isfinite(curves["Xavier"][0]):
            break
    return curves


def run() -> Outcome:
    curves = {(init, depth): losses for depth in DEPTHS for init, losses in curves_of(depth).items()}
    deepest = curves["mZAS", DEPTHS[-1]]
    falls = sum(after < before for before, after in itertools.pairwise(deepest))
    blown = {depth: curves["Xavier", depth] for depth in DEPTHS[1:]}
    ours = "; ".join(f"{depth} layers: loss {losses[0]:g} before the first step" for depth, losses in blown.items())
    claims = [
        Claim(
            "mZAS trains 10,000 layers",
            "it does (no number)",
            f"loss {deepest[0]:.2f} to {deepest[-1]:.2f}, down in {falls} of {len(deepest) - 1} steps",
            falls == STEPS - 1 and deepest[-1] < 0.95 * deepest[0],
        ),
        Claim(
            "Xavier blows up at 2,000 and 10,000 layers",
            "blows up",
            ours,
            all(not losses[-1] < 10 for losses in blown.values()),
        ),
        Claim(
            "mZAS is better than Xavier at 100 layers, too",
            "always",
            f"loss {curves['mZAS', 100][-1]:.2f} against {curves['Xavier', 100][-1]:.3g}",
            curves["mZAS", 100][-1] < curves["Xavier", 100][-1],
        ),
    ]
    with axes() as (figure, (ax,)):
        for (init, depth), losses in curves.items():
            if math.isfinite(losses[0]):
                style = "-" if init == "mZAS" else "--"
                ax.semilogy(losses, style, marker="o", markersize=3, label=f"{init}, {depth} layers")
        ax.set(xlabel="gradient descent step", ylabel="loss")
    return Outcome(claims, figure)


if __name__ == "__main__":
    main(run)
