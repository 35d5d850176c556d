"""Copies of models: what of them is their own, and what they share."""

from __future__ import annotations

import copy
import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from models import PreNorm, Stack
from torch import Tensor, nn

import rewire
from rewire import copies
from rewire.copies import private, shared, uncompiled
from rewire.patterns.tiny import tiny_model


class Counting(nn.Module):
    """Modules that are held twice, in lists and closures; values of the last call, and a copy of its own kind."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.inner.weight
        self.same, self.unregistered = self.inner, [self.inner]
        self.register_buffer("calls", torch.zeros(()))
        self.seen: list[int] = []
        self.step = lambda x: self.inner(x)
        self.last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(len(x))
        self.last = {"hidden": self.step(x)}
        return self.last["hidden"] + self.tied(x)


class Copied(nn.Linear):
    """A layer that says how it is copied."""

    def __deepcopy__(self, memo: Any) -> Copied:
        made = memo[id(self)] = Copied(self.in_features, self.out_features)
        made.load_state_dict(self.state_dict())
        made.how = "its own way"
        return made


class Restored(nn.Linear):
    """A layer with attributes that it makes anew."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "cache"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.cache = "made anew"


@pytest.mark.parametrize("copied", [shared, private, copy.deepcopy])
def test_a_copy_holds_its_own_modules_as_the_model_does(copied: Any) -> None:
    model = Counting()
    if copied is not copy.deepcopy:
        model(torch.ones(2, 4))  # a hidden state, which deepcopy refuses
    made = copied(model)
    assert made.same is made.inner is made.unregistered[0] is not model.inner
    assert made.tied.weight is made.inner.weight
    assert made.seen == model.seen and made.seen is not model.seen
    made.inner.bias = nn.Parameter(torch.full((4,), 7.0))
    if copied is not copy.deepcopy:  # which keeps closures
        assert made.step(torch.zeros(1, 4)).tolist() == [[7.0] * 4]
        assert made.last["hidden"] is not model.last["hidden"] and made.last["hidden"].is_leaf


def test_what_a_private_copy_computes_leaves_no_trace() -> None:
    model = Counting()
    made = private(model)
    made(torch.ones(2, 4)).sum().backward()
    assert not model.seen and model.last is None and float(model.calls) == 0
    assert all(p.grad is None for p in model.parameters()) and made.inner.weight.grad is not None
    assert made.inner.weight.data_ptr() == model.inner.weight.data_ptr()


class MergesInEvaluation(nn.Linear):
    """A low-rank branch that ``eval`` adds to the weight, and ``train`` takes out again, as loralib's do."""

    def __init__(self, width: int, reads: bool = False) -> None:
        super().__init__(width, width)
        self.down, self.up = nn.Parameter(torch.randn(2, width)), nn.Parameter(torch.randn(width, 2))
        self.merged, self.reads = False, reads

    def train(self, mode: bool = True) -> MergesInEvaluation:
        super().train(mode)
        if self.reads and not bool(self.down.isfinite().all()):
            raise ValueError("not finite")
        if self.merged is mode:
            self.weight.data += (-1 if mode else 1) * self.up @ self.down
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.merged else super().forward(x) + x @ self.down.T @ self.up.T


@pytest.mark.parametrize("reads", [False, True])
def test_modules_that_write_to_weights_when_the_mode_changes(reads: bool) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(8), MergesInEvaluation(8, reads)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.linear(self.norm(x))

    model, x = nn.Sequential(*[Block() for _ in range(3)]), torch.randn(2, 8)
    before, expected = copy.deepcopy(model.state_dict()), model(x)
    rewired = rewire.compile(model, "ancre-ingoing", example_inputs=(x,))
    for shown in (model, rewired):
        rewire.diagnose(shown, (x,))
    rewire.graph(rewired, (x,)), rewire.ablate(rewired, [(x,)], loss=lambda net, batch: net(*batch).square().mean())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    torch.testing.assert_close(rewired(x), expected)
    torch.testing.assert_close(rewired.eval()(x), expected)
    made = private(model)
    assert made[0].norm.weight.data_ptr() == model[0].norm.weight.data_ptr() or reads


