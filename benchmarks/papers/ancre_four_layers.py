"""ANCRe on 4-layer linear networks: which shortcuts help (arXiv 2602.09009, Figure 2c)

All 10 single shortcuts and all 45 pairs of them, on the task of Figure 2b: gradient descent at rate 0.1, width 10, a
target of rank 5, weights from N(0, 0.01^2), float64. Counted are steps to a loss of 1e-10. The paper shows some of the
pairs; here are all. Differences of up to 5% count as equal.
"""

from __future__ import annotations

import itertools

from common import Claim, Outcome, axes, first_below, fit_linear, main
from linear_nets import LinearNet, Shortcut, low_rank_target, small_weights

RATE, STEPS, GOAL, TOLERANCE = 0.1, 1000, 1e-10, 1.05
SHORTCUTS = [(i, j) for j in range(1, 5) for i in range(j)]
Layout = tuple[Shortcut, ...]
ALONE: Layout = ((0, 3),)
PAIR: Layout = ((0, 2), (2, 3))


def name(layout: Layout) -> str:
    return " + ".join(f"{i}:{j}" for i, j in layout)


def count(value: float) -> str:
    return f"{value:.0f}" if value < STEPS else f"over {STEPS}"


def run() -> Outcome:
    weights, target = small_weights(4, 10, 0.01, seed=0), low_rank_target(10, 5, seed=0)
    layouts: list[Layout] = [*((jump,) for jump in SHORTCUTS), *itertools.combinations(SHORTCUTS, 2)]
    curves = {layout: fit_linear(LinearNet(weights, layout), target, RATE, STEPS, stop=GOAL) for layout in layouts}
    steps = {layout: float(first_below(losses, GOAL) or STEPS) for layout, losses in curves.items()}
    alone, pair = steps[ALONE], steps[PAIR]
    singles = {layout: n for layout, n in steps.items() if len(layout) == 1}
    pairs = {layout: n for layout, n in steps.items() if len(layout) == 2}
    slower = sum(n > TOLERANCE * alone for n in pairs.values())
    stuck = sum(n >= STEPS for n in pairs.values())
    better = {name(layout): n for layout, n in pairs.items() if n * TOLERANCE < pair}
    claims = (
        Claim(
            "0:3 is the best single shortcut",
            "0:3 is optimal",
            f"0:3: {count(alone)} steps; the other nine from {count(min(n for s, n in singles.items() if s != ALONE))}",
            all(alone <= TOLERANCE * n for n in singles.values()),
        ),
        Claim(
            "a second shortcut does not necessarily help",
            "only where it is well placed",
            f"{slower} of 45 pairs are slower than 0:3 alone, {stuck} of them do not arrive in {STEPS} steps",
            slower > 0,
        ),
        Claim(
            "0:2 + 2:3 is well placed",
            "some pairs are faster",
            f"{count(pair)} steps against {count(alone)}",
            pair < alone,
        ),
        Claim(
            "0:2 + 2:3 is the best pair",
            "only in the figure; the first version's text names 1:2 + 2:3",
            f"faster: {', '.join(f'{other} ({count(n)})' for other, n in better.items()) or 'none'}; "
            f"1:2 + 2:3: {count(steps[(1, 2), (2, 3)])}",
            not better,
        ),
    )
    shown: list[Layout] = [(), ALONE, PAIR, ((0, 1), (1, 2)), ((1, 2), (2, 3)), ((0, 3), (1, 4))]
    curves[()] = fit_linear(LinearNet(weights), target, RATE, STEPS)
    with axes() as (figure, (ax,)):
        for layout in shown:
            ax.semilogy(curves[layout][:400], label=name(layout) or "none")
        ax.set(xlabel="gradient descent step", ylabel="loss", ylim=(1e-10, 10))
    return Outcome(claims, figure)


if __name__ == "__main__":
    main(run)
