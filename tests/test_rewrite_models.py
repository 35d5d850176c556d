"""Rewired models against their originals: architectures of four libraries, and hand-written ones."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from comparing import assert_bitwise, assert_close, evaluate, operations, tensors_in
from models import CASES, PreNorm, Stack, images
from torch import nn

import rewire
from rewire.patterns import first_given, patterns_for
from rewire.patterns.tiny import tiny_model

Trunks = dict[str, tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class Model:
    """What is tested: how to make it, its inputs (None: those that rewire knows), (residual adds, blocks) by trunk."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]] | None
    trunks: Trunks

    def build(self) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        torch.manual_seed(0)
        model = self.make()
        randomise(model)
        args, kwargs = self.inputs() if self.inputs else first_given(patterns_for(model), "example_inputs")(model)
        return model, args, kwargs


def randomise(model: nn.Module) -> None:
    """Dropout where the tiny model has none, and no parameter zero: what is zero cannot show a mistake."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
        for name, value in vars(module).items():
            if name in ("dropout", "attention_dropout", "activation_dropout", "hidden_dropout") and value == 0.0:
                setattr(module, name, 0.1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))


# -- the models --------------------------------------------------------------------------------------------------------

MODELS: dict[str, Model] = {}


def add(name: str, make: Callable[[], nn.Module], inputs: Any, trunks: Trunks) -> None:
    MODELS[name] = Model(make, inputs, trunks)


DECODER = {"model.layers": (6, 3)}
for model_type, expected in {
    "llama": DECODER,
    "qwen3": DECODER,
    "qwen3_moe": DECODER,
    "gemma2": DECODER,
    "gemma3_text": DECODER,
    "mixtral": DECODER,
    "deepseek_v3": DECODER,
    "granite": DECODER,
    "phi": {"model.layers": (3, 3)},
    "gpt2": {"transformer.h": (6, 3)},
    "gpt_neox": {"gpt_neox.layers": (3, 3)},
    "gptj": {"transformer.h": (3, 3)},
    "opt": {"model.decoder.layers": (6, 3)},
    "falcon": {"transformer.h": (3, 3)},
    "bloom": {"transformer.h": (4, 2)},
    "mpt": {"transformer.blocks": (6, 3)},
    "bert": {"bert.encoder.layer": (6, 3)},
    "roberta": {"roberta.encoder.layer": (6, 3)},
    "albert": {"albert.encoder.albert_layer_groups.0.albert_layers.0": (6, 3)},
    "distilbert": {"distilbert.transformer.layer": (6, 3)},
    "t5": {"encoder.block": (6, 3), "decoder.block": (9, 3)},
    "bart": {"model.encoder.layers": (6, 3), "model.decoder.layers": (9, 3)},
    "whisper": {"model.encoder.layers": (6, 3), "model.decoder.layers": (9, 3)},
    "vit": {"vit.layers": (6, 3)},
    "dinov2": {"dinov2.encoder.layer": (6, 3)},
    "swin": {"swin.encoder.layers.0.blocks": (4, 2), "swin.encoder.layers.1.blocks": (4, 2)},
    "convnext": {"convnext.encoder.stages.0.layers": (2, 2), "convnext.encoder.stages.1.layers": (2, 2)},
    "clip": {"text_model.encoder.layers": (6, 3), "vision_model.encoder.layers": (6, 3)},
    "wav2vec2": {"wav2vec2.encoder.layers": (6, 3)},
    "resnet": {"resnet.encoder.stages.0.layers": (2, 2), "resnet.encoder.stages.1.layers": (2, 2)},
}.items():
    add(model_type, lambda model_type=model_type: tiny_model(model_type), None, expected)


def falcon(**settings: Any) -> nn.Module:
    from transformers import FalconConfig, FalconForCausalLM

    shape = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    return FalconForCausalLM(FalconConfig(**shape, **settings))


add("falcon-new", lambda: falcon(new_decoder_architecture=True), None, {"transformer.h": (3, 3)})
add("falcon-serial", lambda: falcon(parallel_attn=False, alibi=True), None, {"transformer.h": (6, 3)})

VIT: dict[str, Any] = {"embed_dim": 32, "num_heads": 4, "depth": 3}
for name, size, options, expected in [
    ("vit_tiny_patch16_224", 16, {**VIT, "img_size": 16, "patch_size": 8}, {"blocks": (6, 3)}),
    ("deit3_small_patch16_224", 16, {**VIT, "img_size": 16, "patch_size": 8}, {"blocks": (6, 3)}),
    ("eva02_tiny_patch14_224", 28, {**VIT, "img_size": 28}, {"blocks": (6, 3)}),
    ("cait_xxs24_224", 32, {**VIT, "img_size": 32}, {"blocks": (6, 3), "blocks_token_only": (4, 2)}),
    (
        "convnext_tiny",
        32,
        {"depths": (2, 2, 2, 2), "dims": (8, 8, 16, 16)},
        {f"stages.{i}.blocks": (2, 2) for i in range(4)},
    ),
    (
        "swin_tiny_patch4_window7_224",
        56,
        {"img_size": 56, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 2)},
        {"layers.0.blocks": (4, 2), "layers.1.blocks": (4, 2)},
    ),
    ("resnet18", 32, {"channels": (8, 8, 16, 16)}, {f"layer{i}": (2, 2) for i in (1, 2, 3, 4)}),
    ("seresnet50", 32, {"layers": (2, 3, 2, 2), "channels": (4, 8, 8, 8)}, {}),
]:
    add(
        f"timm-{name.split('_')[0]}",
        lambda name=name, options=options: timm_model(name, options),
        lambda size=size: ((images(size=size),), {}),
        expected or {"layer1": (2, 2), "layer2": (3, 3), "layer3": (2, 2), "layer4": (2, 2)},
    )


def mixer() -> nn.Module:
    models = importlib.import_module("timm.models.mlp_mixer")
    return models.MlpMixer(num_classes=5, img_size=16, patch_size=4, num_blocks=3, embed_dim=32)  # type: ignore[no-any-return]


def efficientnet() -> nn.Module:
    """EfficientNet's blocks, in fewer and narrower stages."""
    models = importlib.import_module("timm.models.efficientnet")
    stages = [["ds_r1_k3_s1_e1_c8_se0.25"], ["ir_r3_k3_s2_e2_c8_se0.25"], ["ir_r3_k5_s2_e2_c16_se0.25"]]
    return models.EfficientNet(  # type: ignore[no-any-return]
        models.decode_arch_def(stages), num_classes=5, num_features=16, stem_size=8, drop_path_rate=0.1
    )


