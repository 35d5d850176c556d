"""Models of the papers by name, with random weights, for benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rewire.copies import Inputs
from rewire.errors import RewireError, UnknownName, did_you_mean


def _llama(width: int, intermediate: int, heads: int, layers: int) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=width,
            intermediate_size=intermediate,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            num_hidden_layers=layers,
            vocab_size=32000,
            use_cache=False,
        )
        return LlamaForCausalLM(config)

    return make


def _dit(width: int, heads: int) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from diffusers import DiTTransformer2DModel

        return DiTTransformer2DModel(
            num_attention_heads=heads, attention_head_dim=width // heads, num_layers=12, in_channels=4, out_channels=8
        )

    return make


class _FourLayers(nn.Module):
    """One residual block of the reinforcement-learning net: four linear maps, each with a norm and an activation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers = [(nn.Linear(width, width), nn.LayerNorm(width), nn.SiLU()) for _ in range(4)]
        self.layers = nn.Sequential(*(module for layer in layers for module in layer))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def _resnet(layers: int) -> nn.Module:
    return nn.Sequential(nn.Linear(256, 256), *(_FourLayers(256) for _ in range(layers // 4)))


#: Name -> description and constructor. Sizes of the Llamas are those of GaLore (arXiv 2403.03507, Table 11).
_SHAPES: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "llama-60m": ("LLaMA of ANCRe's Table 2: 8 layers, width 512", _llama(512, 1376, 8, 8)),
    "llama-130m": ("LLaMA of ANCRe's Table 2: 12 layers, width 768", _llama(768, 2048, 12, 12)),
    "llama-350m": ("LLaMA of ANCRe's Table 2: 24 layers, width 1024", _llama(1024, 2736, 16, 24)),
    "llama-1b": ("LLaMA of ANCRe's Table 2: 24 layers, width 2048", _llama(2048, 5461, 32, 24)),
    "llama-1b-5504": (
        "the same, with an inner width that tiles divide: 5504",
        _llama(2048, 5504, 32, 24),
    ),
    "dca-24x512": ("decoder of DeepCrossAttention's Table 1: 24 layers, width 512", _llama(512, 2048, 8, 24)),
    "dit-s2": ("DiT-S/2: 12 layers, width 384", _dit(384, 6)),
    "dit-b2": ("DiT-B/2: 12 layers, width 768", _dit(768, 12)),
    "resnet-64": ("ResNet-64 of ANCRe's reinforcement learning: 16 blocks of 4 layers, width 256", lambda: _resnet(64)),
    "llama-12x256": ("a small Llama for CPUs: 12 layers, width 256", _llama(256, 688, 8, 12)),
}


def shapes() -> dict[str, str]:
    """Name of every shape -> a one-line description."""
    return {name: description for name, (description, _) in _SHAPES.items()}


def make_shape(name: str, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model of that shape, random weights, in training mode.

    Raises:
        UnknownName: there is no such shape; near names are given.
        ImportError: the library that it comes from is missing.
    """
    if name not in _SHAPES:
        hint = did_you_mean(name, _SHAPES) or f" Known are {', '.join(_SHAPES)}."
        raise UnknownName(f"there is no shape '{name}'.{hint}")
    with torch.device(device):
        model = _SHAPES[name][1]()
    return model.to(dtype).train()


def batch_for(model: nn.Module, batch: int, length: int) -> Inputs:
    """Random inputs (args, kwargs) for a model of `make_shape`, or any causal language model of transformers.

    Args:
        model: its first weight decides their device and dtype.
        batch: sequences, or images.
        length: tokens of a sequence; unused where an input has no length.

    Raises:
        RewireError: nothing tells what the model takes.
    """
    weight = next(model.parameters())
    config: Any = getattr(model, "config", None)
    if hasattr(config, "vocab_size"):
        ids = torch.randint(config.vocab_size, (batch, length), device=weight.device)
        return (), {"input_ids": ids, "labels": ids}
    if hasattr(config, "sample_size"):
        pixels = torch.randn(batch, config.in_channels, config.sample_size, config.sample_size).to(weight)
        numbers = torch.arange(batch, device=weight.device)
        return (pixels,), {"timestep": numbers, "class_labels": numbers}
    if weight.dim() != 2:
        raise RewireError(
            f"no inputs are known for {type(model).__name__}: models of transformers, timm and diffusers say what they "
            "take, and a model whose first weight is a matrix is given vectors. Let the callable return the model with "
            "inputs: return model, (x,)."
        )
    return (torch.randn(batch, weight.shape[-1]).to(weight),), {}
