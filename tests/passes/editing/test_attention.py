"""Queries, keys and values read apart: each projection gets its own read, and nothing else."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from models import WIDTH, NanoGPT, PreNorm, SeparateAttention, SeparatePreNorm, Stack, token_ids, vectors
from reading_apart import Apart, Reader, check_reads
from torch import Tensor, nn
from torch.nn import functional as F

import rewire
from rewire.code.edited import is_edited
from rewire.errors import UnsupportedTopology
from rewire.patterns.tiny import timm_model, tiny_model

#: Three projections, those of an encoder and a decoder, and one for all three in its layouts.
TRANSFORMERS = ["llama", "bert", "t5", "whisper", "swin", "gpt2", "gpt_neox", "gpt_bigcode", "phi3", "falcon", "mpt"]
ALIKE = [
    *("qwen3", "gemma2", "cohere", "olmo2", "phi", "gptj", "mixtral", "distilbert", "albert"),
    *("bart", "opt", "vit", "dinov2", "clip", "wav2vec2", "bloom"),
]


@pytest.mark.parametrize("model_type", [*TRANSFORMERS, *(pytest.param(name, marks=pytest.mark.slow) for name in ALIKE)])
def test_transformers(model_type: str) -> None:
    check_reads(Reader(tiny_model(model_type)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_tiny_patch16_224", {"img_size": 32, "depth": 2}),
        ("deit3_small_patch16_224", {"img_size": 32, "depth": 2, "init_values": 1.0}),
        ("swin_tiny_patch4_window7_224", {"img_size": 56, "depths": (2, 2), "num_heads": (2, 4), "embed_dim": 32}),
        ("eva02_tiny_patch14_224", {"img_size": 28, "depth": 2}),  # products with the projections' weights
        ("beit_base_patch16_224", {"img_size": 32, "depth": 2}),
    ],
)
def test_timm(name: str, options: dict[str, Any]) -> None:
    check_reads(Reader(timm_model(name, **options)))


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("decoder", [True, False])
def test_torch_layers(norm_first: bool, decoder: bool) -> None:
    settings: dict[str, Any] = {"batch_first": True, "norm_first": norm_first, "dropout": 0.0}
    x = vectors(width=32)
    if decoder:
        model: nn.Module = nn.TransformerDecoder(nn.TransformerDecoderLayer(32, 4, 64, **settings), 2)
        check_reads(Reader(model, (x, x)))
    else:
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, **settings), 2, enable_nested_tensor=False)
        check_reads(Reader(model, (x,)))


class WithBias(nn.Linear):
    """Returns the bias, too, as linear maps of Megatron's do."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        return super().forward(x), None


class AttentionOfTuples(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear_qkv, self.proj = WithBias(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.linear_qkv(x)[0].unflatten(-1, (3, 4, 8)).transpose(1, 3).unbind(2)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def with_tuples() -> nn.Module:
    model = Stack(PreNorm)
    for layer in model.layers:
        layer.attn = AttentionOfTuples()
    return model


@pytest.mark.parametrize("validate", [True, False])
def test_a_fused_projection_that_returns_more_than_a_tensor(validate: bool) -> None:
    with pytest.raises(rewire.UnsupportedTopology, match=r"linear_qkv' makes all three, and returns more than one"):
        rewire.compile(with_tuples(), Apart(), example_inputs=(vectors(),), validate=validate)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            lambda: tiny_model("deepseek_v3"),
            r"layers\.0\.self_attn' cannot.*both keys and values are made of what .*kv_a_proj_with_mqa' makes",
        ),
    ],
    ids=["latent"],
)
def test_what_is_refused(model: Any, message: str) -> None:
    with pytest.raises(rewire.UnsupportedTopology, match=message):
        rewire.compile(model(), Apart())


class Multihead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln, self.mix = nn.LayerNorm(32), nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln(x)
        return x + self.mix(y, y, value=y, need_weights=False)[0]


def test_multihead_attention() -> None:
    check_reads(Reader(nn.Sequential(Multihead(), Multihead()), (vectors(width=32),)))