add("timm-mixer", mixer, lambda: ((images(size=16),), {}), {"blocks": (6, 3)})
add("timm-efficientnet", efficientnet, lambda: ((images(size=32),), {}), {"blocks.1": (2, 2), "blocks.2": (2, 2)})


def timm_model(name: str, options: dict[str, Any]) -> nn.Module:
    return importlib.import_module("timm").create_model(name, num_classes=5, **options)  # type: ignore[no-any-return]


def dit() -> nn.Module:
    return importlib.import_module("diffusers").DiTTransformer2DModel(  # type: ignore[no-any-return]
        num_attention_heads=4, attention_head_dim=8, in_channels=4, num_layers=3, sample_size=8, patch_size=2,
        num_embeds_ada_norm=10, norm_num_groups=4,
    )  # fmt: skip


add(
    "diffusers-dit",
    dit,
    lambda: (
        (images(size=8, channels=4),),
        {"timestep": torch.tensor([1, 5]), "class_labels": torch.tensor([1, 2])},
    ),
    {"transformer_blocks": (6, 3)},
)

for norm_first in (True, False):
    shape: dict[str, Any] = {
        "d_model": 32,
        "nhead": 4,
        "dim_feedforward": 64,
        "batch_first": True,
        "norm_first": norm_first,
    }
    order = "pre" if norm_first else "post"
    add(
        f"torch-encoder-{order}",
        lambda shape=shape: nn.TransformerEncoder(nn.TransformerEncoderLayer(**shape), 3, enable_nested_tensor=False),
        lambda: ((torch.randn(2, 9, 32),), {}),
        {"layers": (6, 3)},
    )
    add(
        f"torch-decoder-{order}",
        lambda shape=shape: nn.TransformerDecoder(nn.TransformerDecoderLayer(**shape), 3),
        lambda: ((torch.randn(2, 9, 32), torch.randn(2, 5, 32)), {}),
        {"layers": (9, 3)},
    )

for name, case in CASES.items():
    add(f"own-{name}", case.make, lambda case=case: (case.inputs(), {}), case.trunks)

