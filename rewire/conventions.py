"""Conventions of PyTorch models: what their parts are called, and which modules are norms and linear maps.

Most of a network can be read from its structure. For the rest, rewire relies on names: all of them are here, each with
models that use it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence

from torch import nn

from rewire.mixes.norms import recognise

#: Convolutions whose weight is [in, out / groups, ..].
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED)

# Kinds of branches.

#: Kind of a branch -> pattern for the paths and classes of the modules in it. The first match counts.
BRANCHES = {
    # crossattention (BERT), encoder_attn (BART), EncDecAttention (T5), multihead_attn (nn.TransformerDecoderLayer)
    "cross-attention": re.compile(r"cross_?att|enc(oder|dec)_?att|encdecatt|multihead_attn|_mha_block", re.I),
    # self_attn (Llama), attn (GPT-2), SelfAttention (T5), msa (HRFormer), _sa_block (nn.TransformerEncoderLayer)
    "attention": re.compile(r"attn|attention|self_att|msa\b|_sa_block", re.I),
    # conv1 (ResNet), conv_dw (ConvNeXt)
    "conv": re.compile(r"conv", re.I),
    # mlp (Llama), ffn (DistilBERT), ff (DiT), feed_forward (wav2vec 2.0), block_sparse_moe (Mixtral), fc1 (BART),
    # intermediate (BERT), _ff_block and linear1 (nn.TransformerEncoderLayer), DenseReluDense (T5)
    "ffn": re.compile(
        r"mlp|ffn|ff\b|feed_?forward|moe|expert|fc\d?\b|intermediate|_ff_block|densere|linear\d?\b", re.I
    ),
}
#: Modules that add positions to the stream and are not branches: pos_embed (ViT), embed_positions (BART), ppeg
#: (TransMIL), peg (Twins), cpe (DaViT), pos_conv_embed (wav2vec 2.0). Not pos_ffn (SpeechBrain), a feed-forward.
POSITIONAL = re.compile(
    r"^(?!.*(ffn|feed_?forward|mlp|wise)).*?(^|[._])(pos|positions?|positional|rel_pos|pe|ppeg|peg|cpe)"
    r"([._0-9]|$|_?emb|_?conv|_?enc)",
    re.I,
)

# Projections of attentions.


def is_joint_attention(module: nn.Module | None) -> bool:
    """Whether a module is a torch.nn.MultiheadAttention, called as one: ImageBind's subclass takes a single input."""
    if not isinstance(module, nn.MultiheadAttention):
        return False
    return [*inspect.signature(module.forward).parameters][:3] == ["query", "key", "value"]


#: Names of separate query, key and value projections.
QKV = (
    ("q_proj", "k_proj", "v_proj"),  # Llama, OPT, BART
    ("query", "key", "value"),  # BERT, ViT
    ("to_q", "to_k", "to_v"),  # diffusers
    ("q", "k", "v"),  # T5, SegFormer
    ("wq", "wk", "wv"),  # Meta's Llama, torchtitan
    ("q_lin", "k_lin", "v_lin"),  # DistilBERT, XLM
    ("query_proj", "key_proj", "value_proj"),  # DeBERTa, ProphetNet
)
#: All three in one: qkv (timm), Wqkv (MPT), qkv_proj (Phi 3), c_attn (GPT-2), in_proj (nn.MultiheadAttention),
#: query_key_value (BLOOM, GPT-NeoX).
FUSED_QKV = re.compile(r"qkv|(^|_)(c_attn|in_proj|query_key_value)(_|$)", re.I)

# Roles of single weights, by the names of parameters from the model's root.

