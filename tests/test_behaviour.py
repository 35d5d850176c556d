"""What users do with a rewired model: generate, checkpoint, cast, copy, save, resume, compile, fine-tune."""

from __future__ import annotations

import copy
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import (
    MaskedStack,
    NanoGPT,
    PreNorm,
    Shared,
    Stack,
    WithMask,
    assert_bitwise,
    assert_close,
    evaluate,
    images,
    token_ids,
    vectors,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rewire
from rewire.patterns.tiny import tiny_model

ANCRE = "ancre-ingoing"


def learned(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if "depth_connections" in name}


def mixed(model: nn.Module, topology: str = ANCRE, **options: Any) -> nn.Module:
    """Rewired, with connection weights that really mix: an answer that ignores them is wrong."""
    rewired = rewire.compile(model, topology, start="paper", validate=False, **options)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in learned(rewired).values():
            weight.add_(0.01 * torch.randn(weight.shape, generator=generator))
    return rewired


def llama() -> nn.Module:
    return tiny_model("llama").eval()


def ids(batch: int = 2, length: int = 12) -> Tensor:
    return token_ids(batch, length, 97)


def all_gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(expected: dict[str, Tensor], actual: dict[str, Tensor], tolerance: float = 0.0) -> None:
    assert list(expected) == list(actual) and expected
    for name, value in expected.items():
        if tolerance == 0:
            assert torch.equal(value, actual[name]), name
        else:
            largest = max(float(v.norm()) for v in expected.values())
            error = float((value.double() - actual[name].double()).norm()) / max(float(value.norm()), 1e-3 * largest)
            assert error <= tolerance, (name, error)


# -- transformers: generation, masks, outputs --------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma2", "t5", "bart"])
def test_generation_with_a_cache(model_type: str) -> None:
    model = tiny_model(model_type).eval()
    model.generation_config.eos_token_id = None
    if model_type == "t5":
        model.generation_config.decoder_start_token_id = 0
    options: dict[str, Any] = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids(), use_cache=True, **options)
    preserving = rewire.compile(model, ANCRE, validate=False)
    assert torch.equal(preserving.generate(ids(), use_cache=True, **options), expected)
    other = mixed(model)
    cached = other.generate(ids(), use_cache=True, **options)
    assert torch.equal(cached, other.generate(ids(), use_cache=False, **options))
    with torch.no_grad():
        inputs = {"input_ids": ids()}
        if model.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = ids()
        assert not torch.allclose(other(**inputs).logits, model(**inputs).logits, atol=1e-3)


