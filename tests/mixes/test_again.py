"""What backward makes again is what forward had, and nobody else's saved tensors are touched."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import rewire
from rewire.kernels.cpu import plain
from rewire.mixes import again
from rewire.mixes.streams import combine

WIDTH, TOKENS, UNITS = 8, 6, 19


class Norm(nn.Module):
    """An RMS norm of several operations, each of which saves something, as models of transformers write it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(WIDTH) + 0.5), 1e-6
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = Norm(), nn.Linear(WIDTH, WIDTH)
        self.branch: Callable[[Tensor], Tensor] = torch.sin

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(self.linear(self.norm(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(UNITS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture(autouse=True)
def _however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "WORTHWHILE", 0)


def made(name: str = "hc-dynamic") -> Any:
    torch.manual_seed(0)
    model = rewire.compile(Net(), name, start="paper", validate=False)
    for parameter in rewire.connections(model)["blocks"].parameters():
        parameter.data += 0.02 * torch.randn(parameter.shape)
    return model


def inputs() -> Tensor:
    return torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()


def gradients(model: nn.Module, x: Tensor, penalty: bool = False) -> list[Tensor]:
    leaves = [x, *model.parameters()]
    loss = model(x).square().sum()
    if penalty:
        (of_x,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = of_x.square().sum()
    return [g for g in torch.autograd.grad(loss, leaves, allow_unused=True) if g is not None]


def nothing_again() -> Any:
    return mock.patch.object(again, "saved_tensor_hooks", return_value=(None, None))


@pytest.mark.each_once
@pytest.mark.parametrize("penalty", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        *("hc-dynamic", "hc-static", "mhc", "frac-hc", "attnres", "grn-v3", "denseformer", "muddformer"),
        *("gpas", "ddl", "layerscale", "laurel-rw", "orthogonal", "residual-scale"),
        *("laurel-lr:total=2.0", "laurel-pa", "laurel-pa:total=2.0", "multi-gate", "review", "review:form=difference"),
        *("hc-gated", "hc-gated:reads=streams"),
    ],
)
def test_gradients_are_the_same(name: str, penalty: bool) -> None:
    """Bitwise, as the same operations run again; those of gradients, too."""
    model, x = made(name), inputs()
    with nothing_again():
        want = gradients(model, x, penalty)
    got = gradients(model, x, penalty)
    assert len(got) == len(want) > UNITS and all(map(torch.equal, got, want))


@pytest.mark.each_once
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["hc-dynamic", "attnres", "muddformer:norms=True", "gpas", "ddl", "orthogonal"])
def test_inputs_without_gradients(name: str, dtype: torch.dtype) -> None:
    """Of which operations save less: those of frozen embeddings, or of a trunk that the model begins with."""
    model, x = made(name).to(dtype), inputs().detach().to(dtype)
    weights = [*model.parameters()]
    with nothing_again():
        want = torch.autograd.grad(model(x).float().square().sum(), weights)
    got = torch.autograd.grad(model(x).float().square().sum(), weights)
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize(
    ("options", "states", "mixes", "units"),
    [({}, UNITS + 1, UNITS, UNITS), ({"units": ["output"], "sources": ["x0", 2]}, 3, 1, 0)],
)
def test_norms_of_muddformer(options: dict[str, Any], states: int, mixes: int, units: int) -> None:
    """Those of states and those behind mixes are made again, beside those of the model's units that read mixes."""
    torch.manual_seed(0)
    model, x = rewire.compile(Net(), "muddformer", norms=True, start="paper", validate=False, **options), inputs()
    for parameter in rewire.connections(model)["blocks"].parameters():
        parameter.data += 0.02 * torch.randn(parameter.shape)
    with nothing_again():
        want = gradients(model, x)
    with mock.patch.object(again._Region, "__call__", autospec=True, side_effect=again._Region.__call__) as made:
        got = gradients(model, x)
    assert len(got) == len(want) > UNITS and all(map(torch.equal, got, want))
    assert made.call_count == states + mixes + units


def test_backward_twice() -> None:
    model, x = made(), inputs()
    loss = model(x).square().sum()
    once = torch.autograd.grad(loss, x, retain_graph=True)
    assert torch.equal(*once, *torch.autograd.grad(loss, x))


def test_norms_run_once_more() -> None:
    model, x = made(), inputs()
    before = [block.norm.calls for block in model.blocks]
    gradients(model, x)
    assert [block.norm.calls - n for block, n in zip(model.blocks, before, strict=True)] == [2] * UNITS


def test_hooks_do_not_see_it() -> None:
    """A norm with a hook is left as it is."""
    model, x = made(), inputs()
    calls: list[int] = []
    handle = model.blocks[3].norm.register_forward_hook(lambda *_: calls.append(3))
    before = model.blocks[3].norm.calls
    gradients(model, x)
    assert calls == [3] and model.blocks[3].norm.calls == before + 1
    handle.remove()


@pytest.mark.parametrize("number", [1, 10])
def test_branches_that_were_written_to_since(number: int) -> None:
    """Streams are made of them; the plain model does not need them, but gradients of the weights do."""
    model, x = made(), inputs()
    branches: list[Tensor] = []

    def branch(x: Tensor) -> Tensor:
        branches.append(torch.sin(x))
        return branches[-1]

    model.blocks[number].branch = branch
    loss = model(x).square().sum()
    branches[0].detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inputs_that_were_written_to_since() -> None:
    model, x = made(), inputs()
    given = x * 1
    loss = model(given).square().sum()
    given.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_norms_whose_weights_were_changed_since() -> None:
    model, x = made(), inputs()
    loss = model(x).square().sum()
    with torch.no_grad():
        model.blocks[2].norm.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_checkpoints_look_after_what_is_saved() -> None:
    """Streams that pass a checkpoint do not hold what is inside."""
    model, x = made(), inputs()
    with nothing_again():
        want = gradients(model, x)
    with mock.patch.object(again, "remember", side_effect=AssertionError):
        out = checkpoint(model, x, use_reentrant=False)
        found = torch.autograd.grad(out.square().sum(), [x, *model.parameters()], allow_unused=True)
    assert all(map(torch.equal, [g for g in found if g is not None], want))


def test_autocast_of_forward() -> None:
    """Backward runs without autocast, what it makes again as forward ran."""
    model, x = made(), inputs()

    def loss() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x).float().square().sum()

    with nothing_again():
        (want,) = torch.autograd.grad(loss(), x)
    (got,) = torch.autograd.grad(loss(), x)
    assert torch.equal(got, want)


def test_who_keeps_a_detached_read_keeps_nothing_else() -> None:
    model, x = made(), inputs()
    reads: list[Tensor] = []
    model.blocks[5].norm.register_forward_pre_hook(lambda _, given: reads.append(given[0].detach()))
    branches: list[Any] = []

    def branch(x: Tensor) -> Tensor:
        result = torch.sin(x)
        branches.append(weakref.ref(result.untyped_storage()))
        return result

    model.blocks[3].branch = branch
    model(x).square().sum().backward()
    gc.collect()
    assert reads and branches[0]() is None


@pytest.mark.parametrize("norm", [Norm, lambda: nn.LayerNorm(WIDTH)])
def test_reads_are_made_again_once_and_not_kept(norm: Callable[[], nn.Module]) -> None:
    """However often a norm's operations have saved one, and though what recomputes it lives on with the loss."""
    module, x, made = norm(), torch.randn(2, TOKENS, WIDTH, requires_grad=True), list[Any]()

    def read() -> Tensor:
        result = x.detach() * 2
        made.append(weakref.ref(result))
        return result

    with again.sparing(x):
        value = x * 2
        again.remember(value, read)
    loss = again.norm_again(module, value).square().sum()
    del value
    loss.backward()
    gc.collect()
    assert len(made) == 1 and made[0]() is None and loss.grad_fn is not None


def test_memory_is_kept_every_few_units() -> None:
    """Of new streams all but these are freed when the next unit has written: few near the end."""
    x, seen = torch.randn(5, 4, WIDTH, requires_grad=True), list[Any]()
    for left in reversed(range(62)):
        with again.UnitsLeft(left):
            x = combine(x, torch.rand(5, 5, 4), [torch.randn(5, 1, WIDTH)])
        with again.sparing(x):
            seen.append((left, again.recompute_of(x)))
    assert [left for left, recompute in seen if recompute is None] == [40, 16, 6]


def test_sums_are_made_again_together() -> None:
    """Those of one node of the graph: once, in the second backward pass, too; the others are held for theirs."""
    x, calls = torch.randn(TOKENS, WIDTH, requires_grad=True), list[int]()

    def both(sources: Any) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return sources[0] * 2, sources[0] * 3

    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> tuple[Tensor, ...]:
            found = both([x])
            again.remember_sums(found, [x], (), both, ctx)
            return found

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:  # type: ignore[override]
            return grads[0] * 2 + grads[1] * 3

    with again.sparing(x):
        doubled, tripled = Both.apply(x)
        functions = [again.recompute_of(y) for y in (doubled, tripled)]
        loss = (doubled.square() + tripled.square()).sum()
    assert all(recompute is not None and recompute.saved for recompute in functions)
    del doubled, tripled
    for passes in (2, 3):
        (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
        torch.testing.assert_close(grad, 26 * x)
        assert len(calls) == passes and all(f.held is None for f in functions if f is not None)


def test_each_result_of_a_node_is_recomputed() -> None:
    class Two(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> tuple[Tensor, ...]:
            found = x * 2, x * 3
            for y, factor in zip(found, (2, 3), strict=True):
                again.remember(y, functools.partial(torch.mul, x.detach(), factor), ctx)
            return found

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> None:  # type: ignore[override]
            raise NotImplementedError

    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    with again.sparing(x):
        found = Two.apply(x)
        assert [torch.equal(y, again.recompute_of(y)()) for y in found] == [True, True]  # type: ignore[misc]


def test_branches_are_not_kept_in_vain() -> None:
    """Where a new state saves less than its branches, that is kept, and they are not."""
    x, branches, seen = torch.randn(TOKENS, WIDTH, requires_grad=True), list[Tensor](), list[Any]()
    weight = torch.ones((), requires_grad=True)
    for _ in range(2):
        branches.append(torch.randn(TOKENS, WIDTH))
        seen.append(weakref.ref(branches[-1].untyped_storage()))

    def merge(x: Tensor, *branches: Tensor) -> Tensor:
        return weight * (x + branches[0] + branches[1])

    new = again.merged_again(merge, x, branches)
    want = (x + branches[0] + branches[1]).sum()
    branches.clear()
    assert [ref() for ref in seen] == [None, None] and again.recompute_of(new) is None
    torch.testing.assert_close(torch.autograd.grad(new.sum(), weight), (want.detach(),))


class TwoSites(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.sin(self.linear(self.norm(x)))
        return x + torch.cos(self.linear(self.norm(x)))


@pytest.mark.parametrize(("name", "alive"), [("laurel-rw", 3), ("laurel-pa:total=2.0", 3), ("residual", 2 * UNITS)])
def test_sums_inside_units(name: str, alive: int) -> None:
    """They are made again of what branches return, as states are: of these two in 19 are kept, beside the input."""
    torch.manual_seed(0)
    net = Net()
    net.blocks = nn.ModuleList(TwoSites() for _ in range(UNITS))
    model = rewire.compile(net, name, start="paper", validate=False, granularity="block")
    read, x = list[Any](), inputs()

    def forward(norm: Norm, x: Tensor) -> Tensor:
        read.append(weakref.ref(x.untyped_storage()))
        return original(norm, x)

    original = Norm.forward
    with nothing_again():
        want = gradients(model, x)
    with mock.patch.object(Norm, "forward", forward):
        loss = model(x).square().sum()
        assert len(read) == 2 * UNITS and sum(ref() is not None for ref in read) == alive
    got = torch.autograd.grad(loss, [x, *model.parameters()])
    assert all(map(torch.equal, got, want))


class Switched(Norm):
    more = False

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.exp().log() if self.more else x)


def test_a_norm_that_has_changed_since_is_refused() -> None:
    norm, x = Switched(), torch.randn(TOKENS, WIDTH, requires_grad=True)
    y = again.norm_again(norm, x)
    norm.more = True
    with pytest.raises(RuntimeError, match="saves other tensors when it runs again"):
        y.sum().backward()


class Cubes(TorchFunctionMode):
    """Squares are cubes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {})) * (args[0] if func is Tensor.pow else 1)


def test_nothing_is_made_again_that_a_mode_has_changed() -> None:
    norm, x = Norm(), torch.rand(TOKENS, WIDTH, requires_grad=True)
    with Cubes():
        ours, theirs = again.norm_again(norm, x), norm(x)
    (grad,), (wanted,) = (torch.autograd.grad(y.sum(), x) for y in (ours, theirs))
    assert torch.equal(grad, wanted)
