"""Known architectures of transformers, and what their forwards do not show.

Their branches and projections have usual names, or are recognised by their use. A trace without inputs may not show the
layout of a fused projection's output; for these a function here gives it.
"""

from typing import Any

from rewire.mixes.fused_qkv import Fused
from rewire.patterns.pattern import thirds
from rewire.patterns.transformers import register_transformers


def _gpt_neox(_projection: object, attention: Any) -> Fused:
    """For each head its queries, keys and values."""
    return Fused(attention.config.num_attention_heads, (attention.head_size,) * 3)


def _falcon(_projection: object, attention: Any) -> Fused:
    """For each head its queries, with one key-value head for all of them, or one for each group."""
    heads, size = attention.num_heads, attention.head_dim
    if attention.new_decoder_architecture:
        keys = attention.num_kv_heads
        return Fused(keys, (heads // keys * size, size, size))
    return Fused(1, (heads * size, size, size)) if attention.multi_query else Fused(heads, (size, size, size))


def _bigcode(_projection: object, attention: Any) -> Fused:
    """For each head its queries, keys and values; or all queries, and one key-value head."""
    if attention.multi_query:
        return Fused(1, (attention.embed_dim, attention.kv_dim, attention.kv_dim))
    return Fused(attention.num_heads, (attention.head_dim,) * 3)


register_transformers("albert", description="ALBERT")
register_transformers(
    *("bart", "mbart", "marian", "pegasus", "m2m_100", "blenderbot", "blenderbot-small", "plbart"),
    description="BART, mBART, Marian, Pegasus, M2M-100 and Blenderbot",
)
register_transformers(
    *("bert", "roberta", "xlm-roberta", "camembert", "electra", "data2vec-text", "ernie"),
    description="BERT, RoBERTa, ELECTRA and others with BERT's names",
)
register_transformers("bloom", description="BLOOM")
register_transformers(
    *("clip", "clip_text_model", "clip_vision_model", "siglip", "siglip_text_model", "siglip_vision_model"),
    description="CLIP and SigLIP",
)
register_transformers("convnext", "convnextv2", description="ConvNeXt")
register_transformers("deepseek_v3", description="DeepSeek V3 and R1 (latent attention)")
register_transformers("dinov2", "dinov2_with_registers", "dinov3_vit", description="DINOv2 and DINOv3")
register_transformers("distilbert", description="DistilBERT")
register_transformers("falcon", description="Falcon", qkv=("{branch}.query_key_value",), fused=_falcon)
register_transformers("gpt2", description="GPT-2")
register_transformers("gpt_bigcode", description="GPT-BigCode, StarCoder", qkv=("{branch}.c_attn",), fused=_bigcode)
register_transformers("gpt_neox", description="GPT-NeoX and Pythia", qkv=("{branch}.query_key_value",), fused=_gpt_neox)
register_transformers("gptj", description="GPT-J")
register_transformers(
    *("llama", "mistral", "ministral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3"),
    *("gemma", "gemma2", "gemma3_text", "granite", "helium", "glm", "glm4", "gpt_oss", "exaone4", "ernie4_5"),
    *("cohere", "cohere2", "olmo", "olmo2", "olmo3", "olmoe", "starcoder2", "stablelm", "nemotron", "apertus", "arcee"),
    description="Llama, Mistral, Qwen, Gemma, Granite, OLMo, Cohere and other decoders with Llama's names",
)
register_transformers("mpt", description="MPT", qkv=("{branch}.Wqkv",), fused=thirds)
register_transformers("opt", "xglm", "biogpt", description="OPT, XGLM and BioGPT")
register_transformers("phi", description="Phi 1 and 2")
register_transformers("phi3", description="Phi 3 and 4")
register_transformers("resnet", description="ResNet")
register_transformers("swin", description="Swin")
register_transformers("t5", "mt5", "umt5", description="T5, mT5 and UMT5")
register_transformers("vit", "deit", description="ViT and DeiT")
register_transformers("wav2vec2", "hubert", "wavlm", description="wav2vec 2.0, HuBERT and WavLM")
register_transformers("whisper", description="Whisper")
