"""Roles from the graphs of real models and hand-written ones: every parameter has one, and the right one."""

import functools
import re
from collections import Counter

import pytest
import torch
from models import CASES, NanoGPT
from slow_cases import one_in
from torch import nn

import rewire
from rewire.init import ROLES, Roles
from rewire.init.table import LAST, MATRICES
from rewire.patterns.tiny import timm_model, tiny_model


def dit() -> nn.Module:
    from diffusers import DiTTransformer2DModel

    return DiTTransformer2DModel(2, 8, num_layers=2, sample_size=8, num_embeds_ada_norm=10, norm_num_groups=4)


#: Model -> parameter (``#`` stands for numbers) -> its roles.
LLAMA = {
    "model.embed_tokens.weight": "embedding",
    **{f"model.layers.#.self_attn.{way}_proj.weight": way for way in "qkv"},
    "model.layers.#.self_attn.o_proj.weight": "attention output",
    "model.layers.#.mlp.gate_proj.weight": "branch",
    "model.layers.#.mlp.up_proj.weight": "branch",
    "model.layers.#.mlp.down_proj.weight": "last",
    "model.layers.#.input_layernorm.weight": "norm",
    "lm_head.weight": "classifier",
}
EXPERTS = {
    "model.layers.#.mlp.gate.weight": "router",
    "model.layers.#.mlp.experts.gate_up_proj": "branch",
    "model.layers.#.mlp.experts.down_proj": "last",
}
EXPECTED: dict[str, dict[str, str]] = {
    "llama": LLAMA,
    "mixtral": EXPERTS,
    "qwen3_moe": EXPERTS,
    "gpt_oss": {
        "model.layers.#.mlp.router.weight": "router",
        "model.layers.#.mlp.experts.gate_up_proj": "branch",
        "model.layers.#.mlp.experts.gate_up_proj_bias": "bias",
        "model.layers.#.mlp.experts.down_proj": "last",
        "model.layers.#.self_attn.sinks": "other",
    },
    "gpt2": {
        "transformer.wte.weight": "embedding",
        "transformer.wpe.weight": "embedding",
        "transformer.h.#.attn.c_attn.weight": "q+k+v",
        "transformer.h.#.attn.c_attn.bias": "bias",
        "transformer.h.#.attn.c_proj.weight": "attention output",
        "transformer.h.#.mlp.c_fc.weight": "branch",
        "transformer.h.#.mlp.c_proj.weight": "last",
    },
    "gpt_neox": {
        "gpt_neox.layers.#.attention.query_key_value.weight": "q+k+v",
        "gpt_neox.layers.#.attention.dense.weight": "attention output",
        "gpt_neox.layers.#.mlp.dense_#h_to_h.weight": "last",
        "lm_head.weight": "classifier",
    },
    "phi3": {
        "model.layers.#.self_attn.qkv_proj.weight": "q+k+v",
        "model.layers.#.mlp.gate_up_proj.weight": "branch",
    },
    "bert": {
        "bert.embeddings.word_embeddings.weight": "embedding",
        "bert.encoder.layer.#.attention.self.key.weight": "k",
        "bert.encoder.layer.#.attention.output.dense.weight": "attention output",
        "bert.encoder.layer.#.intermediate.dense.weight": "branch",
        "bert.encoder.layer.#.output.dense.weight": "last",
        "bert.encoder.layer.#.output.LayerNorm.weight": "norm",
        "cls.predictions.transform.dense.weight": "layer",
    },
    "t5": {
        "shared.weight": "embedding",
        "encoder.block.#.layer.#.SelfAttention.q.weight": "q",
        "encoder.block.#.layer.#.SelfAttention.relative_attention_bias.weight": "embedding",
        "decoder.block.#.layer.#.EncDecAttention.k.weight": "k",
        "decoder.block.#.layer.#.EncDecAttention.o.weight": "attention output",
        "decoder.block.#.layer.#.DenseReluDense.wo.weight": "last",
    },
    "vit": {
        "vit.embeddings.cls_token": "embedding",
        "vit.embeddings.patch_embeddings.projection.weight": "first",
        "vit.layers.#.attention.o_proj.weight": "attention output",
        "vit.layers.#.mlp.fc#.weight": "branch+last",
        "classifier.weight": "classifier",
    },
    "convnext": {
        "convnext.encoder.stages.#.layers.#.layer_scale_parameter": "scale",
        "convnext.encoder.stages.#.layers.#.dwconv.weight": "branch",
        "convnext.encoder.stages.#.layers.#.pwconv#.weight": "branch+last",
        "convnext.encoder.stages.#.downsampling_layer.#.weight": "layer+norm",
    },
    "gemma2": {
        "model.layers.#.post_attention_layernorm.weight": "last norm",
        "model.layers.#.post_feedforward_layernorm.weight": "last norm",
        "model.layers.#.input_layernorm.weight": "norm",
    },
    "clip": {"vision_model.embeddings.patch_embedding.weight": "first", "text_projection.weight": "layer"},
    "swin": {"swin.encoder.layers.#.blocks.#.attention.o_proj.weight": "attention output"},
    "wav2vec2": {
        "wav#vec#.feature_extractor.conv_layers.#.conv.weight": "first+layer",
        "wav#vec#.encoder.pos_conv_embed.conv.parametrizations.weight.original#": "other",
    },
    "dit": {
        "pos_embed.proj.weight": "first",
        "transformer_blocks.#.norm#.linear.weight": "modulation",
        "transformer_blocks.#.norm#.linear.bias": "modulation",
        "transformer_blocks.#.attn#.to_v.weight": "v",
        "transformer_blocks.#.attn#.to_out.#.weight": "attention output",
        "transformer_blocks.#.ff.net.#.weight": "last",
        "proj_out_#.weight": "classifier+layer",
    },
    "timm resnet18": {
        "conv#.weight": "first",
        "layer#.#.conv#.weight": "branch+last",
        "layer#.#.bn#.weight": "last norm+norm",
        "layer#.#.downsample.#.weight": "norm+shortcut",
        "fc.weight": "classifier",
    },
    "timm seresnet50": {"layer#.#.conv#.weight": "branch+last", "layer#.#.se.fc#.weight": "branch"},
    "timm vit_tiny_patch16_224": {
        "blocks.#.attn.qkv.weight": "q+k+v",
        "blocks.#.attn.proj.weight": "attention output",
        "head.weight": "classifier",
    },
    "timm convnext_tiny": {"stages.#.blocks.#.gamma": "scale", "head.fc.weight": "classifier"},
    "case nanogpt": {"transformer.wte.weight": "embedding", "transformer.h.#.attn.qkv.weight": "q+k+v"},
    "case scaled": {"layers.#.gamma": "scale", "layers.#.gate.weight": "branch"},
    "case loop": {"layers.#.#.#.out.weight": "attention output", "layers.#.#.#.down.weight": "last"},
    "case edsr": {"head.weight": "first", "body.#.weight": "layer", "tail.weight": "classifier"},
    "case projection": {"layer#.#.downsample.#.weight": "norm+shortcut", "fc.weight": "classifier"},
    "case two-widths": {"inp.weight": "first", "widen.weight": "layer"},
    "case two-streams": {"blocks.#.cross.weight": "last", "blocks.#.left.down.weight": "last"},
    "case u-net": {"embed.weight": "first", "join.#.weight": "layer"},
    "case encoder-decoder": {
        "decoder.#.cross_attn.in_proj_weight": "q+k+v",
        "decoder.#.cross_attn.out_proj.weight": "attention output",
    },
}


