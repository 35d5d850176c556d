"""Small architectures as people write them: the forwards of well-known repositories, in their style, at toy size.

A fixed list for the coverage benchmark. The tool under test works on the source text of forwards, so what counts here
is how each forward is written: flags that are None or False, lambdas, loops over ModuleLists of ModuleLists, in-place
adds, tuples handed from block to block, streams that change shape, skips over half the network. All of it was written
for this file, after the style of the repositories named, with 16 channels and two or three blocks; no gate or scale
starts at zero, so that a wrong rewrite shows in the outputs.

`WILD` maps a name to a function that returns a model and its positional arguments. Each has at least two residual adds.
"""

# Style rules that code in the wild does not follow.
# ruff: noqa: B007, B905, C408, E731, E741, F841, N801, N802, N803, N806, RUF005, RUF021, RUF059, SIM108, SIM300, UP031
# ruff: noqa: UP034
# mypy: ignore-errors

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch as th
import torch.nn.functional as F
from einops import rearrange, repeat
from einops.layers.torch import Rearrange, Reduce
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS, VOCAB, LENGTH = 16, 2, 32, 8


def tokens(batch=2, length=LENGTH):
    return torch.randint(VOCAB, (batch, length))


def sequence(*shape):
    return torch.randn(*(shape or (2, LENGTH, WIDTH)))


def image(channels=3, size=8):
    return torch.randn(2, channels, size, size)


# Parts that several share: what a block does inside its branches matters less than how it adds them up.


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


# Language models: GPTs


@dataclass
class GPTConfig:
    block_size: int = 16
    vocab_size: int = VOCAB
    n_layer: int = 3
    n_head: int = HEADS
    n_embd: int = WIDTH
    dropout: float = 0.0
    bias: bool = True


class NanoGPTBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = Attention(config.n_embd, config.n_head, causal=True)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = Mlp(config.n_embd, drop=config.dropout)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return x


class NanoGPT(nn.Module):
    def __init__(self, config=None):
        super().__init__()
        config = config or GPTConfig()
        self.config = config
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(config.vocab_size, config.n_embd),
                wpe=nn.Embedding(config.block_size, config.n_embd),
                drop=nn.Dropout(config.dropout),
                h=nn.ModuleList([NanoGPTBlock(config) for _ in range(config.n_layer)]),
                ln_f=nn.LayerNorm(config.n_embd, bias=config.bias),
            )
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        device = idx.device
        b, t = idx.size()
        assert t <= self.config.block_size, f"Cannot forward sequence of length {t}"
        pos = torch.arange(0, t, dtype=torch.long, device=device)
        tok_emb = self.transformer.wte(idx)
        pos_emb = self.transformer.wpe(pos)
        x = self.transformer.drop(tok_emb + pos_emb)
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is not None:
            logits = self.lm_head(x)
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        else:
            logits = self.lm_head(x[:, [-1], :])
            loss = None
        return logits, loss


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
        config = GPTConfig(dropout=0.1)
        super().__init__(config)
        self.transformer.h = nn.ModuleList([MinGPTBlock(config) for _ in range(config.n_layer)])


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


# Language models: Llama and its kin


class LlamaBlock(nn.Module):
    def __init__(self, layer_id, args):
        super().__init__()
        self.layer_id = layer_id
        self.attention = RotaryAttention(args.dim, args.n_heads)
        self.feed_forward = SwiGLU(dim=args.dim, hidden=4 * args.dim)
        self.attention_norm = RMSNorm(args.dim, eps=args.norm_eps)
        self.ffn_norm = RMSNorm(args.dim, eps=args.norm_eps)

    def forward(self, x: torch.Tensor, start_pos: int, freqs_cis, mask):
        h = x + self.attention(self.attention_norm(x), *freqs_cis, mask)
        out = h + self.feed_forward(self.ffn_norm(h))
        return out


class MetaLlama(nn.Module):
    def __init__(self):
        super().__init__()
        params = SimpleNamespace(dim=WIDTH, n_heads=HEADS, n_layers=3, norm_eps=1e-5)
        self.params = params
        self.n_layers = params.n_layers
        self.tok_embeddings = nn.Embedding(VOCAB, params.dim)
        self.layers = torch.nn.ModuleList()
        for layer_id in range(params.n_layers):
            self.layers.append(LlamaBlock(layer_id, params))
        self.norm = RMSNorm(params.dim, eps=params.norm_eps)
        self.output = nn.Linear(params.dim, VOCAB, bias=False)
        self.freqs_cis = rotary_angles(32)

    def forward(self, tokens: torch.Tensor, start_pos: int):
        _bsz, seqlen = tokens.shape
        h = self.tok_embeddings(tokens)
        self.freqs_cis = tuple(t.to(h.device) for t in self.freqs_cis)
        freqs_cis = tuple(t[start_pos : start_pos + seqlen] for t in self.freqs_cis)
        mask = None
        if seqlen > 1:
            mask = torch.full((seqlen, seqlen), float("-inf"), device=tokens.device)
            mask = torch.triu(mask, diagonal=1)
            mask = torch.hstack([torch.zeros((seqlen, start_pos), device=tokens.device), mask]).type_as(h)
        for layer in self.layers:
            h = layer(h, start_pos, freqs_cis, mask)
        h = self.norm(h)
        output = self.output(h).float()
        return output


class Llama2cBlock(nn.Module):
    def __init__(self, layer_id, args):
        super().__init__()
        self.attention = RotaryAttention(args.dim, args.n_heads)
        self.feed_forward = SwiGLU(args.dim)
        self.layer_id = layer_id
        self.attention_norm = RMSNorm(args.dim, eps=args.norm_eps)
        self.ffn_norm = RMSNorm(args.dim, eps=args.norm_eps)

    def forward(self, x, freqs_cos, freqs_sin):
        h = x + self.attention.forward(self.attention_norm(x), freqs_cos, freqs_sin)
        out = h + self.feed_forward.forward(self.ffn_norm(h))
        return out


class Llama2c(nn.Module):
    last_loss: torch.Tensor | None

    def __init__(self):
        super().__init__()
        params = SimpleNamespace(dim=WIDTH, n_heads=HEADS, n_layers=2, norm_eps=1e-5)
        self.tok_embeddings = nn.Embedding(VOCAB, params.dim)
        self.dropout = nn.Dropout(0.0)
        self.layers = torch.nn.ModuleList()
        for layer_id in range(params.n_layers):
            self.layers.append(Llama2cBlock(layer_id, params))
        self.norm = RMSNorm(params.dim, eps=params.norm_eps)
        self.output = nn.Linear(params.dim, VOCAB, bias=False)
        self.tok_embeddings.weight = self.output.weight
        freqs_cos, freqs_sin = rotary_angles(32)
        self.register_buffer("freqs_cos", freqs_cos, persistent=False)
        self.register_buffer("freqs_sin", freqs_sin, persistent=False)
        self.last_loss = None

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        _bsz, seqlen = tokens.shape
        h = self.tok_embeddings(tokens)
        h = self.dropout(h)
        freqs_cos = self.freqs_cos[:seqlen]
        freqs_sin = self.freqs_sin[:seqlen]
        for layer in self.layers:
            h = layer(h, freqs_cos, freqs_sin)
        h = self.norm(h)
        if targets is not None:
            logits = self.output(h)
            self.last_loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        else:
            logits = self.output(h[:, [-1], :])
            self.last_loss = None
        return logits


class GemmaDecoderLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.self_attn = RotaryAttention(config.hidden_size, HEADS)
        self.mlp = SwiGLU(config.hidden_size)
        self.input_layernorm = RMSNorm(config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size)
        self.pre_feedforward_layernorm = RMSNorm(config.hidden_size) if config.use_pre_ffw_norm else None
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size) if config.use_post_ffw_norm else None

    def forward(self, hidden_states, freqs_cis, kv_write_indices, kv_cache, mask):
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states = self.self_attn(hidden_states, freqs_cis[0], freqs_cis[1], mask=mask)
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = residual + hidden_states
        residual = hidden_states
        if self.pre_feedforward_layernorm is not None:
            hidden_states = self.pre_feedforward_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        if self.post_feedforward_layernorm is not None:
            hidden_states = self.post_feedforward_layernorm(hidden_states)
        hidden_states = residual + hidden_states
        return hidden_states


class Gemma(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(hidden_size=WIDTH, use_pre_ffw_norm=True, use_post_ffw_norm=False)
        self.embedder = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(GemmaDecoderLayer(self.config) for _ in range(3))
        self.norm = RMSNorm(WIDTH)

    def forward(self, input_token_ids, kv_write_indices=None, kv_caches=None, mask=None):
        hidden_states = self.embedder(input_token_ids)
        normalizer = torch.tensor(self.config.hidden_size**0.5, dtype=hidden_states.dtype)
        hidden_states = hidden_states * normalizer
        freqs_cis = rotary_angles(input_token_ids.shape[1])
        for i in range(len(self.layers)):
            layer = self.layers[i]
            hidden_states = layer(
                hidden_states=hidden_states,
                freqs_cis=freqs_cis,
                kv_write_indices=kv_write_indices,
                kv_cache=kv_caches[i] if kv_caches is not None else None,
                mask=mask,
            )
        hidden_states = self.norm(hidden_states)
        return hidden_states @ self.embedder.weight.t()


class LitBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        if not config.parallel_residual and config.shared_attention_norm:
            raise NotImplementedError("No checkpoint amongst the ones we support uses this configuration")
        self.norm_1 = RMSNorm(config.n_embd)
        self.attn = RotaryAttention(config.n_embd, config.n_head)
        self.post_attention_norm = RMSNorm(config.n_embd) if config.post_attention_norm else nn.Identity()
        self.norm_2 = None if config.shared_attention_norm else RMSNorm(config.n_embd)
        self.mlp = SwiGLU(config.n_embd)
        self.post_mlp_norm = RMSNorm(config.n_embd) if config.post_mlp_norm else nn.Identity()
        self.config = config

    def forward(self, x, cos, sin, mask=None, input_pos=None):
        x_normed = self.norm_1(x)
        attention_output = self.attn(x_normed, cos, sin, mask)
        attention_output = self.post_attention_norm(attention_output)
        if self.config.parallel_residual:
            if not self.config.shared_attention_norm:
                x_normed = self.norm_2(x)
            x = attention_output + x
        else:
            x = attention_output + x
            x_normed = self.norm_2(x)
        return self.post_mlp_norm(self.mlp(x_normed)) + x


class LitGPT(nn.Module):
    def __init__(self, parallel, shared=False, post=False):
        super().__init__()
        self.config = SimpleNamespace(
            n_embd=WIDTH,
            n_head=HEADS,
            parallel_residual=parallel,
            shared_attention_norm=shared,
            post_attention_norm=post,
            post_mlp_norm=post,
            scale_embeddings=False,
        )
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(VOCAB, WIDTH),
                h=nn.ModuleList(LitBlock(self.config) for _ in range(3)),
                ln_f=RMSNorm(WIDTH),
            )
        )

    def forward(self, idx, input_pos=None):
        T = idx.size(1)
        cos, sin = rotary_angles(T)
        x = self.transformer.wte(idx)
        if self.config.scale_embeddings:
            x = x * (self.config.n_embd**0.5)
        for block in self.transformer.h:
            x = block(x, cos, sin, None, input_pos)
        x = self.transformer.ln_f(x)
        return self.lm_head(x)


class TitanBlock(nn.Module):
    def __init__(self, layer_id):
        super().__init__()
        self.attention = RotaryAttention()
        self.attention_norm = nn.RMSNorm(WIDTH)
        self.ffn_norm = nn.RMSNorm(WIDTH)
        self.moe_enabled = layer_id > 0
        if self.moe_enabled:
            self.moe = MixtureOfExperts()
        else:
            self.feed_forward = SwiGLU()

    def forward(self, x, freqs_cis, attention_masks=None):
        x = x + self.attention(self.attention_norm(x), *freqs_cis, attention_masks)
        if self.moe_enabled:
            x = x + self.moe(self.ffn_norm(x))
        else:
            x = x + self.feed_forward(self.ffn_norm(x))
        return x


class MixtureOfExperts(nn.Module):
    def __init__(self, dim=WIDTH, experts=4, top_k=2):
        super().__init__()
        self.gate = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(SwiGLU(dim) for _ in range(experts))
        self.top_k = top_k

    def forward(self, inputs):
        inputs_squashed = inputs.view(-1, inputs.shape[-1])
        weights, selected_experts = torch.topk(self.gate(inputs_squashed), self.top_k)
        weights = F.softmax(weights, dim=1, dtype=torch.float).type_as(inputs)
        results = torch.zeros_like(inputs_squashed)
        for i, expert in enumerate(self.experts):
            batch_idx, nth_expert = torch.where(selected_experts == i)
            results[batch_idx] += weights[batch_idx, nth_expert, None] * expert(inputs_squashed[batch_idx])
        return results.view_as(inputs)


class TorchTitan(nn.Module):
    def __init__(self, n_layers=3):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, WIDTH)
        self.layers = torch.nn.ModuleDict()
        for layer_id in range(n_layers):
            self.layers[str(layer_id)] = TitanBlock(layer_id)
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens, attention_masks=None):
        h = self.tok_embeddings(tokens) if self.tok_embeddings is not None else tokens
        freqs_cis = rotary_angles(tokens.shape[1])
        for layer in self.layers.values():
            h = layer(h, freqs_cis, attention_masks)
        h = self.norm(h) if self.norm is not None else h
        output = self.output(h) if self.output is not None else h
        return output


class FusedAddRMSNorm(RMSNorm):
    def forward(self, x, residual=None):
        if residual is not None:
            x = x + residual
            residual = x
        x = super().forward(x)
        if residual is None:
            return x
        return x, residual


class VLLMDecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn = RotaryAttention()
        self.mlp = SwiGLU()
        self.input_layernorm = FusedAddRMSNorm()
        self.post_attention_layernorm = FusedAddRMSNorm()

    def forward(self, positions, hidden_states, residual):
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(hidden_states, *positions)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        hidden_states = self.mlp(hidden_states)
        return hidden_states, residual


class VLLMModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([VLLMDecoderLayer() for _ in range(3)])
        self.norm = FusedAddRMSNorm()

    def forward(self, input_ids):
        positions = rotary_angles(input_ids.shape[1])
        hidden_states = self.embed_tokens(input_ids)
        residual = None
        for layer in self.layers:
            hidden_states, residual = layer(positions, hidden_states, residual)
        hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states


def bias_dropout_add(x, bias, residual, prob, training):
    # type: (Tensor, Optional[Tensor], Tensor, float, bool) -> Tensor
    if bias is not None:
        x = x + bias
    out = torch.nn.functional.dropout(x, p=prob, training=training)
    out = residual + out
    return out


def get_bias_dropout_add(training):
    def _bias_dropout_add(x, bias, residual, prob):
        return bias_dropout_add(x, bias, residual, prob, training)

    return _bias_dropout_add


class MegatronLinearBranch(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.dense = nn.Linear(WIDTH, WIDTH, bias=False)
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return self.dense(self.inner(x)), self.bias


class MegatronLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.apply_residual_connection_post_layernorm = False
        self.hidden_dropout = 0.0
        self.input_norm = nn.LayerNorm(WIDTH)
        self.self_attention = MegatronLinearBranch(Attention(causal=True))
        self.post_attention_norm = nn.LayerNorm(WIDTH)
        self.mlp = MegatronLinearBranch(Mlp())

    def forward(self, hidden_states):
        norm_output = self.input_norm(hidden_states)
        attention_output, attention_bias = self.self_attention(norm_output)
        if self.apply_residual_connection_post_layernorm:
            residual = norm_output
        else:
            residual = hidden_states
        bias_dropout_add_func = get_bias_dropout_add(self.training)
        if attention_bias is not None:
            attention_bias = attention_bias.expand_as(residual)
        norm_input = bias_dropout_add_func(attention_output, attention_bias, residual, self.hidden_dropout)
        norm_output = self.post_attention_norm(norm_input)
        mlp_output, mlp_bias = self.mlp(norm_output)
        if self.apply_residual_connection_post_layernorm:
            residual = norm_output
        else:
            residual = norm_input
        if mlp_bias is not None:
            mlp_bias = mlp_bias.expand_as(residual)
        return bias_dropout_add_func(mlp_output, mlp_bias, residual, self.hidden_dropout)


class Megatron(nn.Module):
    def __init__(self, num_layers=2):
        super().__init__()
        self.num_layers = num_layers
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = torch.nn.ModuleList([MegatronLayer() for _ in range(num_layers)])
        self.final_norm = nn.LayerNorm(WIDTH)

    def _get_layer(self, layer_number):
        return self.layers[layer_number]

    def forward(self, input_ids):
        hidden_states = self.embedding(input_ids).transpose(0, 1).contiguous()
        for index in range(self.num_layers):
            layer = self._get_layer(index)
            hidden_states = layer(hidden_states)
        return self.final_norm(hidden_states).transpose(0, 1)


class GPTJBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.attn = RotaryAttention()
        self.mlp = Mlp()

    def forward(self, hidden_states, cos, sin, layer_past=None, use_cache=False):
        residual = hidden_states
        hidden_states = self.ln_1(hidden_states)
        attn_output = self.attn(hidden_states, cos, sin)
        feed_forward_hidden_states = self.mlp(hidden_states)
        hidden_states = attn_output + feed_forward_hidden_states + residual
        if use_cache:
            return hidden_states, layer_past
        return (hidden_states,)


class GPTJ(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(VOCAB, WIDTH)
        self.h = nn.ModuleList([GPTJBlock() for _ in range(3)])
        self.ln_f = nn.LayerNorm(WIDTH)

    def forward(self, input_ids, past_key_values=None, use_cache=False):
        if past_key_values is None:
            past_key_values = tuple([None] * len(self.h))
        hidden_states = self.wte(input_ids)
        presents = () if use_cache else None
        cos, sin = rotary_angles(input_ids.size(-1))
        for i, (block, layer_past) in enumerate(zip(self.h, past_key_values)):
            outputs = block(hidden_states, cos, sin, layer_past=layer_past, use_cache=use_cache)
            hidden_states = outputs[0]
            if use_cache is True:
                presents = presents + (outputs[1],)
        return self.ln_f(hidden_states)


class NeoXLayer(nn.Module):
    def __init__(self, use_parallel_residual):
        super().__init__()
        self.use_parallel_residual = use_parallel_residual
        self.input_layernorm = nn.LayerNorm(WIDTH)
        self.post_attention_layernorm = nn.LayerNorm(WIDTH)
        self.post_attention_dropout = nn.Dropout(0.0)
        self.post_mlp_dropout = nn.Dropout(0.0)
        self.attention = Attention(causal=True)
        self.mlp = Mlp()

    def forward(self, hidden_states, attention_mask=None):
        attn_output = self.attention(self.input_layernorm(hidden_states), mask=attention_mask)
        attn_output = self.post_attention_dropout(attn_output)
        if self.use_parallel_residual:
            # x = x + attn(ln1(x)) + mlp(ln2(x))
            mlp_output = self.mlp(self.post_attention_layernorm(hidden_states))
            mlp_output = self.post_mlp_dropout(mlp_output)
            hidden_states = mlp_output + attn_output + hidden_states
        else:
            attn_output = attn_output + hidden_states
            mlp_output = self.mlp(self.post_attention_layernorm(attn_output))
            mlp_output = self.post_mlp_dropout(mlp_output)
            hidden_states = mlp_output + attn_output
        return hidden_states


class GPTNeoX(nn.Module):
    def __init__(self, use_parallel_residual):
        super().__init__()
        self.embed_in = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([NeoXLayer(use_parallel_residual) for _ in range(3)])
        self.final_layer_norm = nn.LayerNorm(WIDTH)
        self.gradient_checkpointing = False

    def forward(self, input_ids, attention_mask=None):
        hidden_states = self.embed_in(input_ids)
        for layer in self.layers:
            if self.gradient_checkpointing and self.training:
                hidden_states = checkpoint(layer.__call__, hidden_states, attention_mask, use_reentrant=False)
            else:
                hidden_states = layer(hidden_states, attention_mask=attention_mask)
        return self.final_layer_norm(hidden_states)


class OLMoBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.dropout = nn.Dropout(0.0)
        self.attn_norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.ff_norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.att_proj = nn.Linear(WIDTH, WIDTH)
        self.attention = Attention(causal=True)
        self.ff_proj = nn.Linear(WIDTH, 2 * WIDTH)
        self.act = nn.SiLU()
        self.ff_out = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, attention_bias=None, layer_past=None, use_cache=False):
        if not self.config.norm_after:
            h = self.attn_norm(x)
        else:
            h = x
        att, cache = self.attention(self.att_proj(h), mask=attention_bias), layer_past
        if self.config.norm_after:
            att = self.attn_norm(att)
        x = x + self.dropout(att)
        og_x = x
        if not self.config.norm_after:
            x = self.ff_norm(x)
        x = self.ff_proj(x)
        x = self.act(x)
        x = self.ff_out(x)
        if self.config.norm_after:
            x = self.ff_norm(x)
        x = self.dropout(x)
        x = og_x + x
        return x, cache


class OLMo(nn.Module):
    def __init__(self, norm_after=False):
        super().__init__()
        config = SimpleNamespace(norm_after=norm_after, block_group_size=1)
        self.config = config
        self.transformer = nn.ModuleDict(
            dict(wte=nn.Embedding(VOCAB, WIDTH), emb_drop=nn.Dropout(0.0), ln_f=nn.LayerNorm(WIDTH))
        )
        blocks = [OLMoBlock(config) for _ in range(3)]
        self.transformer.update({"blocks": nn.ModuleList(blocks)})

    def forward(self, input_ids, past_key_values=None, use_cache=False, output_hidden_states=None):
        output_hidden_states = output_hidden_states if output_hidden_states is not None else False
        x = self.transformer.wte(input_ids)
        x = self.transformer.emb_drop(x)
        attn_key_values = [] if use_cache else None
        all_hidden_states = []
        for block_idx, block in enumerate(self.transformer.blocks):
            if output_hidden_states:
                all_hidden_states.append(x)
            layer_past = None if past_key_values is None else past_key_values[block_idx]
            x, cache = block(x, layer_past=layer_past, use_cache=use_cache)
            if attn_key_values is not None:
                assert cache is not None
                attn_key_values.append(cache)
        x = self.transformer.ln_f(x)
        return F.linear(x, self.transformer.wte.weight, None)


# Language models: state spaces, recurrences, convolutions


class MambaBlock(nn.Module):
    def __init__(self, d_model=WIDTH, d_state=4, d_conv=3):
        super().__init__()
        d_inner = 2 * d_model
        self.in_proj = nn.Linear(d_model, 2 * d_inner, bias=False)
        self.conv1d = nn.Conv1d(d_inner, d_inner, d_conv, groups=d_inner, padding=d_conv - 1)
        self.x_proj = nn.Linear(d_inner, 1 + 2 * d_state, bias=False)
        self.dt_proj = nn.Linear(1, d_inner)
        self.A_log = nn.Parameter(torch.log(repeat(torch.arange(1.0, d_state + 1), "n -> d n", d=d_inner)))
        self.D = nn.Parameter(torch.ones(d_inner))
        self.out_proj = nn.Linear(d_inner, d_model, bias=False)
        self.d_state = d_state

    def forward(self, x):
        (b, l, d) = x.shape
        (x, res) = self.in_proj(x).chunk(2, dim=-1)
        x = rearrange(x, "b l d_in -> b d_in l")
        x = self.conv1d(x)[:, :, :l]
        x = F.silu(rearrange(x, "b d_in l -> b l d_in"))
        y = self.ssm(x)
        y = y * F.silu(res)
        return self.out_proj(y)

    def ssm(self, x):
        delta, B, C = self.x_proj(x).split([1, self.d_state, self.d_state], dim=-1)
        delta = F.softplus(self.dt_proj(delta))
        deltaA = torch.exp(torch.einsum("bld,dn->bldn", delta, -torch.exp(self.A_log)))
        deltaB_u = torch.einsum("bld,bln,bld->bldn", delta, B, x)
        h = torch.zeros_like(deltaA[:, 0])
        ys = []
        for i in range(x.shape[1]):
            h = deltaA[:, i] * h + deltaB_u[:, i]
            ys.append(torch.einsum("bdn,bn->bd", h, C[:, i, :]))
        return torch.stack(ys, dim=1) + x * self.D


class MambaResidualBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixer = MambaBlock()
        self.norm = RMSNorm()

    def forward(self, x):
        output = self.mixer(self.norm(x)) + x
        return output


class MambaMinimal(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([MambaResidualBlock() for _ in range(3)])
        self.norm_f = RMSNorm()
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.lm_head.weight = self.embedding.weight

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        x = self.norm_f(x)
        logits = self.lm_head(x)
        return logits


class MambaSSMBlock(nn.Module):
    def __init__(self, mixer_cls, mlp_cls, residual_in_fp32=True):
        super().__init__()
        self.residual_in_fp32 = residual_in_fp32
        self.norm = nn.LayerNorm(WIDTH)
        self.mixer = mixer_cls()
        if mlp_cls is not nn.Identity:
            self.norm2 = nn.LayerNorm(WIDTH)
            self.mlp = mlp_cls()
        else:
            self.mlp = None

    def forward(self, hidden_states: Tensor, residual: Tensor | None = None, inference_params=None, **mixer_kwargs):
        residual = (hidden_states + residual) if residual is not None else hidden_states
        hidden_states = self.norm(residual.to(dtype=self.norm.weight.dtype))
        if self.residual_in_fp32:
            residual = residual.to(torch.float32)
        hidden_states = self.mixer(hidden_states, **mixer_kwargs)
        if self.mlp is not None:
            residual = hidden_states + residual
            hidden_states = self.norm2(residual.to(dtype=self.norm2.weight.dtype))
            hidden_states = self.mlp(hidden_states)
        return hidden_states, residual


class MambaSSM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([MambaSSMBlock(MambaBlock, Mlp if i == 1 else nn.Identity) for i in range(3)])
        self.norm_f = nn.LayerNorm(WIDTH)

    def forward(self, input_ids, inference_params=None, **mixer_kwargs):
        hidden_states = self.embedding(input_ids)
        residual = None
        for layer in self.layers:
            hidden_states, residual = layer(hidden_states, residual, inference_params=inference_params, **mixer_kwargs)
        residual = (hidden_states + residual) if residual is not None else hidden_states
        hidden_states = self.norm_f(residual.to(dtype=self.norm_f.weight.dtype))
        return hidden_states


class RWKVTimeMix(nn.Module):
    def __init__(self, n_embd=WIDTH):
        super().__init__()
        self.time_decay = nn.Parameter(torch.randn(n_embd))
        self.time_mix_k = nn.Parameter(torch.rand(1, 1, n_embd))
        self.time_mix_r = nn.Parameter(torch.rand(1, 1, n_embd))
        self.key = nn.Linear(n_embd, n_embd, bias=False)
        self.value = nn.Linear(n_embd, n_embd, bias=False)
        self.receptance = nn.Linear(n_embd, n_embd, bias=False)
        self.output = nn.Linear(n_embd, n_embd, bias=False)

    def forward(self, x, state):
        last, num, den = state
        xx = torch.cat((last[:, None], x[:, :-1]), dim=1)
        k = torch.exp(torch.tanh(self.key(x * self.time_mix_k + xx * (1 - self.time_mix_k))))
        v = self.value(x * self.time_mix_k + xx * (1 - self.time_mix_k))
        r = torch.sigmoid(self.receptance(x * self.time_mix_r + xx * (1 - self.time_mix_r)))
        out, w = [], torch.exp(-torch.exp(self.time_decay))
        for t in range(x.shape[1]):
            num, den = w * num + k[:, t] * v[:, t], w * den + k[:, t]
            out.append(num / den)
        return self.output(r * torch.stack(out, dim=1)), (x[:, -1], num, den)


class RWKVChannelMix(nn.Module):
    def __init__(self, n_embd=WIDTH):
        super().__init__()
        self.time_shift = nn.ZeroPad2d((0, 0, 1, -1))
        self.time_mix_k = nn.Parameter(torch.rand(1, 1, n_embd))
        self.key = nn.Linear(n_embd, 2 * n_embd, bias=False)
        self.receptance = nn.Linear(n_embd, n_embd, bias=False)
        self.value = nn.Linear(2 * n_embd, n_embd, bias=False)

    def forward(self, x, state=None):
        xx = self.time_shift(x) if state is None else torch.cat((state[:, None], x[:, :-1]), dim=1)
        xk = x * self.time_mix_k + xx * (1 - self.time_mix_k)
        k = torch.square(torch.relu(self.key(xk)))
        out = torch.sigmoid(self.receptance(xk)) * self.value(k)
        return out if state is None else (out, x[:, -1])


class RWKVStateBlock(nn.Module):
    def __init__(self, layer_id):
        super().__init__()
        self.layer_id = layer_id
        if layer_id == 0:
            self.ln0 = nn.LayerNorm(WIDTH)
        self.ln1 = nn.LayerNorm(WIDTH)
        self.ln2 = nn.LayerNorm(WIDTH)
        self.att = RWKVTimeMix()
        self.ffn = RWKVChannelMix()

    def forward(self, x, time_mix_state, channel_mix_state):
        if self.layer_id == 0:
            x = self.ln0(x)
        att_out, time_mix_state = self.att(self.ln1(x), time_mix_state)
        x = x + att_out
        ffn_out, channel_mix_state = self.ffn(self.ln2(x), channel_mix_state)
        x = x + ffn_out
        return x, time_mix_state, channel_mix_state


class RWKVState(nn.Module):
    def __init__(self, n_layer=3):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([RWKVStateBlock(i) for i in range(n_layer)])
        self.ln_out = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, idx, last_states=None):
        B, T = idx.size()
        x = self.emb(idx)
        if last_states is None:
            last_states = [(tuple(x.new_zeros(B, WIDTH) for _ in range(3)), x.new_zeros(B, WIDTH)) for _ in self.blocks]
        new_states = []
        for i, block in enumerate(self.blocks):
            time_mix_state, channel_mix_state = last_states[i]
            x, time_mix_state, channel_mix_state = block(x, time_mix_state, channel_mix_state)
            new_states.append((time_mix_state, channel_mix_state))
        x = self.ln_out(x)
        return self.head(x), new_states


class RWKVTrainBlock(nn.Module):
    def __init__(self, args, layer_id):
        super().__init__()
        self.args = args
        self.layer_id = layer_id
        self.ln1 = nn.LayerNorm(args.n_embd)
        self.ln2 = nn.LayerNorm(args.n_embd)
        if self.layer_id == 0:
            self.ln0 = nn.LayerNorm(args.n_embd)
        if self.layer_id == 0 and self.args.pre_ffn > 0:
            self.ffnPre = RWKVChannelMix(args.n_embd)
        else:
            self.att = Attention(args.n_embd, causal=True)
        self.ffn = RWKVChannelMix(args.n_embd)
        self.drop0 = nn.Dropout(p=args.dropout)
        self.drop1 = nn.Dropout(p=args.dropout)

    def forward(self, x, x_emb=None):
        args = self.args
        B, T, C = x.size()
        if self.layer_id == 0:
            x = self.ln0(x)
        if self.args.dropout == 0:
            if self.layer_id == 0 and args.pre_ffn > 0:
                x = x + self.ffnPre(self.ln1(x))
            else:
                x = x + self.att(self.ln1(x))
            x = x + self.ffn(self.ln2(x))
        else:
            if self.layer_id == 0 and args.pre_ffn > 0:
                x = self.drop0(x + self.ffnPre(self.ln1(x)))
            else:
                x = self.drop0(x + self.att(self.ln1(x)))
            x = self.drop1(x + self.ffn(self.ln2(x)))
        return x


class RWKVTrain(nn.Module):
    def __init__(self, dropout=0.0, pre_ffn=1):
        super().__init__()
        self.args = SimpleNamespace(
            n_embd=WIDTH, pre_ffn=pre_ffn, dropout=dropout, tiny_att_dim=0, grad_cp=0, head_qk=0
        )
        self.emb = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([RWKVTrainBlock(self.args, i) for i in range(3)])
        self.ln_out = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, idx):
        args = self.args
        x = self.emb(idx)
        x_emb = x
        if args.tiny_att_dim > 0:
            for block in self.blocks:
                x = block(x, x_emb)
        else:
            for block in self.blocks:
                if args.grad_cp == 1:
                    x = checkpoint(block, x, use_reentrant=False)
                else:
                    x = block(x)
        x = self.ln_out(x)
        return self.head(x)


