"""OPT and its relatives: the MLP is two linear maps of the block itself."""

from rewire.patterns.transformers import Q_K_V, register_transformers

register_transformers(
    *("opt", "xglm", "biogpt"),
    description="OPT, XGLM and BioGPT",
    attention="self_attn",
    ffn="fc1",
    qkv=Q_K_V,
)
