"""Forwards in the syntax of later Pythons, and what compiles to other instructions there."""

from __future__ import annotations

import importlib.util
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest
from comparing import assert_close, evaluate
from models import DEPTH, Stack, vectors

import rewire

HEAD = """
import functools
from models import PreNorm, Tensor


def residual[T](x: T, y: T) -> T:
    return x + y


def decorated[**P, R](function):
    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)

    return called


def made[T](kind: T, scale):
    class Made(PreNorm):
        def forward(self, x: T) -> T:
            self.kind = kind, T
            x = x + scale * self.attn(x)
            return x + self.mlp(x)

    return Made


"""

#: Type parameters (from Python 3.12 on): scopes of their own around functions and classes.
TYPE_PARAMETERS = {
    "of a method": """
        class Block(PreNorm):
            def forward[T: Tensor](self, x: T, scale: float = 1.0) -> T:
                x = x + scale * self.attn(x)
                return x + self.mlp(x)
    """,
    "of a method, used": """
        class Block(PreNorm):
            def forward[T, *Ts, **P](self, x: T) -> T:
                self.names = [T.__name__, Ts.__name__, P.__name__]
                x = x + self.attn(x)
                return x + self.mlp(x)
    """,
    "of a class, used": """
        class Block[T](PreNorm):
            __scale = 1.0

            def forward(self, x: T) -> T:
                self.names = [T.__name__, __class__.__name__]
                x = x + self.attn(x) * self.__scale
                return x + self.mlp(x)
    """,
    "of helpers": """
        class Block(PreNorm):
            def forward(self, x):
                def inner[T](x: T, branch) -> T:
                    return x + branch(x)

                x = residual(x, self.attn(x))
                return inner(x, self.mlp)
    """,
    "of a function around the class": """
        Block = made(int, 1.0)
    """,
    "of a decorator": """
        class Block(PreNorm):
            @decorated
            def forward(self, x):
                x = x + self.attn(x)
                return x + self.mlp(x)
    """,
    "of an alias": """
        class Block(PreNorm):
            def forward(self, x):
                type States[T] = list[T]
                self.alias = States
                x = x + self.attn(x)
                return x + self.mlp(x)
    """,
}

#: Strings whose expressions have places of their own in the file (from Python 3.12 on).
STRINGS = {
    "on a line with an add": """
        class Block(PreNorm):
            def forward(self, x):
                self.text = f"äöü {x.shape[0]} {"of"} {f"{'two'} {x.dim() + 1}"}"; x = x + self.attn(x)
                return x + self.mlp(x)
    """,
    "over several lines": """
        class Block(PreNorm):
            def forward(self, x):
                self.text = f"{
                    # the rows
                    x.shape[0]!r:>{10 + 2}} {'\\n'.join(["a", "b"])}"; x = x + self.attn(x)
                return x + self.mlp(x)
    """,
    "with an add inside": """
        class Block(PreNorm):
            def forward(self, x):
                self.text = f"{(x := x + self.attn(x)).shape}"
                return x + self.mlp(x)
    """,
}

#: Comprehensions run in the frame of their function from Python 3.12 on; locals() is a copy from 3.13 on.
FRAMES = {
    "an add in a comprehension": """
        class Block(PreNorm):
            def forward(self, x):
                x = [x + branch(x) for branch in (self.attn,)][0]
                return x + sum([self.mlp(x) for _ in range(1)])
    """,
    "a comprehension that hides a variable": """
        class Block(PreNorm):
            def forward(self, x):
                branch = None
                for each in (self.attn, self.mlp):
                    x = [x + branch(x) for branch in [each]][0]
                self.branch = branch
                return x
    """,
    "an assignment in a comprehension": """
        class Block(PreNorm):
            def forward(self, x):
                [y := x + self.attn(x) for _ in range(1)]
                return y + self.mlp(y)
    """,
    "locals": """
        class Block(PreNorm):
            def forward(self, x):
                update = self.attn(x)
                x = x + locals()["update"]
                return x + self.mlp(x)
    """,
}


def module_of(text: str, path: Path, name: str) -> ModuleType:
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check(text: str, path: Path, traced: bool = True) -> None:
    """Rewired in a run, and ``traced`` without one, it starts as what it was, and learns."""
    block = module_of(text, path / "blocks.py", "blocks").Block
    model, x = Stack(block).eval(), vectors()
    for inputs in ((x,), None) if traced else ((x,),):
        rewired = rewire.compile(model, "ancre-ingoing", example_inputs=inputs)
        assert len(rewire.inspect(model, inputs).trunks[0].sites) == 2 * DEPTH
        assert_close(evaluate(model, (x,), {}), evaluate(rewired, (x,), {}))
        rewired(x).square().mean().backward()
        (connection,) = rewire.connections(rewired).values()
        assert all(p.grad is not None and p.grad.any() for p in connection.parameters())
        for name in ("text", "names"):  # what it keeps for itself
            assert getattr(model.layers[0], name, None) == getattr(rewired.layers[0], name, None)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the syntax of Python 3.12")
@pytest.mark.parametrize("name", TYPE_PARAMETERS)
def test_type_parameters(name: str, tmp_path: Path) -> None:
    check(HEAD + textwrap.dedent(TYPE_PARAMETERS[name]), tmp_path)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the syntax of Python 3.12")
@pytest.mark.parametrize("name", STRINGS)
def test_expressions_in_strings(name: str, tmp_path: Path) -> None:
    check(HEAD + textwrap.dedent(STRINGS[name]), tmp_path)


@pytest.mark.parametrize("name", FRAMES)
def test_what_runs_in_which_frame(name: str, tmp_path: Path) -> None:
    # Without a run, adds in functions inside a forward are not found; comprehensions were such up to Python 3.11.
    check("from models import PreNorm\n" + textwrap.dedent(FRAMES[name]), tmp_path, traced=False)
