"""What all Hugging Face models share: inputs that their configs describe."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rewire.patterns.pattern import Inputs, Pattern, is_pretrained, register_pattern
from rewire.patterns.tiny import tiny_twin

_SEQUENCE = 12

Q_K_V = ("{branch}.q_proj", "{branch}.k_proj", "{branch}.v_proj")


def example_inputs(model: nn.Module) -> Inputs:
    """Two short random sequences, images or sounds, as the model's config describes them."""
    config: Any = model.config
    device = next(model.parameters()).device
    kinds = {getattr(model, "main_input_name", "input_ids")}
    if hasattr(config, "text_config") and hasattr(config, "vision_config"):
        kinds |= {"input_ids", "pixel_values"}
    inputs: dict[str, Any] = {}
    for kind in kinds:
        inputs[kind] = _MAKERS[kind](config).to(device)
        if inputs[kind].is_floating_point():
            inputs[kind] = inputs[kind].to(next(model.parameters()).dtype)
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = _token_ids(config).to(device)
    if getattr(config, "use_cache", None) is not None:
        inputs["use_cache"] = False
    return (), inputs


def _token_ids(config: Any) -> torch.Tensor:
    text = getattr(config, "text_config", config)
    ids = torch.randint(3, text.vocab_size, (2, _SEQUENCE), generator=_generator())
    return ids.masked_fill(ids == (getattr(text, "pad_token_id", None) or 0), 3)


def _pixels(config: Any) -> torch.Tensor:
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None) or 64
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    return torch.randn(2, getattr(vision, "num_channels", 3), height, width, generator=_generator())


def _mel_features(config: Any) -> torch.Tensor:
    return torch.randn(2, config.num_mel_bins, 2 * config.max_source_positions, generator=_generator())


def _waveform(config: Any) -> torch.Tensor:
    return torch.randn(2, 20 * math.prod(config.conv_stride), generator=_generator())


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


_MAKERS: dict[str, Callable[[Any], torch.Tensor]] = {
    "input_ids": _token_ids,
    "pixel_values": _pixels,
    "input_features": _mel_features,
    "input_values": _waveform,
}

register_pattern(
    "transformers",
    Pattern(
        description="any Hugging Face transformers model",
        matches=is_pretrained,
        example_inputs=example_inputs,
        twin=tiny_twin,
    ),
)


def register_transformers(*model_types: str, **names: Any) -> None:
    """Register the pattern ``model_types[0]``: models with a part (or all) of one of these types.

    Args:
        model_types: ``model_type`` of their configs.
        names: what they share; see `Pattern`.
    """
    register_pattern(model_types[0], Pattern(model_types=frozenset(model_types), **names))
