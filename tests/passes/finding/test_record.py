"""Running a model and recording its operations."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from mixing import shaken
from torch import Tensor, nn

import rewire
from rewire.passes.finding.record import record


class Replaces(nn.Module):
    """Replaces a buffer, as rotary embeddings do that grow."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(3, 3))
        self.lives = False

    def forward(self, x: Tensor) -> Tensor:
        first = weakref.ref(self.table)
        self.table = torch.zeros(3, 3)
        self.lives = first() is not None
        return x + self.table


def test_a_buffer_that_is_replaced_lives_on_so_that_no_other_tensor_gets_its_id() -> None:
    recorded, plain, x = Replaces(), Replaces(), torch.randn(3, 3)
    plain(x)
    record(recorded, ((x,), {}))
    assert recorded.lives and not plain.lives


class TurnsBetween(nn.Module):
    """Blocks of as many tokens as channels, which change places between two adds."""

    def __init__(self, turn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.turn = nn.ModuleList(nn.Linear(6, 6) for _ in range(4)), turn

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
            x = self.turn(x)
        return x


ORDER = torch.tensor([2, 0, 1, 5, 4, 3])
#: Ways to write the same rearrangement.
TURNED: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "mT": (lambda x: x.mT, lambda x: x.transpose(1, 2)),
    "mH": (lambda x: x.mH, lambda x: x.transpose(1, 2)),
    "adjoint": (torch.adjoint, lambda x: x.transpose(1, 2)),
    "einsum": (lambda x: torch.einsum("bij->bji", x), lambda x: x.transpose(1, 2)),
    "real": (lambda x: x.mT.real, lambda x: x.transpose(1, 2)),
    "channel_shuffle": (lambda x: torch.channel_shuffle(x, 2), lambda x: x[:, [0, 3, 1, 4, 2, 5]]),
    "gather": (lambda x: x.gather(1, ORDER[None, :, None].expand_as(x)), lambda x: x[:, ORDER]),
}


@pytest.mark.each_once
@pytest.mark.parametrize("way", TURNED)
@pytest.mark.parametrize("topology", ["ancre-ingoing", "denseformer", "grn-v2"])
def test_what_is_in_the_same_memory_is_a_view_whatever_it_is_called(way: str, topology: str) -> None:
    given = (torch.randn(2, 6, 6),)
    made = [rewire.compile(TurnsBetween(turn), topology, example_inputs=given) for turn in TURNED[way]]
    assert [len(c.layout.units) for model in made for c in rewire.connections(model).values()] == [4, 4]
    with torch.no_grad():
        got, expected = (shaken(model, 0.3, seed=3)(*given) for model in made)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("way", ["adjoint", "einsum"])
def test_the_same_where_a_model_is_traced(way: str) -> None:
    """Without inputs there is no memory to look at."""
    made = [rewire.compile(TurnsBetween(turn), "ancre-ingoing") for turn in TURNED[way]]
    with torch.no_grad():
        got, expected = (shaken(model, 0.3, seed=3)(torch.ones(2, 6, 6).cumsum(1)) for model in made)
    torch.testing.assert_close(got, expected)


def test_what_only_says_how_large_a_result_is_makes_nothing_of_it() -> None:
    flow = record(TurnsBetween(lambda x: torch.ones(6, 6).expand_as(x) * x), ((torch.randn(2, 6, 6),), {}))
    assert {len(op.inputs) for op in flow if op.name == "expand_as"} == {1}


@pytest.mark.parametrize("hidden", [False, True])
def test_tensors_without_a_gradient_that_nothing_here_made(hidden: bool) -> None:
    """What the model is given, weights and what their operations make is known."""

    class Net(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.nn.functional.linear(x, self.weight) + torch.ones(4)
            return y + kept if hidden else y

    kept, net = torch.zeros(4), Net(4, 4).requires_grad_(False)
    assert record(net, ((torch.randn(2, 4),), {})).strange == hidden


class Experts(nn.Module):
    """One of two branches, by torch's own control flow."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + torch.cond(h.sum() > 0, lambda h: self.first(h), lambda h: self.second(h), (h,))


def test_control_flow_that_torch_traces_is_refused_by_name() -> None:
    with pytest.raises(rewire.UnsupportedCall, match=r"Sequential calls torch's `cond`: `torch\.cond.*test_record.py:"):
        rewire.compile(nn.Sequential(Experts(), Experts()), example_inputs=(torch.randn(2, 4),))
