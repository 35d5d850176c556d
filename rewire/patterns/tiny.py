"""Small random models by name: what the registry is tested on, and what the command line shows."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from rewire.errors import UnknownName

_VOCABULARY = 97

#: Settings whose name contains one of these are rates of what training leaves out or masks: 0.
_RANDOM = ("drop", "mask_time_prob", "mask_feature_prob")

#: Limit of a setting that counts something; a default below it stays.
_LIMITS: dict[str, int] = {
    name: limit
    for limit, names in {
        0: "num_kv_shared_layers num_hash_layers",
        1: "n_group topk_group first_k_dense_replace num_nextn_predict_layers",
        2: "num_stages num_key_value_heads num_experts_per_tok moe_topk swa_num_key_value_heads o_groups index_n_heads",
        3: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers",
        4: """num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads
              swa_num_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts
              num_conv_pos_embedding_groups window_size""",
        8: "qk_rope_head_dim qk_nope_head_dim rotary_dim patch_size num_mel_bins num_conv_pos_embeddings laurel_rank",
        16: """head_dim v_head_dim d_kv kv_lora_rank q_lora_rank o_lora_rank index_head_dim embedding_size embed_dim
               hidden_size_per_layer_input max_source_positions projection_dim swa_head_dim d_rel""",
        32: "image_size moe_intermediate_size shared_expert_intermediate_size",
        64: """hidden_size d_model n_embd dim word_embed_proj_dim max_position_embeddings max_target_positions
               n_positions max_seq_len""",
        128: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff hidden_dim",
        _VOCABULARY: "vocab_size vocab_size_per_layer_input unpadded_vocab_size",
    }.items()
    for name in names.split()
}

#: Settings with one value for each stage of a hierarchical model.
_STAGES: dict[str, tuple[int, ...]] = {
    "depths": (2, 2),
    "hidden_sizes": (16, 32),
    "num_heads": (2, 4),
    "conv_dim": (16, 16),
    "conv_kernel": (4, 4),
    "conv_stride": (4, 4),
}

#: What the rules above do not say, by model type.
_SPECIAL: dict[str, dict[str, Any]] = {
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "glm5_next_text": {"num_key_value_heads": 4},
    "inkling2_vision": {"text_hidden_size": 64},
}

#: Auto classes in the order in which they are tried; a model with several parts is made without a head.
_HEADS = ("SpeechSeq2Seq", "Seq2SeqLM", "CTC", "MaskedLM", "CausalLM", "ImageClassification")


def tiny_config(model_type: str) -> Any:
    """A small transformers config of that type: few narrow layers, a small vocabulary, nothing random.

    Raises:
        UnknownName: transformers has no such model type; near names are given.
        ImportError: transformers is missing or cannot be imported.
    """
    with _library("transformers") as library:
        if model_type not in library.CONFIG_MAPPING:
            raise _unknown(f"transformers has no model type '{model_type}'.", model_type, library.CONFIG_MAPPING)
        cls = library.CONFIG_MAPPING[model_type]
    return cls(**_settings(cls), architectures=[])


def tiny_model(model_type: str, seed: int = 0) -> nn.Module:
    """A `tiny_config` model of that type with random weights, on the CPU, with the head of its usual task.

    Raises:
        UnknownName: transformers has no such model type, or it is no model by itself.
        ImportError: transformers is missing or cannot be imported.
    """
    config = tiny_config(model_type)
    several = {"vision_config", "audio_config"} & set(config.sub_configs)
    with _library("transformers") as library, torch.random.fork_rng(devices=[]):
        heads = () if several else [getattr(library, f"AutoModelFor{head}") for head in _HEADS]
        auto = next((auto for auto in (*heads, library.AutoModel) if type(config) in auto._model_mapping), None)
        if auto is None:
            raise UnknownName(f"transformers has no auto class for '{model_type}': it is a part of other models.")
        torch.manual_seed(seed)
        return auto.from_config(config)


def tiny_twin(model: nn.Module) -> nn.Module:
    """A small model of the same classes as a transformers model, with random weights on the CPU.

    Its config has the model's own flags and names (of activations, of kinds of norms), and small sizes.
    """
    config: Any = model.config
    cls: Any = type(config)
    flags = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(cls)
        if isinstance(getattr(config, field.name, None), (bool, str)) and field.name not in cls.sub_configs
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return type(model)(cls(**{**_settings(cls), **flags}))


def timm_model(name: str, **options: Any) -> nn.Module:
    """timm's model of that name with random weights; ``options`` go to `timm.create_model`.

    Raises:
        UnknownName: timm has no such model; near names are given.
        ImportError: timm is missing or cannot be imported.
    """
    with _library("timm") as library:
        if not library.is_model(name):
            raise _unknown(f"timm has no model '{name}'.", name, library.list_models())
        return library.create_model(name, pretrained=False, **options)


def _settings(cls: Any) -> dict[str, Any]:
    """Keyword arguments for a tiny config of class ``cls``, those of the configs inside it included."""
    settings: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        default = field.default_factory() if callable(field.default_factory) else field.default
        value = _setting(field.name, default)
        if value is not None:
            settings[field.name] = value
    for name, part in cls.sub_configs.items():
        if dataclasses.is_dataclass(part):
            settings[name] = _settings(part)
    return {**settings, **_SPECIAL.get(cls.model_type, {})}


def _setting(name: str, default: Any) -> Any:
    """Small value of the setting ``name``; None if its default stays."""
    if name in _STAGES and (default is None or isinstance(default, (tuple, list))):
        return list(_STAGES[name])
    if isinstance(default, bool) or not isinstance(default, (int, float)):
        return None
    if any(word in name for word in _RANDOM):
        return type(default)(0)
    if name.endswith(("_token_id", "_token_index")) and default >= _VOCABULARY:
        return _VOCABULARY - 1 - default % 8
    return min(default, _LIMITS[name]) if name in _LIMITS else None


@contextlib.contextmanager
def _library(name: str) -> Iterator[Any]:
    """The library of that name; in this context, too, what it fails to import is told plainly."""
    try:
        library = importlib.import_module(name)
    except Exception as error:  # a torchvision that was built for another torch raises RuntimeError
        raise _unusable(name, error) from error
    try:
        yield library
    except ImportError as error:  # transformers imports its models when they are asked for
        raise _unusable(name, error) from error


def _unusable(name: str, error: BaseException) -> ImportError:
    if isinstance(error, ModuleNotFoundError) and error.name == name:
        return ImportError(f"{name} is not installed: pip install 'rewire[models]'.")
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    return ImportError(f"{name} is installed but fails on import: {type(error).__name__}: {error}")


def _unknown(what: str, name: str, known: Iterable[str]) -> UnknownName:
    near = difflib.get_close_matches(name, list(known), n=3)
    return UnknownName(what + (f" Did you mean {' or '.join(map(repr, near))}?" if near else ""))
