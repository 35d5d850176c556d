"""torch.nn.TransformerEncoderLayer and TransformerDecoderLayer.

Their forwards choose between the layer's definition and a fused fast path for inference. The functions here are the
definition only.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any, cast

from torch import nn

from rewire.patterns.pattern import Pattern, register_pattern


def encoder_layer(self: Any, src, src_mask=None, src_key_padding_mask=None, is_causal=False):  # type: ignore[no-untyped-def]
    x = src
    if self.norm_first:
        x = x + self._sa_block(self.norm1(x), src_mask, src_key_padding_mask, is_causal=is_causal)
        x = x + self._ff_block(self.norm2(x))
    else:
        x = self.norm1(x + self._sa_block(x, src_mask, src_key_padding_mask, is_causal=is_causal))
        x = self.norm2(x + self._ff_block(x))
    return x


def _no_nested_tensors(model: nn.Module) -> None:
    """Switch off nested tensors, which are the fast path's input; the layer's definition takes plain ones."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.enable_nested_tensor = module.use_nested_tensor = False


register_pattern(
    "torch.nn.Transformer",
    Pattern(
        description="torch.nn.TransformerEncoderLayer and TransformerDecoderLayer",
        matches=lambda model: any(
            isinstance(m, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)) for m in model.modules()
        ),
        forwards={
            nn.TransformerEncoderLayer: cast(FunctionType, encoder_layer),
            nn.TransformerDecoderLayer: cast(FunctionType, nn.TransformerDecoderLayer.forward),
        },
        prepare=_no_nested_tensors,
    ),
)
