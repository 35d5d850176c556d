"""Audio and time series, as people write them: see the package."""

# Style rules that code in the wild does not follow.
# ruff: noqa: B007, B905, E731
# mypy: ignore-errors

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from einops.layers.torch import Rearrange
from torch import Tensor, nn

from wild.parts import HEADS, LENGTH, VOCAB, WIDTH, Attention, Mlp, sequence, tokens
from wild.transformers_by_hand import QKVAttention
from wild.vision import PreNormFn


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


WILD = {
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
}
