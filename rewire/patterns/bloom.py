"""BLOOM: attention and MLP take the residual as an argument and add it themselves."""

from rewire.patterns.transformers import register_transformers

register_transformers(
    "bloom",
    description="BLOOM",
    attention=r"self_attention(\..*)?",
    ffn=r"mlp(\..*)?",
    qkv=("self_attention.query_key_value",),
)