class WritesToItsWeight(nn.Linear):
    """Normalises its weight whenever it runs in training mode, in one of the ways that models have."""

    def __init__(self, how: str) -> None:
        super().__init__(8, 8)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            norms = self.weight.detach().norm(dim=1, keepdim=True)
            with torch.no_grad():
                if self.how == "copy_":
                    self.weight.copy_(self.weight / norms)
                elif self.how == "data":
                    self.weight.data.div_(norms)
                elif self.how == "rows":
                    self.weight[1:] /= norms[1:]
                elif self.how == "later":
                    rows = self.weight.view(8, 8)
                    self.weight.div_(norms)
                    rows.mul_(2)
                elif self.how == "out":
                    torch.div(self.weight, norms, out=self.weight)
                elif self.how == "foreach":
                    torch._foreach_div_([self.weight], [norms])
                elif self.how == "decay":
                    self.weight.mul_(0.9)
        return super().forward(x)


class WritingBlock(nn.Module):
    def __init__(self, how: str, reads: bool) -> None:
        super().__init__()
        self.norm, self.layer, self.reads = nn.LayerNorm(8), WritesToItsWeight(how), reads

    def forward(self, x: Tensor) -> Tensor:
        if self.reads and float(x.detach().sum()) > 1e9:  # so that runs on the meta device do not tell
            x = 2 * x
        return x + self.layer(self.norm(x))


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("how", ["copy_", "data", "rows", "later", "out", "foreach", "decay"])
def test_weights_to_which_a_forward_writes_stay_as_they_are(how: str, reads: bool) -> None:
    """Copies share memory with the model: the check of the rewrite, in training mode, normalised the user's weights."""
    model = nn.Sequential(*(WritingBlock(how, reads) for _ in range(3))).eval()
    before, x = copy.deepcopy(model.state_dict()), torch.randn(4, 8)
    rewired = rewire.compile(model, "ancre-ingoing", example_inputs=(x,))
    rewire.diagnose(rewired, (x,), evaluate=False)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    want, got = copy.deepcopy(model).train(), copy.deepcopy(rewired).train()
    torch.testing.assert_close(got(x), want(x))
    for name, value in want.state_dict().items():
        torch.testing.assert_close(got.state_dict()[name], value)
        assert torch.equal(value, before[name]) == (not name.endswith("layer.weight"))


def test_what_no_run_has_shown_is_not_written_either() -> None:
    """A rewrite that was made from a trace, and not validated, is diagnosed in training mode."""
    model = nn.Sequential(*(WritingBlock("copy_", reads=False) for _ in range(3)))
    before, x = copy.deepcopy(model.state_dict()), torch.randn(4, 8)
    rewired = rewire.compile(model, "ancre-ingoing", validate=False)
    rewire.diagnose(rewired, (x,), evaluate=False)
    rewire.ablate(rewired.train(), [(x,)], loss=lambda net, batch: net(*batch).square().mean())
    rewire.graph(rewired, (x,))
    assert all(torch.equal(value, before[name]) for name, value in rewired.state_dict().items() if name in before)


def test_modules_whose_train_sets_flags_are_not_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "Writes", None)
    private(tiny_model("llama"))
    with pytest.raises(TypeError):
        private(MergesInEvaluation(8))


def test_a_shared_copy_has_the_same_tensors() -> None:
    model = Counting()
    made = shared(model)
    assert all(a is b for a, b in zip(made.parameters(), model.parameters(), strict=True))
    assert made.calls is model.calls


