"""`rewire.eject`: write a rewired model as plain Python files and weights."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from rewire.code.edited import is_edited, original_class
from rewire.console import watched
from rewire.ejecting.connecting import CONFIG, EJECTED, part_of
from rewire.ejecting.modules import PART_OF, RUNTIME, Module, is_cut
from rewire.ejecting.runtime import ROOTS, Runtime
from rewire.errors import EditError, RewireError
from rewire.files import check_no_file, make_folder, staged
from rewire.passes.checks import check_loaded, check_unwrapped
from rewire.patterns import first_given, is_pretrained, patterns_for
from rewire.runtime.connection import learned_connections
from rewire.saving.folder import own_memory, ties_of
from rewire.saving.recipes import is_recipe

logger = logging.getLogger("rewire.ejecting")

_WEIGHTS = "model.safetensors"
_SHARDS = re.compile(r"model-\d{5}-of-\d{5}\.safetensors|model\.safetensors\.index\.json")  # of transformers

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

    One module has the edited classes; a second file has the parts of rewire that they need. The folder of a Hugging
    Face model is loaded by ``AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)``, or another Auto
    class. The class of any other model takes the arguments of the original, and ``model.safetensors`` has the weights.

    Nothing is replaced until everything is written. Source files, config and weights share a digest, and refuse parts
    of another model: if the process is killed while it replaces files, the mixture does not load.

    Ejected models sum states by plain PyTorch operations, without Triton kernels.

    Args:
        model: a rewired model, perhaps frozen, on any device but meta. It is not changed.
        folder: made if it does not exist. If it is not empty, it has to hold this same model, whose weights are
            replaced.
        force: write into any folder. This replaces files with the same names, and removes shards of older weights.

    Returns:
        Path of the module with the edited classes.

    Raises:
        RewireError: the model was not rewired, is on the meta device, or is one part of a pipeline; or the folder
            holds other files, or another model.
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
    cls = original_class(model) if is_edited(model) else type(model)
    auto = _auto_classes(model.config, cls) if is_pretrained(model) else {}
    others = [other for other in dict.fromkeys(auto.values()) if other is not cls]
    runtime = Runtime([*ROOTS, *roots, *own, *([(part_of.__module__, PART_OF)] if others else [])])
    try:
        module = Module(model, runtime, "".join(runtime.name_of(*each) for each in own), others)
    except EditError as error:
        raise EditError(f"{type(model).__name__} cannot be ejected: {error}.") from error
    stem = f"rewired_{cls.__module__.rpartition('.')[2]}"
    heading = f'{_LICENCE}"""What {stem}.py needs of rewire, gathered from its modules; sums are plain PyTorch."""\n'
    text = module.text()
    texts = {f"{stem}.py": text, f"{RUNTIME}.py": runtime.text(heading, callers=text)}
    make_folder(target)
    with staged(target) as stage:
        names = {name: f"{stem}.{module.names.get(other, module.root)}" for name, other in auto.items()}
        _write(model, texts, stage, names)
        if not force:
            _check_same(stage, target)
    for old in target.iterdir():
        if _SHARDS.fullmatch(old.name):
            old.unlink(missing_ok=True)
    return target / f"{stem}.py"


def _write(model: nn.Module, texts: dict[str, str], folder: Path, auto: dict[str, str]) -> None:
    """Write the files of a model: source files, weights, and config with the Auto classes ``auto``."""
    config: Any = model.config if is_pretrained(model) else None
    digest = _digest([*texts.values(), config.to_json_string() if config else ""])
    for file, text in texts.items():
        (folder / file).write_text(text.replace(EJECTED, digest), encoding="utf-8")
    if is_pretrained(model):
        _save_pretrained(model, folder, auto, digest)
    else:
        state = _weights(model, digest)
        ties = ties_of(state)  # tied weights once, as safetensors.torch.load_model expects
        save_file({k: own_memory(v) for k, v in state.items() if k not in ties}, folder / _WEIGHTS)


def check_free(folder: Path) -> None:
    """Check that ``folder`` has no files that `eject` did not write.

    Raises:
        RewireError: the path is a file, or the folder has other files.
    """
    check_no_file(folder)
    if folder.is_dir() and any(folder.iterdir()) and not (folder / f"{RUNTIME}.py").exists():
        raise RewireError(
            f"'{folder}' holds other files, which eject might overwrite: give another folder, or force=True (--force)."
        )


def _check_same(stage: Path, folder: Path) -> None:
    """Check that ``folder`` has the same ejected model, not edited since; only weights may differ.

    Raises:
        RewireError: other files differ.
    """
    names = sorted(path.name for path in stage.iterdir() if (folder / f"{RUNTIME}.py").exists())
    differing = [name for name in names if not _is_same(stage / name, folder / name)]
    if differing:
        raise RewireError(
            f"'{folder}' holds another model, or files that were changed since: {', '.join(differing)}. Give another "
            "folder, or force=True (--force)."
        )


def _is_same(new: Path, old: Path) -> bool:
    if old.is_symlink() or not old.is_file():
        return False
    return new.name == _WEIGHTS or new.read_bytes() == old.read_bytes()


def _digest(texts: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:32]


def _save_pretrained(model: Any, folder: Path, auto: dict[str, str], digest: str) -> None:
    """Save weights, and the config, which says where the class is."""
    from transformers.models.auto import modeling_auto

    # Under the model's own names: transformers only renames those of older checkpoints for its own classes.
    # In one file: among several, some could be left from an older model.
    with _quiet():
        state = _weights(model, digest)
        model.save_pretrained(folder, state_dict=state, save_original_format=False, max_shard_size=sys.maxsize)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config[CONFIG] = digest
    kept = {name: value for name, value in config.get("auto_map", {}).items() if not hasattr(modeling_auto, name)}
    config["auto_map"] = kept | auto  # keeps the entries of a model with custom code for config and tokenizer
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """A context without transformers' progress bars, unless they would be watched."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled() and not watched()
    if shown:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _weights(model: nn.Module, digest: str) -> dict[str, Tensor]:
    """The state dict with the digest in place of recipes: the module's source says what the weights mean."""
    mark = torch.tensor(list(digest.encode()), dtype=torch.uint8)
    return {name: mark.clone() if is_recipe(name) else value for name, value in model.state_dict().items()}


def _auto_classes(config: object, cls: type) -> dict[str, type]:
    """Auto class of transformers -> the class that it makes for a config; those that make ``cls`` come first.

    All of them have to be registered for the ejected file: others would make the plain model.
    """
    from transformers.models.auto import modeling_auto

    found = {}
    for name, auto in vars(modeling_auto).items():
        mapping = getattr(auto, "_model_mapping", None)
        if name.startswith("Auto") and mapping is not None and type(config) in mapping:
            made = mapping[type(config)]
            several = made if isinstance(made, (list, tuple)) else (made,)
            found[name] = cls if cls in several else several[0]
            if not found[name].__module__.startswith("transformers"):
                logger.warning(
                    "transformers.%s makes %s, which was registered in this process and takes precedence over the "
                    "ejected folder. In such a process, load the model by the from_pretrained of the ejected class.",
                    name,
                    found[name].__qualname__,
                )
    found.setdefault("AutoModel", cls)
    return dict(sorted(found.items(), key=lambda item: item[1] is not cls))
