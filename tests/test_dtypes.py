"""Casts, low precision and autocast of rewired models."""

from __future__ import annotations

import copy

import pytest
import torch
from comparing import assert_bitwise, assert_close, evaluate
from every_topology import PRESERVING, compiled, kinds_first
from mixing import ANCRE, ids, learned, mixed, train_step
from models import PreNorm, SeparatePreNorm, Stack, vectors

import rewire
from rewire.patterns.tiny import tiny_model


@pytest.mark.each_once
@pytest.mark.parametrize("cast", ["bfloat16", "half", "double"])
@pytest.mark.parametrize("model_type", ["llama", "bert", "mamba", "mamba2", "falcon_mamba"])  # the last: float32 states
def test_casts_leave_connection_weights_in_float32(model_type: str, cast: str) -> None:
    model = tiny_model(model_type).eval()
    # casts that change nothing in float32 are seen in a run; a trace shows them all
    rewired = rewire.compile(copy.deepcopy(model), ANCRE, validate=False, example_inputs=(ids(),))
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


@pytest.mark.each_once
@pytest.mark.parametrize("key", kinds_first(PRESERVING))
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_the_default_dtype_changes_nothing(key: str, default: torch.dtype) -> None:
    """Weights start as in float32, random ones, too; a validated model computes what it would."""
    model, given = Stack(SeparatePreNorm), vectors()
    expected = compiled(model, key, example_inputs=(given,))
    torch.set_default_dtype(default)
    try:
        rewired = compiled(model, key, example_inputs=(given,))
        assert_bitwise(evaluate(expected, (given,), {}), evaluate(rewired, (given,), {}))
    finally:
        torch.set_default_dtype(torch.float32)
    for (name, before), after in zip(expected.named_parameters(), rewired.parameters(), strict=True):
        assert torch.equal(before, after), name


def test_states_that_are_clamped_in_float16_alone() -> None:
    model = tiny_model("whisper").eval()
    given = {"input_features": torch.randn(1, model.config.num_mel_bins, 2 * model.config.max_source_positions)}
    given |= {"decoder_input_ids": ids(1, 4) % model.config.vocab_size}
    rewired = rewire.compile(model, ANCRE, example_inputs=given, validate=False).half()
    given["input_features"] = given["input_features"].half()
    with pytest.raises(rewire.OutOfOrder, match=r"clamp their states in float16 .* rewire the model in float16"):
        rewired(**given)
    again = rewire.compile(model.half(), ANCRE, example_inputs=given, validate=False)
    expected, actual = (each(**given).logits.detach().float() for each in (model, again))
    assert float((expected - actual).norm() / expected.norm()) < 3e-3


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
