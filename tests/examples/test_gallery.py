"""The scripts of the gallery, each with a few steps in a process of its own, as a user starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: What each writes, besides its picture of the gallery.
WRITES = {
    "pretrain_llama": {"loss.png", "weights.png", "model"},
    "finetune_trainer": {"loss.png", "plain", "rewired"},
    "diffusion_transformer": {"samples.png", "weights.png"},
    "deep_mlp": {"loss.png"},
    "prune_to_onnx": {"weights.png", "model.onnx"},
    "own_topology": {"weights.png"},
}
#: As users run it, but that timm and transformers get their torchvision (see torchvision_stub).
RUN = "import runpy, sys, torchvision_stub; runpy.run_path(sys.argv.pop(1), run_name='__main__')"


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITES)
def test_it_runs(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN, str(ROOT / f"examples/{name}.py"), "--steps", "2", "--out", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert WRITES[name] <= {path.name for path in tmp_path.iterdir()}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.glob("*.png"))


@pytest.mark.parametrize("name", WRITES)
def test_it_is_short_and_in_the_gallery(name: str) -> None:
    assert len((ROOT / f"examples/{name}.py").read_text().splitlines()) < 80
    gallery = (ROOT / "docs/gallery.md").read_text()
    assert f"examples/{name}.py" in gallery and f"images/gallery/{name}.png" in gallery
