"""Phi 1 and 2 (attention and MLP in parallel) and Phi 3 (one after the other, fused projection)."""

from rewire.patterns.transformers import Q_K_V, register_transformers

register_transformers("phi", description="Phi 1 and 2", attention="self_attn", ffn="mlp", qkv=Q_K_V)
register_transformers("phi3", description="Phi 3 and 4", attention="self_attn", ffn="mlp", qkv=("{branch}.qkv_proj",))
