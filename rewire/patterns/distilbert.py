"""DistilBERT."""

from rewire.patterns.transformers import register_transformers

register_transformers(
    "distilbert",
    description="DistilBERT",
    attention="attention",
    ffn="ffn",
    qkv=("{branch}.q_lin", "{branch}.k_lin", "{branch}.v_lin"),
)
