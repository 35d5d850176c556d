"""rewire.initialize: what it fills, how, and what it leaves alone."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from models import CASES, NanoGPT, PreNorm, ProjectionNet, Scaled, Stack, vectors
from torch import nn

import rewire
from rewire.init import IDInit, idi_, idic_, idiz_
from rewire.patterns.tiny import tiny_model


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def spread(weight: torch.Tensor) -> float:
    return float(weight.detach().std())


def near(actual: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Equal but for the loose condition."""
    return torch.allclose(actual, wanted, rtol=0.01, atol=1e-9)


def identity(rows: int, columns: int) -> torch.Tensor:
    return idi_(torch.empty(rows, columns), loose=0)


@pytest.mark.parametrize("init", rewire.list_initializers())
def test_every_parameter_is_filled_or_kept_for_a_reason(init: str) -> None:
    model = Stack(Scaled)
    if init == "zero-gamma":
        model = ProjectionNet()
    before = {name: value.clone() for name, value in model.named_parameters()}
    report = rewire.initialize(model, init, generator=generator())
    filled, kept = {weight.name for weight, _ in report.applied}, dict(report.kept)
    assert filled | set(kept) == set(before) and not filled & set(kept) and all(kept.values())
    for name, value in model.named_parameters():
        assert torch.equal(value, before[name]) == (name in kept), name
        assert value.isfinite().all()
    text = str(report)
    assert all(name in text for name in before)


@pytest.mark.parametrize(
    "init", ["idinit", "mzas", "near-identity", "orthogonal", "kaiming", "xavier", "fixup", "depth-scaled", "deepnorm"]
)
def test_seeded(init: str) -> None:
    first, second, other = NanoGPT(), NanoGPT(), NanoGPT()
    second.load_state_dict(first.state_dict())
    for model, seed in ((first, 0), (second, 0), (other, 1)):
        rewire.initialize(model, init, generator=generator(seed))
    equal = [torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)]
    assert all(equal)
    assert not torch.equal(first.transformer.h[0].mlp.up.weight, other.transformer.h[0].mlp.up.weight)


def test_idinit_on_gpt2_fills_each_part_of_the_fused_projection() -> None:
    model = tiny_model("gpt2")
    table = model.transformer.wte.weight.clone()
    rewire.initialize(model, "idinit")
    block = model.transformer.h[1]
    for part in block.attn.c_attn.weight.chunk(3, 1):  # [in, out]
        assert near(part, torch.eye(64))
    assert near(block.mlp.c_fc.weight.t(), identity(256, 64))
    assert torch.equal(block.mlp.c_proj.weight.t(), idiz_(torch.empty(64, 256)))
    assert torch.equal(block.attn.c_proj.weight.t(), idiz_(torch.empty(64, 64)))
    assert not block.mlp.c_proj.bias.any() and not block.attn.c_attn.bias.any()
    assert torch.equal(model.transformer.wte.weight, table) and model.lm_head.weight is model.transformer.wte.weight


def test_idinit_on_interleaved_heads() -> None:
    model = tiny_model("gpt_neox")
    rewire.initialize(model, "idinit")
    heads = model.gpt_neox.layers[0].attention.query_key_value.weight.view(4, 3, 16, 64)
    assert all(near(heads[:, way].reshape(64, 64), torch.eye(64)) for way in range(3))


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
def test_idinit_fills_each_expert(model_type: str) -> None:
    model = tiny_model(model_type)
    rewire.initialize(model, "idinit")
    experts = model.model.layers[0].mlp.experts
    gate_up, down = experts.gate_up_proj, experts.down_proj
    halves = gate_up.chunk(2, 1) if model_type == "mixtral" else (gate_up[..., ::2].mT, gate_up[..., 1::2].mT)
    for half in halves:
        assert all(near(expert, identity(128, 64)) for expert in half)
    assert not torch.equal(halves[0][0], halves[0][1])  # each has its own noise
    for expert in down if model_type == "mixtral" else down.mT:
        assert torch.equal(expert, idiz_(torch.empty(64, 128)))


def test_idinit_on_an_image_model() -> None:
    model = ProjectionNet()
    rewire.initialize(model, "idinit")
    assert near(model.stem.weight, idic_(torch.empty(8, 3, 3, 3), 2**0.5, loose=0))
    assert near(model.layer1[0].conv1.weight, idic_(torch.empty(8, 8, 3, 3), loose=0))
    assert near(model.layer2[0].downsample[0].weight[:, :, 0, 0], identity(16, 8))
    assert 0 < model.layer2[1].conv2.weight.abs().max() < 2e-6 and 0 < model.fc.weight.abs().max() < 2e-6
    assert bool((model.layer1[0].bn2.weight == 1).all())


