"""GPT-J: attention and MLP in parallel."""

from rewire.patterns.transformers import Q_K_V, register_transformers

register_transformers("gptj", description="GPT-J", attention="attn", ffn="mlp", qkv=Q_K_V)
