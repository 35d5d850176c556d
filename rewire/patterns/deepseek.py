"""DeepSeek's multi-head latent attention: what reads the stream are down-projections, k and v fused into one."""

from rewire.patterns.transformers import register_transformers

register_transformers(
    "deepseek_v3",
    description="DeepSeek V3 and R1 (latent attention)",
    attention="self_attn",
    ffn="mlp",
    qkv=("{branch}.q_a_proj", "{branch}.kv_a_proj_with_mqa"),
)
