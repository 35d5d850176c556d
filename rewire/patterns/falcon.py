"""Falcon: attention and MLP in parallel, or one after the other as the config says."""

from typing import Any

from rewire.kernels.fused_qkv import Fused
from rewire.patterns.transformers import register_transformers


def _fused(_projection: Any, attention: Any) -> Fused:
    heads, size = attention.num_heads, attention.head_dim
    if attention.new_decoder_architecture:
        keys = attention.num_kv_heads
        return Fused(keys, (heads // keys * size, size, size))
    return Fused(1, (heads * size, size, size)) if attention.multi_query else Fused(heads, (size, size, size))


register_transformers(
    "falcon",
    description="Falcon",
    attention="self_attention",
    ffn="mlp",
    qkv=("{branch}.query_key_value",),
    fused=_fused,
)
