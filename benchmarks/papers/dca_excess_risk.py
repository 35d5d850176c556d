"""Excess risk of low-rank linear nets: residual, GRN-v1, GRN-v2 (arXiv 2502.06785, Theorem 4.2, Figure 5)

Theorem 4.2 is checked on rewired networks: six linear layers of rank 2 on R^24, fitted with L-BFGS to ||A - W||_F^2
from two starts, for A = I + P, P positive definite with eigenvalues from 1 to 2. Figure 5 is computed: the lower bounds
of Theorem 4.3 (ii), for 5 <= lambda <= 10, beside the gain for matrices with evenly spaced eigenvalues. The paper does
not give the widths of its curves; here 100, 200 and 400.
"""

from __future__ import annotations

import itertools

import torch
from common import Claim, Outcome, axes, main
from torch import Tensor, nn

import rewire

WIDTH, LAYERS, RANK, STARTS = 24, 6, 2, 2
CLASSES = ("residual", "grn-v1", "grn-v2")


class LowRank(nn.Module):
    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(self.down(x))


def target() -> Tensor:
    """A, float64 [width, width]: A - I is positive definite."""
    basis = torch.linalg.qr(torch.randn(WIDTH, WIDTH, dtype=torch.float64)).Q
    return torch.eye(WIDTH, dtype=torch.float64) + basis @ torch.diag(torch.linspace(1, 2, WIDTH).double()) @ basis.T


def bounds(matrix: Tensor, rank: int) -> dict[str, float]:
    """Theorem 4.2's right-hand sides for collective rank ``rank``; the first is an equality."""
    size = len(matrix)
    left, values, right = torch.linalg.svd(matrix - torch.eye(size, dtype=matrix.dtype))
    rest = left[:, rank:] @ torch.diag(values[rank:]) @ right[rank:]
    risk, scaled = rest.square().sum(), rest.trace().square() / (size - rank)
    diagonal = rest.diagonal().square().sum()
    found = (risk, risk - scaled, risk - torch.maximum(diagonal, scaled))
    return dict(zip(CLASSES, (value.item() for value in found), strict=True))


def fitted(topology: str, matrix: Tensor) -> float:
    """The smallest excess risk that a rewired network reaches."""
    eye, found = torch.eye(WIDTH, dtype=torch.float64), []
    for seed in range(STARTS):
        torch.manual_seed(seed)
        net = nn.Sequential(*(LowRank(WIDTH, RANK) for _ in range(LAYERS))).double()
        net = rewire.compile(net, topology, example_inputs=(eye,))
        optimizer = torch.optim.LBFGS(net.parameters(), max_iter=600, history_size=30, line_search_fn="strong_wolfe")

        def closure(net: nn.Module = net, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = (net(eye).T - matrix).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]
        found.append(closure().item())
    return min(found)


def gains(size: int, rank: int, low: float, high: float) -> tuple[float, float]:
    """Theorem 4.3 (ii): lower bounds of G_1 and G_2."""
    spread = high**2 - low**2
    first = (size - rank) * low**2 - ((size + rank) ** 0.5 - size**0.5) ** 2 * spread
    second = (size - rank) * low**2 - ((1 + rank) ** 0.5 - 1) ** 2 * spread
    return first, second


def actual_gain(size: int, rank: int, low: float, high: float) -> float:
    """G_1 of an A - I with evenly spaced eigenvalues, by Theorem 4.2, at the rank that as many parameters allow."""
    values = torch.linspace(high, low, size, dtype=torch.float64)
    smaller = int(rank - ((size + rank) ** 0.5 - size**0.5) ** 2)  # Lemma C.1, rounded down
    rest = values[smaller:]
    return (values[rank:].square().sum() - (rest.square().sum() - rest.sum().square() / len(rest))).item()


def steps(curves: list[list[float]], up: bool) -> tuple[str, bool]:
    """How many steps of the curves go that way, and whether all do."""
    right = [(after > before) == up for curve in curves for before, after in itertools.pairwise(curve)]
    return f"at {sum(right)} of {len(right)} points of the curves", all(right)


def run() -> Outcome:
    torch.manual_seed(0)
    matrix = target()
    limits = bounds(matrix, LAYERS * RANK)
    risks = {topology: fitted(topology, matrix) for topology in CLASSES}
    ranks, kappas = list(range(5, 100, 5)), [k / 20 for k in range(2, 21)]
    by_rank = {d: [gains(d, r, 5, 10) for r in ranks] for d in (100, 200, 400)}
    by_kappa = {d: [gains(d, 50, 10 * k, 10) for k in kappas] for d in (100, 200, 400)}
    curves = [[pair[which] for pair in by_rank[d]] for d in by_rank for which in (0, 1)]
    rising = [[pair[which] for pair in by_kappa[d]] for d in by_kappa for which in (0, 1)]
    widths = [[by_rank[d][index][which] for d in by_rank] for index in range(len(ranks)) for which in (0, 1)]
    below = all(gains(d, r, 5, 10)[0] <= actual_gain(d, r, 5, 10) + 1e-6 for d in by_rank for r in ranks)
    order = [risks[name] for name in CLASSES]
    show = ", ".join(f"{name} {risks[name]:.4f} (bound {limits[name]:.4f})" for name in CLASSES)
    claims = (
        Claim(
            "excess risks stay within Theorem 4.2",
            "res: equal; GRN-v1, GRN-v2: at most",
            show,
            abs(risks["residual"] - limits["residual"]) < 1e-3 * limits["residual"]
            and all(risks[name] <= limits[name] * (1 + 1e-3) for name in CLASSES),
        ),
        Claim(
            "they are ordered",
            "res >= GRN-v1 >= GRN-v2",
            " >= ".join(f"{risk:.4f}" for risk in order),
            order[0] >= order[1] >= order[2],
        ),
        Claim("the gain falls with the rank r", "falls (Figure 5, left)", *steps(curves, up=False)),
        Claim("and rises with kappa", "rises (Figure 5, right)", *steps(rising, up=True)),
        Claim("and with the width d", "higher d, higher gain", *steps(widths, up=True)),
        Claim(
            "G_1's lower bound holds",
            "G_1 >= bound",
            f"at d = 100, r = 50: {actual_gain(100, 50, 5, 10):.0f} >= {gains(100, 50, 5, 10)[0]:.0f}",
            below,
        ),
    )
    with axes(2) as (figure, (left, right)):
        for color, d in zip(("tab:blue", "tab:orange", "tab:green"), by_rank, strict=True):
            for which, style in ((0, "-"), (1, "--")):
                label = f"GRN-v{which + 1}, d = {d}"
                left.plot(ranks, [pair[which] for pair in by_rank[d]], style, color=color, label=label)
                right.plot(kappas, [pair[which] for pair in by_kappa[d]], style, color=color)
        left.set(xlabel="collective rank r", ylabel="lower bound of the gain", ylim=(-16_000, 11_000))
        right.set(xlabel="kappa")
    return Outcome(claims, figure)


if __name__ == "__main__":
    main(run)