#: Of libraries' models those that are written in ways of their own.
KINDS = ["llama", "gpt2", "gpt_neox", "bert", "albert", "t5", "whisper", "swin", "convnext", "resnet", "falcon-serial"]
KINDS += ["timm-vit", "timm-cait", "timm-efficientnet", "diffusers-dit", "torch-encoder-post", "torch-decoder-pre"]


def quickly(names: Sequence[str] = ()) -> Any:
    """All models, of which those of libraries are slow that are not named."""
    quick = [name.startswith("own-") or name in names for name in MODELS]
    return pytest.mark.parametrize(
        "name", [pytest.param(n, marks=() if q else pytest.mark.slow) for n, q in zip(MODELS, quick, strict=True)]
    )


# -- the tests ---------------------------------------------------------------------------------------------------------


@quickly()
def test_plain_connections_are_bitwise_the_original(name: str) -> None:
    model, args, kwargs = MODELS[name].build()
    report = rewire.inspect(model)
    assert {trunk.name: (len(trunk.sites), trunk.blocks) for trunk in report.trunks} == MODELS[name].trunks
    rewired = rewire.compile(model, "residual", example_inputs=(args, kwargs))
    sizes = {trunk: len(c.layout.units) for trunk, c in rewire.connections(rewired).items()}
    assert sizes == {trunk: sites for trunk, (sites, _) in MODELS[name].trunks.items()}
    for train in (False, True):
        assert_bitwise(evaluate(model, args, kwargs, train), evaluate(rewired, args, kwargs, train))
    assert operations(rewired, args, kwargs) == operations(model, args, kwargs)  # the same graph, beside the adds


@quickly(KINDS)
def test_the_preserving_start_is_the_original(name: str) -> None:
    model, args, kwargs = MODELS[name].build()
    before = evaluate(model, args, kwargs)
    untouched = state_of(model)
    rewired = rewire.compile(model, ("ancre-ingoing", "denseformer")[[*MODELS].index(name) % 2], validate=False)
    # Gradients that nearly cancel (of keys, say) amplify rounding: the slack that rewire's own validation has.
    assert_close(before, evaluate(rewired, args, kwargs), gradients=5e-5)
    assert_shares_everything(model, rewired)
    assert_learns(rewired, args, kwargs)
    assert state_of(model) == untouched
    assert_bitwise(before, evaluate(model, args, kwargs))


def state_of(model: nn.Module) -> dict[str, Any]:
    """What rewiring must not change in the caller's model."""
    state: dict[str, Any] = {"keys": list(model.state_dict())}
    for path, module in model.named_modules():
        hooks = [*module._forward_hooks, *module._forward_pre_hooks, *module._backward_hooks]
        state[path] = (type(module), type(module).forward, set(vars(module)), list(module._modules), hooks)
    return state


def assert_shares_everything(model: nn.Module, rewired: nn.Module) -> None:
    assert type(rewired).__name__ == type(model).__name__ and isinstance(rewired, type(model))
    own = [key for key in rewired.state_dict() if "depth_connections" not in key]
    assert own == list(model.state_dict()) and len(rewired.state_dict()) > len(own)
    parameters = [(n, p) for n, p in rewired.named_parameters() if "depth_connections" not in n]
    for (name, mine), (original, other) in zip(parameters, model.named_parameters(), strict=True):
        assert name == original and mine is other
    for (name, mine), (original, other) in zip(rewired.named_buffers(), model.named_buffers(), strict=True):
        assert name == original and mine.data_ptr() == other.data_ptr()


def assert_learns(rewired: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    learned = [weight for connection in rewire.connections(rewired).values() for weight in connection.parameters()]
    outputs = [t for t in tensors_in(rewired.eval()(*args, **kwargs)) if t.requires_grad]
    gradients = torch.autograd.grad(sum(t.float().square().sum() for t in outputs), learned)
    assert learned and all(gradient.isfinite().all() and gradient.any() for gradient in gradients)


def test_the_source_is_the_user_s_own_but_for_the_stream() -> None:
    """Comments, layout and names stay; each residual add, and each way in and out, is what changed."""
    model = Stack(PreNorm)
    before, after = inspect.getsource(PreNorm.forward), rewire.source(rewire.compile(model, "residual"), "layers.0")
    lines = difflib.ndiff(textwrap.dedent(before).splitlines(), after.splitlines())
    removed = [line[1:].strip() for line in lines if line[0] == "-"]
    assert removed == ["x = x + self.attn(self.ln_1(x))", "x = x + self.mlp(self.ln_2(x))", "return x"]
