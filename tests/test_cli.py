from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from typer.testing import CliRunner, Result

import rewire
import rewire.cli
from rewire.cli import app

USER_FILE = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.linear(x)

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(*(Block() for _ in range(3)))

class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.net = nn.Embedding(9, 8), Net()

    def forward(self, ids):
        return self.net(self.embedding(ids))

def with_inputs():
    return Tokens(), (torch.arange(6)[None],)

ready = Net()
plain = lambda: nn.Linear(2, 2)
number = 3

def nothing():
    return None

def wrong_inputs():
    return Net(), (torch.zeros(2, 5),)

def not_finite():
    net = Net()
    with torch.no_grad():
        net[0].linear.weight.fill_(float("nan"))
    return net, (torch.zeros(2, 8),)

def broken():
    raise ZeroDivisionError("in the user's own code")
"""

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command in an empty folder with a user's file ``user_net.py``, as if in a pipe."""
    (tmp_path / "user_net.py").write_text(USER_FILE)
    (tmp_path / "user_bad.py").write_text("import no_such_package_at_all\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "user_net", raising=False)
    return lambda *args: CliRunner().invoke(app, list(args))


@pytest.fixture
def checkpoint(run: Run, tmp_path: Path) -> Path:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
    model = rewire.compile(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), validate=False)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    return tmp_path / "model.pt"


def failed(result: Result) -> str:
    """The message of a command that ended as rewire's own errors do: one line, no traceback."""
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert not result.stdout
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    return result.stderr


def test_version(run: Run) -> None:
    assert run("--version").output == f"rewire {rewire.__version__}\n"


def test_help(run: Run) -> None:
    pages = [run("--help"), *(run(name, "--help") for name in ("inspect", "source", "list", "plot"))]
    assert all(page.exit_code == 0 for page in pages)
    assert all(name in pages[0].output for name in ("inspect", "source", "list", "plot", "--version"))
    assert "hf:model_type" in pages[1].output
    assert "ancre-ingoing" in pages[2].output


def test_as_a_module() -> None:
    command = [sys.executable, "-m", "rewire", "--version"]
    ran = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert ran.stdout == f"rewire {rewire.__version__}\n", ran.stderr


def test_inspect(run: Run) -> None:
    result = run("inspect", "user_net:Net")
    assert result.exit_code == 0
    assert "3 residual adds in 3 blocks, width 8" in " ".join(result.output.split())


def test_inspect_a_model_that_is_no_callable(run: Run) -> None:
    assert "3 residual adds" in run("inspect", "user_net:ready").output.replace("\n", " ")


def test_inspect_a_model_without_residual_adds(run: Run) -> None:
    result = run("inspect", "user_net:plain")
    assert result.exit_code == 0
    assert "No residual stream was found." in result.output


def test_source(run: Run) -> None:
    result = run("source", "user_net:Net", "1")
    assert result.exit_code == 0
    assert result.output.startswith("def forward(self, x):\n")
    assert "depth.add(x, self.linear(x), last=True)" in result.output
    compile(result.output, "forward", "exec")


def test_source_with_a_topology_without_preserving_start(run: Run) -> None:
    assert run("source", "user_net:Net", "0", "--topology", "ancre-constant").exit_code == 0


def test_source_is_highlighted_on_a_terminal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Console(force_terminal=True, width=100, color_system="standard")
    monkeypatch.setattr(rewire.cli.output, "console", lambda: terminal)
    with terminal.capture() as captured:
        run("source", "user_net:Net", "1")
    shown = captured.get()
    assert "\x1b[" in shown
    assert "def forward(self, x):" in re.sub(r"\x1b\[[0-9;]*m", "", shown)


def test_list(run: Run) -> None:
    output = run("list").output
    for names in (rewire.list_topologies(), rewire.list_initializers(), rewire.list_patterns()):
        assert all(name in output for name in names)
    assert "``" not in output
    assert "no topology has a name like 'densformer'. Did you mean 'denseformer'" in failed(run("list", "densformer"))
    assert "no topology has a name like 'hc'. Did you mean 'hc*'?" in failed(run("list", "hc"))


