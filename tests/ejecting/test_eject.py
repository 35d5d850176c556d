"""Ejected models compute what the rewired ones do, in a process that has no rewire."""

from __future__ import annotations

import ast
import copy
import functools
import importlib
import json
import math
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from every_topology import EVERY, mixed
from mixing import shaken
from safetensors.torch import load_model
from torch import Tensor, nn

import rewire
from rewire.ejecting.runtime import ROOTS, Runtime
from rewire.kernels.cpu import plain
from rewire.patterns import tiny
from rewire.patterns.transformers import example_inputs
from rewire.topologies import make_topology, registry

TESTS = Path(__file__).parents[1]
ARCHITECTURES = "llama qwen3 qwen3_moe gemma2 gemma3_text gpt2 gpt_neox gptj opt phi falcon bloom mpt mixtral"
ARCHITECTURES += " deepseek_v3 granite bert roberta albert distilbert t5 bart whisper vit dinov2 swin convnext clip"
ARCHITECTURES += " wav2vec2 resnet"


def eject(
    rewired: nn.Module,
    folder: Path,
    *args: Any,
    make: Any = None,
    generate: bool = False,
    collect: bool = False,
    training: bool = False,
    **kwargs: Any,
) -> None:
    """Eject a model, with what it computes beside it."""
    path = rewire.eject(rewired, folder)
    rewired.train(training)
    kwargs |= {"output_hidden_states": True} if collect else {}
    outputs = rewired(*args, **kwargs)
    found = outputs if isinstance(outputs, Tensor) else outputs[0]
    found.float().square().mean().backward()
    case = {"module": path.stem, "make": make, "args": args, "kwargs": kwargs, "training": training}
    case |= {"outputs": found.detach(), "gradients": {name: p.grad for name, p in rewired.named_parameters()}}
    case |= {"collected": [x.detach() for x in outputs.hidden_states] if collect else None, "generated": None}
    case["dtype"] = found.dtype
    if generate:
        case["generated"] = rewired.eval().generate(kwargs["input_ids"], max_new_tokens=6, do_sample=False)
    if make is None:
        case["auto"] = next(iter(json.loads((folder / "config.json").read_text())["auto_map"]))
    torch.save(case, folder / "case.pt")