def test_options() -> None:
    model = Stack(PreNorm)
    rewire.initialize(model, "idinit", tau=0.5, loose=0.0, eps=1e-3)
    assert torch.equal(model.layers[0].mlp.up.weight, idi_(torch.empty(64, 32), 0.5, loose=0))
    rewire.initialize(model, IDInit(eps=0.25))
    assert float(model.out.weight.detach().max()) == 0.25
    with pytest.raises(TypeError, match="'idinit' has no option 'epsilon': it takes tau, eps, loose"):
        rewire.initialize(model, "idinit", epsilon=1)
    with pytest.raises(TypeError, match="set them on the object"):
        rewire.initialize(model, IDInit(), tau=1.0)
    with pytest.raises(rewire.UnknownName, match="Did you mean 'orthogonal'"):
        rewire.initialize(model, "orthogonl")


def test_fixup_scales_by_branches_and_their_depth() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Sequential(*[nn.Linear(300, 300) for _ in range(3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.f(x)

    model = nn.Sequential(nn.Linear(300, 300), *[Deep() for _ in range(16)], nn.Linear(300, 3))
    rewire.initialize(model, "fixup", generator=generator())
    he = (2 / 300) ** 0.5
    assert abs(spread(model[3].f[0].weight) / (he * 16**-0.25) - 1) < 0.02  # m = 3
    assert abs(spread(model[0].weight) / he - 1) < 0.02
    assert not model[3].f[2].weight.any() and not model[-1].weight.any() and not model[3].f[0].bias.any()


def test_fixup_of_the_authors_counts_outputs() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Sequential(nn.Conv2d(32, 128, 3, padding=1), nn.Conv2d(128, 32, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.f(x)

    stem = nn.Conv2d(4, 32, 3, padding=1, groups=2)
    model = nn.Sequential(stem, *[Block() for _ in range(9)])
    for fan, inner, first in (("in", 32 * 9, 2 * 9), ("out", 128 * 9, 16 * 9)):
        rewire.initialize(model, "fixup", fan=fan, generator=generator())
        assert abs(spread(model[1].f[0].weight) / ((2 / inner) ** 0.5 * 9**-0.5) - 1) < 0.03
        assert abs(spread(stem.weight) / (2 / first) ** 0.5 - 1) < 0.1
    with pytest.raises(ValueError, match=r"fan='both'.*'in', 'out'"):
        rewire.initialize(model, "fixup", fan="both")


@pytest.mark.parametrize(("by", "wanted"), [("model", [4, 4, 4, 4]), ("block", [2, 2, 4, 4])])
def test_depth_scaled_ends(by: str, wanted: list[int]) -> None:
    model = tiny_model("llama", hidden_size=256, intermediate_size=512, num_hidden_layers=2)
    report = rewire.initialize(model, "depth-scaled", by=by, std=0.1, generator=generator())
    layers = model.model.layers
    ends = [end for layer in layers for end in (layer.self_attn.o_proj, layer.mlp.down_proj)]
    for end, n in zip(ends, wanted, strict=True):
        assert abs(spread(end.weight) / (0.1 * n**-0.5) - 1) < 0.03
        assert f", n={n}" in str(report)
    for inner in (layers[0].self_attn.v_proj, layers[1].mlp.up_proj):
        assert abs(spread(inner.weight) / 0.1 - 1) < 0.03
    with pytest.raises(ValueError, match="by='layer'"):
        rewire.initialize(model, "depth-scaled", by="layer")
    with pytest.raises(ValueError, match="std=0"):
        rewire.initialize(model, "depth-scaled", std=0)


def test_depth_scaled_counts_each_row_of_blocks() -> None:
    found = {w.name: w for w in rewire.roles(tiny_model("t5"))}
    table = rewire.roles(tiny_model("t5"))
    ends = [w for w in found.values() if w.role in ("last", "attention output")]
    counts = {row: [table.branches_until(w.block) for w in ends if w.block.startswith(row)] for row in ("enc", "dec")}
    assert counts["enc"] == list(range(1, len(counts["enc"]) + 1)), counts
    assert counts["dec"] == list(range(1, len(counts["dec"]) + 1)), counts


def test_deepnorm() -> None:
    model = tiny_model("bert", hidden_size=256, intermediate_size=512, num_hidden_layers=2)
    embedding = model.get_input_embeddings().weight.clone()
    rewire.initialize(model, "deepnorm", generator=generator())
    layer, beta = model.bert.encoder.layer[1], (8 * 2) ** -0.25
    for linear, gain in (
        *((layer.attention.self.query, 1), (layer.attention.self.key, 1), (layer.attention.self.value, beta)),
        *((layer.attention.output.dense, beta), (layer.intermediate.dense, beta), (layer.output.dense, beta)),
    ):
        out, into = linear.weight.shape
        assert abs(spread(linear.weight) / (gain * (2 / (out + into)) ** 0.5) - 1) < 0.03
    assert torch.equal(model.get_input_embeddings().weight, embedding)
    with pytest.raises(rewire.RewireError, match=r"several: decoder.block, encoder.block.*beta=0.2"):
        rewire.initialize(tiny_model("t5"), "deepnorm")
    rewire.initialize(tiny_model("t5"), "deepnorm", beta=0.5)
    with pytest.raises(ValueError, match="beta=-1"):
        rewire.initialize(model, "deepnorm", beta=-1)


def test_near_identity_and_mzas_variances() -> None:
    model = nn.Sequential(*[nn.Linear(100, 100, bias=False) for _ in range(4)])
    rewire.initialize(model, "near-identity", generator=generator())
    noise = torch.stack([layer.weight - torch.eye(100) for layer in model])
    assert abs(spread(noise) / (100 * 4) ** -0.5 - 1) < 0.02
    stack = Stack(lambda: PreNorm(32))
    rewire.initialize(stack, "mzas", generator=generator())
    assert abs(spread(stack.layers[0].attn.qkv.weight) / 32**-0.5 - 1) < 0.05
    assert abs(spread(stack.inp.weight) / 32**-0.5 - 1) < 0.2
    assert not stack.layers[0].mlp.down.weight.any() and not stack.out.weight.any()


def test_zas_on_a_linear_network() -> None:
    model = nn.Sequential(*[nn.Linear(5, 5) for _ in range(3)], nn.Linear(5, 2))
    rewire.initialize(model, "zas")
    assert torch.equal(model[:3](torch.eye(5)), torch.eye(5)) and not model[3].weight.any()


def test_zero_gamma_of_a_norm_that_adds_one() -> None:
    model = tiny_model("gemma2")
    rewire.initialize(model, "zero-gamma")
    layer = model.model.layers[0]
    assert not layer.post_attention_layernorm(torch.randn(2, 64)).any()
    assert layer.input_layernorm(torch.randn(2, 64)).all()
    with pytest.raises(rewire.RewireError, match="no branch of this model ends with one"):
        rewire.initialize(NanoGPT(), "zero-gamma")


def test_scales() -> None:
    model = Stack(Scaled)
    rewire.initialize(model, "skipinit")
    assert not model.layers[0].gamma.any()
    with pytest.raises(rewire.RewireError, match=r"rewire.compile\(model, 'rezero', init='rezero'\)"):
        rewire.initialize(NanoGPT(), "rezero")
    rewired = rewire.compile(NanoGPT(), "rezero", init="rezero", validate=False)
    (connection,) = rewire.connections(rewired).values()
    assert not connection.scales.any()


def test_compile_leaves_the_callers_model_alone() -> None:
    model = NanoGPT()
    before = copy.deepcopy(model.state_dict())
    rewired = rewire.compile(model, "ancre-ingoing", init="idinit", example_inputs=CASES["nanogpt"].inputs())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert near(rewired.transformer.h[0].mlp.up.weight, identity(64, 32))
    assert rewired.lm_head.weight is rewired.transformer.wte.weight


def test_bfloat16() -> None:
    model, wide = Stack(PreNorm).bfloat16(), Stack(PreNorm)
    rewire.initialize(model, "orthogonal", generator=generator())
    rewire.initialize(wide, "orthogonal", generator=generator())
    for low, high in zip(model.parameters(), wide.parameters(), strict=True):
        assert low.dtype == torch.bfloat16
        assert low.ndim < 2 or torch.equal(low, high.bfloat16())
    rewire.initialize(model, "idinit")
    assert float(model.layers[0].mlp.down.weight.detach().max()) == pytest.approx(1e-6, rel=0.01)


def test_options_may_follow_the_name(caplog: pytest.LogCaptureFixture) -> None:
    model = Stack(PreNorm)
    report = rewire.initialize(copy.deepcopy(model), "scaled:branch=4")
    assert {rule for _, rule in report.applied} == {"times 4"}
    rewired = rewire.compile(model, "denseformer", init="scaled:branch=4", validate=False)
    assert torch.equal(rewired.layers[0].mlp.down.weight, 4 * model.layers[0].mlp.down.weight)
    with pytest.raises(TypeError, match=r"options \['branch'\] of initialiser 'scaled' are given twice"):
        rewire.initialize(model, "scaled:branch=4", branch=2.0)
    assert not caplog.text
    rewire.compile(model, "denseformer", init="scaled", validate=False)
    assert "Scaled(embedding=1.0, branch=1.0) leaves all of its weights as they are" in caplog.text


def test_meta(caplog: pytest.LogCaptureFixture) -> None:
    with torch.device("meta"):
        model = rewire.compile(Stack(PreNorm), "denseformer")
        with caplog.at_level(logging.WARNING):
            rewire.compile(Stack(PreNorm), "denseformer", init="idinit", validate=False)
    assert "was not initialised" in caplog.text
    report = rewire.initialize(model, "idinit")
    assert report.deferred and not report.applied
    roles = rewire.roles(model)
    model.to_empty(device="cpu")
    for module in model.modules():
        if module is not model and hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert not rewire.initialize(model, "idinit", roles=roles).deferred
    assert near(model.layers[0].mlp.up.weight, identity(64, 32))
    assert model(vectors()).isfinite().all()


def test_parameters_that_came_later_are_reported() -> None:
    model = Stack(PreNorm)
    roles = rewire.roles(model)
    model.extra = nn.Parameter(torch.ones(2, 2))
    assert dict(rewire.initialize(model, "idinit", roles=roles).kept)["extra"] == "not in the table of roles"


def test_an_initialiser_of_ones_own() -> None:
    class Halves(rewire.Initializer):
        def rule(self, weight: rewire.init.Weight, roles: rewire.init.Roles) -> rewire.init.Rule | None:
            if weight.role != "last":
                return None
            return rewire.init.Rule("halves", lambda values, _generator: values.fill_(0.5))

    model = Stack(PreNorm)
    report = rewire.initialize(model, Halves())
    assert [weight.name for weight, _ in report.applied] == [f"layers.{n}.mlp.down.weight" for n in range(3)]
    assert bool((model.layers[2].mlp.down.weight == 0.5).all())


def test_deepnorm_scales_the_values_of_cross_attentions() -> None:
    model = tiny_model("t5", d_model=256, d_ff=512, d_kv=64)
    rewire.initialize(model, "deepnorm", beta=0.5, generator=generator())
    attention = model.decoder.block[1].layer[1].EncDecAttention
    for linear, gain in ((attention.q, 1), (attention.k, 1), (attention.v, 0.5), (attention.o, 0.5)):
        assert abs(spread(linear.weight) / (gain * (2 / sum(linear.weight.shape)) ** 0.5) - 1) < 0.03


def test_ds_init() -> None:
    model = tiny_model("t5", d_model=128, d_ff=256)
    rewire.initialize(model, "ds-init", alpha=0.5, generator=generator())
    for row in (model.encoder, model.decoder):
        for number, block in enumerate(row.block, start=1):
            for linear in (module for module in block.modules() if isinstance(module, nn.Linear)):
                bound = 0.5 * number**-0.5 * (6 / sum(linear.weight.shape)) ** 0.5
                assert 0.98 * bound < float(linear.weight.detach().abs().max()) <= bound
    with pytest.raises(ValueError, match="alpha=0"):
        rewire.initialize(model, "ds-init", alpha=0)


def test_t_fixup() -> None:
    model = tiny_model("t5", d_model=128, d_ff=256, num_layers=3, num_decoder_layers=4)
    rewire.initialize(model, "t-fixup", generator=generator())
    for row, gain in ((model.encoder, 0.67 * 3**-0.25), (model.decoder, (9 * 4) ** -0.25)):
        for name, linear in row.named_modules():
            if isinstance(linear, nn.Linear):
                own = 1 if name.endswith((".q", ".k")) else gain
                bound = own * (6 / sum(linear.weight.shape)) ** 0.5
                assert 0.98 * bound < float(linear.weight.detach().abs().max()) <= bound, name
    assert abs(spread(model.shared.weight) / (128**-0.5 * (9 * 4) ** -0.25) - 1) < 0.03
    assert model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.std() > 0
