"""ViT and DeiT."""

from rewire.patterns.transformers import Q_K_V, register_transformers

register_transformers("vit", "deit", description="ViT and DeiT", attention="attention", ffn="mlp", qkv=Q_K_V)