class OneInput(nn.MultiheadAttention):
    """ImageBind's."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x, need_weights=False, attn_mask=attn_mask)[0]


class KeysFirst(nn.MultiheadAttention):
    def forward(self, key: Tensor, query: Tensor, value: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(query, key, value, need_weights=False)[0]


class Multiheads(nn.Module):
    def __init__(self, cls: type[nn.MultiheadAttention], inputs: int) -> None:
        super().__init__()
        self.ln, self.attn, self.inputs = nn.LayerNorm(32), cls(32, 4, batch_first=True), inputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln(x)
        return x + self.attn(*[y] * self.inputs)


@pytest.mark.parametrize(("cls", "inputs"), [(OneInput, 1), (KeysFirst, 3)])
def test_multihead_attention_that_takes_other_arguments(cls: Any, inputs: int) -> None:
    model = nn.Sequential(Multiheads(cls, inputs), Multiheads(cls, inputs))
    for validate in (True, False):
        with pytest.raises(rewire.UnsupportedTopology, match=r"'0\.attn' cannot have separate q/k/v inputs"):
            rewire.compile(model, Apart(), example_inputs=(vectors(width=32),), validate=validate)


def test_the_forward_shows_the_three_reads() -> None:
    rewired = rewire.compile(tiny_model("llama"), Apart())
    block = rewire.source(rewired, "model.layers.1")
    assert "hidden_states = depth.apply(self.input_layernorm, hidden_states)" in block
    assert "depth.through(self.self_attn, qkv=True)(" in block
    for way in "qkv":
        projected = f'depth.project(self.{way}_proj, "{way}")(hidden_states)'
        assert projected in rewire.source(rewired, "model.layers.1.self_attn")
    assert "hidden_states = depth.apply(self.post_attention_layernorm, hidden_states)" in block
    plain = rewire.restore(rewired)
    assert not any(map(is_edited, plain.modules()))


def test_a_rewritten_attention_takes_a_tensor_too() -> None:
    model = NanoGPT().eval()
    rewired = rewire.compile(model, Apart(), example_inputs=(token_ids(),))
    path = next(path for path, module in rewired.named_modules() if is_edited(module) and path.endswith("attn"))
    x = torch.randn(2, 5, 32)
    assert torch.allclose(rewired.get_submodule(path)(x), model.get_submodule(path)(x), atol=1e-6)


def test_parameters_stay_one_and_shared() -> None:
    model = tiny_model("gpt2")
    rewired = rewire.compile(model, Apart())
    own = {id(p) for p in model.parameters()}
    assert {id(p) for n, p in rewired.named_parameters() if "depth_connections" not in n} == own


@pytest.mark.parametrize("adapted", [False, True])
def test_an_adapter_on_a_fused_projection(adapted: bool) -> None:
    """A projection that is no plain linear map any more is called as it is."""
    from peft import LoraConfig, get_peft_model

    read = Reader(tiny_model("gpt2"))
    if adapted:
        get_peft_model(
            read.rewired, LoraConfig(target_modules=["c_attn"], init_lora_weights=False, r=4, fan_in_fan_out=True)
        )
    with torch.no_grad():
        for name, parameter in read.rewired.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
    check_reads(read)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "t5"])
def test_equal_layers_share_the_attention_s_class(model_type: str) -> None:
    """Else torch.compile would compile each layer by itself, and give up after eight."""
    rewired = rewire.compile(tiny_model(model_type), Apart(), validate=False)
    attentions = [m for m in rewired.modules() if is_edited(m) and type(m).__name__.endswith("Attention")]
    cls = {"llama": "LlamaAttention", "gpt2": "GPT2Attention", "t5": "T5Attention"}[model_type]
    assert {type(m).__name__ for m in attentions if type(m).__name__ == cls} == {cls}
    # T5: with and without relative positions, in the encoder and in the decoder
    assert len({type(m) for m in attentions if type(m).__name__ == cls}) <= (4 if model_type == "t5" else 1)


class Swaps(PreNorm):
    """Two streams, of which each adds what it makes of the other, and which change places."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = SeparateAttention()  # type: ignore[assignment]

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        a = a + self.attn(self.ln_1(b))
        b = b + self.mlp(self.ln_2(a))
        return b, a


class Swapping(Stack):
    def forward(self, x: Tensor) -> Tensor:
        a, b = self.inp(x), 2 * self.inp(x)
        for layer in self.layers:
            a, b = layer(a, b)
        return self.out(a + b)


