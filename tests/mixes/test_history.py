"""Mixes of a growing history, and the gradients that its states gather, against plain sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rewire.kernels.cpu import plain
from rewire.mixes.claimed import ClaimedHistory, Table
from rewire.mixes.history import History
from rewire.topologies.base import materialize

WIDTH = 4
#: A network of mixes: (flat weights, first states, added branches) to the states that the mixes made.
Net = Callable[[Tensor, list[Tensor], list[Tensor]], list[Tensor]]
Step = Callable[[History, int, Tensor], tuple[History, Tensor]]


def entries(mixes: int, first: int) -> int:
    return sum(first + s for s in range(mixes))


def draw(
    mixes: int, first: int = 1, channels: bool = False, dtype: torch.dtype = torch.float64, grad: bool = True
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Flat weights, float32 (float64 for float64), the states before the first mix, and a branch for each mix."""
    torch.manual_seed(0)
    weights = torch.float64 if dtype == torch.float64 else torch.float32
    flat = 0.5 * torch.randn(entries(mixes, first), *([WIDTH] if channels else []), dtype=weights)
    states = [torch.randn(2, 3, WIDTH).to(dtype) for _ in range(first + mixes)]
    for x in (flat, *states):
        x.requires_grad_(grad)
    return flat, states[:first], states[first:]


def mixed(history: History, number: int, added: Sequence[Tensor] = ()) -> Tensor:
    """The value of mix ``number`` of the history's table, from 0."""
    table = history.table
    return materialize(history.mix(table[number + table.blocks.first], added=added))


def step(history: History, number: int, branch: Tensor) -> tuple[History, Tensor]:
    """Mix ``number``, whose result becomes a state if a later mix reads it."""
    y = torch.tanh(mixed(history, number, (branch,)))
    return (history.push(y) if number + 1 < len(history.table.rows) else history), y


def net(flat: Tensor, first: list[Tensor], added: list[Tensor], step: Step = step) -> list[Tensor]:
    history = Table(flat, len(added), len(first)).history().push(first[0])
    for x in first[1:]:
        history = history.push(x)
    made = []
    for number, branch in enumerate(added):
        history, y = step(history, number, branch)
        made.append(y)
    return made


def naive(flat: Tensor, first: list[Tensor], added: list[Tensor]) -> list[Tensor]:
    """The twin of `net`: each weighted sum written out, in the dtype that it is given."""
    states, weights = list(first), iter(flat)
    for branch in added:
        states.append(torch.tanh(branch + sum(next(weights) * x for x in list(states))))
    return states[len(first) :]


def loss(outputs: list[Tensor]) -> Tensor:
    return sum(((k + 1) * y.double().square().sum() for k, y in enumerate(outputs)), torch.zeros(()))


def gradients(net: Net, flat: Tensor, first: list[Tensor], added: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss(net(flat, first, added)), (flat, *first, *added))


