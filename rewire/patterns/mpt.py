"""MPT: the MLP takes the residual as an argument and adds it itself."""

from rewire.patterns.pattern import thirds
from rewire.patterns.transformers import register_transformers

register_transformers(
    "mpt", description="MPT", attention="attn", ffn=r"ffn(\..*)?", qkv=("{branch}.Wqkv",), fused=thirds
)
