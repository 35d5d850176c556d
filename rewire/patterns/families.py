"""Architectures of transformers that are known by the names of their branches and projections alone.

Where one projection makes queries, keys and values, a function says how its output is laid out.
"""

from typing import Any

from rewire.mixes.fused_qkv import Fused
from rewire.patterns.pattern import thirds
from rewire.patterns.transformers import Q_K_V, register_transformers


def _by_head(_projection: Any, attention: Any) -> Fused:
    """For each head its queries, keys and values."""
    return Fused(attention.num_heads, (attention.head_dim,) * 3)


def _gpt_neox(_projection: Any, attention: Any) -> Fused:
    """For each head its queries, keys and values, as above."""
    return Fused(attention.config.num_attention_heads, (attention.head_size,) * 3)


def _falcon(_projection: Any, attention: Any) -> Fused:
    """For each head its queries, with one key-value head for all of them, or one for each group of them."""
    heads, size = attention.num_heads, attention.head_dim
    if attention.new_decoder_architecture:
        keys = attention.num_kv_heads
        return Fused(keys, (heads // keys * size, size, size))
    return Fused(1, (heads * size, size, size)) if attention.multi_query else Fused(heads, (size, size, size))


def _bigcode(projection: Any, attention: Any) -> Fused:
    """For each head its queries, keys and values; or all queries, and one key-value head."""
    if attention.multi_query:
        return Fused(1, (attention.embed_dim, attention.kv_dim, attention.kv_dim))
    return _by_head(projection, attention)


def _phi3(_projection: Any, attention: Any) -> Fused:
    """All queries, then the keys, then the values of fewer heads."""
    config, size = attention.config, attention.head_dim
    keys = config.num_key_value_heads * size
    return Fused(1, (config.num_attention_heads * size, keys, keys))


# One block, called again and again; its attention adds and normalises by itself.
register_transformers("albert", description="ALBERT", attention="query", ffn="ffn", qkv=("query", "key", "value"))

# Encoder and decoder, the MLP two linear maps of the block itself.
register_transformers(
    *("bart", "mbart", "marian", "pegasus", "m2m_100", "blenderbot", "blenderbot-small", "plbart"),
    description="BART, mBART, Marian, Pegasus, M2M-100 and Blenderbot",
    attention="self_attn",
    ffn="fc1",
    qkv=Q_K_V,
)

# `BertSelfOutput` and `BertOutput` do the adds, each followed by a norm.
register_transformers(
    *("bert", "roberta", "xlm-roberta", "camembert", "electra", "data2vec-text", "ernie"),
    description="BERT, RoBERTa, ELECTRA and others with BERT's names",
    attention="self",
    ffn="intermediate",
    qkv=("{branch}.query", "{branch}.key", "{branch}.value"),
)

# Attention and MLP take the residual as an argument and add it themselves.
register_transformers(
    "bloom",
    description="BLOOM",
    attention=r"self_attention(\..*)?",
    ffn=r"mlp(\..*)?",
    qkv=("self_attention.query_key_value",),
    fused=_by_head,
)

# Two encoders with the same names.
register_transformers(
    *("clip", "clip_text_model", "clip_vision_model", "siglip", "siglip_text_model", "siglip_vision_model"),
    description="CLIP and SigLIP",
    attention="self_attn",
    ffn="mlp",
    qkv=Q_K_V,
)

# One branch a block, no attention.
register_transformers("convnext", "convnextv2", description="ConvNeXt")

# Multi-head latent attention: what reads the stream are down-projections, k and v fused into one.
register_transformers(
    "deepseek_v3",
    description="DeepSeek V3 and R1 (latent attention)",
    attention="self_attn",
    ffn="mlp",
    qkv=("{branch}.q_a_proj", "{branch}.kv_a_proj_with_mqa"),
)

# A learned scale on each branch.
register_transformers(
    *("dinov2", "dinov2_with_registers", "dinov3_vit"),
    description="DINOv2 and DINOv3",
    attention="attention",
    ffn="mlp",
    qkv=Q_K_V,
)

register_transformers(
    "distilbert",
    description="DistilBERT",
    attention="attention",
    ffn="ffn",
    qkv=("{branch}.q_lin", "{branch}.k_lin", "{branch}.v_lin"),
)

# Attention and MLP in parallel, or one after the other as the config says.
register_transformers(
    "falcon",
    description="Falcon",
    attention="self_attention",
    ffn="mlp",
    qkv=("{branch}.query_key_value",),
    fused=_falcon,
)

# The fused projection is a Conv1D.
register_transformers("gpt2", description="GPT-2", attention="attn", ffn="mlp", qkv=("{branch}.c_attn",), fused=thirds)

register_transformers(
    "gpt_bigcode",
    description="GPT-BigCode, StarCoder",
    attention="attn",
    ffn="mlp",
    qkv=("{branch}.c_attn",),
    fused=_bigcode,
)

# Attention and MLP in parallel, or one after the other as the config says.
register_transformers(
    "gpt_neox",
    description="GPT-NeoX and Pythia",
    attention="attention",
    ffn="mlp",
    qkv=("{branch}.query_key_value",),
    fused=_gpt_neox,
)

# Attention and MLP in parallel.
register_transformers("gptj", description="GPT-J", attention="attn", ffn="mlp", qkv=Q_K_V)

# And the many that share Llama's names: `self_attn` with q, k and v apart, then `mlp`.
register_transformers(
    *("llama", "mistral", "ministral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3"),
    *("gemma", "gemma2", "gemma3_text", "granite", "helium", "glm", "glm4", "gpt_oss", "exaone4", "ernie4_5"),
    *("cohere", "cohere2", "olmo", "olmo2", "olmo3", "olmoe", "starcoder2", "stablelm", "nemotron", "apertus", "arcee"),
    description="Llama, Mistral, Qwen, Gemma, Granite, OLMo, Cohere and other decoders with Llama's names",
    attention="self_attn",
    ffn="mlp",
    qkv=Q_K_V,
)

# The MLP takes the residual as an argument and adds it itself.
register_transformers(
    "mpt", description="MPT", attention="attn", ffn=r"ffn(\..*)?", qkv=("{branch}.Wqkv",), fused=thirds
)

# The MLP is two linear maps of the block itself.
register_transformers(
    *("opt", "xglm", "biogpt"), description="OPT, XGLM and BioGPT", attention="self_attn", ffn="fc1", qkv=Q_K_V
)

# Attention and MLP in parallel.
register_transformers("phi", description="Phi 1 and 2", attention="self_attn", ffn="mlp", qkv=Q_K_V)

register_transformers(
    "phi3", description="Phi 3 and 4", attention="self_attn", ffn="mlp", qkv=("{branch}.qkv_proj",), fused=_phi3
)

# One branch a block, an activation after each add.
register_transformers("resnet", description="ResNet")

# The width changes between stages, so that each stage is a trunk.
register_transformers("swin", description="Swin", attention="attention", ffn="mlp", qkv=Q_K_V)

# Each sublayer is a block of its own.
register_transformers(
    *("t5", "mt5", "umt5"),
    description="T5, mT5 and UMT5",
    attention="SelfAttention",
    ffn="DenseReluDense",
    qkv=("{branch}.q", "{branch}.k", "{branch}.v"),
)

register_transformers("vit", "deit", description="ViT and DeiT", attention="attention", ffn="mlp", qkv=Q_K_V)

# With the norm before or after each branch.
register_transformers(
    *("wav2vec2", "hubert", "wavlm"),
    description="wav2vec 2.0, HuBERT and WavLM",
    attention="attention",
    ffn="feed_forward",
    qkv=Q_K_V,
)

register_transformers("whisper", description="Whisper", attention="self_attn", ffn="fc1", qkv=Q_K_V)
