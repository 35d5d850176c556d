"""Registry of architectures, as short declarations. Importing this package registers all of them."""

import importlib
import pkgutil

from rewire.patterns.pattern import Pattern, first_given, is_pretrained, list_patterns, patterns_for, register_pattern

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")

__all__ = ["Pattern", "first_given", "is_pretrained", "list_patterns", "patterns_for", "register_pattern"]
