"""What all Hugging Face models share: inputs that their configs describe."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rewire.copies import Inputs, private, seeded
from rewire.errors import BadExampleInputs
from rewire.patterns.pattern import Pattern, is_pretrained, register_pattern
from rewire.patterns.tiny import tiny_twin

if TYPE_CHECKING:
    from transformers import PreTrainedConfig as Config

_SEQUENCE = 12

#: Inputs that a model gets if it accepts them, even if it does not need them.
_WELCOME = {"bbox", "future_values", "future_time_features"}


def example_inputs(model: nn.Module) -> Inputs:
    """Two short random sequences, images or sounds, as the model's config describes them."""
    config: Config = model.config
    main = getattr(model, "main_input_name", "input_ids")
    names = {*([main] if isinstance(main, str) else main)} & _taken(model) | required(model)
    if hasattr(config, "text_config") and hasattr(config, "vision_config"):
        names |= {"input_ids", "pixel_values", *{"image_grid_thw"} & _taken(model)}
    if getattr(config, "is_encoder_decoder", False):
        names |= {"decoder_input_ids"} & _taken(model)
    inputs = inputs_named(model, names | _WELCOME & _taken(model))
    return with_image_tokens(model, inputs) if {"input_ids", "pixel_values"} <= names else inputs


def with_image_tokens(model: Any, inputs: Inputs) -> Inputs:
    """The same inputs, with as many image tokens as the model replaces by images."""
    args, given = inputs
    token = _said(model.config, "image_token_id", "image_token_index", "media_placeholder_token_id")
    if token is None or not hasattr(model, "get_image_features"):
        return inputs
    alone: Any = private(model).eval()
    taken = inspect.signature(alone.get_image_features).parameters.keys() & given.keys()
    with torch.no_grad(), seeded(0, alone):
        made = alone.get_image_features(**{name: given[name] for name in taken})
    features = getattr(made, "pooler_output", made)
    rows = sum(f.shape[:-1].numel() for f in (features if isinstance(features, (tuple, list)) else [features]))
    ids = given["input_ids"]
    images = ids.new_full((len(ids), rows // len(ids)), token)
    ids = torch.cat([images, ids.masked_fill(ids == token, 3)], dim=1)
    kinds = {"mm_token_type_ids": (ids == token).long()} if "mm_token_type_ids" in _taken(model) else {}
    return args, {**given, "input_ids": ids, **kinds}


def _taken(model: nn.Module) -> set[str]:
    """Names of all parameters of the model's forward."""
    return set(inspect.signature(model.forward).parameters)


def required(model: nn.Module) -> set[str]:
    """Names of the inputs without which the model's forward cannot be called."""
    parameters = inspect.signature(model.forward).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return {p.name for p in named if p.default is p.empty}


def inputs_named(model: nn.Module, names: set[str]) -> Inputs:
    """Inputs of these names, as the model's config describes them.

    Raises:
        BadExampleInputs: it is not known what an input of one of these names is.
    """
    config: Config = model.config
    weight = next(model.parameters())
    inputs: dict[str, Any] = {}
    makers = _MAKERS | (_OF_ANY_SIZE if {"grid_thw", "image_grid_thw"} & {*names} else {})
    for name in sorted(names):
        if name not in makers:
            raise BadExampleInputs(f"its input '{name}' is of no kind that the registry of architectures knows")
        inputs[name] = makers[name](config).to(weight.device)
        if inputs[name].is_floating_point():
            inputs[name] = inputs[name].to(weight.dtype)
    if _said(config, "use_cache") is not None or _said(getattr(config, "text_config", None), "use_cache") is not None:
        inputs["use_cache"] = False
    return (), inputs


def _token_ids(config: Config) -> torch.Tensor:
    text = getattr(config, "text_config", None) or config
    words = _said(text, "vocab_size", "decoder_vocab_size", "codebook_size", "audio_vocab_size") or 64
    ids = torch.randint(3, words, (2, _SEQUENCE), generator=_generator())
    return ids.masked_fill(ids == (getattr(text, "pad_token_id", None) or 0), 3)


def _boxes(config: Config) -> torch.Tensor:
    corners = torch.randint(0, 32, (2, _SEQUENCE, 2), generator=_generator())
    return torch.cat([corners, corners + 8], dim=-1)


def _pixels(config: Config) -> torch.Tensor:
    vision = _vision(config)
    size = _said(vision, "image_size", "img_size") or 64
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    frames = [vision.num_frames] if getattr(vision, "num_frames", None) else []
    return _noise(2, *frames, _channels(vision), height, width)


def _frames(config: Config) -> torch.Tensor:
    vision = _vision(config)
    size = _said(vision, "image_size", "crop_size") or 64
    frames = _said(vision, "num_frames", "frames_per_clip") or 4
    return _noise(2, frames, _channels(vision), size, size)


def _patches(config: Config) -> torch.Tensor:
    """Patches of images, one below the other, for vision encoders that take images of any size."""
    vision = _vision(config)
    values = _channels(vision) * vision.patch_size**2 * (getattr(vision, "temporal_patch_size", None) or 1)
    return _noise(int(_grid(config).prod(-1).sum()), values)


def _grid(config: Config) -> torch.Tensor:
    """Time, height and width in patches, of two images."""
    side = 2 * (getattr(_vision(config), "spatial_merge_size", None) or 2)
    return torch.tensor([[1, side, side]] * 2)


def _vision(config: Config) -> Config:
    return getattr(config, "vision_config", None) or config


def _channels(vision: Config) -> int:
    return _said(vision, "num_channels", "in_channels", "in_chans") or 3


def _spectrogram(config: Config) -> torch.Tensor:
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
        return _noise(2, config.num_mel_bins, 2 * config.max_source_positions)
    audio = getattr(config, "encoder_config", None) or getattr(config, "audio_config", None) or config
    features = (
        "num_mel_bins",
        "feature_projection_input_dim",
        "input_feat_size",
        "n_mels",
        "model_in_dim",
        "input_dim",
    )
    return _noise(2, 64, _said(audio, *features) or 80)


def _waveform(config: Config) -> torch.Tensor:
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):  # it is a spectrogram after all
        return _noise(2, config.max_length, config.num_mel_bins)
    if getattr(config, "conv_stride", None):
        return _noise(2, 20 * math.prod(config.conv_stride))
    return _noise(2, 1, 4 * (_said(config, "hop_length", "frame_size") or 400))


def _series(config: Config) -> torch.Tensor:
    length = _said(config, "context_length", "prediction_length", "patch_length") or 32
    lags = max(getattr(config, "lags_sequence", None) or [0])
    channels = [config.num_input_channels] if hasattr(config, "num_input_channels") else []
    return _noise(2, length + lags, *channels)


def _said(config: Config, *names: str) -> Any:
    """The first of these settings that the config has."""
    return next((value for value in (getattr(config, name, None) for name in names) if value is not None), None)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_generator())


