"""``rewire conformance``."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from rewire.cli import app
from rewire.conformance import list_schemes

IMPLEMENTATIONS = """
def right(x, weights, branches):
    for alpha, branch in zip(weights["alpha"], branches):
        x = x + alpha.to(x.dtype) * branch(x)
    return x

def wrong(x, weights, branches):
    for alpha, branch in zip(weights["alpha"], branches):
        x = alpha.to(x.dtype) * (x + branch(x))
    return x

make_right = lambda: right
make_wrong = lambda: wrong
make_number = lambda: 3
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_schemes.py").write_text(IMPLEMENTATIONS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["conformance", *arguments])


def test_what_agrees() -> None:
    done = run("rezero", "my_schemes:make_right")
    assert done.exit_code == 0
    assert done.stdout.startswith("rezero: agrees with arXiv 2003.04887, to ")


def test_what_differs_ends_with_1() -> None:
    done = run("rezero", "my_schemes:make_wrong")
    assert done.exit_code == 1
    assert "Looks like: the scale multiplies the shortcut, too (then " in done.stdout


def test_rewire_s_own_with_options() -> None:
    done = run("attnres", "--option", "block=2", "--option", "form=softmax")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("attnres, block=2, form='softmax': agrees with arXiv 2603.15031")


def test_lists() -> None:
    done = run()
    assert done.exit_code == 0
    assert all(name in done.stdout for name in list_schemes())


def test_files(tmp_path: Path) -> None:
    done = run("residual", "--vectors", str(tmp_path / "vectors"))
    assert done.exit_code == 0
    assert done.stdout.startswith("wrote 8 files, 0.0 MB, to ")
    assert (tmp_path / "vectors" / "residual" / "paper" / "typical.safetensors").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "there is no reference of 'nothing'"),
        (["rezero", "my_schemes"], "'my_schemes' does not name an implementation: give 'package.module:callable'"),
        (["rezero", "my_schemes:make_number"], "returned a int, not a function of hidden states"),
        (["rezero", "my_schemes:nothing"], "'my_schemes' has no 'nothing'"),
        (["mhc", "--option", "streams:2"], "'streams:2' is not of the form NAME=VALUE"),
        (["mhc", "--option", "stream=2"], "has no option 'stream'"),
    ],
)
def test_errors(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.exit_code != 0
    assert message in " ".join(done.output.replace("│", " ").split())
