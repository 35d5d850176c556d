"""What the registry says of each architecture, held against the models themselves."""

import importlib
import logging
import sys
import types
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch
from torch import nn

import rewire
from rewire.errors import AlreadyConnected, UnknownName
from rewire.passes.find import Found, find
from rewire.passes.finding.projections import find_projections
from rewire.passes.prepare import Prepared, without_inputs
from rewire.patterns import Pattern, first_given, list_patterns, patterns_for, register_pattern
from rewire.patterns import pattern as pattern_module
from rewire.patterns.pattern import is_pretrained
from rewire.patterns.tiny import timm_model, tiny_config, tiny_model
from rewire.registry import Registry
from rewire.trunk import Site, Trunk

LLAMA = {"self_attn": "attention", "mlp": "ffn"}
BERT = {"self": "attention", "intermediate": "ffn"}
BART = {"self_attn": "attention", "encoder_attn": "cross-attention", "fc1": "ffn"}
VIT = {"attention": "attention", "mlp": "ffn"}

#: Model type -> residual adds of each trunk, and the kind of each branch.
TRANSFORMERS = {
    "llama": ([6], LLAMA),
    "qwen3": ([6], LLAMA),
    "qwen3_moe": ([6], LLAMA),
    "gemma2": ([6], LLAMA),
    "gemma3_text": ([6], LLAMA),
    "mixtral": ([6], LLAMA),
    "granite": ([6], LLAMA),
    "deepseek_v3": ([6], {"self_attn": "linear-attention", "mlp": "ffn"}),  # latent: it reads one value
    "olmo2": ([6], LLAMA),
    "cohere": ([3], {"self_attn": "parallel"}),
    "phi": ([3], {"self_attn": "parallel"}),
    "phi3": ([6], LLAMA),
    "gptj": ([3], {"attn": "parallel"}),
    "gpt_neox": ([3], {"attention": "parallel"}),
    "falcon": ([3], {"self_attention": "parallel"}),
    "gpt2": ([6], {"attn": "attention", "mlp": "ffn"}),
    "opt": ([6], {"self_attn": "attention", "fc1": "ffn"}),
    "bloom": ([4], {"query_key_value": "attention", "dense_h_to_4h": "ffn"}),
    "mpt": ([6], {"attn": "attention", "up_proj": "ffn"}),
    "bert": ([6], BERT),
    "roberta": ([6], BERT),
    "albert": ([6], {"query": "attention", "ffn": "ffn"}),
    "distilbert": ([6], {"attention": "attention", "ffn": "ffn"}),
    "t5": ([6, 9], {"SelfAttention": "attention", "EncDecAttention": "cross-attention", "DenseReluDense": "ffn"}),
    "bart": ([6, 9], BART),
    "whisper": ([6, 9], BART),
    "vit": ([6], VIT),
    "dinov2": ([6], VIT),
    "swin": ([4, 4], VIT),
    "clip": ([6, 6], LLAMA),
    "wav2vec2": ([6], {"attention": "attention", "feed_forward": "ffn"}),
    "convnext": ([2, 2], {"dwconv": "conv"}),
    "resnet": ([2, 2], {"layer": "branch"}),
}

SMALL_VIT = {"depth": 2, "img_size": 56}
ATTN = {"attn": "attention", "mlp": "ffn"}
#: timm's name -> options that make the model smaller, adds of each trunk, kind of each branch.
TIMM = {
    "vit_tiny_patch16_224": ({"depth": 2, "img_size": 64}, [4], ATTN),
    "deit3_small_patch16_224": ({"depth": 2, "img_size": 64}, [4], ATTN),
    "eva02_tiny_patch14_224": (SMALL_VIT, [4], ATTN),
    "eva02_small_patch14_224": ({**SMALL_VIT, "qkv_fused": True}, [4], ATTN),
    "cait_xxs24_224": ({"depth": 2, "img_size": 64}, [4, 4], ATTN),
    "mixer_s32_224": ({"img_size": 64}, [16], {"mlp_tokens": "ffn", "mlp_channels": "ffn"}),
    "swin_tiny_patch4_window7_224": (
        {"img_size": 64, "window_size": 4, "embed_dim": 24, "depths": (2, 2, 2, 2)},
        [4, 4, 4, 4],
        ATTN,
    ),
    "convnext_tiny": ({"depths": (2, 2, 2, 2), "dims": (16, 32, 32, 64)}, [2, 2, 2, 2], {"conv_dw": "conv"}),
    "resnet18": ({}, [2, 2, 2, 2], {"conv1": "conv"}),
    "seresnet50": ({"layers": (2, 2, 2, 2)}, [2, 2, 2, 2], {"conv1": "conv"}),
    "efficientnet_b0": ({}, [2, 2, 3], {"conv_pw": "conv"}),
}


