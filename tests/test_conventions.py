"""Names that models give their parts: those that the comments cite are known, and their neighbours are not."""

import re

import pytest
from torch import nn

from rewire import conventions
from rewire.conventions import is_adaptive_norm, is_linear, is_matrix, is_norm, matrices, out_features

#: Convention -> names that it knows, and names that it does not.
NAMES = {
    "POSITIONAL": ("pos_embed embed_positions.pos ppeg peg cpe pos_conv_embed", "attn compose pooler"),
    "FUSED_QKV": ("qkv Wqkv qkv_proj c_attn in_proj query_key_value", "q_proj c_proj out_proj"),
    "LAST_LAYER": (
        "attn.o_proj mlp.down_proj c_proj fc2 w2 dense_4h_to_h lin2 to_out.0 output.dense",
        "up_proj fc1 w1",
    ),
    "OUTPUT_LAYER": (
        "lm_head.weight head classifier score qa_outputs proj_out_2 fc output tail",
        "layers.0.fc1 headroom",
    ),
    "EMBEDDING_TABLE": ("cls_token pos_embed relative_position_bias_table latents queries", "weight gamma"),
    "ROUTER": ("mlp.gate.weight mlp.router.weight gate.wg.weight", "gate_proj up_gate"),
    "EXPERTS": ("mlp.experts.gate_up_proj GptOssExperts", "mlp"),
    "FUSED_GATE": ("experts.gate_up_proj", "gate_proj"),
    "MODULATION": ("adaLN_modulation img_modulation film", "norm1"),
    "LINEAR_CLASS": ("MixtralTopKRouter DeepseekV3TopkRouter MoEGate FalconLinear", "Embedding"),
    "NOT_ZERO_AT_ZERO": ("sigmoid Softmax exp cos", "relu tanh"),
    "NORM": ("LlamaRMSNorm BatchNorm2d input_layernorm", "RMS attn"),
}
BRANCHES = {
    "cross-attention": "crossattention encoder_attn EncDecAttention multihead_attn",
    "attention": "self_attn attn SelfAttention msa _sa_block",
    "conv": "conv1 conv_dw",
    "ffn": "mlp ffn ff feed_forward block_sparse_moe fc1 intermediate _ff_block linear1 DenseReluDense",
}


@pytest.mark.parametrize("convention", NAMES)
def test_names(convention: str) -> None:
    pattern: re.Pattern[str] = getattr(conventions, convention)
    known, others = NAMES[convention]
    assert all(map(pattern.search, known.split())) and not any(map(pattern.search, others.split()))


def test_branches() -> None:
    assert BRANCHES.keys() == conventions.BRANCHES.keys()
    assert all(conventions.BRANCHES[kind].search(name) for kind, names in BRANCHES.items() for name in names.split())


class AdaLayerNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 8), nn.LayerNorm(4, elementwise_affine=False)


def test_modules() -> None:
    norms = (nn.LayerNorm(4), nn.RMSNorm(4), nn.GroupNorm(2, 4), nn.BatchNorm2d(4), AdaLayerNorm().norm)
    assert all(map(is_norm, norms)) and not any(map(is_linear, norms))
    assert not is_norm(AdaLayerNorm()) and is_adaptive_norm(AdaLayerNorm()) and not is_adaptive_norm(nn.LayerNorm(4))
    linear = (nn.Linear(4, 3), nn.Conv2d(4, 3, 1), nn.ConvTranspose1d(4, 3, 1))
    assert all(map(is_linear, linear)) and not any(map(is_norm, linear)) and not is_norm(nn.PReLU(4))
    assert out_features(linear[0]) == 3 and out_features(norms[0]) is None
    assert is_matrix((3, 4)) and not any(map(is_matrix, [(), (4,), (4, 1, 1), (1, 1, 4)]))
    assert matrices(nn.MultiheadAttention(4, 2)) == 2
