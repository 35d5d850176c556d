"""From torch.fx graphs back to the Python source of one ``forward``.

Names come from checked identifiers only; everything that is no literal is reached through a global of the generated
function. Nothing that a model's configuration or checkpoint holds can become code.
"""

from __future__ import annotations

import dataclasses
import inspect
import keyword
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from rewire.errors import TraceError
from rewire.tracing.guards import unsupported
from rewire.tracing.tracer import KEYWORDS, STAR, star

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**", "matmul": "@",
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "and_": "&", "or_": "|", "xor": "^",
    "lshift": "<<", "rshift": ">>", "is_": "is", "is_not": "is not",
    "iadd": "+", "isub": "-", "imul": "*", "itruediv": "/",
}  # fmt: skip
_PREFIX = {"neg": "-", "pos": "+", "invert": "~"}
_STREAM_NAME = "stream"
_UNPACKED = "unpacked"
#: Variables that would hide what generated forwards use: a child may be called ``self``.
_RENAMED = {"self": "self_", "torch": "torch_", "getattr": "getattr_", "slice": "slice_", "float": "float_"}


@dataclasses.dataclass
class Line:
    """One statement and the node that it computes (None for the closing ``return``)."""

    node: fx.Node | None
    text: str


@dataclasses.dataclass
class Body:
    """The lines of one path, and the tests on it as (text of the condition, outcome)."""

    nones: frozenset[str]
    lines: list[Line] | None
    tests: list[tuple[str, bool]]
    error: str = ""


def print_forward(
    signature: inspect.Signature,
    tested: Sequence[str],
    bodies: Sequence[Body],
    table: dict[str, Any],
) -> str:
    """Python source of a ``forward`` that follows the path that its arguments select.

    Args:
        signature: of the original forward; it is kept, annotations aside.
        tested: parameters whose None-ness selects a path.
        bodies: the paths' statements.
        table: globals of the generated function; names are added to it. Start it with `globals_for`.

    Raises:
        TraceError: paths that share code up to a test differ before it.
    """
    head = f"def forward({_parameters(signature, table)}):"
    lines = _by_nones(list(tested), list(bodies))
    for name in [name for name, value in table.items() if value is _Local]:
        del table[name]
    return "\n".join([head, *(f"    {line}" for line in lines)]) + "\n"


class _Local:
    """Stands in a table of globals for a name that is a local variable."""


def globals_for(signature: inspect.Signature, graphs: Sequence[fx.Graph]) -> dict[str, Any]:
    """A table of globals in which the names of the forward's own variables are taken."""
    names = {_name(node) for graph in graphs for node in graph.nodes}
    table: dict[str, Any] = dict.fromkeys((*signature.parameters, *names, _STREAM_NAME), _Local)
    return {**table, "torch": torch, "unsupported": unsupported}


def _by_nones(tested: list[str], bodies: list[Body]) -> list[str]:
    if not tested:
        return _by_tests(bodies, start=0, depth=0)
    name, rest = tested[0], tested[1:]
    absent = _by_nones(rest, [body for body in bodies if name in body.nones])
    given = _by_nones(rest, [body for body in bodies if name not in body.nones])
    if absent == given:
        return given
    if len(absent) == 1:  # a refusal: no need to indent the rest
        return [f"if {_identifier(name)} is None:", *_indented(absent), *given]
    return [f"if {_identifier(name)} is not None:", *_indented(given), *absent]


def _by_tests(bodies: list[Body], start: int, depth: int) -> list[str]:
    """Lines from number ``start`` on of paths that agree on their first ``depth`` tests."""
    good = [body for body in bodies if body.lines is not None]
    if not good:
        return [f"unsupported({bodies[0].error!r})"]
    first = good[0]
    assert first.lines is not None
    if len(bodies) == 1:
        return [line.text for line in first.lines[start:]]
    condition = first.tests[depth][0]
    fork = next(
        (n + 1 for n, line in enumerate(first.lines) if line.node is not None and _name(line.node) == condition), start
    )
    fork = max(fork, start)
    for body in good:
        assert body.lines is not None
        if [line.text for line in body.lines[:fork]] != [line.text for line in first.lines[:fork]]:
            raise TraceError(f"its code before the test '{condition}' depends on the outcome of the test")
    shared = [line.text for line in first.lines[start:fork]]
    holds = _by_tests([body for body in bodies if body.tests[depth][1]], fork, depth + 1)
    fails = _by_tests([body for body in bodies if not body.tests[depth][1]], fork, depth + 1)
    if holds == fails:
        return [*shared, *fails]
    return [*shared, f"if {condition}:", *_indented(holds), *fails]


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def body_of(graph: fx.Graph | None, tests: Sequence[tuple[fx.Node, bool]], nones: frozenset[str],
            table: dict[str, Any], error: str = "") -> Body:  # fmt: skip
    """One path's statements, or its reason for having none."""
    named = [(condition_of(node), outcome) for node, outcome in tests]
    if graph is None:
        return Body(nones, None, named, error)
    special = next(iter(reversed(graph.nodes))).meta.get("returns")
    if special:
        raise TraceError(f"it returns a {special}")
    return Body(nones, statements(graph, table), named)


