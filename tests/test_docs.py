"""The Python code of README and docs/ runs as it stands, block after block of a page in one namespace.

What cannot run in one process says so above its block: ``<!-- not run: why; the test that does -->``.
"""

from __future__ import annotations

import linecache
import re
import sys
import types
from pathlib import Path
from typing import Any

import peft
import pytest
import safetensors.torch
import torch
import transformers
from models import PreNorm
from torch import nn
from torch.utils.tensorboard import SummaryWriter

import rewire
from rewire.patterns.tiny import tiny_model

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"(?:<!-- not run: (?P<reason>.*?) -->\n)?^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[int, str, str | None]]:
    """Line, code and the reason not to run it."""
    text = page.read_text()
    return [(text.count("\n", 0, m.start("code")), m["code"], m["reason"]) for m in BLOCK.finditer(text)]


PAGES = [page for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if blocks(page)]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(PreNorm(), PreNorm(), PreNorm())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x)
        return y


def given(page: str) -> dict[str, Any]:
    """What the reader of a page has: torch, a model, what it is run on, an optimiser, and what the page speaks of."""
    ids = torch.randint(3, 90, (2, 8))
    batch, model = {"input_ids": ids, "labels": ids}, tiny_model("llama")
    names: dict[str, Any] = {"torch": torch, "nn": nn, "rewire": rewire, "Net": Net, "model": model, "batch": batch}
    if page == "backend":
        x = torch.randn(2, 5, 32)
        names |= {"model": Net(), "inputs": x, "args": (x,), "graph_module": torch.fx.symbolic_trace(Net())}
    elif page == "diagnostics":
        arguments = transformers.TrainingArguments("runs", max_steps=1, report_to=[])
        names |= {"SummaryWriter": SummaryWriter, "Trainer": transformers.Trainer, "arguments": arguments}
        names |= {"batches": range(2), "held_out": batch, "data": [{"input_ids": row, "labels": row} for row in ids]}
        names |= {
            "model": (model := rewire.compile(model, "ancre-cascaded")),
            "optimizer": torch.optim.SGD(model.parameters()),
        }
        safetensors.torch.save_file(model.state_dict(), "model.safetensors")
    elif page == "experiment":
        names |= {"model": rewire.compile(model, "ancre-ingoing"), "batch": ids}
    elif page == "initialisers":
        names |= {"layer": nn.Linear(4, 4), "conv": nn.Conv2d(4, 4, 3), "generator": torch.Generator()}
    elif page == "saving":
        rewired = rewire.compile(model, "ancre-ingoing")
        config = peft.LoraConfig(target_modules=["q_proj"])
        names |= {"model": rewired, "rewired": rewired, "peft": peft, "config": config}
        names |= {"make_model": lambda: tiny_model("llama")}
    return names


@pytest.fixture
def page_module(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Where the code of a page runs; dataclasses look their module up."""
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    vars(module).update(given(page.stem))
    return module


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_its_code_runs(page: Path, page_module: types.ModuleType) -> None:
    for line, code, reason in blocks(page):
        if reason is None:
            text = "\n" * line + code
            linecache.cache[str(page)] = (len(text), None, text.splitlines(keepends=True), str(page))
            exec(compile(text, str(page), "exec"), vars(page_module))


def test_what_is_not_run_has_another_test() -> None:
    reasons = [reason for page in PAGES for _, _, reason in blocks(page) if reason is not None]
    assert reasons
    for reason in reasons:
        assert (ROOT / reason.split("; ")[1]).is_file(), reason
