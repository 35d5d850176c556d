"""Transformers from scratch, as people write them: see the package."""

# Style rules that code in the wild does not follow.
# ruff: noqa: B905, E741, F841, N803, N806, RUF005, RUF059
# mypy: ignore-errors

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wild.parts import (
    HEADS,
    LENGTH,
    VOCAB,
    WIDTH,
    Attention,
    Mlp,
    RMSNorm,
    exists,
    image,
    masks,
    sequence,
    tokens,
)


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


def autoformer():
    return InformerEncoder([AutoformerLayer() for _ in range(3)], norm_layer=nn.LayerNorm(WIDTH))


WILD = {
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
}
