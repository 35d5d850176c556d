"""The text of a function is that of the code that runs, or it is refused."""

from __future__ import annotations

import ast
import functools
import gc
import inspect
import linecache
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rewire.code.functions import undecorated
from rewire.code.text import compiled, parsed, place_of, text_of, within
from rewire.errors import EditError

OFFSET = 3


def renamed(x: int) -> int:
    def step(y: int) -> int:
        return y + 1

    first = y = step
    first = functools.partial(step)
    return first(y(x))


def plain(x: int) -> int:
    return x + OFFSET


class Holder:
    __hidden = 1

    def method(self, x: int) -> int:
        return x + self.__hidden

    def zero_argument_super(self) -> Any:
        return super().__repr__()

    def nested(self, x: int) -> list[int]:
        return [y + x for y in range(3)]


def closure(step: int) -> Callable[[int], int]:
    def inner(x: int) -> int:
        return x + step

    return inner


def twice(function: Callable[[int], int]) -> Callable[[int], int]:
    @functools.wraps(function)
    def wrapper(x: int) -> int:
        return function(function(x))

    return wrapper


@twice
def decorated(x: int) -> int:
    return x + 1


def in_a_function() -> Any:
    class Inner:
        def method(self, x: int) -> int:
            return x + 1

    return Inner.method


def test_what_is_given_a_name() -> None:
    named = text_of(renamed).named
    assert {name: [*map(ast.unparse, values)] for name, values in named.items() if name != "renamed"} == {
        "first": ["step", "functools.partial(step)"],
        "y": ["step"],
        "step": ["def step(y: int) -> int:\n    return y + 1"],
    }


@pytest.mark.parametrize(
    "function",
    [
        plain,
        Holder.method,
        Holder.zero_argument_super,
        Holder.nested,
        closure(1),
        undecorated(decorated).function,
        in_a_function(),
    ],
    ids=["plain", "mangled", "super", "comprehension", "closure", "decorated", "in a function"],
)
def test_unedited_texts_compile_to_what_runs(function: Any) -> None:
    text = text_of(function)
    code = compiled(function, text.text, text.first)
    assert [code.co_names, code.co_varnames] == [function.__code__.co_names, function.__code__.co_varnames]
    assert Path(__file__).name in text.where()


def module_of(folder: Path, source: str) -> dict[str, Any]:
    """The globals of a file of that source."""
    path = folder / "made.py"
    path.write_text(textwrap.dedent(source))
    linecache.checkcache(str(path))
    names: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    return names


def test_a_file_that_has_changed_is_refused(tmp_path: Path) -> None:
    function = module_of(tmp_path, "def f(x):\n    return x + 1\n")["f"]
    (tmp_path / "made.py").write_text("def f(x):\n    return x + 22\n")
    with pytest.raises(EditError, match=r"made\.py:1 is not what f was compiled from.*Import the model again"):
        text_of(function)


#: Statements whose code depends on whether the file imports a name of theirs: jumps over them may need wide arguments.
STATEMENTS = (
    "x = Helper.go(x)",
    "if x:\n    x = Helper.go(x, 1)",
    "for i in range(3):\n    x = Helper.go(i)\n    if i:\n        continue\n    x = x + 1",
    "try:\n    x = Helper.go(x)\nexcept ValueError:\n    x = 0",
    "x = Helper.go(x) if x else Helper.inner.go(1)",
    "y = [Helper.go(z) for z in (x, 1)]",
)


@pytest.mark.each_once
@pytest.mark.parametrize("statement", STATEMENTS)
@pytest.mark.parametrize("parameter", ["step", "Helper"])  # names in the file decide, even where a variable has them
def test_text_of_any_length_is_that_of_its_code(
    statement: str, parameter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "helpers_of_a_text.py").write_text("class Helper:\n    go = staticmethod(lambda x, *more: x)\n")
    monkeypatch.syspath_prepend(tmp_path)
    for count in (*range(1, 42), 80, 200):
        body = textwrap.indent("\n".join([statement] * count), "        ")
        name = f"f{count}"
        source = f"from helpers_of_a_text import Helper\ndef {name}(x, {parameter}=1):\n    for _ in x:\n{body}\n"
        function = module_of(tmp_path, source)[name]
        assert text_of(function).text == source.partition("\n")[2]


def test_code_without_a_file_is_refused() -> None:
    names: dict[str, Any] = {}
    exec(compile("def f(x):\n    return x + 1\n", "<no file>", "exec"), names)
    with pytest.raises(EditError, match="no source text for f"):
        text_of(names["f"])


def test_lines_end_where_python_ends_them(tmp_path: Path) -> None:
    """A form feed is a blank to Python, and a line's end to `str.splitlines`."""
    function = module_of(tmp_path, 'def f(x):\n    y = "a"  # \f page\n    return x + 1, y\n')["f"]
    text = text_of(function)
    adds = [n for n in range(0, len(function.__code__.co_code), 2) if place_of(function.__code__, n)[2:] == (11, 16)]
    (node, *_) = text.at(function.__code__, adds[0])
    start, end = text.span(node)
    assert text.text[start:end] == "x + 1"


def test_columns_are_counted_in_bytes(tmp_path: Path) -> None:
    function = module_of(tmp_path, 'def f(x):\n    return "äöü", x + 1\n')["f"]
    text = text_of(function)
    spans = {text.text[slice(*text.span(node))] for nodes in text.nodes.values() for node in nodes}
    assert "x + 1" in spans


@pytest.mark.parametrize(
    ("inner", "outer", "expected"),
    [
        ((1, 1, 4, 9), (1, 1, 4, 13), True),
        ((1, 1, 4, 9), (1, 1, 5, 13), False),
        ((2, 2, 0, 1), (1, 3, 8, 2), True),
        ((1, None, 4, 9), (1, 1, 4, 13), False),
    ],
)
def test_within(inner: Any, outer: Any, expected: bool) -> None:
    assert within(inner, outer) is expected


class _Finalised:
    """Python code runs when the collector finds it: then threads take turns, in the middle of a tree, too."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        for _ in range(20):
            pass


def test_threads_that_parse_at_once() -> None:
    """`ast.parse` by itself fails here in Python 3.11 (SystemError: AST constructor recursion depth mismatch)."""
    source, errors = inspect.getsource(threading), list[BaseException]()

    def parse() -> None:
        for _ in range(8):
            waste = [_Finalised() for _ in range(20)]
            del waste
            try:
                parsed(source)
            except SystemError as error:
                errors.append(error)

    threshold, interval = gc.get_threshold(), sys.getswitchinterval()
    gc.set_threshold(50)
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=parse) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.set_threshold(*threshold)
        sys.setswitchinterval(interval)
    assert not errors
