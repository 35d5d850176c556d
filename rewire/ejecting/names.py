"""Names in Python source: what they are bound to, and how to replace them."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
from collections.abc import Mapping, Sequence
from types import ModuleType

from rewire.code.text import Lines


@dataclasses.dataclass(frozen=True)
class Binding:
    """What a name of a module is bound to.

    Attributes:
        module: the module that defines it; for an import, the imported module.
        name: its name in that module; empty for a module itself.
        node: its definition; None for an import.
    """

    module: str
    name: str
    node: ast.stmt | None = None

    def as_import(self, name: str) -> str:
        """The statement that imports it under ``name``."""
        if not self.name:
            return f"import {self.module}" + (f" as {name}" if name != self.module else "")
        return f"from {self.module} import {self.name}" + (f" as {name}" if name != self.name else "")


def import_statements(imports: Mapping[str, Binding]) -> list[str]:
    """The statements that import these names, grouped by module.

    Args:
        imports: name -> its binding.
    """
    plain = sorted(binding.as_import(name) for name, binding in imports.items() if not binding.name)
    modules: dict[str, list[str]] = {}
    for name, binding in sorted(imports.items()):
        if binding.name:
            alias = binding.name + (f" as {name}" if name != binding.name else "")
            modules.setdefault(binding.module, []).append(alias)
    return [*plain, *(_from(module, names) for module, names in sorted(modules.items()))]


def _from(module: str, names: Sequence[str]) -> str:
    line = f"from {module} import {', '.join(names)}"
    return line if len(line) <= 120 else f"from {module} import (\n    " + ",\n    ".join(names) + ",\n)"


@functools.cache
def parsed(module: str) -> tuple[str, ast.Module]:
    """The source of a module, and its syntax tree."""
    text = inspect.getsource(importlib.import_module(module))
    return text, ast.parse(text)


@functools.cache
def bindings(module: str) -> dict[str, Binding]:
    """The names at the top level of a module, except those that it imports only for type checkers."""
    found: dict[str, Binding] = {}
    for node in parsed(module)[1].body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                whole = alias.name if alias.asname else alias.name.partition(".")[0]
                found[alias.asname or whole] = Binding(whole, "")
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            assert node.level == 0
            for alias in node.names:
                found[alias.asname or alias.name] = _imported(node.module, alias.name)
        else:
            found |= {name: Binding(module, name, node) for name in defined_by(node)}
    return found


def _imported(module: str, name: str) -> Binding:
    value = getattr(importlib.import_module(module), name)
    if isinstance(value, ModuleType) and value.__name__ == f"{module}.{name}":
        return Binding(value.__name__, "")
    return Binding(module, name)


def defined_by(node: ast.stmt) -> list[str]:
    """The names that a top-level statement defines."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.AnnAssign):
        return [node.target.id] if isinstance(node.target, ast.Name) else []
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []


@dataclasses.dataclass(frozen=True)
class Replacement:
    """A range of characters of a text, and its replacement."""

    start: int
    end: int
    text: str


def whole(lines: Lines, node: ast.stmt) -> tuple[int, int]:
    """The range of a statement's lines, including its decorators and the comments right above it."""
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))]) - 1
    while first and lines.lines[first - 1].lstrip().startswith(b"#"):
        first -= 1
    assert node.end_lineno is not None
    return lines.offsets[first], lines.offsets[node.end_lineno]


def replaced(text: str, replacements: Sequence[Replacement], start: int = 0) -> str:
    """``text`` with replacements made; their positions count from ``start`` characters before it."""
    for one in sorted(replacements, key=lambda one: -one.start):
        text = text[: one.start - start] + one.text + text[one.end - start :]
    return text


def renamed(text: str, node: ast.AST, names: Mapping[str, str]) -> list[Replacement]:
    """Replacements for the reads of ``names`` inside ``node`` by their new names."""
    lines = Lines(text)
    return [
        Replacement(*lines.span(inner), names[inner.id])
        for inner in ast.walk(node)
        if isinstance(inner, ast.Name) and names.get(inner.id, inner.id) != inner.id
    ]
