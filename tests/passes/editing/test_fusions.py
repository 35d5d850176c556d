from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import peft
import pytest
import torch
from comparing import assert_bitwise, evaluate
from mixing import ids, llama, mixed
from models import PreNorm, Stack, images, vectors
from torch import Tensor, nn

import rewire
from rewire.code.edited import is_edited
from rewire.mixes.norms import obstacle
from rewire.passes.editing.fusions import NORMS, Fusion, fusions
from rewire.patterns.tiny import timm_model, tiny_model


def fused(model: nn.Module) -> list[str]:
    return [fusion.module for fusion in fusions(model) if fusion.obstacle is None]


def layers(pattern: str, *norms: str) -> list[str]:
    return [pattern.format(layer, norm) for layer in range(3) for norm in norms]


#: Model -> the norms that follow a read, in the order in which they run.
FUSED: dict[str, list[str]] = {
    "llama": layers("model.layers.{}.{}", "input_layernorm", "post_attention_layernorm"),
    "gemma": layers("model.layers.{}.{}", "input_layernorm", "post_attention_layernorm"),
    "gpt2": layers("transformer.h.{}.{}", "ln_1", "ln_2"),
    "vit": layers("vit.layers.{}.{}", "layernorm_before", "layernorm_after"),
    "falcon": layers("transformer.h.{}.{}", "input_layernorm"),
    "gptj": layers("transformer.h.{}.{}", "ln_1"),
    "bert": [],
    "olmo": [],
}


@pytest.mark.parametrize("model_type", FUSED)
def test_norms_that_follow_a_read_are_fused(model_type: str) -> None:
    rewired = mixed(tiny_model(model_type))
    assert fused(rewired) == FUSED[model_type]
    sources = [rewire.source(rewired, name) for name, m in rewired.named_modules() if is_edited(m)]
    assert sum(source.count("depth.apply(") for source in sources) == len(FUSED[model_type])


def test_the_reasons_say_why_others_are_not() -> None:
    reasons = {fusion.module: fusion.obstacle for fusion in fusions(mixed(tiny_model("olmo")))}
    assert list(reasons) == layers("model.layers.{}.{}", "input_layernorm", "post_attention_layernorm")
    assert {"its parameters are not those of an RMSNorm or LayerNorm with a weight"} == set(reasons.values())


def test_norms_of_q_k_and_v_apart_are_not_fused() -> None:
    rewired = mixed(llama(), "dca")
    assert fused(rewired) == layers("model.layers.{}.{}", "post_attention_layernorm")
    assert "depth.apply(self.post_attention_layernorm, " in rewire.source(rewired, "model.layers.0")
    source = rewire.source(rewired, "model.layers.0")
    assert "norm=self.input_layernorm" not in source and "norm=self.post_attention_layernorm" in source


def test_norms_over_the_channels_of_images_are_not_fused() -> None:
    """PoolFormer's GroupNorm of one group has the formula of a LayerNorm, over other dimensions."""
    rewired = mixed(timm_model("poolformer_s12"))
    assert not fused(rewired) and len(fusions(rewired)) > 10
    assert all("normed" not in rewire.source(rewired, f"stages.0.blocks.{n}") for n in range(2))


def test_the_source_says_which_norms_follow_a_read() -> None:
    source = rewire.source(mixed(Stack(PreNorm)), "layers.0")
    assert "x = depth.open(x, norm=self.ln_1)" in source and "norm=self.ln_2)" in source
    assert "self.attn(depth.apply(self.ln_1, x))" in source and "self.mlp(depth.apply(self.ln_2, x))" in source


def test_a_norm_is_used_at_its_own_place_only_if_the_state_is_still_that_value() -> None:
    class Changed(PreNorm):
        def forward(self, x: Tensor) -> Tensor:
            h = self.ln_1(x * 2)
            return x + self.mlp(self.ln_1(x) + h)

    model = Stack(Changed)
    x = vectors()
    for topology in ("residual", "denseformer"):
        rewired = rewire.compile(model, topology, example_inputs=(x,))
        torch.testing.assert_close(rewired(x), model(x))


def test_the_first_norm_is_fused_and_others_get_what_was_read() -> None:
    class TwoNorms(PreNorm):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.attn(self.ln_1(x)) + self.mlp(self.ln_2(x))

    rewired = mixed(Stack(TwoNorms))
    assert fused(rewired) == ["layers.0.ln_1", "layers.1.ln_1", "layers.2.ln_1"]
    source = rewire.source(rewired, "layers.0")
    assert "depth.apply(self.ln_1, x)" in source and "self.mlp(self.ln_2(x))" in source


