"""Bars and tables: on a terminal, in a pipe, without colours, and in a notebook."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from models import PreNorm, Stack, vectors

import rewire
from rewire import console

#: A model whose forward takes a while, and what is printed on the way.
PROGRAM = """
import sys, time
import torch
import rewire
from models import PreNorm, Stack, vectors
from rewire import console

class Slow(Stack):
    def forward(self, x):
        time.sleep(seconds)
        return super().forward(x)

console.DELAY = 30  # machines under load are slow
seconds = 0
rewire.compile(Slow(PreNorm), example_inputs=(vectors(),))
print("quick", flush=True)
print("from here on it is slow", file=sys.stderr)
seconds, console.DELAY = 0.15, 0.5
rewire.compile(Slow(PreNorm), example_inputs=(vectors(),))
print("done")
"""
HERE = {
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])])
}  # models.py, rewire
COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:[349]\d|10\d|38|48)(?:;\d+)*m")


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "program.py"  # of a class that is written on the command line there is no source
    path.write_text(PROGRAM)
    return str(path)


def on_a_terminal(*command: str, **environment: str) -> tuple[str, str]:
    """Stdout, which is a pipe, and what is written to the terminal that stderr is."""
    ours, theirs = pty.openpty()
    terminal = {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
    kept = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")}
    process = subprocess.Popen(
        command, env=kept | HERE | terminal | environment, stdin=theirs, stdout=subprocess.PIPE, stderr=theirs
    )
    os.close(theirs)
    written = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # the process has closed it
            break
        if not part:
            break
        written += part
    os.close(ours)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, written.decode()
    return out.decode(), written.decode()


def test_names_in_brackets_are_shown_as_they_are() -> None:
    model = Stack(PreNorm)
    model.odd = torch.nn.ParameterDict({"[red]": torch.nn.Parameter(torch.ones(2, 2))})
    assert "odd.[red]" in str(rewire.roles(model))
    assert "odd.[red]" in str(rewire.initialize(model, "zas"))


def test_units_in_brackets_are_shown_as_they_are() -> None:
    class Named(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleDict({"[red]": PreNorm(), "[blue]": PreNorm()})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks.values():
                x = block(x)
            return x

    rewired = rewire.compile(Named(), "denseformer", example_inputs=(torch.randn(2, 5, 32),))
    reports = rewire.inspect(rewired), rewire.diagnose(rewired, torch.randn(2, 5, 32)), rewire.graph(rewired).summary()
    assert all("[red]" in str(report) for report in reports)


@pytest.mark.slow
def test_what_is_slow_shows_a_bar_on_a_terminal_that_is_gone_afterwards(program: str) -> None:
    out, shown = on_a_terminal(sys.executable, program)
    assert out == "quick\ndone\n"
    quick, _, slow = shown.partition("from here on it is slow")
    assert quick == "" and "validating Slow" in slow and COLOUR.search(slow)
    assert slow.endswith("\x1b[2K")  # the line is erased
    plain = on_a_terminal(sys.executable, program, NO_COLOR="1")[1]
    assert "validating Slow" in plain and not COLOUR.search(plain)


@pytest.mark.slow
def test_nothing_is_printed_into_a_pipe(program: str) -> None:
    forced = os.environ | HERE | {"FORCE_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, program], env=forced, capture_output=True, text=True, check=True, timeout=300
    )
    assert (done.stdout, done.stderr) == ("quick\ndone\n", "from here on it is slow\n")


@pytest.mark.parametrize("environment", [{}, {"LOCAL_RANK": "1"}], ids=["one", "other"])
def test_one_process_of_several_shows_bars(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(console, "stderr", console.Console(stderr=True, force_interactive=True))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert console.watched() == (not environment)


def test_a_bar_starts_late_and_stops_for_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """What draws it is gone in any case; what is called for each step is right without a bar, too."""
    monkeypatch.setattr(console, "watched", lambda: True)
    started: list[bool] = []
    monkeypatch.setattr(console.Progress, "start", lambda bar: started.append(True))
    running = threading.active_count()

    def fails() -> None:
        with console.progress("quick", 2) as step:
            step()
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert not started and threading.active_count() == running
    monkeypatch.setattr(console, "DELAY", 0.0)
    with console.progress("slow"):
        while not started:
            pass
    assert threading.active_count() == running


@pytest.mark.slow
def test_in_a_notebook_a_bar_leaves_what_others_print(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ipywidgets, and with them: in rich's way some of the lines would go where the bar goes."""
    from nbclient import NotebookClient
    from nbformat.v4 import new_code_cell, new_notebook

    monkeypatch.setenv("PYTHONPATH", HERE["PYTHONPATH"])
    code = (
        "import time\n"
        "from rewire import console\n"
        "console.DELAY = 0.1\n"
        "with console.progress('printing', 2000) as step:\n"
        "    for number in range(2000):\n"
        "        print(number)\n"
        "        time.sleep(0.001)\n"
        "        step()\n"
    )
    drawn: list[str] = []

    class Client(NotebookClient):
        def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
            if msg["msg_type"] in ("display_data", "update_display_data"):
                drawn.append(msg["content"]["data"]["text/html"])
            return super().process_message(msg, cell, cell_index)

    (cell,) = Client(new_notebook(cells=[new_code_cell(code)]), timeout=300).execute().cells
    assert "".join(output.get("text", "") for output in cell.outputs).split() == [*map(str, range(2000))]
    *bars, last = drawn
    assert bars and last == ""
    assert all(bar.startswith("<pre") and "printing" in bar and "color: " in bar for bar in bars)
    (bar,) = [output for output in cell.outputs if output.output_type == "display_data"]
    assert bar.data == {"text/html": ""}


@pytest.mark.parametrize("environment", [{}, {"FORCE_COLOR": "1"}, {"NO_COLOR": "1"}], ids=lambda e: "".join(e))
def test_reports_are_plain_text_and_html(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    model = Stack(PreNorm)
    rewired = rewire.compile(model, "ancre-ingoing", start="paper", validate=False)
    reports = {
        "inspect": rewire.inspect(model),
        "diagnose": rewire.diagnose(model, (vectors(),), probes=0),
        "freeze": rewire.freeze(rewired)[1],
        "roles": rewire.roles(model),
        "initialize": rewire.initialize(Stack(PreNorm), "idinit", generator=torch.Generator()),
    }
    for report in reports.values():
        assert "\x1b" not in str(report) and len(str(report).splitlines()) > 3
        page = report._repr_html_()
        assert page.startswith("<pre") and "font-weight: bold" in page and "\x1b" not in page
        assert all(word in page for word in re.findall(r"\w{4,}", str(report)))


def test_in_a_notebook_str_is_text_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """There rich would display what it is asked to write to a file."""
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert "6 residual adds in 3 blocks" in str(rewire.inspect(Stack(PreNorm)))