def sites_of(trunks: list[Trunk]) -> list[Site]:
    return [site for trunk in trunks for site in trunk.sites]


def called(model: nn.Module, paths: set[str]) -> set[str]:
    """Those of ``paths`` that run when the model gets its example inputs."""
    seen: set[str] = set()
    for path in paths:
        model.get_submodule(path).register_forward_hook(lambda *_, path=path: seen.add(path))
    args, kwargs = first_given(patterns_for(model), "example_inputs")(model)
    with torch.no_grad():
        model.eval()(*args, **kwargs)
    return seen


def check_qkv(found: Found, prepared: Prepared) -> None:
    """Each attention has projections that are found: three modules, or one whose layout is known."""
    finding = found.evaluation
    for name, trunk in finding.trunks.items():
        for site, add in zip(trunk.sites, finding.chains[name].adds, strict=True):
            if site.kind in ("attention", "parallel"):
                known = find_projections(finding.flow, site, prepared.patterns, add)
                assert len(known.paths) == (1 if known.fused else 3)
                assert all(isinstance(prepared.model.get_submodule(p).weight, nn.Parameter) for p in known.paths)


@pytest.mark.parametrize("model_type", TRANSFORMERS)
def test_transformers_architecture(model_type: str) -> None:
    model = tiny_model(model_type)
    pattern, *others = patterns_for(model)
    assert others and not pattern.learned
    lengths, kinds = TRANSFORMERS[model_type]
    prepared = without_inputs(model)
    found = find(prepared)
    trunks = [*found.trunks.values()]
    assert [len(trunk.sites) for trunk in trunks] == lengths
    assert {site.branch: site.kind for site in sites_of(trunks)} == kinds
    blocks = {site.block for site in sites_of(trunks)}
    assert called(model, blocks) == blocks
    check_qkv(found, prepared)


@pytest.mark.parametrize("name", TIMM)
def test_timm_architecture(name: str) -> None:
    options, lengths, kinds = TIMM[name]
    model = timm_model(name, **options)
    assert len(patterns_for(model)) > 1
    prepared = without_inputs(model)
    found = find(prepared)
    trunks = [*found.trunks.values()]
    assert [len(trunk.sites) for trunk in trunks] == lengths
    assert {site.branch: site.kind for site in sites_of(trunks)} == kinds
    blocks = {site.block for site in sites_of(trunks)}
    assert called(model, blocks) == blocks
    check_qkv(found, prepared)


def test_a_timm_backbone_inside_another_model_is_recognised() -> None:
    model = nn.Sequential(timm_model("vit_tiny_patch16_224", depth=1, img_size=32), nn.ReLU())
    found = patterns_for(model)
    assert [pattern.description for pattern in found] == ["timm's ViT and DeiT"]
    assert first_given(found, "example_inputs") is None


def test_timm_inputs_have_the_model_s_channels() -> None:
    model = timm_model("vit_tiny_patch16_224", depth=1, img_size=(32, 48), in_chans=1).bfloat16()
    (images,), _ = first_given(patterns_for(model), "example_inputs")(model)
    assert images.shape == (2, 1, 32, 48) and images.dtype is torch.bfloat16


def tiny_dit() -> nn.Module:
    import diffusers

    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8}
    model: nn.Module = diffusers.DiTTransformer2DModel(**sizes, num_embeds_ada_norm=10, norm_num_groups=4)
    return model


