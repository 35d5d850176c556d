"""GPT-NeoX and Pythia: attention and MLP in parallel, or one after the other as the config says."""

from rewire.kernels.fused_qkv import Fused
from rewire.patterns.transformers import register_transformers

register_transformers(
    "gpt_neox",
    description="GPT-NeoX and Pythia",
    attention="attention",
    ffn="mlp",
    qkv=("{branch}.query_key_value",),
    fused=lambda _projection, attention: Fused(attention.config.num_attention_heads, (attention.head_size,) * 3),
)