class Retention(nn.Module):
    def __init__(self, hidden_size, gamma):
        super().__init__()
        self.gamma = gamma
        self.W_Q = nn.Parameter(torch.randn(hidden_size, hidden_size) / hidden_size)
        self.W_K = nn.Parameter(torch.randn(hidden_size, hidden_size) / hidden_size)
        self.W_V = nn.Parameter(torch.randn(hidden_size, hidden_size) / hidden_size)

    def forward(self, X):
        n = torch.arange(X.shape[1]).unsqueeze(1)
        D = (self.gamma ** (n - n.T)) * (n >= n.T).float()
        return (((X @ self.W_Q) @ (X @ self.W_K).permute(0, 2, 1)) * D) @ (X @ self.W_V)


class RetNet(nn.Module):
    def __init__(self, layers=3, hidden_dim=WIDTH):
        super().__init__()
        self.layers = layers
        self.retentions = nn.ModuleList([Retention(hidden_dim, 0.9) for _ in range(layers)])
        self.ffns = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(hidden_dim, 2 * hidden_dim), nn.GELU(), nn.Linear(2 * hidden_dim, hidden_dim))
                for _ in range(layers)
            ]
        )
        self.layer_norms_1 = nn.ModuleList([nn.LayerNorm(hidden_dim) for _ in range(layers)])
        self.layer_norms_2 = nn.ModuleList([nn.LayerNorm(hidden_dim) for _ in range(layers)])

    def forward(self, X):
        for i in range(self.layers):
            Y = self.retentions[i](self.layer_norms_1[i](X)) + X
            X = self.ffns[i](self.layer_norms_2[i](Y)) + Y
        return X


class TorchScaleLayer(nn.Module):
    def __init__(self, args, depth):
        super().__init__()
        self.self_attn = Attention(args.embed_dim, causal=True)
        self.self_attn_layer_norm = RMSNorm(args.embed_dim)
        self.ffn = SwiGLU(args.embed_dim)
        self.final_layer_norm = RMSNorm(args.embed_dim)
        self.dropout_module = nn.Dropout(args.dropout)
        self.drop_path = DropPath(args.drop_path) if args.drop_path > 0 else None
        self.normalize_before = args.normalize_before
        self.alpha = math.pow(2.0 * args.layers, 0.25) if args.deepnorm else 1.0

    def residual_connection(self, x, residual):
        return residual * self.alpha + x

    def forward(self, x, incremental_state=None):
        residual = x
        if self.normalize_before:
            x = self.self_attn_layer_norm(x)
        x = self.self_attn(x)
        x = self.dropout_module(x)
        if self.drop_path is not None:
            x = self.drop_path(x)
        x = self.residual_connection(x, residual)
        if not self.normalize_before:
            x = self.self_attn_layer_norm(x)
        residual = x
        if self.normalize_before:
            x = self.final_layer_norm(x)
        x = self.ffn(x)
        l_aux = None
        if self.drop_path is not None:
            x = self.drop_path(x)
        x = self.residual_connection(x, residual)
        if not self.normalize_before:
            x = self.final_layer_norm(x)
        return x, l_aux


class TorchScale(nn.Module):
    def __init__(self, deepnorm):
        super().__init__()
        args = SimpleNamespace(
            embed_dim=WIDTH, layers=3, dropout=0.0, drop_path=0.1, normalize_before=not deepnorm, deepnorm=deepnorm
        )
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([])
        for i in range(args.layers):
            self.layers.append(TorchScaleLayer(args, depth=i))
        self.output_projection = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, prev_output_tokens, incremental_state=None, features_only=False, return_all_hiddens=False):
        x = self.embed_tokens(prev_output_tokens)
        inner_states = [x]
        l_aux_list = []
        for idx, layer in enumerate(self.layers):
            x, l_aux_i = layer(x, incremental_state[idx] if incremental_state is not None else None)
            l_aux_list.append(l_aux_i)
            inner_states.append(x)
        if not features_only:
            x = self.output_projection(x)
        return x, {"inner_states": inner_states, "l_aux": l_aux_list}


def fftconv(u, k, D):
    seqlen = u.shape[-1]
    fft_size = 2 * seqlen
    k_f = torch.fft.rfft(k, n=fft_size) / fft_size
    u_f = torch.fft.rfft(u.to(dtype=k.dtype), n=fft_size)
    y = torch.fft.irfft(u_f * k_f, n=fft_size, norm="forward")[..., :seqlen]
    out = y + u * D.unsqueeze(-1)
    return out.to(dtype=u.dtype)


class HyenaOperator(nn.Module):
    def __init__(self, d_model=WIDTH, l_max=LENGTH):
        super().__init__()
        self.in_proj = nn.Linear(d_model, 3 * d_model)
        self.out_proj = nn.Linear(d_model, d_model)
        self.short_filter = nn.Conv1d(3 * d_model, 3 * d_model, 3, padding=2, groups=3 * d_model)
        self.filter = nn.Parameter(torch.randn(d_model, l_max) / l_max)
        self.D = nn.Parameter(torch.randn(d_model))

    def forward(self, u):
        l = u.size(-2)
        u = self.in_proj(u)
        u = rearrange(u, "b l d -> b d l")
        uc = self.short_filter(u)[..., :l]
        *x, v = uc.split(u.size(1) // 3, dim=1)
        v = v * x[1]
        v = fftconv(v, self.filter[:, :l], self.D)
        y = rearrange(v * x[0], "b d l -> b l d")
        return self.out_proj(y)


class HyenaBlock(nn.Module):
    def __init__(self, prenorm=True):
        super().__init__()
        self.prenorm = prenorm
        self.mixer = HyenaOperator()
        self.mlp = Mlp()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, hidden_states, mixer_subset=None):
        if self.prenorm:
            hidden_states = hidden_states + self.mixer(self.norm1(hidden_states))
            hidden_states = hidden_states + self.mlp(self.norm2(hidden_states))
        else:
            mixer_out = self.mixer(hidden_states)
            hidden_states = self.norm1(mixer_out + hidden_states)
            hidden_states = self.norm2(self.mlp(hidden_states) + hidden_states)
        return hidden_states


class Hyena(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([HyenaBlock() for _ in range(2)])
        self.ln_f = nn.LayerNorm(WIDTH)

    def forward(self, input_ids, position_ids=None):
        hidden_states = self.embeddings(input_ids)
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return self.ln_f(hidden_states)


class S4Layer(nn.Module):
    def __init__(self, d_model=WIDTH, l_max=LENGTH):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(d_model, l_max) / l_max)
        self.D = nn.Parameter(torch.randn(d_model))
        self.output_linear = nn.Sequential(nn.Conv1d(d_model, 2 * d_model, kernel_size=1), nn.GLU(dim=-2))

    def forward(self, u, **kwargs):
        y = fftconv(u, self.kernel, self.D)
        return self.output_linear(F.gelu(y)), None


class S4Model(nn.Module):
    def __init__(self, d_input=3, d_model=WIDTH, n_layers=3, dropout=0.0, prenorm=False):
        super().__init__()
        self.prenorm = prenorm
        self.encoder = nn.Linear(d_input, d_model)
        self.s4_layers = nn.ModuleList()
        self.norms = nn.ModuleList()
        self.dropouts = nn.ModuleList()
        for _ in range(n_layers):
            self.s4_layers.append(S4Layer(d_model))
            self.norms.append(nn.LayerNorm(d_model))
            self.dropouts.append(nn.Dropout1d(dropout))
        self.decoder = nn.Linear(d_model, 10)

    def forward(self, x):
        x = self.encoder(x)
        x = x.transpose(-1, -2)
        for layer, norm, dropout in zip(self.s4_layers, self.norms, self.dropouts):
            z = x
            if self.prenorm:
                z = norm(z.transpose(-1, -2)).transpose(-1, -2)
            z, _ = layer(z)
            z = dropout(z)
            x = z + x
            if not self.prenorm:
                x = norm(x.transpose(-1, -2)).transpose(-1, -2)
        x = x.transpose(-1, -2)
        x = x.mean(dim=1)
        x = self.decoder(x)
        return x


class JambaAttentionLayer(nn.Module):
    def __init__(self, num_experts):
        super().__init__()
        self.self_attn = Attention(causal=True)
        self.moe = MixtureOfExperts() if num_experts > 1 else SwiGLU()
        self.input_layernorm = RMSNorm()
        self.pre_moe_layernorm = RMSNorm()

    def forward(self, x, attention_mask=None, cache=None):
        residual = x
        x = self.input_layernorm(x)
        x = self.self_attn(x)
        x = residual + x
        residual = x
        x = self.pre_moe_layernorm(x)
        x = self.moe(x)
        x = residual + x
        return x, cache


class JambaMambaLayer(nn.Module):
    def __init__(self, num_experts):
        super().__init__()
        self.mamba = MambaBlock()
        self.moe = MixtureOfExperts() if num_experts > 1 else SwiGLU()
        self.input_layernorm = RMSNorm()
        self.pre_moe_layernorm = RMSNorm()

    def forward(self, x, cache=None):
        residual = x
        x = self.input_layernorm(x)
        if cache is None:
            x = self.mamba(x)
        else:
            x, cache = self.mamba.step(x.squeeze(1), cache)
            x = x.unsqueeze(1)
        x = residual + x
        residual = x
        x = self.pre_moe_layernorm(x)
        x = self.moe(x)
        x = residual + x
        return x, cache


class Jamba(nn.Module):
    def __init__(self, n_layers=4):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        decoder_layers = []
        for i in range(n_layers):
            num_experts = 4 if i % 2 == 1 else 1
            decoder_layers.append(JambaAttentionLayer(num_experts) if i == 2 else JambaMambaLayer(num_experts))
        self.layers = nn.ModuleList(decoder_layers)
        self.final_layernorm = RMSNorm()

    def forward(self, tokens, caches=None):
        x = self.embedding(tokens)
        caches = default(caches, [None] * len(self.layers))
        for i, decoder_layer in enumerate(self.layers):
            layer_output, caches[i] = decoder_layer(x, cache=caches[i])
            x = layer_output
        x = self.final_layernorm(x)
        return x


# Transformers from scratch


class T5LayerSelfAttention(nn.Module):
    def __init__(self, has_relative_attention_bias=False):
        super().__init__()
        self.SelfAttention = Attention()
        self.bias = nn.Embedding(2 * LENGTH, 1) if has_relative_attention_bias else None
        self.layer_norm = RMSNorm()
        self.dropout = nn.Dropout(0.0)

    def forward(self, hidden_states, mask=None, position_bias=None):
        normed_hidden_states = self.layer_norm(hidden_states)
        if position_bias is None:
            pos = torch.arange(hidden_states.shape[1])
            position_bias = self.bias((pos[:, None] - pos[None]).abs()).squeeze(-1)[None, None]
            if mask is not None:
                position_bias = position_bias + mask
        attention_output = (self.SelfAttention(normed_hidden_states, mask=position_bias), position_bias)
        hidden_states = hidden_states + self.dropout(attention_output[0])
        outputs = (hidden_states,) + attention_output[1:]
        return outputs


class T5LayerCrossAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.EncDecAttention = Attention()
        self.layer_norm = RMSNorm()
        self.dropout = nn.Dropout(0.0)

    def forward(self, hidden_states, key_value_states):
        normed_hidden_states = self.layer_norm(hidden_states)
        attention_output = self.EncDecAttention(normed_hidden_states, key_value_states)
        layer_output = hidden_states + self.dropout(attention_output)
        return (layer_output,)


class T5LayerFF(nn.Module):
    def __init__(self):
        super().__init__()
        self.DenseReluDense = Mlp(act=nn.ReLU)
        self.layer_norm = RMSNorm()
        self.dropout = nn.Dropout(0.0)

    def forward(self, hidden_states):
        forwarded_states = self.layer_norm(hidden_states)
        forwarded_states = self.DenseReluDense(forwarded_states)
        hidden_states = hidden_states + self.dropout(forwarded_states)
        return hidden_states


class T5Block(nn.Module):
    def __init__(self, is_decoder, has_relative_attention_bias):
        super().__init__()
        self.is_decoder = is_decoder
        self.layer = nn.ModuleList()
        self.layer.append(T5LayerSelfAttention(has_relative_attention_bias))
        if self.is_decoder:
            self.layer.append(T5LayerCrossAttention())
        self.layer.append(T5LayerFF())

    def forward(self, hidden_states, mask=None, position_bias=None, encoder_hidden_states=None):
        self_attention_outputs = self.layer[0](hidden_states, mask=mask, position_bias=position_bias)
        hidden_states, position_bias = self_attention_outputs[:2]
        if hidden_states.dtype == torch.float16 and torch.isinf(hidden_states).any():
            clamp_value = torch.finfo(hidden_states.dtype).max - 1000
            hidden_states = torch.clamp(hidden_states, min=-clamp_value, max=clamp_value)
        do_cross_attention = self.is_decoder and encoder_hidden_states is not None
        if do_cross_attention:
            cross_attention_outputs = self.layer[1](hidden_states, key_value_states=encoder_hidden_states)
            hidden_states = cross_attention_outputs[0]
        hidden_states = self.layer[-1](hidden_states)
        return hidden_states, position_bias


class T5Stack(nn.Module):
    def __init__(self, embed_tokens, is_decoder, num_layers=3):
        super().__init__()
        self.embed_tokens = embed_tokens
        self.is_decoder = is_decoder
        self.block = nn.ModuleList([T5Block(is_decoder, bool(i == 0)) for i in range(num_layers)])
        self.final_layer_norm = RMSNorm()
        self.dropout = nn.Dropout(0.0)

    def forward(self, input_ids, encoder_hidden_states=None):
        hidden_states = self.dropout(self.embed_tokens(input_ids))
        mask = None
        if self.is_decoder:
            mask = torch.full((input_ids.shape[1], input_ids.shape[1]), -1e9).triu(1)
        position_bias = None
        for _, layer_module in enumerate(self.block):
            layer_outputs = layer_module(
                hidden_states, mask=mask, position_bias=position_bias, encoder_hidden_states=encoder_hidden_states
            )
            hidden_states, position_bias = layer_outputs
        hidden_states = self.final_layer_norm(hidden_states)
        return self.dropout(hidden_states)


class T5(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Embedding(VOCAB, WIDTH)
        self.encoder = T5Stack(self.shared, is_decoder=False)
        self.decoder = T5Stack(self.shared, is_decoder=True)

    def forward(self, input_ids, decoder_input_ids, encoder_outputs=None):
        if encoder_outputs is None:
            encoder_outputs = self.encoder(input_ids)
        sequence_output = self.decoder(decoder_input_ids, encoder_outputs)
        return F.linear(sequence_output * (WIDTH**-0.5), self.shared.weight)


class BertSublayerConnection(nn.Module):
    def __init__(self, size, dropout):
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, sublayer):
        "Apply residual connection to any sublayer with the same size."
        return x + self.dropout(sublayer(self.norm(x)))


class QKVAttention(nn.Module):
    def __init__(self, h=HEADS, d_model=WIDTH):
        super().__init__()
        self.h, self.d_k = h, d_model // h
        self.linear_layers = nn.ModuleList([nn.Linear(d_model, d_model) for _ in range(3)])
        self.output_linear = nn.Linear(d_model, d_model)

    def forward(self, query, key, value, mask=None):
        nbatches = query.size(0)
        query, key, value = (
            l(x).view(nbatches, -1, self.h, self.d_k).transpose(1, 2)
            for l, x in zip(self.linear_layers, (query, key, value))
        )
        scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        x = torch.matmul(F.softmax(scores, dim=-1), value)
        return self.output_linear(x.transpose(1, 2).contiguous().view(nbatches, -1, self.h * self.d_k))


class BertTransformerBlock(nn.Module):
    def __init__(self, hidden, dropout):
        super().__init__()
        self.attention = QKVAttention()
        self.feed_forward = Mlp(hidden)
        self.input_sublayer = BertSublayerConnection(size=hidden, dropout=dropout)
        self.output_sublayer = BertSublayerConnection(size=hidden, dropout=dropout)
        self.dropout = nn.Dropout(p=dropout)

    def forward(self, x, mask):
        x = self.input_sublayer(x, lambda _x: self.attention.forward(_x, _x, _x, mask=mask))
        x = self.output_sublayer(x, self.feed_forward)
        return self.dropout(x)


class BertPytorch(nn.Module):
    def __init__(self, hidden=WIDTH, n_layers=3, dropout=0.1):
        super().__init__()
        self.token = nn.Embedding(VOCAB, hidden, padding_idx=0)
        self.segment = nn.Embedding(3, hidden, padding_idx=0)
        self.transformer_blocks = nn.ModuleList([BertTransformerBlock(hidden, dropout) for _ in range(n_layers)])

    def forward(self, x, segment_info):
        mask = (x > 0).unsqueeze(1).repeat(1, x.size(1), 1).unsqueeze(1)
        x = self.token(x) + self.segment(segment_info)
        for transformer in self.transformer_blocks:
            x = transformer.forward(x, mask)
        return x


def clones(module, N):
    return nn.ModuleList([copy.deepcopy(module) for _ in range(N)])


class AnnotatedLayerNorm(nn.Module):
    def __init__(self, features, eps=1e-6):
        super().__init__()
        self.a_2 = nn.Parameter(torch.ones(features))
        self.b_2 = nn.Parameter(torch.zeros(features))
        self.eps = eps

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        std = x.std(-1, keepdim=True)
        return self.a_2 * (x - mean) / (std + self.eps) + self.b_2


class AnnotatedSublayer(nn.Module):
    def __init__(self, size, dropout):
        super().__init__()
        self.norm = AnnotatedLayerNorm(size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, sublayer):
        return x + self.dropout(sublayer(self.norm(x)))


class AnnotatedEncoderLayer(nn.Module):
    def __init__(self, size, self_attn, feed_forward, dropout):
        super().__init__()
        self.self_attn = self_attn
        self.feed_forward = feed_forward
        self.sublayer = clones(AnnotatedSublayer(size, dropout), 2)
        self.size = size

    def forward(self, x, mask):
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, mask))
        return self.sublayer[1](x, self.feed_forward)


class AnnotatedDecoderLayer(nn.Module):
    def __init__(self, size, self_attn, src_attn, feed_forward, dropout):
        super().__init__()
        self.size = size
        self.self_attn = self_attn
        self.src_attn = src_attn
        self.feed_forward = feed_forward
        self.sublayer = clones(AnnotatedSublayer(size, dropout), 3)

    def forward(self, x, memory, src_mask, tgt_mask):
        m = memory
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, tgt_mask))
        x = self.sublayer[1](x, lambda x: self.src_attn(x, m, m, src_mask))
        return self.sublayer[2](x, self.feed_forward)


class AnnotatedStack(nn.Module):
    def __init__(self, layer, N):
        super().__init__()
        self.layers = clones(layer, N)
        self.norm = AnnotatedLayerNorm(layer.size)

    def forward(self, x, *args):
        for layer in self.layers:
            x = layer(x, *args)
        return self.norm(x)


class AnnotatedTransformer(nn.Module):
    def __init__(self, N=2, d_model=WIDTH, dropout=0.1):
        super().__init__()
        c = copy.deepcopy
        attn, ff = QKVAttention(), Mlp(d_model)
        self.encoder = AnnotatedStack(AnnotatedEncoderLayer(d_model, c(attn), c(ff), dropout), N)
        self.decoder = AnnotatedStack(AnnotatedDecoderLayer(d_model, c(attn), c(attn), c(ff), dropout), N)
        self.src_embed, self.tgt_embed = nn.Embedding(VOCAB, d_model), nn.Embedding(VOCAB, d_model)
        self.proj = nn.Linear(d_model, VOCAB)

    def forward(self, src, tgt, src_mask, tgt_mask):
        return self.decode(self.encode(src, src_mask), src_mask, tgt, tgt_mask)

    def encode(self, src, src_mask):
        return self.encoder(self.src_embed(src), src_mask)

    def decode(self, memory, src_mask, tgt, tgt_mask):
        return self.proj(self.decoder(self.tgt_embed(tgt), memory, src_mask, tgt_mask))


class FairseqEncoderLayer(nn.Module):
    def __init__(self, normalize_before):
        super().__init__()
        self.normalize_before = normalize_before
        self.self_attn = nn.MultiheadAttention(WIDTH, HEADS)
        self.self_attn_layer_norm = nn.LayerNorm(WIDTH)
        self.final_layer_norm = nn.LayerNorm(WIDTH)
        self.dropout_module = nn.Dropout(0.0)
        self.activation_fn = F.relu
        self.fc1 = nn.Linear(WIDTH, 2 * WIDTH)
        self.fc2 = nn.Linear(2 * WIDTH, WIDTH)
        self.return_fc = False

    def residual_connection(self, x, residual):
        return residual + x

    def forward(self, x, encoder_padding_mask: Tensor | None, attn_mask: Tensor | None = None):
        if attn_mask is not None:
            attn_mask = attn_mask.masked_fill(attn_mask.to(torch.bool), -1e8 if x.dtype == torch.float32 else -1e4)
        residual = x
        if self.normalize_before:
            x = self.self_attn_layer_norm(x)
        x, _ = self.self_attn(
            query=x, key=x, value=x, key_padding_mask=encoder_padding_mask, need_weights=False, attn_mask=attn_mask
        )
        x = self.dropout_module(x)
        x = self.residual_connection(x, residual)
        if not self.normalize_before:
            x = self.self_attn_layer_norm(x)
        residual = x
        if self.normalize_before:
            x = self.final_layer_norm(x)
        x = self.activation_fn(self.fc1(x))
        x = self.fc2(x)
        fc_result = x
        x = self.dropout_module(x)
        x = self.residual_connection(x, residual)
        if not self.normalize_before:
            x = self.final_layer_norm(x)
        if self.return_fc and not torch.jit.is_scripting():
            return x, fc_result
        return x


class FairseqEncoder(nn.Module):
    def __init__(self, normalize_before):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH, padding_idx=1)
        self.layers = nn.ModuleList([])
        self.layers.extend([FairseqEncoderLayer(normalize_before) for i in range(3)])
        self.layer_norm = nn.LayerNorm(WIDTH) if normalize_before else None

    def forward(self, src_tokens, src_lengths=None, return_all_hiddens: bool = False):
        encoder_padding_mask = src_tokens.eq(1)
        has_pads = encoder_padding_mask.any()
        x = self.embed_tokens(src_tokens)
        if has_pads:
            x = x * (1 - encoder_padding_mask.unsqueeze(-1).type_as(x))
        x = x.transpose(0, 1)
        encoder_states = []
        if return_all_hiddens:
            encoder_states.append(x)
        for layer in self.layers:
            lr = layer(x, encoder_padding_mask=encoder_padding_mask if has_pads else None)
            if isinstance(lr, tuple) and len(lr) == 2:
                x, fc_result = lr
            else:
                x = lr
                fc_result = None
            if return_all_hiddens and not torch.jit.is_scripting():
                encoder_states.append(x)
        if self.layer_norm is not None:
            x = self.layer_norm(x)
        return {"encoder_out": [x], "encoder_states": encoder_states, "src_lengths": []}


class XResidual(nn.Module):
    def __init__(self, dim, scale_residual=False):
        super().__init__()
        self.residual_scale = nn.Parameter(torch.ones(dim)) if scale_residual else None

    def forward(self, x, residual):
        if exists(self.residual_scale):
            residual = residual * self.residual_scale
        return x + residual


class XAttentionLayers(nn.Module):
    def __init__(self, dim=WIDTH, depth=2, cross_attend=False, pre_norm=True, scale_residual=False):
        super().__init__()
        self.layer_types = (("a", "c", "f") if cross_attend else ("a", "f")) * depth
        self.layers = nn.ModuleList([])
        self.pre_norm = pre_norm
        for layer_type in self.layer_types:
            layer = Mlp(dim) if layer_type == "f" else Attention(dim)
            pre_branch_norm = nn.LayerNorm(dim) if pre_norm else None
            post_main_norm = nn.LayerNorm(dim) if not pre_norm else None
            norms = nn.ModuleList([pre_branch_norm, None, post_main_norm])
            self.layers.append(nn.ModuleList([norms, layer, XResidual(dim, scale_residual)]))
        self.final_norm = nn.LayerNorm(dim) if pre_norm else nn.Identity()

    def forward(self, x, context=None, mask=None, return_hiddens=False):
        hiddens = []
        for ind, (layer_type, (norm, block, residual_fn)) in enumerate(zip(self.layer_types, self.layers)):
            is_last = ind == (len(self.layers) - 1)
            if layer_type == "a":
                hiddens.append(x)
            residual = x
            pre_norm, post_branch_norm, post_main_norm = norm
            if exists(pre_norm):
                x = pre_norm(x)
            if layer_type == "a":
                out = block(x, mask=mask)
            elif layer_type == "c":
                out = block(x, context=context)
            elif layer_type == "f":
                out = block(x)
            if exists(post_branch_norm):
                out = post_branch_norm(out)
            x = residual_fn(out, residual)
            if exists(post_main_norm) and not is_last:
                x = post_main_norm(x)
        x = self.final_norm(x)
        if return_hiddens:
            return x, hiddens
        return x


