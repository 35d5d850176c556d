"""Small tasks that need no download: two language models, a vision transformer, a deep MLP without norms.

PYTHONPATH=benchmarks/choosing rewire study tasks:language_model --steps 1000 --out out/choosing/language_model
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from rewire import Task

LENGTH = 64


def language_model() -> Task:
    """A Llama of 6 layers on the bytes of the texts behind Python's ``help()``; every eighth topic is held out."""

    def model() -> nn.Module:
        sizes = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 6, "num_attention_heads": 4}
        return LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, use_cache=False, **sizes))

    def batches(seed: int) -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield _labelled(text, torch.randint(len(text) - LENGTH, (8,), generator=generator))

    names = sorted(topics)
    text = _bytes(name for number, name in enumerate(names) if number % 8)
    held_out = _bytes(names[::8])
    validation = [_labelled(held_out, torch.linspace(0, len(held_out) - LENGTH, 48).long())]
    return Task(model, batches, validation, learning_rate=4e-3)


def deep_language_model(layers: int = 24, width: int = 96, length: int = LENGTH, batch: int = 4) -> Task:
    """A Llama on Python sources, as bytes: the standard library, torch and transformers.

    Every eighth file is held out.
    """

    def model() -> nn.Module:
        sizes = {"hidden_size": width, "intermediate_size": 8 * width // 3, "num_hidden_layers": layers}
        return LlamaForCausalLM(
            LlamaConfig(vocab_size=256, max_position_embeddings=length, use_cache=False, num_attention_heads=4, **sizes)
        )

    def batches(seed: int) -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield _labelled(text, torch.randint(len(text) - length, (batch,), generator=generator), length)

    packages = (Path(sysconfig.get_path("stdlib")), Path(torch.__file__).parent, Path(transformers.__file__).parent)
    files = [file for package in packages for file in sorted(package.rglob("*.py")) if _is_source(file, package)]
    held_out = torch.cat([_read(file) for file in files[::8]])
    text = torch.cat([_read(file) for number, file in enumerate(files) if number % 8])
    validation = [_labelled(held_out, torch.linspace(0, len(held_out) - length, 96).long(), length)]
    return Task(model, batches, validation, optimizer=fused_adamw, learning_rate=4e-3)


def vision_transformer() -> Task:
    """A ViT of 6 blocks on scikit-learn's digits (8 x 8 pixels, cut into patches of 2 x 2)."""

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def attention(self, x: Tensor) -> Tensor:
            q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
            return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attention(self.norm1(x))
            return x + self.mlp(self.norm2(x))

    class ViT(nn.Module):
        def __init__(self, width: int = 48, depth: int = 6) -> None:
            super().__init__()
            self.patch = nn.Conv2d(1, width, 2, stride=2)
            self.position = nn.Parameter(0.02 * torch.randn(16, width))
            self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

        def forward(self, image: Tensor) -> Tensor:
            x = self.patch(image).flatten(2).transpose(1, 2) + self.position
            return self.head(self.norm(self.blocks(x)).mean(1))

    return _digits(ViT, learning_rate=1e-3)


def deep_mlp() -> Task:
    """An MLP of 16 residual blocks without norms on scikit-learn's digits."""

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.outer(F.relu(self.inner(x)))

    class MLP(nn.Module):
        def __init__(self, width: int = 64, depth: int = 16) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(64, width), nn.Linear(width, 10)
            self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))

        def forward(self, image: Tensor) -> Tensor:
            return self.head(self.blocks(self.first(image.flatten(1))))

    return _digits(MLP, learning_rate=1e-3)


def _digits(model: type[nn.Module], learning_rate: float) -> Task:
    """Every sixth image is held out; the training images are shifted by up to a pixel."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    labels = torch.tensor(digits.target)
    held_out = torch.arange(len(labels)) % 6 == 0
    seen, classes = images[~held_out], labels[~held_out]

    def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            chosen = torch.randint(len(seen), (32,), generator=generator)
            shift = torch.randint(-1, 2, (2,), generator=generator).tolist()
            yield seen[chosen].roll(shift, dims=(2, 3)), classes[chosen]

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    validation = [(images[held_out], labels[held_out])]
    return Task(model, batches, validation, loss, learning_rate=learning_rate)


def fused_adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def _bytes(names: Iterator[str] | list[str]) -> Tensor:
    return torch.tensor(list("\n\n".join(topics[name] for name in names).encode()))


def _labelled(text: Tensor, starts: Tensor, length: int = LENGTH) -> dict[str, Tensor]:
    piece = text[starts[:, None] + torch.arange(length)].long()
    return {"input_ids": piece, "labels": piece}


def _is_source(file: Path, package: Path) -> bool:
    return not {"test", "tests", "site-packages"} & set(file.relative_to(package).parts)


def _read(file: Path) -> Tensor:
    return torch.frombuffer(bytearray(file.read_bytes() + b"\n\n"), dtype=torch.uint8)
