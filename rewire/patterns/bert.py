"""BERT and RoBERTa: `BertSelfOutput` and `BertOutput` do the adds, each followed by a norm."""

from rewire.patterns.transformers import register_transformers

register_transformers(
    *("bert", "roberta", "xlm-roberta", "camembert", "electra", "data2vec-text", "ernie"),
    description="BERT, RoBERTa, ELECTRA and others with BERT's names",
    attention="self",
    ffn="intermediate",
    qkv=("{branch}.query", "{branch}.key", "{branch}.value"),
)
