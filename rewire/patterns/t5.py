"""T5: each sublayer is a block of its own."""

from rewire.patterns.transformers import register_transformers

register_transformers(
    *("t5", "mt5", "umt5"),
    description="T5, mT5 and UMT5",
    attention="SelfAttention",
    ffn="DenseReluDense",
    qkv=("{branch}.q", "{branch}.k", "{branch}.v"),
)
