"""The source of a function: its text, its syntax tree, and the expression of each instruction."""

from __future__ import annotations
import __future__

import ast
import dataclasses
import dis
import functools
import inspect
import linecache
import threading
import weakref
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeAlias

from rewire.errors import EditError

#: A range of source: first line, last line, first column, last column (in bytes).
Span: TypeAlias = tuple[int | None, int | None, int | None, int | None]

_NO_TYPE_PARAMETERS: Any = {"type_params": []} if "type_params" in ast.ClassDef._fields else {}  # from Python 3.12 on
_FUTURE = functools.reduce(
    int.__or__, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
)


@dataclasses.dataclass(frozen=True, eq=False)
class Lines:
    """A text that is indexed by lines and columns of a syntax tree.

    Attributes:
        text: the lines, with their indentation.
        first: number of the first line.
    """

    text: str
    first: int = 1

    @functools.cached_property
    def offsets(self) -> list[int]:
        """For each line of the text, the index of its first character."""
        offsets = [0]
        for line in lines_of(self.text):
            offsets.append(offsets[-1] + len(line))
        return offsets

    @functools.cached_property
    def lines(self) -> list[bytes]:
        return [line.encode() for line in lines_of(self.text)]

    def index(self, line: int, column: int) -> int:
        """The index in the text of a line and column (in bytes)."""
        row = line - self.first
        return self.offsets[row] + len(self.lines[row][:column].decode())

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Indices of a node's first character, and of the one after its last."""
        line, end_line, column, end_column = span_of(node)
        return self.index(line, column), self.index(end_line, end_column)

    def start(self, statement: ast.stmt) -> int:
        """Index of a statement's first character: that of its first decorator, if it has some."""
        lines = [statement.lineno, *(decorator.lineno for decorator in getattr(statement, "decorator_list", ()))]
        return self.index(min(lines), statement.col_offset)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Text(Lines):
    """The source of one function, as in its file, including decorators.

    Attributes:
        file: path of the file.
        tree: the definition's syntax tree, with the file's line numbers.
    """

    file: str
    tree: ast.FunctionDef | ast.AsyncFunctionDef

    @functools.cached_property
    def nodes(self) -> dict[Span, list[ast.AST]]:
        """Nodes by their place, outermost first.

        A method call is also listed at the method's name, where its instruction is if the name is not on the first line
        of the expression (``x.reshape(..`` and then ``).permute(..)``).
        """
        found: dict[Span, list[ast.AST]] = {}
        for node in ast.walk(self.tree):
            if hasattr(node, "lineno"):
                found.setdefault(span_of(node), []).append(node)
            method = node.func if isinstance(node, ast.Call) else None
            if isinstance(method, ast.Attribute) and method.lineno != method.end_lineno:
                start = (method.end_col_offset or 0) - len(method.attr.encode())
                place = method.end_lineno, node.end_lineno, start, node.end_col_offset  # type: ignore[attr-defined]
                found.setdefault(place, []).append(node)
        return found

    @functools.cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """The parent of each node."""
        return {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """All ancestors of a node, innermost first."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def statement(self, node: ast.AST) -> ast.stmt:
        """The innermost statement that contains a node, or is it."""
        return next(each for each in (node, *self.above(node)) if isinstance(each, ast.stmt))

    @functools.cached_property
    def _written(self) -> dict[ast.AST, str]:
        return {}

    def written(self, node: ast.AST) -> str:
        """What a node says, whatever its place: equal for equal expressions."""
        if node not in self._written:
            self._written[node] = ast.dump(node)
        return self._written[node]

    @functools.cached_property
    def names(self) -> set[str]:
        """Names of all variables that the function uses."""
        arguments = {node.arg for node in ast.walk(self.tree) if isinstance(node, ast.arg)}
        return arguments | {node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name)}

    @functools.cached_property
    def variables(self) -> set[str]:
        """Names that may hold the function's values: those that it binds, except by imports."""
        bound = {
            node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        return bound | {node.arg for node in ast.walk(self.tree) if isinstance(node, ast.arg)}

    @functools.cached_property
    def named(self) -> dict[str, list[ast.AST]]:
        """By name, the values that statements give it to, and the functions that they define."""
        found: dict[str, list[ast.AST]] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef):
                found.setdefault(node.name, []).append(node)
            elif isinstance(node, ast.Assign):
                for name in {target.id for target in node.targets if isinstance(target, ast.Name)}:
                    found.setdefault(name, []).append(node.value)
        return found

    @functools.cached_property
    def receiver(self) -> str:
        """The first positional parameter, ``self`` of a method; empty if there is none."""
        parameters = [*self.tree.args.posonlyargs, *self.tree.args.args]
        return parameters[0].arg if parameters else ""

    def unused(self, name: str) -> str:
        """``name``, or a variant of it that the function does not use."""
        while name in self.names:
            name += "_"
        return name

    def where(self, node: ast.AST | None = None) -> str:
        """File and line, for messages."""
        return f"{self.file}:{self.tree.lineno if node is None else node.lineno}"  # type: ignore[attr-defined]

    def at(self, code: CodeType, instruction: int) -> list[ast.AST]:
        """The nodes at the place of an instruction's expression or statement, outermost first.

        Args:
            code: code of the function, or of a function inside it.
            instruction: ``f_lasti`` of a frame.
        """
        return self.nodes.get(place_of(code, instruction), [])


def place_of(code: CodeType, instruction: int) -> Span:
    """The place of an instruction's expression."""
    return positions(code)[instruction // 2]


def written_at(place: tuple[CodeType, int] | None) -> tuple[str, str]:
    """File and line of an instruction, and the source there; empty if unknown."""
    if place is None:
        return "", ""
    code, (line, end_line, start, end) = place[0], place_of(*place)
    if line is None:
        return code.co_filename, ""
    text = linecache.getline(code.co_filename, line).encode()
    return f"{code.co_filename}:{line}", (text[start:end] if line == end_line else text[start:]).decode().strip()


def within(inner: Span, outer: Span) -> bool:
    """Whether one place is inside another."""
    if None in inner or None in outer:
        return False
    start, end = (outer[0], outer[2]), (outer[1], outer[3])
    return start <= (inner[0], inner[2]) and (inner[1], inner[3]) <= end


def is_call_of_one(node: ast.AST) -> bool:
    """Whether ``node`` is ``f(x)``."""
    return (
        isinstance(node, ast.Call)
        and len(node.args) == 1
        and not (node.keywords or isinstance(node.args[0], ast.Starred))
    )


@functools.lru_cache(maxsize=1024)
def positions(code: CodeType) -> list[Span]:
    return list(code.co_positions())


def lines_of(text: str) -> list[str]:
    """The lines of a file's text; `str.splitlines` would also split at form feeds."""
    return [f"{line}\n" for line in text.removesuffix("\n").split("\n")]


_TEXTS: weakref.WeakKeyDictionary[FunctionType, Text] = weakref.WeakKeyDictionary()


def text_of(function: FunctionType) -> Text:
    """The source of ``function`` without its wrappers, checked to be what it was compiled from.

    Raises:
        EditError: there is no source, or the file has changed.
    """
    if function not in _TEXTS:
        _TEXTS[function] = _read(function)
    return _TEXTS[function]


def _read(function: FunctionType) -> Text:
    name = function.__qualname__
    try:
        lines, first = inspect.getsourcelines(function)
    except (OSError, TypeError, IndexError, SyntaxError) as error:
        raise EditError(
            f"there is no source text for {name} ({function.__code__.co_filename}): rewire edits the source of "
            "forwards, which has to be in a file or a notebook cell"
        ) from error
    source, file = "".join(lines), function.__code__.co_filename
    try:
        tree = _definition(source, first)
    except SyntaxError as error:
        of_lambda = name.endswith("<lambda>")
        why = "is a lambda: write it as a function" if of_lambda else f"does not parse by itself: {error}"
        raise EditError(f"the source of {name} at {file}:{first} {why}") from error
    text = Text(source, first, file=file, tree=tree)
    code = compiled(function, source, first)
    if code is None or not _same(code, function.__code__):
        raise EditError(
            f"the source at {text.where()} is not what {name} was compiled from: the file has changed since it was "
            "imported, or a tool rewrote the function (coverage, pytest's assertions). Import the model again"
        )
    return text


def span_of(node: Any) -> tuple[int, int, int, int]:
    """The place of a node."""
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


#: Python 3.11 counts the parser's depth over all threads together, and fails if two of them parse at once.
_PARSING = threading.RLock()


def parsed(source: str) -> ast.Module:
    """The syntax tree of a text."""
    with _PARSING:
        return ast.parse(source)


def _definition(source: str, first: int) -> ast.FunctionDef | ast.AsyncFunctionDef:
    """The definition in ``source``, which may be indented, with line numbers from ``first`` on."""
    indented = source[:1].isspace()
    module = parsed(f"if 1:\n{source}" if indented else source)
    node = module.body[0]
    definition = node.body[0] if isinstance(node, ast.If) else node
    if not isinstance(definition, (ast.FunctionDef, ast.AsyncFunctionDef)):
        raise SyntaxError("it is no function definition")
    ast.increment_lineno(definition, first - 1 - indented)
    return definition


def compiled(function: FunctionType, source: str, first: int, file: str = "") -> CodeType | None:
    """The code of ``function`` with the new ``source``, whose first line has the number ``first``.

    None if the source is that of another function.

    It is compiled in the function's context: names with two underscores are mangled as in its class, and its free
    variables stay free.
    """
    code, qualname = function.__code__, function.__qualname__.split(".")
    definition = _definition(source, first)
    definition.decorator_list = []
    cls = qualname[-2] if len(qualname) > 1 and qualname[-2] != "<locals>" else None
    body: list[ast.stmt] = [definition]
    if cls is not None:
        body = [ast.ClassDef(cls, [], [], body, [], **_NO_TYPE_PARAMETERS)]
    free = [name for name in code.co_freevars if cls is None or name != "__class__"]
    if free:  # define them in a function around it
        outer = parsed(f"def _outer({', '.join(free)}): pass").body[0]
        assert isinstance(outer, ast.FunctionDef)
        outer.body = body
        body = [outer]
    # Method calls on imported names compile to other instructions.
    known = [name for name in code.co_names if isinstance(function.__globals__.get(name), ModuleType)]
    imports: list[ast.stmt] = [ast.Import([ast.alias(name)]) for name in known]
    module = ast.fix_missing_locations(ast.Module([*imports, *body], []))
    flags = code.co_flags & _FUTURE
    whole = compile(module, file or code.co_filename, "exec", flags, dont_inherit=True)
    return next((inner for inner in codes_in(whole) if inner.co_name == code.co_name), None)


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """The code objects of functions inside a function."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from codes_in(constant)


@functools.lru_cache(maxsize=4096)
def holds(code: CodeType, other: CodeType) -> bool:
    """Whether ``other`` is the code of a function or comprehension inside the function of ``code``."""
    return any(inner is other for inner in codes_in(code))


def _same(a: CodeType, b: CodeType) -> bool:
    """Whether two functions do the same, wherever they are defined."""
    if any(getattr(a, name) != getattr(b, name) for name in _COMPARED) or len(a.co_consts) != len(b.co_consts):
        return False
    if (a.co_flags ^ b.co_flags) & ~inspect.CO_NESTED:  # that flag only says that it is inside another function
        return False
    if a.co_code != b.co_code and _instructions(a) != _instructions(b):
        return False
    return all(
        _same(x, y) if isinstance(x, CodeType) and isinstance(y, CodeType) else type(x) is type(y) and x == y
        for x, y in zip(a.co_consts, b.co_consts, strict=True)
    )


_COMPARED = (
    "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_argcount", "co_posonlyargcount", "co_kwonlyargcount",
)  # fmt: skip


_NO_STEPS = ("PUSH_NULL", "NOP", "CACHE", "EXTENDED_ARG")


def _instructions(code: CodeType) -> list[tuple[str, object]]:
    """The instructions of a function in a form that can be compared.

    It does not include how methods are looked up, which depends on whether the file also imports the name of their
    object, nor what follows from the length of the code: EXTENDED_ARG in front of large arguments is left out, and
    jumps are given by the number of their target step.
    """
    steps = [step for step in dis.get_instructions(code) if step.opname not in _NO_STEPS]
    number = {step.offset: n for n, step in enumerate(steps)}
    jumps = {dis.opname[op] for op in (*dis.hasjrel, *dis.hasjabs)}
    found: list[tuple[str, object]] = []
    for step in steps:
        value = step.argval
        if step.opname in jumps:  # to the next step that is listed
            value = next(number[offset] for offset in range(value, len(code.co_code), 2) if offset in number)
        elif isinstance(value, CodeType):
            value = value.co_name
        found.append((step.opname.replace("LOAD_METHOD", "LOAD_ATTR"), value))
    return found


def shown(file: str, source: str, first: int) -> None:
    """Make the edited source of a function known to tracebacks and debuggers as ``file``."""
    lines = ["\n"] * (first - 1) + lines_of(source)
    linecache.cache[file] = (sum(map(len, lines)), None, lines, file)
