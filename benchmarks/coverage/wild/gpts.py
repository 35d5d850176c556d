"""GPTs, as people write them: see the package."""

# Style rules that code in the wild does not follow.
# ruff: noqa: C408, N806, RUF059, SIM300
# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass

import models
import torch
import torch.nn.functional as F
from models import NanoGPT
from torch import nn

from wild.parts import HEADS, VOCAB, WIDTH, Attention, RotaryAttention, rotary_angles, tokens


@dataclass
class GPTConfig:
    block_size: int = 16
    vocab_size: int = VOCAB
    n_layer: int = 3
    n_head: int = HEADS
    n_embd: int = WIDTH
    dropout: float = 0.0
    bias: bool = True


class MinGPTBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = Attention(config.n_embd, config.n_head, causal=True)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = nn.ModuleDict(
            dict(
                c_fc=nn.Linear(config.n_embd, 4 * config.n_embd),
                c_proj=nn.Linear(4 * config.n_embd, config.n_embd),
                act=nn.GELU(),
                dropout=nn.Dropout(0.1),
            )
        )
        m = self.mlp
        self.mlpf = lambda x: m.dropout(m.c_proj(m.act(m.c_fc(x))))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlpf(self.ln_2(x))
        return x


class MinGPT(NanoGPT):
    def __init__(self):
        super().__init__(lambda: MinGPTBlock(GPTConfig(n_embd=models.WIDTH)))


def norm(x):
    return F.rms_norm(x, (x.size(-1),))


class NanochatMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)

    def forward(self, x):
        x = self.c_fc(x)
        x = F.relu(x).square()
        x = self.c_proj(x)
        return x


class NanochatBlock(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.layer_idx = layer_idx
        self.attn = RotaryAttention(config.n_embd, config.n_head)
        self.mlp = NanochatMLP(config)

    def forward(self, x, cos_sin, kv_cache):
        x = x + self.attn(norm(x), *cos_sin)
        x = x + self.mlp(norm(x))
        return x


class Nanochat(nn.Module):
    def __init__(self, config=None):
        super().__init__()
        config = config or GPTConfig()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "h": nn.ModuleList([NanochatBlock(config, i) for i in range(config.n_layer)]),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.resid_lambdas = nn.Parameter(torch.ones(config.n_layer))
        self.x0_lambdas = nn.Parameter(torch.full((config.n_layer,), 0.1))
        cos, sin = rotary_angles(config.block_size)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, idx, targets=None, kv_cache=None, loss_reduction="mean"):
        B, T = idx.size()
        assert T <= self.cos.size(0)
        T0 = 0 if kv_cache is None else kv_cache.get_pos()
        cos_sin = self.cos[T0 : T0 + T], self.sin[T0 : T0 + T]
        x = self.transformer.wte(idx)
        x = norm(x)
        x0 = x
        for i, block in enumerate(self.transformer.h):
            x = self.resid_lambdas[i] * x + self.x0_lambdas[i] * x0
            x = block(x, cos_sin, kv_cache)
        x = norm(x)
        softcap = 15
        logits = self.lm_head(x).float()
        logits = softcap * torch.tanh(logits / softcap)
        if targets is not None:
            return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), reduction=loss_reduction)
        return logits


class ModdedAttention(nn.Module):
    def __init__(self, dim=WIDTH, heads=HEADS):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.c_proj = nn.Linear(dim, dim, bias=False)
        self.lamb = nn.Parameter(torch.tensor(0.5))

    def forward(self, x, v1):
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, -1).unbind(2)
        if v1 is None:
            v1 = v
        v = (1 - self.lamb) * v + self.lamb * v1.view_as(v)
        y = F.scaled_dot_product_attention(
            norm(q).transpose(1, 2), norm(k).transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        return self.c_proj(y.transpose(1, 2).contiguous().view_as(x)), v1


class ModdedBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = ModdedAttention()
        self.mlp = NanochatMLP(GPTConfig())
        self.lambdas = nn.Parameter(torch.tensor([1.0, 0.1]))

    def forward(self, x, v1, x0):
        x = self.lambdas[0] * x + self.lambdas[1] * x0
        x1, v1 = self.attn(norm(x), v1)
        x = x + x1
        x = x + self.mlp(norm(x))
        return x, v1


class ModdedNanoGPT(nn.Module):
    def __init__(self, n_layer=4):
        super().__init__()
        self.num_encoder_layers = n_layer // 2
        self.num_decoder_layers = n_layer - self.num_encoder_layers
        self.skip_weights = nn.Parameter(torch.ones(self.num_decoder_layers))
        self.transformer = nn.ModuleDict(
            dict(wte=nn.Embedding(VOCAB, WIDTH), h=nn.ModuleList([ModdedBlock() for _ in range(n_layer)]))
        )
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, idx, target):
        x = self.transformer.wte(idx)
        x = norm(x)
        x0 = x
        v1 = None
        skip_connections = []
        for i in range(self.num_encoder_layers):
            x, v1 = self.transformer.h[i](x, v1, x0)
            skip_connections.append(x)
        for i in range(self.num_decoder_layers):
            x = x + self.skip_weights[i] * skip_connections.pop()
            x, v1 = self.transformer.h[self.num_encoder_layers + i](x, v1, x0)
        x = norm(x)
        logits = 30 * torch.tanh(self.lm_head(x) / 30)
        return F.cross_entropy(logits.float().view(-1, logits.size(-1)), target.view(-1))


WILD = {
    "nanoGPT": lambda: (NanoGPT(), (tokens(), tokens())),
    "minGPT": lambda: (MinGPT(), (tokens(),)),
    "nanochat": lambda: (Nanochat(), (tokens(),)),
    "modded-nanogpt": lambda: (ModdedNanoGPT(), (tokens(), tokens())),
}
