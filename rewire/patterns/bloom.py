"""BLOOM: attention and MLP take the residual as an argument and add it themselves."""

from rewire.kernels.fused_qkv import Fused
from rewire.patterns.transformers import register_transformers

register_transformers(
    "bloom",
    description="BLOOM",
    attention=r"self_attention(\..*)?",
    ffn=r"mlp(\..*)?",
    qkv=("self_attention.query_key_value",),
    fused=lambda _projection, attention: Fused(attention.num_heads, (attention.head_dim,) * 3),
)
