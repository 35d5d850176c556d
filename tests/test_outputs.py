"""Generation with caches, padding, hidden states and attentions of rewired transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from interpreter import interpret, starts_interpreter
from mixing import ANCRE, all_gradients, assert_same, ids, llama, mixed
from slow_cases import one_in
from torch import Tensor

import rewire
from rewire.kernels import switch
from rewire.kernels.cpu import plain
from rewire.patterns.tiny import tiny_model


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


@pytest.mark.parametrize("model_type", one_in(3, WITH_HIDDEN_STATES))
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


@pytest.mark.parametrize("topology", ["attnres", "hc-dynamic", "mhc", "grn-v3", "muddformer", ANCRE])
def test_hidden_states_may_be_part_of_the_loss(topology: str) -> None:
    """Their reads, beside those of the next blocks, do not meet in what gradients written by hand have for one read."""
    model, tokens = mixed(llama(), topology), ids()

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        out = model(tokens, labels=tokens, output_hidden_states=True)
        (out.loss + sum(state.sin().sum() for state in out.hidden_states)).backward()
        return all_gradients(model)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain, "WORTHWHILE", 1 << 60)  # all is left to autograd
        patch.setattr(switch, "ON", False)
        by_autograd = gradients()
    assert_same(by_autograd, gradients(), 1e-5)


@pytest.mark.slow
@starts_interpreter
def test_the_same_by_kernels(tmp_path: Path) -> None:
    interpret(f"{__file__}::test_hidden_states_may_be_part_of_the_loss", tmp_path)


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
