"""GPT-2: one fused Conv1D for q, k and v."""

from rewire.patterns.transformers import register_transformers

register_transformers(
    *("gpt2", "gpt_bigcode"),
    description="GPT-2 and GPT-BigCode",
    attention="attn",
    ffn="mlp",
    qkv=("{branch}.c_attn",),
)