def test_diffusers_dit() -> None:
    model = tiny_dit()
    prepared = without_inputs(model)
    found = find(prepared)
    (trunk,) = found.trunks.values()
    assert [(site.branch, site.kind) for site in trunk.sites] == [("attn1", "attention"), ("ff", "ffn")] * 2
    blocks = {site.block for site in trunk.sites}
    assert called(model, blocks) == blocks
    check_qkv(found, prepared)


LEARNED = {
    "deepseek_v4": "mHC",
    "gemma3n_text": "LAuReL",
    "inkling2_text": "attention residuals",
    "muse_spark_text": "gates",
    "doge": "scales",
    "zaya": "biases",
    "neomme": "embeddings",
}


@pytest.mark.parametrize("model_type", LEARNED)
def test_learned_depth_connections_are_recognised(model_type: str) -> None:
    model = tiny_model(model_type)
    assert LEARNED[model_type] in first_given(patterns_for(model), "learned")
    assert not rewire.inspect(model).trunks
    with pytest.raises(AlreadyConnected, match=LEARNED[model_type]):
        rewire.compile(nn.ModuleList([model]), "residual")


# -- kinds -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("branch", "structural", "expected"),
    [
        ("mixer", "branch", "attention"),
        ("expert", "branch", "ffn"),
        ("my_mixer", "branch", "branch"),
        ("mixer", "parallel", "parallel"),
        ("other", "conv", "conv"),
    ],
)
def test_kind(branch: str, structural: str, expected: str) -> None:
    pattern = Pattern("mine", lambda model: True, attention="mixer", ffn="experts?")
    assert pattern.kind(Site(f"0.{branch}", "0", branch, structural)) == expected


# -- tiny models -------------------------------------------------------------------------------------------------------


def test_tiny_models_are_reproducible_and_leave_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    a, b, c = (tiny_model("llama", seed).get_parameter("lm_head.weight") for seed in (0, 0, 1))
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert torch.equal(torch.get_rng_state(), before)


def test_tiny_configs_drop_nothing_and_keep_ids_in_the_vocabulary() -> None:
    config = tiny_config("wav2vec2")
    assert config.layerdrop == config.hidden_dropout == config.mask_time_prob == 0
    config = tiny_config("gpt2")
    assert config.vocab_size == 97 and config.eos_token_id < 97 and config.resid_pdrop == 0


def test_a_part_of_other_models_is_the_class_of_its_config() -> None:
    assert type(tiny_model("siglip_text_model")).__name__ == "SiglipTextModel"
    assert type(tiny_model("superpoint")).__name__ == "SuperPointForKeypointDetection"


def test_configs_inside_a_config_that_takes_any_are_small() -> None:
    config = tiny_config("llava")
    assert (config.text_config.model_type, config.text_config.hidden_size) == ("llama", 64)
    assert (config.vision_config.model_type, config.vision_config.num_hidden_layers) == ("clip_vision_model", 3)


def test_settings_and_the_widths_of_the_defaults() -> None:
    config = tiny_config("bert", narrow=False)
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (768, 3, 97)
    assert config.hidden_dropout_prob == 0
    assert tiny_model("bert", num_hidden_layers=1).config.num_hidden_layers == 1


# -- inputs ------------------------------------------------------------------------------------------------------------

#: Model type -> names and shapes of its inputs.
INPUTS = {
    "siglip_text_model": {"input_ids": (2, 12)},
    "bros": {"input_ids": (2, 12), "bbox": (2, 12, 4)},
    "llava": {"input_ids": (2, 28), "pixel_values": (2, 3, 32, 32)},
    "paligemma": {"input_ids": (2, 28), "pixel_values": (2, 3, 32, 32)},
    "qwen2_vl_vision": {"hidden_states": (32, 384), "grid_thw": (2, 3)},
    "timesformer": {"pixel_values": (2, 8, 3, 32, 32)},
    "audio-spectrogram-transformer": {"input_values": (2, 1024, 8)},
    "time_series_transformer": {
        "future_values": (2, 8),
        "future_time_features": (2, 8, 0),
        "past_values": (2, 15),
        "past_time_features": (2, 15, 0),
        "past_observed_mask": (2, 15),
    },
}


