"""What users install: a wheel and an sdist, built twice alike, in an environment without the extras."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
NEEDED = ["LICENSE", "MANIFEST.in", "NOTICE", "README.md", "pyproject.toml", "rewire", "rewire_command.py"]
ALL = [*NEEDED, "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "Makefile", "constraints.txt", "mkdocs.yml"]
ALL += ["benchmarks", "docs", "examples", "tests"]
EXTRAS = ("accelerate", "diffusers", "matplotlib", "mkdocs", "optuna", "scipy", "timm", "torchtitan", "transformers")
EXTRAS += ("triton",)  # which comes with builds of torch for GPUs, under one of several names
BUILD = """
import sys
from setuptools import build_meta
print(getattr(build_meta, "build_" + sys.argv[1])(sys.argv[2]), file=sys.stderr)
"""
USE = f"""
import sys
sys.modules.update(dict.fromkeys({EXTRAS}))  # as if they were not installed
import torch
from torch import nn
import rewire

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(8), nn.Linear(8, 8)
    def forward(self, x):
        return x + self.inner(self.norm(x))

model = nn.Sequential(*(Block() for _ in range(3)))
x = torch.randn(2, 8)
rewired = rewire.compile(model, "ancre-ingoing", granularity="sublayer", example_inputs=(x,))
torch.testing.assert_close(rewired(x), model(x))
rewired(x).sum().backward()
print(rewire.__file__)
"""
METADATA = """
import importlib.metadata
import re
import rewire
from rewire.version import DISTRIBUTION

about = importlib.metadata.metadata(DISTRIBUTION)
assert about["Name"] == "rewire-torch" and about["Version"] == rewire.__version__
needed = [re.split(r"[^\\w.-]", line)[0] for line in about.get_all("Requires-Dist")]
assert "rewire" not in needed and {"torch", "safetensors", "rich", "typer"} <= set(needed), needed
assert any(line.startswith("safetensors[torch]") for line in about.get_all("Requires-Dist"))  # with NumPy, to write
plain = [line for line in about.get_all("Requires-Dist") if "extra ==" not in line]
assert not [line for line in plain if line.startswith("triton")], plain
"""
#: What a user writes, checked in strict mode; but for the last line it is right.
TYPED = """
from pathlib import Path

import torch
from torch import Tensor, nn

import rewire



class Net(nn.Module):
    def hello(self) -> str:
        return "hello"


print(rewire.compile(Net()).hello(), rewire.restore(Net()).hello(), rewire.freeze(Net())[0].hello())
print(rewire.load("folder", Net()).hello())
plain = nn.Sequential()
print(rewire.inspect(plain).trunks, rewire.list_topologies(), rewire.list_initializers(), rewire.list_patterns())
model: nn.Module = rewire.compile(plain, "ancre-ingoing", block=4)
model = rewire.compile(plain, {"encoder": rewire.ANCRe(temperature=0.1), "decoder": "dca"}, init="idinit")
optimizer = torch.optim.AdamW(rewire.parameter_groups(model, lr=1e-3, weight_decay=0.1))
batch = {"input_ids": torch.zeros(2, 3, dtype=torch.long)}
monitor = rewire.Monitor(model, print, every=10)
loss: Tensor = model(**batch) + rewire.sparsity_penalty(model)
monitor.step()
text: str = rewire.diff(model) + rewire.source(model, "layers.0")
for name, matrix in rewire.coefficients(model).items():
    print(name, matrix.sum().item(), rewire.connections(model)[name].recipe())
print(rewire.diagnose(model, batch).trunks, rewire.roles(model), rewire.fusions(model))
rewire.plot(model, Path("weights.png"))
rewire.report(model, "report.html")
frozen, about = rewire.freeze(model, threshold=0.05)
print(about)
rewire.save(frozen, "folder")
model = rewire.load("folder", plain, example_inputs=(torch.zeros(2),))
model = rewire.from_pretrained("folder", dtype="bfloat16")
rewire.eject(model, Path("ejected"))
restored = rewire.restore(model)
print(rewire.initialize(restored, "zas", generator=torch.Generator()))
backend = rewire.Backend("dca")
print(backend.report, list(backend.parameters()))
task = rewire.Task(lambda: nn.Linear(2, 2), batches=lambda seed: [batch], validation=[batch])
print(rewire.study(task, ["dca"], steps=10, out="study"))


@rewire.register_topology("scaled")
class Scaled(rewire.Recurrence[Tensor]):
    def parameters(self, dims: rewire.Dims, start: str) -> dict[str, Tensor]:
        return {"scales": torch.ones(dims.depth)}


