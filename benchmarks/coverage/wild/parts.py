"""What several small architectures share: what a block does inside its branches matters less than how it adds up."""

# Style rules that code in the wild does not follow.
# ruff: noqa: N806
# mypy: ignore-errors

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS, VOCAB, LENGTH = 16, 2, 32, 8


def tokens(batch=2, length=LENGTH):
    return torch.randint(VOCAB, (batch, length))


def sequence(*shape):
    return torch.randn(*(shape or (2, LENGTH, WIDTH)))


def image(channels=3, size=8):
    return torch.randn(2, channels, size, size)


class Attention(nn.Module):
    def __init__(self, dim=WIDTH, heads=HEADS, causal=False, context_dim=None):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(context_dim or dim, 2 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, context=None, mask=None):
        k, v = self.kv(x if context is None else context).chunk(2, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(-3, -2) for t in (self.q(x), k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal and mask is None)
        return self.proj(y.transpose(-3, -2).flatten(-2))


class Mlp(nn.Module):
    def __init__(self, dim=WIDTH, hidden=None, act=nn.GELU, drop=0.0):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden or 2 * dim)
        self.act = act()
        self.fc2 = nn.Linear(hidden or 2 * dim, dim)
        self.drop = nn.Dropout(drop)

    def forward(self, x):
        return self.drop(self.fc2(self.act(self.fc1(x))))


class RMSNorm(nn.Module):
    def __init__(self, dim=WIDTH, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        output = self._norm(x.float()).type_as(x)
        return output * self.weight


class SwiGLU(nn.Module):
    def __init__(self, dim=WIDTH, hidden=2 * WIDTH):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class RotaryAttention(nn.Module):
    def __init__(self, dim=WIDTH, heads=HEADS):
        super().__init__()
        self.heads = heads
        self.wqkv = nn.Linear(dim, 3 * dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x, cos, sin, mask=None):
        B, T, C = x.shape
        q, k, v = self.wqkv(x).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.wo(y.transpose(1, 2).reshape(B, T, C))


def apply_rotary(x, cos, sin):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


def rotary_angles(length, dim=WIDTH // HEADS, base=10000.0):
    freqs = torch.outer(torch.arange(length).float(), base ** (-torch.arange(0, dim, 2).float() / dim))
    return freqs.cos(), freqs.sin()


def timestep_embedding(t, dim=WIDTH, max_period=10000):
    half = dim // 2
    freqs = torch.exp(-math.log(max_period) * torch.arange(half, dtype=torch.float32, device=t.device) / half)
    args = t[:, None].float() * freqs[None]
    return torch.cat([torch.cos(args), torch.sin(args)], dim=-1)


def drop_path(x, drop_prob: float = 0.0, training: bool = False, scale_by_keep: bool = True):
    if drop_prob == 0.0 or not training:
        return x
    keep_prob = 1 - drop_prob
    shape = (x.shape[0],) + (1,) * (x.ndim - 1)
    random_tensor = x.new_empty(shape).bernoulli_(keep_prob)
    if keep_prob > 0.0 and scale_by_keep:
        random_tensor.div_(keep_prob)
    return x * random_tensor


class DropPath(nn.Module):
    def __init__(self, drop_prob=None):
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x):
        return drop_path(x, self.drop_prob, self.training)


def exists(val):
    return val is not None


def default(val, d):
    return val if exists(val) else d


def adjacency(nodes=6):
    return torch.ones(2, nodes, nodes).tril(1).triu(-1)


def timesteps():
    return torch.tensor([3, 71])


def masks():
    return torch.ones(2, 1, LENGTH), torch.ones(LENGTH, LENGTH).tril()[None]