@pytest.mark.parametrize("start", ["preserve", "paper"])
def test_left_padding(start: str) -> None:
    model = llama()
    rewired = rewire.compile(model, ANCRE, validate=False) if start == "preserve" else mixed(model)
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), ids()], dim=1)
    mask = (torch.arange(15) >= 3).long().expand(2, -1)
    with torch.no_grad():
        logits = rewired(padded, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits[:, 3:]
        assert torch.allclose(logits, rewired(ids()).logits, atol=1e-5)
        assert not torch.allclose(rewired(padded).logits[:, 3:], logits, atol=1e-5)
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    generated = rewired.generate(padded, attention_mask=mask, **options)[:, 15:]
    assert torch.equal(generated, rewired.generate(ids(), **options)[:, 12:])


WITH_HIDDEN_STATES = [
    *("llama", "gpt2", "gpt_neox", "opt", "bert", "albert", "distilbert", "t5", "bart", "whisper"),
    *("vit", "dinov2", "swin", "convnext", "resnet", "clip", "wav2vec2"),
]


@pytest.mark.parametrize("model_type", WITH_HIDDEN_STATES)
def test_hidden_states_are_tensors(model_type: str) -> None:
    from rewire.patterns import first_given, patterns_for

    model = tiny_model(model_type).eval()
    args, kwargs = first_given(patterns_for(model), "example_inputs")(model)
    kwargs["output_hidden_states"] = True
    expected = model(*args, **kwargs)
    plain = rewire.compile(model, "residual", validate=False)(*args, **kwargs)
    rewired = mixed(model)(*args, **kwargs)
    if model_type == "clip":
        expected, plain, rewired = (output.text_model_output for output in (expected, plain, rewired))
    for name in ("hidden_states", "encoder_hidden_states", "decoder_hidden_states"):
        states = getattr(expected, name, None)
        if states is None:
            continue
        assert len(states) == len(getattr(plain, name)) == len(getattr(rewired, name)) > 1
        for number, (a, b, c) in enumerate(zip(states, getattr(plain, name), getattr(rewired, name), strict=True)):
            assert type(b) is type(c) is Tensor and torch.equal(a, b), (name, number)
            assert a.shape == c.shape and bool(c.isfinite().all())
        assert torch.equal(getattr(rewired, name)[0], states[0])


def test_hidden_states_are_what_the_next_block_reads() -> None:
    rewired = mixed(llama())
    read: list[Tensor] = []
    for layer in rewired.model.layers:
        layer.input_layernorm.register_forward_pre_hook(lambda _module, args: read.append(args[0]))
    states = rewired(ids(), output_hidden_states=True).hidden_states
    assert len(states) == 4 and len(read) == 3
    for state, seen in zip(states, read, strict=False):
        assert torch.equal(state, seen)


@pytest.mark.parametrize("model_type", ["bert", "t5", "llama"])
def test_attentions(model_type: str) -> None:
    model = tiny_model(model_type).eval()
    model.set_attn_implementation("eager")
    inputs: dict[str, Any] = {"input_ids": ids(), "output_attentions": True}
    if model_type == "t5":
        inputs["decoder_input_ids"] = ids(length=7)
    expected = model(**inputs)
    rewired = rewire.compile(model, "residual", validate=False)(**inputs)
    names = ("encoder_attentions", "decoder_attentions", "cross_attentions") if model_type == "t5" else ("attentions",)
    for name in names:
        assert len(getattr(expected, name)) == len(getattr(rewired, name)) == 3
        for a, b in zip(getattr(expected, name), getattr(rewired, name), strict=True):
            assert torch.equal(a, b)


# -- activation checkpointing ------------------------------------------------------------------------------------------


def train_step(model: nn.Module, *inputs: Any, **kwargs: Any) -> dict[str, Tensor]:
    model.zero_grad()
    output = model(*inputs, **kwargs)
    output = output.logits if hasattr(output, "logits") else output
    output.float().square().mean().backward()
    return all_gradients(model)


@pytest.mark.parametrize(
    ("model_type", "granularity"),
    [
        (t, g)
        for t in ("llama", "gpt2", "bert", "vit", "t5")
        for g in ("block", "sublayer")
        if (t, g) != ("bert", "block")
    ],
)
def test_gradient_checkpointing_recomputes(model_type: str, granularity: str) -> None:
    model = mixed(tiny_model(model_type), granularity=granularity).train()
    inputs: dict[str, Any] = {"pixel_values": images(size=model.config.image_size)} if model_type == "vit" else {}
    if model_type != "vit":
        inputs["input_ids"] = ids()
    if model_type == "t5":
        inputs["decoder_input_ids"] = ids(length=7)
    suffixes = {"llama": "mlp", "gpt2": "mlp", "bert": "intermediate", "vit": "mlp", "t5": "DenseReluDense"}
    calls: list[str] = []
    for path, module in model.named_modules():
        if path.endswith(suffixes[model_type]):
            module.register_forward_hook(lambda *_, path=path: calls.append(path))
    expected = train_step(model, **inputs)
    once = len(calls)
    assert once == 6 if model_type == "t5" else once == 3
    calls.clear()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    actual = train_step(model, **inputs)
    assert len(calls) == 2 * once
    assert_same(expected, actual, 1e-6 if model_type == "t5" else 0.0)  # its parts' gradients add up in another order
    assert any("depth_connections" in name for name in actual)


def test_reentrant_checkpointing_is_refused() -> None:
    model = mixed(llama()).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(rewire.UnsupportedCall, match=r"model\.layers\.0.*use_reentrant=False"):
        model(ids())


class CheckpointedStack(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant) if self.checkpointed else layer(x)
        return self.out(x)

    checkpointed, reentrant = False, False


def test_reentrant_checkpointing_of_own_blocks_is_refused() -> None:
    model = mixed(CheckpointedStack(PreNorm))
    model.checkpointed = model.reentrant = True
    with pytest.raises(rewire.UnsupportedCall, match=r"layers\.0.*use_reentrant=False"):
        model(vectors())


@pytest.mark.parametrize("granularity", ["block", "sublayer"])
@pytest.mark.parametrize("topology", [ANCRE, "denseformer"])
def test_torch_checkpoint_around_blocks(topology: str, granularity: str) -> None:
    model = mixed(CheckpointedStack(PreNorm), topology, granularity=granularity)
    calls: list[int] = []
    model.layers[0].mlp.register_forward_hook(lambda *_: calls.append(0))
    expected = train_step(model, vectors())
    model.checkpointed = True
    assert_same(expected, train_step(model, vectors()))
    assert len(calls) == 3


@pytest.mark.parametrize("checkpointed", [False, True])
def test_two_forwards_before_one_backward(checkpointed: bool) -> None:
    model = mixed(CheckpointedStack(PreNorm))
    model.checkpointed = checkpointed
    first, second = vectors(), 2 * vectors().flip(0)
    separate = {}
    for x in (first, second):
        for name, gradient in train_step(model, x).items():
            separate[name] = separate.get(name, 0) + gradient
    model.zero_grad()
    a, b = model(first), model(second)
    (a.square().mean() + b.square().mean()).backward()
    assert_same(separate, all_gradients(model), 1e-6)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_interleaved_micro_batches(checkpointed: bool) -> None:
    """Two forwards advance block by block in turns, and their backwards run in the other order."""
    model = mixed(CheckpointedStack(PreNorm))
    first, second = vectors(), 2 * vectors().flip(0)
    expected = {}
    for x in (first, second):
        for name, gradient in train_step(model, x).items():
            expected[name] = expected.get(name, 0) + gradient
    model.zero_grad()
    a, b = model.inp(first), model.inp(second)
    for layer in model.layers:
        a = checkpoint(layer, a, use_reentrant=False) if checkpointed else layer(a)
        b = checkpoint(layer, b, use_reentrant=False) if checkpointed else layer(b)
    assert torch.equal(model.out(a), model(first)) and torch.equal(model.out(b), model(second))
    model.out(a).square().mean().backward()
    model.out(b).square().mean().backward()
    assert_same(expected, all_gradients(model), 1e-6)


# -- dtypes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cast", ["bfloat16", "half", "double"])
@pytest.mark.parametrize("model_type", ["llama", "bert"])
def test_casts_leave_connection_weights_in_float32(model_type: str, cast: str) -> None:
    model = tiny_model(model_type).eval()
    rewired = rewire.compile(copy.deepcopy(model), ANCRE, validate=False)
    values = {name: p.clone() for name, p in learned(rewired).items()}
    getattr(rewired, cast)()
    getattr(model, cast)()
    assert {p.dtype for n, p in rewired.named_parameters() if n not in values} == {next(model.parameters()).dtype}
    for name, parameter in learned(rewired).items():
        assert parameter.dtype == torch.float32 and torch.equal(parameter, values[name])
    with torch.no_grad():
        expected, actual = model(ids()).logits, rewired(ids()).logits
    assert actual.dtype == expected.dtype
    tolerance = {"bfloat16": 2e-2, "half": 3e-3, "double": 1e-5}[cast]
    assert float((expected.float() - actual.float()).norm() / expected.float().norm()) < tolerance


def test_to_moves_and_keeps_the_dtype() -> None:
    rewired = mixed(Stack(PreNorm)).to("cpu", torch.bfloat16)
    assert {p.dtype for p in learned(rewired).values()} == {torch.float32}
    assert rewired.out.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("topology", ["residual", ANCRE, "denseformer"])
def test_a_bfloat16_model(topology: str) -> None:
    model = tiny_model("llama").to(torch.bfloat16)
    rewired = rewire.compile(model, topology)  # validates
    expected, actual = evaluate(model, (ids(),), {}), evaluate(rewired, (ids(),), {})
    assert actual[0][0].dtype == torch.bfloat16
    if topology == "residual":
        assert_bitwise(expected, actual)
    else:
        assert_close(expected, actual, 2e-2, 6e-2)
        gradients = train_step(rewired, ids())
        assert all(gradients[name].dtype == torch.float32 for name in learned(rewired))


@pytest.mark.parametrize("topology", ["residual", ANCRE])
def test_autocast(topology: str) -> None:
    model = Stack(PreNorm)
    rewired = rewire.compile(model, topology, validate=False)
    with torch.autocast("cpu", torch.bfloat16):
        expected, actual = evaluate(model, (vectors(),), {}), evaluate(rewired, (vectors(),), {})
    assert expected[0][0].dtype == actual[0][0].dtype == torch.bfloat16
    if topology == "residual":
        assert_bitwise(expected, actual)
    else:
        assert_close(expected, actual, 2e-2, 6e-2)


# -- copies, files, state ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [llama, lambda: Stack(PreNorm), Shared], ids=["llama", "stack", "shared"])
def test_a_deep_copy_is_independent(make: Any) -> None:
    model = mixed(make())
    inputs = (ids(),) if hasattr(model, "config") else (vectors(),)
    before = evaluate(model, inputs, {})
    twin = copy.deepcopy(model)
    assert_bitwise(before, evaluate(twin, inputs, {}))
    assert not {id(p) for p in model.parameters()} & {id(p) for p in twin.parameters()}
    optimiser = torch.optim.AdamW(twin.parameters(), lr=0.1)
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


LOAD = """
import sys
import torch
import torchvision_stub
from models import vectors, token_ids

model, inputs, expected = torch.load(sys.argv[1], weights_only=False)
with torch.no_grad():
    output = model(*inputs)
output = output.logits if hasattr(output, "logits") else output
assert torch.equal(output, expected), (output - expected).abs().max()
import rewire
assert list(rewire.connections(model)) == [sys.argv[2]]
assert "enter(" in rewire.source(model, sys.argv[3])
"""


@pytest.mark.parametrize("kind", ["llama", "masked"])
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
    other = rewire.compile(tiny_model("llama", seed=5).eval(), ANCRE, validate=False)
    assert not torch.equal(other(ids()).logits, model(ids()).logits)
    assert other.load_state_dict(state).missing_keys == []
    assert torch.equal(other(ids()).logits, model(ids()).logits)


@pytest.mark.parametrize(
    ("recipe", "difference"),
    [
        ({"topology": "ancre-outgoing"}, "outgoing"),
        ({"topology": ANCRE, "temperature": 0.1}, "temperature.*0.01.*0.1"),
        ({"topology": ANCRE, "granularity": "sublayer"}, r"units: \[1, 1, 2, 2, 3, 3\] \(saved\)"),
        ({"topology": "denseformer"}, "topology: ANCRe"),
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
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step(model, optimiser)
    rewired = copy.deepcopy(rewire.compile(model, "residual", validate=False))
    original = [p for n, p in rewired.named_parameters() if "depth_connections" not in n]
    resumed = torch.optim.AdamW(original, lr=1e-2)
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


# -- torch.compile -----------------------------------------------------------------------------------------------------


@pytest.fixture
def _fresh_dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


compiles = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # which Dynamo itself hides


@pytest.mark.usefixtures("_fresh_dynamo")
@compiles
@pytest.mark.parametrize(("topology", "granularity"), [(ANCRE, "sublayer"), ("denseformer", "block")])
def test_torch_compile_trains_like_eager(topology: str, granularity: str) -> None:
    model = mixed(llama(), topology, granularity=granularity)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        expected = model(ids(), use_cache=False).logits
        assert torch.allclose(compiled(ids(), use_cache=False).logits, expected, atol=1e-5)
    gradients = train_step(model, ids(), use_cache=False)
    model.zero_grad()
    compiled(ids(), use_cache=False).logits.square().mean().backward()
    assert_same(gradients, all_gradients(model), 1e-5)


@pytest.mark.usefixtures("_fresh_dynamo")
@compiles
def test_torch_compile_with_inductor() -> None:
    model = mixed(Stack(PreNorm, depth=2))
    gradients, expected = train_step(model, vectors()), model(vectors())
    compiled = torch.compile(model, fullgraph=True)
    model.zero_grad()
    output = compiled(vectors())
    assert torch.allclose(output, expected, atol=1e-5)
    output.square().mean().backward()
    assert_same(gradients, all_gradients(model), 1e-5)


@pytest.mark.usefixtures("_fresh_dynamo")
@compiles
def test_torch_compile_with_a_dynamic_length() -> None:
    model = mixed(llama())
    frames: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        frames.append(graph)
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    with torch.no_grad():
        for length in (7, 11, 16, 23):
            x = ids(length=length)
            actual = compiled(x, use_cache=False).logits
            assert torch.allclose(actual, model(x, use_cache=False).logits, atol=1e-5)
    assert len(frames) == 1


@pytest.mark.usefixtures("_fresh_dynamo")
@compiles
def test_equal_layers_share_one_compiled_frame() -> None:
    """What regional compilation rests on: layers of equal code are instances of one class."""
    model = mixed(Stack(PreNorm, depth=4))
    assert len({type(layer) for layer in model.layers}) == 1
    frames: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        frames.append(graph)
        return graph.forward

    expected = model(vectors())
    for layer in model.layers:
        layer.compile(backend=backend)
    assert torch.allclose(model(vectors()), expected, atol=1e-5)
    assert 1 <= len(frames) <= 8


# -- other libraries and uses ------------------------------------------------------------------------------------------


def test_peft_lora() -> None:
    peft = importlib.import_module("peft")
    model = mixed(llama())
    before = model(ids()).logits
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    tuned = peft.get_peft_model(model, config).eval()
    adapted = tuned(input_ids=ids()).logits
    assert not torch.allclose(adapted, before, atol=1e-4)
    trained = {name for name, p in tuned.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    tuned(input_ids=ids()).logits.square().mean().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in tuned.parameters() if p.requires_grad)
    merged = tuned.merge_and_unload()
    assert torch.allclose(merged(ids()).logits, adapted, atol=1e-5)
    assert list(rewire.connections(merged)) == ["model.layers"]


@pytest.mark.parametrize("granularity", ["block", "sublayer"])
def test_a_shared_block(granularity: str) -> None:
    model = Shared()
    rewired = rewire.compile(model, ANCRE, granularity=granularity, validate=False)  # type: ignore[arg-type]
    (connection,) = rewire.connections(rewired).values()
    assert connection.layout.dims.depth == (3 if granularity == "block" else 6)
    assert len({id(layer) for layer in rewired.layers}) == 1
    assert_close(evaluate(model, (vectors(),), {}), evaluate(rewired, (vectors(),), {}))
    weights = torch.rand(connection.layout.dims.depth, connection.layout.dims.depth).tril()
    free = rewire.compile(model, "ancre-none", granularity=granularity, validate=False)  # type: ignore[arg-type]
    row, column = torch.tril_indices(*weights.shape)
    with torch.no_grad():
        next(iter(learned(free).values())).copy_(weights[row, column])

    def branches(x: Tensor) -> Iterator[Any]:
        block = model.layers[0]
        if granularity == "sublayer":
            for _ in range(3):
                yield lambda x: block.attn(block.ln_1(x))
                yield lambda x: block.mlp(block.ln_2(x))
        else:
            for _ in range(3):
                yield lambda x: block(x) - x

    states = [model.inp(vectors())]
    for t, branch in enumerate(branches(states[0])):
        states.append(branch(states[-1]) + sum(weights[t, i] * states[i] for i in range(t + 1)))
    assert torch.allclose(free(vectors()), model.out(states[-1]), atol=1e-5)


def test_training_mode_is_kept_and_followed() -> None:
    model = NanoGPT()
    model.eval()
    assert not any(module.training for module in rewire.compile(model, "residual", validate=False).modules())
    model.train()
    rewired = rewire.compile(model, "residual", example_inputs=(token_ids(),))
    assert all(module.training for module in rewired.modules()) and all(m.training for m in model.modules())
    assert not torch.equal(rewired(token_ids())[0], rewired(token_ids())[0])  # dropout
    rewired.eval()
    assert torch.equal(rewired(token_ids())[0], rewired(token_ids())[0])


@pytest.mark.parametrize("model_type", ["llama", "bert"])
def test_a_frozen_model_learns_its_connections_only(model_type: str) -> None:
    model = tiny_model(model_type)
    model.requires_grad_(False)
    rewired = rewire.compile(model, ANCRE, start="paper")  # validates without parameter gradients
    assert not any(p.requires_grad for n, p in rewired.named_parameters() if "depth_connections" not in n)
    assert all(p.requires_grad for p in learned(rewired).values())
    gradients = train_step(rewired, ids())
    assert set(gradients) == set(learned(rewired))
    assert all(bool(gradient.any()) for gradient in gradients.values())


def test_meta_device_then_weights() -> None:
    source = mixed(llama())
    with torch.device("meta"):
        model = tiny_model("llama")
    rewired = rewire.compile(model, ANCRE)
    assert all(p.is_meta for p in rewired.parameters())
    empty = rewired.to_empty(device="cpu")
    empty.load_state_dict(source.state_dict())
    reference = source(ids()).logits
    rotary = dict(source.named_buffers())
    with torch.no_grad():  # to_empty leaves buffers that are not saved without values
        for name, buffer in empty.named_buffers():
            buffer.copy_(rotary[name])
    assert torch.equal(empty.eval()(ids()).logits, reference)


@pytest.mark.parametrize("start", ["preserve", "paper"])
def test_connection_weights_have_start_values_after_to_empty(start: Any) -> None:
    with torch.device("meta"):
        model = Stack(PreNorm)
    rewired = rewire.compile(model, ANCRE, start=start).to_empty(device="cpu")
    expected = learned(rewire.compile(Stack(PreNorm), ANCRE, start=start, validate=False))
    with torch.no_grad():
        for weight in learned(rewired).values():
            weight.fill_(float("nan"))
    for connection in rewire.connections(rewired).values():
        connection.reset_parameters()
    assert_same(dict(expected), learned(rewired))


def test_training_moves_the_connections_and_lowers_the_loss() -> None:
    model = rewire.compile(NanoGPT(), ANCRE, example_inputs=(token_ids(), token_ids()))
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    start = {name: matrix.clone() for name, matrix in rewire.coefficients(model).items()}
    losses = []
    for _ in range(30):
        optimiser.zero_grad()
        _, loss = model(token_ids(), token_ids().roll(-1, 1))
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    for name, matrix in rewire.coefficients(model).items():
        assert (matrix - start[name]).abs().max() > 1e-7
        assert torch.allclose(matrix.sum(1), torch.ones(len(matrix)))


def test_cross_entropy_of_a_plain_pytorch_loop() -> None:
    """The reference for mixing: the paper's formula written out, against the rewritten model."""
    model = NanoGPT().eval()
    rewired = mixed(model).eval()
    p = rewire.coefficients(rewired)["transformer.h"]
    h = model.transformer
    states = [h.wte(token_ids()) + h.wpe(torch.arange(9))]
    for t, block in enumerate(h.h):
        x = states[-1]
        states.append(block(x) - x + sum(p[t, i] * states[i] for i in range(t + 1)))
    logits = model.lm_head(h.ln_f(states[-1]))
    loss = F.cross_entropy(logits.flatten(0, 1), token_ids().flatten())
    actual, actual_loss = rewired(token_ids(), token_ids())
    assert torch.allclose(actual, logits, atol=1e-5) and torch.allclose(actual_loss, loss, atol=1e-5)