try:
    rewire.compile(plain, "ancre")
except rewire.RewireError as error:
    print(error)
wrong: int = rewire.diff(model)
"""


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


def built(kind: str, where: Path, needed: Sequence[str] = NEEDED) -> Path:
    """A package, from a copy of the sources: building leaves folders behind."""
    tree, out = where / "tree", where / "dist"
    tree.mkdir(parents=True)
    for name in needed:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tree / name)
    run(sys.executable, "-c", BUILD, kind, out, cwd=tree, SOURCE_DATE_EPOCH="1700000000")
    (package,) = out.iterdir()
    return package


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel, torch, and the few others that rewire needs."""
    where = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", where / "env", cwd=where)
    python = where / "env" / "bin" / "python"
    run(python, "-m", "pip", "install", "--no-deps", "--no-index", built("wheel", where), cwd=where)
    (site,) = (where / "env" / "lib").glob("python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_paths()["purelib"])  # .pth files in there are not read
    return python


def test_wheels_are_reproducible_and_whole(tmp_path: Path) -> None:
    wheel, again = built("wheel", tmp_path / "one"), built("wheel", tmp_path / "two")
    assert wheel.read_bytes() == again.read_bytes()
    names = zipfile.ZipFile(wheel).namelist()
    sources = {f"rewire/kernels/cpu/{name}" for name in ("elements.h", "sums.cpp", "sinkhorn.cpp")}
    assert sources | {"rewire/py.typed"} <= set(names)
    assert not [name for name in names if not name.startswith("rewire")]


def test_without_the_extras(python: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(USE)
    where = run(python, "-W", "ignore", "script.py", cwd=tmp_path, PYTHONPATH="")
    assert Path(where.strip()).is_relative_to(python.parents[1])
    assert "ancre-ingoing" in run(python.with_name("rewire"), "list", cwd=tmp_path, PYTHONPATH="")


def test_an_sdist_is_built_and_tested_from_itself(tmp_path: Path) -> None:
    with tarfile.open(built("sdist", tmp_path, ALL)) as archive:
        archive.extractall(tmp_path / "sources", filter="data")
    (tree,) = (tmp_path / "sources").iterdir()
    run(sys.executable, "-c", BUILD, "wheel", tmp_path / "wheels", cwd=tree)
    (wheel,) = (tmp_path / "wheels").iterdir()
    assert "rewire/kernels/cpu/sums.cpp" in zipfile.ZipFile(wheel).namelist()
    kept = {path.relative_to(ROOT) for name in ALL for path in (ROOT / name, *(ROOT / name).rglob("*"))}
    missing = [path for path in kept if "__pycache__" not in path.parts and not (tree / path).exists()]
    assert not missing
    tests = ["tests/saving/test_checkpoint.py", "tests/code"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    assert "passed" in run(*command, cwd=tree, PYTHONPATH=str(tree))


def test_the_metadata_name_no_other_package(python: Path, tmp_path: Path) -> None:
    """`rewire` is somebody else's."""
    (tmp_path / "script.py").write_text(METADATA)
    run(python, "script.py", cwd=tmp_path, PYTHONPATH="")
    texts = [path.read_text() for name in ("rewire", "docs", "examples") for path in (ROOT / name).rglob("*.[mp][dy]")]
    assert not re.search(r"pip install (-U )?'?rewire\b(?!-torch)", "".join([*texts, (ROOT / "README.md").read_text()]))


def checked(command: list[str | Path], cwd: Path) -> list[str]:
    """The errors that a type checker prints."""
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=500)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if re.search(r":\d+(:\d+)?(:| -) error", line)]


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_types_hold_in_a_users_script(checker: str, python: Path, tmp_path: Path) -> None:
    """In strict mode: all that is public has types, and they are right where they are used."""
    (tmp_path / "script.py").write_text(TYPED)
    last = len(TYPED.splitlines())
    if checker == "mypy":
        options = ["--strict", f"--python-executable={python}", "--follow-imports=silent"]
        errors = checked([sys.executable, "-m", "mypy", *options, "script.py"], tmp_path)
    else:
        if subprocess.run([sys.executable, "-m", "pyright", "--version"], cwd=tmp_path, capture_output=True).returncode:
            pytest.skip("pyright cannot be started: it fetches itself from npm when it is first run")
        (tmp_path / "pyrightconfig.json").write_text('{"include": ["script.py"], "typeCheckingMode": "strict"}')
        errors = checked([sys.executable, "-m", "pyright", f"--pythonpath={python}"], tmp_path)
    assert len(errors) == 1 and f"script.py:{last}:" in errors[0], "\n".join(errors)