def compare(folders: list[Path], tolerance: float = 1e-5) -> None:
    """Load ejected models without rewire and compare them with the rewired ones."""
    packages = str(Path(torch.__file__).parents[1])
    command = [sys.executable, "-I", "-S", str(TESTS / "eject_worker.py"), str(TESTS), packages, *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert set(results) == {folder.name for folder in folders}
    wrong = {
        name: found
        for name, found in results.items()
        if isinstance(found, str) or any(not difference <= tolerance for difference in found.values())
    }
    assert not wrong, "\n".join(f"{name}: {found}" for name, found in wrong.items())


def llama(key: str) -> nn.Module:
    torch.manual_seed(0)
    return mixed(tiny.tiny_model("llama"), key)


def eject_llama(key: str, folder: Path, **options: Any) -> Path:
    eject(llama(key), folder / key.replace("-", "_"), input_ids=models.token_ids(), **options)
    return folder / key.replace("-", "_")


def eject_kind(name: str, folder: Path) -> Path:
    """A hand-written model, in float64."""
    torch.manual_seed(0)
    case, folder = models.CASES[name], folder / name.replace("-", "_")
    rewired = mixed(case.make(), "ancre-ingoing").double()
    eject(rewired, folder, *(x.double() if x.is_floating_point() else x for x in case.inputs()), make=name)
    return folder


def imported(path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An ejected module, in this process."""
    monkeypatch.syspath_prepend(path.parents[1])
    return importlib.import_module(f"{path.parent.name}.{path.stem}")


def rewired_and_ejected(
    methods: str, folder: Path, monkeypatch: pytest.MonkeyPatch, layer: str = "nn.Linear(4, 4)"
) -> tuple[nn.Module, Any, Tensor]:
    """A net of three layers with these methods, in a file of its own, rewired; the same ejected; and an input."""
    monkeypatch.syspath_prepend(folder)
    name = f"net_{folder.name}"
    (folder / f"{name}.py").write_text(
        "from torch import nn\n\n\nclass Block(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.f = nn.Linear(4, 4)\n\n    def forward(self, x):\n        return x + self.f(x)\n\n\n"
        "def run(block, x):\n    return block(x)\n\n\n"
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        f"        self.layers = nn.ModuleList({layer} for _ in range(3))\n\n{methods}"
    )
    net, x = importlib.import_module(name).Net(), torch.randn(2, 4)
    rewired = rewire.compile(net, "denseformer", example_inputs=(x,))
    ejected = imported(rewire.eject(rewired, folder / f"ejected_{folder.name}"), monkeypatch).connected(net)
    for mine, its in zip(ejected.parameters(), shaken(rewired, 0.5, seed=1).parameters(), strict=True):
        mine.data.copy_(its)
    torch.testing.assert_close(ejected(x), rewired(x))
    return rewired, ejected, x


@pytest.mark.parametrize(
    ("layer", "body"),
    [
        (
            "nn.Linear(4, 4)",
            "for n, f in enumerate(self.layers):\n    if n in skip:\n        continue\n    x = x + f(x)\n",
        ),
        ("Block()", "for n, block in enumerate(self.layers):\n    if n not in skip:\n        x = run(block, x)\n"),
    ],
)
def test_loops_that_skip_iterations(layer: str, body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    methods = f"    def forward(self, x, skip=()):\n{textwrap.indent(body, ' ' * 8)}        return x\n"
    rewired, ejected, x = rewired_and_ejected(methods, tmp_path, monkeypatch, layer)
    for skip in ((), (0,), (1,), (2,), (0, 2)):
        torch.testing.assert_close(ejected(x, skip), rewired(x, skip))
    del ejected.layers[1], rewired.layers[1]
    torch.testing.assert_close(ejected(x), rewired(x))


STEP = "    def step(self, x, n):\n        return x + self.layers[n](x)\n\n"
ADD = "    def add(self, x, f):\n        return x + f\n\n"


def test_methods_whose_calls_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = "        for n in order:\n            x = self.step(x, n)\n        return x\n"
    methods = f"{STEP}    def forward(self, x, order=(0, 1, 2)):\n{loop}"
    rewired, ejected, x = rewired_and_ejected(methods, tmp_path, monkeypatch)
    torch.testing.assert_close(ejected(x, (0, 2)), rewired(x, (0, 2)))
    for model in (ejected, rewired):
        with pytest.raises(Exception, match="called in another order"):
            model(x, (1, 0, 2))


def test_functions_that_are_called_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of their calls, nothing tells which one was left out."""
    loop = "        while n < 3:\n            if n not in skip:\n                x = self.add(x, self.layers[n](x))\n"
    methods = f"{ADD}    def forward(self, x, skip=(), n=0):\n{loop}            n += 1\n        return x\n"
    rewired, ejected, x = rewired_and_ejected(methods, tmp_path, monkeypatch)
    for model in (ejected, rewired):
        with pytest.raises(Exception, match="nothing tells which of its calls is which"):
            model(x, (1,))


def test_an_add_that_is_left_out_before_one_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    methods = (
        "    def forward(self, x, on=True):\n        x = first = self.layers[2](x)\n        if on:\n"
        "            x = x + self.layers[0](x)\n        x += self.layers[1](x.clone())\n        return x * first\n"
    )
    rewired, ejected, x = rewired_and_ejected(methods, tmp_path, monkeypatch)
    for model in (ejected, rewired):
        with pytest.raises(Exception, match="writes to the state in place"):
            model(x, False)


@pytest.mark.slow
def test_models_compute_the_same_without_rewire(tmp_path: Path) -> None:
    folders = [eject_llama("ancre-ingoing", tmp_path, generate=True, collect=True)]
    compare([*folders, eject_kind("nanogpt", tmp_path), eject_kind("projection", tmp_path)])


@pytest.mark.slow
def test_every_topology(tmp_path: Path) -> None:
    compare([eject_llama(key, tmp_path) for key in EVERY], tolerance=3e-5)  # mhc-identity amplifies rounding


@pytest.mark.slow
def test_every_kind_of_model(tmp_path: Path) -> None:
    compare([eject_kind(name, tmp_path) for name in models.CASES], tolerance=1e-7)


@pytest.mark.slow
def test_every_architecture_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "WORTHWHILE", math.inf)  # sums of small states: those of ejected models
    folders = []
    for name in ARCHITECTURES.split():
        torch.manual_seed(0)
        model = tiny.tiny_model(name)
        args, kwargs = example_inputs(model)
        folders.append(tmp_path / name)
        eject(mixed(model, "ancre-ingoing"), folders[-1], *args, **kwargs)
    compare(folders)


TIMM = "vit_tiny_patch16_224 deit3_small_patch16_224 convnext_atto resnet18 seresnet33ts mixer_s16_224 efficientnet_b0"
TIMM += " swin_tiny_patch4_window7_224 eva02_tiny_patch14_224 cait_xxs24_224"


def dit() -> nn.Module:
    import diffusers

    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8, "in_channels": 4}
    model: nn.Module = diffusers.DiTTransformer2DModel(**sizes, norm_num_groups=4, num_embeds_ada_norm=10)
    return model


