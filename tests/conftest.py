"""Runs before every test module is imported."""

import gc
import os
import shutil
import sys
from collections.abc import Iterator
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # read once, when huggingface_hub is imported

import pytest
import torch
import torchvision_stub  # noqa: F401  (before anything imports timm or transformers)

from rewire.kernels.cpu import plain

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers share the cores


plain.WORTHWHILE = 0  # the states of tests are tiny; they go the way of large ones


def pytest_collection_finish() -> None:
    """Search for garbage seldom, and never among what was imported: that took a tenth of the time of all tests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 100)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def compilations_forgotten() -> Iterator[None]:
    """Dynamo compiles a function 8 times and then runs it as it is, in silence; all modules are called by one function.

    A test would compile or not, by what else ran in its process.
    """
    yield
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A headless Chromium, driven by playwright, which brings none itself."""
    from playwright.sync_api import sync_playwright

    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip(f"none of {', '.join(names)} is installed")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield running
        running.close()
