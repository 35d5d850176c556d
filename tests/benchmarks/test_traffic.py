"""What mixes would launch, and the bytes of that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scripts import script
from torch import Tensor

from rewire.kernels import switch
from rewire.kernels.kernel import Kernel, Launch
from rewire.kernels.sums import grid, launch
from rewire.kernels.sums.spec import MixSpec
from rewire.mixes.claimed import Table
from rewire.topologies.base import materialize

traffic = script("traffic")

BF16 = torch.bfloat16
ROWS, COLS = 8, 64
STATE, FLOAT = ROWS * COLS * 2, ROWS * COLS * 4  # bytes of a bfloat16 state, and of a float32 accumulator


@pytest.mark.parametrize(
    ("spec", "backward", "floor", "more"),
    [
        (MixSpec(3, added=1), False, 5 * STATE + 3 * 4, 0),
        # Partial sums of one program, which need no second step.
        (MixSpec(3, added=1), True, 7 * STATE + 6 * 4, 0),
        (MixSpec(3, "none"), True, 4 * STATE, 0),
        (MixSpec(66, "none", outputs=1), False, 67 * STATE, 2 * FLOAT),
        (MixSpec(4, outputs=2, accumulate=True), False, 6 * STATE + 2 * FLOAT + 8 * 4, 0),
        # A score per row: a program makes its sums along rows of all columns.
        (MixSpec(5, "none", True, outputs=5), False, 10 * STATE + 25 * ROWS * 4, 0),
        (MixSpec(5, "none", True, outputs=5), True, 15 * STATE + 2 * 25 * ROWS * 4, 0),
        # 3 kernels of at most 4 sources read 4 gradients again; what they sum is put side by side.
        (MixSpec(10, "channel", outputs=4), True, 24 * STATE + 2 * 40 * COLS * 4, 8 * STATE + 2 * 40 * COLS * 4),
        # 2 kernels read 4 probes each; between them are 4 accumulators.
        (MixSpec(20, outputs=4, probe=True), False, 28 * STATE + 2 * 80 * 4, 4 * STATE + 8 * FLOAT + 2 * 80 * 4),
        (MixSpec(2, norm="rms", keep_mix=True), False, 4 * STATE + 2 * 4 + COLS * 2 + ROWS * 4, 0),
        (MixSpec(2, norm="rms", added=2), True, 7 * STATE + 4 * 4 + COLS * 6 + ROWS * 4, 0),
        # The gradient of the norm passes through memory.
        (MixSpec(2, "channel", norm="layer"), True, 6 * STATE + 4 * COLS * 4 + COLS * 10 + ROWS * 4, 2 * FLOAT),
    ],
)
def test_bytes_are_counted(spec: MixSpec, backward: bool, floor: int, more: int) -> None:
    """``more``: what the kernels move beyond the floor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "_routines", {})  # others are for as many programs as usual
        patch.setattr(grid, "PROGRAMS", 1)
        assert traffic.bytes_floor(spec, ROWS, COLS, 2, backward) == floor
        assert traffic.bytes_moved(spec, ROWS, COLS, 2, backward) == floor + more


def test_bytes_of_partial_sums() -> None:
    """32 rows of 64 bfloat16 columns are 4 programs, each with sums of 3 sources."""
    spec, states = MixSpec(3, "channel"), 7 * 32 * 64 * 2
    assert grid.Grid.of(spec, True, 32, 64, 2).row_programs == 4
    partials = 4 * 3 * 64 * 4
    assert traffic.bytes_moved(spec, 32, 64, 2, backward=True) == states + 3 * 64 * 4 + 2 * partials + 3 * 64 * 4


def test_results_can_be_wider_than_states() -> None:
    spec, state = MixSpec(3, outputs=2), 8 * 64 * 2
    assert traffic.bytes_moved(spec, 8, 64, 2, out_itemsize=4) == (3 + 2 * 2) * state + 6 * 4


@pytest.mark.parametrize(("mixes", "first", "block"), [(9, 1, None), (12, 1, 4), (13, 2, 4), (21, 1, 8), (24, 1, 5)])
def test_bytes_of_a_history(mixes: int, first: int, block: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the kernels that a history starts; their results mean nothing here."""
    wanted = traffic.bytes_of_history(mixes, block, ROWS, COLS, 2, first)
    started: list[Launch] = []
    monkeypatch.setattr(Kernel, "start", lambda self, used: started.append(self.launch(used)))
    monkeypatch.setattr(switch, "INTERPRETED", True)
    flat = torch.ones(sum(first + s for s in range(mixes)), requires_grad=True)
    table = Table(flat, mixes, first, block or first + mixes)
    history = table.history()
    for _ in range(first):
        history = history.push(state())
    for t in range(first, first + mixes):
        x = materialize(history.mix(table[t], added=[state()]))
        history = history.push(x)
    forward = traffic.bytes_of(started)
    started.clear()
    torch.autograd.backward(x, torch.ones_like(x))
    assert (forward, traffic.bytes_of(started)) == wanted


def state() -> Tensor:
    return torch.zeros(ROWS, COLS, dtype=BF16, requires_grad=True)


def passes(blocks: int, size: int) -> tuple[int, int]:
    """States that ``blocks`` blocks of ``size`` mixes read and write, forward and backward: docs/kernels.md."""
    between, inside = size * blocks * (blocks - 1) // 2, blocks * size * (size - 1) // 2
    forward = blocks - 1 + between + 4 * size * (blocks - 1) + inside + size + blocks * size
    return forward, between + blocks + inside + 3 * blocks * (size - 1) + 2 * blocks * size


@pytest.mark.parametrize(
    ("mixes", "first", "block", "expected"),
    [
        (8, 1, None, (8 * 9 // 2 + 8, 8 * 9 // 2 + 2 * 8)),
        (12, 1, 4, passes(3, 4)),
        (16, 1, 4, passes(4, 4)),
        (12, 2, 3, (90, 88)),  # one state more at the start
    ],
)
def test_the_formula_of_a_history(
    mixes: int, first: int, block: int | None, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as no kernel is chained: what the kernels move but for branches, weights and their partial sums."""

    def states_only(launches: Any) -> int:
        tensors = [x for one in launches for x in torch.utils._pytree.tree_leaves(one.arguments)]
        return sum(x.nbytes for x in tensors if isinstance(x, Tensor) and x.shape == (ROWS, COLS))

    monkeypatch.setattr(traffic, "bytes_of", states_only)
    forward, backward = traffic.bytes_of_history(mixes, block, ROWS, COLS, 2, first)
    assert (forward / STATE - mixes, backward / STATE) == expected
