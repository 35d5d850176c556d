"""Language models with state spaces, recurrences and convolutions, as people write them: see the package."""

# Style rules that code in the wild does not follow.
# ruff: noqa: B905, E741, N803, N806, RUF059, SIM108
# mypy: ignore-errors

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from wild.llamas import MixtureOfExperts
from wild.parts import LENGTH, VOCAB, WIDTH, Attention, DropPath, Mlp, RMSNorm, SwiGLU, default, sequence, tokens


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


WILD = {
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
}