def _states(config: Config) -> torch.Tensor:
    return _noise(2, _SEQUENCE, _said(config, "hidden_size", "d_model", "embed_dim", "dim"))


_MAKERS: dict[str, Callable[[Config], torch.Tensor]] = {
    "input_ids": _token_ids,
    "decoder_input_ids": _token_ids,
    "qformer_input_ids": _token_ids,
    "attention_mask": lambda config: torch.ones(2, _SEQUENCE, dtype=torch.long),
    "mask": lambda config: torch.ones(2, _SEQUENCE, dtype=torch.long),
    "bbox": _boxes,
    "inputs_embeds": _states,
    "hidden_states": _states,
    "query_embeds": _states,
    "encoder_hidden_states": _states,
    "pixel_values": _pixels,
    "pixel_values_videos": _frames,
    "grid_thw": _grid,
    "image_grid_thw": _grid,
    "input_features": _spectrogram,
    "spectrogram": _spectrogram,
    "input_features_mask": lambda config: torch.ones(2, max(_spectrogram(config).shape[1:]), dtype=torch.long),
    "input_values": _waveform,
    "past_values": _series,
    "past_time_features": lambda config: _noise(*_series(config).shape[:2], config.num_time_features),
    "future_values": lambda config: _noise(2, config.prediction_length),
    "future_time_features": lambda config: _noise(2, config.prediction_length, config.num_time_features),
    "past_observed_mask": lambda config: torch.ones_like(_series(config)),
}

#: Inputs for images as patches, with a grid that gives their sizes.
_OF_ANY_SIZE = {"pixel_values": _patches, "hidden_states": _patches}

register_pattern(
    "transformers",
    Pattern(
        description="any Hugging Face transformers model",
        matches=is_pretrained,
        example_inputs=example_inputs,
        twin=tiny_twin,
    ),
)


def register_transformers(*model_types: str, **names: Any) -> None:
    """Register the pattern ``model_types[0]``: models that are of, or contain one of, these types.

    Args:
        model_types: ``model_type`` of their configs.
        names: what they share; see `Pattern`.
    """
    register_pattern(model_types[0], Pattern(model_types=frozenset(model_types), **names))
