"""rewire.eject: write a rewired model as plain Python files and weights."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from rewire.code.edited import is_edited, original_class
from rewire.console import watched
from rewire.ejecting.modules import RUNTIME, Module, is_cut
from rewire.ejecting.runtime import ROOTS, Runtime
from rewire.errors import EditError, RewireError
from rewire.passes.checks import check_loaded, check_unwrapped
from rewire.patterns import first_given, is_pretrained, patterns_for
from rewire.runtime.connection import learned_connections
from rewire.saving.folder import own_memory, ties_of
from rewire.saving.recipes import is_recipe

_LICENCE = """\
# Parts of rewire (Apache License 2.0), gathered by rewire.eject.
#
# Licensed under the Apache License, Version 2.0 (the "License"); you may not use this file except in compliance with
# the License. You may obtain a copy of the License at http://www.apache.org/licenses/LICENSE-2.0. Unless required by
# applicable law or agreed to in writing, software distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
"""


def eject(model: nn.Module, folder: str | os.PathLike[str], *, force: bool = False) -> Path:
    """Write a rewired model as Python files that do not need rewire, with its weights.

    Beside the module with the edited classes stands one file of what they need of rewire. A Hugging Face model gets a
    folder that ``AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)`` (or the like) loads; of others,
    the class is made as the original one is, with the same arguments, and ``model.safetensors`` has its weights.

    Sums of states are plain PyTorch operations there; Triton kernels stay here.

    Args:
        model: a rewired model, frozen ones too, on any device but meta. It stays as it is.
        folder: made if it does not exist. If it holds anything, `eject` has to have written it.
        force: write into any folder; files of the same names are replaced.

    Returns:
        The module with the edited classes.

    Raises:
        RewireError: the model was not rewired, is on the meta device, or is one part of a pipeline; or the folder
            holds other files.
        EditError: a class or function of the model cannot be imported by another file.
        WrappedModel: the model is sharded, wrapped or compiled.

    Example:
        >>> print(rewire.eject(rewired, "ejected"))  # doctest: +ELLIPSIS
        ejected/rewired_...py
    """
    target = Path(folder)
    if not force:
        check_free(target)
    found = learned_connections(model, "there is nothing to eject")
    check_unwrapped(model)
    check_loaded(model, "ejected")
    if is_cut(model):
        raise RewireError(f"{type(model).__name__} is one part of a pipeline: eject the whole model.")
    roots = [(type(c.layout.topology).__module__, type(c.layout.topology).__name__) for c in found.values()]
    prepare = first_given(patterns_for(model), "prepare")
    own = [(prepare.__module__, prepare.__name__)] if prepare else []
    runtime = Runtime([*ROOTS, *roots, *own])
    try:
        module = Module(model, runtime, *(runtime.name_of(*each) for each in own))
    except EditError as error:
        raise EditError(f"{type(model).__name__} cannot be ejected: {error}.") from error
    cls = original_class(model) if is_edited(model) else type(model)
    stem = f"rewired_{cls.__module__.rpartition('.')[2]}"
    target.mkdir(parents=True, exist_ok=True)
    heading = f'{_LICENCE}"""What {stem}.py needs of rewire, gathered from its modules; sums are plain PyTorch."""\n'
    path, text = target / f"{stem}.py", module.text()
    (target / f"{RUNTIME}.py").write_text(runtime.text(heading, callers=text), encoding="utf-8")
    path.write_text(text, encoding="utf-8")
    if is_pretrained(model):
        _save_pretrained(model, cls, target, f"{stem}.{module.root}")
    else:
        state = _weights(model)
        ties = ties_of(state)  # as safetensors.torch.load_model expects them: once
        save_file({k: own_memory(v) for k, v in state.items() if k not in ties}, target / "model.safetensors")
    return path


def check_free(folder: Path) -> None:
    """Refuse to write over what somebody else wrote.

    Raises:
        RewireError: the path is a file, or the folder holds files and `eject` has not written it.
    """
    if folder.exists() and not folder.is_dir():
        raise RewireError(f"'{folder}' is a file: give a folder.")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / f"{RUNTIME}.py").exists():
        raise RewireError(
            f"'{folder}' holds other files, which eject could write over: give another folder, or force=True (--force)."
        )


def _save_pretrained(model: Any, cls: type, folder: Path, name: str) -> None:
    """Weights and config, which says where the class is."""
    # Under the names that the model has: transformers renames those of older checkpoints for its own classes only.
    with _quiet():
        model.save_pretrained(folder, state_dict=_weights(model), save_original_format=False)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["auto_map"] = dict.fromkeys(_auto_classes(model.config, cls), name)
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the progress bars of transformers, unless somebody looks at them."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled() and not watched()
    if shown:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """The state dict without recipes: the text of the module says what the weights mean."""
    return {name: value for name, value in model.state_dict().items() if not is_recipe(name)}


def _auto_classes(config: Any, cls: type) -> list[str]:
    """The Auto classes of transformers that make ``cls`` of its config."""
    from transformers.models.auto import modeling_auto

    found = []
    for name, auto in vars(modeling_auto).items():
        mapping = getattr(auto, "_model_mapping", None)
        if name.startswith("AutoModel") and mapping is not None and type(config) in mapping:
            made = mapping[type(config)]
            if cls in (made if isinstance(made, (list, tuple)) else (made,)):
                found.append(name)
    return found or ["AutoModel"]