@pytest.mark.parametrize("model_type", INPUTS)
def test_example_inputs(model_type: str) -> None:
    model = tiny_model(model_type).eval()
    args, kwargs = first_given(patterns_for(model), "example_inputs")(model)
    assert not args
    assert {name: tuple(value.shape) for name, value in kwargs.items() if name != "use_cache"} == INPUTS[model_type]
    with torch.no_grad():
        model(**kwargs)


def test_a_model_whose_inputs_nobody_knows_is_rewired_without(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("decision_transformer")
    with caplog.at_level(logging.INFO):
        assert rewire.connections(rewire.compile(model, "residual"))
    assert "its input 'states' is of no kind that the registry of architectures knows" in caplog.text
    assert "rewired but not validated" in caplog.text


def test_unknown_model_types_and_names() -> None:
    with pytest.raises(UnknownName, match=r"no model type 'lama'. Did you mean 'llama'"):
        tiny_model("lama")
    with pytest.raises(UnknownName, match="a type, such as 'llama', not a repository"):
        tiny_model("meta-llama/Llama-3.1-8B")
    with pytest.raises(UnknownName, match="no model class for 'sam_prompt_encoder'"):
        tiny_model("sam_prompt_encoder")
    with pytest.raises(UnknownName, match=r"no model 'resnet_18'. Did you mean 'resnet18'"):
        timm_model("resnet_18")


@pytest.mark.parametrize(("library", "make"), [("timm", timm_model), ("transformers", tiny_model)])
def test_missing_and_broken_libraries(library: str, make: object, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, library, None)
        with pytest.raises(ImportError, match=f"{library} is not installed: pip install"):
            make("some-model")  # type: ignore[operator]

    def broken(name: str) -> None:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(ImportError, match=f"{library} is installed but fails on import: RuntimeError: operator"):
        make("some-model")  # type: ignore[operator]


# -- the registry ------------------------------------------------------------------------------------------------------


def a_pattern(description: str) -> Pattern:
    return Pattern(description, lambda model: isinstance(model, nn.Linear))


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry[Pattern]:
    """An empty registry of patterns, for one test."""
    fresh: Registry[Pattern] = Registry("pattern", "patterns", entry_points="rewire.patterns")
    monkeypatch.setattr(pattern_module, "_REGISTRY", fresh)
    return fresh


def test_patterns_lists_all_with_a_line_each() -> None:
    listed = list_patterns()
    assert {"llama", "timm", "diffusers.dit", "torch.nn.Transformer"} <= listed.keys()
    assert all(line and "\n" not in line for line in listed.values())


def test_an_unknown_pattern_is_told_with_near_names(registry: Registry[Pattern]) -> None:
    register_pattern("llama", a_pattern("a"))
    with pytest.raises(UnknownName, match=r"no pattern 'lama'. Did you mean 'llama'\? rewire.list_patterns\(\)"):
        registry.get("lama")


def test_a_name_cannot_be_taken_twice(registry: Registry[Pattern]) -> None:
    register_pattern("mine", a_pattern("a"))
    with pytest.raises(ValueError, match="'mine' is already registered"):
        register_pattern("mine", a_pattern("b"))


def test_the_pattern_registered_last_counts_first(registry: Registry[Pattern]) -> None:
    first, second = register_pattern("b", a_pattern("one")), register_pattern("a", a_pattern("two"))
    assert patterns_for(nn.Linear(1, 1)) == [second, first]
    assert patterns_for(nn.ReLU()) == []
    assert first_given([second, first], "description") == "two"


def test_installed_packages_add_patterns(registry: Registry[Pattern], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Point(EntryPoint):
        def load(self) -> None:
            register_pattern(self.name, a_pattern("from a package"))

    def installed(group: str) -> list[EntryPoint]:
        asked.append(group)
        return [Point("theirs", "their.module", group)]

    monkeypatch.setattr("rewire.registry.installed_entry_points", installed)
    assert list_patterns() == list_patterns() == {"theirs": "from a package"}
    assert asked == ["rewire.patterns"]


def test_a_library_that_is_installed_and_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers beside a torchvision of another build: a model that is none of it has no use for it."""

    class Broken(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise ModuleNotFoundError(name)

    monkeypatch.delitem(sys.modules, "transformers.modeling_utils", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", Broken("transformers"))
    assert not is_pretrained(nn.Linear(1, 1))
