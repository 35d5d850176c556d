"""Every block reads the trunk's input again: nanochat's and modded-nanogpt's learned scalars."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from rewire.errors import check_choice
from rewire.mixes.mix import mix
from rewire.topologies.base import Dims, Granularity, Recurrence, Start, States, total
from rewire.topologies.program import Line, Program, Term, Unit, branch_of
from rewire.topologies.registry import register_topology

Shortcut = Literal["mix", "state"]


@register_topology("x0-lambdas")
@dataclasses.dataclass(frozen=True)
class X0Lambdas(Recurrence[Tensor]):
    """Two learned scalars for each unit: on the newest state, and on the trunk's input (nanochat, modded-nanogpt).

    ``r_t = l_t x_{t-1} + m_t x_0`` and ``x_t = r_t + f_t``; the trunk's output is ``x_T``. (nanochat/gpt.py,
    ``resid_lambdas`` and ``x0_lambdas``; in modded-nanogpt ``lambdas`` of each block.) The states are ``x_0`` and
    ``x_t``, or inside a unit the tensor to which the branch is added. In unit 1 only the sum l + m counts.

    With ``shortcut="state"`` the branch reads the mix, but is added to the state: ``x_t = x_{t-1} + f_t``. This is
    NeoMME (transformers' ``NeoMMEEncoderLayer``) for its attentions; its MLPs are units with ``l = 1``, ``m = 0``.

    **Preserving start**, as in modded-nanogpt: ``l = 1``, ``m = 0``, the original network, bitwise, with full
    gradients from the first step on.

    **Paper start**, as in nanochat: from the first unit to the last, l falls from 1.15 to 1.05, m from 0.2 to 0.05.

    Args:
        shortcut: to what the branch is added, "mix" or "state".
    """

    granularity: ClassVar[Granularity] = "block"
    of_states: ClassVar[frozenset[str]] = frozenset({"resid_lambdas", "x0_lambdas"})

    shortcut: Shortcut = "mix"

    def __post_init__(self) -> None:
        check_choice("shortcut", self.shortcut, get_args(Shortcut))

    def parameters(self, dims: Dims, start: Start) -> dict[str, Tensor]:
        """``resid_lambdas`` and ``x0_lambdas``, l and m, float32 [T]."""
        if start == "preserve":
            return {"resid_lambdas": torch.ones(dims.depth), "x0_lambdas": torch.zeros(dims.depth)}
        return {
            "resid_lambdas": torch.linspace(1.15, 1.05, dims.depth),
            "x0_lambdas": torch.linspace(0.2, 0.05, dims.depth),
        }

    def weights(self, parameters: dict[str, Tensor], dims: Dims) -> Tensor:
        """l and m, float32 [T, 2]."""
        return torch.stack([parameters["resid_lambdas"], parameters["x0_lambdas"]], dim=1)

    def start(self, x: Tensor, weights: Tensor) -> States:
        return x, x

    def read(self, states: States, weights: Tensor, t: int) -> tuple[Tensor, States]:
        first, x = states
        r = mix((x, first), weights[t - 1])
        return r, (first, r if self.shortcut == "mix" else x)

    def merge(self, states: States, weights: Tensor, t: int, *branches: Tensor) -> Tensor:
        return total((states[1], *branches))  # in the model's own order: bitwise equality at the start

    def push(self, states: States, weights: Tensor, t: int, x: Tensor) -> States:
        return states[0], x

    def drops(self, dims: Dims) -> tuple[()]:
        return ()

    def finish(self, states: States, weights: Tensor, dims: Dims) -> Tensor:
        return states[1]

    def matrix(self, weights: Tensor, dims: Dims) -> Tensor:
        """float32 [T, T]: row t - 1 is the read of unit t; columns are x_0 .. x_{T-1}."""
        newest, first = weights.unbind(1)
        return torch.diag(newest) + F.pad(first[:, None], (0, dims.depth - 1))

    def program(self, weights: Tensor, dims: Dims) -> Program:
        units = []
        for t, (newest, first) in enumerate(weights.tolist(), start=1):
            read = Line(f"r{t}", (Term(f"x{t - 1}", newest), Term("x0", first)))
            kept = Term(read.target if self.shortcut == "mix" else f"x{t - 1}", 1.0, fixed=True)
            units.append(Unit((read,), read.target, (Line(f"x{t}", (kept, Term(branch_of(t), 1.0))),)))
        columns = tuple(f"x{t}" for t in range(dims.depth))
        return Program(tuple(units), (), f"x{dims.depth}", tuple(unit.read for unit in units), columns)
