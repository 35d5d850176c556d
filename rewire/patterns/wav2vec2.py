"""wav2vec 2.0, HuBERT and WavLM, with the norm before or after each branch."""

from rewire.patterns.transformers import Q_K_V, register_transformers

register_transformers(
    *("wav2vec2", "hubert", "wavlm"),
    description="wav2vec 2.0, HuBERT and WavLM",
    attention="attention",
    ffn="feed_forward",
    qkv=Q_K_V,
)
