"""Swin: the width changes between stages, so that each stage is a trunk."""

from rewire.patterns.transformers import Q_K_V, register_transformers

register_transformers("swin", description="Swin", attention="attention", ffn="mlp", qkv=Q_K_V)
