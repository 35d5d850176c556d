"""Phi 1 and 2 (attention and MLP in parallel) and Phi 3 (one after the other, fused projection)."""

from typing import Any

from rewire.kernels.fused_qkv import Fused
from rewire.patterns.transformers import Q_K_V, register_transformers

register_transformers("phi", description="Phi 1 and 2", attention="self_attn", ffn="mlp", qkv=Q_K_V)


def _phi3(_projection: Any, attention: Any) -> Fused:
    config, size = attention.config, attention.head_dim
    keys = config.num_key_value_heads * size
    return Fused(1, (config.num_attention_heads * size, keys, keys))


register_transformers(
    "phi3", description="Phi 3 and 4", attention="self_attn", ffn="mlp", qkv=("{branch}.qkv_proj",), fused=_phi3
)
