"""timm: one pattern for all of its models, which makes their inputs, and one for each known family."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from rewire.copies import Inputs
from rewire.patterns.pattern import Pattern, register_pattern, thirds


def _is_timm(module: nn.Module, name: str = "") -> bool:
    """Whether ``module`` is of a class in ``timm`` (or derived from one), of ``timm.models.<name>`` if given."""
    home = f"timm.models.{name}" if name else "timm"
    return any(f"{cls.__module__}.".startswith(f"{home}.") for cls in type(module).__mro__)


def example_inputs(model: nn.Module) -> Inputs:
    """Two random images of the size that the model was made for."""
    config = getattr(model, "pretrained_cfg", None) or {}
    sizes = [size for size in (getattr(module, "img_size", None) for module in model.modules()) if size]
    height, width = sizes[0] if sizes else config.get("input_size", (3, 224, 224))[1:]
    first = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    images = torch.randn(2, first.in_channels, height, width, generator=torch.Generator().manual_seed(0))
    return (images.to(first.weight),), {}


def _register(name: str, description: str, having: str = "", **names: Any) -> None:
    """Register a family: models with a module from ``timm.models.<name>`` (that has an attribute ``having``)."""

    def matches(model: nn.Module) -> bool:
        return f"timm.models.{name}" in sys.modules and any(
            _is_timm(module, name) and (not having or getattr(module, having, None) is not None)
            for module in model.modules()
        )

    register_pattern(".".join(filter(None, ("timm", name, having))), Pattern(f"timm's {description}", matches, **names))


register_pattern("timm", Pattern("any timm model", _is_timm, example_inputs=example_inputs))

_register("vision_transformer", "ViT and DeiT")
_register("eva", "EVA", qkv=("{branch}.qkv",), fused=thirds)
_register("eva", "EVA, q, k and v apart", having="q_proj")
_register("cait", "CaiT")
_register("swin_transformer", "Swin")
_register("mlp_mixer", "MLP-Mixer", ffn="linear_tokens")
_register("convnext", "ConvNeXt")
_register("resnet", "ResNet")
_register("efficientnet", "EfficientNet")
