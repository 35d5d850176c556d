"""ZAS converges linearly for any target (arXiv 1911.00645, Theorems 4.1 and 4.3)

Deep linear networks from `rewire.initialize(net, "zas")`, R = ||W - Phi||_F^2 / 2, float64, width 5, depths 2, 4 and
8, four kinds of target. Gradient flow is gradient descent at rate 0.001 up to t = 8. Theorem 4.3 is checked at its own
learning rate, min(1 / (4 L^3 phi^6), 1 / (144 L^2 phi^4)), for L = 3 and a random target of norm 1/2.
"""

from __future__ import annotations

import torch
from common import Claim, Outcome, axes, fit_linear, main
from torch import Tensor, nn

import rewire

DEPTHS, WIDTH, RATE, TIME = (2, 4, 8), 5, 0.001, 8


def zas_net(depth: int, width: int) -> nn.Sequential:
    net = nn.Sequential(*(nn.Linear(width, width, bias=False, dtype=torch.float64) for _ in range(depth)))
    rewire.initialize(net, "zas")
    return net


def targets(width: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(width, width, generator=generator, dtype=torch.float64)
    eye = torch.eye(width, dtype=torch.float64)
    rank_one = torch.outer(normal[0], normal[1])
    return {"-I": -eye, "Gaussian": normal, "rank 1": rank_one, "positive definite": normal @ normal.T / width + eye}


def discrete() -> Claim:
    """Theorem 4.3 at its own learning rate."""
    depth, target = 3, targets(WIDTH)["Gaussian"]
    target = target / (2 * target.norm())
    phi = max(2 * target.norm().item(), 3 * depth**-0.5, 1.0)
    rate = min(1 / (4 * depth**3 * phi**6), 1 / (144 * depth**2 * phi**4))
    losses = torch.tensor(fit_linear(zas_net(depth, WIDTH), target, rate, 20_000), dtype=torch.float64)
    bound = losses[0] * (1 - rate / 2) ** torch.arange(len(losses), dtype=torch.float64)
    worst = (losses / bound).max().item()
    left = (losses[-1] / losses[0]).item()
    ours = f"R / bound <= {worst:.3f}; after {len(losses)} steps at eta = {rate:.1e}, R / R(0) = {left:.3f}"
    return Claim("discrete steps, at the theorem's rate", "R(t) <= (1 - eta/2)^t R(0)", ours, worst <= 1 + 1e-9)


def run() -> Outcome:
    found = targets(WIDTH)
    curves = {
        (name, depth): torch.tensor(fit_linear(zas_net(depth, WIDTH), target, RATE, int(TIME / RATE)))
        for name, target in found.items()
        for depth in DEPTHS
    }
    worst = 0.0
    for losses in curves.values():
        bound = losses[0] * torch.exp(-2 * RATE * torch.arange(len(losses)))
        worst = max(worst, (losses / bound).max().item())
    ours = f"R / bound <= {worst:.3f} for {len(found)} targets at depths {', '.join(map(str, DEPTHS))}"
    flow = Claim("gradient flow, any target and depth", "R(t) <= R(0) exp(-2 t)", ours, worst <= 1 + 1e-6)
    with axes() as (figure, (ax,)):
        for (name, depth), losses in curves.items():
            if depth == DEPTHS[1]:
                ax.semilogy(RATE * torch.arange(len(losses)), losses / losses[0], label=f"{name}, {depth} layers")
        times = torch.linspace(0, TIME, 50)
        ax.semilogy(times, torch.exp(-2 * times), "k--", label="bound, exp(-2t)")
        ax.set(xlabel="time t", ylabel="R(t) / R(0)", ylim=(1e-12, 2))
    return Outcome((flow, discrete()), figure)


if __name__ == "__main__":
    main(run)
