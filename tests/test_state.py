"""Copies, pickles, state dicts, optimiser states and restored models."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import assert_bitwise, evaluate
from mixing import ANCRE, ids, learned, llama, mixed, train_step
from models import MaskedStack, NanoGPT, PreNorm, Shared, Stack, WithMask, token_ids, vectors
from torch import nn

import rewire
from rewire.patterns.tiny import tiny_model


@pytest.mark.parametrize("make", [llama, lambda: Stack(PreNorm), Shared], ids=["llama", "stack", "shared"])
def test_a_deep_copy_is_independent(make: Any) -> None:
    model = mixed(make())
    inputs = (ids(),) if hasattr(model, "config") else (vectors(),)
    before = evaluate(model, inputs, {})
    twin = copy.deepcopy(model)
    assert_bitwise(before, evaluate(twin, inputs, {}))
    assert not {id(p) for p in model.parameters()} & {id(p) for p in twin.parameters()}
    optimiser = torch.optim.AdamW(twin.parameters(), lr=0.1, weight_decay=0.0)
    gradients = train_step(twin, *inputs)
    assert all(name in gradients for name in learned(twin))
    optimiser.step()
    assert_bitwise(before, evaluate(model, inputs, {}))
    assert all(p.grad is None for p in model.parameters())
    with torch.no_grad():  # the copy's blocks use the copy's weights
        for weight in learned(twin).values():
            weight.zero_()
    assert torch.equal(rewire.coefficients(twin)[next(iter(rewire.connections(twin)))][1, :2], torch.full((2,), 0.5))
    changed = evaluate(twin, inputs, {})[0][0]
    with torch.no_grad():
        for weight in learned(twin).values():
            weight[1] = 1.0
    assert not torch.allclose(changed, evaluate(twin, inputs, {})[0][0])


@pytest.mark.parametrize("topology", [ANCRE, "hc-static", "dca"])
@pytest.mark.parametrize("which", ["first", "last", "all"])
def test_copied_blocks_use_the_weights_of_the_model_that_holds_them(which: str, topology: str) -> None:
    """As scripts do that repeat layers: connections that a copied block brought would hide the model's."""
    model, twin = (mixed(Stack(PreNorm), topology, example_inputs=(vectors(),)) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    if which == "all":
        model.layers = copy.deepcopy(model.layers)
    else:
        model.layers[0 if which == "first" else -1] = copy.deepcopy(model.layers[0 if which == "first" else -1])
    with torch.no_grad():
        for weights in (learned(model), learned(twin)):
            for weight in weights.values():
                weight.mul_(1.5)
    expected, found = (train_step(one, vectors()) for one in (twin, model))
    for name in learned(model):
        torch.testing.assert_close(found[name], expected[name])


@pytest.mark.parametrize("topology", [ANCRE, "hc-static", "dca"])
@pytest.mark.parametrize("number", [0, 1, -1])
def test_blocks_of_another_rewired_model_are_refused(number: int, topology: str) -> None:
    """The first block would bring the connections of its own model, in silence; from the others nothing tells it."""
    model, other = (mixed(Stack(PreNorm), topology, example_inputs=(vectors(),)) for _ in range(2))
    expected, own, average = model(vectors()), model.layers[number], copy.deepcopy(model)
    alone = pickle.loads(pickle.dumps(own))
    for block in (other.layers[number], copy.deepcopy(other.layers[number]), alone, average.layers[number]):
        model.layers[number] = block
        with pytest.raises(rewire.OutOfOrder, match=r"were rewired in two models.*load_state_dict.*rewire\.restore"):
            model(vectors())
    model.layers[number] = own
    assert torch.equal(model(vectors()), expected)


def test_new_instances_of_a_rewired_class_have_no_connections() -> None:
    plain = nn.Sequential(nn.Linear(32, 32), PreNorm(), PreNorm(), nn.Linear(32, 5))
    x = torch.randn(2, 3, 32)
    model = rewire.compile(plain, "denseformer", example_inputs=(x,))
    for made in (model[:-1], type(model[1])()):
        with pytest.raises(rewire.RewireError, match=r"is a new instance of a rewired model's class.*copy\.deepcopy"):
            made(x)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))


