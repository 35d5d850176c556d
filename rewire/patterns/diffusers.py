"""Diffusion transformers of diffusers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rewire.copies import Inputs
from rewire.patterns.pattern import Pattern, register_pattern


def _is_dit(model: nn.Module) -> bool:
    classes = type(model).__mro__
    return any(c.__name__ == "DiTTransformer2DModel" and c.__module__.startswith("diffusers.") for c in classes)


def example_inputs(model: Any) -> Inputs:
    """Two noisy latents with their timesteps and classes."""
    weight, config = model.pos_embed.proj.weight, model.config
    shape = (2, config.in_channels, config.sample_size, config.sample_size)
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    pair = torch.arange(2, device=weight.device)
    return (latents.to(weight),), {"timestep": pair, "class_labels": pair}


register_pattern(
    "diffusers.dit",
    Pattern(
        description="diffusers' DiTTransformer2DModel",
        matches=_is_dit,
        example_inputs=example_inputs,
    ),
)