class XTransformer(nn.Module):
    def __init__(self, **kwargs):
        super().__init__()
        self.token_emb = nn.Embedding(VOCAB, WIDTH)
        self.attn_layers = XAttentionLayers(**kwargs)
        self.to_logits = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, x, context=None, mask=None, return_embeddings=False):
        x = self.token_emb(x)
        x = self.attn_layers(x, context=context, mask=mask)
        out = self.to_logits(x) if not return_embeddings else x
        return out


class InformerEncoderLayer(nn.Module):
    def __init__(self, d_model=WIDTH, d_ff=None, dropout=0.1, activation="relu"):
        super().__init__()
        d_ff = d_ff or 2 * d_model
        self.attention = QKVAttention()
        self.conv1 = nn.Conv1d(in_channels=d_model, out_channels=d_ff, kernel_size=1)
        self.conv2 = nn.Conv1d(in_channels=d_ff, out_channels=d_model, kernel_size=1)
        self.norm1 = nn.LayerNorm(d_model)
        self.norm2 = nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)
        self.activation = F.relu if activation == "relu" else F.gelu

    def forward(self, x, attn_mask=None, tau=None, delta=None):
        new_x, attn = self.attention(x, x, x, mask=attn_mask), None
        x = x + self.dropout(new_x)
        y = x = self.norm1(x)
        y = self.dropout(self.activation(self.conv1(y.transpose(-1, 1))))
        y = self.dropout(self.conv2(y).transpose(-1, 1))
        return self.norm2(x + y), attn


class InformerEncoder(nn.Module):
    def __init__(self, attn_layers, conv_layers=None, norm_layer=None):
        super().__init__()
        self.attn_layers = nn.ModuleList(attn_layers)
        self.conv_layers = nn.ModuleList(conv_layers) if conv_layers is not None else None
        self.norm = norm_layer

    def forward(self, x, attn_mask=None, tau=None, delta=None):
        attns = []
        if self.conv_layers is not None:
            for i, (attn_layer, conv_layer) in enumerate(zip(self.attn_layers, self.conv_layers)):
                delta = delta if i == 0 else None
                x, attn = attn_layer(x, attn_mask=attn_mask, tau=tau, delta=delta)
                x = conv_layer(x)
                attns.append(attn)
            x, attn = self.attn_layers[-1](x, tau=tau, delta=None)
            attns.append(attn)
        else:
            for attn_layer in self.attn_layers:
                x, attn = attn_layer(x, attn_mask=attn_mask, tau=tau, delta=delta)
                attns.append(attn)
        if self.norm is not None:
            x = self.norm(x)
        return x, attns


class ITransformer(nn.Module):
    def __init__(self, pred_len=4):
        super().__init__()
        self.pred_len = pred_len
        self.enc_embedding = nn.Linear(LENGTH, WIDTH)
        self.encoder = InformerEncoder([InformerEncoderLayer() for _ in range(3)], norm_layer=nn.LayerNorm(WIDTH))
        self.projection = nn.Linear(WIDTH, pred_len, bias=True)

    def forecast(self, x_enc):
        means = x_enc.mean(1, keepdim=True).detach()
        x_enc = x_enc - means
        stdev = torch.sqrt(torch.var(x_enc, dim=1, keepdim=True, unbiased=False) + 1e-5)
        x_enc /= stdev
        _, _, N = x_enc.shape
        enc_out = self.enc_embedding(x_enc.permute(0, 2, 1))
        enc_out, attns = self.encoder(enc_out, attn_mask=None)
        dec_out = self.projection(enc_out).permute(0, 2, 1)[:, :, :N]
        dec_out = dec_out * (stdev[:, 0, :].unsqueeze(1).repeat(1, self.pred_len, 1))
        return dec_out + means

    def forward(self, x_enc):
        dec_out = self.forecast(x_enc)
        return dec_out[:, -self.pred_len :, :]


class SeriesDecomp(nn.Module):
    def __init__(self, kernel_size=3):
        super().__init__()
        self.avg = nn.AvgPool1d(kernel_size, stride=1, padding=kernel_size // 2, count_include_pad=False)

    def forward(self, x):
        moving_mean = self.avg(x.permute(0, 2, 1)).permute(0, 2, 1)
        res = x - moving_mean
        return res, moving_mean


class AutoformerLayer(nn.Module):
    def __init__(self, d_model=WIDTH, dropout=0.0):
        super().__init__()
        self.attention = QKVAttention()
        self.conv1 = nn.Conv1d(d_model, 2 * d_model, kernel_size=1, bias=False)
        self.conv2 = nn.Conv1d(2 * d_model, d_model, kernel_size=1, bias=False)
        self.decomp1 = SeriesDecomp()
        self.decomp2 = SeriesDecomp()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, attn_mask=None, tau=None, delta=None):
        new_x = self.attention(x, x, x, mask=attn_mask)
        x = x + self.dropout(new_x)
        x, _ = self.decomp1(x)
        y = x
        y = self.dropout(F.relu(self.conv1(y.transpose(-1, 1))))
        y = self.dropout(self.conv2(y).transpose(-1, 1))
        res, _ = self.decomp2(x + y)
        return res, None


class UniversalTransformer(nn.Module):
    def __init__(self, num_layers=3):
        super().__init__()
        self.num_layers = num_layers
        self.timing = nn.Parameter(torch.randn(num_layers, WIDTH))
        self.embedding_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.enc = AnnotatedEncoderLayer(WIDTH, QKVAttention(), Mlp(), 0.0)
        self.layer_norm = nn.LayerNorm(WIDTH)

    def forward(self, inputs):
        x = self.embedding_proj(inputs)
        for l in range(self.num_layers):
            x += self.timing[l].unsqueeze(0).expand_as(x)
            x = self.enc(x, None)
        return self.layer_norm(x)


class DETREncoderLayer(nn.Module):
    def __init__(self, d_model=WIDTH, nhead=HEADS, dropout=0.1, normalize_before=False):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(d_model, nhead, dropout=dropout)
        self.linear1 = nn.Linear(d_model, 2 * d_model)
        self.dropout = nn.Dropout(dropout)
        self.linear2 = nn.Linear(2 * d_model, d_model)
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.dropout1, self.dropout2 = nn.Dropout(dropout), nn.Dropout(dropout)
        self.activation = F.relu
        self.normalize_before = normalize_before

    def with_pos_embed(self, tensor, pos: Tensor | None):
        return tensor if pos is None else tensor + pos

    def forward_post(self, src, src_mask=None, src_key_padding_mask=None, pos=None):
        q = k = self.with_pos_embed(src, pos)
        src2 = self.self_attn(q, k, value=src, attn_mask=src_mask, key_padding_mask=src_key_padding_mask)[0]
        src = src + self.dropout1(src2)
        src = self.norm1(src)
        src2 = self.linear2(self.dropout(self.activation(self.linear1(src))))
        src = src + self.dropout2(src2)
        src = self.norm2(src)
        return src

    def forward_pre(self, src, src_mask=None, src_key_padding_mask=None, pos=None):
        src2 = self.norm1(src)
        q = k = self.with_pos_embed(src2, pos)
        src2 = self.self_attn(q, k, value=src2, attn_mask=src_mask, key_padding_mask=src_key_padding_mask)[0]
        src = src + self.dropout1(src2)
        src2 = self.norm2(src)
        src2 = self.linear2(self.dropout(self.activation(self.linear1(src2))))
        src = src + self.dropout2(src2)
        return src

    def forward(self, src, src_mask=None, src_key_padding_mask=None, pos=None):
        if self.normalize_before:
            return self.forward_pre(src, src_mask, src_key_padding_mask, pos)
        return self.forward_post(src, src_mask, src_key_padding_mask, pos)


class DETRDecoderLayer(nn.Module):
    def __init__(self, d_model=WIDTH, nhead=HEADS, dropout=0.1):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(d_model, nhead, dropout=dropout)
        self.multihead_attn = nn.MultiheadAttention(d_model, nhead, dropout=dropout)
        self.mlp = Mlp(d_model)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(d_model) for _ in range(3))

    def forward(self, tgt, memory, pos=None, query_pos=None):
        q = k = tgt + query_pos
        tgt2 = self.self_attn(q, k, value=tgt)[0]
        tgt = self.norm1(tgt + tgt2)
        tgt2 = self.multihead_attn(query=tgt + query_pos, key=memory + pos, value=memory)[0]
        tgt = self.norm2(tgt + tgt2)
        tgt2 = self.mlp(tgt)
        tgt = self.norm3(tgt + tgt2)
        return tgt


class DETR(nn.Module):
    def __init__(self, normalize_before, return_intermediate_dec=True):
        super().__init__()
        self.layers = clones(DETREncoderLayer(normalize_before=normalize_before), 2)
        self.decoder_layers = clones(DETRDecoderLayer(), 2)
        self.norm = nn.LayerNorm(WIDTH)
        self.return_intermediate = return_intermediate_dec
        self.query_embed = nn.Embedding(5, WIDTH)

    def forward(self, src, mask, pos_embed):
        bs, c, h, w = src.shape
        src = src.flatten(2).permute(2, 0, 1)
        pos_embed = pos_embed.flatten(2).permute(2, 0, 1)
        query_embed = self.query_embed.weight.unsqueeze(1).repeat(1, bs, 1)
        tgt = torch.zeros_like(query_embed)
        output = src
        for layer in self.layers:
            output = layer(output, src_mask=None, src_key_padding_mask=mask, pos=pos_embed)
        memory, output = output, tgt
        intermediate = []
        for layer in self.decoder_layers:
            output = layer(output, memory, pos=pos_embed, query_pos=query_embed)
            if self.return_intermediate:
                intermediate.append(self.norm(output))
        hs = torch.stack(intermediate) if self.return_intermediate else self.norm(output).unsqueeze(0)
        return hs.transpose(1, 2), memory.permute(1, 2, 0).view(bs, c, h, w)


class SAMTwoWayBlock(nn.Module):
    def __init__(self, skip_first_layer_pe=False):
        super().__init__()
        self.self_attn = QKVAttention()
        self.norm1, self.norm2, self.norm3, self.norm4 = (nn.LayerNorm(WIDTH) for _ in range(4))
        self.cross_attn_token_to_image = QKVAttention()
        self.mlp = Mlp(act=nn.ReLU)
        self.cross_attn_image_to_token = QKVAttention()
        self.skip_first_layer_pe = skip_first_layer_pe

    def forward(self, queries: Tensor, keys: Tensor, query_pe: Tensor, key_pe: Tensor) -> tuple[Tensor, Tensor]:
        if self.skip_first_layer_pe:
            queries = self.self_attn(queries, queries, queries)
        else:
            q = queries + query_pe
            attn_out = self.self_attn(q, q, queries)
            queries = queries + attn_out
        queries = self.norm1(queries)
        q = queries + query_pe
        k = keys + key_pe
        attn_out = self.cross_attn_token_to_image(q, k, keys)
        queries = queries + attn_out
        queries = self.norm2(queries)
        mlp_out = self.mlp(queries)
        queries = queries + mlp_out
        queries = self.norm3(queries)
        q = queries + query_pe
        k = keys + key_pe
        attn_out = self.cross_attn_image_to_token(k, q, queries)
        keys = keys + attn_out
        keys = self.norm4(keys)
        return queries, keys


class SAMTwoWay(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.layers = nn.ModuleList()
        for i in range(depth):
            self.layers.append(SAMTwoWayBlock(skip_first_layer_pe=(i == 0)))
        self.final_attn_token_to_image = QKVAttention()
        self.norm_final_attn = nn.LayerNorm(WIDTH)

    def forward(self, image_embedding, image_pe, point_embedding):
        image_embedding = image_embedding.flatten(2).permute(0, 2, 1)
        image_pe = image_pe.flatten(2).permute(0, 2, 1)
        queries = point_embedding
        keys = image_embedding
        for layer in self.layers:
            queries, keys = layer(queries=queries, keys=keys, query_pe=point_embedding, key_pe=image_pe)
        q = queries + point_embedding
        k = keys + image_pe
        attn_out = self.final_attn_token_to_image(q, k, keys)
        queries = queries + attn_out
        queries = self.norm_final_attn(queries)
        return queries, keys


class PostNormClassifier(nn.Module):
    """A tutorial's TransformerBlock: post-norm, dropout2(norm2(...))."""

    class Block(nn.Module):
        def __init__(self, emb):
            super().__init__()
            self.attention = Attention(emb)
            self.norm1 = nn.LayerNorm(emb)
            self.norm2 = nn.LayerNorm(emb)
            self.ff = nn.Sequential(nn.Linear(emb, 4 * emb), nn.ReLU(), nn.Linear(4 * emb, emb))
            self.do = nn.Dropout(0.0)

        def forward(self, x):
            attended = self.attention(x)
            x = self.norm1(attended + x)
            x = self.do(x)
            fedforward = self.ff(x)
            x = self.norm2(fedforward + x)
            x = self.do(x)
            return x

    def __init__(self, emb=WIDTH, depth=3):
        super().__init__()
        self.token_embedding = nn.Embedding(VOCAB, emb)
        tblocks = []
        for _ in range(depth):
            tblocks.append(PostNormClassifier.Block(emb))
        self.tblocks = nn.Sequential(*tblocks)
        self.toprobs = nn.Linear(emb, 5)

    def forward(self, x):
        x = self.token_embedding(x)
        x = self.tblocks(x)
        x = x.max(dim=1)[0]
        return F.log_softmax(self.toprobs(x), dim=1)


class DecisionBlock(nn.Module):
    def __init__(self, h_dim=WIDTH, drop_p=0.1):
        super().__init__()
        self.attention = Attention(h_dim, causal=True)
        self.mlp = nn.Sequential(
            nn.Linear(h_dim, 4 * h_dim), nn.GELU(), nn.Linear(4 * h_dim, h_dim), nn.Dropout(drop_p)
        )
        self.ln1 = nn.LayerNorm(h_dim)
        self.ln2 = nn.LayerNorm(h_dim)

    def forward(self, x):
        x = x + self.attention(x)
        x = self.ln1(x)
        x = x + self.mlp(x)
        x = self.ln2(x)
        return x


class DecisionTransformer(nn.Module):
    def __init__(self, state_dim=3, act_dim=2, n_blocks=3, h_dim=WIDTH):
        super().__init__()
        self.h_dim = h_dim
        self.transformer = nn.Sequential(*[DecisionBlock() for _ in range(n_blocks)])
        self.embed_ln = nn.LayerNorm(h_dim)
        self.embed_timestep = nn.Embedding(16, h_dim)
        self.embed_rtg = nn.Linear(1, h_dim)
        self.embed_state = nn.Linear(state_dim, h_dim)
        self.embed_action = nn.Linear(act_dim, h_dim)
        self.predict_rtg, self.predict_state = nn.Linear(h_dim, 1), nn.Linear(h_dim, state_dim)
        self.predict_action = nn.Sequential(nn.Linear(h_dim, act_dim), nn.Tanh())

    def forward(self, timesteps, states, actions, returns_to_go):
        B, T, _ = states.shape
        time_embeddings = self.embed_timestep(timesteps)
        state_embeddings = self.embed_state(states) + time_embeddings
        action_embeddings = self.embed_action(actions) + time_embeddings
        returns_embeddings = self.embed_rtg(returns_to_go) + time_embeddings
        h = torch.stack((returns_embeddings, state_embeddings, action_embeddings), dim=1)
        h = h.permute(0, 2, 1, 3).reshape(B, 3 * T, self.h_dim)
        h = self.embed_ln(h)
        h = self.transformer(h)
        h = h.reshape(B, T, 3, self.h_dim).permute(0, 2, 1, 3)
        return self.predict_state(h[:, 2]), self.predict_action(h[:, 1]), self.predict_rtg(h[:, 2])


# Vision transformers


class LucidFeedForward(nn.Module):
    def __init__(self, dim, hidden_dim, dropout=0.0):
        super().__init__()
        self.net = nn.Sequential(
            nn.LayerNorm(dim),
            nn.Linear(dim, hidden_dim),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(hidden_dim, dim),
            nn.Dropout(dropout),
        )

    def forward(self, x):
        return self.net(x)


class LucidAttention(nn.Module):
    def __init__(self, dim, heads=HEADS, dim_head=8):
        super().__init__()
        self.heads = heads
        self.scale = dim_head**-0.5
        self.norm = nn.LayerNorm(dim)
        self.attend = nn.Softmax(dim=-1)
        self.to_qkv = nn.Linear(dim, 3 * heads * dim_head, bias=False)
        self.to_out = nn.Sequential(nn.Linear(heads * dim_head, dim), nn.Dropout(0.0))

    def forward(self, x):
        x = self.norm(x)
        qkv = self.to_qkv(x).chunk(3, dim=-1)
        q, k, v = map(lambda t: rearrange(t, "b n (h d) -> b h n d", h=self.heads), qkv)  # noqa: C417
        dots = torch.matmul(q, k.transpose(-1, -2)) * self.scale
        out = torch.matmul(self.attend(dots), v)
        return self.to_out(rearrange(out, "b h n d -> b n (h d)"))


class LucidTransformer(nn.Module):
    def __init__(self, dim, depth, mlp_dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.layers = nn.ModuleList([])
        for _ in range(depth):
            self.layers.append(nn.ModuleList([LucidAttention(dim), LucidFeedForward(dim, mlp_dim)]))

    def forward(self, x):
        for attn, ff in self.layers:
            x = attn(x) + x
            x = ff(x) + x
        return self.norm(x)


class LucidViT(nn.Module):
    def __init__(self, dim=WIDTH, depth=3, patch=4, pool="cls"):
        super().__init__()
        self.to_patch_embedding = nn.Sequential(
            Rearrange("b c (h p1) (w p2) -> b (h w) (p1 p2 c)", p1=patch, p2=patch), nn.Linear(patch * patch * 3, dim)
        )
        self.pos_embedding = nn.Parameter(torch.randn(1, 5, dim))
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim))
        self.dropout = nn.Dropout(0.0)
        self.transformer = LucidTransformer(dim, depth, 2 * dim)
        self.pool = pool
        self.to_latent = nn.Identity()
        self.mlp_head = nn.Linear(dim, 10)

    def forward(self, img):
        x = self.to_patch_embedding(img)
        b, n, _ = x.shape
        cls_tokens = repeat(self.cls_token, "1 1 d -> b 1 d", b=b)
        x = torch.cat((cls_tokens, x), dim=1)
        x += self.pos_embedding[:, : (n + 1)]
        x = self.dropout(x)
        x = self.transformer(x)
        x = x.mean(dim=1) if self.pool == "mean" else x[:, 0]
        x = self.to_latent(x)
        return self.mlp_head(x)


class PreNormResidual(nn.Module):
    def __init__(self, dim, fn):
        super().__init__()
        self.fn = fn
        self.norm = nn.LayerNorm(dim)

    def forward(self, x):
        return self.fn(self.norm(x)) + x


def MixerFeedForward(dim, expansion_factor=2, dropout=0.0, dense=nn.Linear):
    inner_dim = int(dim * expansion_factor)
    return nn.Sequential(
        dense(dim, inner_dim), nn.GELU(), nn.Dropout(dropout), dense(inner_dim, dim), nn.Dropout(dropout)
    )


def MLPMixer(*, image_size=8, channels=3, patch_size=2, dim=WIDTH, depth=2, num_classes=10):
    num_patches = (image_size // patch_size) ** 2
    chan_first, chan_last = partial(nn.Conv1d, kernel_size=1), nn.Linear
    return nn.Sequential(
        Rearrange("b c (h p1) (w p2) -> b (h w) (p1 p2 c)", p1=patch_size, p2=patch_size),
        nn.Linear((patch_size**2) * channels, dim),
        *[
            nn.Sequential(
                PreNormResidual(dim, MixerFeedForward(num_patches, 2, dense=chan_first)),
                PreNormResidual(dim, MixerFeedForward(dim, 0.5, dense=chan_last)),
            )
            for _ in range(depth)
        ],
        nn.LayerNorm(dim),
        Reduce("b n c -> b c", "mean"),
        nn.Linear(dim, num_classes),
    )


class PerceiverPreNorm(nn.Module):
    def __init__(self, dim, fn, context_dim=None):
        super().__init__()
        self.fn = fn
        self.norm = nn.LayerNorm(dim)
        self.norm_context = nn.LayerNorm(context_dim) if exists(context_dim) else None

    def forward(self, x, **kwargs):
        x = self.norm(x)
        if exists(self.norm_context):
            context = kwargs["context"]
            normed_context = self.norm_context(context)
            kwargs.update(context=normed_context)
        return self.fn(x, **kwargs)


class Perceiver(nn.Module):
    def __init__(self, depth=2, num_latents=6, dim=WIDTH, self_per_cross_attn=2):
        super().__init__()
        self.latents = nn.Parameter(torch.randn(num_latents, dim))
        self.layers = nn.ModuleList([])
        for _ in range(depth):
            self_attns = nn.ModuleList([])
            for _ in range(self_per_cross_attn):
                self_attns.append(
                    nn.ModuleList([PerceiverPreNorm(dim, Attention(dim)), PerceiverPreNorm(dim, Mlp(dim))])
                )
            cross = PerceiverPreNorm(dim, Attention(dim), context_dim=dim)
            self.layers.append(nn.ModuleList([cross, PerceiverPreNorm(dim, Mlp(dim)), self_attns]))
        self.to_logits = nn.Sequential(Reduce("b n d -> b d", "mean"), nn.LayerNorm(dim), nn.Linear(dim, 10))

    def forward(self, data, mask=None, return_embeddings=False):
        b, *axis, _ = data.shape
        data = rearrange(data, "b ... d -> b (...) d")
        x = repeat(self.latents, "n d -> b n d", b=b)
        for cross_attn, cross_ff, self_attns in self.layers:
            x = cross_attn(x, context=data, mask=mask) + x
            x = cross_ff(x) + x
            for self_attn, self_ff in self_attns:
                x = self_attn(x) + x
                x = self_ff(x) + x
        if return_embeddings:
            return x
        return self.to_logits(x)


class ResAttentionBlock(nn.Module):
    def __init__(self, d_model, n_head, attn_mask=None):
        super().__init__()
        self.attn = nn.MultiheadAttention(d_model, n_head)
        self.ln_1 = nn.LayerNorm(d_model)
        self.mlp = nn.Sequential(
            OrderedDict(
                [
                    ("c_fc", nn.Linear(d_model, d_model * 4)),
                    ("gelu", nn.GELU()),
                    ("c_proj", nn.Linear(d_model * 4, d_model)),
                ]
            )
        )
        self.ln_2 = nn.LayerNorm(d_model)
        self.attn_mask = attn_mask

    def attention(self, x: torch.Tensor):
        self.attn_mask = self.attn_mask.to(dtype=x.dtype, device=x.device) if self.attn_mask is not None else None
        return self.attn(x, x, x, need_weights=False, attn_mask=self.attn_mask)[0]

    def forward(self, x: torch.Tensor):
        x = x + self.attention(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return x


class CLIPTransformer(nn.Module):
    def __init__(self, width=WIDTH, layers=3, heads=HEADS, attn_mask=None):
        super().__init__()
        self.resblocks = nn.Sequential(*[ResAttentionBlock(width, heads, attn_mask) for _ in range(layers)])

    def forward(self, x: torch.Tensor):
        return self.resblocks(x)


class CLIP(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, WIDTH, kernel_size=4, stride=4, bias=False)
        self.class_embedding = nn.Parameter(torch.randn(WIDTH))
        self.positional_embedding_v = nn.Parameter(torch.randn(5, WIDTH))
        self.ln_pre, self.ln_post = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.visual = CLIPTransformer()
        self.transformer = CLIPTransformer(attn_mask=torch.full((LENGTH, LENGTH), float("-inf")).triu_(1))
        self.token_embedding = nn.Embedding(VOCAB, WIDTH)
        self.positional_embedding = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.ln_final = nn.LayerNorm(WIDTH)
        self.logit_scale = nn.Parameter(torch.ones([]) * np_log(1 / 0.07))

    def encode_image(self, x):
        x = self.conv1(x)
        x = x.reshape(x.shape[0], x.shape[1], -1)
        x = x.permute(0, 2, 1)
        cls = self.class_embedding + torch.zeros(x.shape[0], 1, x.shape[-1], dtype=x.dtype, device=x.device)
        x = torch.cat([cls, x], dim=1)
        x = x + self.positional_embedding_v.to(x.dtype)
        x = self.ln_pre(x)
        x = x.permute(1, 0, 2)  # NLD -> LND
        x = self.visual(x)
        x = x.permute(1, 0, 2)  # LND -> NLD
        return self.ln_post(x[:, 0, :])

    def encode_text(self, text):
        x = self.token_embedding(text)
        x = x + self.positional_embedding
        x = x.permute(1, 0, 2)
        x = self.transformer(x)
        x = x.permute(1, 0, 2)
        x = self.ln_final(x)
        return x[torch.arange(x.shape[0]), text.argmax(dim=-1)]

    def forward(self, image, text):
        image_features = self.encode_image(image)
        text_features = self.encode_text(text)
        image_features = image_features / image_features.norm(dim=1, keepdim=True)
        text_features = text_features / text_features.norm(dim=1, keepdim=True)
        logits_per_image = self.logit_scale.exp() * image_features @ text_features.t()
        return logits_per_image, logits_per_image.t()


np_log = math.log


class MonaiBlock(nn.Module):
    def __init__(self, hidden_size=WIDTH, with_cross_attention=False):
        super().__init__()
        self.mlp = Mlp(hidden_size)
        self.norm1 = nn.LayerNorm(hidden_size)
        self.attn = Attention(hidden_size)
        self.norm2 = nn.LayerNorm(hidden_size)
        self.with_cross_attention = with_cross_attention
        self.norm_cross_attn = nn.LayerNorm(hidden_size)
        self.cross_attn = Attention(hidden_size)

    def forward(self, x, context: torch.Tensor | None = None, attn_mask: torch.Tensor | None = None):
        x = x + self.attn(self.norm1(x), mask=attn_mask)
        if self.with_cross_attention:
            x = x + self.cross_attn(self.norm_cross_attn(x), context=context)
        x = x + self.mlp(self.norm2(x))
        return x


class MonaiViT(nn.Module):
    def __init__(self, num_layers=3, classification=True):
        super().__init__()
        self.classification = classification
        self.patch_embedding = nn.Conv2d(3, WIDTH, kernel_size=4, stride=4)
        self.blocks = nn.ModuleList([MonaiBlock() for i in range(num_layers)])
        self.norm = nn.LayerNorm(WIDTH)
        if self.classification:
            self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
            self.classification_head = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh())

    def forward(self, x):
        x = self.patch_embedding(x).flatten(2).transpose(-1, -2)
        if hasattr(self, "cls_token"):
            cls_token = self.cls_token.expand(x.shape[0], -1, -1)
            x = torch.cat((cls_token, x), dim=1)
        hidden_states_out = []
        for blk in self.blocks:
            x = blk(x)
            hidden_states_out.append(x)
        x = self.norm(x)
        if hasattr(self, "classification_head"):
            x = self.classification_head(x[:, 0])
        return x, hidden_states_out


class LayerScale(nn.Module):
    def __init__(self, dim=WIDTH, init_values=0.5, inplace=False):
        super().__init__()
        self.inplace = inplace
        self.gamma = nn.Parameter(init_values * torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(self.gamma) if self.inplace else x * self.gamma


def drop_add_residual_stochastic_depth(x, residual_func, sample_drop_ratio: float = 0.0):
    b, n, d = x.shape
    sample_subset_size = max(int(b * (1 - sample_drop_ratio)), 1)
    brange = (torch.randperm(b, device=x.device))[:sample_subset_size]
    x_subset = x[brange]
    residual = residual_func(x_subset)
    x_flat = x.flatten(1)
    residual = residual.flatten(1)
    residual_scale_factor = b / sample_subset_size
    x_plus_residual = torch.index_add(x_flat, 0, brange, residual.to(dtype=x.dtype), alpha=residual_scale_factor)
    return x_plus_residual.view_as(x)


class DINOv2Block(nn.Module):
    def __init__(self, dim=WIDTH, drop_path=0.0):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = Attention(dim)
        self.ls1 = LayerScale(dim)
        self.drop_path1 = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim)
        self.ls2 = LayerScale(dim)
        self.sample_drop_ratio = drop_path

    def forward(self, x: Tensor) -> Tensor:
        def attn_residual_func(x: Tensor) -> Tensor:
            return self.ls1(self.attn(self.norm1(x)))

        def ffn_residual_func(x: Tensor) -> Tensor:
            return self.ls2(self.mlp(self.norm2(x)))

        if self.training and self.sample_drop_ratio > 0.1:
            x = drop_add_residual_stochastic_depth(x, attn_residual_func, sample_drop_ratio=self.sample_drop_ratio)
            x = drop_add_residual_stochastic_depth(x, ffn_residual_func, sample_drop_ratio=self.sample_drop_ratio)
        elif self.training and self.sample_drop_ratio > 0.0:
            x = x + self.drop_path1(attn_residual_func(x))
            x = x + self.drop_path1(ffn_residual_func(x))
        else:
            x = x + attn_residual_func(x)
            x = x + ffn_residual_func(x)
        return x


class DINOv2(nn.Module):
    def __init__(self, drop_path_rate=0.0, depth=3):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, WIDTH, kernel_size=4, stride=4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.chunked_blocks = False
        self.blocks = nn.ModuleList([DINOv2Block(drop_path=drop_path_rate) for _ in range(depth)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Identity()

    def prepare_tokens_with_masks(self, x, masks=None):
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        return torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1)

    def forward_features(self, x, masks=None):
        x = self.prepare_tokens_with_masks(x, masks)
        for blk in self.blocks:
            x = blk(x)
        x_norm = self.norm(x)
        return {"x_norm_clstoken": x_norm[:, 0], "x_norm_patchtokens": x_norm[:, 1:], "x_prenorm": x, "masks": masks}

    def forward(self, *args, is_training=False, **kwargs):
        ret = self.forward_features(*args, **kwargs)
        if is_training:
            return ret
        else:
            return self.head(ret["x_norm_clstoken"])


class BEiTBlock(nn.Module):
    def __init__(self, dim=WIDTH, init_values=None, drop_path=0.0):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn, self.mlp = Attention(dim), Mlp(dim)
        self.drop_path = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()
        if init_values is not None and init_values > 0:
            self.gamma_1 = nn.Parameter(init_values * torch.ones(dim), requires_grad=True)
            self.gamma_2 = nn.Parameter(init_values * torch.ones(dim), requires_grad=True)
        else:
            self.gamma_1, self.gamma_2 = None, None

    def forward(self, x, rel_pos_bias=None):
        if self.gamma_1 is None:
            x = x + self.drop_path(self.attn(self.norm1(x), mask=rel_pos_bias))
            x = x + self.drop_path(self.mlp(self.norm2(x)))
        else:
            x = x + self.drop_path(self.gamma_1 * self.attn(self.norm1(x), mask=rel_pos_bias))
            x = x + self.drop_path(self.gamma_2 * self.mlp(self.norm2(x)))
        return x


class BEiT(nn.Module):
    def __init__(self, init_values=0.1, drop_path_rate=0.1, depth=3):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, WIDTH, 4, 4)
        self.rel_pos_bias = nn.Parameter(torch.randn(HEADS, 4, 4))
        dpr = [x.item() for x in torch.linspace(0, drop_path_rate, depth)]
        self.blocks = nn.ModuleList([BEiTBlock(init_values=init_values, drop_path=dpr[i]) for i in range(depth)])
        self.fc_norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 10)

    def forward_features(self, x):
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        rel_pos_bias = self.rel_pos_bias if self.rel_pos_bias is not None else None
        for blk in self.blocks:
            x = blk(x, rel_pos_bias=rel_pos_bias)
        return self.fc_norm(x.mean(1)) if self.fc_norm is not None else x[:, 0]

    def forward(self, x):
        x = self.forward_features(x)
        x = self.head(x)
        return x