def test_the_report_follows_what_is_done_to_the_model() -> None:
    rewired = mixed(Stack(PreNorm))
    assert fusions(rewired)[0] == Fusion("layers.0.ln_1", None)
    handle = rewired.layers[0].ln_1.register_forward_hook(lambda *_: None)
    rewired.layers[1].ln_2.__class__ = type("FSDPLayerNorm", (type("FSDPModule", (), {}), nn.LayerNorm), {})
    rewired.layers[2].ln_1 = nn.LayerNorm(32)
    reasons = {fusion.module: fusion.obstacle for fusion in fusions(rewired) if fusion.obstacle}
    assert reasons == {
        "layers.0.ln_1": "it has hooks",
        "layers.1.ln_2": "it is an FSDP module of its own",
        "layers.2.ln_1": "it was not found to be a norm when the model was rewired",
    }
    handle.remove()
    assert "layers.0.ln_1" in fused(rewired)
    assert fusions(Stack(PreNorm)) == []


def test_hooks_on_norms_are_called() -> None:
    rewired, seen = mixed(llama()), []
    for layer in rewired.model.layers:
        layer.input_layernorm.register_forward_hook(lambda _module, args, result: seen.append((args[0], result)))
    rewired(ids())
    assert len(seen) == 3
    for (x, result), layer in zip(seen, rewired.model.layers, strict=True):
        assert torch.equal(result, type(layer.input_layernorm).forward(layer.input_layernorm, x))


def test_restore_leaves_nothing_behind() -> None:
    model = llama()
    plain = rewire.restore(mixed(model))
    for (name, a), (_, b) in zip(model.named_modules(), plain.named_modules(), strict=True):
        assert a.__dict__.keys() == b.__dict__.keys(), name
    assert fusions(plain) == [] and all(obstacle(layer.input_layernorm) for layer in plain.model.layers)
    assert_bitwise(evaluate(model, (ids(),), {}), evaluate(plain, (ids(),), {}))


def test_the_original_is_left_alone() -> None:
    model = llama()
    before = {name: set(m.__dict__) for name, m in model.named_modules()}
    mixed(model)
    assert before == {name: set(m.__dict__) for name, m in model.named_modules()}


def saved_and_loaded(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, saved_and_loaded, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_fused_too(copied: Any) -> None:
    rewired = mixed(llama())
    twin = copied(rewired)
    assert fused(twin) == fused(rewired) == FUSED["llama"]
    assert_bitwise(evaluate(rewired, (ids(),), {}), evaluate(twin, (ids(),), {}))
    twin.model.layers[0].input_layernorm.register_forward_hook(lambda *_: None)
    assert fused(rewired) == FUSED["llama"]


def test_nothing_is_added_to_the_state_dict() -> None:
    model = llama()
    assert [k for k in mixed(model).state_dict() if "depth_connections" not in k] == list(model.state_dict())
    assert NORMS not in vars(model.model.layers[0])


@pytest.mark.parametrize("targets", [["q_proj", "down_proj"], ["q_proj", "down_proj", "input_layernorm"]])
def test_peft(targets: list[str]) -> None:
    """Adapters on projections change nothing about norms; a norm that is trained as a copy is called."""
    rewired = mixed(llama())
    saved = [name for name in targets if "norm" in name]
    config = peft.LoraConfig(r=2, target_modules=targets[:2], modules_to_save=saved or None, init_lora_weights=False)
    tuned = peft.get_peft_model(rewired, config)
    prefix = "base_model.model."
    assert fused(tuned) == [prefix + name for name in FUSED["llama"] if name.rpartition(".")[2] not in saved]
    before = tuned(ids()).logits
    tuned(ids()).logits.square().mean().backward()
    trained = [name for name, p in tuned.named_parameters() if p.grad is not None]
    assert any("lora_B" in name for name in trained) and any("input_layernorm" in name for name in trained) == bool(
        saved
    )
    if saved:
        with torch.no_grad():
            for name, p in tuned.named_parameters():
                if "modules_to_save" in name:
                    p.mul_(2)
        assert not torch.allclose(tuned(ids()).logits, before)


def test_a_norm_can_be_replaced() -> None:
    rewired, plain = mixed(Stack(PreNorm), "residual"), Stack(PreNorm)
    plain.load_state_dict(rewire.restore(rewired).state_dict())
    for model in (plain, rewired):
        torch.manual_seed(3)
        model.layers[1].ln_2 = nn.Sequential(nn.Linear(32, 32), nn.Tanh())
        model.layers[0].ln_1 = nn.Identity()
    assert_bitwise(evaluate(plain, (vectors(),), {}), evaluate(rewired, (vectors(),), {}))


def test_images() -> None:
    rewired = mixed(timm_model("vit_tiny_patch16_224", img_size=32, depth=2))
    assert fused(rewired) == [f"blocks.{n}.{norm}" for n in range(2) for norm in ("norm1", "norm2")]
    assert rewired(images(size=32)).isfinite().all()
