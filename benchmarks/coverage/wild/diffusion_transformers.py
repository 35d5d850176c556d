"""Diffusion transformers, as people write them: see the package."""

# Style rules that code in the wild does not follow.
# ruff: noqa: B007, N806, SIM108
# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from wild.parts import HEADS, WIDTH, Attention, DropPath, Mlp, image, sequence, timestep_embedding, timesteps


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


WILD = {
    "DiT": lambda: (DiT(), (image(), timesteps(), torch.tensor([1, 7]))),
    "PixArt": lambda: (PixArt(), (image(), timesteps(), sequence())),
    "U-ViT": lambda: (UViT(), (image(), timesteps())),
    "Flux": lambda: (Flux(), (sequence(), sequence(2, 3, WIDTH), timesteps(), sequence(2, WIDTH))),
    "SD3": lambda: (SD3(), (sequence(), timesteps(), sequence(2, 3, WIDTH))),
}