class SwappingInline(Swapping):
    def forward(self, x: Tensor) -> Tensor:
        a, b = self.inp(x), 2 * self.inp(x)
        one, two = self.layers
        a = a + one.attn(one.ln_1(b))
        b = b + one.mlp(one.ln_2(a))
        b = b + two.attn(two.ln_1(a))
        a = a + two.mlp(two.ln_2(b))
        return self.out(b + a)


@pytest.mark.parametrize("topology", ["residual", "ancre-ingoing", "hc-dynamic"])
def test_a_block_that_makes_the_next_state_among_others(topology: str) -> None:
    model = Swapping(Swaps, 2)
    rewired = rewire.compile(model, topology, example_inputs=(vectors(),))
    torch.testing.assert_close(rewired(vectors()), model(vectors()))


def test_attentions_that_do_not_read_the_state_that_they_are_added_to() -> None:
    with pytest.raises(rewire.UnsupportedTopology, match="does not read the state"):
        rewire.compile(SwappingInline(Swaps, 2), "dca", example_inputs=(vectors(),), validate=False)


class OfTwoKinds(SeparatePreNorm):
    """As Higgs Audio: some tokens pass one norm, the others another one, and are put together by a tensor's method."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        first = (torch.arange(x.shape[1]) < 2)[:, None].expand(x.shape)
        y = x.masked_scatter(first, self.ln_1(x)[first])
        y = y.masked_scatter(mask=~first, source=self.other(y)[~first])
        return x + self.attn(-y + 0.1 * x)


def test_a_method_of_several_values(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(32, 32), *(OfTwoKinds() for _ in range(3)))
    rewired = rewire.compile(model, "muddformer", example_inputs=(vectors(width=32),))  # validated
    assert "masked_scatter(value1, value2), x, first, depth.apply" in rewire.source(rewired, "1")
    assert [len(c.layout.dims.attention) for c in rewire.connections(rewired).values()] == [3] and not caplog.text


class NormOverBatch(nn.BatchNorm1d):
    """Over the channels of [batch, tokens, channels], as in PatchTST."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class BehindDropout(SeparatePreNorm):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.drop = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.drop(self.ln_1(x)))
        return x + self.mlp(self.ln_2(x))


def behind_batch_norm(tracks: bool) -> nn.Module:
    block = SeparatePreNorm()
    block.ln_1 = NormOverBatch(WIDTH, track_running_stats=tracks)
    return block


SEPARATE = ["dca", "muddformer", "attnres:qkv=True"]


@pytest.mark.each_once
@pytest.mark.parametrize("topology", SEPARATE)
@pytest.mark.parametrize(
    ("block", "name"),
    [
        (lambda: behind_batch_norm(True), r"'batch_norm' in 'layers\.0\.ln_1'"),
        (lambda: BehindDropout(0.5), r"'dropout' in 'layers\.0\.drop'"),
    ],
)
def test_what_changes_with_each_call_does_not_run_three_times(block: Any, name: str, topology: str) -> None:
    """Each input would get its own mask, and statistics would be those of all three."""
    model, message = Stack(block), f"{name} stands between the state and the projections"
    with pytest.raises(UnsupportedTopology, match=message):
        rewire.compile(model, topology, example_inputs=(vectors(),))
    rewire.compile(model, "denseformer", example_inputs=(vectors(),))


@pytest.mark.each_once
@pytest.mark.parametrize("topology", SEPARATE)
@pytest.mark.parametrize("block", [lambda: behind_batch_norm(False), lambda: BehindDropout(0.0)])
def test_norms_over_the_batch_and_dropout_of_nothing_may_run_three_times(block: Any, topology: str) -> None:
    rewire.compile(Stack(block), topology, example_inputs=(vectors(),))


@pytest.mark.parametrize(
    ("block", "refused"),
    [
        (lambda: behind_batch_norm(True), True),
        (lambda: BehindDropout(0.5), True),
        (lambda: behind_batch_norm(False), False),
        (lambda: BehindDropout(0.0), False),
    ],
)
def test_the_same_without_inputs(block: Any, refused: bool) -> None:
    """Then modules of torch are not looked into."""
    with pytest.raises(UnsupportedTopology, match="stands between") if refused else contextlib.nullcontext():
        rewire.compile(Stack(block), "dca")
