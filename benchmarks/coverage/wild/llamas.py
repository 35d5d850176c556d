"""Llama and its kin, as people write them: see the package."""

# Style rules that code in the wild does not follow.
# ruff: noqa: B007, B905, C408, N806, RUF005, SIM108
# mypy: ignore-errors

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from wild.parts import HEADS, VOCAB, WIDTH, Attention, Mlp, RMSNorm, RotaryAttention, SwiGLU, rotary_angles, tokens


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


WILD = {
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
}
