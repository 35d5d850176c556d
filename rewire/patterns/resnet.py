"""ResNet: one branch a block, an activation after each add."""

from rewire.patterns.transformers import register_transformers

register_transformers("resnet", description="ResNet")