def make(key: str) -> nn.Module:
    if key == "dit":
        return dit()
    kind, _, name = key.rpartition(" ")
    if kind == "case":
        return CASES[name].make()
    options = {"depth": 2, "img_size": 64} if "vit" in name else {}
    return timm_model(name, **options) if kind == "timm" else tiny_model(name)


@functools.cache
def found(key: str) -> tuple[nn.Module, Roles]:
    model = make(key)
    return model, rewire.roles(model)


@pytest.mark.parametrize(
    "key", one_in(3, [*EXPECTED, *(f"case {name}" for name in CASES if f"case {name}" not in EXPECTED)])
)
def test_every_parameter_has_a_role(key: str) -> None:
    model, roles = found(key)
    assert {weight.name for weight in roles} == {name for name, _ in model.named_parameters()}
    assert {weight.role for weight in roles} <= set(ROLES)
    sizes = Counter[str]()
    for weight in roles:
        assert weight.because
        sizes[weight.name] += int(torch.Size(weight.shape).numel())
    assert sizes == {name: parameter.numel() for name, parameter in model.named_parameters()}
    branches = {weight.branch for weight in roles if weight.branch}
    assert branches == {weight.branch for weight in roles if weight.role in LAST}
    assert all(weight.depth >= 1 for weight in roles if weight.branch)


@pytest.mark.parametrize("key", EXPECTED)
def test_roles(key: str) -> None:
    roles: dict[str, set[str]] = {}
    for weight in found(key)[1]:
        roles.setdefault(re.sub(r"\d+", "#", weight.name), set()).add(weight.role)
    for name, wanted in EXPECTED[key].items():
        assert roles[name] == set(wanted.split("+")), name


