"""The module of an ejected model: its edited functions, in subclasses of the original classes."""

from __future__ import annotations

import ast
import functools
import keyword
import linecache
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

from rewire.attributes import CONNECTIONS, gate_of
from rewire.code.edited import Edited, edits_of, is_edited, original_class
from rewire.code.functions import undecorated
from rewire.code.text import Lines
from rewire.ejecting.connecting import EJECTED
from rewire.ejecting.names import Binding, Replacement, bindings, import_statements, replaced
from rewire.ejecting.runtime import Runtime
from rewire.errors import EditError
from rewire.passes.editing.connect import StreamsToTensors
from rewire.passes.editing.helper_gate import HelperGate
from rewire.patterns import is_pretrained
from rewire.runtime.connection import SeparateNorms, connections
from rewire.runtime.gate import Gate
from rewire.runtime.layout import Layout
from rewire.runtime.live import Entry
from rewire.topologies.registry import options_of
from rewire.torch_internals import forward_hooks

RUNTIME = "rewire_runtime"
PART_OF = "part_of"
_IMPORTED = ("Function", "Layout", "connect")
_DATA = ("TRUNKS", "MODULES", "COLLECTING", "NORMS", "LISTS")


class Module:
    """The source of the module.

    Args:
        model: a rewired model.
        runtime: name of the runtime module, from which it imports.
        prepare: name in the runtime of the function that prepares a plain model (`Pattern.prepare`), if there is one.
        others: other classes that load the model's weights, with another head or none, or a part of it.

    Attributes:
        root: name of the model's class in the file.
        names: names of the other classes.

    Raises:
        EditError: a class or function of the model has no name that another file could import.
    """

    def __init__(self, model: nn.Module, runtime: Runtime, prepare: str = "", others: Sequence[type] = ()) -> None:
        self.model, self._runtime, self._prepare = model, runtime, prepare
        self._imports: dict[str, Binding] = {}
        self._headers: dict[str, None] = {}  # licences
        edited = {path: module for path, module in model.named_modules() if is_edited(module)}
        keys = {path: (original_class(module), tuple(edits_of(module).values())) for path, module in edited.items()}
        root = original_class(model) if is_edited(model) else type(model)
        self._taken = {*_IMPORTED, PART_OF, "check_ejected", *_DATA, "connected"}
        self.root = self._free(root.__name__)
        self.names = {cls: self._free(cls.__name__) for cls in others}
        made = {root, *others}
        self._classes = {
            key: self._free(f"Edited{key[0].__name__}" if key[0] in made else key[0].__name__)
            for key in dict.fromkeys(keys.values())
        }
        self._class_of = {path: self._classes[key] for path, key in keys.items()}
        helpers = {(gate.original, gate.source): None for _, _, gate in _gates(model) if isinstance(gate, HelperGate)}
        self._helpers = {key: self._free(key[0].__name__) for key in helpers}
        self._bodies = [self._helper(*key, name) for key, name in self._helpers.items()]
        self._bodies += [self._class(cls, edits, name) for (cls, edits), name in self._classes.items()]
        self._bodies += [self._made(root, "", self.root), self._connected(root)]
        self._bodies += [self._made(cls, self._base, name) for cls, name in self.names.items()]

    def text(self) -> str:
        """The source of the file."""
        topologies = {self._topology(connection.layout) for connection in connections(self.model).values()}
        part_of = PART_OF if self.names else ""
        of_runtime = sorted({*_IMPORTED, *topologies, *filter(None, [self._prepare, part_of])})
        future = ["from __future__ import annotations\n"] if self._postponed else []
        runtime = (
            f"from .{RUNTIME} import check_ejected\n\n"
            f"check_ejected({EJECTED!r}, __name__)  # before it lacks a name\n\n"
            f"from .{RUNTIME} import {', '.join(of_runtime)}  # noqa: E402\n"
        )
        head = [*self._headers, self._docstring(), *future, *import_statements(self._imports), "", runtime]
        return "\n".join([*head, self._data(), "\n\n\n".join(self._bodies), "", "", self._modules()])

    def _class(self, cls: type, edits: Iterable[Edited], name: str) -> str:
        head = f"class {name}({self._qualified(cls)}):"
        methods = [self._method(cls, edited) for edited in edits]
        return "\n".join([head, *(methods or ['    """Only passes a residual stream on."""'])]).rstrip()

    def _made(self, cls: type, path: str, name: str) -> str:
        """A subclass of ``cls`` that connects its models when they are made; ``path``: its path in the ejected one."""
        edited = path in self._class_of and original_class(self.model.get_submodule(path)) is cls
        base = self._class_of[path] if edited else self._qualified(cls)
        lines = [f"class {name}({base}):"]
        if is_pretrained(self.model):
            kept = "_keep_in_fp32_modules_strict"
            lines += [f'    {kept} = [*({base}.{kept} or ()), "{CONNECTIONS}"]', ""]
        part = "" if name == self.root else repr(self._base)
        lines += [
            "    def __init__(self, *args, **kwargs):",
            "        super().__init__(*args, **kwargs)",
            *(f"        {line}" for line in self._steps("self", part)),
        ]
        return "\n".join(lines)

    def _connected(self, cls: type) -> str:
        base = self._qualified(cls)
        plain = "plain_model"  # the user's file is often model.py, and imported
        return f"""def connected({plain}: {base}) -> {self.root}:
    \"\"\"Make a plain model a rewired one, in place, where it is made otherwise than by calling its class.\"\"\"
    if type({plain}) is not {base}:
        raise TypeError(f"the model has to be a {base}, not {{type({plain}).__name__}}")
    {plain}.__class__ = {self.root}
    {f"{chr(10)}    ".join(self._steps(plain))}
    return {plain}"""

    def _steps(self, model: str, base: str = "") -> list[str]:
        """Statements that rewire a plain model; for another class, ``base`` is the ejected base model's path."""
        prepared = [f"{self._prepare}({model})"] if self._prepare else []
        data = ", ".join(_DATA)
        given = f"*{PART_OF}({model}, {base}, {data})" if base else data
        return [*prepared, f"connect({model}, {given})"]

    @functools.cached_property
    def _base(self) -> str:
        """The path of the model's base model."""
        own: Any = self.model
        return next(path for path, module in own.named_modules() if module is own.base_model)

    def _method(self, cls: type, edited: Edited) -> str:
        original = edited.original(cls).function
        assert original is not None
        text = edited.source
        if not text.startswith("    ") or text.startswith("     "):
            text = textwrap.indent(textwrap.dedent(text), "    ")
        return self._named(text, original, cls).replace(f"def {original.__name__}(", f"def {edited.name}(", 1)

    def _helper(self, original: FunctionType, source: str, name: str) -> str:
        _check_importable(original, original.__globals__["__name__"], original.__qualname__)
        text = self._named(textwrap.dedent(source), original, None)
        return text.replace(f"def {original.__name__}(", f"def {name}(", 1).rstrip()

    def _named(self, text: str, function: FunctionType, cls: type | None) -> str:
        """A function's source with the names that this file has for the globals that it reads."""
        self._keep_header(function)
        code, module = function.__code__, function.__globals__["__name__"]
        if set(code.co_freevars) - {"__class__"}:
            raise _not_importable(f"what {function.__qualname__} encloses ({', '.join(code.co_freevars)})", module)
        indented = text[:1].isspace()
        whole = f"if 1:\n{text}" if indented else text
        tree, lines = ast.parse(whole), Lines(whole)
        local = {*code.co_varnames, *code.co_cellvars}
        changes = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Global):
                raise EditError(f"{function.__qualname__} assigns to names of its module, which another file cannot")
            if isinstance(node, ast.Attribute) and node.attr == "of" and gate_of("") in ast.unparse(node.value):
                raise _not_importable(f"a function that {function.__qualname__} is given and calls", module)
            if isinstance(node, (ast.Attribute, ast.Name)):
                _check_mangling(node, function, cls)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super":
                if not node.args:  # it would mean the class here, which derives from the intended one
                    itself = function.__code__.co_varnames[0]
                    owner = self._qualified(_owner(function))
                    changes.append(Replacement(*lines.span(node), f"super({owner}, {itself})"))
            elif isinstance(node, ast.Name) and node.id == "__class__":
                changes.append(Replacement(*lines.span(node), self._qualified(_owner(function))))
            elif isinstance(node, ast.Name) and node.id not in local and node.id in function.__globals__:
                new = self._import(module, node.id, function.__globals__[node.id])
                if new != node.id:
                    changes.append(Replacement(*lines.span(node), new))
        made = replaced(whole, changes)
        return made.removeprefix("if 1:\n") if indented else made

    def _free(self, name: str) -> str:
        """``name``, or a variant of it that is free in this file."""
        if not name.isidentifier() or keyword.iskeyword(name):
            raise EditError(f"{name!r} is no name that can be written in a file")
        made, number = name, 2
        while made in self._taken:
            made, number = f"{name}_{number}", number + 1
        self._taken.add(made)
        return made

    def _import(self, module: str, name: str, value: object) -> str:
        """Import ``name`` from ``module``, and return its name in this file."""
        binding = _binding(module, name, value)
        known = next((own for own, imported in self._imports.items() if imported == binding), None)
        if known is not None:
            return known
        own = self._free(name)
        self._imports[own] = binding
        return own

    def _qualified(self, cls: type) -> str:
        """The expression for a class of the original model in this file."""
        _check_importable(cls, cls.__module__, cls.__qualname__)
        module = sys.modules[cls.__module__]
        return f"{self._import(cls.__module__, cls.__module__.rpartition('.')[2], module)}.{cls.__qualname__}"

    def _keep_header(self, function: FunctionType) -> None:
        """Keep the comments at the top of a function's file: its licence."""
        lines = [line.rstrip() for line in linecache.getlines(function.__code__.co_filename)]
        if lines and lines[0].startswith("#!"):
            del lines[0]
        end = next((n for n, line in enumerate(lines) if not line.startswith("#")), len(lines))
        if lines[:end]:
            self._headers["\n".join(lines[:end])] = None

    @functools.cached_property
    def _postponed(self) -> bool:
        """Whether the original files postpone the evaluation of annotations."""
        functions = [key[0] for key in self._helpers]
        for cls, edits in self._classes:
            functions += [f for f in (edited.original(cls).function for edited in edits) if f is not None]
        return any(isinstance(next(iter(f.__annotations__.values()), None), str) for f in functions)

    def _docstring(self) -> str:
        cls = original_class(self.model) if is_edited(self.model) else type(self.model)
        return (
            f'"""{cls.__name__} with learned depth connections, written by rewire.eject.\n\n'
            f"It needs {RUNTIME}.py, which stands beside it, and not rewire. Classes here are those of\n"
            f"{cls.__module__} with edited forwards; making the model puts them in the place of the original ones.\n"
            '"""\n'
        )

    def _topology(self, layout: Layout) -> str:
        cls = type(layout.topology)
        return self._runtime.name_of(cls.__module__, cls.__name__)

    def _data(self) -> str:
        paths = {module: path for path, module in self.model.named_modules()}
        trunks = {paths[c]: self._layout(c.layout) for c in connections(self.model).values()}
        collecting = {
            path: sorted(hook.trunks)
            for path, module in self.model.named_modules()
            for hook in forward_hooks(module).values()
            if isinstance(hook, StreamsToTensors)
        }
        norms = [
            path.rpartition(".")[0] for path, module in self.model.named_modules() if isinstance(module, SeparateNorms)
        ]
        return (
            "#: Where the weights of a trunk are, and what connects its residual adds.\n"
            f"TRUNKS = {_dict(trunks)}\n\n"
            "#: Modules that may return hidden states that they collected.\n"
            f"COLLECTING = {collecting!r}\n\n"
            f"#: Norms that keys and values have copies of.\nNORMS = {norms!r}\n\n"
            f"#: Lists of blocks, and how many modules each has.\nLISTS = {self._lists()!r}\n\n"
        )

    def _lists(self) -> dict[str, int]:
        above = dict.fromkeys(path.rpartition(".")[0] for path, _, _ in _gates(self.model))
        lists = {path: self.model.get_submodule(path) for path in above}
        return {path: len(one) for path, one in lists.items() if isinstance(one, (nn.ModuleList, nn.Sequential))}

    def _layout(self, layout: Layout) -> str:
        options = options_of(layout.topology, type(layout.topology))
        for name, value in options.items():
            if not _is_literal(value):
                raise EditError(
                    f"option {name}={value!r} of topology '{layout.topology.registered_name}' cannot be written as text"
                )
        topology = f"{self._topology(layout)}({', '.join(f'{name}={value!r}' for name, value in options.items())})"
        given = {
            "units": layout.units,
            "width": layout.dims.width,
            "attention": tuple(sorted(layout.dims.attention)),
            "channel_dim": layout.channel_dim,
            "posts": tuple(sorted(layout.posts)),
            "loops": layout.loops,
            "overwritten": tuple(sorted(layout.overwritten)),
            "repeated": layout.repeated,
            "read_later": layout.read_later,
        }
        rest = "".join(f"        {name}={value!r},\n" for name, value in given.items())
        return f"Layout(\n        {layout.trunk!r},\n        {topology},\n{rest}    )"

    def _modules(self) -> str:
        of_modules: dict[str, dict[str, str]] = {}
        for path, name, gate in _gates(self.model):
            trunks = ", ".join(map(_entry, gate.entries))
            helper = ""
            if isinstance(gate, HelperGate):
                helper = f", {self._helpers[gate.original, gate.source]}"
            function = f"Function({Path(gate.where).name!r}, [{trunks}]{helper})"
            of_modules.setdefault(path, {})[name] = function
        written = {}
        for path, functions in of_modules.items():
            inner = "".join(f"            {name!r}: {function},\n" for name, function in functions.items())
            written[path] = f"(\n        {self._class_of.get(path)},\n        {{\n{inner}        }},\n    )"
        return (
            "#: Modules that streams run through: their classes, and for each edited function the trunks, with the\n"
            "#: adds that it makes by the number of those that were made before.\n"
            f"MODULES = {_dict(written)}\n"
        )


