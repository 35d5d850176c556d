"""The runtime file of an ejected model: the parts of rewire that its forwards run, as one module.

It is gathered from rewire's own source, definition by definition: `ROOTS`, the model's topologies, and all names that
these read. So there is no second version of streams and formulas that could differ from the first. Methods whose names
no gathered source reads are left out, except those in `KEPT`, and so are those in `OMITTED`. Sums come from
`rewire.ejecting.plain` instead of `rewire.mixes` and `rewire.kernels`, and ranks are not compared.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import functools
import graphlib
import importlib
from collections.abc import Iterable, Sequence

from rewire.code.text import Lines
from rewire.ejecting import plain
from rewire.ejecting.names import (
    Binding,
    Replacement,
    bindings,
    defined_by,
    import_statements,
    parsed,
    renamed,
    replaced,
    whole,
)

#: The names that ejected modules import.
ROOTS = (
    ("rewire.runtime.layout", "Layout"),
    ("rewire.runtime.connection", "coefficients"),
    ("rewire.ejecting.connecting", "Function"),
    ("rewire.ejecting.connecting", "check_ejected"),
    ("rewire.ejecting.connecting", "connect"),
)

#: Methods for recipes, which torch would call; in ejected models `Ejected` replaces them.
_OF_RECIPES = ("get_extra_state", "set_extra_state", "_load_from_state_dict", "register_state_dict_pre_hook")
OMITTED = {("Connection", name) for name in _OF_RECIPES}
#: Methods that other packages call.
KEPT = {("Ejected", "load_weights")}

_PLAIN = plain.__name__


@dataclasses.dataclass(frozen=True, order=True)
class Definition:
    """A top-level name of a module whose source is gathered."""

    module: str
    name: str


class Runtime:
    """The text of a runtime file.

    Args:
        roots: what it has to contain, as module and name. Source is gathered from their modules, and from rewire's.
    """

    def __init__(self, roots: Sequence[tuple[str, str]]) -> None:
        self._roots = [Definition(*root) for root in roots]
        self._own = {module for module, _ in roots}
        self._attributes: set[Definition] = set()  # definitions that are read as attributes of their modules
        self._gather_all(None)
        self._names = self._given_names()

    def name_of(self, module: str, name: str) -> str:
        """The name of a gathered definition in the file."""
        return self._names[Definition(module, name)]

    def text(self, heading: str, callers: str) -> str:
        """The file.

        Args:
            heading: the top of the file, with its docstring.
            callers: source of the modules that import it. Methods that neither they nor the file itself read are left
                out.
        """
        self._gather_all(_attributes_in([ast.parse(callers)]))
        parts = [part for module in self._ordered() for part in self._parts(module)]  # may add imports
        imports = import_statements({name: binding for binding, name in self._imports.items()})
        return "\n".join([heading, "from __future__ import annotations\n", *imports, *parts])

    def _gather_all(self, read: set[str] | None) -> None:
        """Gather what the roots need, with methods whose names are in ``read`` or in gathered source."""
        self._found: dict[Definition, ast.stmt] = {}
        self._imports: dict[Binding, str] = {}  # binding -> name in the file
        self._read = read  # None: all
        self._unread: dict[str, list[tuple[str, ast.stmt]]] = {}  # by name, methods that no gathered source reads
        for root in self._roots:
            self._gather(root)

    def _gather(self, definition: Definition) -> None:
        if definition in self._found:
            return
        module, node = definition.module, bindings(definition.module)[definition.name].node
        assert node is not None
        self._found[definition] = node
        for part in ast.iter_child_nodes(node):
            if part in getattr(node, "decorator_list", ()) and _registers(part):
                continue
            if (
                isinstance(node, ast.ClassDef)
                and isinstance(part, ast.FunctionDef)
                and not self._is_read(part, definition)
            ):
                self._unread.setdefault(part.name, []).append((module, part))
            else:
                self._visit(module, part)
        for statement in self._statements(module):
            if definition.name in _names_in([statement]):
                self._visit(module, statement)

    def _visit(self, module: str, part: ast.AST) -> None:
        for used in _names_in([part]):
            self._need(module, used)
        if self._read is not None:
            self._read |= _attributes_in([part])
            for name in sorted(self._read.intersection(self._unread)):
                for method in self._unread.pop(name, ()):
                    self._visit(*method)

    def _is_read(self, method: ast.FunctionDef, owner: Definition) -> bool:
        """Whether gathered source, Python or torch uses a method of a class."""
        if (owner.name, method.name) in OMITTED:
            return False
        if self._read is None or method.name in self._read or method.name.startswith("__"):
            return True
        if (owner.name, method.name) in KEPT:
            return True
        bases = getattr(importlib.import_module(owner.module), owner.name).__mro__
        return any(method.name in vars(base) for base in bases if not self._is_own(base.__module__))

    def _need(self, module: str, used: str) -> None:
        """Gather or import ``used``, which source of ``module`` reads: a name, or an attribute of a module."""
        name, _, attribute = used.partition(".")
        binding = bindings(module).get(name)
        if binding is None:
            return
        target = self._resolved(binding, attribute)
        if isinstance(target, Definition):
            if not binding.name:
                self._attributes.add(target)
            self._gather(target)
        elif not self._is_own(binding.module):
            self._import(name, binding)

    def _import(self, name: str, binding: Binding) -> None:
        if binding not in self._imports:
            taken = name in self._imports.values()
            self._imports[binding] = f"{binding.module.rpartition('.')[2]}_{name}" if taken else name

    def _resolved(self, binding: Binding, attribute: str = "") -> Definition | None:
        """The definition behind a name, or behind an attribute of it; None if its source is not gathered."""
        if not self._is_own(binding.module):
            return None
        if not binding.name:
            return self._defined(binding.module, attribute) if attribute else None
        return self._defined(binding.module, binding.name)

    def _is_own(self, module: str) -> bool:
        return module in self._own or module.partition(".")[0] == "rewire"

    def _defined(self, module: str, name: str) -> Definition | None:
        otherwise = module.startswith(("rewire.kernels.", "rewire.mixes.", "rewire.ranks."))
        if otherwise and bindings(_PLAIN).get(name, Binding("", "")).node is not None:
            return Definition(_PLAIN, name)
        binding = bindings(module)[name]
        return Definition(module, name) if binding.node is not None else self._resolved(binding)

    def _ordered(self) -> list[str]:
        """The modules, each after those that it needs at import: for base classes, decorators, constants."""
        needed: dict[str, set[str]] = {definition.module: set() for definition in self._found}
        parts: list[tuple[str, ast.AST]] = []
        parts += [(module, part) for module in needed for part in self._statements(module)]
        parts += [(definition.module, part) for definition, node in self._found.items() for part in _run_at_once(node)]
        for module, part in parts:
            for used in _names_in([part]):
                name, _, attribute = used.partition(".")
                binding = bindings(module).get(name)
                target = self._resolved(binding, attribute) if binding else None
                if target in self._found and target.module != module:
                    needed[module].add(target.module)
        return list(graphlib.TopologicalSorter({name: sorted(on) for name, on in needed.items()}).static_order())

    def _given_names(self) -> dict[Definition, str]:
        """A name for each definition.

        Names that several modules define get the module's last name as a prefix, and so do those that are read as its
        attributes: ``groups.count`` may be used next to a variable ``count``.
        """
        taken: dict[str, Definition] = {}
        for definition in self._found:
            name = definition.name
            if name in taken or name in self._imports.values() or definition in self._attributes:
                name = f"{definition.module.rpartition('.')[2]}_{name}"
            taken[name] = definition
        return {definition: name for name, definition in taken.items()}

    def _parts(self, module: str) -> Iterable[str]:
        """The gathered source of a module, in its order, below a heading."""
        nodes = {id(node): d for d, node in self._found.items() if d.module == module}
        parts = []
        for node in parsed(module)[1].body:
            wanted = id(node) in nodes
            if not wanted and node in self._statements(module):
                wanted = bool({d.name for d in nodes.values()}.intersection(_names_in([node])))
            if wanted:
                parts.append(self._edited(module, node))
        if parts:
            parts[0] = f"\n\n# -- {module} {'-' * (114 - len(module))}\n\n{parts[0].lstrip()}"
        return parts

    def _edited(self, module: str, node: ast.stmt) -> str:
        """The source of a statement, with names as in the file."""
        text = parsed(module)[0]
        lines = Lines(text)
        start, end = whole(lines, node)
        changes = self._renamed(module, node)
        unread = [method for methods in self._unread.values() for _, method in methods]
        for inner in ast.walk(node):
            if inner in unread:
                changes.append(Replacement(*whole(lines, inner), ""))
            for decorator in getattr(inner, "decorator_list", ()):
                if _registers(decorator):
                    first, last = lines.span(decorator)
                    changes.append(Replacement(first - 1, last + 1, ""))
        changes = [one for one in changes if not any(_inside(one, other) for other in changes)]
        body = replaced(text[start:end], changes, start).rstrip()
        for name in defined_by(node):
            new = self._names.get(Definition(module, name), name)
            if new != name:
                body = body.replace(f"class {name}", f"class {new}", 1).replace(f"def {name}", f"def {new}", 1)
        constant = isinstance(node, (ast.Assign, ast.AnnAssign)) and not body.startswith("#")
        return body if constant else f"\n\n{body}"

    def _renamed(self, module: str, node: ast.stmt) -> list[Replacement]:
        text = parsed(module)[0]
        lines, changes, names = Lines(text), [], {}
        annotations = {id(inner) for each in _annotations(node) for inner in ast.walk(each)}
        for inner in ast.walk(node):
            if isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name):
                binding = bindings(module).get(inner.value.id)
                target = self._resolved(binding, inner.attr) if binding and not binding.name else None
                if target in self._names:
                    changes.append(Replacement(*lines.span(inner), self._names[target]))
            elif isinstance(inner, ast.Name):
                binding = bindings(module).get(inner.id)
                target = self._resolved(binding) if binding and binding.name else None
                if target in self._names:
                    names[inner.id] = self._names[target]
                elif binding in self._imports:
                    names[inner.id] = self._imports[binding]
                elif id(inner) in annotations and not binding and not hasattr(builtins, inner.id):
                    self._import("Any", Binding("typing", "Any"))
                    names[inner.id] = "Any"  # imported only for type checkers
        return changes + renamed(text, node, names)

    @staticmethod
    @functools.cache
    def _statements(module: str) -> list[ast.stmt]:
        """Top-level statements of a module that define nothing, but act on definitions."""
        kinds = (ast.For, ast.Expr)
        return [
            node
            for node in parsed(module)[1].body
            if isinstance(node, kinds)
            and not (isinstance(node, ast.Expr) and (isinstance(node.value, ast.Constant) or _registers(node.value)))
        ]


def _names_in(nodes: Iterable[ast.AST]) -> list[str]:
    """Names that nodes read, in order, without duplicates; also attributes of names, as ``name.attribute``."""
    found: dict[str, None] = {}
    for node in nodes:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name):
                found[f"{inner.value.id}.{inner.attr}"] = None
            elif isinstance(inner, ast.Name):
                found[inner.id] = None
    return list(found)


def _attributes_in(nodes: Iterable[ast.AST]) -> set[str]:
    """Names of attributes that nodes read, or might read, as strings may be passed to ``getattr``."""
    found = set()
    for inner in (inner for node in nodes for inner in ast.walk(node)):
        if isinstance(inner, ast.Attribute):
            found.add(inner.attr)
        elif isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            found.add(inner.value)
    return found


def _run_at_once(node: ast.stmt) -> list[ast.AST]:
    """The parts of a definition that run when it is defined, and not when it is called."""
    if isinstance(node, ast.ClassDef):
        inner = [part for child in node.body for part in _run_at_once(child)]
        return [*node.bases, *node.decorator_list, *inner]
    if isinstance(node, ast.FunctionDef):
        return [*node.decorator_list, *node.args.defaults, *(d for d in node.args.kw_defaults if d)]
    return [node.value] if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value else []


def _annotations(node: ast.AST) -> list[ast.expr]:
    found = []
    for inner in ast.walk(node):
        for name in ("annotation", "returns"):
            one = getattr(inner, name, None)
            if isinstance(one, ast.expr):
                found.append(one)
    return found


def _registers(node: ast.AST) -> bool:
    """Whether an expression registers a topology's name."""
    inner = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    inner |= {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}
    return "register_topology" in inner


def _inside(one: Replacement, other: Replacement) -> bool:
    return one is not other and other.start <= one.start and one.end <= other.end and one != other
