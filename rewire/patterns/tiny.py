"""Small random models by name, for tests of the registry and for the command line."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rewire.errors import UnknownName, did_you_mean
from rewire.version import how_to_install

if TYPE_CHECKING:
    from transformers import PreTrainedConfig as Config

_VOCABULARY = 97

#: Settings with these words in their names are rates of what training drops or masks: 0.
_RANDOM = ("drop", "mask_time_prob", "mask_feature_prob")

#: Limit of a setting that counts something; a default below it stays.
_LIMITS: dict[str, int] = {
    name: limit
    for limit, names in {
        0: "num_kv_shared_layers num_hash_layers",
        1: "n_group topk_group first_k_dense_replace num_nextn_predict_layers",
        2: "num_stages num_key_value_heads num_experts_per_tok moe_topk swa_num_key_value_heads o_groups index_n_heads",
        3: """num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers depth
              encoder_num_layers decoder_num_layers encoder_n_layers decoder_n_layers num_self_attends_per_block""",
        4: """num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads
              swa_num_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts
              num_conv_pos_embedding_groups window_size mm_tokens_per_image linear_num_heads""",
        8: """qk_rope_head_dim qk_nope_head_dim rotary_dim patch_size num_mel_bins num_conv_pos_embeddings laurel_rank
              num_queries""",
        16: """head_dim v_head_dim d_kv kv_lora_rank q_lora_rank o_lora_rank index_head_dim embedding_size embed_dim
               chunk_size mamba_chunk_size linear_head_dim
               hidden_size_per_layer_input max_source_positions swa_head_dim d_rel num_latents""",
        32: "image_size moe_intermediate_size shared_expert_intermediate_size",
        64: """hidden_size d_model d_latents n_embd dim word_embed_proj_dim projection_dim out_hidden_size
               max_position_embeddings max_target_positions n_positions max_seq_len""",
        128: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff hidden_dim",
        _VOCABULARY: "vocab_size vocab_size_per_layer_input unpadded_vocab_size",
    }.items()
    for name in names.split()
}

#: Settings that stay small whatever the widths are: numbers of layers, of experts, of words.
_COUNTS = {name for name in _LIMITS if re.search("layers?$|depth$|experts|moe_topk|group$|vocab_size", name)}

#: Settings with one value for each stage of a hierarchical model.
_STAGES: dict[str, tuple[int, ...]] = {
    "depths": (2, 2),
    "hidden_sizes": (16, 32),
    "num_heads": (2, 4),
    "conv_dim": (16, 16),
    "conv_kernel": (4, 4),
    "conv_stride": (4, 4),
}

#: Rotary embeddings of time, height and width share the head's dimensions in these model types.
_MULTIMODAL_ROPE = (
    *("cosmos3_edge_text", "glm4v_text", "glm_image_text", "glm_ocr_text"),
    *("paddleocr_vl_text", "qwen2_5_omni_text", "qwen2_5_vl_text", "qwen2_vl_text"),
)
_ROPE = {"rope_type": "default", "rope_theta": 1e4}

#: Exceptions to the rules above, by model type.
_SPECIAL: dict[str, dict[str, Any]] = {
    **{name: {"head_dim": 16} for name in ("hunyuan_v1_dense", "hunyuan_v1_moe")},
    **{name: {"prediction_length": 8} for name in ("autoformer", "informer", "time_series_transformer")},
    **{name: {"rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3]}} for name in _MULTIMODAL_ROPE},
    "ernie4_5_vl_moe_text": {"rope_parameters": {**_ROPE, "mrope_section": [3, 3, 2]}, "moe_k": 2},
    "glm4v_moe_text": {"rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}},
    **{name: {"num_key_value_heads": 4} for name in ("axk2", "deepseek_v32", "glm_moe_dsa", "mistral_large4_text")},
    **{name: {"window_size": 32} for name in ("exaone4_5_vision", "qwen2_5_omni_vision_encoder", "qwen2_5_vl_vision")},
    **{name: {"vocab_size": _VOCABULARY} for name in ("wav2vec2-bert", "wav2vec2-conformer")},
    "reformer": {"axial_pos_embds_dim": [16, 48], "axial_pos_shape": [3, 4]},
    "squeezebert": {"embedding_size": 64},
    "step3p5": {"sliding_window": 8},
    "xmod": {"default_language": "en_XX"},
    "longcat_flash": {"head_dim": 8},
    "mimi": {"upsample_groups": 64},
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]]},
    "mamba2": {"num_heads": 4, "head_dim": 32, "n_groups": 1},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 32},
    "deepseek_ocr2_text": {
        "num_experts_per_tok": 2,
        "n_routed_experts": 4,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "hunyuan_vl_text": {"head_dim": 16, "rope_parameters": {**_ROPE, "mrope_section": [2, 2, 2, 2]}},
    "ernie4_5_moe": {"moe_k": 2},
    "kosmos_2_text_model": {"attention_heads": 4, "embed_dim": 64},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "glm5_next_text": {"num_key_value_heads": 4},
    "inkling2_vision": {"text_hidden_size": 64},
    "vibevoice_acoustic_tokenizer": {"num_filters": 4},
}

#: Auto classes in the order in which they are tried; a model with several parts is made without a head.
_HEADS = ("SpeechSeq2Seq", "Seq2SeqLM", "CTC", "MaskedLM", "CausalLM", "ImageClassification")


def tiny_config(model_type: str, narrow: bool = True, **settings: object) -> Config:
    """A small transformers config of that type: few narrow layers, a small vocabulary, nothing random.

    Args:
        model_type: as transformers names it.
        narrow: whether widths are small, too. A config's default widths always fit together.
        settings: of the config, in place of small ones.

    Raises:
        UnknownName: transformers has no such model type; near names are given.
        ImportError: transformers is missing or cannot be imported.
    """
    with _library("transformers") as library:
        if model_type not in library.CONFIG_MAPPING:
            told = f"transformers has no model type '{model_type}'."
            if "/" in model_type:
                told += " Give a type, such as 'llama', not a repository."
            raise _unknown(told, model_type, library.CONFIG_MAPPING)
        cls = library.CONFIG_MAPPING[model_type]
    return cls(**{**_settings(cls, narrow), **settings}, architectures=[])


def tiny_model(model_type: str, seed: int = 0, **settings: Any) -> nn.Module:
    """A `tiny_config` model of that type with random weights, on the CPU, with the head of its usual task.

    ``settings`` go to `tiny_config`.

    Raises:
        UnknownName: transformers has no such model type, or no model of it.
        ImportError: transformers is missing or cannot be imported.
    """
    config = tiny_config(model_type, **settings)
    several = {"vision_config", "audio_config"} & set(config.sub_configs)
    with _library("transformers") as library, torch.random.fork_rng(devices=[]):
        heads = () if several else [getattr(library, f"AutoModelFor{head}") for head in _HEADS]
        auto = next((auto for auto in (*heads, library.AutoModel) if type(config) in auto._model_mapping), None)
        make = auto.from_config if auto else getattr(_part(library, type(config)), "_from_config", None)
        if make is None:
            raise UnknownName(f"transformers has no model class for '{model_type}'.")
        torch.manual_seed(seed)
        return make(config)


def _part(library: Any, config: type) -> Any:
    """The model class for such configs, which have no auto class if they are parts of other models; or None."""
    try:
        module = importlib.import_module(config.__module__.replace("configuration_", "modeling_"))
    except ModuleNotFoundError:
        return None
    classes: list[Any] = [cls for cls in vars(module).values() if inspect.isclass(cls)]
    models = [cls for cls in classes if issubclass(cls, library.PreTrainedModel)]
    whole = [cls for cls in models if cls.config_class is config and not cls.__name__.endswith("PreTrainedModel")]
    return next((cls for cls in whole if cls.__name__.endswith("Model")), whole[-1] if whole else None)


def tiny_twin(model: nn.Module) -> nn.Module:
    """A small model of the same classes as a transformers model, with random weights on the CPU.

    Its config has the model's own flags and names (of activations, of kinds of norms), and small sizes.
    """
    config: Config = model.config
    cls = type(config)
    flags = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(cls)
        if isinstance(getattr(config, field.name, None), (bool, str)) and field.name not in cls.sub_configs
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return type(model)(cls(**{**_settings(cls), **flags}))


def timm_model(name: str, **options: object) -> nn.Module:
    """timm's model of that name with random weights; ``options`` go to `timm.create_model`.

    Raises:
        UnknownName: timm has no such model; near names are given.
        ImportError: timm is missing or cannot be imported.
    """
    with _library("timm") as library:
        if not library.is_model(name):
            raise _unknown(f"timm has no model '{name}'.", name, library.list_models())
        return library.create_model(name, pretrained=False, **options)


def _settings(cls: type[Config], narrow: bool = True) -> dict[str, Any]:
    """Keyword arguments for a tiny config of class ``cls``, including those of nested configs."""
    settings: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        default = field.default_factory() if callable(field.default_factory) else field.default
        value = _setting(field.name, default, narrow)
        if value is not None:
            settings[field.name] = value
    for name, part in _parts(cls).items():
        settings[name] = {"model_type": part.model_type, **_settings(part, narrow)}
    return {**settings, **_SPECIAL.get(cls.model_type, {})}


#: Nested configs that stay as they are: their stages have to fit the modules that read them.
_AS_THEY_ARE = {"backbone_config"}


def _parts(cls: type[Config]) -> dict[str, Any]:
    """Classes of the configs nested in one of class ``cls``; where any class is allowed, that of the default."""
    parts = {name: part for name, part in cls.sub_configs.items() if dataclasses.is_dataclass(part)}
    if len(parts) < len(cls.sub_configs):
        with contextlib.suppress(Exception):  # some have no default
            defaults = cls()
            made = {
                name: type(getattr(defaults, name, None))
                for name in cls.sub_configs.keys() - parts.keys() - _AS_THEY_ARE
            }
            parts |= {name: part for name, part in made.items() if getattr(part, "model_type", "timm")[:4] != "timm"}
    return parts


def _setting(name: str, default: object, narrow: bool) -> Any:
    """The small value of the setting ``name``; None if its default stays."""
    if narrow and name in _STAGES and (default is None or isinstance(default, (tuple, list))):
        return list(_STAGES[name])
    if isinstance(default, bool) or not isinstance(default, (int, float)):
        return None
    if any(word in name for word in _RANDOM):
        return type(default)(0)
    if name.endswith(("_token_id", "_token_index")) and default >= _VOCABULARY:
        return _VOCABULARY - 1 - default % 8
    return min(default, _LIMITS[name]) if name in (_LIMITS if narrow else _COUNTS) else None


@contextlib.contextmanager
def _library(name: str) -> Iterator[Any]:
    """The library of that name; in this context, failed imports of its own raise plain errors."""
    try:
        library = importlib.import_module(name)
    except Exception as error:  # a torchvision built for another torch raises RuntimeError
        raise _unusable(name, error) from error
    try:
        yield library
    except ImportError as error:  # transformers imports its models lazily
        raise _unusable(name, error) from error


def _unusable(name: str, error: BaseException) -> ImportError:
    if isinstance(error, ModuleNotFoundError) and error.name == name:
        return ImportError(f"{name} is not installed: {how_to_install('timm' if name == 'timm' else 'models')}.")
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    told = f"{name} is installed but fails on import: {type(error).__name__}: {error}"
    if "torchvision::" in str(error):
        told += (
            ". The installed torchvision was built for another build of torch. Install the one for yours (the same "
            "version, CPU or CUDA, from where torch came), or uninstall it: only timm needs it."
        )
    return ImportError(told)


def _unknown(what: str, name: str, known: Iterable[str]) -> UnknownName:
    return UnknownName(what + did_you_mean(name, known))