def doubled(flat: Tensor, first: list[Tensor], added: list[Tensor]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The same as float64 leaves."""

    def leaf(x: Tensor) -> Tensor:
        return x.detach().double().requires_grad_()

    return leaf(flat), [leaf(x) for x in first], [leaf(x) for x in added]


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    size = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.1}[dtype]
    return {"rtol": size, "atol": size}


# -- the table ---------------------------------------------------------------------------------------------------------


@pytest.mark.each_once
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("first", [1, 2, 3])
@pytest.mark.parametrize("mixes", range(1, 10))
@pytest.mark.parametrize("block", [None, 2, 3])
def test_rows_are_mixes_and_columns_are_states(mixes: int, first: int, channels: bool, block: int | None) -> None:
    flat = torch.arange(float(entries(mixes, first)))
    flat = torch.stack([flat, flat + 0.5], 1) if channels else flat
    table = Table(flat, mixes, first, block)
    size = table.blocks.gathered
    assert size == (block or first + mixes)
    assert [row.shape[1] for row in table.rows] == [first + s for s in range(mixes)]
    assert torch.equal(torch.cat([row[0] for row in table.rows]), flat)
    near, later = table.by_state.near, table.by_state.later
    assert len(near) == first + mixes - 1  # the last mix's result is no state of the table
    for i, own in enumerate(near):
        column = torch.stack([row[0, i] for row in table.rows if i < row.shape[1]])
        of_block = later[i // size].unflatten(0, (size, -1))[i % size] if i // size < len(later) else own[:0]
        assert torch.equal(torch.cat([own, of_block]), column)
        assert len(own) == len([row for row in table.rows if i < row.shape[1] < (i // size + 1) * size])


# -- values and gradients ----------------------------------------------------------------------------------------------


@pytest.mark.each_once
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize("mixes", [1, 2, 3, 5, 9])
def test_matches_the_twin(mixes: int, first: int, channels: bool, dtype: torch.dtype) -> None:
    given = draw(mixes, first, channels, dtype)
    exact = doubled(*given)
    with torch.no_grad():
        unwatched = net(*given)
    for y, without, want in zip(net(*given), unwatched, naive(*exact), strict=True):
        assert y.dtype == dtype and torch.equal(y, without)
        torch.testing.assert_close(y.double(), want, **tolerance(dtype))
    flat, first_states, added = given
    for leaf, got, want in zip(
        (flat, *first_states, *added), gradients(net, *given), gradients(naive, *exact), strict=True
    ):
        assert got.dtype == leaf.dtype
        error, size = (got.double() - want).norm(), want.norm()
        assert error <= tolerance(dtype)["rtol"] * size


def test_low_precision_gradients_round_once() -> None:
    """What a state gets from nine mixes is added up in float32."""
    flat = torch.randn(entries(9, 1), requires_grad=True)
    x = torch.randn(2, 3, WIDTH).bfloat16().requires_grad_()
    history, upstream = Table(flat, 9).history().push(x), torch.randn(9, 2, 3, WIDTH).bfloat16()
    outputs = []
    for s in range(9):
        outputs.append(mixed(history, s))
        history = history.push(torch.zeros_like(x))
    dx, dw = torch.autograd.grad(outputs, (x, flat), list(upstream))
    column = torch.cumsum(torch.arange(9), 0)  # of x in the flat weights
    want = (flat.detach()[column].double()[:, None, None, None] * upstream.double()).sum(0)
    torch.testing.assert_close(dx.double(), want, rtol=0.51 * torch.finfo(torch.bfloat16).eps, atol=1e-5)
    dots = (upstream.double() * x.detach().double()).sum((1, 2, 3))
    torch.testing.assert_close(dw[column].double(), dots, rtol=1e-5, atol=1e-5)


def test_gradients_of_gradients() -> None:
    flat, first, added = draw(3, 2)
    states = [x.detach()[0, :2, :2].clone().requires_grad_() for x in (*first, *added)]

    def last(flat: Tensor, *states: Tensor) -> Tensor:
        return net(flat, list(states[:2]), list(states[2:]))[-1]

    assert torch.autograd.gradcheck(last, (flat, *states))
    assert torch.autograd.gradgradcheck(last, (flat, *states))


def test_gradients_of_gradients_with_weights_per_channel() -> None:
    flat, (x,), added = draw(2, 1, channels=True)
    assert torch.autograd.gradgradcheck(lambda flat, x: net(flat, [x], added)[-1], (flat, x))


@pytest.mark.parametrize("frozen", ["weights", "input", "branches", "all but the input"])
def test_what_needs_no_gradient(frozen: str) -> None:
    flat, first, added = draw(4, 2)
    groups = {"weights": [flat], "input": first, "branches": added, "all but the input": [flat, *added]}
    for x in groups[frozen]:
        x.requires_grad_(False)
    wanted = [x for x in (flat, *first, *added) if x.requires_grad]
    torch.testing.assert_close(
        torch.autograd.grad(loss(net(flat, first, added)), wanted),
        torch.autograd.grad(loss(naive(flat, first, added)), wanted),
    )


def test_nothing_needs_a_gradient() -> None:
    assert not any(y.requires_grad for y in net(*draw(3, grad=False)))


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("used", [[0], [1, 3], [4], [0, 1, 2]])
def test_only_some_outputs_are_used(used: list[int], channels: bool) -> None:
    """Each mix is an output by itself here: the others send nothing back."""
    flat, first, added = draw(5, 1, channels)

    def outputs(of: Callable[[int, list[Tensor]], Tensor]) -> list[Tensor]:
        states = [first[0], *(branch.tanh() for branch in added)]
        return [y for s in range(5) if s in used for y in [of(s, states[: s + 1])]]

    def by_history(s: int, states: list[Tensor]) -> Tensor:
        history = History(table).push(states[0])
        for x in states[1:]:
            history = history.push(x)
        return mixed(history, s)

    def by_sum(s: int, states: list[Tensor]) -> Tensor:
        return sum(w * x for w, x in zip(table.rows[s][0], states, strict=True))  # type: ignore[return-value]

    table, leaves = Table(flat, 5), (flat, *first, *added)
    got, want = (
        torch.autograd.grad(loss(outputs(of)), leaves, allow_unused=True, materialize_grads=True)
        for of in (by_history, by_sum)
    )
    torch.testing.assert_close(got, want)


# -- ways of going back ------------------------------------------------------------------------------------------------


def test_a_gradient_at_a_state_is_its_whole_gradient() -> None:
    """By a hook, by retain_grad, and by autograd.grad: from all later mixes, and from elsewhere."""

    def watched(net: Net) -> list[Tensor]:
        made = net(*draw(4))
        seen: list[Tensor] = []
        made[0].register_hook(seen.append)
        made[1].retain_grad()
        total = loss(made) + made[0].sum()
        (third,) = torch.autograd.grad(total, made[2], retain_graph=True)
        total.backward()
        (hooked,) = seen
        assert made[1].grad is not None
        return [hooked, made[1].grad, third]

    torch.testing.assert_close(watched(net), watched(naive))


def test_backward_twice_is_the_same_bitwise() -> None:
    flat, first, added = draw(5, 2, dtype=torch.float32)
    total, leaves = loss(net(flat, first, added)), (flat, *first, *added)
    once = torch.autograd.grad(total, leaves, retain_graph=True)
    assert all(map(torch.equal, once, torch.autograd.grad(total, leaves)))


def test_a_part_of_the_graph_first() -> None:
    flat, first, added = draw(4)
    got, want = net(flat, first, added), naive(flat, first, added)
    for k in (1, 3, 0):
        torch.testing.assert_close(
            torch.autograd.grad(got[k].sum(), (flat, *first), retain_graph=True),
            torch.autograd.grad(want[k].sum(), (flat, *first), retain_graph=True),
        )


def test_two_forwards_before_one_backward() -> None:
    flat, first, added = draw(4)
    table, leaves = Table(flat, 4), (flat, *first, *added)

    def forward(sign: int) -> History:
        history = History(table).push(sign * first[0])
        for s in range(3):
            history, _ = step(history, s, added[s])
        return history

    a, b = forward(1), forward(-1)  # of one table
    got = loss([step(history, 3, added[3])[1] for history in (a, b)])
    want = loss([naive(flat, [sign * first[0]], added)[-1] for sign in (1, -1)])
    torch.testing.assert_close(torch.autograd.grad(got, leaves), torch.autograd.grad(want, leaves))


def test_one_history_has_two_futures() -> None:
    flat, (x,), added = draw(2)
    start = Table(flat, 2).history().push(x)
    futures = [start.push(branch) for branch in added]
    assert len(start.states) == 1
    got = loss([mixed(future, 1) for future in futures])
    want = loss([flat[1] * x + flat[2] * branch for branch in added])
    leaves = (flat, x, *added)
    got_grads, want_grads = (torch.autograd.grad(total, leaves, materialize_grads=True) for total in (got, want))
    torch.testing.assert_close(got_grads, want_grads)


@pytest.mark.parametrize("chosen", [range(4), [0], [1, 2], [3]])
def test_checkpointed_steps(chosen: list[int]) -> None:
    given = draw(4)

    def sometimes(history: History, number: int, branch: Tensor) -> tuple[History, Tensor]:
        if number not in chosen:
            return step(history, number, branch)
        return checkpoint(step, history, number, branch, use_reentrant=False)

    got = gradients(lambda *given: net(*given, sometimes), *given)
    assert all(map(torch.equal, got, gradients(net, *given)))


def test_branches_and_states_that_broadcast() -> None:
    flat, (x,), added = draw(3)
    narrow = [added[0].detach()[:, :1].requires_grad_(), added[1], added[2]]
    torch.testing.assert_close(gradients(net, flat, [x], narrow), gradients(naive, flat, [x], narrow))
    state = added[0].detach()[:1].requires_grad_()
    got = mixed(Table(flat, 3).history().push(x).push(state.tanh()), 1)
    want = flat[1] * x + flat[2] * state.tanh()
    leaves = (flat, x, state)
    torch.testing.assert_close(torch.autograd.grad(loss([got]), leaves), torch.autograd.grad(loss([want]), leaves))


# -- transforms and compilation ----------------------------------------------------------------------------------------


def test_functional_transforms() -> None:
    flat, first, added = draw(3, grad=False)

    def both(net: Net) -> tuple[Tensor, ...]:
        def last(flat: Tensor, x: Tensor) -> Tensor:
            return net(flat, [x], added)[-1]

        inputs = (flat, *first)
        out, pull = torch.func.vjp(last, *inputs)
        _, pushed = torch.func.jvp(last, inputs, (torch.ones_like(flat), torch.ones_like(first[0])))
        return out, *pull(torch.ones_like(out)), pushed

    torch.testing.assert_close(both(net), both(naive))


@pytest.mark.parametrize("channels", [False, True])
def test_compiles_in_one_graph(channels: bool) -> None:
    given = draw(4, 2, channels)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*given), net(*given))
    torch.testing.assert_close(gradients(compiled, *given), gradients(net, *given))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # which Dynamo hides
@pytest.mark.parametrize("chosen", [range(4), [0], [1, 2], [3]])
def test_some_steps_are_compiled(chosen: list[int]) -> None:
    """As where each block is compiled by itself: what begins in one world goes on in the other."""
    given, compiled = draw(4), torch.compile(step, fullgraph=True, backend="aot_eager")

    def sometimes(history: History, number: int, branch: Tensor) -> tuple[History, Tensor]:
        return (compiled if number in chosen else step)(history, number, branch)

    torch.testing.assert_close(gradients(lambda *given: net(*given, sometimes), *given), gradients(net, *given))


# -- what it is for ----------------------------------------------------------------------------------------------------


def test_only_the_states_are_kept_for_backward() -> None:
    """Neither a weighted copy of a state, nor anything else of its size."""
    flat, first, added = draw(6, dtype=torch.bfloat16)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x), x)[1], lambda x: x):
        history = Table(flat, 6).history().push(first[0])
        for s in range(5):
            history = history.push(mixed(history, s, (added[s],)))
        mixed(history, 5)
    own = {x.data_ptr() for x in history.states}
    assert {x.data_ptr() for x in kept if x.numel() >= first[0].numel()} == own


def test_a_state_gathers_its_gradient_in_one_pass() -> None:
    flat, (x,), added = draw(6)
    history = Table(flat, 6).history().push(x)
    outputs = []
    for s in range(6):
        outputs.append(mixed(history, s))
        history = history.push(added[s]) if s < 5 else history
    gathering = {claim.grad_fn for claim in history.claims[0][1]}
    assert len(gathering) == 1  # that of x, whatever the number of mixes
    assert not any(y.grad_fn.saved_tensors for y in outputs)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("channels", "elements", "by_hand"), [(False, 999, True), (False, 9999, False), (True, 999, False)]
)
def test_which_small_sums_have_gradients_by_hand(
    channels: bool, elements: int, by_hand: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sums of 1.5 states of 24 elements on average, 36: with one weight for each, from an eighth of them on."""
    monkeypatch.setattr(plain, "WORTHWHILE", elements)
    flat, (x,), _ = draw(2, channels=channels)
    history = Table(flat, 2).history().push(torch.cat([x] * 6))
    assert isinstance(history, ClaimedHistory) == by_hand