class Towers(nn.Module):
    """Two rewired models whose trunks have the same name."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = (mixed(Stack(PreNorm, depth)) for depth in (2, 3))

    def forward(self, x: Any) -> Any:
        return self.actor(x).mean() + self.critic(x).square().mean()


def test_two_rewired_models_in_one_module() -> None:
    model, x = Towers(), vectors()
    found = rewire.connections(model)
    assert list(found) == ["actor.layers", "critic.layers"]
    assert [len(matrix) for matrix in rewire.coefficients(model).values()] == [2, 3]
    groups = rewire.parameter_groups(model, lr=1e-3, weight_decay=0.1, connection_lr=1e-2)
    plain = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    assert plain.isdisjoint(id(p) for connection in found.values() for p in connection.parameters())
    frozen, report = rewire.freeze(model, 0.0, example_inputs=(x,))
    assert len(report.trunks) == 2 and not learned(frozen)
    torch.testing.assert_close(frozen(x), model(x))
    with pytest.raises(rewire.RewireError, match=r"holds several rewired models.*actor\.layers, critic\.layers"):
        rewire.ablate(model, [x], loss=lambda net, batch: net(batch))
    outer = mixed(Stack(PreNorm, 2))
    outer.out = nn.Sequential(mixed(Stack(PreNorm, 3)), outer.out)
    assert [*rewire.connections(outer)] == ["out.0.layers", "layers"]


@pytest.mark.parametrize("topology", [ANCRE, "hc-static", "dca"])
@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts_that_were_cast(assign: bool, topology: str) -> None:
    """As a whole, to save space: connection weights are float32 again."""
    model, x = mixed(Stack(PreNorm), topology, example_inputs=(vectors(),)).bfloat16(), vectors().bfloat16()
    cast = {name: value.bfloat16() for name, value in model.state_dict().items() if value.is_floating_point()}
    others = {name: value for name, value in model.state_dict().items() if name not in cast}
    model.load_state_dict({**cast, **others}, assign=assign)
    assert {weight.dtype for weight in learned(model).values()} == {torch.float32}
    result = model(x)
    result.float().sum().backward()
    assert result.dtype == torch.bfloat16 and all(weight.grad is not None for weight in learned(model).values())


def test_a_rewired_model_deeper_inside() -> None:
    model = nn.ModuleDict({"a": nn.Sequential(mixed(tiny_model("gpt2"))), "b": mixed(tiny_model("gpt2"))})
    assert list(rewire.connections(model)) == ["a.0.transformer.h", "b.transformer.h"]


LOAD = """
import sys
import torch
import torchvision_stub
from models import vectors, token_ids
from rewire.kernels.cpu import plain

plain.WORTHWHILE = 0  # as in conftest.py: results are compared bitwise
model, inputs, expected = torch.load(sys.argv[1], weights_only=False)
with torch.no_grad():
    output = model(*inputs)
