"""A model of each type of transformers that runs, and its inputs: found by trying what models are known to take."""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from by_hand import BY_HAND, by_hand
from torch import nn

from rewire.copies import Inputs
from rewire.errors import UnknownName
from rewire.patterns.tiny import tiny_model
from rewire.patterns.transformers import example_inputs, inputs_named, required

#: Inputs beside those that are required, in the order in which they are tried.
GIVEN = (
    ["input_ids"],
    ["pixel_values"],
    [],
    ["input_features"],
    ["input_values"],
    ["inputs_embeds"],
    ["input_ids", "decoder_input_ids"],
    ["input_ids", "pixel_values"],
    ["input_ids", "bbox"],
    ["input_ids", "bbox", "pixel_values"],
    ["pixel_values", "decoder_input_ids"],
    ["input_features", "decoder_input_ids"],
    ["input_values", "decoder_input_ids"],
    ["input_features", "input_features_mask"],
    ["input_ids", "input_features"],
    ["input_ids", "encoder_hidden_states"],
    ["inputs_embeds", "encoder_hidden_states"],
    ["encoder_hidden_states"],
    ["query_embeds", "encoder_hidden_states"],
    ["inputs"],
    ["flattened_patches", "decoder_input_ids"],
    ["flattened_patches"],
    ["input_ids", "visual_feats", "visual_pos"],
    ["states", "actions", "rewards", "returns_to_go", "timesteps"],
    ["input_ids", "input_features", "is_longer"],
    ["pixel_values", "target_sizes"],
)

#: Shapes of inputs that the registry does not know, or that have several, without the batch: sizes, or settings.
SHAPES: dict[str, list[tuple[int | str, ...]]] = {
    "input_features": [
        ("num_mel_bins", 64),
        (64, "num_mel_bins"),
        (1, 64, "num_mel_bins"),
        (64, 80),
        (80, 64),
        (64, 160),
    ],
    "input_values": [(1600,), (1, 1600), (64, "num_mel_bins"), (64, "hidden_size"), (1, 3200)],
    "pixel_values": [
        (3, 64, 64),
        (3, 32, 32),
        (1, 3, 32, 32),
        (2, 3, 64, 64),
        (4, 3, 32, 32),
        (3, 224, 224),
        (1, 64, 64),
    ],
    "image": [(3, 32, 32)],
    "flattened_patches": [(16, "patch_embed_hidden_size"), (16, 770), (16, 194)],
    "mel_spectrogram": [(80, 64), ("mel_dim", 64)],
    "audio_mel": [(64, "input_feat_size")],
    "text_features": [(12, "hidden_size")],
    "visual_feats": [(12, "visual_feat_dim")],
    "visual_pos": [(12, 4)],
    "states": [(12, "state_dim")],
    "actions": [(12, "act_dim")],
    "rewards": [(12, 1)],
    "returns_to_go": [(12, 1)],
    "noise_embeds": [(12, "hidden_size")],
    "context_hidden_states": [(12, "hidden_size")],
    "context": [(16, "hidden_size")],
    "patch_embeds": [("hidden_size", 4, 4)],
    "hidden_states": [(3, 64, 64), (3, 32, 32), (64, "input_dim"), (64, 80), (80, 64)],
}

#: The same for whole numbers.
WHOLE: dict[str, list[tuple[int | str, ...]]] = {
    "inputs": [(12,)],
    "timesteps": [(12,)],
    "is_longer": [(1,)],
    "freq": [(1,)],
    "past_values_padding": [("context_length",)],
    "pixel_attention_mask": [(16,)],
    "audio_input_ids": [(12, "num_codebooks"), (12,)],
    "audio_mel_mask": [(64,)],
}

WIDTHS = (True, False)
SECONDS = 40  # of trying


def running_model(model_type: str, run: Callable[[nn.Module, Inputs], Any]) -> tuple[nn.Module, Inputs]:
    """The first of a model with narrow and one with wide layers that runs in both modes, and the inputs with which."""
    if model_type in BY_HAND:
        return by_hand(model_type)
    errors: list[Exception] = []
    end = time.monotonic() + SECONDS
    for narrow in WIDTHS:
        try:
            model = tiny_model(model_type, narrow=narrow)
            if type(model).forward is nn.Module.forward:
                raise NotImplementedError("its model class has no forward")
        except (ImportError, UnknownName, NotImplementedError):
            raise
        except Exception as error:
            errors.append(error)
            continue
        for make in itertools.takewhile(lambda _: time.monotonic() < end, tries(model)):
            try:
                inputs = make()
                for training in (False, True):
                    run(model.train(training), inputs)
                return model, inputs
            except Exception as error:
                errors.append(error)
    raise errors[0]


def tries(model: nn.Module) -> Iterator[Callable[[], Inputs]]:
    """Functions that make inputs that the model may take."""
    yield lambda: example_inputs(model)
    needed = required(model)
    sets = [needed | set(names) for names in GIVEN if set(names) <= taken(model) | needed]
    for names in sets:
        yield lambda names=names: inputs_named(model, names)
    for names in sets:
        shaped = sorted(names & (SHAPES | WHOLE).keys())
        for shapes in itertools.product(*(_sizes(model.config, (SHAPES | WHOLE)[name]) for name in shaped)):
            if shaped:
                given = dict(zip(shaped, shapes, strict=True))
                yield lambda names=names, given=given: _reshaped(model, names, given)


def taken(model: nn.Module) -> set[str]:
    return set(inspect.signature(model.forward).parameters)


def _sizes(config: Any, shapes: list[tuple[int | str, ...]]) -> list[tuple[int, ...]]:
    sizes = [[getattr(config, size, None) if isinstance(size, str) else size for size in shape] for shape in shapes]
    return [tuple(shape) for shape in sizes if all(isinstance(size, int) for size in shape)]


def _reshaped(model: nn.Module, names: set[str], shapes: dict[str, tuple[int, ...]]) -> Inputs:
    args, kwargs = inputs_named(model, names - shapes.keys())
    generator = torch.Generator().manual_seed(0)
    for name, shape in shapes.items():
        whole = name in WHOLE
        kwargs[name] = torch.ones(2, *shape).long() if whole else torch.randn(2, *shape, generator=generator)
    return args, kwargs