class ParallelViTBlock(nn.Module):
    def __init__(self, dim=WIDTH, drop_path=0.1):
        super().__init__()
        self.norm1, self.norm11, self.norm2, self.norm21 = (nn.LayerNorm(dim) for _ in range(4))
        self.attn, self.attn1 = Attention(dim), Attention(dim)
        self.mlp, self.mlp1 = Mlp(dim), Mlp(dim)
        self.drop_path = DropPath(drop_path)
        self.gamma_1, self.gamma_1_1, self.gamma_2, self.gamma_2_1 = (
            nn.Parameter(0.5 * torch.ones(dim)) for _ in range(4)
        )

    def forward(self, x):
        x = (
            x
            + self.drop_path(self.gamma_1 * self.attn(self.norm1(x)))
            + self.drop_path(self.gamma_1_1 * self.attn1(self.norm11(x)))
        )
        x = (
            x
            + self.drop_path(self.gamma_2 * self.mlp(self.norm2(x)))
            + self.drop_path(self.gamma_2_1 * self.mlp1(self.norm21(x)))
        )
        return x


class CaiTClassBlock(nn.Module):
    def __init__(self, dim=WIDTH):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn, self.mlp = Attention(dim), Mlp(dim)
        self.drop_path = nn.Identity()
        self.gamma_1 = nn.Parameter(0.5 * torch.ones(dim))
        self.gamma_2 = nn.Parameter(0.5 * torch.ones(dim))

    def forward(self, x, x_cls):
        u = torch.cat((x_cls, x), dim=1)
        u = self.norm1(u)
        x_cls = x_cls + self.drop_path(self.gamma_1 * self.attn(u[:, :1], u))
        x_cls = x_cls + self.drop_path(self.gamma_2 * self.mlp(self.norm2(x_cls)))
        return x_cls


class CaiT(nn.Module):
    def __init__(self, depth=2, depth_token_only=2):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, WIDTH, 4, 4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.blocks = nn.ModuleList([ParallelViTBlock() for i in range(depth)])
        self.blocks_token_only = nn.ModuleList([CaiTClassBlock() for i in range(depth_token_only)])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        B = x.shape[0]
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        cls_tokens = self.cls_token.expand(B, -1, -1)
        for i, blk in enumerate(self.blocks):
            x = blk(x)
        for i, blk in enumerate(self.blocks_token_only):
            cls_tokens = blk(x, cls_tokens)
        x = torch.cat((cls_tokens, x), dim=1)
        x = self.norm(x)
        return x[:, 0]


def window_partition(x, window_size):
    B, H, W, C = x.shape
    x = x.view(B, H // window_size, window_size, W // window_size, window_size, C)
    windows = x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, window_size, window_size, C)
    return windows


def window_reverse(windows, window_size, H, W):
    B = int(windows.shape[0] / (H * W / window_size / window_size))
    x = windows.view(B, H // window_size, W // window_size, window_size, window_size, -1)
    x = x.permute(0, 1, 3, 2, 4, 5).contiguous().view(B, H, W, -1)
    return x


class SwinBlock(nn.Module):
    def __init__(self, dim, input_resolution, window_size=2, shift_size=0, drop_path=0.0):
        super().__init__()
        self.input_resolution = input_resolution
        self.window_size = window_size
        self.shift_size = shift_size
        self.norm1 = nn.LayerNorm(dim)
        self.attn = Attention(dim)
        self.drop_path = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim)
        self.register_buffer("attn_mask", None)
        self.fused_window_process = False

    def forward(self, x):
        H, W = self.input_resolution
        B, L, C = x.shape
        assert L == H * W, "input feature has wrong size"
        shortcut = x
        x = self.norm1(x)
        x = x.view(B, H, W, C)
        if self.shift_size > 0:
            shifted_x = torch.roll(x, shifts=(-self.shift_size, -self.shift_size), dims=(1, 2))
            x_windows = window_partition(shifted_x, self.window_size)
        else:
            shifted_x = x
            x_windows = window_partition(shifted_x, self.window_size)
        x_windows = x_windows.view(-1, self.window_size * self.window_size, C)
        attn_windows = self.attn(x_windows, mask=self.attn_mask)
        attn_windows = attn_windows.view(-1, self.window_size, self.window_size, C)
        if self.shift_size > 0:
            shifted_x = window_reverse(attn_windows, self.window_size, H, W)
            x = torch.roll(shifted_x, shifts=(self.shift_size, self.shift_size), dims=(1, 2))
        else:
            shifted_x = window_reverse(attn_windows, self.window_size, H, W)
            x = shifted_x
        x = x.view(B, H * W, C)
        x = shortcut + self.drop_path(x)
        x = x + self.drop_path(self.mlp(self.norm2(x)))
        return x


class PatchMerging(nn.Module):
    def __init__(self, input_resolution, dim):
        super().__init__()
        self.input_resolution = input_resolution
        self.reduction = nn.Linear(4 * dim, 2 * dim, bias=False)
        self.norm = nn.LayerNorm(4 * dim)

    def forward(self, x):
        H, W = self.input_resolution
        B, L, C = x.shape
        assert L == H * W, "input feature has wrong size"
        x = x.view(B, H, W, C)
        x = torch.cat([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]], -1)
        return self.reduction(self.norm(x.view(B, -1, 4 * C)))


class SwinBasicLayer(nn.Module):
    def __init__(self, dim, input_resolution, depth, downsample=None, use_checkpoint=False):
        super().__init__()
        self.use_checkpoint = use_checkpoint
        self.blocks = nn.ModuleList(
            [SwinBlock(dim, input_resolution, shift_size=0 if (i % 2 == 0) else 1) for i in range(depth)]
        )
        if downsample is not None:
            self.downsample = downsample(input_resolution, dim=dim)
        else:
            self.downsample = None

    def forward(self, x):
        for blk in self.blocks:
            if self.use_checkpoint:
                x = checkpoint(blk, x, use_reentrant=False)
            else:
                x = blk(x)
        if self.downsample is not None:
            x = self.downsample(x)
        return x


class Swin(nn.Module):
    def __init__(self, depths=(2, 2), use_checkpoint=False):
        super().__init__()
        self.num_layers = len(depths)
        self.patch_embed = nn.Conv2d(3, WIDTH, 2, 2)
        self.pos_drop = nn.Dropout(p=0.0)
        self.ape = False
        self.layers = nn.ModuleList()
        for i_layer in range(self.num_layers):
            self.layers.append(
                SwinBasicLayer(
                    dim=int(WIDTH * 2**i_layer),
                    input_resolution=(4 // 2**i_layer, 4 // 2**i_layer),
                    depth=depths[i_layer],
                    downsample=PatchMerging if (i_layer < self.num_layers - 1) else None,
                    use_checkpoint=use_checkpoint,
                )
            )
        self.norm = nn.LayerNorm(2 * WIDTH)
        self.avgpool = nn.AdaptiveAvgPool1d(1)
        self.head = nn.Linear(2 * WIDTH, 10)

    def forward_features(self, x):
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        if self.ape:
            x = x + self.absolute_pos_embed
        x = self.pos_drop(x)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        x = self.avgpool(x.transpose(1, 2))
        x = torch.flatten(x, 1)
        return x

    def forward(self, x):
        x = self.forward_features(x)
        x = self.head(x)
        return x


class SAMEncoderBlock(nn.Module):
    def __init__(self, dim=WIDTH, window_size=0):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn, self.mlp = Attention(dim), Mlp(dim)
        self.window_size = window_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x
        x = self.norm1(x)
        if self.window_size > 0:
            H, W = x.shape[1], x.shape[2]
            x = window_partition(x, self.window_size)
        x = self.attn(x)
        if self.window_size > 0:
            x = window_reverse(x, self.window_size, H, W)
        x = shortcut + x
        x = x + self.mlp(self.norm2(x))
        return x


class SAMEncoder(nn.Module):
    def __init__(self, depth=3, global_attn_indexes=(1,)):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, WIDTH, 2, 2)
        self.pos_embed = nn.Parameter(torch.randn(1, 4, 4, WIDTH))
        self.blocks = nn.ModuleList()
        for i in range(depth):
            self.blocks.append(SAMEncoderBlock(window_size=2 if i not in global_attn_indexes else 0))
        self.neck = nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 1, bias=False), nn.Conv2d(WIDTH, WIDTH, 3, padding=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch_embed(x).permute(0, 2, 3, 1)
        if self.pos_embed is not None:
            x = x + self.pos_embed
        for blk in self.blocks:
            x = blk(x)
        x = self.neck(x.permute(0, 3, 1, 2))
        return x


class Affine(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(dim))
        self.beta = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        return self.alpha * x + self.beta


class ResMLPBlock(nn.Module):
    def __init__(self, dim=WIDTH, drop=0.0, drop_path=0.0, init_values=0.1, num_patches=16):
        super().__init__()
        self.norm1 = Affine(dim)
        self.attn = nn.Linear(num_patches, num_patches)
        self.drop_path = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()
        self.norm2 = Affine(dim)
        self.mlp = Mlp(dim, drop=drop)
        self.gamma_1 = nn.Parameter(init_values * torch.ones(dim), requires_grad=True)
        self.gamma_2 = nn.Parameter(init_values * torch.ones(dim), requires_grad=True)

    def forward(self, x):
        x = x + self.drop_path(self.gamma_1 * self.attn(self.norm1(x).transpose(1, 2)).transpose(1, 2))
        x = x + self.drop_path(self.gamma_2 * self.mlp(self.norm2(x)))
        return x


class ResMLP(nn.Module):
    def __init__(self, depth=3, use_checkpoint=False, drop_path=0.0):
        super().__init__()
        self.use_checkpoint = use_checkpoint
        self.patch_embed = nn.Conv2d(3, WIDTH, 2, 2)
        self.blocks = nn.ModuleList([ResMLPBlock(drop_path=drop_path) for i in range(depth)])
        self.norm = Affine(WIDTH)
        self.head = nn.Linear(WIDTH, 10)

    def forward_features(self, x):
        B = x.shape[0]
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        for i, blk in enumerate(self.blocks):
            if self.use_checkpoint:
                x = checkpoint(blk, x, use_reentrant=False)
            else:
                x = blk(x)
        x = self.norm(x)
        x = x.mean(dim=1).reshape(B, -1)
        return x

    def forward(self, x):
        x = self.forward_features(x)
        x = self.head(x)
        return x


class SpatialGatingUnit(nn.Module):
    def __init__(self, d_ffn, seq_len=LENGTH):
        super().__init__()
        self.norm = nn.LayerNorm(d_ffn)
        self.spatial_proj = nn.Conv1d(seq_len, seq_len, kernel_size=1)

    def forward(self, x):
        u, v = x.chunk(2, dim=-1)
        v = self.norm(v)
        v = self.spatial_proj(v)
        out = u * v
        return out


class gMLPBlock(nn.Module):
    def __init__(self, d_model=WIDTH, d_ffn=WIDTH):
        super().__init__()
        self.norm = nn.LayerNorm(d_model)
        self.channel_proj1 = nn.Linear(d_model, d_ffn * 2)
        self.channel_proj2 = nn.Linear(d_ffn, d_model)
        self.sgu = SpatialGatingUnit(d_ffn)

    def forward(self, x):
        residual = x
        x = self.norm(x)
        x = F.gelu(self.channel_proj1(x))
        x = self.sgu(x)
        x = self.channel_proj2(x)
        out = x + residual
        return out


class gMLP(nn.Module):
    def __init__(self, num_layers=3):
        super().__init__()
        self.model = nn.Sequential(*[gMLPBlock() for _ in range(num_layers)])

    def forward(self, x):
        return self.model(x)


class FNetMixing(nn.Module):
    def forward(self, x):
        return torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real


class FNet(nn.Module):
    def __init__(self, dim=WIDTH, depth=3):
        super().__init__()
        self.layers = nn.ModuleList([])
        for _ in range(depth):
            self.layers.append(nn.ModuleList([PreNormFn(dim, FNetMixing()), PreNormFn(dim, Mlp(dim))]))

    def forward(self, x):
        for attn, ff in self.layers:
            x = attn(x) + x
            x = ff(x) + x
        return x


class PreNormFn(nn.Module):
    def __init__(self, dim, fn):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.fn = fn

    def forward(self, x, **kwargs):
        return self.fn(self.norm(x), **kwargs)


class FNetEncoderLayer(nn.Module):
    def __init__(self, dim=WIDTH):
        super().__init__()
        self.mixing_layer_norm = nn.LayerNorm(dim)
        self.feed_forward = nn.Linear(dim, 2 * dim)
        self.output_dense = nn.Linear(2 * dim, dim)
        self.output_layer_norm = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(0.1)
        self.activation = nn.GELU()

    def forward(self, hidden_states):
        fft_output = torch.fft.fft(torch.fft.fft(hidden_states.float(), dim=-1), dim=-2).real
        fft_output = self.mixing_layer_norm(fft_output + hidden_states)
        intermediate_output = self.feed_forward(fft_output)
        intermediate_output = self.activation(intermediate_output)
        output = self.output_dense(intermediate_output)
        output = self.dropout(output)
        output = self.output_layer_norm(output + fft_output)
        return output


class FNetPostNorm(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.layer = nn.ModuleList([FNetEncoderLayer() for _ in range(depth)])

    def forward(self, hidden_states):
        for layer_module in self.layer:
            hidden_states = layer_module(hidden_states)
        return hidden_states


# Diffusion transformers


def modulate(x, shift, scale):
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class DiTBlock(nn.Module):
    def __init__(self, hidden_size=WIDTH):
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.attn = Attention(hidden_size)
        self.norm2 = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.mlp = Mlp(hidden_size)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 6 * hidden_size, bias=True))

    def forward(self, x, c):
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = self.adaLN_modulation(c).chunk(6, dim=1)
        x = x + gate_msa.unsqueeze(1) * self.attn(modulate(self.norm1(x), shift_msa, scale_msa))
        x = x + gate_mlp.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift_mlp, scale_mlp))
        return x


class DiTFinalLayer(nn.Module):
    def __init__(self, hidden_size=WIDTH, out=12):
        super().__init__()
        self.norm_final = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.linear = nn.Linear(hidden_size, out)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 2 * hidden_size, bias=True))

    def forward(self, x, c):
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=1)
        x = modulate(self.norm_final(x), shift, scale)
        x = self.linear(x)
        return x


class DiT(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.x_embedder = nn.Conv2d(3, WIDTH, 2, 2)
        self.t_embedder = nn.Linear(WIDTH, WIDTH)
        self.y_embedder = nn.Embedding(11, WIDTH)
        self.pos_embed = nn.Parameter(torch.randn(1, 16, WIDTH), requires_grad=False)
        self.blocks = nn.ModuleList([DiTBlock() for _ in range(depth)])
        self.final_layer = DiTFinalLayer()

    def unpatchify(self, x):
        x = x.reshape(shape=(x.shape[0], 4, 4, 2, 2, 3))
        x = torch.einsum("nhwpqc->nchpwq", x)
        return x.reshape(shape=(x.shape[0], 3, 8, 8))

    def forward(self, x, t, y):
        x = self.x_embedder(x).flatten(2).transpose(1, 2) + self.pos_embed
        t = self.t_embedder(timestep_embedding(t))
        y = self.y_embedder(y)
        c = t + y
        for block in self.blocks:
            x = block(x, c)
        x = self.final_layer(x, c)
        x = self.unpatchify(x)
        return x


def t2i_modulate(x, shift, scale):
    return x * (1 + scale) + shift


def auto_grad_checkpoint(module, *args, **kwargs):
    if getattr(module, "grad_checkpointing", False):
        return checkpoint(module, *args, use_reentrant=False, **kwargs)
    return module(*args, **kwargs)


class PixArtBlock(nn.Module):
    def __init__(self, hidden_size=WIDTH, drop_path=0.0):
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.attn = Attention(hidden_size)
        self.cross_attn = Attention(hidden_size)
        self.norm2 = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.mlp = Mlp(hidden_size)
        self.drop_path = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()
        self.scale_shift_table = nn.Parameter(torch.randn(6, hidden_size) / hidden_size**0.5)

    def forward(self, x, y, t, mask=None, **kwargs):
        B, N, C = x.shape
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = (
            self.scale_shift_table[None] + t.reshape(B, 6, -1)
        ).chunk(6, dim=1)
        x = x + self.drop_path(gate_msa * self.attn(t2i_modulate(self.norm1(x), shift_msa, scale_msa)).reshape(B, N, C))
        x = x + self.cross_attn(x, y, mask)
        x = x + self.drop_path(gate_mlp * self.mlp(t2i_modulate(self.norm2(x), shift_mlp, scale_mlp)))
        return x


class PixArt(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.x_embedder = nn.Conv2d(3, WIDTH, 2, 2)
        self.t_embedder = nn.Linear(WIDTH, WIDTH)
        self.t_block = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))
        self.blocks = nn.ModuleList([PixArtBlock(drop_path=0.1 if i else 0.0) for i in range(depth)])

    def forward(self, x, timestep, y, mask=None, **kwargs):
        x = self.x_embedder(x).flatten(2).transpose(1, 2)
        t = self.t_embedder(timestep_embedding(timestep.to(x.dtype)))
        t0 = self.t_block(t)
        for block in self.blocks:
            x = auto_grad_checkpoint(block, x, y, t0, mask, **kwargs)
        return x


class UViTBlock(nn.Module):
    def __init__(self, dim=WIDTH, skip=False, use_checkpoint=False):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn, self.mlp = Attention(dim), Mlp(dim)
        self.skip_linear = nn.Linear(2 * dim, dim) if skip else None
        self.use_checkpoint = use_checkpoint

    def forward(self, x, skip=None):
        if self.use_checkpoint:
            return torch.utils.checkpoint.checkpoint(self._forward, x, skip, use_reentrant=False)
        else:
            return self._forward(x, skip)

    def _forward(self, x, skip=None):
        if self.skip_linear is not None:
            x = self.skip_linear(torch.cat([x, skip], dim=-1))
        x = x + self.attn(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x


class UViT(nn.Module):
    def __init__(self, depth=5):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, WIDTH, 2, 2)
        self.in_blocks = nn.ModuleList([UViTBlock() for _ in range(depth // 2)])
        self.mid_block = UViTBlock()
        self.out_blocks = nn.ModuleList([UViTBlock(skip=True) for _ in range(depth // 2)])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x, timesteps, y=None):
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        time_token = timestep_embedding(timesteps).unsqueeze(dim=1)
        x = torch.cat((time_token, x), dim=1)
        skips = []
        for blk in self.in_blocks:
            x = blk(x)
            skips.append(x)
        x = self.mid_block(x)
        for blk in self.out_blocks:
            x = blk(x, skips.pop())
        x = self.norm(x)
        return x[:, 1:, :]


@dataclass
class ModulationOut:
    shift: Tensor
    scale: Tensor
    gate: Tensor


class Modulation(nn.Module):
    def __init__(self, dim, double):
        super().__init__()
        self.is_double = double
        self.multiplier = 6 if double else 3
        self.lin = nn.Linear(dim, self.multiplier * dim, bias=True)

    def forward(self, vec: Tensor) -> tuple[ModulationOut, ModulationOut | None]:
        out = self.lin(F.silu(vec))[:, None, :].chunk(self.multiplier, dim=-1)
        return (ModulationOut(*out[:3]), ModulationOut(*out[3:]) if self.is_double else None)


class FluxSelfAttention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)


def flux_attention(q, k, v, pe=None):
    x = F.scaled_dot_product_attention(q, k, v)
    return rearrange(x, "B H L D -> B L (H D)")


class DoubleStreamBlock(nn.Module):
    def __init__(self, dim=WIDTH, num_heads=HEADS):
        super().__init__()
        self.num_heads = num_heads
        self.img_mod, self.txt_mod = Modulation(dim, double=True), Modulation(dim, double=True)
        self.img_norm1, self.img_norm2, self.txt_norm1, self.txt_norm2 = (
            nn.LayerNorm(dim, elementwise_affine=False) for _ in range(4)
        )
        self.img_attn, self.txt_attn = FluxSelfAttention(dim), FluxSelfAttention(dim)
        self.img_mlp, self.txt_mlp = (
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(approximate="tanh"), nn.Linear(2 * dim, dim))
            for _ in range(2)
        )

    def forward(self, img: Tensor, txt: Tensor, vec: Tensor, pe: Tensor) -> tuple[Tensor, Tensor]:
        img_mod1, img_mod2 = self.img_mod(vec)
        txt_mod1, txt_mod2 = self.txt_mod(vec)
        img_modulated = self.img_norm1(img)
        img_modulated = (1 + img_mod1.scale) * img_modulated + img_mod1.shift
        img_qkv = self.img_attn.qkv(img_modulated)
        img_q, img_k, img_v = rearrange(img_qkv, "B L (K H D) -> K B H L D", K=3, H=self.num_heads)
        txt_modulated = self.txt_norm1(txt)
        txt_modulated = (1 + txt_mod1.scale) * txt_modulated + txt_mod1.shift
        txt_qkv = self.txt_attn.qkv(txt_modulated)
        txt_q, txt_k, txt_v = rearrange(txt_qkv, "B L (K H D) -> K B H L D", K=3, H=self.num_heads)
        q = torch.cat((txt_q, img_q), dim=2)
        k = torch.cat((txt_k, img_k), dim=2)
        v = torch.cat((txt_v, img_v), dim=2)
        attn = flux_attention(q, k, v, pe=pe)
        txt_attn, img_attn = attn[:, : txt.shape[1]], attn[:, txt.shape[1] :]
        img = img + img_mod1.gate * self.img_attn.proj(img_attn)
        img = img + img_mod2.gate * self.img_mlp((1 + img_mod2.scale) * self.img_norm2(img) + img_mod2.shift)
        txt = txt + txt_mod1.gate * self.txt_attn.proj(txt_attn)
        txt = txt + txt_mod2.gate * self.txt_mlp((1 + txt_mod2.scale) * self.txt_norm2(txt) + txt_mod2.shift)
        return img, txt


class SingleStreamBlock(nn.Module):
    def __init__(self, dim=WIDTH, num_heads=HEADS):
        super().__init__()
        self.hidden_dim, self.num_heads, self.mlp_hidden_dim = dim, num_heads, 2 * dim
        self.linear1 = nn.Linear(dim, dim * 3 + self.mlp_hidden_dim)
        self.linear2 = nn.Linear(dim + self.mlp_hidden_dim, dim)
        self.pre_norm = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.mlp_act = nn.GELU(approximate="tanh")
        self.modulation = Modulation(dim, double=False)

    def forward(self, x: Tensor, vec: Tensor, pe: Tensor) -> Tensor:
        mod, _ = self.modulation(vec)
        x_mod = (1 + mod.scale) * self.pre_norm(x) + mod.shift
        qkv, mlp = torch.split(self.linear1(x_mod), [3 * self.hidden_dim, self.mlp_hidden_dim], dim=-1)
        q, k, v = rearrange(qkv, "B L (K H D) -> K B H L D", K=3, H=self.num_heads)
        attn = flux_attention(q, k, v, pe=pe)
        output = self.linear2(torch.cat((attn, self.mlp_act(mlp)), 2))
        return x + mod.gate * output


class Flux(nn.Module):
    def __init__(self):
        super().__init__()
        self.img_in, self.txt_in, self.vector_in = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.double_blocks = nn.ModuleList([DoubleStreamBlock() for _ in range(2)])
        self.single_blocks = nn.ModuleList([SingleStreamBlock() for _ in range(2)])
        self.final_layer = nn.Linear(WIDTH, 4)

    def forward(self, img: Tensor, txt: Tensor, timesteps: Tensor, y: Tensor, guidance: Tensor | None = None):
        if img.ndim != 3 or txt.ndim != 3:
            raise ValueError("Input img and txt tensors must have 3 dimensions.")
        img = self.img_in(img)
        vec = timestep_embedding(timesteps)
        vec = vec + self.vector_in(y)
        txt = self.txt_in(txt)
        pe = None
        for block in self.double_blocks:
            img, txt = block(img=img, txt=txt, vec=vec, pe=pe)
        img = torch.cat((txt, img), 1)
        for block in self.single_blocks:
            img = block(img, vec=vec, pe=pe)
        img = img[:, txt.shape[1] :, ...]
        img = self.final_layer(img)
        return img


class SD3DismantledBlock(nn.Module):
    def __init__(self, dim=WIDTH, pre_only=False):
        super().__init__()
        self.pre_only = pre_only
        self.norm1 = nn.LayerNorm(dim, elementwise_affine=False)
        self.qkv = nn.Linear(dim, 3 * dim)
        if not pre_only:
            self.proj = nn.Linear(dim, dim)
            self.norm2 = nn.LayerNorm(dim, elementwise_affine=False)
            self.mlp = Mlp(dim)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, (2 if pre_only else 6) * dim))

    def pre_attention(self, x, c):
        if not self.pre_only:
            shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = self.adaLN_modulation(c).chunk(6, dim=1)
            qkv = self.qkv(modulate(self.norm1(x), shift_msa, scale_msa)).chunk(3, dim=-1)
            return qkv, (x, gate_msa, shift_mlp, scale_mlp, gate_mlp)
        else:
            shift_msa, scale_msa = self.adaLN_modulation(c).chunk(2, dim=1)
            return self.qkv(modulate(self.norm1(x), shift_msa, scale_msa)).chunk(3, dim=-1), None

    def post_attention(self, attn, x, gate_msa, shift_mlp, scale_mlp, gate_mlp):
        assert not self.pre_only
        x = x + gate_msa.unsqueeze(1) * self.proj(attn)
        x = x + gate_mlp.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift_mlp, scale_mlp))
        return x