#: The last layer of a branch: o_proj and down_proj (Llama), c_proj (GPT-2), fc2 (BART, timm), w2 (Meta's Llama),
#: dense_4h_to_h (BLOOM), lin2 (DistilBERT), to_out (diffusers), output.dense (BERT).
LAST_LAYER = re.compile(
    r"(^|\.)(\w*down_proj|output_linear|w2|c_proj|o_proj|out_proj|fc2|lin2|linear2|wo|proj|dense_4h_to_h|to_out|dense|"
    r"output|out)(\.|$)"
)
#: The network's output layer: lm_head (Llama), head (timm), classifier (BERT), score (GPT-2), qa_outputs (BERT),
#: proj_out (DiT), fc (ResNet), output (torchtitan), tail (EDSR).
OUTPUT_LAYER = re.compile(
    r"(^|\.)(\w*head|classifier|score|qa_outputs|proj_out\w*|fc|out|output|tail|logits|to_logits)(\.|$)", re.I
)
#: Embeddings that are bare parameters: cls_token and pos_embed (ViT), relative_position_bias_table (Swin),
#: latents (Perceiver), queries (Q-Former).
EMBEDDING_TABLE = re.compile(r"embed|token|(^|[._])pos|position|table|latents|queries", re.I)
#: Routers of mixtures of experts: mlp.gate (Mixtral, Qwen3-MoE), mlp.router (gpt-oss), gate.wg (Hunyuan).
ROUTER = re.compile(r"(^|\.)(gate|router|wg)(\.|$)", re.I)
#: The experts, stacked in one parameter or not: mlp.experts.gate_up_proj (Mixtral), GptOssExperts.
EXPERTS = re.compile("expert", re.I)
#: Gate and up projections in one weight of stacked experts: gate_up_proj (Mixtral, gpt-oss).
FUSED_GATE = re.compile("gate_up")
#: Layers that compute scales and shifts from a condition: adaLN_modulation (DiT), img_modulation (HunyuanVideo), film.
MODULATION = re.compile(r"ada_?ln|modulation|film", re.I)

# Kinds of classes and functions.

#: Classes other than nn.Linear whose ``weight`` is [out, in]: MixtralTopKRouter, DeepseekV3TopkRouter, MoEGate,
#: FalconLinear.
LINEAR_CLASS = re.compile("router|gate|linear", re.I)
#: Functions and modules that do not map zero to zero: gates (sigmoid), weights that sum to one (softmax), masks.
NOT_ZERO_AT_ZERO = re.compile(r"sigmoid|softmax|softplus|exp|cos|topk|one_hot|ones|where", re.I)
#: Names and classes of norms: LlamaRMSNorm, BatchNorm2d, input_layernorm.
NORM = re.compile("norm", re.I)
_ADAPTIVE_NORM = re.compile(r"Ada\w*Norm|Ada(ptive|Group|Layer|RMS)")


def is_norm(module: nn.Module) -> bool:
    """Whether ``module`` normalises, and has no other parameters than gains and shifts.

    Either the name of its class says so (nn.GroupNorm, ConvNextLayerNorm), or its forward computes an RMSNorm or a
    LayerNorm, whatever its name (`rewire.mixes.norms`).
    """
    if NORM.search(type(module).__name__):
        return not matrices(module)
    return recognise(module)[0] is not None


def is_adaptive_norm(module: nn.Module) -> bool:
    """Whether ``module`` normalises with gains and shifts that it computes from a condition (AdaLayerNormZero)."""
    return _ADAPTIVE_NORM.match(type(module).__name__) is not None


def is_linear(module: nn.Module) -> bool:
    """Whether ``module`` is a linear map or a convolution: its ``weight`` is [out, in, ..] or a transpose of that."""
    return isinstance(module, (nn.Linear, *CONVOLUTIONS)) or is_conv1d(module)


def is_conv1d(module: nn.Module) -> bool:
    """Whether ``module`` is transformers' Conv1D (GPT-2), a linear map whose weight is [in, out]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def out_features(projection: nn.Module | None) -> int | None:
    """Number of outputs of a linear map, nn.Linear or transformers' Conv1D; None for anything else."""
    size = getattr(projection, "out_features", getattr(projection, "nf", None))
    return size if isinstance(size, int) else None


def matrices(module: nn.Module) -> int:
    """Number of weight matrices and convolution kernels in a module."""
    return sum(is_matrix(parameter.shape) for parameter in module.parameters())


def is_matrix(shape: Sequence[int]) -> bool:
    """Whether a weight of this shape mixes channels: more than one of its dimensions is long.

    Others are vectors: gains, scales and shifts, [D] or [D, 1, 1].
    """
    return sum(size != 1 for size in shape) >= 2
