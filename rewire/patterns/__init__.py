"""Registry of architectures: one short declarative file each. Importing this package registers all of them."""

from rewire.patterns import torch_layers, transformers
from rewire.patterns.pattern import Pattern, first_given, patterns, patterns_for, register_pattern

__all__ = ["Pattern", "first_given", "patterns", "patterns_for", "register_pattern", "torch_layers", "transformers"]
