"""Architectures that already have learned depth connections: they are recognised and left alone."""

from rewire.patterns.transformers import register_transformers

register_transformers("deepseek_v4", description="DeepSeek V4", learned="manifold-constrained hyper-connections (mHC)")
register_transformers("glm5_next", "glm5_next_text", description="GLM-5 Next", learned="hyper-connections (mHC)")
register_transformers("hy_v4", "hy_v4_vl", "hy_v4_vl_text", description="Hunyuan V4", learned="hyper-connections")
register_transformers("qwen4_exp", "qwen4_exp_text", description="Qwen4 Exp", learned="gated hyper-connections")
register_transformers("gemma3n", "gemma3n_text", description="Gemma 3n", learned="learned residuals (LAuReL) and AltUp")
register_transformers(
    *("inkling2", "inkling2_text", "inkling2_loop", "inkling2_loop_text"),
    description="Inkling 2",
    learned="attention residuals",
)
register_transformers("muse_spark", "muse_spark_text", description="Muse Spark", learned="variance-preserving gates")
register_transformers("doge", description="Doge", learned="learned scales of the shortcuts")
register_transformers("zaya", description="ZAYA1", learned="learned scales and biases of shortcuts and branches")
register_transformers("neomme", description="NeoMME", learned="learned mixes of blocks' inputs and the embeddings")
register_transformers("dory", description="Dory", learned="learned rates of moving to each update, on the unit sphere")
