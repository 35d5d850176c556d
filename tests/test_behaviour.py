"""What else users do with a rewired model: adapters, shared blocks, modes, frozen and meta weights, training."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import every_topology
import pytest
import torch
import torch.nn.functional as F
from comparing import assert_close, evaluate
from every_topology import FAMILIES
from mixing import ANCRE, assert_same, ids, learned, llama, mixed, train_step
from models import NanoGPT, PreNorm, Shared, Stack, token_ids, vectors
from torch import Tensor

import rewire
from rewire.patterns.tiny import tiny_model


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
    next(iter(rewire.connections(free).values())).set_values({"logits": weights[row, column]})

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
    rewired = rewire.compile(model, ANCRE, start="paper")
    assert all(p.is_meta for p in rewired.parameters())
    empty = rewired.to_empty(device="cpu")
    empty.load_state_dict(source.state_dict())
    reference = source(ids()).logits
    rotary = dict(source.named_buffers())
    with torch.no_grad():  # to_empty leaves buffers that are not saved without values
        for name, buffer in empty.named_buffers():
            buffer.copy_(rotary[name])
    assert torch.equal(empty.eval()(ids()).logits, reference)


@pytest.mark.parametrize("key", FAMILIES)
def test_a_forward_on_the_meta_device(key: str) -> None:
    model = every_topology.mixed(Stack(PreNorm), key).to("meta")
    x = vectors().to("meta")
    assert model(x).shape == Stack(PreNorm)(vectors()).shape
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).is_meta


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
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
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