class Noisy(nn.Module):
    """Scales its input by a random number of a generator that it holds."""

    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.generator = generator

    def drawn(self) -> float:
        if isinstance(self.generator, torch.Generator):
            return float(torch.rand((), generator=self.generator))
        return float(self.generator.uniform(0, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x * (1 + self.drawn())
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.parametrize(
    "generator",
    [torch.default_generator, random.random.__self__, np.random.random.__self__],  # type: ignore[attr-defined]
    ids=["torch", "random", "numpy"],
)
def test_global_generators_that_a_model_holds_are_not_copied(generator: Any) -> None:
    model, x = Noisy(generator), torch.randn(2, 4)
    rewired = rewire.compile(model, "residual", example_inputs=x)
    for seed in (1, 2, 1):
        results = []
        for net in (model, rewired):
            torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
            results.append(net(x))
        torch.testing.assert_close(*results)


def test_modules_that_say_how_they_are_copied_are() -> None:
    model = nn.Sequential(Copied(4, 4), Restored(4, 4))
    model[1].cache = "old"
    first, second = shared(model)
    assert first.how == "its own way" and second.cache == "made anew"
    assert second.weight is model[1].weight


@pytest.mark.parametrize("copied", [shared, private, copy.deepcopy])
def test_blocks_of_a_copy_use_its_connections(copied: Any) -> None:
    """Though they may be copied before the module that holds these."""
    made = copied(rewire.compile(Stack(PreNorm), "denseformer", validate=False))
    (connection,) = rewire.connections(made).values()
    assert made.layers[0]._depth.entries[0].in_use is connection


def test_threads_put_back_whether_torch_compiles() -> None:
    """Two that overlap: the first one to begin is the first one to end."""
    graphs: list[int] = []

    def compiles() -> bool:
        graphs.clear()
        torch.compiler.reset()
        torch.compile(lambda x: x + 1, backend=lambda graph, _: graphs.append(1) or graph)(torch.ones(1))
        return bool(graphs)

    one, two = uncompiled(), uncompiled()
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    assert not compiles()
    two.__exit__(None, None, None)
    assert compiles()


class Scaled(nn.Module):
    """Blocks, each with a factor that it has by another one of its marks."""

    def __init__(self, marked: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.factors = marked(dict.fromkeys(self.blocks, 2.0))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + self.factor(block) * block(x)
        return x

    def factor(self, block: nn.Module) -> float:
        return float(self.factors.get(id(block) if id(block) in self.factors else block, 1.0))


@pytest.mark.parametrize(
    ("marked", "how"),
    [
        (lambda factors: {id(block): factor for block, factor in factors.items()}, r"their id\(\)"),
        (weakref.WeakKeyDictionary, "weak references"),
        (lambda factors: [weakref.proxy(block) for block in factors], "weak proxies"),
    ],
)
def test_modules_known_by_what_a_copy_has_not_are_refused(marked: Any, how: str) -> None:
    """Copies would go another way than the model, all of them alike, so that comparing them shows nothing."""
    with pytest.raises(rewire.RewireError, match=f"'factors' of 'Scaled' knows modules by {how}"):
        rewire.compile(Scaled(marked), example_inputs=(torch.randn(2, 4),))


def test_modules_as_keys_and_proxies_of_others_are_no_reason_to_refuse() -> None:
    model, other = Scaled(dict), nn.Linear(2, 2)
    model.others = [weakref.proxy(other)]
    x = torch.randn(2, 4)
    torch.testing.assert_close(rewire.compile(model, example_inputs=(x,))(x), model(x))


def test_a_proxy_of_what_is_gone_cannot_be_copied() -> None:
    model, other = Scaled(dict), {1}
    model.other = weakref.proxy(other)
    del other
    with pytest.raises(rewire.RewireError, match=r"Scaled cannot be copied.*weakly-referenced object no longer exists"):
        rewire.compile(model, example_inputs=(torch.randn(2, 4),))


def test_parameters_keep_their_attributes_in_private_copies() -> None:
    """A forward may ask for them, as muP's readout layer does."""
    net = nn.Linear(4, 4)
    net.weight.scale = [2.0]
    copied = private(net).weight
    assert copied is not net.weight and copied.scale == [2.0] and copied.scale is not net.weight.scale
    assert private(net, "meta").weight.scale == [2.0]


def test_tables_that_modules_share() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    table: dict[str, Any] = {"first": model[0], "count": 3, "names": ["a"]}
    for module in model:
        module.table = table
    copied: Any = private(model)
    own = copied[0].table
    assert own is copied[1].table is not table
    assert (
        own["first"] is copied[0] and own["count"] == 3 and own["names"] == ["a"] and own["names"] is not table["names"]
    )