def condition_of(node: fx.Node) -> str:
    """How a test on ``node`` is written."""
    return _attribute("self", str(node.target)) if _inlined(node) and node.op == "get_attr" else _name(node)


def statements(graph: fx.Graph, table: dict[str, Any], written: dict[str, str] | None = None) -> list[Line]:
    """The statements of one graph.

    Args:
        graph: what to print.
        table: globals of the generated function; names are added to it.
        written: placeholders that are to be written as another text.
    """
    writer = _Writer(table, written or {})
    lines = []
    for node in graph.nodes:
        if node.op == "placeholder" or _inlined(node) or (_pure(node) and not node.users and not _tested(node)):
            continue
        if _is_element(node):
            continue  # named where the tuple is unpacked
        if node.meta.get(_UNPACKED):
            elements = {user.args[1]: _name(user) for user in node.users if user.users}
            names = [elements.get(index, "_") for index in range(len(node.users))]
            lines.append(Line(node, f"{', '.join(names)} = {writer.call(node)}"))
            continue
        if node.op == "output":
            lines.append(Line(None, f"return {writer.value(node.args[0])}"))
        elif node.users or _tested(node):
            lines.append(Line(node, f"{_name(node)} = {writer.call(node)}"))
        else:
            lines.append(Line(node, writer.call(node)))
    return lines


def _name(node: fx.Node) -> str:
    if _STREAM_NAME in node.meta:
        return str(node.meta[_STREAM_NAME])
    return str(node.target) if node.op == "placeholder" else _RENAMED.get(node.name, node.name)


def _inlined(node: fx.Node) -> bool:
    """Whether the node is written where it is used: parameters, and one element of a returned tuple."""
    if node.op == "get_attr":
        return not node.meta.get("dynamic")
    if node.target is star or node.meta.get("inline"):
        return True
    if (
        _STREAM_NAME in node.meta
        or node.target is not operator.getitem
        or not isinstance(node.args[1], int)
        or len(node.users) != 1
    ):
        return False
    source = node.args[0]
    return isinstance(source, fx.Node) and source.op == "call_module" and source.next is node


def _is_element(node: fx.Node) -> bool:
    """Whether ``node`` is an element of a tuple that is printed as ``a, b = ...``."""
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, fx.Node) and bool(source.meta.get(_UNPACKED))


def _pure(node: fx.Node) -> bool:
    return node.target in (operator.getitem, getattr) or node.op == "get_attr"


def _tested(node: fx.Node) -> bool:
    return bool(node.meta.get("tested"))