def block_mixing(context, x, context_block, x_block, c):
    assert context is not None, "block_mixing called with None context"
    context_qkv, context_intermediates = context_block.pre_attention(context, c)
    x_qkv, x_intermediates = x_block.pre_attention(x, c)
    o = []
    for t in range(3):
        o.append(torch.cat((context_qkv[t], x_qkv[t]), dim=1))
    attn = F.scaled_dot_product_attention(*o)
    context_attn, x_attn = (attn[:, : context_qkv[0].shape[1]], attn[:, context_qkv[0].shape[1] :])
    if not context_block.pre_only:
        context = context_block.post_attention(context_attn, *context_intermediates)
    else:
        context = None
    x = x_block.post_attention(x_attn, *x_intermediates)
    return context, x


class SD3JointBlock(nn.Module):
    def __init__(self, pre_only):
        super().__init__()
        self.context_block = SD3DismantledBlock(pre_only=pre_only)
        self.x_block = SD3DismantledBlock()

    def forward(self, *args, **kwargs):
        return block_mixing(*args, context_block=self.context_block, x_block=self.x_block, **kwargs)


class SD3(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.joint_blocks = nn.ModuleList([SD3JointBlock(pre_only=i == depth - 1) for i in range(depth)])
        self.final_layer = DiTFinalLayer()

    def forward_core_with_concat(self, x, c_mod, context=None):
        for i, block in enumerate(self.joint_blocks):
            context, x = block(context, x, c=c_mod)
        x = self.final_layer(x, c_mod)
        return x

    def forward(self, x, t, context=None):
        return self.forward_core_with_concat(x, timestep_embedding(t), context)


# UNets


def nonlinearity(x):
    return x * torch.sigmoid(x)


def Normalize(in_channels):
    return torch.nn.GroupNorm(num_groups=4, num_channels=in_channels, eps=1e-6, affine=True)


class VQResnetBlock(nn.Module):
    def __init__(self, *, in_channels, out_channels=None, conv_shortcut=False, temb_channels=0):
        super().__init__()
        self.in_channels = in_channels
        out_channels = in_channels if out_channels is None else out_channels
        self.out_channels = out_channels
        self.use_conv_shortcut = conv_shortcut
        self.norm1 = Normalize(in_channels)
        self.conv1 = torch.nn.Conv2d(in_channels, out_channels, kernel_size=3, stride=1, padding=1)
        if temb_channels > 0:
            self.temb_proj = torch.nn.Linear(temb_channels, out_channels)
        self.norm2 = Normalize(out_channels)
        self.dropout = torch.nn.Dropout(0.0)
        self.conv2 = torch.nn.Conv2d(out_channels, out_channels, kernel_size=3, stride=1, padding=1)
        if self.in_channels != self.out_channels:
            if self.use_conv_shortcut:
                self.conv_shortcut = torch.nn.Conv2d(in_channels, out_channels, kernel_size=3, stride=1, padding=1)
            else:
                self.nin_shortcut = torch.nn.Conv2d(in_channels, out_channels, kernel_size=1, stride=1, padding=0)

    def forward(self, x, temb):
        h = x
        h = self.norm1(h)
        h = nonlinearity(h)
        h = self.conv1(h)
        if temb is not None:
            h = h + self.temb_proj(nonlinearity(temb))[:, :, None, None]
        h = self.norm2(h)
        h = nonlinearity(h)
        h = self.dropout(h)
        h = self.conv2(h)
        if self.in_channels != self.out_channels:
            if self.use_conv_shortcut:
                x = self.conv_shortcut(x)
            else:
                x = self.nin_shortcut(x)
        return x + h


class VQAttnBlock(nn.Module):
    def __init__(self, in_channels):
        super().__init__()
        self.norm = Normalize(in_channels)
        self.q, self.k, self.v, self.proj_out = (torch.nn.Conv2d(in_channels, in_channels, 1) for _ in range(4))

    def forward(self, x):
        h_ = x
        h_ = self.norm(h_)
        q, k, v = self.q(h_), self.k(h_), self.v(h_)
        b, c, h, w = q.shape
        q = q.reshape(b, c, h * w).permute(0, 2, 1)
        k = k.reshape(b, c, h * w)
        w_ = torch.nn.functional.softmax(torch.bmm(q, k) * (int(c) ** (-0.5)), dim=2)
        v = v.reshape(b, c, h * w)
        h_ = torch.bmm(v, w_.permute(0, 2, 1))
        h_ = self.proj_out(h_.reshape(b, c, h, w))
        return x + h_


class VQDecoder(nn.Module):
    def __init__(self, ch=WIDTH, ch_mult=(1, 2), num_res_blocks=2):
        super().__init__()
        self.temb_ch = 0
        self.num_resolutions = len(ch_mult)
        self.num_res_blocks = num_res_blocks
        block_in = ch * ch_mult[-1]
        self.conv_in = torch.nn.Conv2d(4, block_in, kernel_size=3, stride=1, padding=1)
        self.mid = nn.Module()
        self.mid.block_1 = VQResnetBlock(in_channels=block_in)
        self.mid.attn_1 = VQAttnBlock(block_in)
        self.mid.block_2 = VQResnetBlock(in_channels=block_in)
        self.up = nn.ModuleList()
        for i_level in reversed(range(self.num_resolutions)):
            block, attn = nn.ModuleList(), nn.ModuleList()
            block_out = ch * ch_mult[i_level]
            for _ in range(self.num_res_blocks + 1):
                block.append(VQResnetBlock(in_channels=block_in, out_channels=block_out))
                block_in = block_out
            up = nn.Module()
            up.block = block
            up.attn = attn
            if i_level != 0:
                up.upsample = nn.Upsample(scale_factor=2)
            self.up.insert(0, up)
        self.norm_out = Normalize(block_in)
        self.conv_out = torch.nn.Conv2d(block_in, 3, kernel_size=3, stride=1, padding=1)

    def forward(self, z):
        temb = None
        h = self.conv_in(z)
        h = self.mid.block_1(h, temb)
        h = self.mid.attn_1(h)
        h = self.mid.block_2(h, temb)
        for i_level in reversed(range(self.num_resolutions)):
            for i_block in range(self.num_res_blocks + 1):
                h = self.up[i_level].block[i_block](h, temb)
                if len(self.up[i_level].attn) > 0:
                    h = self.up[i_level].attn[i_block](h)
            if i_level != 0:
                h = self.up[i_level].upsample(h)
        h = self.norm_out(h)
        h = nonlinearity(h)
        h = self.conv_out(h)
        return h


class DDPMUNet(nn.Module):
    def __init__(self, ch=WIDTH, ch_mult=(1, 2), num_res_blocks=2, attn_level=1):
        super().__init__()
        self.ch, self.num_resolutions, self.num_res_blocks = ch, len(ch_mult), num_res_blocks
        self.temb = nn.Module()
        self.temb.dense = nn.ModuleList([nn.Linear(ch, ch), nn.Linear(ch, ch)])
        block = partial(VQResnetBlock, temb_channels=ch)
        self.conv_in = nn.Conv2d(3, ch, 3, padding=1)
        widths, width = [ch], ch
        self.down = nn.ModuleList()
        for i_level in range(self.num_resolutions):
            down = nn.Module()
            down.block, down.attn = nn.ModuleList(), nn.ModuleList()
            for _ in range(num_res_blocks):
                down.block.append(block(in_channels=width, out_channels=ch * ch_mult[i_level]))
                width = ch * ch_mult[i_level]
                widths.append(width)
                if i_level == attn_level:
                    down.attn.append(VQAttnBlock(width))
            if i_level != self.num_resolutions - 1:
                down.downsample = nn.Conv2d(width, width, 3, stride=2, padding=1)
                widths.append(width)
            self.down.append(down)
        self.mid = nn.Module()
        self.mid.block_1, self.mid.block_2 = block(in_channels=width), block(in_channels=width)
        self.mid.attn_1 = VQAttnBlock(width)
        self.up = nn.ModuleList()
        for i_level in reversed(range(self.num_resolutions)):
            up = nn.Module()
            up.block, up.attn = nn.ModuleList(), nn.ModuleList()
            for _ in range(num_res_blocks + 1):
                up.block.append(block(in_channels=width + widths.pop(), out_channels=ch * ch_mult[i_level]))
                width = ch * ch_mult[i_level]
                if i_level == attn_level:
                    up.attn.append(VQAttnBlock(width))
            if i_level != 0:
                up.upsample = nn.Upsample(scale_factor=2)
            self.up.insert(0, up)
        self.norm_out, self.conv_out = Normalize(width), nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x, t):
        temb = timestep_embedding(t, self.ch)
        temb = self.temb.dense[0](temb)
        temb = nonlinearity(temb)
        temb = self.temb.dense[1](temb)
        hs = [self.conv_in(x)]
        for i_level in range(self.num_resolutions):
            for i_block in range(self.num_res_blocks):
                h = self.down[i_level].block[i_block](hs[-1], temb)
                if len(self.down[i_level].attn) > 0:
                    h = self.down[i_level].attn[i_block](h)
                hs.append(h)
            if i_level != self.num_resolutions - 1:
                hs.append(self.down[i_level].downsample(hs[-1]))
        h = hs[-1]
        h = self.mid.block_1(h, temb)
        h = self.mid.attn_1(h)
        h = self.mid.block_2(h, temb)
        for i_level in reversed(range(self.num_resolutions)):
            for i_block in range(self.num_res_blocks + 1):
                h = self.up[i_level].block[i_block](torch.cat([h, hs.pop()], dim=1), temb)
                if len(self.up[i_level].attn) > 0:
                    h = self.up[i_level].attn[i_block](h)
            if i_level != 0:
                h = self.up[i_level].upsample(h)
        h = self.norm_out(h)
        h = nonlinearity(h)
        h = self.conv_out(h)
        return h


class TimestepBlock(nn.Module):
    def forward(self, x, emb):
        raise NotImplementedError


class TimestepEmbedSequential(nn.Sequential, TimestepBlock):
    def forward(self, x, emb, context=None):
        for layer in self:
            if isinstance(layer, TimestepBlock):
                x = layer(x, emb)
            elif isinstance(layer, SpatialTransformer):
                x = layer(x, context)
            else:
                x = layer(x)
        return x


def ldm_checkpoint(func, inputs, params, flag):
    if flag:
        return checkpoint(func, *inputs, use_reentrant=False)
    else:
        return func(*inputs)


class LDMResBlock(TimestepBlock):
    def __init__(self, channels, out_channels=None, use_scale_shift_norm=False, use_checkpoint=False):
        super().__init__()
        self.use_scale_shift_norm = use_scale_shift_norm
        self.use_checkpoint = use_checkpoint
        out = out_channels or channels
        self.in_layers = nn.Sequential(Normalize(channels), nn.SiLU(), nn.Conv2d(channels, out, 3, padding=1))
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 2 * out if use_scale_shift_norm else out))
        self.out_layers = nn.Sequential(Normalize(out), nn.SiLU(), nn.Dropout(p=0.0), nn.Conv2d(out, out, 3, padding=1))
        self.skip_connection = nn.Identity() if out == channels else nn.Conv2d(channels, out, 1)

    def forward(self, x, emb):
        return ldm_checkpoint(self._forward, (x, emb), self.parameters(), self.use_checkpoint)

    def _forward(self, x, emb):
        h = self.in_layers(x)
        emb_out = self.emb_layers(emb).type(h.dtype)
        while len(emb_out.shape) < len(h.shape):
            emb_out = emb_out[..., None]
        if self.use_scale_shift_norm:
            out_norm, out_rest = self.out_layers[0], self.out_layers[1:]
            scale, shift = th.chunk(emb_out, 2, dim=1)
            h = out_norm(h) * (1 + scale) + shift
            h = out_rest(h)
        else:
            h = h + emb_out
            h = self.out_layers(h)
        return self.skip_connection(x) + h


class BasicTransformerBlock(nn.Module):
    def __init__(self, dim, checkpoint=True):
        super().__init__()
        self.attn1, self.attn2, self.ff = Attention(dim), Attention(dim, context_dim=WIDTH), Mlp(dim)
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.checkpoint = checkpoint

    def forward(self, x, context=None):
        return ldm_checkpoint(self._forward, (x, context), self.parameters(), self.checkpoint)

    def _forward(self, x, context=None):
        x = self.attn1(self.norm1(x)) + x
        x = self.attn2(self.norm2(x), context=context) + x
        x = self.ff(self.norm3(x)) + x
        return x


class SpatialTransformer(nn.Module):
    def __init__(self, in_channels, depth=2, use_checkpoint=False):
        super().__init__()
        self.norm = Normalize(in_channels)
        self.proj_in = nn.Conv2d(in_channels, in_channels, kernel_size=1)
        self.transformer_blocks = nn.ModuleList(
            [BasicTransformerBlock(in_channels, checkpoint=use_checkpoint) for d in range(depth)]
        )
        self.proj_out = nn.Conv2d(in_channels, in_channels, kernel_size=1)

    def forward(self, x, context=None):
        b, c, h, w = x.shape
        x_in = x
        x = self.norm(x)
        x = self.proj_in(x)
        x = rearrange(x, "b c h w -> b (h w) c").contiguous()
        for block in self.transformer_blocks:
            x = block(x, context=context)
        x = rearrange(x, "b (h w) c -> b c h w", h=h, w=w).contiguous()
        x = self.proj_out(x)
        return x + x_in


class LDMUNet(nn.Module):
    def __init__(self, ch=WIDTH, use_checkpoint=False, use_scale_shift_norm=False):
        super().__init__()
        Res = partial(LDMResBlock, use_scale_shift_norm=use_scale_shift_norm, use_checkpoint=use_checkpoint)
        Spatial = partial(SpatialTransformer, use_checkpoint=use_checkpoint)
        Seq = TimestepEmbedSequential
        self.time_embed = nn.Sequential(nn.Linear(ch, ch), nn.SiLU(), nn.Linear(ch, ch))
        self.input_blocks = nn.ModuleList(
            [
                Seq(nn.Conv2d(4, ch, 3, padding=1)),
                Seq(Res(ch), Spatial(ch)),
                Seq(Res(ch), Spatial(ch)),
                Seq(nn.Conv2d(ch, ch, 3, stride=2, padding=1)),
                Seq(Res(ch, 2 * ch), Spatial(2 * ch)),
            ]
        )
        self.middle_block = Seq(Res(2 * ch), Spatial(2 * ch), Res(2 * ch))
        self.output_blocks = nn.ModuleList(
            [
                Seq(Res(4 * ch, 2 * ch), Spatial(2 * ch)),
                Seq(Res(3 * ch, 2 * ch), nn.Upsample(scale_factor=2)),
                Seq(Res(3 * ch, ch), Spatial(ch)),
                Seq(Res(2 * ch, ch)),
                Seq(Res(2 * ch, ch), Spatial(ch)),
            ]
        )
        self.out = nn.Sequential(Normalize(ch), nn.SiLU(), nn.Conv2d(ch, 4, 3, padding=1))
        self.num_classes = None
        self.dtype = torch.float32

    def forward(self, x, timesteps=None, context=None, y=None, **kwargs):
        assert (y is not None) == (self.num_classes is not None), "must specify y if and only if class-conditional"
        hs = []
        t_emb = timestep_embedding(timesteps, WIDTH)
        emb = self.time_embed(t_emb)
        h = x.type(self.dtype)
        for module in self.input_blocks:
            h = module(h, emb, context)
            hs.append(h)
        h = self.middle_block(h, emb, context)
        for module in self.output_blocks:
            h = th.cat([h, hs.pop()], dim=1)
            h = module(h, emb, context)
        h = h.type(x.dtype)
        return self.out(h)


class CondResBlock1d(nn.Module):
    def __init__(self, in_channels, out_channels, cond_dim=WIDTH):
        super().__init__()
        conv = lambda i, o: nn.Sequential(nn.Conv1d(i, o, 3, padding=1), nn.GroupNorm(4, o), nn.Mish())
        self.blocks = nn.ModuleList([conv(in_channels, out_channels), conv(out_channels, out_channels)])
        self.out_channels = out_channels
        self.cond_encoder = nn.Sequential(nn.Mish(), nn.Linear(cond_dim, 2 * out_channels), nn.Unflatten(-1, (-1, 1)))
        same = in_channels == out_channels
        self.residual_conv = nn.Identity() if same else nn.Conv1d(in_channels, out_channels, 1)

    def forward(self, x, cond):
        out = self.blocks[0](x)
        embed = self.cond_encoder(cond)
        embed = embed.reshape(embed.shape[0], 2, self.out_channels, 1)
        scale = embed[:, 0, ...]
        bias = embed[:, 1, ...]
        out = scale * out + bias
        out = self.blocks[1](out)
        out = out + self.residual_conv(x)
        return out


class DiffusionPolicyUNet(nn.Module):
    def __init__(self, dim=WIDTH):
        super().__init__()
        Res = CondResBlock1d
        self.conv_in = nn.Conv1d(3, dim, 1)
        self.down_modules = nn.ModuleList(
            [
                nn.ModuleList([Res(dim, dim), Res(dim, dim), nn.Conv1d(dim, dim, 3, 2, 1)]),
                nn.ModuleList([Res(dim, 2 * dim), Res(2 * dim, 2 * dim), nn.Identity()]),
            ]
        )
        self.mid_modules = nn.ModuleList([Res(2 * dim, 2 * dim), Res(2 * dim, 2 * dim)])
        self.up_modules = nn.ModuleList(
            [nn.ModuleList([Res(4 * dim, dim), Res(dim, dim), nn.ConvTranspose1d(dim, dim, 4, 2, 1)])]
        )
        self.final_conv = nn.Conv1d(dim, 3, 1)

    def forward(self, sample, timestep, global_cond=None):
        sample = sample.moveaxis(-1, -2)
        global_feature = timestep_embedding(timestep)
        if global_cond is not None:
            global_feature = torch.cat([global_feature, global_cond], axis=-1)
        x = self.conv_in(sample)
        h = []
        for _, (resnet, resnet2, downsample) in enumerate(self.down_modules):
            x = resnet(x, global_feature)
            x = resnet2(x, global_feature)
            h.append(x)
            x = downsample(x)
        for mid_module in self.mid_modules:
            x = mid_module(x, global_feature)
        for _, (resnet, resnet2, upsample) in enumerate(self.up_modules):
            x = torch.cat((x, h.pop()), dim=1)
            x = resnet(x, global_feature)
            x = resnet2(x, global_feature)
            x = upsample(x)
        return self.final_conv(x).moveaxis(-1, -2)


# Convolutional networks


class KuangliuBasicBlock(nn.Module):
    expansion = 1

    def __init__(self, in_planes, planes, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(in_planes, planes, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, kernel_size=3, stride=1, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.shortcut = nn.Sequential()
        if stride != 1 or in_planes != self.expansion * planes:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_planes, self.expansion * planes, kernel_size=1, stride=stride, bias=False),
                nn.BatchNorm2d(self.expansion * planes),
            )

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        out = F.relu(out)
        return out


class KuangliuBottleneck(nn.Module):
    """ResNeXt's, too: groups."""

    expansion = 2

    def __init__(self, in_planes, planes, stride=1, cardinality=4):
        super().__init__()
        width = planes
        self.conv1 = nn.Conv2d(in_planes, width, kernel_size=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, groups=cardinality, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, self.expansion * width, kernel_size=1, bias=False)
        self.bn3 = nn.BatchNorm2d(self.expansion * width)
        self.shortcut = nn.Sequential()
        if stride != 1 or in_planes != self.expansion * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_planes, self.expansion * width, kernel_size=1, stride=stride, bias=False),
                nn.BatchNorm2d(self.expansion * width),
            )

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += self.shortcut(x)
        out = F.relu(out)
        return out


class KuangliuPreActBlock(nn.Module):
    expansion = 1

    def __init__(self, in_planes, planes, stride=1):
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_planes)
        self.conv1 = nn.Conv2d(in_planes, planes, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, kernel_size=3, stride=1, padding=1, bias=False)
        if stride != 1 or in_planes != self.expansion * planes:
            self.shortcut = nn.Sequential(nn.Conv2d(in_planes, self.expansion * planes, 1, stride=stride, bias=False))

    def forward(self, x):
        out = F.relu(self.bn1(x))
        shortcut = self.shortcut(out) if hasattr(self, "shortcut") else x
        out = self.conv1(out)
        out = self.conv2(F.relu(self.bn2(out)))
        out += shortcut
        return out