def test_a_model_whose_file_is_called_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of litgpt and RWKV are: the module is not hidden by an argument's name."""
    text = (
        "import torch\nfrom torch import nn\n\n\nclass Net(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.f, self.g = nn.Linear(4, 4), nn.Linear(4, 4)\n\n"
        "    def forward(self, x):\n        x = x + self.f(x)\n        return x + self.g(x)\n"
    )
    (tmp_path / "model.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "model", raising=False)
    net, x = importlib.import_module("model").Net(), torch.randn(2, 4)
    rewired = rewire.compile(net, "denseformer", granularity="sublayer", example_inputs=(x,))
    path = rewire.eject(rewired, tmp_path / "ejected_net")
    ejected = imported(path, monkeypatch).connected(net)
    torch.testing.assert_close(ejected(x), rewired(x))
    del sys.modules["model"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "topology"),
    [*((name, "denseformer") for name in (*TIMM.split(), "DiT")), ("swin_tiny_patch4_window7_224", "hc-dynamic")],
)
def test_architectures_of_timm_and_diffusers(
    name: str, topology: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import timm

    make = dit if name == "DiT" else functools.partial(timm.create_model, name)
    model = make().eval()
    size = (4, 8, 8) if name == "DiT" else model.default_cfg["input_size"]
    inputs = (torch.randn(1, *size),)
    options = {"timestep": torch.tensor([1]), "class_labels": torch.tensor([1])} if name == "DiT" else {}
    rewired = rewire.compile(model, topology, start="paper", validate=False)
    path = rewire.eject(rewired, tmp_path / f"{name}-{topology}")
    ejected = imported(path, monkeypatch).connected(make()).eval()
    load_model(ejected, path.parent / "model.safetensors")
    with torch.no_grad():
        found, want = ejected(*inputs, **options), rewired.eval()(*inputs, **options)
    torch.testing.assert_close(getattr(found, "sample", found), getattr(want, "sample", want))


@pytest.mark.slow
def test_training_with_checkpointing_and_in_bfloat16(tmp_path: Path) -> None:
    eject(llama("ancre-ingoing").bfloat16(), tmp_path / "half", input_ids=models.token_ids())
    compare([tmp_path / "half"], tolerance=2e-2)
    rewired = llama("muddformer")
    rewired.gradient_checkpointing_enable({"use_reentrant": False})
    eject(rewired, tmp_path / "checkpointed", input_ids=models.token_ids(), use_cache=False, training=True)
    compare([tmp_path / "checkpointed"])


def test_the_runtime_holds_all_that_every_topology_needs(tmp_path: Path) -> None:
    made = [make_topology(name, options) for name, options in EVERY.values()]
    roots = dict.fromkeys((type(topology).__module__, type(topology).__name__) for topology in made)
    text = Runtime([*ROOTS, *roots, ("rewire.topologies.frozen", "Frozen")]).text('"""All of them."""\n', callers="")
    path = tmp_path / "everything.py"
    path.write_text(text)
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select=F,E9", str(path)]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
    imports = [
        ast.unparse(node) for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Import, ast.ImportFrom))
    ]
    assert not [statement for statement in imports if "rewire" in statement]


