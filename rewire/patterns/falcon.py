"""Falcon: attention and MLP in parallel, or one after the other as the config says."""

from rewire.patterns.transformers import register_transformers

register_transformers(
    "falcon",
    description="Falcon",
    attention="self_attention",
    ffn="mlp",
    qkv=("{branch}.query_key_value",),
)
