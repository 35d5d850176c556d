"""Queries, keys and values read apart: each projection gets its own read, and nothing else.

Told without knowing any layout: with all biases zero, keys of zero make the attention's weights uniform, whatever the
queries are; queries of zero do so whatever the keys are; values of zero make its output zero, whatever both are.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from models import Mlp, NanoGPT, token_ids, vectors
from torch import Tensor, nn

import rewire
from rewire.kernels.fused_qkv import Fused, project_fused
from rewire.passes.install import is_rewritten
from rewire.passes.validate import normalise_inputs, relative_error, tensors_in
from rewire.patterns import first_given, patterns_for
from rewire.patterns.tiny import timm_model, tiny_model
from rewire.topologies.base import Dims, Start, States, total


@dataclasses.dataclass(frozen=True)
class Apart(rewire.Topology):
    """The plain residual network, except that way w of an attention reads ``a_w x + b_w flip(x)``."""

    reads_qkv = True

    def parameters(self, dims: Dims, start: Start) -> dict[str, Tensor]:
        return {"ways": torch.tensor([[1.0, 0.0]] * 3)}

    def weights(self, parameters: dict[str, Tensor], dims: Dims) -> Any:
        return parameters["ways"], dims.attention

    def read(self, states: States, weights: Any, t: int) -> Tensor | rewire.Ways:
        (x,), (ways, attention) = states, weights
        if t not in attention:
            return x
        q, k, v = (a.to(x.dtype) * x + b.to(x.dtype) * x.flip(-1) for a, b in ways)
        return rewire.Ways(q, k, v, x)

    def merge(self, states: States, weights: Any, t: int, *branches: Tensor) -> Tensor:
        return states[0] + total(branches)

    def push(self, states: States, weights: Any, t: int, x: Tensor) -> States:
        return (x,)

    def finish(self, states: States, weights: Any, dims: Dims) -> Tensor:
        return states[0]

    def matrix(self, weights: Any, dims: Dims) -> Tensor:
        return torch.eye(dims.depth)


ZERO, SAME, OTHER = (0.0, 0.0), (1.0, 0.0), (0.0, 1.0)


class Reader:
    """A rewired model without biases, run with given reads."""

    def __init__(self, model: nn.Module, example_inputs: Any = None) -> None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias") and "relative" not in name:
                    parameter.zero_()
        make = first_given(patterns_for(model), "example_inputs")
        self.inputs = make(model) if example_inputs is None else normalise_inputs(example_inputs)
        self.model = model.eval()
        self.rewired = rewire.compile(model, Apart(), example_inputs=example_inputs)  # compares it with the original

    def __call__(self, q: Any, k: Any, v: Any) -> Tensor:
        with torch.no_grad():
            for connection in rewire.connections(self.rewired).values():
                connection.get_parameter("ways").copy_(torch.tensor([q, k, v]))
            output = tensors_in(self.rewired(*self.inputs[0], **self.inputs[1]))
        return torch.cat([t.flatten() for t in output if t.is_floating_point()])


def check_reads(read: Reader) -> None:
    plain = read(SAME, SAME, SAME)
    for way in range(3):  # each of the three matters
        ways = [OTHER if n == way else SAME for n in range(3)]
        assert relative_error(plain, read(*ways)) > 1e-4, way
    assert relative_error(read(SAME, ZERO, SAME), read(OTHER, ZERO, SAME)) < 1e-6
    assert relative_error(read(ZERO, SAME, SAME), read(ZERO, OTHER, SAME)) < 1e-6
    assert relative_error(read(SAME, SAME, ZERO), read(OTHER, OTHER, ZERO)) < 1e-6


TRANSFORMERS = [
    *("llama", "qwen3", "gemma2", "cohere", "olmo2", "phi", "gptj", "mixtral", "bert", "distilbert", "albert", "t5"),
    *("bart", "opt", "whisper", "vit", "dinov2", "swin", "clip", "wav2vec2"),
    *("gpt2", "gpt_neox", "gpt_bigcode", "phi3", "falcon", "bloom"),
]


@pytest.mark.parametrize("model_type", TRANSFORMERS)
def test_transformers(model_type: str) -> None:
    check_reads(Reader(tiny_model(model_type)))


@pytest.mark.parametrize("options", [{"multi_query": False}, {"new_decoder_architecture": True, "num_kv_heads": 2}])
def test_grouped_layouts(options: dict[str, Any]) -> None:
    from transformers import FalconConfig, FalconForCausalLM

    config = FalconConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=97, alibi=False, **options
    )
    check_reads(Reader(FalconForCausalLM(config)))


def test_grouped_layouts_without_a_shared_head() -> None:
    from transformers import GPTBigCodeConfig, GPTBigCodeForCausalLM

    config = GPTBigCodeConfig(n_embd=64, n_layer=2, n_head=4, vocab_size=97, n_positions=32, multi_query=False)
    check_reads(Reader(GPTBigCodeForCausalLM(config)))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_tiny_patch16_224", {"img_size": 32, "depth": 2}),
        ("deit3_small_patch16_224", {"img_size": 32, "depth": 2, "init_values": 1.0}),
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


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: tiny_model("deepseek_v3"), r"layers\.0\.self_attn' cannot.*kv_a_proj_with_mqa.*register a pattern"),
        (lambda: tiny_model("mpt"), r"blocks\.0\.attn' cannot.*cannot be traced.*register a pattern"),
        (lambda: timm_model("eva02_tiny_patch14_224"), r"'blocks\.0\.attn' cannot.*does not call qkv on its input"),
        (lambda: timm_model("swin_tiny_patch4_window7_224"), r"'layers\.0\.blocks\.0\._attn' cannot.*to attn\.qkv"),
    ],
    ids=["latent", "mpt", "timm-swin", "timm-eva"],
)
def test_what_is_refused(model: Any, message: str) -> None:
    with pytest.raises(rewire.UnsupportedTopology, match=message):
        rewire.compile(model(), Apart())


# -- models that no pattern knows ------------------------------------------------------------------------------------


class Multihead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln, self.mix = nn.LayerNorm(32), nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln(x)
        return x + self.mix(y, y, value=y, need_weights=False)[0]


class HeadsInside(nn.Module):
    """Interleaved heads, (head, three, size), taken apart by a view."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order, self.to_qkv, self.out = order, nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        if self.order == "heads inside":
            q, k, v = self.to_qkv(x).reshape(b, n, 4, 3, 8).permute(3, 0, 2, 1, 4)
        elif self.order == "heads outside":
            q, k, v = self.to_qkv(x).view(b, n, 3, 4, 8).permute(2, 0, 3, 1, 4)
        else:
            q, k, v = (part.view(b, n, 4, 8).transpose(1, 2) for part in torch.chunk(self.to_qkv(x), 3, dim=-1))
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(b, n, d))


