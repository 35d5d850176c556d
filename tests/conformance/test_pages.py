"""The pages of docs/conformance are what the script writes, and the table is what is found."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from rewire.conformance import list_schemes

ROOT = Path(__file__).parents[2]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of benchmarks/conformance: adapters and pages."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "conformance")
    yield importlib.import_module("adapters"), importlib.import_module("pages")
    for name in ("adapters", "pages"):
        del sys.modules[name]


def test_pages_are_up_to_date(scripts: Any) -> None:
    adapters, pages = scripts
    for name, text in pages.written(adapters.BY_HAND).items():
        assert (pages.PAGES / name).read_text() == text, f"{name}: run benchmarks/conformance/pages.py"


def test_every_scheme_has_a_page_in_the_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text()
    assert all(f"- {name}: conformance/{name}.md\n" in menu for name in list_schemes())


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of other projects
def test_other_projects_are_as_the_table_says(scripts: Any) -> None:
    adapters, pages = scripts
    rows = {(row["project"], row["what"], row["scheme"]): row for row in pages.results()}
    for adapter in adapters.ADAPTERS:
        row = rows[adapter.project, adapter.what, adapter.scheme]
        if adapter.project == "rewire" or adapter.interpreted or adapter.version != row["version"]:
            continue
        report = adapter.report()
        assert (report.agrees, list(report.looks_like)) == (row["agrees"], row["looks_like"]), str(report)
