"""Runs before every test module is imported."""

import gc
import itertools
import math
import os
import shutil
import sys
from collections.abc import Iterator
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # read once, when huggingface_hub is imported

import pytest
from interpreter import INTERPRETED


def pytest_configure(config: pytest.Config) -> None:
    """What all tests need; the process that hands them out to workers needs none of it, and they wait for it."""
    works = "PYTEST_XDIST_WORKER" in os.environ
    if not works and config.getoption("numprocesses", None):
        return
    import torch
    import torchvision_stub  # noqa: F401  (before anything imports timm or transformers)

    from rewire.kernels.cpu import plain

    plain.WORTHWHILE = 0  # the states of tests are tiny; they go the way of large ones
    if works:
        torch.set_num_threads(1)  # the workers share the cores


@pytest.hookimpl(tryfirst=True)  # before pytest takes out what is slow
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test with the mark ``each_once``, the cases are slow that are not needed to run each value once.

    Its decorators `parametrize` make a product, of which the diagonal is quick: (a, 0), (b, 1), (c, 0) of abc x 01.
    """
    for _, group in itertools.groupby(items, lambda item: item.nodeid.partition("[")[0]):
        cases = list(group)
        sizes = [len(mark.args[1]) for mark in cases[0].iter_markers("parametrize")]
        if (
            cases[0].get_closest_marker("each_once") and not INTERPRETED and len(cases) == math.prod(sizes)
        ):  # else they were named
            for place, case in zip(itertools.product(*map(range, sizes)), cases, strict=True):
                if any(i != place[sizes.index(max(sizes))] % n for i, n in zip(place, sizes, strict=True)):
                    case.add_marker(pytest.mark.slow)
    items[:] = shared(items, int(os.environ.get("TESTS_SHARE", "1")), int(os.environ.get("TESTS_PART", "0")))


def shared(items: list[pytest.Item], share: int, part: int) -> list[pytest.Item]:
    """Of each test one in ``share`` slow cases, at least one, and all others: which, ``part`` says."""
    left_out = set[pytest.Item]()
    for _, group in itertools.groupby(items, lambda item: item.nodeid.partition("[")[0]):
        cases = [case for case in group if case.get_closest_marker("slow")]
        left_out.update(case for n, case in enumerate(cases) if (n - part) % min(share, len(cases)))
    return [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    """Search for garbage seldom, and never among what was imported: that took a tenth of the time of all tests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 100)


@pytest.fixture(scope="session", autouse=True)
def loops_compiled() -> None:
    """What `native.loaded` finds is kept: a test that has switched kernels off must not be the first that asks."""
    from rewire.kernels.cpu import native

    native.loaded()


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    import torch

    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def compilations_forgotten() -> Iterator[None]:
    """Dynamo compiles a function 8 times and then runs it as it is, in silence; all modules are called by one function.

    A test would compile or not, by what else ran in its process.
    """
    yield
    if "torch._dynamo" in sys.modules:
        sys.modules["torch"].compiler.reset()


@pytest.fixture
def browser(chromium: Any) -> Iterator[Any]:
    """A browser, whose pages are closed behind each test: one of the site's took a third of a core until the end."""
    yield chromium
    for context in chromium.contexts:
        context.close()


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
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
