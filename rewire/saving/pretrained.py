"""rewire.from_pretrained: rewired models of transformers, as saved by their own save_pretrained."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn

from rewire.errors import RewireError, UnknownName
from rewire.runtime.recipe import read_recipe
from rewire.saving.checkpoint import read_connections
from rewire.saving.folder import RECIPE
from rewire.saving.recipes import EXTRA_STATE, Recipe, check_shapes, is_recipe, layouts_of, rewired_by

#: What to do with models of other libraries that have a ``save_pretrained``.
_OTHERS = (
    "Models of other libraries (diffusers, timm) are saved by rewire.save, and loaded by rewire.load(folder, model) "
    "into a plain model that was made from its config."
)


def from_pretrained(folder: str | os.PathLike[str], model_class: object = None, **options: object) -> nn.Module:
    """Load a rewired transformers model from a folder that its ``save_pretrained`` wrote (or a Trainer's checkpoint).

    The class's own ``from_pretrained`` would ignore the connection weights. Here it gets a model that was rewired by
    the recipe beside them, and handles dtypes, devices and shards as always.

    Args:
        folder: on this machine; models of a hub are fetched by ``huggingface_hub.snapshot_download``.
        model_class: class of the model; default: the saved one, from transformers.
        options: of ``model_class.from_pretrained``.

    Returns:
        The rewired model, in evaluation mode. Its start (what ``reset_parameters`` sets) is ``"paper"``.

    Raises:
        RewireError: the folder holds no rewired model, a damaged one, or one of another library; or
            ``distributed_config`` has a ``pp_size``.
        UnknownName: transformers has no such class, or a topology is not known here.
        ImportError: transformers is missing.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
        >>> llama = rewire.compile(LlamaForCausalLM(LlamaConfig(**sizes)), "denseformer")
        >>> llama.save_pretrained("folder")
        >>> list(rewire.connections(rewire.from_pretrained("folder")))
        ['model.layers']
    """
    if (Path(folder) / RECIPE).is_file() and not (Path(folder) / "config.json").is_file():
        raise RewireError(f"'{folder}' was written by rewire.save: load it with rewire.load(folder, model).")
    if (getattr(options.get("distributed_config"), "pp_size", None) or 1) > 1:
        raise RewireError(
            "the pipelines of transformers (pp_size) send one hidden state from stage to stage, not a stream: load "
            "with pp_size=1, cut the model, call rewire.pipeline_stage on each part, and use a pipeline of torch."
        )
    import transformers

    recipes = _recipes(Path(folder))
    cls: Any = _saved_class(folder) if model_class is None else model_class
    if not issubclass(cls, transformers.PreTrainedModel):
        raise RewireError(f"{cls.__name__} is no model of transformers. {_OTHERS}")
    loaded = _rewiring(cls, recipes).from_pretrained(folder, **options)
    model = loaded[0] if isinstance(loaded, tuple) else loaded  # with output_loading_info
    for path, recipe in _renamed(model, recipes).items():
        model.get_submodule(path).convert_from(recipe)
    return loaded


def _rewiring(cls: Any, recipes: dict[str, Recipe]) -> Any:
    """A class like ``cls`` that rewires each instance when it is made."""

    class Rewiring(cls):
        def __init__(self, config: object, *args: object, **kwargs: object) -> None:
            super().__init__(config, *args, **kwargs)
            self.__class__ = cls
            rewired: Any = rewired_by(self, _renamed(self, recipes), "paper")
            self.__class__ = type(rewired)
            self.__dict__ = rewired.__dict__

    Rewiring.__name__, Rewiring.__module__ = cls.__name__, cls.__module__
    return Rewiring


def _renamed(model: object, recipes: dict[str, Recipe]) -> dict[str, Recipe]:
    """Recipes under the model's present names; some architectures are saved under older names."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    renamed = {}
    renamings = [entry for entry in get_model_conversion_mapping(model) if isinstance(entry, WeightRenaming)]
    for path, recipe in recipes.items():
        name = path + EXTRA_STATE
        for renaming in renamings:
            name, _ = renaming.rename_source_key(name)
        renamed[name.removesuffix(EXTRA_STATE)] = recipe
    return renamed


def _saved_class(folder: str | os.PathLike[str]) -> Any:
    import transformers

    try:
        names = transformers.AutoConfig.from_pretrained(folder).architectures or [""]
    except ValueError as error:  # of its config.json: another library's
        raise RewireError(f"transformers does not know the model in '{folder}'. {_OTHERS}") from error
    found = getattr(transformers, names[0], None) if names[0].isidentifier() else None
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise UnknownName(f"transformers has no model class '{names[0]}', named in '{folder}': pass model_class.")
    return found


def _recipes(folder: Path) -> dict[str, Recipe]:
    """Recipes in the saved state dict, by the path of their connection."""
    state = read_connections(folder)
    recipes = {name.removesuffix(EXTRA_STATE): read_recipe(state[name]) for name in state if is_recipe(name)}
    if not recipes:
        raise RewireError(f"'{folder}' holds no rewired model: no file in it has connection weights with their recipe.")
    shapes = {name: value.shape for name, value in state.items()}
    for place, layout in layouts_of(recipes).items():
        check_shapes(place, recipes[place], layout, "paper", shapes)
    return recipes
