"""DINOv2 and DINOv3: a learned scale on each branch."""

from rewire.patterns.transformers import Q_K_V, register_transformers

register_transformers(
    *("dinov2", "dinov2_with_registers", "dinov3_vit"),
    description="DINOv2 and DINOv3",
    attention="attention",
    ffn="mlp",
    qkv=Q_K_V,
)