def test_what_is_in_brackets_is_shown(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewire, "list_patterns", lambda: {"mine": "states [d] apart"})
    assert "states [d] apart" in run("list").output


@pytest.mark.parametrize("kind", ["heatmap", "arcs"])
def test_plot(run: Run, checkpoint: Path, kind: str) -> None:
    result = run("plot", str(checkpoint), "--kind", kind)
    assert result.exit_code == 0, result.output
    written = checkpoint.with_name(f"model.{kind}.png")
    assert str(written) in result.output
    assert written.read_bytes().startswith(b"\x89PNG")


def test_plot_to_a_file_of_choice(run: Run, checkpoint: Path) -> None:
    assert run("plot", str(checkpoint), "--out", "drawing.SVG").exit_code == 0
    assert "<svg" in Path("drawing.SVG").read_text()


def test_plot_to_an_unknown_format(run: Run, checkpoint: Path) -> None:
    result = run("plot", str(checkpoint), "--out", "drawing.docx")
    assert result.exit_code == 2
    assert "drawing.docx" in result.output and ".svg" in result.output


def test_plot_into_a_missing_folder(run: Run, checkpoint: Path) -> None:
    assert "no/drawing.png" in failed(run("plot", str(checkpoint), "--out", "no/drawing.png"))


def test_plot_without_a_checkpoint(run: Run) -> None:
    assert "missing.pt" in failed(run("plot", "missing.pt"))


def test_plot_without_matplotlib(run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "rewire-torch[viz]" in failed(run("plot", str(checkpoint)))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("user_net", "does not name a model"),
        (":Net", "does not name a model"),
        ("user_net:", "does not name a model"),
        ("no_such_module:Net", "no module 'no_such_module'"),
        ("user_net.deeper:Net", "no module 'user_net.deeper'"),
        ("user_net:Nett", "'user_net' has no 'Nett'"),
        ("user_net:Net.more", "'user_net' has no 'Net.more'"),
        ("user_net:number", "is a int, not a callable"),
        ("user_net:nothing", "returned None: it has to return a torch.nn.Module"),
    ],
)
def test_a_model_that_is_not_there(run: Run, model: str, message: str) -> None:
    assert message in failed(run("inspect", model))


def test_errors_of_the_library_are_one_line(run: Run) -> None:
    assert "no module '9'" in failed(run("source", "user_net:Net", "9"))
    assert "ancre-ingoing" in failed(run("source", "user_net:Net", "0", "--topology", "ancre-ingiong"))
    assert "no residual stream" in failed(run("source", "user_net:plain", "0"))


def test_errors_of_the_users_code_keep_their_traceback(run: Run) -> None:
    """Its own frames, and no others."""
    for model, error in (
        ("user_net:broken", "ZeroDivisionError: in the user's own code"),
        ("user_bad:Net", "ModuleNotFoundError: No module named 'no_such_package_at_all'"),
    ):
        result = run("inspect", model)
        assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
        assert result.stderr.startswith("Traceback") and result.stderr.endswith(f"{error}\n")
        assert re.findall(r'File ".*/(.*?)"', result.stderr) == [f"{model.partition(':')[0]}.py"]


@pytest.mark.parametrize(
    "command",
    [
        ("inspect", "hf:llama", "--html"),
        ("diagnose", "hf:llama", "--out"),
        ("bench", "hf:llama", "--plot"),
    ],
)
def test_files_that_cannot_be_written_are_refused_before_the_work(
    run: Run, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewire.cli.models, "load_with_inputs", lambda spec: pytest.fail("it was loaded"))
    assert "'no/x.svg' cannot be written: there is no folder 'no'" in failed(run(*command, "no/x.svg"))
    if "--html" not in command:
        assert run(*command, "x.docx").exit_code == 2


def test_ctrl_c_while_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    root = str(Path(rewire.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), root])}
    command = [sys.executable, "-c", "import rewire_command; rewire_command.main()"]  # as the script of the wheel
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "")


