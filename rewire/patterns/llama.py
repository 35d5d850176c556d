"""Llama, and the many that share its names: `self_attn` with q, k and v apart, then `mlp`."""

from rewire.patterns.transformers import Q_K_V, register_transformers

register_transformers(
    *("llama", "mistral", "ministral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3"),
    *("gemma", "gemma2", "gemma3_text", "granite", "helium", "glm", "glm4", "gpt_oss", "exaone4", "ernie4_5"),
    *("cohere", "cohere2", "olmo", "olmo2", "olmo3", "olmoe", "starcoder2", "stablelm", "nemotron", "apertus", "arcee"),
    description="Llama, Mistral, Qwen, Gemma, Granite, OLMo, Cohere and other decoders with Llama's names",
    attention="self_attn",
    ffn="mlp",
    qkv=Q_K_V,
)
