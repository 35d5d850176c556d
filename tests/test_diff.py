"""rewire.diff: what it removes, that it applies to the files, and what it gives is what runs."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import models
import pytest
import torch
import torchvision_stub  # noqa: F401
from models import LoopGPT, PostNorm, PreNorm, Stack, TwoWidths, WithAddNorm
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

import rewire
import rewire.cli
from rewire.cli import app
from rewire.patterns.tiny import tiny_model

HUNK = re.compile(r"@@ -(\d+),(\d+) \+(\d+),(\d+) @@ (.*)")

USER_FILE = """
import torch
from torch import nn

def add(x, y):
    return x + y

class Block(nn.Module):
    def __init__(self):
        super().__init__()  # \f ends no line
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return add(x, self.linear(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
"""

ADDS_LAST = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x"""


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "user_net", raising=False)


def compiled(model: nn.Module, topology: str | dict[str, str] = "ancre-ingoing") -> nn.Module:
    return rewire.compile(model, topology, start="paper", validate=False)


def files_of(diff: str) -> list[str]:
    """The diffs of single files."""
    return re.split(r"^(?=--- a/)", diff, flags=re.MULTILINE)[1:]


def lines_of(diff: str, kind: str) -> list[str]:
    """The lines that a diff removes or adds, without their indentation."""
    body = [line for line in diff.split("\n") if not line.startswith(("---", "+++"))]
    return [line[1:].strip() for line in body if line.startswith(kind)]


def modules_of(diff: str) -> list[str]:
    return [match[5] for line in diff.split("\n") if (match := HUNK.match(line))]


def applied(diff: str, text: str) -> str:
    """A file's text with the diff of one file applied, at the lines that it says."""
    old, new = text.split("\n"), list[str]()
    at = 0
    for line in diff.split("\n")[2:-1]:
        if match := HUNK.match(line):
            first, _, new_first, _ = map(int, match.groups()[:4])
            new += old[at : first - 1]
            at = first - 1
            assert len(new) == new_first - 1
        elif line.startswith("\\"):
            assert at == len(old)
        elif line[0] == "+":
            new.append(line[1:])
        else:
            assert old[at] == line[1:]
            new += [line[1:]] * (line[0] == " ")
            at += 1
    result = "\n".join(new + old[at:])
    if shutil.which("patch"):
        assert by_the_program(diff, text) == result
    return result


def by_the_program(diff: str, text: str) -> str:
    name = re.match(r"--- a/(.*?)\t?\n", diff)[1]  # type: ignore[index]
    copy = Path("patched", name)
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_bytes(text.encode())
    command = ["patch", "-p1", "--binary", "--fuzz=0", "--posix"]
    said = subprocess.run(command, cwd="patched", input=diff.encode(), capture_output=True, check=True).stdout
    assert b"offset" not in said
    return copy.read_bytes().decode()


def functions(text: str) -> dict[str, str]:
    """The texts of all functions, decorators included, by their names: ``Class.forward``."""
    found, lines = {}, text.split("\n")
    for owner in ast.walk(ast.parse(text)):
        for node in getattr(owner, "body", []) if isinstance(owner, (ast.Module, ast.ClassDef)) else []:
            if isinstance(node, ast.FunctionDef):
                first = min(part.lineno for part in (node, *node.decorator_list))
                name = f"{owner.name}.{node.name}" if isinstance(owner, ast.ClassDef) else node.name
                found[name] = textwrap.dedent("\n".join(lines[first - 1 : node.end_lineno]) + "\n")
    return found


def imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NETS: dict[str, tuple[Callable[[], nn.Module], dict[str, str], list[str]]] = {
    "pre-norm": (
        lambda: Stack(PreNorm),
        {"": "Stack.forward", "layers.1": "PreNorm.forward"},
        ["x = x + self.attn(self.ln_1(x))", "x = x + self.mlp(self.ln_2(x))", "return x"],
    ),
    "post-norm": (
        lambda: Stack(PostNorm),
        {"": "Stack.forward", "layers.1": "PostNorm.forward"},
        ["x = self.ln_1(x + self.attn(x))", "return self.ln_2(x + self.mlp(x))"],
    ),
    "helper": (
        lambda: Stack(WithAddNorm),
        {"": "Stack.forward", "layers.1": "WithAddNorm.forward", "layers.1.addnorm2": "AddNorm.forward"},
        [
            "return self.ln(self.dropout(y) + x)",
            "y = self.addnorm1(x, self.attn(x))",
            "return self.addnorm2(y, self.mlp(y))",
        ],
    ),
    "loop": (
        LoopGPT,
        {"": "LoopGPT.forward"},
        ["x = self.emb(idx)", "x = attn(x) + x", "x = ff(x) + x", "return self.head(self.norm(x))"],
    ),
}


@pytest.mark.parametrize("name", NETS)
def test_hand_written_nets(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, edited, removed = NETS[name]
    file = Path(models.__file__)
    model = compiled(make())
    diff = rewire.diff(model)
    assert diff.startswith(f"--- a{file}\n+++ b{file}\n") and len(files_of(diff)) == 1
    assert lines_of(diff, "-") == removed
    before, after = functions(file.read_text()), functions(applied(diff, file.read_text()))
    for path, function in edited.items():
        assert after.pop(function) == rewire.source(model, path)
        del before[function]
    assert after == before
    monkeypatch.chdir(file.parent.parent)
    assert rewire.diff(model) == diff.replace(str(file), f"/{file.relative_to(Path.cwd()).as_posix()}")


def test_hunks_say_which_modules_run_them() -> None:
    diff = rewire.diff(compiled(Stack(WithAddNorm)))
    assert modules_of(diff) == ["layers.0.addnorm1 (and 5 more)", "layers.0 (and 2 more)", "(the model)"]
    assert modules_of(rewire.diff(compiled(Stack(PreNorm, 1)))) == ["layers.0"]


def test_a_transformers_model() -> None:
    model = compiled(tiny_model("llama"))
    file = Path(inspect.getfile(type(model)))
    (diff,) = files_of(rewire.diff(model))
    assert diff.startswith("--- a/transformers/models/llama/modeling_llama.py\n")
    assert lines_of(diff, "-") == [
        "hidden_states = self.input_layernorm(hidden_states)",
        "hidden_states = residual + hidden_states",
        "hidden_states = self.post_attention_layernorm(hidden_states)",
        "hidden_states = residual + hidden_states",
        "return hidden_states",
    ]
    assert set(modules_of(diff)) == {"model.layers.0 (and 2 more)", "model"}
    after = functions(applied(diff, file.read_text()))
    assert after["LlamaDecoderLayer.forward"] == rewire.source(model, "model.layers.1")
    assert after["LlamaModel.forward"] == rewire.source(model, "model")  # under its three decorators


def test_different_texts_of_one_function() -> None:
    model = compiled(TwoWidths(), {"narrow": "dca", "wide": "ancre-ingoing"})
    text = Path(models.__file__).read_text()
    first, second = files_of(rewire.diff(model))
    assert modules_of(first) == ["narrow.0.attn (and 1 more)", "narrow.0 (and 1 more)", "(the model)"]
    assert modules_of(second) == ["wide.0 (and 1 more)"]
    for diff, path in ((first, "narrow.1"), (second, "wide.1")):
        assert functions(applied(diff, text))["PreNorm.forward"] == rewire.source(model, path)


def test_a_helper_that_is_no_method_and_what_runs() -> None:
    file = Path("user net.py")  # with a blank
    file.write_text(USER_FILE)
    plain = imported(file.absolute()).Net()
    model = compiled(plain)
    diff = rewire.diff(model)
    assert diff.startswith("--- a/user net.py\t\n+++ b/user net.py\t\n")
    assert lines_of(diff, "-") == ["def add(x, y):", "return x + y", "return add(x, self.linear(x))"]
    assert modules_of(diff)[0].startswith("layers.0 (and 2 more)")
    after = applied(diff, USER_FILE)
    assert functions(after)["add"].startswith("def add(gate, x, y):\n    depth = gate.enter()\n")
    both = "\n".join(functions(after)[name] for name in ("Block.forward", "add"))
    assert both.rstrip() == rewire.source(model, "layers.0").rstrip()


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("complete", [False, True])
def test_ends_of_lines(end: str, complete: bool) -> None:
    file = Path("user_net.py").absolute()
    text = ADDS_LAST.replace("\n", end) + end * complete
    file.write_bytes(text.encode())
    model = compiled(imported(file).Net())
    diff = rewire.diff(model)
    assert ("\\ No newline at end of file\n" in diff) != complete
    after = applied(diff, text)
    assert after.endswith(f"return depth.leave(x){end * complete}") and after.count("\n") == after.count(end)
    assert functions(after.replace("\r", ""))["Net.forward"].strip() == rewire.source(model, "").strip()


def test_a_file_that_has_changed_since() -> None:
    file = Path("user_net.py").absolute()
    file.write_text(ADDS_LAST)
    model = compiled(imported(file).Net())
    file.write_text(f"\n{ADDS_LAST}")
    with pytest.raises(rewire.RewireError, match=r"user_net\.py has changed since the model was rewired"):
        rewire.diff(model)


def test_of_what_was_not_rewired() -> None:
    with pytest.raises(rewire.RewireError, match=r"Stack was not rewired: it has no connection weights\."):
        rewire.diff(Stack(PreNorm))
    with pytest.raises(rewire.RewireError, match="was not rewired"):
        rewire.diff(rewire.restore(compiled(Stack(PreNorm))))
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module, not str"):
        rewire.diff("layers.0")  # type: ignore[arg-type]


def test_the_model_stays_as_it_is() -> None:
    model, x = compiled(Stack(PreNorm)), models.vectors()
    expected = model(x)
    rewire.diff(model)
    assert torch.equal(model(x), expected)


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command() -> None:
    Path("user_net.py").write_text(USER_FILE)
    result = CliRunner().invoke(app, ["diff", "user_net:Net", "--topology", "ancre-constant"])
    assert result.exit_code == 0 and "\x1b" not in result.output
    assert result.output == rewire.diff(compiled(sys.modules["user_net"].Net(), "ancre-constant"))
    applied(result.output, USER_FILE)


def test_the_command_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("user_net.py").write_text(USER_FILE)
    terminal = Console(force_terminal=True, width=100, color_system="standard")
    monkeypatch.setattr(rewire.cli.output, "console", lambda: terminal)
    with terminal.capture() as captured:
        CliRunner().invoke(app, ["diff", "user_net:Net"])
    (removed,) = (line for line in captured.get().split("\n") if "return x + y" in line)
    (added,) = (line for line in captured.get().split("\n") if "gate.enter()" in line)
    assert removed.startswith("\x1b[91") and added.startswith("\x1b[92")


def test_errors_of_the_command() -> None:
    Path("user_net.py").write_text(USER_FILE)
    for arguments, message in (
        (["user_net:Block", "--topology", "ancre-ingiong"], "ancre-ingoing"),
        (["user_net:Nett"], "'user_net' has no 'Nett'"),
        (["torch.nn:Identity"], "no residual stream was found"),
    ):
        result = CliRunner().invoke(app, ["diff", *arguments])
        assert result.exit_code == 1 and not result.stdout
        assert result.stderr.startswith("error: ") and message in result.stderr
