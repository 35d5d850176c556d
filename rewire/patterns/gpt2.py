"""GPT-2 (one fused Conv1D for q, k and v) and GPT-BigCode (one key-value head for all queries)."""

from typing import Any

from rewire.kernels.fused_qkv import Fused
from rewire.patterns.pattern import thirds
from rewire.patterns.transformers import register_transformers

register_transformers("gpt2", description="GPT-2", attention="attn", ffn="mlp", qkv=("{branch}.c_attn",), fused=thirds)


def _bigcode(_projection: Any, attention: Any) -> Fused:
    if attention.multi_query:
        return Fused(1, (attention.embed_dim, attention.kv_dim, attention.kv_dim))
    return Fused(attention.num_heads, (attention.head_dim,) * 3)


register_transformers(
    "gpt_bigcode",
    description="GPT-BigCode, StarCoder",
    attention="attn",
    ffn="mlp",
    qkv=("{branch}.c_attn",),
    fused=_bigcode,
)