def test_a_transformers_model(run: Run) -> None:
    written = "hidden_states = depth.add(residual, hidden_states, last=True)"
    assert written in run("source", "hf:llama", "model.layers.0").output
    assert "'llama'" in failed(run("inspect", "hf:lama"))


def test_a_timm_model(run: Run) -> None:
    assert "blocks: 24 residual adds in 12 blocks" in " ".join(
        run("inspect", "timm:vit_tiny_patch16_224").output.split()
    )
    assert "vit_tiny_patch16_224" in failed(run("inspect", "timm:vit_tiny_patch16_242"))


# -- bench -----------------------------------------------------------------------------------------------------------


def test_bench(run: Run, tmp_path: Path) -> None:
    options = ["--rounds", "2", "--batch", "2", "--length", "5", "--device", "cpu"]
    files = ["--out", "times.json", "--plot", "times.png"]
    result = run("bench", "hf:llama", "--topology", "ancre-ingoing", "--topology", "grn-v3", *options, *files)
    assert result.exit_code == 0, result.output
    for name in ("plain", "ancre-ingoing", "grn-v3"):
        assert re.search(rf"{name}.* ms .* to .*\d\.\d\d\d", result.stdout), result.stdout
    (times,) = json.loads((tmp_path / "times.json").read_text())["results"]
    assert (times["model"], times["batch"], times["length"]) == ("hf:llama", 2, 5)
    assert [len(times[name]["seconds"]) for name in ("plain", "ancre-ingoing", "grn-v3")] == [2, 2, 2]
    assert (tmp_path / "times.png").stat().st_size > 1000


def test_bench_of_a_user_s_model_and_of_an_image_model(run: Run) -> None:
    for model in ("user_net:Net", "hf:vit"):
        result = run("bench", model, "--rounds", "1", "--batch", "2", "--device", "cpu")
        assert result.exit_code == 0, result.output
        assert "ancre-ingoing" in result.stdout


def test_bench_of_a_shape_that_does_not_exist(run: Run) -> None:
    result = run("bench", "shape:llama-13m")
    assert result.exit_code == 1
    assert "no shape 'llama-13m'. Did you mean 'llama-130m'" in result.output
    assert "dit-s2" not in result.output
    assert "no shape 'nonsense'. Known are llama-60m, llama-130m, " in failed(run("inspect", "shape:nonsense"))


def test_kernels(run: Run) -> None:
    result = run("kernels", "--sources", "2", "--weights", "channel", "--norm", "rms")
    assert result.exit_code == 0, result.output
    assert "def mix_forward(" in result.stdout and "sources[1]" in result.stdout and "sources[2]" not in result.stdout
    compile(result.stdout, "kernel", "exec")
    assert "def mix_backward(" in run("kernels", "--backward").stdout
    assert run("kernels", "--outputs", "9").exit_code == 2
    assert "mixes[1]" in run("kernels", "--outputs", "2").stdout


