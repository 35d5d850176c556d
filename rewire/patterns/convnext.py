"""ConvNeXt: one branch a block, no attention."""

from rewire.patterns.transformers import register_transformers

register_transformers("convnext", "convnextv2", description="ConvNeXt")
