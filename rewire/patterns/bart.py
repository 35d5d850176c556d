"""BART and its relatives: encoder and decoder, the MLP two linear maps of the block itself."""

from rewire.patterns.transformers import Q_K_V, register_transformers

register_transformers(
    *("bart", "mbart", "marian", "pegasus", "m2m_100", "blenderbot", "blenderbot-small", "plbart"),
    description="BART, mBART, Marian, Pegasus, M2M-100 and Blenderbot",
    attention="self_attn",
    ffn="fc1",
    qkv=Q_K_V,
)