def test_eject(run: Run, tmp_path: Path) -> None:
    result = run("eject", "user_net:Net", "ejected")
    assert result.exit_code == 0, result.output
    assert result.output.endswith("wrote ejected/rewired_user_net.py\n")
    assert {path.name for path in (tmp_path / "ejected").iterdir()} == {
        *("rewired_user_net.py", "rewire_runtime.py", "model.safetensors"),
    }
    assert "there is no module" in failed(run("eject", "no_such_file:Net", "ejected"))
    assert run("eject", "user_net:Net", "ejected").exit_code == 0  # what it wrote itself
    assert "'user_net.py' is a file" in failed(run("eject", "user_net:Net", "user_net.py"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model.safetensors").write_text("precious")
    assert "'mine' holds other files" in failed(run("eject", "user_net:Net", "mine"))
    assert (tmp_path / "mine" / "model.safetensors").read_text() == "precious"
    assert run("eject", "user_net:Net", "mine", "--force").exit_code == 0
    assert "/dev/null/mine" in failed(run("eject", "user_net:Net", "/dev/null/mine"))


def test_eject_writes_no_progress_bars_into_a_pipe(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    result = run("eject", "hf:llama", "ejected")
    assert result.exit_code == 0, result.output
    assert result.stderr == "" and capfd.readouterr().err == ""


def test_inspect_as_a_page(run: Run, tmp_path: Path) -> None:
    result = run("inspect", "user_net:Net", "--html", "net.html", "--topology", "denseformer")
    assert result.exit_code == 0, result.output
    assert result.output.endswith("wrote net.html\n")
    page = (tmp_path / "net.html").read_text()
    assert "DenseFormer(" in page and "last=True)" in page


def test_graph(run: Run) -> None:
    result = run("graph", "user_net:Net", "--topology", "denseformer", "--out", "depth.json")
    assert result.exit_code == 0, result.stderr
    assert "effective depth 1.5 of 3 units" in result.stdout and "wrote depth.json" in result.stdout
    saved = json.loads(Path("depth.json").read_text())
    assert {node["value"] for node in saved["nodes"]} == {*["x0", "x1", "x2", "x3", "f1", "f2", "f3", "r2", "r3", "r4"]}
    averaged = run("graph", "hf:llama", "--topology", "muddformer", "--batch", "1", "--length", "5")
    assert averaged.exit_code == 0 and "model.layers: 10 nodes" in averaged.stdout
    assert run("graph", "hf:llama", "--out", "x.svg").exit_code == 2


@pytest.mark.parametrize(
    "command",
    [
        ("inspect", "user_net:with_inputs"),
        ("diff", "user_net:with_inputs"),
        ("source", "user_net:with_inputs", "net.0"),
        ("diagnose", "user_net:with_inputs", "--topology", "denseformer", "--probes", "0"),
        ("eject", "user_net:with_inputs", "out"),
        ("bench", "user_net:with_inputs", "--rounds", "1"),
        ("graph", "user_net:with_inputs"),
        ("kernels",),
        ("list", "hc-*"),
        ("conformance",),
    ],
)
def test_json(run: Run, command: tuple[str, ...]) -> None:
    """Of models that come with their inputs."""
    result = run(*command, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    expected = {"inspect": "trunks", "diagnose": "trunks", "eject": "wrote", "bench": "plain", "list": "topologies"}
    expected |= {"conformance": "schemes", "graph": "nodes"}
    assert found[expected.get(command[0], "text")]


def test_json_without_numbers_that_it_does_not_have(run: Run) -> None:
    found = json.loads(run("diagnose", "user_net:not_finite", "--json").stdout, parse_constant=pytest.fail)
    assert found["trunks"][0]["sites"][0]["branch"] is None


@pytest.mark.parametrize("command", ["bench", "diagnose", "graph", "eject", "diff"])
def test_inputs_on_which_the_model_does_not_run(run: Run, command: str) -> None:
    """Also where nothing is validated."""
    message = failed(run(command, "user_net:wrong_inputs", *(["out"] if command == "eject" else [])))
    assert "Net does not run on the" in message and "shapes cannot be multiplied" in message


@pytest.mark.parametrize("command", ["bench", "diagnose"])
def test_a_token_model_without_inputs_is_told_to_give_some(run: Run, command: str) -> None:
    message = failed(run(command, "user_net:Tokens"))
    assert "no inputs are known for 'user_net:Tokens'" in message and "return model, (tokens,)" in message


@pytest.mark.parametrize(
    "topology", ["ancre-ingoing:temperature=0.5,start=paper", "hc-static:streams=2", "dca:block=2"]
)
def test_a_topology_with_options(run: Run, topology: str) -> None:
    for command in (("diff", "hf:llama"), ("source", "hf:llama", "model.layers.0")):
        assert run(*command, "--topology", topology).exit_code == 0
    assert "has no option 'steams': it takes" in failed(run("diff", "hf:llama", "--topology", "hc-static:steams=2"))
    assert "an option is written name=value" in failed(run("diff", "hf:llama", "--topology", "hc-static:streams"))


def test_an_initialiser_with_options(run: Run) -> None:
    assert run("diff", "user_net:Net", "--init", "idinit:eps=1e-4").exit_code == 0
    assert "has no option 'epsilon': it takes" in failed(run("diff", "user_net:Net", "--init", "idinit:epsilon=1"))


def test_start_and_init(run: Run, tmp_path: Path) -> None:
    """The plain network is what it starts as, unless another start is asked for."""
    texts = []
    for number, more in enumerate([(), ("--start", "preserve"), ("--start", "paper"), ("--init", "zas")]):
        assert run("eject", "user_net:with_inputs", f"out{number}", *more).exit_code == 0
        texts.append((tmp_path / f"out{number}" / "rewired_user_net.py").read_text().partition("TRUNKS")[2])
    assert texts[0] == texts[1] == texts[3] != texts[2]
    assert "there is no initialiser 'zos'" in failed(run("diagnose", "hf:llama", "--topology", "dca", "--init", "zos"))


@pytest.mark.parametrize(
    "command",
    [
        ("inspect", "user_net:Net", "--html", "net.html"),
        ("source", "user_net:Net", "0"),
        ("diff", "user_net:Net"),
        ("eject", "user_net:Net", "net"),
        ("diagnose", "user_net:with_inputs"),
        ("graph", "user_net:Net"),
        ("bench", "user_net:with_inputs", "--rounds", "1"),
    ],
    ids=lambda command: command[0],
)
def test_each_command_that_rewires_says_how(
    run: Run, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same words, which reach `rewire.compile`."""
    seen: dict[str, Any] = {}
    compiled = rewire.compile

    def compile(model: nn.Module, topology: str, **settings: Any) -> nn.Module:
        seen.update(settings, topology=topology)
        return compiled(model, topology, **settings)

    monkeypatch.setattr(rewire, "compile", compile)
    options = {"granularity": "sublayer", "loop": "restart", "start": "preserve", "init": "zas"}
    said = [part for name, value in options.items() for part in (f"--{name}", value)]
    result = run(*command, "--topology", "denseformer", *said, "--units=-1,output")
    assert result.exit_code == 0, result.output
    assert {name: seen[name] for name in options} == options
    assert seen["units"] == [-1, "output"] and seen["topology"] == "denseformer"


@pytest.mark.parametrize(
    ("topology", "units", "said"),
    [
        ("hc-dynamic", "-1", "has no option 'units'"),
        ("denseformer:units=[1]", "-1", "units are given twice"),
        ("denseformer", "first", "a unit is its number"),
        ("denseformer", "99", "has no connections at unit 99"),
    ],
)
def test_units_that_there_are_not(run: Run, topology: str, units: str, said: str) -> None:
    assert said in failed(run("diff", "user_net:Net", "--topology", topology, f"--units={units}"))


def test_a_file_is_no_module(run: Run) -> None:
    assert "'package.module:callable', as 'user_net:Net'" in failed(run("inspect", "user_net.py:Net"))


def test_a_device_that_is_not_there(run: Run) -> None:
    """Is a wrong argument, before the model is loaded."""
    for command in (("bench", "user_net:nope"), ("study", "user_net:nope"), ("conformance", "mhc")):
        result = run(*command, "--device", "cuda:99")
        assert result.exit_code == 2 and "is no device that torch can use" in " ".join(result.stderr.split())


def test_options_of_the_page_need_the_page(run: Run) -> None:
    """Rather than a name that nobody looks at."""
    result = run("inspect", "user_net:Net", "--topology", "anrce")
    assert result.exit_code == 2 and "add --html" in " ".join(result.stderr.split())


def test_an_implementation_that_is_called_otherwise(run: Run) -> None:
    message = failed(run("conformance", "mhc", "user_net:Net"))
    assert "positional arguments but 4 were given" in message and "as f(x, weights, branches)" in message


def test_near_names_in_the_users_module(run: Run) -> None:
    assert "has no 'Nett'. Did you mean 'Net'?" in failed(run("inspect", "user_net:Nett"))
