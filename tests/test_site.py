"""The documentation's site, in a real browser: every page, at three widths, dark and light, and its search.

That no link inside it is dead is what building it checks: warnings are errors (`mkdocs.yml`).
"""

from __future__ import annotations

import functools
import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(site)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return site


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def pages(folder: Path) -> list[str]:
    return [path.parent.relative_to(folder).as_posix() for path in sorted(folder.rglob("index.html"))]


def watched(page: Page, address: str) -> list[str]:
    """What goes wrong on a page from now on: errors, failed requests, requests to others."""
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("response", lambda response: wrong.append(response.url) if response.status >= 400 else None)
    page.on(
        "request", lambda request: None if request.url.startswith((address, "data:")) else wrong.append(request.url)
    )
    return wrong


@pytest.mark.parametrize("width", [360, 800, 1400])  # a window for each: to resize one has hung on a busy machine
def test_every_page_loads_and_fits(width: int, folder: Path, address: str, browser: Browser) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900})
    wrong, wide = watched(page, address), []
    for name in pages(folder):
        page.goto(f"{address}/{name}/", wait_until="load")
        assert page.locator("article h1").count() == 1, name
        assert page.evaluate("[...document.images].every(image => image.complete && image.naturalWidth)"), name
        if page.evaluate("document.documentElement.scrollWidth > window.innerWidth"):
            wide.append(name)
    assert len(pages(folder)) > 30 and not wrong and not wide


def test_search_finds(address: str, browser: Browser) -> None:
    page = browser.new_page()
    wrong = watched(page, address)
    page.goto(address)
    page.keyboard.press("/")
    page.keyboard.type("parameter_groups")
    found = page.locator(".md-search-result__item a").first
    found.wait_for()
    found.click()
    page.wait_for_url("**/training/**")
    assert page.locator("article", has_text="parameter_groups").count() and not wrong


def test_dark_and_light(address: str, browser: Browser) -> None:
    shades = {}
    for scheme in ("dark", "light"):
        page = browser.new_page(color_scheme=scheme)
        page.goto(address)
        shades[scheme] = page.evaluate("getComputedStyle(document.body).backgroundColor").strip("rgba()").split(",")
    assert int(shades["dark"][0]) < 64 and int(shades["light"][0]) > 192
