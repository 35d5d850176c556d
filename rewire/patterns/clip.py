"""CLIP and SigLIP: two encoders with the same names."""

from rewire.patterns.transformers import Q_K_V, register_transformers

register_transformers(
    *("clip", "clip_text_model", "clip_vision_model", "siglip", "siglip_text_model", "siglip_vision_model"),
    description="CLIP and SigLIP",
    attention="self_attn",
    ffn="mlp",
    qkv=Q_K_V,
)