class _Writer:
    """Writes the values of one graph as Python expressions."""

    def __init__(self, table: dict[str, Any], written: dict[str, str]) -> None:
        self.table, self.written = table, written

    def call(self, node: fx.Node) -> str:
        args, kwargs = node.args, node.kwargs
        if node.op == "get_attr":
            return _attribute("self", str(node.target))
        if node.op == "call_module":
            return f"{_attribute('self', str(node.target))}({self.arguments(args, kwargs)})"
        if node.op == "call_method":
            receiver = self.value(args[0], tight=True)
            return f"{receiver}.{_identifier(str(node.target))}({self.arguments(args[1:], kwargs)})"
        return self.function(node.target, args, kwargs)

    def function(self, target: Any, args: Any, kwargs: Any) -> str:
        if target is star:
            return f"*{self.value(args[0], tight=True)}"
        if target is getattr and len(args) == 2:
            return f"{self.value(args[0], tight=True)}.{_identifier(args[1])}"
        if target is operator.getitem:
            return f"{self.value(args[0], tight=True)}[{self.index(args[1])}]"
        if getattr(target, "__module__", "") == "_operator" and not kwargs:
            symbol = target.__name__
            if symbol in _INFIX and len(args) == 2:
                return f"{self.value(args[0], tight=True)} {_INFIX[symbol]} {self.value(args[1], tight=True)}"
            if symbol in _PREFIX and len(args) == 1:
                return f"{_PREFIX[symbol]}{self.value(args[0], tight=True)}"
        return f"{self.named(target)}({self.arguments(args, kwargs)})"

    def arguments(self, args: Any, kwargs: Any) -> str:
        parts = [self.value(arg) for arg in args]
        for key, value in kwargs.items():
            parts.append(f"**{_marker(value)}" if key == KEYWORDS else f"{_identifier(key)}={self.value(value)}")
        return ", ".join(parts)

    def index(self, index: Any) -> str:
        if isinstance(index, tuple) and index:
            return ", ".join(map(self.index, index)) + ("," if len(index) == 1 else "")
        if isinstance(index, slice):
            bounds = ["" if b is None else self.value(b) for b in (index.start, index.stop, index.step)]
            return ":".join(bounds if bounds[2] else bounds[:2])
        return self.value(index)

    def value(self, value: Any, tight: bool = False) -> str:
        """``value`` as an expression; ``tight`` ones bind at least as strongly as an attribute access."""
        if isinstance(value, fx.Node):
            if value.op == "placeholder":
                return self.placeholder(str(value.target))
            return self.call(value) if _inlined(value) else _name(value)
        if isinstance(value, tuple):
            if hasattr(value, "_fields"):
                return f"{self.named(type(value))}({', '.join(map(self.value, value))})"
            return f"({', '.join(map(self.value, value))}{',' if len(value) == 1 else ''})"
        if isinstance(value, list):
            return f"[{', '.join(map(self.value, value))}]"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{self.value(k)}: {self.value(v)}" for k, v in value.items()) + "}"
        if isinstance(value, slice):
            return f"slice({self.value(value.start)}, {self.value(value.stop)}, {self.value(value.step)})"
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        if isinstance(value, (bool, int, float, complex, str, bytes, type(None), type(...))):
            text = "..." if value is ... else repr(value)
            return f"({text})" if tight and text.startswith("-") else text
        if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
            return str(value)
        if isinstance(value, torch.device):
            return f"torch.{value!r}"
        return self.named(value)

    def placeholder(self, target: str) -> str:
        if target in self.written:
            return self.written[target]
        if target.startswith(STAR):
            return f"*{_identifier(target.removeprefix(STAR))}"
        return _identifier(target)

    def named(self, value: Any) -> str:
        """``value`` through a global: by its public torch path where it has one."""
        for prefix, namespace in (
            ("torch", torch),
            ("torch.nn.functional", torch.nn.functional),
            ("torch.Tensor", torch.Tensor),
        ):
            name = getattr(value, "__name__", "")
            if name.isidentifier() and getattr(namespace, name, None) is value:
                return f"{prefix}.{name}"
        name = getattr(value, "__name__", type(value).__name__.lower())
        name = name if name.isidentifier() else "constant"
        unique, number = name, 0
        while unique in self.table and self.table[unique] is not value:
            number += 1
            unique = f"{name}_fn{number if number > 1 else ''}"
        self.table[unique] = value
        return unique


def _marker(value: Any) -> str:
    return _identifier(str(value.target).removeprefix(KEYWORDS))


def _attribute(root: str, path: str) -> str:
    """``self.layers[0].attn`` for the path ``layers.0.attn``; an empty path is ``self``."""
    text = root
    for part in filter(None, path.split(".")):
        if text != root and part.isascii() and part.isdecimal() and part == str(int(part)):  # in a container
            text += f"[{part}]"
        elif part.isidentifier() and not keyword.iskeyword(part):
            text += f".{part}"
        else:
            text = f"getattr({text}, {part!r})"
    return text


def _identifier(name: str) -> str:
    if not name.isidentifier():
        raise TraceError(f"{name!r} is no identifier")
    return name


def _parameters(signature: inspect.Signature, table: dict[str, Any]) -> str:
    writer = _Writer(table, {})
    parts: list[str] = []
    star_written = False
    parameters = list(signature.parameters.values())
    parameters[0] = parameters[0].replace(name="self")  # whatever the original calls it
    for position, parameter in enumerate(parameters):
        name = _identifier(parameter.name)
        if parameter.kind is parameter.VAR_POSITIONAL:
            name, star_written = f"*{name}", True
        elif parameter.kind is parameter.VAR_KEYWORD:
            name = f"**{name}"
        elif parameter.kind is parameter.KEYWORD_ONLY and not star_written:
            parts.append("*")
            star_written = True
        default = parameter.default
        parts.append(name if default is parameter.empty else f"{name}={writer.value(default)}")
        following = parameters[position + 1 :]
        if parameter.kind is parameter.POSITIONAL_ONLY and not any(p.kind is p.POSITIONAL_ONLY for p in following):
            parts.append("/")
    return ", ".join(parts)
