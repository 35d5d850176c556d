"""An ejected folder is one model or refused: over an older one, interrupted, killed, mixed, by several processes."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cut_off
import models
import pytest
import torch
from every_topology import mixed
from safetensors.torch import load_model
from torch import nn

import rewire
from rewire.patterns import tiny

TESTS = Path(__file__).parents[1]


def stack(topology: str, seed: int = 0) -> nn.Module:
    """A model with its own weights, in which topologies have the same names and shapes."""
    torch.manual_seed(seed)
    return mixed(models.CASES["nanogpt-no-targets"].make(), topology).eval()


def llama(topology: str) -> nn.Module:
    torch.manual_seed(0)
    return mixed(tiny.tiny_model("llama"), topology).eval()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def computed(folder: Path) -> torch.Tensor:
    """What the ejected model in a folder computes; its text is imported as if for the first time."""
    for name in [name for name in sys.modules if name.startswith(folder.name)]:
        del sys.modules[name]
    importlib.invalidate_caches()
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)
    (path,) = folder.glob("rewired_*.py")
    model = importlib.import_module(f"{folder.name}.{path.stem}").NanoGPT().eval()
    load_model(model, folder / "model.safetensors")
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)
    with torch.no_grad():
        logits: torch.Tensor = model(*models.CASES["nanogpt-no-targets"].inputs())[0]
    return logits


def outputs(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(*models.CASES["nanogpt-no-targets"].inputs())[0]
    return logits


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path / "ejected_once_or_twice"


def test_files_of_two_models_are_refused(folder: Path, tmp_path: Path) -> None:
    old, new = stack("ancre-ingoing"), stack("ancre-outgoing", seed=1)
    rewire.eject(old, tmp_path / "old")
    rewire.eject(new, tmp_path / "new")
    names = sorted(contents(tmp_path / "new"))
    for number in range(len(names) + 1):
        for chosen in itertools.combinations(names, number):
            shutil.copytree(tmp_path / "old", folder, dirs_exist_ok=True)
            for name in chosen:
                shutil.copy(tmp_path / "new" / name, folder / name)
            if number in (0, len(names)):
                torch.testing.assert_close(computed(folder), outputs(new if number else old))
            else:
                with pytest.raises(Exception, match=r"belong to two models.*Eject the model once more"):
                    computed(folder)


@pytest.mark.slow
def test_files_of_two_models_of_transformers_are_refused(tmp_path: Path) -> None:
    for topology in ("ancre-ingoing", "ancre-outgoing"):
        model, folder = llama(topology), tmp_path / topology
        rewire.eject(model, folder)
        case = {"make": None, "auto": "AutoModelForCausalLM", "args": (), "kwargs": {"input_ids": models.token_ids()}}
        logits = model(**case["kwargs"]).logits  # type: ignore[arg-type]
        logits.float().square().mean().backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        case |= {"outputs": logits.detach(), "gradients": gradients, "dtype": logits.dtype, "training": False}
        torch.save(case | {"collected": None, "generated": None}, folder / "case.pt")
    names = ["config.json", "model.safetensors", "rewire_runtime.py", "rewired_modeling_llama.py"]
    mixtures = [chosen for number in range(5) for chosen in itertools.combinations(names, number)]
    for number, chosen in enumerate(mixtures):
        shutil.copytree(tmp_path / "ancre-ingoing", tmp_path / f"mixture_{number}")
        for name in [*chosen, *(["case.pt"] if len(chosen) == 4 else [])]:
            shutil.copy(tmp_path / "ancre-outgoing" / name, tmp_path / f"mixture_{number}" / name)
    packages = str(Path(torch.__file__).parents[1])
    command = [sys.executable, "-I", "-S", str(TESTS / "eject_worker.py"), str(TESTS), packages]
    command += [str(tmp_path / f"mixture_{number}") for number in range(len(mixtures))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-5000:]
    results = json.loads(done.stdout.splitlines()[-1])
    for number, chosen in enumerate(mixtures):
        found = results[f"mixture_{number}"]
        if len(chosen) in (0, 4):
            assert max(found.values()) < 1e-5
        else:
            assert isinstance(found, str) and "belong to two models" in found, f"{chosen}: {found}"


@pytest.mark.slow
@pytest.mark.parametrize("ended", [cut_off.interrupted, cut_off.killed])
def test_eject_cut_off_over_an_older_model(ended: Any, folder: Path, tmp_path: Path) -> None:
    """Killed among the moves it is a mixture, which is refused: see above."""
    old, new = stack("ancre-ingoing"), stack("ancre-outgoing", seed=1)
    rewire.eject(old, tmp_path / "old")
    rewire.eject(new, tmp_path / "new")
    before, after = contents(tmp_path / "old"), contents(tmp_path / "new")
    left = []
    for number in range(200):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "old", folder)
        done = not ended(number, lambda: rewire.eject(new, folder, force=True))
        found = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        left.append("old" if found == before else "new" if found == after else "mixture")
        assert set(found) == set(after)
        if done:
            break
    assert left[0] == "old" and left[-1] == "new" and 10 < len(left) < 200
    assert left.count("mixture") == (0 if ended is cut_off.interrupted else len(after) - 1)
    rewire.eject(new, folder, force=True)
    assert contents(folder) == after  # nothing is left of those that were cut off


@pytest.mark.slow
def test_processes_that_eject_into_one_folder(folder: Path) -> None:
    ejected = [stack("ancre-ingoing"), stack("ancre-outgoing", seed=1)]

    def several(model: nn.Module) -> Callable[[], object]:
        return lambda: [rewire.eject(model, folder, force=True) for _ in range(5)]

    ended = [cut_off.in_a_process(several(model)) for model in ejected]
    assert [wait() for wait in ended] == [0, 0]
    found = computed(folder)
    assert any(torch.allclose(found, outputs(model), atol=1e-5) for model in ejected)
    assert set(contents(folder)) == {"model.safetensors", "rewire_runtime.py", "rewired_models.py"}


def test_another_model_and_changed_files_are_not_replaced_unless_forced(folder: Path) -> None:
    rewire.eject(stack("ancre-ingoing"), folder)
    (folder / "notes.txt").write_text("mine")
    rewire.eject(stack("ancre-ingoing", seed=1), folder)  # the same formulas, newer weights
    torch.testing.assert_close(computed(folder), outputs(stack("ancre-ingoing", seed=1)))
    before = contents(folder)
    with pytest.raises(rewire.RewireError, match=r"another model, or files .* since: rewire_runtime\.py, rew"):
        rewire.eject(stack("denseformer"), folder)
    assert contents(folder) == before
    (folder / "rewired_models.py").write_bytes(before["rewired_models.py"] + b"# my own line\n")
    with pytest.raises(rewire.RewireError, match=r"changed since: rewired_models\.py\. Give another folder, or force"):
        rewire.eject(stack("ancre-ingoing"), folder)
    rewire.eject(stack("denseformer"), folder, force=True)
    torch.testing.assert_close(computed(folder), outputs(stack("denseformer")))
    assert (folder / "notes.txt").read_text() == "mine"


def test_links_out_of_the_folder_are_not_followed(folder: Path, tmp_path: Path) -> None:
    names = ["model.safetensors", "rewire_runtime.py", "rewired_models.py"]
    for name in names:
        (tmp_path / name).write_text("precious")
        folder.mkdir(exist_ok=True)
        (folder / name).symlink_to(tmp_path / name)
    with pytest.raises(rewire.RewireError, match=r"changed since: model\.safetensors"):
        rewire.eject(stack("ancre-ingoing"), folder)
    rewire.eject(stack("ancre-ingoing"), folder, force=True)
    assert [(tmp_path / name).read_text() for name in names] == ["precious"] * 3
    assert not any(os.path.islink(folder / name) for name in names)


def test_shards_of_older_weights_are_removed(tmp_path: Path) -> None:
    llama("ancre-ingoing").save_pretrained(tmp_path, max_shard_size="50KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    rewire.eject(llama("ancre-ingoing"), tmp_path, force=True)
    assert [path.name for path in tmp_path.glob("model*")] == ["model.safetensors"]