output = output.logits if hasattr(output, "logits") else output
assert torch.equal(output, expected), (output - expected).abs().max()
import rewire
assert list(rewire.connections(model)) == [sys.argv[2]]
assert "enter(" in rewire.source(model, sys.argv[3])
"""


@pytest.mark.parametrize("kind", [pytest.param("llama", marks=pytest.mark.slow), "masked"])
def test_save_and_load_in_another_process(tmp_path: Path, kind: str) -> None:
    made: dict[str, Any] = {
        "llama": (llama, ids(), "model.layers", "model.layers.0"),
        "masked": (lambda: MaskedStack(WithMask), vectors(), "layers", "layers.0"),
    }
    make, x, trunk, block = made[kind]
    model = mixed(make()).eval()
    with torch.no_grad():
        output = model(x)
    torch.save((model, (x,), getattr(output, "logits", output)), tmp_path / "model.pt")
    tests = Path(__file__).parent
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)]),
        "OMP_NUM_THREADS": str(torch.get_num_threads()),  # results are compared bitwise
    }
    command = [sys.executable, "-c", LOAD, str(tmp_path / "model.pt"), trunk, block]
    ran = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_state_dict_round_trip(tmp_path: Path) -> None:
    model = mixed(llama())
    torch.save(model.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    torch.manual_seed(99)
    other = rewire.compile(tiny_model("llama", seed=5).eval(), ANCRE, start="paper", validate=False)
    assert not torch.equal(other(ids()).logits, model(ids()).logits)
    assert other.load_state_dict(state).missing_keys == []
    assert torch.equal(other(ids()).logits, model(ids()).logits)


@pytest.mark.parametrize(
    ("recipe", "difference"),
    [
        ({"topology": "ancre-outgoing"}, "outgoing"),
        ({"topology": ANCRE, "temperature": 0.1}, "temperature.*0.01.*0.1"),
        ({"topology": ANCRE, "granularity": "sublayer"}, r"units: \[1, 1, 2, 2, 3, 3\] \(saved\)"),
        ({"topology": "denseformer"}, "topology: ancre-ingoing"),
    ],
)
def test_weights_of_another_recipe_are_refused(recipe: dict[str, Any], difference: str) -> None:
    state = mixed(llama()).state_dict()
    other = rewire.compile(llama(), validate=False, **recipe)
    before = {name: p.clone() for name, p in learned(other).items()}
    with pytest.raises((rewire.RewireError, RuntimeError), match=f"(?s)model.layers.*{difference}"):
        other.load_state_dict(state)
    assert list(before) == list(learned(other))


def test_a_plain_checkpoint_loads_without_connection_weights() -> None:
    model = tiny_model("llama", seed=5).eval()
    rewired = rewire.compile(llama(), "residual", validate=False)
    missing, unexpected = rewired.load_state_dict(model.state_dict(), strict=False)
    assert not unexpected and all("depth_connections" in key for key in missing)
    assert torch.equal(rewired(ids()).logits, model(ids()).logits)


@pytest.mark.parametrize("make", [llama, lambda: NanoGPT()], ids=["llama", "nanogpt"])
def test_optimiser_state_of_the_plain_model_resumes(make: Any) -> None:
    """The state of plain training, loaded by position, lands at the same parameters; a further step is the same."""
    inputs = (token_ids(),)

    def step(model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
        model.eval()
        optimiser.zero_grad()
        output = model(*inputs)
        (output.logits if hasattr(output, "logits") else output[0]).square().mean().backward()
        optimiser.step()

    model = make()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    step(model, optimiser)
    rewired = copy.deepcopy(rewire.compile(model, "residual", validate=False))
    original = [p for n, p in rewired.named_parameters() if "depth_connections" not in n]
    resumed = torch.optim.AdamW(original, lr=1e-2, weight_decay=0.0)
    resumed.load_state_dict(copy.deepcopy(optimiser.state_dict()))
    resumed.add_param_group({"params": next(iter(rewire.connections(rewired).values())).parameters(), "lr": 1e-3})
    for _ in range(2):
        step(model, optimiser)
        step(rewired, resumed)
    for (name, a), b in zip(model.named_parameters(), original, strict=True):
        assert torch.equal(a, b), name
        assert torch.equal(optimiser.state[a]["exp_avg_sq"], resumed.state[b]["exp_avg_sq"]), name


@pytest.mark.parametrize("model_type", ["llama", "bert", "t5", "swin"])
def test_restore(model_type: str) -> None:
    from rewire.patterns import first_given, patterns_for

    model = tiny_model(model_type)
    args, kwargs = first_given(patterns_for(model), "example_inputs")(model)
    rewired = mixed(model)
    attributes = {path: set(vars(module)) for path, module in model.named_modules()}
    plain = rewire.restore(rewired)
    assert_bitwise(evaluate(model, args, kwargs), evaluate(plain, args, kwargs))
    assert {path: type(module) for path, module in plain.named_modules()} == {
        path: type(module) for path, module in model.named_modules()
    }
    assert {path: set(vars(module)) for path, module in plain.named_modules()} == attributes
    assert all(a is b for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    assert all(not module._forward_hooks for module in plain.modules()) or model_type not in ("llama",)
    assert rewire.connections(rewired)  # untouched
    again = rewire.compile(plain, "residual", validate=False)
    assert_bitwise(evaluate(model, args, kwargs), evaluate(again, args, kwargs))


@pytest.mark.parametrize("name", ["rewire.runtime.stream Layout", "rewire.runtime.depth Entry"])
def test_whole_models_find_classes_where_they_were_when_they_were_pickled(name: str) -> None:
    module, cls = name.split()
    assert pickle.loads(f"c{module}\n{cls}\n.".encode()).__name__ == cls