def is_cut(model: nn.Module) -> bool:
    """Whether the model is a pipeline stage, whose streams continue on other stages."""
    return any(entry.cut_at is not None for _, _, gate in _gates(model) for entry in gate.entries)


def _gates(model: nn.Module) -> Iterator[tuple[str, str, Gate]]:
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Gate):
                yield path, name, value


def _entry(entry: Entry) -> str:
    given = {"trunk": entry.trunk, "begins": entry.begins, "adds": entry.adds}
    flags = ("ordered", "outside", "read_below", "branch_given", "runs_blocks")
    given |= {name: True for name in flags if getattr(entry, name)}
    given |= {name: known for name in ("iterations", "calls") if (known := getattr(entry, name))}
    return f"dict({', '.join(f'{name}={value!r}' for name, value in given.items())})"


def _dict(written: dict[str, str]) -> str:
    return "{\n" + "".join(f"    {key!r}: {value},\n" for key, value in written.items()) + "}"


def _is_literal(value: object) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (SyntaxError, ValueError):
        return False


def _binding(module: str, name: str, value: object) -> Binding:
    """The binding by which another file can import the object ``name`` of ``module``."""
    if isinstance(value, ModuleType):
        found = Binding(value.__name__, "")
    elif module.partition(".")[0] == "rewire":  # a forward of rewire's that replaces a fast path
        found = bindings(module)[name]
    else:
        found = Binding(module, name)
    if found.module.partition(".")[0] == "rewire" or found.module == "__main__":
        raise _not_importable(f"'{name}'", found.module)
    return found


