"""Runs before every test module is imported."""

import os
from collections.abc import Iterator

os.environ["HF_HUB_OFFLINE"] = "1"  # read once, when huggingface_hub is imported

import pytest
import torch
import torchvision_stub  # noqa: F401  (before anything imports timm or transformers)

from rewire.kernels import plain

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers share the cores


plain.WORTHWHILE = 0  # the states of tests are tiny; they go the way of large ones


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()