EJECT = """
import sys
import models
import rewire

rewire.eject(rewire.compile(models.Stack(models.PreNorm), "hc-dynamic"), sys.argv[1])
"""


def test_two_processes_write_the_same_files(tmp_path: Path) -> None:
    """Whatever the order of their sets: so a second one may replace what the first has written."""
    texts = []
    for seed in ("1", "2", "3"):
        env = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
        subprocess.run([sys.executable, "-c", EJECT, str(tmp_path / "ejected")], check=True, env=env)
        texts.append([path.read_text() for path in sorted((tmp_path / "ejected").glob("*.py"))])
    assert texts[0] == texts[1] == texts[2] and texts[0]


def test_files_are_small_and_keep_licences(tmp_path: Path) -> None:
    path = rewire.eject(llama("ancre-ingoing"), tmp_path)
    text, runtime = path.read_text(), (tmp_path / "rewire_runtime.py").read_text()
    assert text.startswith("# Copyright 2022 EleutherAI and the HuggingFace Inc. team.")
    assert "class LlamaAttention" not in text  # it was not edited
    assert len(text.splitlines()) < 250
    assert len(runtime.splitlines()) < 5_650
    assert max(map(len, runtime.splitlines())) <= 120
    assert str(Path(models.__file__).parent) not in text + runtime


def test_a_frozen_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = models.CASES["pre-norm"]
    rewired = mixed(case.make(), "grn-v2")
    frozen, _ = rewire.freeze(rewired, 0.01, example_inputs=case.inputs())
    ejected = imported(rewire.eject(frozen, tmp_path / "frozen_stack"), monkeypatch).connected(case.make())
    load_model(ejected, tmp_path / "frozen_stack" / "model.safetensors")
    torch.testing.assert_close(ejected(*case.inputs()), frozen(*case.inputs()))