@pytest.mark.parametrize("key", ["phi3", "mixtral", "gpt_oss"])
def test_a_gate_and_what_it_gates_in_one_weight_are_two_parts(key: str) -> None:
    roles = [weight for weight in found(key)[1] if "layers.1.mlp" in weight.name and "gate_up" in weight.name]
    assert [weight.role for weight in roles if weight.role != "bias"] == ["branch", "branch"]


@pytest.mark.parametrize(
    ("key", "relu"), [("llama", False), ("t5", True), ("timm resnet18", True), ("case edsr", True)]
)
def test_relu(key: str, relu: bool) -> None:
    assert found(key)[1].relu is relu


def test_depth_of_branches_and_their_number() -> None:
    _, roles = found("convnext")
    assert roles.branches == 4 and {weight.depth for weight in roles if weight.role in LAST} == {3}
    assert found("case shared")[1].branches == 6  # one block, called three times


def test_values_of_fused_projections_come_by_head() -> None:
    model, roles = found("gpt_neox")
    name = "gpt_neox.layers.0.attention.query_key_value.weight"
    stored = model.get_parameter(name).detach()
    heads = stored.view(4, 3, 16, 64)
    for number, weight in enumerate(roles.of(name)):
        assert torch.equal(weight.layout.view(stored).reshape(weight.shape), heads[:, number].reshape(64, 64))


def test_gates_that_alternate_with_what_they_gate() -> None:
    model, roles = found("gpt_oss")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    stored = model.get_parameter(name).detach()  # [experts, in, 2 * out]
    gate, up = (weight.layout.view(stored).reshape(weight.shape) for weight in roles.of(name))
    assert torch.equal(gate, stored[..., ::2].mT) and torch.equal(up, stored[..., 1::2].mT)


@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_convolution(groups: int) -> None:
    layer = nn.ConvTranspose2d(4, 6, 3, groups=groups)
    (weight,) = rewire.roles(nn.Sequential(layer)).of("0.weight")
    kernel = weight.layout.view(layer.weight.detach()).reshape(weight.shape)
    assert weight.shape == (6, 4 // groups, 3, 3)
    per_group = layer.weight.detach().chunk(groups)
    assert torch.equal(kernel, torch.cat([part.transpose(0, 1) for part in per_group]))


def test_meta_and_rewired_models_have_the_same_roles() -> None:
    plain = rewire.roles(NanoGPT())
    with torch.device("meta"):
        assert rewire.roles(NanoGPT()).weights == plain.weights
    rewired = rewire.roles(rewire.compile(NanoGPT(), "rezero", validate=False))
    assert rewired.weights[: len(plain.weights)] == plain.weights
    assert [weight.role for weight in rewired.weights[len(plain.weights) :]] == ["connection"]


def test_the_table_prints() -> None:
    text = str(found("timm vit_tiny_patch16_224")[1])
    assert "4 branches" in text and re.search(r"blocks.1.attn.qkv.weight +v +192 x 192", text)


def test_plain_networks_have_a_first_and_a_last_weight() -> None:
    roles = rewire.roles(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)))
    assert [weight.role for weight in roles if weight.role in MATRICES] == ["first", "layer", "classifier"]
    assert roles.relu and not roles.branches


def test_an_output_layer_that_is_tied_to_an_embedding_is_one() -> None:
    model = nn.Module()
    model.head, model.table = nn.Linear(4, 9, bias=False), nn.Embedding(9, 4)
    model.table.weight = model.head.weight
    (weight,) = rewire.roles(model)
    assert (weight.name, weight.role) == ("head.weight", "embedding") and weight.because == "tied with head.weight"


class RMS(nn.Module):
    """A norm whose class does not say so."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Sandwich(nn.Module):
    """A norm before the branch, and one that it ends with."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.map, self.behind = RMS(width), nn.Linear(width, width), RMS(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.behind(self.map(self.before(x)))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_norm_is_known_by_what_it_computes(device: str) -> None:
    model = nn.Sequential(Sandwich(8), Sandwich(8)).to(device)
    calls: list[object] = []
    for module in model.modules():
        module.register_forward_hook(lambda module, *_: calls.append(module))
    roles = {weight.name: weight.role for weight in rewire.roles(model)}
    assert roles["0.before.weight"] == "norm" and roles["0.behind.weight"] == "last norm"
    assert roles["0.map.weight"] == "last"
    assert not any("_rewire_norm" in vars(module) for module in model.modules())
    assert not {*map(id, calls)} & {*map(id, model.modules())}, "the caller's hooks were run"
