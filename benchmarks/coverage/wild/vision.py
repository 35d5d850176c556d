"""Vision transformers, as people write them: see the package."""

# Style rules that code in the wild does not follow.
# ruff: noqa: B007, N801, N802, N803, N806, RUF059, SIM108
# mypy: ignore-errors

from __future__ import annotations

import math
from collections import OrderedDict
from functools import partial

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from einops.layers.torch import Rearrange, Reduce
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from wild.parts import (
    HEADS,
    LENGTH,
    VOCAB,
    WIDTH,
    Attention,
    DropPath,
    Mlp,
    exists,
    image,
    sequence,
    tokens,
)


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


WILD = {
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
}