def test_an_ejected_model_is_copied_pickled_and_used_beside_rewire(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = models.CASES["nanogpt-no-targets"]
    rewired = mixed(case.make(), "muddformer").eval()
    ejected = imported(rewire.eject(rewired, tmp_path / "copied"), monkeypatch).NanoGPT().eval()
    load_model(ejected, tmp_path / "copied" / "model.safetensors")
    want = rewired(*case.inputs())
    torch.testing.assert_close(ejected(*case.inputs()), want)
    torch.testing.assert_close(copy.deepcopy(ejected)(*case.inputs()), want)
    torch.testing.assert_close(pickle.loads(pickle.dumps(ejected))(*case.inputs()), want)


NET = """\
# Copyright (c) the authors of this net.
import torch
from torch import nn


def normed(x):
    return torch.nn.functional.layer_norm(x, x.shape[-1:])


class Base(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def branch(self, x):
        return self.down(torch.relu(self.up(normed(x))))

    def forward(self, x):
        return x + self.branch(x)


class Inherits(Base):
    pass


class Block(Base):
    def branch(self, x):
        return self.up(normed(x))

    def forward(self, x):
        '''Text of
two lines.'''
        x = x + super().branch(x)
        x = x + self.branch(x)
        return x


class Net(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.blocks = nn.ModuleList([*(Inherits() for _ in range(depth)), *(Block() for _ in range(depth))])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x
"""


def written(folder: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    return importlib.import_module(name)


def test_methods_of_bases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = written(tmp_path, "net_with_bases", NET, monkeypatch), models.vectors()
    rewired = mixed(net.Net(), "ancre-ingoing")
    path = rewire.eject(rewired, tmp_path / "bases")
    ejected = imported(path, monkeypatch).Net()
    load_model(ejected, path.parent / "model.safetensors")
    torch.testing.assert_close(ejected(x), rewired(x))
    assert path.read_text().startswith("# Copyright (c) the authors of this net.\n")
    with pytest.raises(Exception, match=r"'blocks.1' is of class Block here, and was of class Inherits when"):
        imported(path, monkeypatch).Net(depth=1)


@pytest.mark.parametrize("norm_first", [True, False])
def test_forwards_in_place_of_fast_paths(norm_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> nn.Module:
        layer = nn.TransformerEncoderLayer(8, 2, batch_first=True, norm_first=norm_first)
        return nn.TransformerEncoder(layer, 3, enable_nested_tensor=not norm_first)

    x = models.vectors()
    rewired = mixed(make(), "ancre-ingoing").eval()
    path = rewire.eject(rewired, tmp_path / f"encoder_{norm_first}")
    ejected = imported(path, monkeypatch).connected(make()).eval()
    load_model(ejected, path.parent / "model.safetensors")
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[:, 7:] = True  # for which the original would take nested tensors
    for options in ({}, {"src_key_padding_mask": mask}):
        torch.testing.assert_close(ejected(x, **options), rewired(x, **options))


PROCESSORS = """\
from torch import nn


class Adds:
    def __call__(self, layer, x):
        return x + layer(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.processor = nn.Linear(8, 8), Adds()

    def forward(self, x):
        return self.processor(self.layer, x)


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(*(Block() for _ in range(3)))
"""


def test_functions_without_a_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = written(tmp_path, "net_with_processors", PROCESSORS, monkeypatch), models.vectors()
    rewired = rewire.compile(net.Net(), "ancre-ingoing", example_inputs=(x,))
    with pytest.raises(rewire.EditError, match=r"a function that Block.forward is given and calls"):
        rewire.eject(rewired, tmp_path / "processors")


TOPOLOGY = """\
import dataclasses
import rewire

SCALE = 0.5


@rewire.register_topology("scaled-in-a-file")
@dataclasses.dataclass(frozen=True)
class ScaledInAFile(rewire.Residual):
    '''Half of each branch.'''

    factor: float = 1.0

    def merge(self, states, weights, t, *branches):
        return states[0] + SCALE * self.factor * sum(branches)
"""


def test_a_topology_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry._FACTORIES, "_entries", dict(registry._FACTORIES._entries))
    written(tmp_path, "topology_in_a_file", TOPOLOGY, monkeypatch)
    case = models.CASES["nanogpt-no-targets"]
    rewired = rewire.compile(case.make().eval(), "scaled-in-a-file", factor=0.7, start="paper", validate=False)
    path = rewire.eject(rewired, tmp_path / "own_topology")
    ejected = imported(path, monkeypatch).NanoGPT().eval()
    load_model(ejected, path.parent / "model.safetensors")
    torch.testing.assert_close(ejected(*case.inputs()), rewired(*case.inputs()))
    assert "register_topology(" not in (path.parent / "rewire_runtime.py").read_text()


def test_what_cannot_be_ejected_is_refused(tmp_path: Path) -> None:
    case = models.CASES["pre-norm"]
    with pytest.raises(rewire.RewireError, match="was not rewired: there is nothing to eject"):
        rewire.eject(case.make(), tmp_path)

    class Local(models.PreNorm):
        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attn(self.ln_1(x))
            return x + self.mlp(self.ln_2(x))

    rewired = rewire.compile(models.Stack(Local), "ancre-ingoing", example_inputs=case.inputs())
    with pytest.raises(rewire.EditError, match=r"Stack cannot be ejected: .*Local \(module .*\) has no name"):
        rewire.eject(rewired, tmp_path)
    with pytest.raises(rewire.RewireError, match="on the meta device"):
        rewire.eject(rewire.compile(models.NanoGPT().to("meta"), validate=False), tmp_path)
    part = mixed(models.Stack(models.PreNorm), "ancre-ingoing")
    part.layers = part.layers[:2]
    rewire.pipeline_stage(part)
    with pytest.raises(rewire.RewireError, match="one part of a pipeline: eject the whole model"):
        rewire.eject(part, tmp_path)
    odd = type("Stack(object): pass  #", (models.Stack,), {})(models.PreNorm)
    with pytest.raises(rewire.EditError, match="is no name that can be written in a file"):
        rewire.eject(mixed(odd, "ancre-ingoing"), tmp_path)
    assert not list(tmp_path.iterdir())


def test_more_blocks_than_were_ejected_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be left unconnected."""
    ejected = imported(rewire.eject(llama("ancre-ingoing"), tmp_path / "ejected_llama"), monkeypatch)
    config = tiny.tiny_model("llama").config
    config.num_hidden_layers += 1
    with pytest.raises(Exception, match=r"'model\.layers' has \d modules, and had \d when the model was ejected"):
        ejected.LlamaForCausalLM(config)
