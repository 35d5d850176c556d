"""The house: which modules import which, and what the root holds."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest

import rewire
from rewire import attributes

ROOT = Path(rewire.__file__).parent


def modules() -> dict[str, Path]:
    """All modules of the package by name."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = ["rewire", *path.relative_to(ROOT).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(node: ast.AST, known: dict[str, Path]) -> Iterator[str]:
    """The modules of the package that are imported anywhere in ``node``, for the sake of types alone, too."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ImportFrom) and child.module:
            names = [f"{child.module}.{alias.name}" for alias in child.names]
            yield from (name if name in known else child.module for name in names)
        elif isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        else:
            yield from imported(child, known)


def graph() -> nx.DiGraph:
    known = modules()
    edges = [
        (name, other)
        for name, path in known.items()
        for other in imported(ast.parse(path.read_text()), known)
        if other in known and other not in ("rewire", name)
    ]
    return nx.DiGraph(edges)


def test_no_module_imports_itself_by_others() -> None:
    circles = [sorted(circle) for circle in nx.strongly_connected_components(graph()) if len(circle) > 1]
    assert circles == []


@pytest.mark.parametrize("depth", [2, 3])
def test_no_folder_imports_itself_by_others(depth: int) -> None:
    folders = nx.DiGraph()
    for name, other in graph().edges:
        one, two = (".".join(module.split(".")[:depth]) for module in (name, other))
        if one != two:
            folders.add_edge(one, two)
    assert [sorted(circle) for circle in nx.strongly_connected_components(folders) if len(circle) > 1] == []


def test_what_is_put_on_objects_of_others_is_in_one_place() -> None:
    (rows,) = re.findall(
        r"## What is put on your objects\n(.*)", (ROOT.parent / "docs/architecture.md").read_text(), re.S
    )
    named = set(
        re.findall(r"`(\w+)`", "\n".join(row.split("|")[1] for row in rows.splitlines() if row.startswith("| `")))
    )
    assert named == {value for name, value in vars(attributes).items() if name.isupper()}
    for name, path in modules().items():
        nodes = list(ast.walk(ast.parse(path.read_text())))
        texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        texts += [node.attr for node in nodes if isinstance(node, ast.Attribute)]
        texts += [node.arg for node in nodes if isinstance(node, ast.keyword) and node.arg]
        written = [text for text in texts if text in named or re.match(r"_rewire_|_depth(_|$)", text)]
        assert name == "rewire.attributes" or not {*written} - {"takes_streams"}, name


def test_no_module_of_the_root_has_the_name_of_something_public() -> None:
    root = {name.removeprefix("rewire.") for name in modules() if name.count(".") == 1}
    assert not root & set(rewire.__all__)
    assert {path.name for path in ROOT.iterdir() if path.suffix == ".py"} <= ROOMS


#: What a newcomer sees first.
ROOMS = {
    *(
        "__init__.py",
        "__main__.py",
        "attributes.py",
        "compiler.py",
        "console.py",
        "conventions.py",
        "copies.py",
        "diffs.py",
    ),
    *(
        "errors.py",
        "files.py",
        "freezing.py",
        "logs.py",
        "pipeline.py",
        "placement.py",
        "precompiling.py",
        "registry.py",
        "titan.py",
        "torch_internals.py",
        "training.py",
        "trunk.py",
        "version.py",
    ),
}


def test_libraries_are_imported_late(tmp_path: Path) -> None:
    """Those of models by whoever uses them, and matplotlib by a plot, without pyplot, which keeps figures."""
    program = (
        "import sys, torch, rewire.plotting\n"
        "libraries = {'transformers', 'timm', 'diffusers', 'torchvision', 'matplotlib'}\n"
        "assert not libraries & set(sys.modules)\n"
        f"rewire.plotting.plot_arcs({{'t': torch.eye(3)}}, {str(tmp_path / 'x.png')!r})\n"
        "assert libraries & set(sys.modules) == {'matplotlib'} and 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT.parent)
