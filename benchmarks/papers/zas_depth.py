"""Steps that ZAS needs, by depth; near-identity and its saddle (arXiv 1911.00645, Figures 2 and 3)

Steps of gradient descent to R <= 1e-10, at the best learning rate of each depth. From the ZAS start all weights keep
the singular vectors of the target, and the hidden layers stay equal: the network is exactly two numbers per singular
value, which is what is iterated here (tests compare it with the network). Figure 3 runs the networks: 6 layers, target
-I, eta = 0.01; the paper gives no width and no number of steps: here 25, as in the work that it compares with, and
4,000 steps. Exponents within 0.25 of the paper's count as equal.
"""

from __future__ import annotations

import math

import torch
from common import Claim, Outcome, axes, first_below, fit_linear, main
from torch import Tensor, nn

import rewire

GOAL, MOST = 1e-10, 100_000
DEPTHS = (4, 8, 16, 32, 64)
NEAR_STEPS = 4000


def zas_steps(values: Tensor, depth: int, rates: Tensor, most: int = MOST) -> Tensor:
    """Steps to the goal from the ZAS start.

    Args:
        values: singular values of the target, float64 [d].
        depth: layers.
        rates: learning rates to try, float64 [n].
        most: give up after so many steps.

    Returns:
        int64 [n]; ``most`` where the goal is not reached.
    """
    hidden = torch.ones(len(rates), len(values), dtype=torch.float64)  # [n, d]
    last = torch.zeros_like(hidden)
    steps = torch.full((len(rates),), most)
    rate = rates[:, None]
    for step in range(most):
        others = hidden ** (depth - 2)
        error = last * others * hidden - values
        loss = 0.5 * error.square().sum(1)
        steps = torch.where((loss <= GOAL) & (steps == most), step, steps)
        running = (loss > GOAL) & (loss < 1e12)
        if not running.any() or step > steps.min():  # a faster rate is there already
            break
        hidden, last = hidden - rate * last * others * error, last - rate * others * hidden * error
    return steps


def best_steps(values: Tensor, depth: int) -> int:
    """Steps at the best learning rate, searched on three grids, each finer than the last."""
    top = 2 / values.max().item() ** 2  # no rate above this is stable
    low, high, best = 1e-3 * top, top, MOST
    for _ in range(3):
        rates = torch.logspace(math.log10(low), math.log10(high), 16, dtype=torch.float64)
        steps = zas_steps(values, depth, rates, most=best + 1)
        best, index = int(steps.min()), int(steps.argmin())
        low, high = rates[max(index - 1, 0)].item(), rates[min(index + 1, len(rates) - 1)].item()
    return best


def targets() -> dict[str, Tensor]:
    """Singular values of the paper's targets."""
    generator = torch.Generator().manual_seed(0)
    gaussian = {d: torch.randn(d, d, generator=generator, dtype=torch.float64) for d in (2, 100)}
    negative = {f"-I, d = {d}": torch.ones(d, dtype=torch.float64) for d in (1, 100)}
    return negative | {f"Gaussian, d = {d}": torch.linalg.svdvals(normal) for d, normal in gaussian.items()}


def exponent(steps: list[int]) -> float:
    """Slope of log steps over log depth."""
    depths = torch.tensor(DEPTHS, dtype=torch.float64).log()
    design = torch.stack([depths, torch.ones_like(depths)], 1)
    return torch.linalg.lstsq(design, torch.tensor(steps, dtype=torch.float64).log()[:, None]).solution[0].item()


def linear_net(init: str, seed: int, depth: int = 6, width: int = 25) -> nn.Sequential:
    net = nn.Sequential(*(nn.Linear(width, width, bias=False, dtype=torch.float64) for _ in range(depth)))
    rewire.initialize(net, init, generator=torch.Generator().manual_seed(seed))
    return net


def run() -> Outcome:
    steps = {name: [best_steps(values, depth) for depth in DEPTHS] for name, values in targets().items()}
    powers = {name: exponent(found) for name, found in steps.items()}
    claims = [
        Claim(
            f"target {name}: steps grow like L^{'1/2' if name.startswith('-I') else '1'}",
            f"exponent about {0.5 if name.startswith('-I') else 1.0}",
            f"exponent {power:.2f}, {math.log2(steps[name][-1] / steps[name][-2]):.2f} in the last doubling; "
            f"{steps[name][0]} steps at 4 layers, {steps[name][-1]} at {DEPTHS[-1]}",
            abs(power - (0.5 if name.startswith("-I") else 1.0)) <= 0.25,
        )
        for name, power in powers.items()
    ]
    target = -torch.eye(25, dtype=torch.float64)
    zas = fit_linear(linear_net("zas", 0), target, 0.01, NEAR_STEPS, stop=GOAL)
    near = [fit_linear(linear_net("near-identity", seed), target, 0.01, NEAR_STEPS, stop=GOAL) for seed in range(5)]
    escaped = [first_below(losses, GOAL) for losses in near]
    arrived = [count for count in escaped if count is not None]
    claims.append(
        Claim(
            "near-identity stays at a saddle, ZAS does not",
            "escapes 2 of 5 times in the steps shown",
            f"ZAS: {len(zas)} steps; near-identity arrives {len(arrived)} of 5 times in {NEAR_STEPS}"
            + (f" (after {', '.join(map(str, sorted(arrived)))})" if arrived else ""),
            zas[-1] <= GOAL and len(arrived) < 5,
        )
    )
    with axes(2) as (figure, (left, right)):
        for name, found in steps.items():
            left.loglog(DEPTHS, found, marker="o", markersize=3, label=f"{name}: L^{powers[name]:.2f}")
        left.set(xlabel="layers L", ylabel="steps to 1e-10", ylim=(4, 3e6))
        left.set_xticks(DEPTHS, labels=map(str, DEPTHS), minor=False)
        left.set_xticks([], minor=True)
        for losses in near:
            right.loglog(range(1, len(losses) + 1), losses, "--", linewidth=1)
        right.loglog(range(1, len(zas) + 1), zas, "k", label="ZAS (dashed: near-identity)")
        right.set(xlabel="gradient descent step", ylabel="R")
    return Outcome(claims, figure)


if __name__ == "__main__":
    main(run)