class SEPreActBlock(nn.Module):
    expansion = 1

    def __init__(self, in_planes, planes, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(in_planes, planes, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.shortcut = nn.Sequential()
        if stride != 1 or in_planes != planes:
            self.shortcut = nn.Sequential(nn.Conv2d(in_planes, planes, 1, stride=stride), nn.BatchNorm2d(planes))
        self.fc1 = nn.Conv2d(planes, planes // 4, kernel_size=1)
        self.fc2 = nn.Conv2d(planes // 4, planes, kernel_size=1)

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        w = F.avg_pool2d(out, out.size(2))
        w = F.relu(self.fc1(w))
        w = F.sigmoid(self.fc2(w))
        out = out * w
        out += self.shortcut(x)
        out = F.relu(out)
        return out


class KuangliuResNet(nn.Module):
    def __init__(self, block, num_blocks=(2, 3), num_classes=10):
        super().__init__()
        self.in_planes = WIDTH
        self.conv1 = nn.Conv2d(3, WIDTH, kernel_size=3, stride=1, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(WIDTH)
        self.layer1 = self._make_layer(block, WIDTH, num_blocks[0], stride=1)
        self.layer2 = self._make_layer(block, 2 * WIDTH, num_blocks[1], stride=2)
        self.linear = nn.Linear(2 * WIDTH * block.expansion, num_classes)

    def _make_layer(self, block, planes, num_blocks, stride):
        strides = [stride] + [1] * (num_blocks - 1)
        layers = []
        for stride in strides:
            layers.append(block(self.in_planes, planes, stride))
            self.in_planes = planes * block.expansion
        return nn.Sequential(*layers)

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.layer1(out)
        out = self.layer2(out)
        out = F.avg_pool2d(out, 4)
        out = out.view(out.size(0), -1)
        out = self.linear(out)
        return out


def conv3x3(in_planes: int, out_planes: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_planes, out_planes, kernel_size=3, stride=stride, padding=1, bias=False)


def conv1x1(in_planes: int, out_planes: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_planes, out_planes, kernel_size=1, stride=stride, bias=False)


class TVBasicBlock(nn.Module):
    expansion: int = 1

    def __init__(self, inplanes, planes, stride=1, downsample=None):
        super().__init__()
        self.conv1 = conv3x3(inplanes, planes, stride)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = conv3x3(planes, planes)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = downsample
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        identity = x

        out = self.conv1(x)
        out = self.bn1(out)
        out = self.relu(out)

        out = self.conv2(out)
        out = self.bn2(out)

        if self.downsample is not None:
            identity = self.downsample(x)

        out += identity
        out = self.relu(out)

        return out


class TVBottleneck(nn.Module):
    expansion: int = 2

    def __init__(self, inplanes, planes, stride=1, downsample=None):
        super().__init__()
        self.conv1 = conv1x1(inplanes, planes)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = conv3x3(planes, planes, stride)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3 = conv1x1(planes, planes * self.expansion)
        self.bn3 = nn.BatchNorm2d(planes * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        identity = x

        out = self.conv1(x)
        out = self.bn1(out)
        out = self.relu(out)

        out = self.conv2(out)
        out = self.bn2(out)
        out = self.relu(out)

        out = self.conv3(out)
        out = self.bn3(out)

        if self.downsample is not None:
            identity = self.downsample(x)

        out += identity
        out = self.relu(out)

        return out


class TVResNet(nn.Module):
    def __init__(self, block, layers=(2, 3), num_classes=10):
        super().__init__()
        self.inplanes = WIDTH
        self.conv1 = nn.Conv2d(3, self.inplanes, kernel_size=3, stride=1, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(self.inplanes)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=1, padding=1)
        self.layer1 = self._make_layer(block, WIDTH, layers[0])
        self.layer2 = self._make_layer(block, 2 * WIDTH, layers[1], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(2 * WIDTH * block.expansion, num_classes)

    def _make_layer(self, block, planes, blocks, stride=1):
        downsample = None
        if stride != 1 or self.inplanes != planes * block.expansion:
            downsample = nn.Sequential(
                conv1x1(self.inplanes, planes * block.expansion, stride), nn.BatchNorm2d(planes * block.expansion)
            )
        layers = [block(self.inplanes, planes, stride, downsample)]
        self.inplanes = planes * block.expansion
        for _ in range(1, blocks):
            layers.append(block(self.inplanes, planes))
        return nn.Sequential(*layers)

    def _forward_impl(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        x = self.bn1(x)
        x = self.relu(x)
        x = self.maxpool(x)
        x = self.layer1(x)
        x = self.layer2(x)
        x = self.avgpool(x)
        x = torch.flatten(x, 1)
        x = self.fc(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self._forward_impl(x)


class WideBlock(nn.Module):
    def __init__(self, in_planes, out_planes, stride, dropRate=0.0):
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_planes)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv1 = conv3x3(in_planes, out_planes, stride)
        self.bn2 = nn.BatchNorm2d(out_planes)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv2 = conv3x3(out_planes, out_planes)
        self.droprate = dropRate
        self.equalInOut = in_planes == out_planes
        self.convShortcut = (not self.equalInOut) and conv1x1(in_planes, out_planes, stride) or None

    def forward(self, x):
        if not self.equalInOut:
            x = self.relu1(self.bn1(x))
        else:
            out = self.relu1(self.bn1(x))
        out = self.relu2(self.bn2(self.conv1(out if self.equalInOut else x)))
        if self.droprate > 0:
            out = F.dropout(out, p=self.droprate, training=self.training)
        out = self.conv2(out)
        return torch.add(x if self.equalInOut else self.convShortcut(x), out)


class WideNetworkBlock(nn.Module):
    def __init__(self, nb_layers, in_planes, out_planes, block, stride, dropRate=0.0):
        super().__init__()
        self.layer = self._make_layer(block, in_planes, out_planes, nb_layers, stride, dropRate)

    def _make_layer(self, block, in_planes, out_planes, nb_layers, stride, dropRate):
        layers = []
        for i in range(int(nb_layers)):
            layers.append(block((i == 0 and in_planes) or out_planes, out_planes, (i == 0 and stride) or 1, dropRate))
        return nn.Sequential(*layers)

    def forward(self, x):
        return self.layer(x)


class WideResNet(nn.Module):
    def __init__(self, n=3, dropRate=0.3):
        super().__init__()
        self.conv1 = conv3x3(3, WIDTH)
        self.block1 = WideNetworkBlock(n, WIDTH, WIDTH, WideBlock, 1, dropRate)
        self.block2 = WideNetworkBlock(n, WIDTH, 2 * WIDTH, WideBlock, 2, dropRate)
        self.bn1 = nn.BatchNorm2d(2 * WIDTH)
        self.relu = nn.ReLU(inplace=True)
        self.fc = nn.Linear(2 * WIDTH, 10)
        self.nChannels = 2 * WIDTH

    def forward(self, x):
        out = self.conv1(x)
        out = self.block1(out)
        out = self.block2(out)
        out = self.relu(self.bn1(out))
        out = F.avg_pool2d(out, 4)
        out = out.view(-1, self.nChannels)
        return self.fc(out)


class InvertedResidual(nn.Module):
    def __init__(self, inp, oup, stride, expand_ratio=2):
        super().__init__()
        hidden_dim = round(inp * expand_ratio)
        self.use_res_connect = stride == 1 and inp == oup
        self.conv = nn.Sequential(
            nn.Conv2d(inp, hidden_dim, 1, bias=False),
            nn.BatchNorm2d(hidden_dim),
            nn.ReLU6(inplace=True),
            nn.Conv2d(hidden_dim, hidden_dim, 3, stride, 1, groups=hidden_dim, bias=False),
            nn.BatchNorm2d(hidden_dim),
            nn.ReLU6(inplace=True),
            nn.Conv2d(hidden_dim, oup, 1, bias=False),
            nn.BatchNorm2d(oup),
        )

    def forward(self, x):
        if self.use_res_connect:
            return x + self.conv(x)
        else:
            return self.conv(x)


class MobileNetV2(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = [nn.Conv2d(3, WIDTH, 3, 1, 1)]
        for t, c, n, s in [(2, WIDTH, 3, 1), (2, 24, 3, 2)]:
            for i in range(n):
                prev = WIDTH if c == WIDTH or i == 0 else c
                self.features.append(InvertedResidual(prev, c, s if i == 0 else 1, expand_ratio=t))
        self.features = nn.Sequential(*self.features)
        self.classifier = nn.Linear(24, 10)

    def forward(self, x):
        x = self.features(x)
        x = x.mean(3).mean(2)
        x = self.classifier(x)
        return x


def drop_connect(inputs, p, training):
    if not training:
        return inputs
    batch_size = inputs.shape[0]
    keep_prob = 1 - p
    random_tensor = keep_prob
    random_tensor += torch.rand([batch_size, 1, 1, 1], dtype=inputs.dtype, device=inputs.device)
    binary_tensor = torch.floor(random_tensor)
    return inputs / keep_prob * binary_tensor


class MBConvBlock(nn.Module):
    def __init__(self, block_args):
        super().__init__()
        self._block_args = block_args
        self.has_se = block_args.se_ratio is not None and 0 < block_args.se_ratio <= 1
        self.id_skip = block_args.id_skip
        inp, oup = block_args.input_filters, block_args.output_filters
        hidden = inp * block_args.expand_ratio
        if block_args.expand_ratio != 1:
            self._expand_conv, self._bn0 = nn.Conv2d(inp, hidden, 1, bias=False), nn.BatchNorm2d(hidden)
        self._depthwise_conv = nn.Conv2d(hidden, hidden, 3, block_args.stride, 1, groups=hidden, bias=False)
        self._bn1 = nn.BatchNorm2d(hidden)
        if self.has_se:
            self._se_reduce, self._se_expand = nn.Conv2d(hidden, 4, 1), nn.Conv2d(4, hidden, 1)
        self._project_conv, self._bn2 = nn.Conv2d(hidden, oup, 1, bias=False), nn.BatchNorm2d(oup)
        self._swish = nn.SiLU()

    def forward(self, inputs, drop_connect_rate=None):
        x = inputs
        if self._block_args.expand_ratio != 1:
            x = self._expand_conv(inputs)
            x = self._bn0(x)
            x = self._swish(x)
        x = self._depthwise_conv(x)
        x = self._bn1(x)
        x = self._swish(x)
        if self.has_se:
            x_squeezed = F.adaptive_avg_pool2d(x, 1)
            x_squeezed = self._se_reduce(x_squeezed)
            x_squeezed = self._swish(x_squeezed)
            x_squeezed = self._se_expand(x_squeezed)
            x = torch.sigmoid(x_squeezed) * x
        x = self._project_conv(x)
        x = self._bn2(x)
        input_filters, output_filters = self._block_args.input_filters, self._block_args.output_filters
        if self.id_skip and self._block_args.stride == 1 and input_filters == output_filters:
            if drop_connect_rate:
                x = drop_connect(x, p=drop_connect_rate, training=self.training)
            x = x + inputs
        return x


class EfficientNet(nn.Module):
    def __init__(self, drop_connect_rate=0.2):
        super().__init__()
        self.drop_connect_rate = drop_connect_rate
        self._conv_stem, self._bn0 = nn.Conv2d(3, WIDTH, 3, 1, 1), nn.BatchNorm2d(WIDTH)
        self._blocks = nn.ModuleList([])
        for inp, oup, stride, expand in [
            (16, 16, 1, 1),
            (16, 16, 1, 2),
            (16, 24, 2, 2),
            (24, 24, 1, 2),
            (24, 24, 1, 2),
        ]:
            args = SimpleNamespace(
                input_filters=inp, output_filters=oup, stride=stride, expand_ratio=expand, se_ratio=0.25, id_skip=True
            )
            self._blocks.append(MBConvBlock(args))
        self._fc = nn.Linear(24, 10)
        self._swish = nn.SiLU()

    def extract_features(self, inputs):
        x = self._swish(self._bn0(self._conv_stem(inputs)))
        for idx, block in enumerate(self._blocks):
            drop_connect_rate = self.drop_connect_rate
            if drop_connect_rate:
                drop_connect_rate *= float(idx) / len(self._blocks)
            x = block(x, drop_connect_rate=drop_connect_rate)
        return x

    def forward(self, inputs):
        x = self.extract_features(inputs)
        return self._fc(x.mean((2, 3)))


def default_conv(in_channels, out_channels, kernel_size, bias=True):
    return nn.Conv2d(in_channels, out_channels, kernel_size, padding=(kernel_size // 2), bias=bias)


class EDSRResBlock(nn.Module):
    def __init__(self, conv, n_feats, kernel_size, act=None, res_scale=1):
        super().__init__()
        m = []
        for i in range(2):
            m.append(conv(n_feats, n_feats, kernel_size))
            if i == 0:
                m.append(act or nn.ReLU(True))
        self.body = nn.Sequential(*m)
        self.res_scale = res_scale

    def forward(self, x):
        res = self.body(x).mul(self.res_scale)
        res += x
        return res


class EDSR(nn.Module):
    def __init__(self, n_resblocks=3, n_feats=WIDTH, res_scale=0.1, conv=default_conv):
        super().__init__()
        m_head = [conv(3, n_feats, 3)]
        m_body = [EDSRResBlock(conv, n_feats, 3, act=nn.ReLU(True), res_scale=res_scale) for _ in range(n_resblocks)]
        m_body.append(conv(n_feats, n_feats, 3))
        m_tail = [conv(n_feats, 12, 3), nn.PixelShuffle(2), conv(3, 3, 3)]
        self.head = nn.Sequential(*m_head)
        self.body = nn.Sequential(*m_body)
        self.tail = nn.Sequential(*m_tail)

    def forward(self, x):
        x = self.head(x)
        res = self.body(x)
        res += x
        x = self.tail(res)
        return x


class CALayer(nn.Module):
    def __init__(self, channel, reduction=4):
        super().__init__()
        self.avg_pool = nn.AdaptiveAvgPool2d(1)
        self.conv_du = nn.Sequential(
            nn.Conv2d(channel, channel // reduction, 1),
            nn.ReLU(inplace=True),
            nn.Conv2d(channel // reduction, channel, 1),
            nn.Sigmoid(),
        )

    def forward(self, x):
        y = self.avg_pool(x)
        y = self.conv_du(y)
        return x * y


class RCAB(nn.Module):
    def __init__(self, conv, n_feat):
        super().__init__()
        self.body = nn.Sequential(conv(n_feat, n_feat, 3), nn.ReLU(True), conv(n_feat, n_feat, 3), CALayer(n_feat))

    def forward(self, x):
        res = self.body(x)
        res += x
        return res


class ResidualGroup(nn.Module):
    def __init__(self, conv, n_feat, n_resblocks):
        super().__init__()
        modules_body = [RCAB(conv, n_feat) for _ in range(n_resblocks)]
        modules_body.append(conv(n_feat, n_feat, 3))
        self.body = nn.Sequential(*modules_body)

    def forward(self, x):
        res = self.body(x)
        res += x
        return res


class RCAN(nn.Module):
    def __init__(self, n_resgroups=2, n_resblocks=2, n_feats=WIDTH, conv=default_conv):
        super().__init__()
        self.head = nn.Sequential(conv(3, n_feats, 3))
        self.body = nn.Sequential(
            *[ResidualGroup(conv, n_feats, n_resblocks) for _ in range(n_resgroups)], conv(n_feats, n_feats, 3)
        )
        self.tail = nn.Sequential(conv(n_feats, 3, 3))

    def forward(self, x):
        x = self.head(x)
        res = self.body(x)
        res += x
        x = self.tail(res)
        return x


class ResidualDenseBlock(nn.Module):
    def __init__(self, nf=WIDTH, gc=8):
        super().__init__()
        self.conv1 = nn.Conv2d(nf, gc, 3, 1, 1)
        self.conv2 = nn.Conv2d(nf + gc, gc, 3, 1, 1)
        self.conv3 = nn.Conv2d(nf + 2 * gc, nf, 3, 1, 1)
        self.lrelu = nn.LeakyReLU(negative_slope=0.2, inplace=True)

    def forward(self, x):
        x1 = self.lrelu(self.conv1(x))
        x2 = self.lrelu(self.conv2(torch.cat((x, x1), 1)))
        x3 = self.conv3(torch.cat((x, x1, x2), 1))
        return x3 * 0.2 + x


class RRDB(nn.Module):
    def __init__(self, nf=WIDTH):
        super().__init__()
        self.RDB1, self.RDB2, self.RDB3 = ResidualDenseBlock(nf), ResidualDenseBlock(nf), ResidualDenseBlock(nf)

    def forward(self, x):
        out = self.RDB1(x)
        out = self.RDB2(out)
        out = self.RDB3(out)
        return out * 0.2 + x


class ESRGAN(nn.Module):
    def __init__(self, nb=2, nf=WIDTH):
        super().__init__()
        self.conv_first = nn.Conv2d(3, nf, 3, 1, 1)
        self.RRDB_trunk = nn.Sequential(*[RRDB(nf) for _ in range(nb)])
        self.trunk_conv = nn.Conv2d(nf, nf, 3, 1, 1)
        self.upconv1 = nn.Conv2d(nf, nf, 3, 1, 1)
        self.conv_last = nn.Conv2d(nf, 3, 3, 1, 1)
        self.lrelu = nn.LeakyReLU(negative_slope=0.2, inplace=True)

    def forward(self, x):
        fea = self.conv_first(x)
        trunk = self.trunk_conv(self.RRDB_trunk(fea))
        fea = fea + trunk
        fea = self.lrelu(self.upconv1(F.interpolate(fea, scale_factor=2, mode="nearest")))
        out = self.conv_last(fea)
        return out


class PatchEmbedTokens(nn.Module):
    def forward(self, x):
        return x.flatten(2).transpose(1, 2)


class PatchUnEmbed(nn.Module):
    def forward(self, x, x_size):
        return x.transpose(1, 2).view(x.shape[0], -1, x_size[0], x_size[1])


class SwinIRLayer(nn.Module):
    def __init__(self, dim, shift_size):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn, self.mlp = Attention(dim), Mlp(dim)
        self.drop_path = nn.Identity()
        self.shift_size = shift_size

    def forward(self, x, x_size):
        H, W = x_size
        B, L, C = x.shape
        shortcut = x
        x = self.norm1(x)
        x = x.view(B, H, W, C)
        if self.shift_size > 0:
            shifted_x = torch.roll(x, shifts=(-self.shift_size, -self.shift_size), dims=(1, 2))
        else:
            shifted_x = x
        x = window_reverse(self.attn(window_partition(shifted_x, 4).view(-1, 16, C)).view(-1, 4, 4, C), 4, H, W)
        if self.shift_size > 0:
            x = torch.roll(x, shifts=(self.shift_size, self.shift_size), dims=(1, 2))
        x = x.view(B, H * W, C)
        x = shortcut + self.drop_path(x)
        x = x + self.drop_path(self.mlp(self.norm2(x)))
        return x


class SwinIRGroup(nn.Module):
    def __init__(self, dim, depth):
        super().__init__()
        self.blocks = nn.ModuleList([SwinIRLayer(dim, shift_size=2 * (i % 2)) for i in range(depth)])
        self.downsample = None
        self.use_checkpoint = False

    def forward(self, x, x_size):
        for blk in self.blocks:
            if self.use_checkpoint:
                x = checkpoint(blk, x, x_size, use_reentrant=False)
            else:
                x = blk(x, x_size)
        if self.downsample is not None:
            x = self.downsample(x)
        return x


class RSTB(nn.Module):
    def __init__(self, dim=WIDTH, depth=2):
        super().__init__()
        self.residual_group = SwinIRGroup(dim, depth)
        self.conv = nn.Conv2d(dim, dim, 3, 1, 1)
        self.patch_embed = PatchEmbedTokens()
        self.patch_unembed = PatchUnEmbed()

    def forward(self, x, x_size):
        return self.patch_embed(self.conv(self.patch_unembed(self.residual_group(x, x_size), x_size))) + x


class SwinIR(nn.Module):
    def __init__(self, depth=2, embed_dim=WIDTH):
        super().__init__()
        self.conv_first = nn.Conv2d(3, embed_dim, 3, 1, 1)
        self.patch_embed, self.patch_unembed = PatchEmbedTokens(), PatchUnEmbed()
        self.layers = nn.ModuleList([RSTB() for _ in range(depth)])
        self.norm = nn.LayerNorm(embed_dim)
        self.conv_after_body = nn.Conv2d(embed_dim, embed_dim, 3, 1, 1)
        self.conv_last = nn.Conv2d(embed_dim, 3, 3, 1, 1)

    def forward_features(self, x):
        x_size = (x.shape[2], x.shape[3])
        x = self.patch_embed(x)
        for layer in self.layers:
            x = layer(x, x_size)
        x = self.norm(x)
        x = self.patch_unembed(x, x_size)
        return x

    def forward(self, x):
        x_first = self.conv_first(x)
        res = self.conv_after_body(self.forward_features(x_first)) + x_first
        x = x + self.conv_last(res)
        return x


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class NAFBlock(nn.Module):
    def __init__(self, c=WIDTH, drop_out_rate=0.0):
        super().__init__()
        self.conv1, self.conv3 = nn.Conv2d(c, 2 * c, 1), nn.Conv2d(c, c, 1)
        self.conv2 = nn.Conv2d(2 * c, 2 * c, 3, padding=1, groups=2 * c)
        self.sca = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(c, c, 1))
        self.conv4, self.conv5 = nn.Conv2d(c, 2 * c, 1), nn.Conv2d(c, c, 1)
        self.norm1, self.norm2 = LayerNorm2d(c), LayerNorm2d(c)
        self.dropout1 = nn.Dropout(drop_out_rate) if drop_out_rate > 0.0 else nn.Identity()
        self.dropout2 = nn.Dropout(drop_out_rate) if drop_out_rate > 0.0 else nn.Identity()
        self.beta = nn.Parameter(torch.ones((1, c, 1, 1)), requires_grad=True)
        self.gamma = nn.Parameter(torch.ones((1, c, 1, 1)), requires_grad=True)

    def sg(self, x):
        x1, x2 = x.chunk(2, dim=1)
        return x1 * x2

    def forward(self, inp):
        x = inp
        x = self.norm1(x)
        x = self.conv1(x)
        x = self.conv2(x)
        x = self.sg(x)
        x = x * self.sca(x)
        x = self.conv3(x)
        x = self.dropout1(x)
        y = inp + x * self.beta
        x = self.conv4(self.norm2(y))
        x = self.sg(x)
        x = self.conv5(x)
        x = self.dropout2(x)
        return y + x * self.gamma


class NAFNet(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.intro, self.ending = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.encoders = nn.ModuleList([nn.Sequential(NAFBlock(width), NAFBlock(width))])
        self.downs = nn.ModuleList([nn.Conv2d(width, 2 * width, 2, 2)])
        self.middle_blks = nn.Sequential(*[NAFBlock(2 * width) for _ in range(2)])
        self.ups = nn.ModuleList([nn.Sequential(nn.Conv2d(2 * width, 4 * width, 1, bias=False), nn.PixelShuffle(2))])
        self.decoders = nn.ModuleList([nn.Sequential(NAFBlock(width), NAFBlock(width))])

    def forward(self, inp):
        x = self.intro(inp)
        encs = []
        for encoder, down in zip(self.encoders, self.downs):
            x = encoder(x)
            encs.append(x)
            x = down(x)
        x = self.middle_blks(x)
        for decoder, up, enc_skip in zip(self.decoders, self.ups, encs[::-1]):
            x = up(x)
            x = x + enc_skip
            x = decoder(x)
        x = self.ending(x)
        x = x + inp
        return x


class ConvNeXtBlock(nn.Module):
    def __init__(self, dim, drop_path=0.0, layer_scale_init_value=0.5):
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, kernel_size=7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pwconv1 = nn.Linear(dim, 4 * dim)
        self.act = nn.GELU()
        self.pwconv2 = nn.Linear(4 * dim, dim)
        self.gamma = (
            nn.Parameter(layer_scale_init_value * torch.ones(dim), requires_grad=True)
            if layer_scale_init_value > 0
            else None
        )
        self.drop_path = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()

    def forward(self, x):
        input = x
        x = self.dwconv(x)
        x = x.permute(0, 2, 3, 1)
        x = self.norm(x)
        x = self.pwconv1(x)
        x = self.act(x)
        x = self.pwconv2(x)
        if self.gamma is not None:
            x = self.gamma * x
        x = x.permute(0, 3, 1, 2)
        x = input + self.drop_path(x)
        return x


class GRN(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(1, 1, 1, dim))
        self.beta = nn.Parameter(torch.rand(1, 1, 1, dim))

    def forward(self, x):
        Gx = torch.norm(x, p=2, dim=(1, 2), keepdim=True)
        Nx = Gx / (Gx.mean(dim=-1, keepdim=True) + 1e-6)
        return self.gamma * (x * Nx) + self.beta + x


class ConvNeXtV2Block(nn.Module):
    def __init__(self, dim, drop_path=0.0):
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, kernel_size=7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pwconv1 = nn.Linear(dim, 4 * dim)
        self.act = nn.GELU()
        self.grn = GRN(4 * dim)
        self.pwconv2 = nn.Linear(4 * dim, dim)
        self.drop_path = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()

    def forward(self, x):
        input = x
        x = self.dwconv(x)
        x = x.permute(0, 2, 3, 1)
        x = self.norm(x)
        x = self.pwconv1(x)
        x = self.act(x)
        x = self.grn(x)
        x = self.pwconv2(x)
        x = x.permute(0, 3, 1, 2)
        x = input + self.drop_path(x)
        return x


class ConvNeXt(nn.Module):
    def __init__(self, block, depths=(2, 3), dims=(WIDTH, 2 * WIDTH), drop_path_rate=0.0):
        super().__init__()
        self.downsample_layers = nn.ModuleList()
        self.downsample_layers.append(nn.Sequential(nn.Conv2d(3, dims[0], 2, 2), LayerNorm2d(dims[0])))
        self.downsample_layers.append(nn.Sequential(LayerNorm2d(dims[0]), nn.Conv2d(dims[0], dims[1], 2, 2)))
        self.stages = nn.ModuleList()
        dp_rates = [x.item() for x in torch.linspace(0, drop_path_rate, sum(depths))]
        cur = 0
        for i in range(2):
            self.stages.append(nn.Sequential(*[block(dims[i], drop_path=dp_rates[cur + j]) for j in range(depths[i])]))
            cur += depths[i]
        self.norm = nn.LayerNorm(dims[-1], eps=1e-6)
        self.head = nn.Linear(dims[-1], 10)

    def forward_features(self, x):
        for i in range(2):
            x = self.downsample_layers[i](x)
            x = self.stages[i](x)
        return self.norm(x.mean([-2, -1]))

    def forward(self, x):
        x = self.forward_features(x)
        x = self.head(x)
        return x


class Pooling(nn.Module):
    def __init__(self, pool_size=3):
        super().__init__()
        self.pool = nn.AvgPool2d(pool_size, stride=1, padding=pool_size // 2, count_include_pad=False)

    def forward(self, x):
        return self.pool(x) - x


class PoolFormerBlock(nn.Module):
    def __init__(self, dim, drop_path=0.0, use_layer_scale=True, layer_scale_init_value=0.5):
        super().__init__()
        self.norm1 = nn.GroupNorm(1, dim)
        self.token_mixer = Pooling()
        self.norm2 = nn.GroupNorm(1, dim)
        self.mlp = nn.Sequential(nn.Conv2d(dim, 2 * dim, 1), nn.GELU(), nn.Conv2d(2 * dim, dim, 1))
        self.drop_path = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()
        self.use_layer_scale = use_layer_scale
        if use_layer_scale:
            self.layer_scale_1 = nn.Parameter(layer_scale_init_value * torch.ones((dim)), requires_grad=True)
            self.layer_scale_2 = nn.Parameter(layer_scale_init_value * torch.ones((dim)), requires_grad=True)

    def forward(self, x):
        if self.use_layer_scale:
            x = x + self.drop_path(self.layer_scale_1.unsqueeze(-1).unsqueeze(-1) * self.token_mixer(self.norm1(x)))
            x = x + self.drop_path(self.layer_scale_2.unsqueeze(-1).unsqueeze(-1) * self.mlp(self.norm2(x)))
        else:
            x = x + self.drop_path(self.token_mixer(self.norm1(x)))
            x = x + self.drop_path(self.mlp(self.norm2(x)))
        return x


class PoolFormer(nn.Module):
    def __init__(self, fork_feat=False):
        super().__init__()
        self.fork_feat = fork_feat
        self.patch_embed = nn.Conv2d(3, WIDTH, 2, 2)
        stages = [nn.Sequential(*[PoolFormerBlock(WIDTH) for _ in range(2)]), nn.Conv2d(WIDTH, 2 * WIDTH, 2, 2)]
        stages.append(nn.Sequential(*[PoolFormerBlock(2 * WIDTH, drop_path=0.1) for _ in range(2)]))
        self.network = nn.ModuleList(stages)
        self.norm = nn.GroupNorm(1, 2 * WIDTH)
        self.head = nn.Linear(2 * WIDTH, 10)

    def forward_tokens(self, x):
        outs = []
        for idx, block in enumerate(self.network):
            x = block(x)
            if self.fork_feat and idx in (0, 2):
                outs.append(x)
        if self.fork_feat:
            return outs
        return x

    def forward(self, x):
        x = self.patch_embed(x)
        x = self.forward_tokens(x)
        if self.fork_feat:
            return x
        x = self.norm(x)
        return self.head(x.mean([-2, -1]))


class AlphaZeroResBlock(nn.Module):
    def __init__(self, num_hidden):
        super().__init__()
        self.conv1 = nn.Conv2d(num_hidden, num_hidden, kernel_size=3, padding=1)
        self.bn1 = nn.BatchNorm2d(num_hidden)
        self.conv2 = nn.Conv2d(num_hidden, num_hidden, kernel_size=3, padding=1)
        self.bn2 = nn.BatchNorm2d(num_hidden)

    def forward(self, x):
        residual = x
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.bn2(self.conv2(x))
        x += residual
        x = F.relu(x)
        return x


class AlphaZero(nn.Module):
    def __init__(self, num_resBlocks=3, num_hidden=WIDTH):
        super().__init__()
        self.startBlock = nn.Sequential(nn.Conv2d(3, num_hidden, 3, padding=1), nn.BatchNorm2d(num_hidden), nn.ReLU())
        self.backBone = nn.ModuleList([AlphaZeroResBlock(num_hidden) for i in range(num_resBlocks)])
        self.policyHead = nn.Sequential(nn.Flatten(), nn.Linear(num_hidden * 64, 9))
        self.valueHead = nn.Sequential(nn.Flatten(), nn.Linear(num_hidden * 64, 1), nn.Tanh())

    def forward(self, x):
        x = self.startBlock(x)
        for resBlock in self.backBone:
            x = resBlock(x)
        policy = self.policyHead(x)
        value = self.valueHead(x)
        return policy, value


class CycleGANResnetBlock(nn.Module):
    def __init__(self, dim, padding_type="reflect", norm_layer=nn.InstanceNorm2d, use_dropout=True):
        super().__init__()
        conv_block = [nn.ReflectionPad2d(1), nn.Conv2d(dim, dim, 3), norm_layer(dim), nn.ReLU(True)]
        conv_block += [nn.Dropout(0.5)] if use_dropout else []
        conv_block += [nn.ReflectionPad2d(1), nn.Conv2d(dim, dim, 3), norm_layer(dim)]
        self.conv_block = nn.Sequential(*conv_block)

    def forward(self, x):
        out = x + self.conv_block(x)
        return out


class CycleGANGenerator(nn.Module):
    def __init__(self, n_blocks=3, ngf=WIDTH):
        super().__init__()
        model = [nn.ReflectionPad2d(1), nn.Conv2d(3, ngf, 3), nn.InstanceNorm2d(ngf), nn.ReLU(True)]
        model += [nn.Conv2d(ngf, 2 * ngf, 3, stride=2, padding=1), nn.InstanceNorm2d(2 * ngf), nn.ReLU(True)]
        for _ in range(n_blocks):
            model += [CycleGANResnetBlock(2 * ngf)]
        model += [nn.ConvTranspose2d(2 * ngf, 3, 3, stride=2, padding=1, output_padding=1), nn.Tanh()]
        self.model = nn.Sequential(*model)

    def forward(self, input):
        return self.model(input)


class YOLOBottleneck(nn.Module):
    def __init__(self, c1, c2, shortcut=True, e=0.5):
        super().__init__()
        c_ = int(c2 * e)
        self.cv1 = nn.Sequential(nn.Conv2d(c1, c_, 3, padding=1, bias=False), nn.BatchNorm2d(c_), nn.SiLU())
        self.cv2 = nn.Sequential(nn.Conv2d(c_, c2, 3, padding=1, bias=False), nn.BatchNorm2d(c2), nn.SiLU())
        self.add = shortcut and c1 == c2

    def forward(self, x):
        return x + self.cv2(self.cv1(x)) if self.add else self.cv2(self.cv1(x))


class YOLOC2f(nn.Module):
    def __init__(self, c1, c2, n=2, shortcut=True, e=0.5):
        super().__init__()
        self.c = int(c2 * e)
        self.cv1 = nn.Conv2d(c1, 2 * self.c, 1, 1)
        self.cv2 = nn.Conv2d((2 + n) * self.c, c2, 1)
        self.m = nn.ModuleList(YOLOBottleneck(self.c, self.c, shortcut, e=1.0) for _ in range(n))

    def forward(self, x):
        y = list(self.cv1(x).chunk(2, 1))
        y.extend(m(y[-1]) for m in self.m)
        return self.cv2(torch.cat(y, 1))


class YOLOC3(nn.Module):
    def __init__(self, c1, c2, n=2, shortcut=True, e=0.5):
        super().__init__()
        c_ = int(c2 * e)
        self.cv1, self.cv2, self.cv3 = nn.Conv2d(c1, c_, 1), nn.Conv2d(c1, c_, 1), nn.Conv2d(2 * c_, c2, 1)
        self.m = nn.Sequential(*(YOLOBottleneck(c_, c_, shortcut, e=1.0) for _ in range(n)))

    def forward(self, x):
        return self.cv3(torch.cat((self.m(self.cv1(x)), self.cv2(x)), 1))


# Audio and time series


class WhisperBlock(nn.Module):
    def __init__(self, n_state: int, n_head: int, cross_attention: bool = False):
        super().__init__()
        self.attn = WhisperAttention(n_state, n_head)
        self.attn_ln = nn.LayerNorm(n_state)
        self.cross_attn = WhisperAttention(n_state, n_head) if cross_attention else None
        self.cross_attn_ln = nn.LayerNorm(n_state) if cross_attention else None
        self.mlp = nn.Sequential(nn.Linear(n_state, 4 * n_state), nn.GELU(), nn.Linear(4 * n_state, n_state))
        self.mlp_ln = nn.LayerNorm(n_state)

    def forward(self, x: Tensor, xa: Tensor | None = None, mask: Tensor | None = None, kv_cache: dict | None = None):
        x = x + self.attn(self.attn_ln(x), mask=mask, kv_cache=kv_cache)[0]
        if self.cross_attn:
            x = x + self.cross_attn(self.cross_attn_ln(x), xa, kv_cache=kv_cache)[0]
        x = x + self.mlp(self.mlp_ln(x))
        return x


class WhisperAttention(Attention):
    def forward(self, x, xa=None, mask=None, kv_cache=None):
        return super().forward(x, xa, mask), None


class WhisperEncoder(nn.Module):
    def __init__(self, n_state=WIDTH, n_layer=2):
        super().__init__()
        self.conv1 = nn.Conv1d(4, n_state, kernel_size=3, padding=1)
        self.conv2 = nn.Conv1d(n_state, n_state, kernel_size=3, stride=2, padding=1)
        self.register_buffer("positional_embedding", torch.randn(LENGTH, n_state))
        self.blocks = nn.ModuleList([WhisperBlock(n_state, HEADS) for _ in range(n_layer)])
        self.ln_post = nn.LayerNorm(n_state)

    def forward(self, x: Tensor):
        x = F.gelu(self.conv1(x))
        x = F.gelu(self.conv2(x))
        x = x.permute(0, 2, 1)
        assert x.shape[1:] == self.positional_embedding.shape, "incorrect audio shape"
        x = (x + self.positional_embedding).to(x.dtype)
        for block in self.blocks:
            x = block(x)
        x = self.ln_post(x)
        return x


class WhisperDecoder(nn.Module):
    def __init__(self, n_state=WIDTH, n_layer=2):
        super().__init__()
        self.token_embedding = nn.Embedding(VOCAB, n_state)
        self.positional_embedding = nn.Parameter(torch.randn(LENGTH, n_state))
        self.blocks = nn.ModuleList([WhisperBlock(n_state, HEADS, cross_attention=True) for _ in range(n_layer)])
        self.ln = nn.LayerNorm(n_state)
        self.register_buffer("mask", torch.full((LENGTH, LENGTH), float("-inf")).triu_(1), persistent=False)

    def forward(self, x: Tensor, xa: Tensor, kv_cache: dict | None = None):
        offset = next(iter(kv_cache.values())).shape[1] if kv_cache else 0
        x = self.token_embedding(x) + self.positional_embedding[offset : offset + x.shape[-1]]
        x = x.to(xa.dtype)
        for block in self.blocks:
            x = block(x, xa, mask=self.mask, kv_cache=kv_cache)
        x = self.ln(x)
        logits = (x @ torch.transpose(self.token_embedding.weight.to(x.dtype), 0, 1)).float()
        return logits


class Whisper(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = WhisperEncoder()
        self.decoder = WhisperDecoder()

    def forward(self, mel: Tensor, tokens: Tensor) -> Tensor:
        return self.decoder(tokens, self.encoder(mel))


class ConformerScale(nn.Module):
    def __init__(self, scale, fn):
        super().__init__()
        self.fn = fn
        self.scale = scale

    def forward(self, x, **kwargs):
        return self.fn(x, **kwargs) * self.scale


class ConformerConvModule(nn.Module):
    def __init__(self, dim, kernel_size=3):
        super().__init__()
        self.net = nn.Sequential(
            nn.LayerNorm(dim),
            Rearrange("b n c -> b c n"),
            nn.Conv1d(dim, 4 * dim, 1),
            nn.GLU(dim=1),
            nn.Conv1d(2 * dim, 2 * dim, kernel_size, padding=kernel_size // 2, groups=2 * dim),
            nn.BatchNorm1d(2 * dim),
            nn.SiLU(),
            nn.Conv1d(2 * dim, dim, 1),
            Rearrange("b c n -> b n c"),
            nn.Dropout(0.0),
        )

    def forward(self, x, mask=None):
        return self.net(x)


class LucidConformerBlock(nn.Module):
    def __init__(self, dim=WIDTH):
        super().__init__()
        self.attn = PreNormFn(dim, Attention(dim))
        self.ff1 = ConformerScale(0.5, PreNormFn(dim, Mlp(dim)))
        self.ff2 = ConformerScale(0.5, PreNormFn(dim, Mlp(dim)))
        self.conv = ConformerConvModule(dim)
        self.post_norm = nn.LayerNorm(dim)

    def forward(self, x, mask=None):
        x = self.ff1(x) + x
        x = self.attn(x, mask=mask) + x
        x = self.conv(x, mask=mask) + x
        x = self.ff2(x) + x
        x = self.post_norm(x)
        return x


class LucidConformer(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.layers = nn.ModuleList([])
        for _ in range(depth):
            self.layers.append(LucidConformerBlock())

    def forward(self, x, mask=None):
        for block in self.layers:
            x = block(x, mask=mask)
        return x


class ResidualConnectionModule(nn.Module):
    def __init__(self, module, module_factor=1.0, input_factor=1.0):
        super().__init__()
        self.module = module
        self.module_factor = module_factor
        self.input_factor = input_factor

    def forward(self, inputs):
        return (self.module(inputs) * self.module_factor) + (inputs * self.input_factor)


class SequentialConformerBlock(nn.Module):
    def __init__(self, dim=WIDTH, half_step_residual=True):
        super().__init__()
        factor = 0.5 if half_step_residual else 1.0
        self.sequential = nn.Sequential(
            ResidualConnectionModule(module=PreNormFn(dim, Mlp(dim)), module_factor=factor),
            ResidualConnectionModule(module=PreNormFn(dim, Attention(dim))),
            ResidualConnectionModule(module=ConformerConvModule(dim)),
            ResidualConnectionModule(module=PreNormFn(dim, Mlp(dim)), module_factor=factor),
            nn.LayerNorm(dim),
        )

    def forward(self, inputs):
        return self.sequential(inputs.to(inputs.device))


class SequentialConformer(nn.Module):
    def __init__(self, num_layers=2):
        super().__init__()
        self.input_projection = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(p=0.1))
        self.layers = nn.ModuleList([SequentialConformerBlock() for _ in range(num_layers)])

    def forward(self, inputs, input_lengths):
        outputs, output_lengths = inputs, input_lengths
        outputs = self.input_projection(outputs)
        for layer in self.layers:
            outputs = layer(outputs)
        return outputs, output_lengths


class MultiSequential(torch.nn.Sequential):
    def forward(self, *args):
        for idx, m in enumerate(self):
            args = m(*args)
        return args


class ESPnetEncoderLayer(nn.Module):
    def __init__(self, size=WIDTH, macaron=True, stochastic_depth_rate=0.0):
        super().__init__()
        self.self_attn = QKVAttention()
        self.feed_forward = Mlp(size)
        self.feed_forward_macaron = Mlp(size) if macaron else None
        self.conv_module = ConformerConvModule(size)
        self.norm_ff, self.norm_mha = nn.LayerNorm(size), nn.LayerNorm(size)
        if self.feed_forward_macaron is not None:
            self.norm_ff_macaron = nn.LayerNorm(size)
            self.ff_scale = 0.5
        else:
            self.ff_scale = 1.0
        self.norm_conv, self.norm_final = nn.LayerNorm(size), nn.LayerNorm(size)
        self.dropout = nn.Dropout(0.1)
        self.size, self.normalize_before = size, True
        self.stochastic_depth_rate = stochastic_depth_rate

    def forward(self, x_input, mask, cache=None):
        if isinstance(x_input, tuple):
            x, pos_emb = x_input[0], x_input[1]
        else:
            x, pos_emb = x_input, None
        skip_layer = False
        stoch_layer_coeff = 1.0
        if self.training and self.stochastic_depth_rate > 0:
            skip_layer = torch.rand(1).item() < self.stochastic_depth_rate
            stoch_layer_coeff = 1.0 / (1 - self.stochastic_depth_rate)
        if skip_layer:
            if pos_emb is not None:
                return (x, pos_emb), mask
            return x, mask
        if self.feed_forward_macaron is not None:
            residual = x
            if self.normalize_before:
                x = self.norm_ff_macaron(x)
            x = residual + stoch_layer_coeff * self.ff_scale * self.dropout(self.feed_forward_macaron(x))
            if not self.normalize_before:
                x = self.norm_ff_macaron(x)
        residual = x
        if self.normalize_before:
            x = self.norm_mha(x)
        x_q = x if cache is None else x[:, -1:, :]
        x_att = self.self_attn(x_q, x + pos_emb if pos_emb is not None else x, x, mask)
        x = residual + stoch_layer_coeff * self.dropout(x_att)
        if not self.normalize_before:
            x = self.norm_mha(x)
        if self.conv_module is not None:
            residual = x
            if self.normalize_before:
                x = self.norm_conv(x)
            x = residual + stoch_layer_coeff * self.dropout(self.conv_module(x))
            if not self.normalize_before:
                x = self.norm_conv(x)
        residual = x
        if self.normalize_before:
            x = self.norm_ff(x)
        x = residual + stoch_layer_coeff * self.ff_scale * self.dropout(self.feed_forward(x))
        if not self.normalize_before:
            x = self.norm_ff(x)
        if self.conv_module is not None:
            x = self.norm_final(x)
        if pos_emb is not None:
            return (x, pos_emb), mask
        return x, mask


class ESPnetEncoder(nn.Module):
    def __init__(self, num_blocks=3, rate=0.0):
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.pos = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.encoders = MultiSequential(*[ESPnetEncoderLayer(stochastic_depth_rate=rate) for _ in range(num_blocks)])
        self.after_norm = nn.LayerNorm(WIDTH)

    def forward(self, xs, masks=None):
        xs = (self.embed(xs), self.pos)
        xs, masks = self.encoders(xs, masks)
        if isinstance(xs, tuple):
            xs = xs[0]
        xs = self.after_norm(xs)
        return xs, masks


class ResidualConv1dGLU(nn.Module):
    def __init__(self, channels=WIDTH, dilation=1):
        super().__init__()
        self.conv = nn.Conv1d(channels, 2 * channels, 3, padding=2 * dilation, dilation=dilation)
        self.conv1x1_skip, self.conv1x1_out = nn.Conv1d(channels, channels, 1), nn.Conv1d(channels, channels, 1)

    def forward(self, x, c=None):
        residual = x
        x = F.dropout(x, p=0.05, training=self.training)
        x = self.conv(x)
        x = x[:, :, : residual.size(-1)]
        a, b = x.split(x.size(1) // 2, dim=1)
        x = torch.tanh(a) * torch.sigmoid(b)
        s = self.conv1x1_skip(x)
        x = self.conv1x1_out(x)
        x = (x + residual) * math.sqrt(0.5)
        return x, s


class WaveNet(nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        self.first_conv = nn.Conv1d(1, WIDTH, 1)
        self.conv_layers = nn.ModuleList()
        for layer in range(layers):
            self.conv_layers.append(ResidualConv1dGLU(dilation=2**layer))
        self.last_conv_layers = nn.ModuleList([nn.ReLU(inplace=True), nn.Conv1d(WIDTH, 8, 1)])

    def forward(self, x, c=None):
        x = self.first_conv(x)
        skips = 0
        for f in self.conv_layers:
            x, h = f(x, c)
            skips += h
        skips *= math.sqrt(1.0 / len(self.conv_layers))
        x = skips
        for f in self.last_conv_layers:
            x = f(x)
        return x


class VITSWN(nn.Module):
    def __init__(self, hidden_channels=WIDTH, n_layers=3):
        super().__init__()
        self.hidden_channels, self.n_layers = hidden_channels, n_layers
        self.in_layers, self.res_skip_layers = nn.ModuleList(), nn.ModuleList()
        self.drop = nn.Dropout(0.0)
        for i in range(n_layers):
            self.in_layers.append(nn.Conv1d(hidden_channels, 2 * hidden_channels, 3, padding=1))
            out = 2 * hidden_channels if i < n_layers - 1 else hidden_channels
            self.res_skip_layers.append(nn.Conv1d(hidden_channels, out, 1))

    def forward(self, x, x_mask, g=None, **kwargs):
        output = torch.zeros_like(x)
        for i in range(self.n_layers):
            x_in = self.in_layers[i](x)
            t_act, s_act = x_in.chunk(2, dim=1)
            acts = torch.tanh(t_act) * torch.sigmoid(s_act)
            acts = self.drop(acts)
            res_skip_acts = self.res_skip_layers[i](acts)
            if i < self.n_layers - 1:
                res_acts = res_skip_acts[:, : self.hidden_channels, :]
                x = (x + res_acts) * x_mask
                output = output + res_skip_acts[:, self.hidden_channels :, :]
            else:
                output = output + res_skip_acts
        return output * x_mask


class VITSEncoder(nn.Module):
    def __init__(self, n_layers=3):
        super().__init__()
        self.n_layers = n_layers
        self.drop = nn.Dropout(0.1)
        self.attn_layers, self.norm_layers_1 = nn.ModuleList(), nn.ModuleList()
        self.ffn_layers, self.norm_layers_2 = nn.ModuleList(), nn.ModuleList()
        for _ in range(self.n_layers):
            self.attn_layers.append(ChannelFirstAttention())
            self.norm_layers_1.append(nn.GroupNorm(1, WIDTH))
            self.ffn_layers.append(MaskedConvFFN())
            self.norm_layers_2.append(nn.GroupNorm(1, WIDTH))

    def forward(self, x, x_mask):
        attn_mask = x_mask.unsqueeze(2) * x_mask.unsqueeze(-1)
        x = x * x_mask
        for i in range(self.n_layers):
            y = self.attn_layers[i](x, x, attn_mask)
            y = self.drop(y)
            x = self.norm_layers_1[i](x + y)
            y = self.ffn_layers[i](x, x_mask)
            y = self.drop(y)
            x = self.norm_layers_2[i](x + y)
        x = x * x_mask
        return x


class ChannelFirstAttention(QKVAttention):
    def forward(self, x, c, attn_mask=None):
        x, c = x.transpose(1, 2), c.transpose(1, 2)
        return super().forward(x, c, c, attn_mask).transpose(1, 2)


class MaskedConvFFN(nn.Module):
    def __init__(self, channels=WIDTH):
        super().__init__()
        self.conv_1 = nn.Conv1d(channels, 2 * channels, 3, padding=1)
        self.conv_2 = nn.Conv1d(2 * channels, channels, 3, padding=1)

    def forward(self, x, x_mask):
        x = self.conv_1(x * x_mask)
        x = torch.relu(x)
        x = self.conv_2(x * x_mask)
        return x * x_mask


LRELU_SLOPE = 0.1


class HiFiResBlock1(torch.nn.Module):
    def __init__(self, channels, kernel_size=3, dilation=(1, 3, 5)):
        super().__init__()
        conv = lambda d: nn.Conv1d(channels, channels, kernel_size, dilation=d, padding=d * (kernel_size - 1) // 2)
        self.convs1 = nn.ModuleList([nn.utils.parametrizations.weight_norm(conv(d)) for d in dilation])
        self.convs2 = nn.ModuleList([nn.utils.parametrizations.weight_norm(conv(1)) for d in dilation])

    def forward(self, x):
        for c1, c2 in zip(self.convs1, self.convs2):
            xt = F.leaky_relu(x, LRELU_SLOPE)
            xt = c1(xt)
            xt = F.leaky_relu(xt, LRELU_SLOPE)
            xt = c2(xt)
            x = xt + x
        return x


class HiFiResBlock2(torch.nn.Module):
    def __init__(self, channels, kernel_size=3, dilation=(1, 3)):
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv1d(channels, channels, kernel_size, 1, d, d) for d in dilation])

    def forward(self, x):
        for c in self.convs:
            xt = F.leaky_relu(x, LRELU_SLOPE)
            xt = c(xt)
            x = xt + x
        return x


class HiFiGAN(torch.nn.Module):
    def __init__(self, resblock, channels=WIDTH):
        super().__init__()
        self.num_kernels, self.num_upsamples = 2, 2
        self.conv_pre = nn.Conv1d(4, channels, 7, 1, padding=3)
        self.ups = nn.ModuleList([nn.ConvTranspose1d(channels, channels, 4, 2, padding=1) for _ in range(2)])
        self.resblocks = nn.ModuleList()
        for _ in range(len(self.ups)):
            for _, k in enumerate((3, 3)):
                self.resblocks.append(resblock(channels, k))
        self.conv_post = nn.Conv1d(channels, 1, 7, 1, padding=3)

    def forward(self, x):
        x = self.conv_pre(x)
        for i in range(self.num_upsamples):
            x = F.leaky_relu(x, LRELU_SLOPE)
            x = self.ups[i](x)
            xs = None
            for j in range(self.num_kernels):
                if xs is None:
                    xs = self.resblocks[i * self.num_kernels + j](x)
                else:
                    xs += self.resblocks[i * self.num_kernels + j](x)
            x = xs / self.num_kernels
        x = F.leaky_relu(x)
        x = self.conv_post(x)
        x = torch.tanh(x)
        return x


class EncodecResnetBlock(nn.Module):
    def __init__(self, dim, dilations=(1, 1), true_skip=False):
        super().__init__()
        block = []
        for i, dilation in enumerate(dilations):
            in_chs = dim if i == 0 else dim // 2
            out_chs = dim if i == len(dilations) - 1 else dim // 2
            block += [nn.ELU(), nn.Conv1d(in_chs, out_chs, 3, padding=dilation, dilation=dilation)]
        self.block = nn.Sequential(*block)
        self.shortcut = nn.Identity() if true_skip else nn.Conv1d(dim, dim, 1)

    def forward(self, x):
        return self.shortcut(x) + self.block(x)


class EncodecLSTM(nn.Module):
    def __init__(self, dimension, skip=True):
        super().__init__()
        self.skip = skip
        self.lstm = nn.LSTM(dimension, dimension, 1)

    def forward(self, x):
        x = x.permute(2, 0, 1)
        y, _ = self.lstm(x)
        if self.skip:
            y = y + x
        y = y.permute(1, 2, 0)
        return y


class Encodec(nn.Module):
    def __init__(self, dim=WIDTH):
        super().__init__()
        model = [nn.Conv1d(1, dim, 3, padding=1)]
        for j in range(2):
            model += [EncodecResnetBlock(dim, dilations=(2**j, 1), true_skip=True)]
        model += [nn.ELU(), nn.Conv1d(dim, 2 * dim, 4, 2, padding=1)]
        for _ in range(2):
            model += [EncodecResnetBlock(2 * dim, true_skip=True)]
        model += [EncodecLSTM(2 * dim), nn.ELU(), nn.Conv1d(2 * dim, dim, 3, padding=1)]
        self.model = nn.Sequential(*model)

    def forward(self, x):
        return self.model(x)


class Chomp1d(nn.Module):
    def __init__(self, chomp_size):
        super().__init__()
        self.chomp_size = chomp_size

    def forward(self, x):
        return x[:, :, : -self.chomp_size].contiguous()


class TemporalBlock(nn.Module):
    def __init__(self, n_inputs, n_outputs, kernel_size, dilation, padding, dropout=0.2):
        super().__init__()
        self.conv1 = nn.Conv1d(n_inputs, n_outputs, kernel_size, padding=padding, dilation=dilation)
        self.chomp1, self.relu1, self.dropout1 = Chomp1d(padding), nn.ReLU(), nn.Dropout(dropout)
        self.conv2 = nn.Conv1d(n_outputs, n_outputs, kernel_size, padding=padding, dilation=dilation)
        self.chomp2, self.relu2, self.dropout2 = Chomp1d(padding), nn.ReLU(), nn.Dropout(dropout)
        self.net = nn.Sequential(
            self.conv1, self.chomp1, self.relu1, self.dropout1, self.conv2, self.chomp2, self.relu2, self.dropout2
        )
        self.downsample = nn.Conv1d(n_inputs, n_outputs, 1) if n_inputs != n_outputs else None
        self.relu = nn.ReLU()

    def forward(self, x):
        out = self.net(x)
        res = x if self.downsample is None else self.downsample(x)
        return self.relu(out + res)


class TCN(nn.Module):
    def __init__(self, num_inputs=3, num_channels=(WIDTH, WIDTH, WIDTH), kernel_size=2):
        super().__init__()
        layers = []
        num_levels = len(num_channels)
        for i in range(num_levels):
            dilation_size = 2**i
            in_channels = num_inputs if i == 0 else num_channels[i - 1]
            layers += [
                TemporalBlock(
                    in_channels, num_channels[i], kernel_size, dilation_size, (kernel_size - 1) * dilation_size
                )
            ]
        self.network = nn.Sequential(*layers)

    def forward(self, x):
        return self.network(x)


class NBeatsBlock(nn.Module):
    def __init__(self, input_size, horizon, hidden=WIDTH):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(input_size, hidden), nn.Linear(hidden, hidden)])
        self.basis_parameters = nn.Linear(hidden, input_size + horizon)
        self.backcast_size = input_size

    def forward(self, x):
        block_input = x
        for layer in self.layers:
            block_input = torch.relu(layer(block_input))
        theta = self.basis_parameters(block_input)
        return theta[:, : self.backcast_size], theta[:, self.backcast_size :]


class NBeats(nn.Module):
    def __init__(self, n_blocks=3, input_size=WIDTH, horizon=4):
        super().__init__()
        self.blocks = nn.ModuleList([NBeatsBlock(input_size, horizon) for _ in range(n_blocks)])

    def forward(self, x: torch.Tensor, input_mask: torch.Tensor) -> torch.Tensor:
        residuals = x.flip(dims=(1,))
        input_mask = input_mask.flip(dims=(1,))
        forecast = x[:, -1:]
        for i, block in enumerate(self.blocks):
            backcast, block_forecast = block(residuals)
            residuals = (residuals + backcast) * input_mask
            forecast = forecast + block_forecast
        return forecast


class TSMixerBlock(nn.Module):
    def __init__(self, seq_len=LENGTH, d_model=WIDTH):
        super().__init__()
        self.temporal = nn.Sequential(nn.Linear(seq_len, WIDTH), nn.ReLU(), nn.Linear(WIDTH, seq_len), nn.Dropout(0.1))
        self.channel = nn.Sequential(nn.Linear(d_model, WIDTH), nn.ReLU(), nn.Linear(WIDTH, d_model), nn.Dropout(0.1))

    def forward(self, x):
        x = x + self.temporal(x.transpose(1, 2)).transpose(1, 2)
        x = x + self.channel(x)
        return x


class TSMixer(nn.Module):
    def __init__(self, e_layers=3, pred_len=4):
        super().__init__()
        self.layer = e_layers
        self.model = nn.ModuleList([TSMixerBlock() for _ in range(e_layers)])
        self.pred_len = pred_len
        self.projection = nn.Linear(LENGTH, pred_len)

    def forecast(self, x_enc):
        for i in range(self.layer):
            x_enc = self.model[i](x_enc)
        enc_out = self.projection(x_enc.transpose(1, 2)).transpose(1, 2)
        return enc_out

    def forward(self, x_enc):
        dec_out = self.forecast(x_enc)
        return dec_out[:, -self.pred_len :, :]


# Tables, sets, graphs, proteins


class FTTransformer(nn.Module):
    def __init__(self, n_layers=3, d_token=WIDTH, prenormalization=True, residual_dropout=0.1):
        super().__init__()
        self.tokenizer = nn.Parameter(torch.randn(5, d_token))
        self.layers = nn.ModuleList([])
        for layer_idx in range(n_layers):
            layer = nn.ModuleDict(
                {
                    "attention": Attention(d_token),
                    "linear0": nn.Linear(d_token, 2 * d_token),
                    "linear1": nn.Linear(d_token, d_token),
                    "norm1": nn.LayerNorm(d_token),
                }
            )
            if not prenormalization or layer_idx:
                layer["norm0"] = nn.LayerNorm(d_token)
            self.layers.append(layer)
        self.activation = lambda x: F.glu(x, dim=-1)
        self.last_normalization = nn.LayerNorm(d_token) if prenormalization else None
        self.prenormalization = prenormalization
        self.residual_dropout = residual_dropout
        self.head = nn.Linear(d_token, 1)

    def _start_residual(self, x, layer, norm_idx):
        x_residual = x
        if self.prenormalization:
            norm_key = f"norm{norm_idx}"
            if norm_key in layer:
                x_residual = layer[norm_key](x_residual)
        return x_residual

    def _end_residual(self, x, x_residual, layer, norm_idx):
        if self.residual_dropout:
            x_residual = F.dropout(x_residual, self.residual_dropout, self.training)
        x = x + x_residual
        if not self.prenormalization:
            x = layer[f"norm{norm_idx}"](x)
        return x

    def forward(self, x_num):
        x = x_num[..., None] * self.tokenizer[None]
        for layer_idx, layer in enumerate(self.layers):
            is_last_layer = layer_idx + 1 == len(self.layers)
            x_residual = self._start_residual(x, layer, 0)
            x_residual = layer["attention"](x_residual[:, :1] if is_last_layer else x_residual, x_residual)
            if is_last_layer:
                x = x[:, : x_residual.shape[1]]
            x = self._end_residual(x, x_residual, layer, 0)
            x_residual = self._start_residual(x, layer, 1)
            x_residual = layer["linear0"](x_residual)
            x_residual = self.activation(x_residual)
            x_residual = layer["linear1"](x_residual)
            x = self._end_residual(x, x_residual, layer, 1)
        x = x[:, 0]
        if self.last_normalization is not None:
            x = self.last_normalization(x)
        x = self.head(x)
        x = x.squeeze(-1)
        return x


class TabularResNet(nn.Module):
    def __init__(self, n_layers=3, d=WIDTH):
        super().__init__()
        self.first_layer = nn.Linear(5, d)
        self.layers = nn.ModuleList(
            [
                nn.ModuleDict(
                    {"norm": nn.BatchNorm1d(d), "linear0": nn.Linear(d, 2 * d), "linear1": nn.Linear(2 * d, d)}
                )
                for _ in range(n_layers)
            ]
        )
        self.main_activation = F.relu
        self.last_norm, self.head = nn.BatchNorm1d(d), nn.Linear(d, 1)
        self.hidden_dropout = 0.0

    def forward(self, x):
        x = self.first_layer(x)
        for layer in self.layers:
            z = x
            z = layer["norm"](z)
            z = layer["linear0"](z)
            z = self.main_activation(z)
            if self.hidden_dropout:
                z = F.dropout(z, self.hidden_dropout, self.training)
            z = layer["linear1"](z)
            x = x + z
        x = self.last_norm(x)
        x = self.main_activation(x)
        x = self.head(x)
        x = x.squeeze(-1)
        return x


class ResidualMLP(nn.Module):
    """MLP with skip connections in a plain Sequential, flattened input, and checkpointing by a flag."""

    class ResBlock(nn.Module):
        def __init__(self, dim, dropout=0.1):
            super().__init__()
            self.block = nn.Sequential(nn.Linear(dim, dim), nn.BatchNorm1d(dim), nn.ReLU(), nn.Dropout(dropout))

        def forward(self, x):
            return F.relu(x + self.block(x))

    def __init__(self, use_checkpoint, depth=3):
        super().__init__()
        self.use_checkpoint = use_checkpoint
        self.stem = nn.Linear(3 * 8 * 8, WIDTH)
        self.blocks = nn.ModuleList([self.ResBlock(WIDTH) for _ in range(depth)])

    def forward(self, x):
        x = self.stem(torch.flatten(x, 1))
        for blk in self.blocks:
            if self.use_checkpoint:
                x = checkpoint(blk, x, use_reentrant=False)
            else:
                x = blk(x)
        return x


class StochasticDepthNet(nn.Module):
    """A residual net whose blocks are dropped per sample in training."""

    class DropPath(nn.Module):
        def __init__(self, p):
            super().__init__()
            self.p = p

        def forward(self, x):
            if self.p == 0.0 or not self.training:
                return x
            keep_prob = 1 - self.p
            shape = (x.shape[0],) + (1,) * (x.ndim - 1)
            random_tensor = keep_prob + torch.rand(shape, dtype=x.dtype, device=x.device)
            random_tensor.floor_()
            output = x.div(keep_prob) * random_tensor
            return output

    def __init__(self, depth=4, rate=0.3):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(depth)])
        self.mlps = nn.ModuleList([Mlp() for _ in range(depth)])
        self.drops = nn.ModuleList([self.DropPath(rate * i / depth) for i in range(depth)])

    def forward(self, x):
        for norm, mlp, drop in zip(self.norms, self.mlps, self.drops):
            x = x + drop(mlp(norm(x)))
        return x


class MAB(nn.Module):
    def __init__(self, dim_Q, dim_K, dim_V, num_heads, ln=False):
        super().__init__()
        self.dim_V, self.num_heads = dim_V, num_heads
        self.fc_q, self.fc_k, self.fc_v = nn.Linear(dim_Q, dim_V), nn.Linear(dim_K, dim_V), nn.Linear(dim_K, dim_V)
        if ln:
            self.ln0 = nn.LayerNorm(dim_V)
            self.ln1 = nn.LayerNorm(dim_V)
        self.fc_o = nn.Linear(dim_V, dim_V)

    def forward(self, Q, K):
        Q = self.fc_q(Q)
        K, V = self.fc_k(K), self.fc_v(K)
        dim_split = self.dim_V // self.num_heads
        Q_ = torch.cat(Q.split(dim_split, 2), 0)
        K_ = torch.cat(K.split(dim_split, 2), 0)
        V_ = torch.cat(V.split(dim_split, 2), 0)
        A = torch.softmax(Q_.bmm(K_.transpose(1, 2)) / math.sqrt(self.dim_V), 2)
        O = torch.cat((Q_ + A.bmm(V_)).split(Q.size(0), 0), 2)
        O = O if getattr(self, "ln0", None) is None else self.ln0(O)
        O = O + F.relu(self.fc_o(O))
        O = O if getattr(self, "ln1", None) is None else self.ln1(O)
        return O


class SAB(nn.Module):
    def __init__(self, dim_in, dim_out, num_heads, ln=False):
        super().__init__()
        self.mab = MAB(dim_in, dim_in, dim_out, num_heads, ln=ln)

    def forward(self, X):
        return self.mab(X, X)


class PMA(nn.Module):
    def __init__(self, dim, num_heads, num_seeds, ln=False):
        super().__init__()
        self.S = nn.Parameter(torch.randn(1, num_seeds, dim))
        self.mab = MAB(dim, dim, dim, num_heads, ln=ln)

    def forward(self, X):
        return self.mab(self.S.repeat(X.size(0), 1, 1), X)


class SetTransformer(nn.Module):
    def __init__(self, ln=True):
        super().__init__()
        self.enc = nn.Sequential(SAB(3, WIDTH, HEADS, ln=ln), SAB(WIDTH, WIDTH, HEADS, ln=ln))
        self.dec = nn.Sequential(PMA(WIDTH, HEADS, 2, ln=ln), SAB(WIDTH, WIDTH, HEADS, ln=ln), nn.Linear(WIDTH, 4))

    def forward(self, X):
        return self.dec(self.enc(X))


class PointTransformerLayer(nn.Module):
    def __init__(self, planes):
        super().__init__()
        self.linear_q, self.linear_k, self.linear_v = (nn.Linear(planes, planes) for _ in range(3))
        self.linear_p = nn.Linear(3, planes)

    def forward(self, pxo):
        p, x, o = pxo
        x_q, x_k, x_v = self.linear_q(x), self.linear_k(x), self.linear_v(x)
        p_r = self.linear_p(p[:, None] - p[None])
        w = torch.softmax(x_k[None] - x_q[:, None] + p_r, dim=1)
        return ((x_v[None] + p_r) * w).sum(1)


class PointTransformerBlock(nn.Module):
    def __init__(self, planes=WIDTH):
        super().__init__()
        self.linear1, self.bn1 = nn.Linear(planes, planes, bias=False), nn.BatchNorm1d(planes)
        self.transformer2, self.bn2 = PointTransformerLayer(planes), nn.BatchNorm1d(planes)
        self.linear3, self.bn3 = nn.Linear(planes, planes, bias=False), nn.BatchNorm1d(planes)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, pxo):
        p, x, o = pxo
        identity = x
        x = self.relu(self.bn1(self.linear1(x)))
        x = self.relu(self.bn2(self.transformer2([p, x, o])))
        x = self.bn3(self.linear3(x))
        x += identity
        x = self.relu(x)
        return [p, x, o]


class PointTransformerDown(nn.Module):
    def __init__(self, in_planes, out_planes):
        super().__init__()
        self.linear, self.bn = nn.Linear(in_planes, out_planes, bias=False), nn.BatchNorm1d(out_planes)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, pxo):
        p, x, o = pxo
        x = self.relu(self.bn(self.linear(x)))
        return [p, x, o]


class PointTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc1 = nn.Sequential(PointTransformerDown(6, WIDTH), *[PointTransformerBlock() for _ in range(3)])
        self.cls = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True))

    def forward(self, p0, x0, o0):
        x0 = torch.cat((p0, x0), 1)
        p1, x1, o1 = self.enc1([p0, x0, o0])
        return self.cls(x1)


class PointMLPResBlock(nn.Module):
    def __init__(self, channel, res_expansion=1.0):
        super().__init__()
        self.act = nn.ReLU(inplace=True)
        self.net1 = nn.Sequential(
            nn.Conv1d(channel, int(channel * res_expansion), 1), nn.BatchNorm1d(channel), nn.ReLU(inplace=True)
        )
        self.net2 = nn.Sequential(nn.Conv1d(int(channel * res_expansion), channel, 1), nn.BatchNorm1d(channel))

    def forward(self, x):
        return self.act(self.net2(self.net1(x)) + x)


class PointMLP(nn.Module):
    def __init__(self, blocks=3):
        super().__init__()
        self.embedding = nn.Conv1d(3, WIDTH, 1)
        operation = []
        for _ in range(blocks):
            operation.append(PointMLPResBlock(WIDTH))
        self.operation = nn.Sequential(*operation)

    def forward(self, x):
        x = self.embedding(x.permute(0, 2, 1))
        x = self.operation(x)
        x = F.adaptive_max_pool1d(x, 1).squeeze(dim=-1)
        return x


class GraphBatch(SimpleNamespace):
    pass


class DenseGCN(nn.Module):
    def __init__(self, dim=WIDTH):
        super().__init__()
        self.lin = nn.Linear(dim, dim)

    def forward(self, x, adj):
        return self.lin(adj @ x)


class GPSLayer(nn.Module):
    def __init__(self, dim_h=WIDTH, dropout=0.0):
        super().__init__()
        self.local_model, self.self_attn = DenseGCN(dim_h), Attention(dim_h)
        self.norm1_local, self.norm1_attn, self.norm2 = (nn.LayerNorm(dim_h) for _ in range(3))
        self.dropout_local, self.dropout_attn = nn.Dropout(dropout), nn.Dropout(dropout)
        self.ff_linear1, self.ff_linear2 = nn.Linear(dim_h, 2 * dim_h), nn.Linear(2 * dim_h, dim_h)
        self.act_fn_ff = nn.ReLU()

    def forward(self, batch):
        h = batch.x
        h_in1 = h
        h_out_list = []
        if self.local_model is not None:
            h_local = self.local_model(h, batch.adj)
            h_local = self.dropout_local(h_local)
            h_local = h_in1 + h_local
            h_local = self.norm1_local(h_local)
            h_out_list.append(h_local)
        if self.self_attn is not None:
            h_attn = self.self_attn(h)
            h_attn = self.dropout_attn(h_attn)
            h_attn = h_in1 + h_attn
            h_attn = self.norm1_attn(h_attn)
            h_out_list.append(h_attn)
        h = sum(h_out_list)
        h = h + self._ff_block(h)
        h = self.norm2(h)
        batch.x = h
        return batch

    def _ff_block(self, x):
        return self.ff_linear2(self.act_fn_ff(self.ff_linear1(x)))


class GraphGPS(nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        self.encoder = nn.Linear(3, WIDTH)
        self.layers = torch.nn.Sequential(*[GPSLayer() for _ in range(layers)])
        self.post_mp = nn.Linear(WIDTH, 1)

    def forward(self, x, adj):
        batch = GraphBatch(x=self.encoder(x), adj=adj)
        for module in self.layers:
            batch = module(batch)
        return self.post_mp(batch.x.mean(1))


class GatedGCN(nn.Module):
    """benchmarking-gnns: node and edge streams, both residual."""

    def __init__(self, dim=WIDTH, residual=True):
        super().__init__()
        self.A, self.B, self.C, self.D, self.E = (nn.Linear(dim, dim) for _ in range(5))
        self.bn_node_h, self.bn_node_e = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.residual, self.batch_norm, self.dropout = residual, True, 0.0

    def forward(self, g, h, e):
        h_in = h
        e_in = e
        Ah, Bh, Dh, Eh, Ce = self.A(h), self.B(h), self.D(h), self.E(h), self.C(e)
        e = Dh.unsqueeze(2) + Eh.unsqueeze(1) + Ce
        sigma = torch.sigmoid(e) * g.unsqueeze(-1)
        h = Ah + (sigma * Bh.unsqueeze(1)).sum(2) / (sigma.sum(2) + 1e-6)
        if self.batch_norm:
            h = self.bn_node_h(h)
            e = self.bn_node_e(e)
        h = F.relu(h)
        e = F.relu(e)
        if self.residual:
            h = h_in + h
            e = e_in + e
        h = F.dropout(h, self.dropout, training=self.training)
        e = F.dropout(e, self.dropout, training=self.training)
        return h, e


class GatedGCNNet(nn.Module):
    def __init__(self, n_layers=3):
        super().__init__()
        self.embedding_h, self.embedding_e = nn.Linear(3, WIDTH), nn.Linear(1, WIDTH)
        self.layers = nn.ModuleList([GatedGCN() for _ in range(n_layers)])

    def forward(self, g, h):
        e = self.embedding_e(g.unsqueeze(-1))
        h = self.embedding_h(h)
        for conv in self.layers:
            h, e = conv(g, h, e)
        return h.mean(1)


class EGNNLayer(nn.Module):
    def __init__(self, dim=WIDTH, residual=True):
        super().__init__()
        self.edge_mlp = nn.Sequential(nn.Linear(2 * dim + 1, dim), nn.SiLU(), nn.Linear(dim, dim), nn.SiLU())
        self.node_mlp = nn.Sequential(nn.Linear(2 * dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.coord_mlp = nn.Linear(dim, 1, bias=False)
        self.residual = residual

    def coord2radial(self, coord):
        coord_diff = coord.unsqueeze(2) - coord.unsqueeze(1)
        return coord_diff.pow(2).sum(-1, keepdim=True), coord_diff

    def edge_model(self, source, target, radial):
        n = source.shape[1]
        pair = [source.unsqueeze(2).expand(-1, -1, n, -1), target.unsqueeze(1).expand(-1, n, -1, -1), radial]
        return self.edge_mlp(torch.cat(pair, dim=-1))

    def node_model(self, x, edge_attr):
        agg = edge_attr.sum(2)
        agg = torch.cat([x, agg], dim=-1)
        out = self.node_mlp(agg)
        if self.residual:
            out = x + out
        return out, agg

    def coord_model(self, coord, coord_diff, edge_feat):
        trans = coord_diff * self.coord_mlp(edge_feat)
        coord = coord + trans.mean(2)
        return coord

    def forward(self, h, coord):
        radial, coord_diff = self.coord2radial(coord)
        edge_feat = self.edge_model(h, h, radial)
        coord = self.coord_model(coord, coord_diff, edge_feat)
        h, agg = self.node_model(h, edge_feat)
        return h, coord


class EGNN(nn.Module):
    def __init__(self, n_layers=3):
        super().__init__()
        self.n_layers = n_layers
        self.embedding_in, self.embedding_out = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 1)
        for i in range(0, n_layers):
            self.add_module("gcl_%d" % i, EGNNLayer())

    def forward(self, h, x):
        h = self.embedding_in(h)
        for i in range(0, self.n_layers):
            h, x = self._modules["gcl_%d" % i](h, x)
        h = self.embedding_out(h)
        return h, x


class SchNetInteraction(nn.Module):
    def __init__(self, dim=WIDTH):
        super().__init__()
        self.mlp, self.lin1, self.lin2 = nn.Linear(1, dim), nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim)
        self.act, self.lin = nn.Softplus(), nn.Linear(dim, dim)

    def forward(self, x, dist):
        W = self.mlp(dist.unsqueeze(-1))
        x = (self.lin1(x).unsqueeze(1) * W).sum(2)
        x = self.lin2(x)
        x = self.act(x)
        return self.lin(x)


class SchNet(nn.Module):
    def __init__(self, num_interactions=3):
        super().__init__()
        self.embedding = nn.Embedding(10, WIDTH, padding_idx=0)
        self.interactions = nn.ModuleList()
        for _ in range(num_interactions):
            self.interactions.append(SchNetInteraction())
        self.lin1, self.lin2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, z, pos, batch=None):
        dist = (pos.unsqueeze(2) - pos.unsqueeze(1)).pow(2).sum(-1)
        h = self.embedding(z)
        for interaction in self.interactions:
            h = h + interaction(h, dist)
        h = self.lin1(h)
        h = F.softplus(h)
        h = self.lin2(h)
        return h.sum(1)


class PairBiasAttention(nn.Module):
    def __init__(self, dim=WIDTH, pair_dim=WIDTH):
        super().__init__()
        self.norm, self.attn, self.to_bias = nn.LayerNorm(dim), Attention(dim), nn.Linear(pair_dim, HEADS)

    def forward(self, m, z):
        return self.attn(self.norm(m), mask=self.to_bias(z).permute(0, 3, 1, 2).unsqueeze(1))


class ColumnAttention(nn.Module):
    def __init__(self, dim=WIDTH):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(dim), Attention(dim)

    def forward(self, m):
        return self.attn(self.norm(m.transpose(1, 2))).transpose(1, 2)


class OuterProductMean(nn.Module):
    def __init__(self, dim=WIDTH, hidden=4):
        super().__init__()
        self.norm, self.left, self.right = nn.LayerNorm(dim), nn.Linear(dim, hidden), nn.Linear(dim, hidden)
        self.proj_out = nn.Linear(hidden * hidden, dim)

    def forward(self, m):
        m = self.norm(m)
        outer = torch.einsum("bsic,bsjd->bijcd", self.left(m), self.right(m)) / m.shape[1]
        return self.proj_out(outer.flatten(-2))


class TriangleMultiplication(nn.Module):
    def __init__(self, dim=WIDTH, outgoing=True):
        super().__init__()
        self.norm, self.to_out = nn.LayerNorm(dim), nn.Linear(dim, dim)
        self.left, self.right, self.gate = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.mix = "bikd,bjkd->bijd" if outgoing else "bkid,bkjd->bijd"

    def forward(self, z):
        z = self.norm(z)
        out = torch.einsum(self.mix, self.left(z), self.right(z))
        return self.to_out(out) * self.gate(z).sigmoid()


class Transition(nn.Module):
    def __init__(self, dim=WIDTH):
        super().__init__()
        self.net = nn.Sequential(nn.LayerNorm(dim), Mlp(dim))

    def forward(self, x):
        return self.net(x)


class EvoformerBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.row_attn, self.col_attn, self.msa_ff = PairBiasAttention(), ColumnAttention(), Transition()
        self.outer_mean = OuterProductMean()
        self.triangle_out, self.triangle_in = TriangleMultiplication(), TriangleMultiplication(outgoing=False)
        self.pair_ff = Transition()

    def forward(self, inputs):
        m, z = inputs
        m = m + self.row_attn(m, z)
        m = m + self.col_attn(m)
        m = m + self.msa_ff(m)
        z = z + self.outer_mean(m)
        z = z + self.triangle_out(z)
        z = z + self.triangle_in(z)
        z = z + self.pair_ff(z)
        return m, z


class Evoformer(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.layers = nn.ModuleList([EvoformerBlock() for _ in range(depth)])

    def forward(self, m, z):
        inp = (m, z)
        for layer in self.layers:
            inp = layer(inp)
        m, z = inp
        return m, z


def openfold_add(m1, m2, inplace):
    if not inplace:
        m1 = m1 + m2
    else:
        m1 += m2
    return m1


class OpenFoldBlock(nn.Module):
    def __init__(self, opm_first=False):
        super().__init__()
        self.msa_att_row, self.msa_att_col, self.msa_transition = PairBiasAttention(), ColumnAttention(), Transition()
        self.msa_dropout_layer = nn.Dropout(0.0)
        self.outer_product_mean = OuterProductMean()
        self.tri_mul_out, self.tri_mul_in = TriangleMultiplication(), TriangleMultiplication(outgoing=False)
        self.pair_transition = Transition()
        self.opm_first = opm_first

    def forward(self, m: Tensor | None, z: Tensor | None, inplace_safe: bool = False):
        m = openfold_add(m, self.msa_dropout_layer(self.msa_att_row(m, z=z)), inplace=inplace_safe)
        m = openfold_add(m, self.msa_att_col(m), inplace=inplace_safe)
        m = openfold_add(m, self.msa_transition(m), inplace=inplace_safe)
        z = openfold_add(z, self.outer_product_mean(m), inplace=inplace_safe)
        z = openfold_add(z, self.msa_dropout_layer(self.tri_mul_out(z)), inplace=inplace_safe)
        z = openfold_add(z, self.msa_dropout_layer(self.tri_mul_in(z)), inplace=inplace_safe)
        z = openfold_add(z, self.pair_transition(z), inplace=inplace_safe)
        return m, z


class OpenFoldStack(nn.Module):
    def __init__(self, no_blocks=2):
        super().__init__()
        self.blocks = nn.ModuleList()
        for _ in range(no_blocks):
            self.blocks.append(OpenFoldBlock())
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.blocks_per_ckpt = None

    def _prep_blocks(self, inplace_safe):
        return [partial(b, inplace_safe=inplace_safe) for b in self.blocks]

    def forward(self, m, z, inplace_safe=False):
        blocks = self._prep_blocks(inplace_safe)
        a = (m, z)
        for b in blocks:
            a = b(*a)
        m, z = a
        s = self.linear(m[..., 0, :, :])
        return m, z, s


class ESMLayer(nn.Module):
    def __init__(self, dim=WIDTH):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(dim, HEADS)
        self.self_attn_layer_norm, self.final_layer_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.fc1, self.fc2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x, self_attn_mask=None, self_attn_padding_mask=None, need_head_weights=False):
        residual = x
        x = self.self_attn_layer_norm(x)
        x, attn = self.self_attn(
            query=x,
            key=x,
            value=x,
            key_padding_mask=self_attn_padding_mask,
            need_weights=True,
            average_attn_weights=not need_head_weights,
            attn_mask=self_attn_mask,
        )
        x = residual + x
        residual = x
        x = self.final_layer_norm(x)
        x = F.gelu(self.fc1(x))
        x = self.fc2(x)
        x = residual + x
        return x, attn


class ESM2(nn.Module):
    def __init__(self, num_layers=3):
        super().__init__()
        self.num_layers = num_layers
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH, padding_idx=1)
        self.layers = nn.ModuleList([ESMLayer() for _ in range(self.num_layers)])
        self.emb_layer_norm_after = nn.LayerNorm(WIDTH)

    def forward(self, tokens, repr_layers=(3,), need_head_weights=False):
        assert tokens.ndim == 2
        padding_mask = tokens.eq(1)
        x = self.embed_tokens(tokens)
        if padding_mask is not None:
            x = x * (1 - padding_mask.unsqueeze(-1).type_as(x))
        repr_layers = set(repr_layers)
        hidden_representations = {}
        if 0 in repr_layers:
            hidden_representations[0] = x
        x = x.transpose(0, 1)
        if not padding_mask.any():
            padding_mask = None
        for layer_idx, layer in enumerate(self.layers):
            x, attn = layer(x, self_attn_padding_mask=padding_mask, need_head_weights=need_head_weights)
            if (layer_idx + 1) in repr_layers:
                hidden_representations[layer_idx + 1] = x.transpose(0, 1)
        x = self.emb_layer_norm_after(x)
        x = x.transpose(0, 1)
        if (layer_idx + 1) in repr_layers:
            hidden_representations[layer_idx + 1] = x
        return {"logits": x, "representations": hidden_representations}


# The list


def adjacency(nodes=6):
    return torch.ones(2, nodes, nodes).tril(1).triu(-1)


def autoformer():
    return InformerEncoder([AutoformerLayer() for _ in range(3)], norm_layer=nn.LayerNorm(WIDTH))


def yolo():
    return nn.Sequential(nn.Conv2d(3, WIDTH, 3, 1, 1), YOLOC3(WIDTH, WIDTH), YOLOC2f(WIDTH, WIDTH, 2))


def timesteps():
    return torch.tensor([3, 71])


def masks():
    return torch.ones(2, 1, LENGTH), torch.ones(LENGTH, LENGTH).tril()[None]


WILD: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    # language models
    "nanoGPT": lambda: (NanoGPT(), (tokens(), tokens())),
    "minGPT": lambda: (MinGPT(), (tokens(),)),
    "nanochat": lambda: (Nanochat(), (tokens(),)),
    "modded-nanogpt": lambda: (ModdedNanoGPT(), (tokens(), tokens())),
    "llama": lambda: (MetaLlama(), (tokens(), 0)),
    "llama2.c": lambda: (Llama2c(), (tokens(),)),
    "gemma_pytorch": lambda: (Gemma(), (tokens(),)),
    "lit-gpt sequential": lambda: (LitGPT(parallel=False, post=True), (tokens(),)),
    "lit-gpt parallel": lambda: (LitGPT(parallel=True), (tokens(),)),
    "lit-gpt parallel, shared norm": lambda: (LitGPT(parallel=True, shared=True), (tokens(),)),
    "torchtitan": lambda: (TorchTitan(), (tokens(),)),
    "vllm": lambda: (VLLMModel(), (tokens(),)),
    "Megatron-LM": lambda: (Megatron(), (tokens(),)),
    "GPT-J": lambda: (GPTJ(), (tokens(),)),
    "GPT-NeoX": lambda: (GPTNeoX(use_parallel_residual=False), (tokens(),)),
    "GPT-NeoX parallel": lambda: (GPTNeoX(use_parallel_residual=True), (tokens(),)),
    "OLMo": lambda: (OLMo(), (tokens(),)),
    "OLMo norm after": lambda: (OLMo(norm_after=True), (tokens(),)),
    "mamba-minimal": lambda: (MambaMinimal(), (tokens(),)),
    "mamba_ssm": lambda: (MambaSSM(), (tokens(),)),
    "RWKV with state": lambda: (RWKVState(), (tokens(),)),
    "RWKV-LM": lambda: (RWKVTrain(), (tokens(),)),
    "RWKV-LM dropout": lambda: (RWKVTrain(dropout=0.1, pre_ffn=0), (tokens(),)),
    "RetNet": lambda: (RetNet(), (sequence(),)),
    "torchscale": lambda: (TorchScale(deepnorm=False), (tokens(),)),
    "torchscale DeepNorm": lambda: (TorchScale(deepnorm=True), (tokens(),)),
    "Hyena": lambda: (Hyena(), (tokens(),)),
    "S4": lambda: (S4Model(), (sequence(2, LENGTH, 3),)),
    "S4 pre-norm": lambda: (S4Model(prenorm=True), (sequence(2, LENGTH, 3),)),
    "Jamba": lambda: (Jamba(), (tokens(),)),
    # transformers from scratch
    "T5": lambda: (T5(), (tokens(), tokens())),
    "BERT-pytorch": lambda: (BertPytorch(), (tokens(), torch.ones(2, LENGTH, dtype=torch.long))),
    "Annotated Transformer": lambda: (AnnotatedTransformer(), (tokens(), tokens(), *masks())),
    "fairseq pre-norm": lambda: (FairseqEncoder(normalize_before=True), (tokens(),)),
    "fairseq post-norm": lambda: (FairseqEncoder(normalize_before=False), (tokens(),)),
    "x-transformers": lambda: (XTransformer(), (tokens(),)),
    "x-transformers cross": lambda: (XTransformer(cross_attend=True, scale_residual=True), (tokens(), sequence())),
    "x-transformers post-norm": lambda: (XTransformer(pre_norm=False), (tokens(),)),
    "iTransformer": lambda: (ITransformer(), (sequence(2, LENGTH, 3),)),
    "Autoformer": lambda: (autoformer(), (sequence(),)),
    "Universal Transformer": lambda: (UniversalTransformer(), (sequence(),)),
    "DETR": lambda: (DETR(normalize_before=False), (image(WIDTH, 2), None, image(WIDTH, 2))),
    "DETR pre-norm": lambda: (DETR(normalize_before=True), (image(WIDTH, 2), None, image(WIDTH, 2))),
    "SAM two-way": lambda: (SAMTwoWay(), (image(WIDTH, 2), image(WIDTH, 2), sequence(2, 3, WIDTH))),
    "former": lambda: (PostNormClassifier(), (tokens(),)),
    "Decision Transformer": lambda: (
        DecisionTransformer(),
        (torch.arange(4).expand(2, 4), sequence(2, 4, 3), sequence(2, 4, 2), sequence(2, 4, 1)),
    ),
    # vision transformers
    "vit-pytorch": lambda: (LucidViT(), (image(),)),
    "MLP-Mixer": lambda: (MLPMixer(), (image(),)),
    "Perceiver": lambda: (Perceiver(), (sequence(2, 3, 3, WIDTH),)),
    "CLIP": lambda: (CLIP(), (image(), tokens())),
    "MONAI ViT": lambda: (MonaiViT(), (image(),)),
    "DINOv2": lambda: (DINOv2(), (image(),)),
    "DINOv2 drop path": lambda: (DINOv2(drop_path_rate=0.3), (image(),)),
    "BEiT": lambda: (BEiT(), (image(),)),
    "BEiT without layer scale": lambda: (BEiT(init_values=None), (image(),)),
    "CaiT": lambda: (CaiT(), (image(),)),
    "Swin": lambda: (Swin(), (image(),)),
    "Swin checkpointed": lambda: (Swin(use_checkpoint=True), (image(),)),
    "SAM encoder": lambda: (SAMEncoder(), (image(),)),
    "ResMLP": lambda: (ResMLP(), (image(),)),
    "ResMLP checkpointed": lambda: (ResMLP(use_checkpoint=True, drop_path=0.1), (image(),)),
    "gMLP": lambda: (gMLP(), (sequence(),)),
    "FNet": lambda: (FNet(), (sequence(),)),
    "FNet post-norm": lambda: (FNetPostNorm(), (sequence(),)),
    # diffusion
    "DiT": lambda: (DiT(), (image(), timesteps(), torch.tensor([1, 7]))),
    "PixArt": lambda: (PixArt(), (image(), timesteps(), sequence())),
    "U-ViT": lambda: (UViT(), (image(), timesteps())),
    "Flux": lambda: (Flux(), (sequence(), sequence(2, 3, WIDTH), timesteps(), sequence(2, WIDTH))),
    "SD3": lambda: (SD3(), (sequence(), timesteps(), sequence(2, 3, WIDTH))),
    "VQGAN decoder": lambda: (VQDecoder(), (image(4, 4),)),
    "DDPM UNet": lambda: (DDPMUNet(), (image(), timesteps())),
    "LDM UNet": lambda: (LDMUNet(), (image(4), timesteps(), sequence(2, 3, WIDTH))),
    "Diffusion Policy": lambda: (DiffusionPolicyUNet(), (sequence(2, LENGTH, 3), timesteps())),
    # convolutional networks
    "pytorch-cifar ResNet": lambda: (KuangliuResNet(KuangliuBasicBlock), (image(),)),
    "pytorch-cifar PreActResNet": lambda: (KuangliuResNet(KuangliuPreActBlock), (image(),)),
    "pytorch-cifar ResNeXt": lambda: (KuangliuResNet(KuangliuBottleneck), (image(),)),
    "pytorch-cifar SENet": lambda: (KuangliuResNet(SEPreActBlock), (image(),)),
    "torchvision BasicBlock": lambda: (TVResNet(TVBasicBlock), (image(),)),
    "torchvision Bottleneck": lambda: (TVResNet(TVBottleneck), (image(),)),
    "Wide-ResNet": lambda: (WideResNet(), (image(),)),
    "MobileNetV2": lambda: (MobileNetV2(), (image(),)),
    "EfficientNet": lambda: (EfficientNet(), (image(),)),
    "EDSR": lambda: (EDSR(), (image(),)),
    "RCAN": lambda: (RCAN(), (image(),)),
    "ESRGAN": lambda: (ESRGAN(), (image(),)),
    "SwinIR": lambda: (SwinIR(), (image(),)),
    "NAFNet": lambda: (NAFNet(), (image(),)),
    "ConvNeXt": lambda: (ConvNeXt(ConvNeXtBlock), (image(),)),
    "ConvNeXtV2": lambda: (ConvNeXt(ConvNeXtV2Block, drop_path_rate=0.2), (image(),)),
    "PoolFormer": lambda: (PoolFormer(), (image(),)),
    "AlphaZero": lambda: (AlphaZero(), (image(),)),
    "CycleGAN": lambda: (CycleGANGenerator(), (image(),)),
    "YOLO": lambda: (yolo(), (image(),)),
    # audio and time series
    "Whisper": lambda: (Whisper(), (sequence(2, 4, 2 * LENGTH), tokens())),
    "conformer": lambda: (LucidConformer(), (sequence(),)),
    "conformer in Sequential": lambda: (SequentialConformer(), (sequence(), torch.tensor([8, 6]))),
    "ESPnet": lambda: (ESPnetEncoder(), (sequence(2, LENGTH, 4),)),
    "ESPnet stochastic depth": lambda: (ESPnetEncoder(rate=0.3), (sequence(2, LENGTH, 4),)),
    "WaveNet": lambda: (WaveNet(), (sequence(2, 1, 12),)),
    "VITS WN": lambda: (VITSWN(), (sequence(2, WIDTH, LENGTH), torch.ones(2, 1, LENGTH))),
    "VITS encoder": lambda: (VITSEncoder(), (sequence(2, WIDTH, LENGTH), torch.ones(2, 1, LENGTH))),
    "HiFi-GAN": lambda: (HiFiGAN(HiFiResBlock1), (sequence(2, 4, 6),)),
    "HiFi-GAN ResBlock2": lambda: (HiFiGAN(HiFiResBlock2), (sequence(2, 4, 6),)),
    "EnCodec": lambda: (Encodec(), (sequence(2, 1, 16),)),
    "TCN": lambda: (TCN(), (sequence(2, 3, 12),)),
    "N-BEATS": lambda: (NBeats(), (sequence(2, WIDTH), torch.ones(2, WIDTH))),
    "TSMixer": lambda: (TSMixer(), (sequence(),)),
    # tables, sets, graphs, proteins
    "FT-Transformer": lambda: (FTTransformer(), (sequence(4, 5),)),
    "FT-Transformer post-norm": lambda: (FTTransformer(prenormalization=False), (sequence(4, 5),)),
    "rtdl ResNet": lambda: (TabularResNet(), (sequence(4, 5),)),
    "residual MLP": lambda: (ResidualMLP(use_checkpoint=False), (image(),)),
    "residual MLP checkpointed": lambda: (ResidualMLP(use_checkpoint=True), (image(),)),
    "stochastic depth": lambda: (StochasticDepthNet(), (sequence(),)),
    "Set Transformer": lambda: (SetTransformer(), (sequence(2, 5, 3),)),
    "Point Transformer": lambda: (PointTransformer(), (sequence(10, 3), sequence(10, 3), torch.tensor([10]))),
    "PointMLP": lambda: (PointMLP(), (sequence(2, 10, 3),)),
    "GraphGPS": lambda: (GraphGPS(), (sequence(2, 6, 3), adjacency())),
    "GatedGCN": lambda: (GatedGCNNet(), (adjacency(), sequence(2, 6, 3))),
    "EGNN": lambda: (EGNN(), (sequence(2, 6, 3), sequence(2, 6, 3))),
    "SchNet": lambda: (SchNet(), (torch.randint(1, 10, (2, 6)), sequence(2, 6, 3))),
    "Evoformer": lambda: (Evoformer(), (sequence(2, 3, 5, WIDTH), sequence(2, 5, 5, WIDTH))),
    "OpenFold": lambda: (OpenFoldStack(), (sequence(2, 3, 5, WIDTH), sequence(2, 5, 5, WIDTH))),
    "ESM-2": lambda: (ESM2(), (tokens(),)),
}
