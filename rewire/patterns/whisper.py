"""Whisper."""

from rewire.patterns.transformers import Q_K_V, register_transformers

register_transformers("whisper", description="Whisper", attention="self_attn", ffn="fc1", qkv=Q_K_V)
