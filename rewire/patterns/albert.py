"""ALBERT: one block, called again and again; its attention adds and normalises by itself."""

from rewire.patterns.transformers import register_transformers

register_transformers("albert", description="ALBERT", attention="query", ffn="ffn", qkv=("query", "key", "value"))
