"""Ejected models compute what the rewired ones do, in a process that has no rewire."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from every_topology import EVERY, mixed
from torch import Tensor, nn

import rewire
from rewire.ejecting.runtime import ROOTS, Runtime
from rewire.patterns import tiny

TESTS = Path(__file__).parents[1]
ARCHITECTURES = "llama qwen3 qwen3_moe gemma2 gemma3_text gpt2 gpt_neox gptj opt phi falcon bloom mpt mixtral"
ARCHITECTURES += " deepseek_v3 granite bert roberta albert distilbert t5 bart whisper vit dinov2 swin convnext clip"
ARCHITECTURES += " wav2vec2 resnet"


def eject(
    rewired: nn.Module,
    folder: Path,
    *args: Any,
    make: Any = None,
    generate: bool = False,
    collect: bool = False,
    training: bool = False,
    **kwargs: Any,
) -> None:
    """Eject a model, with what it computes beside it."""
    path = rewire.eject(rewired, folder)
    rewired.train(training)
    kwargs |= {"output_hidden_states": True} if collect else {}
    outputs = rewired(*args, **kwargs)
    found = outputs if isinstance(outputs, Tensor) else outputs[0]
    found.float().square().mean().backward()
    case = {"module": path.stem, "make": make, "args": args, "kwargs": kwargs, "training": training}
    case |= {"outputs": found.detach(), "gradients": {name: p.grad for name, p in rewired.named_parameters()}}
    case |= {"collected": [x.detach() for x in outputs.hidden_states] if collect else None, "generated": None}
    case["dtype"] = found.dtype
    if generate:
        case["generated"] = rewired.eval().generate(kwargs["input_ids"], max_new_tokens=6, do_sample=False)
    if make is None:
        case["auto"] = next(iter(json.loads((folder / "config.json").read_text())["auto_map"]))
    torch.save(case, folder / "case.pt")


def compare(folders: list[Path], tolerance: float = 1e-5) -> None:
    """Load ejected models without rewire and compare them with the rewired ones."""
    packages = str(Path(torch.__file__).parents[1])
    command = [sys.executable, "-I", "-S", str(TESTS / "eject_worker.py"), str(TESTS), packages, *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert set(results) == {folder.name for folder in folders}
    wrong = {
        name: found
        for name, found in results.items()
        if isinstance(found, str) or any(not difference <= tolerance for difference in found.values())
    }
    assert not wrong, "\n".join(f"{name}: {found}" for name, found in wrong.items())


def llama(key: str) -> nn.Module:
    torch.manual_seed(0)
    return mixed(tiny.tiny_model("llama"), key)


QUICK = ["ancre-ingoing", "denseformer", "dca-norms", "hc-dynamic", "muddformer"]


@pytest.mark.parametrize(
    "keys", [QUICK, pytest.param([k for k in EVERY if k not in QUICK], marks=pytest.mark.slow)], ids=["some", "others"]
)
def test_every_topology(keys: list[str], tmp_path: Path) -> None:
    folders = [tmp_path / key.replace("-", "_") for key in keys]
    for key, folder in zip(keys, folders, strict=True):
        first = key == "ancre-ingoing"
        eject(llama(key), folder, input_ids=models.token_ids(), generate=first, collect=first)
    compare(folders)


@pytest.mark.slow
def test_every_architecture_of_transformers(tmp_path: Path) -> None:
    from rewire.patterns.transformers import example_inputs

    folders = []
    for name in ARCHITECTURES.split():
        torch.manual_seed(0)
        model = tiny.tiny_model(name)
        args, kwargs = example_inputs(model)
        folders.append(tmp_path / name)
        eject(mixed(model, "ancre-ingoing"), folders[-1], *args, **kwargs)
    compare(folders)
