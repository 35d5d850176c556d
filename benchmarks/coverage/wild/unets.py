"""UNets, as people write them: see the package."""

# Style rules that code in the wild does not follow.
# ruff: noqa: E731, N802, N806, RUF059, SIM108
# mypy: ignore-errors

from __future__ import annotations

from functools import partial

import torch
import torch as th
from einops import rearrange
from torch import nn
from torch.utils.checkpoint import checkpoint

from wild.parts import LENGTH, WIDTH, Attention, Mlp, image, sequence, timestep_embedding, timesteps


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


WILD = {
    "VQGAN decoder": lambda: (VQDecoder(), (image(4, 4),)),
    "DDPM UNet": lambda: (DDPMUNet(), (image(), timesteps())),
    "LDM UNet": lambda: (LDMUNet(), (image(4), timesteps(), sequence(2, 3, WIDTH))),
    "Diffusion Policy": lambda: (DiffusionPolicyUNet(), (sequence(2, LENGTH, 3), timesteps())),
}