class OwnBlock(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(32), attention
        self.ln_2, self.mlp = nn.LayerNorm(32), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


@pytest.mark.parametrize("order", ["heads inside", "heads outside", "chunk"])
def test_fused_layouts_are_told_by_their_use(order: str) -> None:
    model = nn.Sequential(*[OwnBlock(HeadsInside(order)) for _ in range(2)])
    check_reads(Reader(model, (vectors(width=32),)))


def test_multihead_attention() -> None:
    check_reads(Reader(nn.Sequential(Multihead(), Multihead()), (vectors(width=32),)))


def test_a_split_tells_the_layout() -> None:
    check_reads(Reader(NanoGPT(), (token_ids(),)))


class Tangled(nn.Module):
    """A fused projection that is taken apart in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.qkv(x)
        q, k, v = y[..., 0::3], y[..., 1::3], y[..., 2::3]
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v))


class Functional(nn.Module):
    """Its forward uses the projections' weights, and does not call them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (nn.functional.linear(x, m.weight, m.bias) for m in (self.q, self.k, self.v))
        return nn.functional.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        (Tangled, r"'0\.attn' cannot read its queries.*0': attn\.qkv, attn\.out, mlp\.up.*pattern with `qkv`.*`fused`"),
        (Functional, r"'0\.attn' cannot read.*does not call q, k, v on its input.*pattern whose `qkv` names"),
    ],
)
def test_what_cannot_be_taken_apart(attention: type[nn.Module], message: str) -> None:
    model = nn.Sequential(*[OwnBlock(attention()) for _ in range(2)])
    with pytest.raises(rewire.UnsupportedTopology, match=message):
        rewire.compile(model, Apart(), example_inputs=(vectors(width=32),))