def _owner(function: FunctionType) -> type:
    """The class in whose body a method is defined."""
    qualname = function.__qualname__.rpartition(".")[0]
    module = function.__globals__["__name__"]
    found = _looked_up(module, qualname)
    if not isinstance(found, type):
        raise _not_importable(qualname, module)
    return found


def _check_importable(value: object, module: str, qualname: str) -> None:
    if module == "__main__" or "<locals>" in qualname or _looked_up(module, qualname) is not value:
        raise _not_importable(qualname, module)


def _looked_up(module: str, qualname: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return undecorated(found).function if isinstance(found, FunctionType) else found


def _check_mangling(node: ast.Attribute | ast.Name, function: FunctionType, cls: type | None) -> None:
    name = node.attr if isinstance(node, ast.Attribute) else node.id
    if not name.startswith("__") or name.endswith("__") or cls is None:
        return
    if _owner(function).__name__.lstrip("_") != cls.__name__.lstrip("_"):
        raise EditError(f"{function.__qualname__} reads {name}, a private name of another class than {cls.__name__}")


def _not_importable(what: str, module: str) -> EditError:
    where = f"module {module}"
    return EditError(
        f"{what} ({where}) has no name that another file can import. Put it at the top level of a file of its own, and "
        "rewire the model again"
    )
