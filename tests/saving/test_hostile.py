"""Folders that somebody damaged or made to do harm: refused at once, or loaded as what was saved."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from every_topology import EVERY, kinds_first, mixed
from models import PreNorm, Stack
from safetensors.torch import load_file, save_file
from torch import nn

import rewire
from rewire.saving import folder as saving
from rewire.saving.checkpoint import matrices

PLACE = "depth_connections.layers"
_DEEP = json.loads("[" * 900 + "]" * 900)
VALUES = [None, [], {}, 1, 0, -1, 2.5, True, "", "\ud800", "../..", "/etc/passwd", 10**6, 10**30, -(10**30), 1e308]
VALUES += [float("nan"), float("inf"), [None], [1], [[1]], {"../fifo": "0"}, {"a": {"b": []}}, "x" * 10_000, _DEEP]
VALUES += [list(range(1, 4097)), [1] * 4096, ["x"] * 4096]


def stack() -> nn.Module:
    return Stack(PreNorm).eval()


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the parts of JSON are, outermost first."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield (*path, key)
        yield from places(part, (*path, key))


def changed(recipe: Any, path: tuple[Any, ...], value: Any = ...) -> Any:
    """The recipe with another value at that place, or without it."""
    recipe = copy.deepcopy(recipe)
    inner = recipe
    for key in path[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return recipe


def mutations(recipe: Any) -> Iterator[Any]:
    """Each part without it, and with each of `VALUES`; of lists, the first two entries. Any scales are right."""
    for path in places(recipe):
        if "scales" not in path and all(not isinstance(key, int) or key in (0, 1) for key in path):
            yield changed(recipe, path)
            for value in VALUES:
                yield changed(recipe, path, value)
    for value in VALUES:
        yield value


def written(folder: Path, recipe: Any, state: dict[str, torch.Tensor]) -> None:
    """A recipe in its folder, with digests that fit, and in the state dict, as somebody who means harm leaves it."""
    if isinstance(recipe, dict):
        trunks = recipe.get("trunks")
        own = trunks.get(PLACE) if isinstance(trunks, dict) else None
        own = {key: value for key, value in own.items() if key != "sites"} if isinstance(own, dict) else own
        text = json.dumps(own).encode()
        state = state | {f"{PLACE}._extra_state": torch.frombuffer(bytearray(text), dtype=torch.uint8)}
        (file,) = folder.glob("*.safetensors")
        save_file(state, file)
        digests = recipe.get("sha256")
        if isinstance(digests, dict):
            recipe["sha256"] = {n: saving._digest(file) if n == file.name else value for n, value in digests.items()}
        recipe = recipe | {"recipe_sha256": saving._fingerprint(recipe)}
    (folder / saving.RECIPE).write_text(json.dumps(recipe))


def refused(work: Callable[[], Any], most: int = 10) -> str:
    """Why it is refused, in a few seconds of processor time; or nothing."""
    begun = time.process_time()
    try:
        work()
        reason = ""
    except rewire.RewireError as error:
        reason = str(error) or type(error).__name__
    taken = time.process_time() - begun
    assert taken < most, f"{taken:.1f} s: {reason[:200]}"
    return reason


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """All weights, in units that do not depend on options."""
    (connection,) = rewire.connections(model).values()
    base = {name: value for name, value in model.state_dict().items() if not name.startswith(PLACE)}
    return base | {name: value.detach() for name, value in connection.values().items()}


def check_recipes(key: str, folder: Path, share: float) -> None:
    """Change recipes everywhere: refused, or loaded with the weights that were saved."""
    rewire.save(mixed(stack(), key), folder)
    recipe = json.loads((folder / saving.RECIPE).read_text())
    (file,) = folder.glob("*.safetensors")
    state, chance, count = load_file(file), random.Random(key), 0
    want = values(rewire.load(folder, stack()))
    for mutant in mutations(recipe):
        if chance.random() > share:
            continue
        written(folder, mutant, state)
        loaded: list[nn.Module] = []
        try:
            reason = refused(lambda found=loaded: found.append(rewire.load(folder, stack())))  # type: ignore[misc]
            refused(lambda: matrices(folder))
        except BaseException as error:
            error.add_note(f"{key}: {json.dumps(mutant)[:2000]}")
            raise
        count += bool(reason)
        for model in loaded:
            torch.testing.assert_close(values(model), want)
    assert count > 0


@pytest.mark.parametrize("key", ["ancre-ingoing", "mhc", "frac-hc"])
def test_recipes(key: str, tmp_path: Path) -> None:
    check_recipes(key, tmp_path, share=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("key", kinds_first(EVERY))
def test_changes_to_the_recipes_of_every_topology(key: str, tmp_path: Path) -> None:
    check_recipes(key, tmp_path, share=0.02)


def test_sizes_are_compared_before_anything_is_built(tmp_path: Path) -> None:
    """A recipe of 20 kB cost 14 s and 1 GB."""
    rewire.save(mixed(stack(), "ancre-ingoing"), tmp_path)
    recipe = json.loads((tmp_path / saving.RECIPE).read_text())
    (file,) = tmp_path.glob("*.safetensors")
    trunk, state = recipe["trunks"][PLACE], load_file(file)
    deep = {key: value for key, value in trunk.items() if key != "sites"} | {"units": list(range(1, 4097))}
    written(tmp_path, recipe | {"trunks": {PLACE: deep}}, state)
    assert "does not fit this model" in refused(lambda: rewire.load(tmp_path, stack()))
    assert "logits is [6] (saved), [8390656] (here)" in refused(lambda: matrices(tmp_path))
    many = {f"{PLACE}{number}": trunk for number in range(3000)}
    written(tmp_path, recipe | {"trunks": many}, state)
    assert "not the model that was saved" in refused(lambda: rewire.load(tmp_path, stack()), most=15)
    written(tmp_path, recipe, {name: value for name, value in state.items() if "logits" not in name})
    assert "logits is missing" in refused(lambda: rewire.load(tmp_path, stack()))
    for options in ({"streams": 10**5}, {"streams": 10**12}, {"streams": 2}):
        folder = tmp_path / "hc"
        rewire.save(mixed(stack(), "hc-static"), folder)
        recipe = json.loads((folder / saving.RECIPE).read_text())
        (file,) = folder.glob("*.safetensors")
        recipe["trunks"][PLACE]["options"] |= options
        written(folder, recipe, load_file(file))
        assert "do not fit" in refused(lambda: rewire.load(folder, stack()))  # noqa: B023
        assert "do not fit" in refused(lambda: matrices(folder))  # noqa: B023


@pytest.mark.parametrize("text", ["null", "[]", "1", '""', "{}", "[[", "NaN", "[" * 5000, '{"topology": []}', "\x00"])
def test_recipes_in_state_dicts(text: str, tmp_path: Path) -> None:
    model = mixed(stack(), "ancre-ingoing")
    rewire.save(model, tmp_path)
    state = model.state_dict()
    for broken in (
        torch.tensor(list(text.encode()), dtype=torch.uint8),
        torch.tensor([list(text.encode())]),
        torch.tensor([1.5]),
    ):
        state[f"{PLACE}._extra_state"] = broken
        save_file(state, tmp_path / "state.safetensors")
        torch.save(state, tmp_path / "state.pt")
        (file,) = tmp_path.glob("weights-*.safetensors")
        save_file(state, file)
        recipe = json.loads((tmp_path / saving.RECIPE).read_text())
        recipe["sha256"] = {file.name: saving._digest(file)}
        recipe["recipe_sha256"] = saving._fingerprint(recipe)
        (tmp_path / saving.RECIPE).write_text(json.dumps(recipe))
        assert refused(lambda: rewire.load(tmp_path, stack()))
        for path in (tmp_path, tmp_path / "state.safetensors", tmp_path / "state.pt"):
            assert refused(lambda: matrices(path))  # noqa: B023
        assert refused(lambda: stack_of(state))


def stack_of(state: dict[str, torch.Tensor]) -> nn.Module:
    model = mixed(stack(), "ancre-ingoing")
    model.load_state_dict(state)
    return model


def in_place_of(path: Path) -> Iterator[str]:
    """Put things that are no files, or other files, in the place of a file."""
    whole = path.read_bytes()
    for kind in (
        "pipe",
        "folder",
        "socket",
        "link to a pipe",
        "link to nothing",
        "endless",
        "empty",
        "nothing",
        "other",
    ):
        path.unlink()
        target = path.with_name("elsewhere")
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        elif kind == "link to a pipe":
            os.mkfifo(target)
            path.symlink_to(target)
        elif kind == "link to nothing":
            path.symlink_to(target)
        elif kind == "endless":
            path.symlink_to("/dev/zero")
        elif kind != "nothing":
            path.write_bytes(b"" if kind == "empty" else whole[::-1])
        yield kind
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
        target.unlink(missing_ok=True)
        path.write_bytes(whole)


@pytest.mark.parametrize("pattern", [saving.RECIPE, "*.safetensors"])
def test_what_is_no_file_is_never_waited_for(pattern: str, tmp_path: Path) -> None:
    rewire.save(mixed(stack(), "ancre-ingoing"), tmp_path)
    (path,) = tmp_path.glob(pattern)
    for kind in in_place_of(path):
        assert refused(lambda: rewire.load(tmp_path, stack())), kind
        if (kind, pattern) != ("nothing", saving.RECIPE):  # then it is a folder of safetensors
            assert refused(lambda: matrices(tmp_path)) or pattern == saving.RECIPE, kind
    assert not refused(lambda: rewire.load(tmp_path, stack()))


def test_checkpoints_of_transformers_that_are_no_files(tmp_path: Path) -> None:
    mixed(stack(), "ancre-ingoing")
    os.mkfifo(tmp_path / "model.safetensors")
    assert "not a regular file" in refused(lambda: matrices(tmp_path))
    assert "not a regular file" in refused(lambda: rewire.from_pretrained(tmp_path))


@pytest.mark.parametrize("name", ["../fifo", "/etc/passwd", "weights-00000000-00001.safetensors/../fifo", "fifo", ""])
def test_names_that_lead_out_of_the_folder(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    rewire.save(mixed(stack(), "ancre-ingoing"), folder)
    for place in (tmp_path, folder):
        os.mkfifo(place / "fifo")
    recipe = json.loads((folder / saving.RECIPE).read_text())
    for form in (1, 2):
        for changes in ({"files": [name]}, {"sha256": {name: "0"}}, {"files": [name], "sha256": {name: "0"}}):
            mutant = {**recipe, "format": form, **changes}
            (folder / saving.RECIPE).write_text(json.dumps({**mutant, "recipe_sha256": saving._fingerprint(mutant)}))
            assert refused(lambda: rewire.load(folder, stack()))
            assert refused(lambda: matrices(folder))
    shutil.rmtree(folder)