# -- what the rewritten attention is like ----------------------------------------------------------------------------


def test_the_forward_shows_the_three_reads() -> None:
    rewired = rewire.compile(tiny_model("llama"), Apart())
    block = rewire.source(rewired, "model.layers.1")
    for way in "qkv":
        assert f"input_layernorm_{way} = self.input_layernorm(read.{way})" in block
        assert f"self.{way}_proj(hidden_states_ways.{way})" in rewire.source(rewired, "model.layers.1.self_attn")
    assert "post_attention_layernorm = self.post_attention_layernorm(read_1)" in block
    assert "apply_rotary_pos_emb_fn(" in rewire.source(rewired, "model.layers.1.self_attn")  # helpers stay calls
    plain = rewire.restore(rewired)
    assert not any(map(is_rewritten, plain.modules()))


def test_a_rewritten_attention_takes_a_tensor_too() -> None:
    model = NanoGPT().eval()
    rewired = rewire.compile(model, Apart(), example_inputs=(token_ids(),))
    path = next(path for path, module in rewired.named_modules() if is_rewritten(module) and path.endswith("attn"))
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


# -- the fused projection --------------------------------------------------------------------------------------------

LAYOUTS = [Fused(1, (6, 6, 6)), Fused(3, (4, 4, 4)), Fused(2, (8, 4, 4)), Fused(1, (12, 3, 3)), Fused(2, (6, 2, 5))]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["linear", "conv1d", "wrapped"])
def test_each_takes_its_rows(layout: Fused, bias: bool, kind: str) -> None:
    from transformers.pytorch_utils import Conv1D

    linear = nn.Linear(10, layout.rows, bias=bias, dtype=torch.float64)
    projection: nn.Module = linear
    if kind == "conv1d":
        projection = Conv1D(layout.rows, 10).double()
        with torch.no_grad():
            projection.weight.copy_(linear.weight.T)
            projection.bias.copy_(linear.bias if bias else torch.zeros(layout.rows))
    elif kind == "wrapped":
        projection = nn.Sequential(linear)
    inputs = torch.randn(3, 2, 5, 10, dtype=torch.float64)
    got = project_fused(projection, layout.groups, layout.sizes, *inputs)
    features = itertools.cycle([way for way, size in enumerate(layout.sizes) for _ in range(size)])
    for feature, way in zip(range(layout.rows), features, strict=False):
        torch.testing.assert_close(got[..., feature], linear(inputs[way])[..., feature])


def test_the_weight_is_not_copied() -> None:
    """The largest tensor made is the output; a copy of the weight's rows would be larger."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and not func.is_view:
                self.largest = max(self.largest, out.numel())
            return out

    for layout in LAYOUTS:
        linear, inputs = nn.Linear(64, layout.rows), torch.randn(3, 2, 64)
        with Largest() as seen, torch.no_grad():
            out = project_fused(linear, layout.groups, layout.sizes, *inputs)
        assert seen.largest <= max(out.numel(), inputs[0].numel())


def test_bfloat16_and_autocast() -> None:
    linear, inputs = nn.Linear(8, 18).bfloat16(), torch.randn(3, 4, 8)
    assert project_fused(linear, 3, (2, 2, 2), *inputs.bfloat16()).dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert project_fused(linear.float(), 3, (2, 2, 2), *inputs).dtype == torch.bfloat16


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "t5"])
def test_equal_layers_share_the_attention_s_class(model_type: str) -> None:
    """Else torch.compile would compile each layer by itself, and give up after eight."""
    rewired = rewire.compile(tiny_model(model_type), Apart(), validate=False)
    attentions = [m for m in rewired.modules() if is_rewritten(m) and type(m).__name__.endswith("Attention")]
    cls = {"llama": "LlamaAttention", "gpt2": "GPT2Attention", "t5": "T5Attention"}[model_type]
    assert {type(m).__name__ for m in attentions if type(m).__name__ == cls} == {cls}
    # T5: with and without relative positions, in the encoder and in the decoder
    assert len({type(m) for m in attentions if type(m).__name__ == cls}) <= (4 if model_type == "t5" else 1)
