"""rewire.save and rewire.load: a rewired model in a folder, as safetensors and a JSON recipe.

Nothing is pickled, and nothing that is read becomes code. ``rewire.json`` lists the files that belong to it, and is
moved into place last, in one step: whenever a save is killed, the folder holds the old model or the new one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from rewire.attributes import CONNECTIONS
from rewire.copies import M
from rewire.errors import RewireError, WrappedModel, check_positive
from rewire.files import make_folder, staged, token_of, tokens
from rewire.placement import is_dtensor
from rewire.runtime.connection import Connection, SeparateNorms, learned_connections
from rewire.runtime.recipe import parsed
from rewire.saving.recipes import Recipe, described, difference, first_line, is_recipe, rewired_by
from rewire.version import __version__

RECIPE = "rewire.json"
#: The version of the folder's format. Raise it whenever older files would be misread.
_FORMAT = 2
_FILE = re.compile(r"weights-([0-9a-f]{8})-\d{5}\.safetensors")

Part = Literal["all", "connections"]
T = TypeVar("T")


def save(
    model: nn.Module, folder: str | os.PathLike[str], *, weights: Part = "all", max_shard_bytes: int = 5 * 10**9
) -> None:
    """Save a rewired model, which may be frozen: its weights as safetensors, and how it was rewired as JSON.

    A model that was saved in ``folder`` before is replaced in one step; other files there are left alone.

    Args:
        model: a rewired model. Tied weights are written once.
        folder: created if it does not exist.
        weights: ``"all"``, or only those of the ``"connections"``, for a base model that is kept elsewhere.
        max_shard_bytes: largest size of a file, unless it holds a single tensor.

    Raises:
        RewireError: the model was not rewired, is wrapped, lacks blocks that it had then, or holds tensors that are no
            plain ones.
        WrappedModel: its parameters are sharded.
        ValueError: ``weights`` or ``max_shard_bytes`` has no such value.

    Example:
        >>> rewire.save(rewired, "folder")
    """
    _check_part(weights)
    check_positive("max_shard_bytes", max_shard_bytes, 5e9)
    found = learned_connections(model, "there is no recipe to save. Use torch.save or save_pretrained")
    state = _part(model, weights)
    _check_savable(state)
    recipe = {
        "format": _FORMAT,
        "versions": {"rewire": __version__, "torch": str(torch.__version__)},
        "model": type(model).__name__,
        "start": next(iter(found.values())).start,
        "trunks": described(model),
        "weights": weights,
    }
    _check_complete(model, found.values())
    ties = ties_of(state)
    kept = {name: value.detach() for name, value in state.items() if name not in ties}
    _write(Path(folder), recipe | {"tied": ties}, _shards(kept, max_shard_bytes))


def _check_complete(model: nn.Module, connections: Iterable[Connection]) -> None:
    """Refuse a model whose blocks were deleted since it was rewired: no plain model would be rewired so.

    Raises:
        RewireError: it lacks a block.
    """
    there = {path for path, _ in model.named_modules(remove_duplicate=False)}
    for connection in connections:
        sites = () if connection.trunk is None else connection.trunk.sites
        gone = next((site.block for site in sites if site.block not in there), None)
        if gone is not None:
            raise RewireError(
                f"trunk '{connection.layout.trunk}' has lost '{gone}' since it was rewired, and its weights are those "
                "of all its blocks: the folder could not be loaded. Save it before blocks are deleted, or use "
                "torch.save."
            )


def load(
    folder: str | os.PathLike[str],
    model: M,
    *,
    weights: Part = "all",
    device: torch.device | str = "cpu",
    example_inputs: object = None,
) -> M:
    """Rewire a plain model as the one in ``folder`` was, and load its weights.

    Args:
        folder: what `rewire.save` wrote.
        model: a plain model of the same architecture. The result shares its parameters, so that values are loaded into
            them; parameters on the meta device are replaced in the result only.
        weights: ``"all"``, or only those of the ``"connections"``: the others stay as they are.
        device: for weights on the meta device; others stay on their device. Dtypes are the model's.

    Returns:
        The rewired model.

    Raises:
        RewireError: there is no such folder, it is damaged or of another format, or it was saved from another model;
            the message shows what differs.
        UnknownName: a topology is not known here.
        AlreadyRewired, WrappedModel: the model is no plain one.
        ValueError: ``weights`` has no such value.

    Files are compared with the SHA-256 digests in the recipe before anything is built.

    Example:
        >>> rewire.save(rewired, "folder")
        >>> same = rewire.load("folder", model, example_inputs=(x,))
        >>> torch.equal(same(x), rewired(x))
        True
    """
    _check_part(weights)
    with contextlib.ExitStack() as stack:

        def opened(recipe: Recipe) -> tuple[Recipe, list[Any]]:
            if weights == "all" != recipe["weights"]:
                raise RewireError(f"'{folder}' holds connection weights only: pass weights='connections'.")
            _check_files(Path(folder), recipe)
            return recipe, [stack.enter_context(_opened(Path(folder) / name, device)) for name in recipe["files"]]

        recipe, files = with_recipe(Path(folder), opened)
        try:
            saved = _shapes(files, recipe["tied"])
            rewired = rewired_by(model, recipe.get("trunks"), recipe["start"], example_inputs, saved)
            _fill(rewired, files, saved, recipe["tied"], weights)
        except SafetensorError as error:
            raise RewireError(f"'{folder}' cannot be read: {first_line(error)}") from error
    lacking = [name for name, value in (*rewired.named_parameters(), *rewired.named_buffers()) if value.is_meta]
    if lacking and weights == "all":
        raise RewireError(
            f"{', '.join(lacking[:5])} are on the meta device and in no state dict, so they are not saved: build the "
            "model on a device (for transformers models: rewire.from_pretrained)."
        )
    return cast("M", rewired)


def with_recipe(folder: Path, use: Callable[[Recipe], T]) -> T:
    """Call ``use`` on the recipe of a folder, and again on the new one if it failed because a save replaced the recipe.

    Raises:
        RewireError: the recipe of the folder is damaged; and whatever ``use`` raises.
    """
    while True:
        recipe = _read_recipe(folder)
        try:
            return use(recipe)
        except RewireError:
            if _read_recipe(folder)["recipe_sha256"] == recipe["recipe_sha256"]:
                raise


def _check_part(weights: str) -> None:
    if weights not in ("all", "connections"):
        raise ValueError(f"weights must be 'all' or 'connections', not {weights!r}.")


def _check_savable(state: dict[str, Tensor]) -> None:
    for name, value in state.items():
        if is_dtensor(value):
            raise WrappedModel(f"'{name}' is sharded: save the model with torch.distributed.checkpoint.")
        if type(value) not in (Tensor, nn.Parameter, nn.Buffer) or value.layout != torch.strided or value.is_quantized:
            raise RewireError(
                f"'{name}' is a {type(value).__name__} and no plain tensor, which safetensors cannot store: save the "
                "model before you quantise or otherwise convert it."
            )
        if value.is_meta:
            raise RewireError(f"'{name}' is on the meta device: there is nothing to save.")


def _part(model: nn.Module, weights: Part) -> dict[str, Tensor]:
    """Entries of the state dict: the parameters and buffers themselves."""
    state: dict[str, Tensor] = model.state_dict(keep_vars=True)
    if weights == "all":
        return state
    own = tuple(f"{path}." for path, module in model.named_modules() if isinstance(module, (Connection, SeparateNorms)))
    return {name: value for name, value in state.items() if name.startswith(own)}


def ties_of(state: dict[str, Tensor]) -> dict[str, str]:
    """Names of tensors that share another one's memory -> the other one's name."""
    first: dict[Any, str] = {}
    ties = {}
    for name, value in state.items():
        memory = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
        if value.numel() and first.setdefault(memory, name) != name:
            ties[name] = first[memory]
    return ties


def _shards(state: dict[str, Tensor], limit: int) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, value in state.items():
        if shards[-1] and size + value.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = value
        size += value.nbytes
    return shards


def _write(folder: Path, recipe: Recipe, shards: Sequence[dict[str, Tensor]]) -> None:
    make_folder(folder)
    with staged(folder, last=RECIPE) as stage:
        names = [f"weights-{token_of(stage)}-{number:05}.safetensors" for number in range(1, len(shards) + 1)]
        for name, shard in zip(names, shards, strict=True):
            save_file({key: own_memory(value) for key, value in shard.items()}, stage / name)
        recipe = recipe | {"files": names, "sha256": {name: _digest(stage / name) for name in names}}
        text = json.dumps(recipe | {"recipe_sha256": _fingerprint(recipe)}, indent=1, allow_nan=False)
        (stage / RECIPE).write_text(text, encoding="utf-8")
    _remove_replaced(folder)


def _remove_replaced(folder: Path) -> None:
    """Remove weights that no recipe will ever name: neither the present one, nor one of a save in progress.

    The order matters. A save writes its stage before its weights, and removes it after its recipe is in place. So if
    weights are there without a stage, their recipe was in place: it is the one that is read now, or has been replaced.
    """
    found = {path: name[1] for path in folder.iterdir() if (name := _FILE.fullmatch(path.name))}
    writing = tokens(folder)
    with contextlib.suppress(RewireError):  # a save has just replaced it, and removes the old files itself
        present = _read_recipe(folder)["files"]
        for path, token in found.items():
            if token not in writing and path.name not in present:
                path.unlink(missing_ok=True)


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise RewireError(f"'{path}' cannot be read: {first_line(error)}") from error


def _fingerprint(recipe: Recipe) -> str:
    """Digest of a recipe without the digest itself."""
    rest = {key: value for key, value in recipe.items() if key != "recipe_sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def own_memory(value: Tensor) -> Tensor:
    """A contiguous tensor with its own storage: safetensors refuses views that share memory."""
    whole = value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes
    return value if whole else value.contiguous().clone()


def _read_recipe(folder: Path) -> Recipe:
    path = folder / RECIPE
    if not path.is_file():
        raise RewireError(
            f"'{folder}' holds no {RECIPE}, which rewire.save writes. A folder that save_pretrained wrote is read by "
            "rewire.from_pretrained."
        )
    try:
        recipe = parsed(path.read_bytes())
        form = recipe["format"]
    except (KeyError, OSError, ValueError) as error:
        raise RewireError(f"'{path}' is damaged: {type(error).__name__}: {first_line(error)}") from error
    if form != _FORMAT:
        raise RewireError(
            f"'{path}' cannot be read by rewire {__version__} (- saved, + here):"
            + difference([f"format: {form}", f"versions: {recipe.get('versions')}"], [f"format: {_FORMAT}"])
        )
    damage = _damage(recipe)
    if damage:
        raise RewireError(f"'{path}' is damaged: {damage}")
    return recipe


def _damage(recipe: Recipe) -> str:
    """What is wrong with a recipe; empty if nothing. No name in it is looked up before this check."""
    files, ties = recipe.get("files"), recipe.get("tied")
    if not isinstance(files, list) or not all(isinstance(name, str) and _FILE.fullmatch(name) for name in files):
        return f"files are {str(files)[:200]}"
    if recipe.get("recipe_sha256") != _fingerprint(recipe):
        return "it is not what was saved"
    digests = recipe.get("sha256")
    if not isinstance(digests, dict) or list(digests) != files:
        return f"sha256 are {digests!r}"
    if not isinstance(ties, dict) or not all(isinstance(name, str) for name in ties.values()):
        return f"tied are {ties!r}"
    if recipe.get("start") not in ("preserve", "paper"):
        return f"start is {recipe.get('start')!r}"
    if recipe.get("weights") not in ("all", "connections"):
        return f"weights are {recipe.get('weights')!r}"
    return ""


def _check_files(folder: Path, recipe: Recipe) -> None:
    for name, digest in recipe["sha256"].items():
        if not (folder / name).is_file():  # a pipe, for example, would never end
            raise RewireError(f"'{folder / RECIPE}' is damaged: not all of its files are there: {name}")
        if _digest(folder / name) != digest:
            raise RewireError(f"'{folder / name}' is damaged: it is not the file that was saved.")


def _opened(path: Path, device: torch.device | str) -> Any:
    try:
        return safe_open(path, framework="pt", device=str(device))
    except (OSError, RuntimeError, SafetensorError) as error:  # RuntimeError: torch opens the file, too
        raise RewireError(f"'{path}' cannot be read: {first_line(error)}") from error


def _shapes(files: Sequence[Any], ties: dict[str, str]) -> dict[str, list[int]]:
    """The shapes of all saved tensors, under every name that a tensor has."""
    saved = {name: file.get_slice(name).get_shape() for file in files for name in file.keys()}  # noqa: SIM118
    return saved | {alias: saved[name] for alias, name in ties.items() if name in saved}


def _fill(
    rewired: nn.Module, files: Sequence[Any], saved: dict[str, list[int]], ties: dict[str, str], weights: Part
) -> None:
    """Load tensors file by file, after comparing all names and shapes."""
    targets = _part(rewired, weights)
    _compare(targets, saved, weights)
    recipes = {name: file.get_tensor(name) for file in files for name in file.keys() if is_recipe(name)}  # noqa: SIM118
    rewired.load_state_dict(recipes, strict=False)  # refuses weights of other recipes, before anything is changed
    assign = any(value.is_meta for value in targets.values())
    for file in files:
        own = set(file.keys())
        read: dict[str, Tensor] = {}  # a tensor with several names stays one object
        state = dict(recipes)  # they hold the scales of weights that may be in other files
        for name, target in targets.items():
            source = ties.get(name, name)
            if source in own and not is_recipe(name):
                if source not in read:
                    read[source] = file.get_tensor(source)
                    read[source] = _like(target, read[source]) if assign else read[source]
                state[name] = read[source]
        rewired.load_state_dict(state, strict=False, assign=assign)


def _like(target: Tensor, value: Tensor) -> Tensor:
    """A parameter (or buffer) to replace ``target``; tied names get one object, and so stay tied."""
    value = value.to(target.dtype)
    return nn.Parameter(value, target.requires_grad) if isinstance(target, nn.Parameter) else value


def _compare(targets: dict[str, Tensor], saved: dict[str, list[int]], weights: Part) -> None:
    """Raise if names or shapes differ. Recipes in the state dict differ in length: they compare themselves."""

    def line(name: str, shape: Sequence[int]) -> str:
        return name if is_recipe(name) else f"{name} {list(shape)}"

    here = sorted(line(name, value.shape) for name, value in targets.items())
    there = sorted(line(name, s) for name, s in saved.items() if weights == "all" or CONNECTIONS in name.split("."))
    if here != there:
        raise RewireError(f"the saved weights are not this model's (- saved, + here):{difference(there, here)}")
