"""rewire.precompile: a first step finds all its kernels in Triton's cache, and what cannot be compiled is said."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import NanoGPT, token_ids
from torch import nn

import rewire
from rewire.kernels import switch
from rewire.kernels.kernel import noted
from rewire.precompiling import _launches

EVERY_KERNEL = (
    *("ancre-ingoing", "hc-static", "grn-v2", "grn-v3", "dca", "muddformer"),
    *("attnres", "hc-dynamic", "mhc", "frac-hc", "laurel-pa"),
)


@pytest.fixture(scope="module")
def rewired() -> nn.Module:
    return rewire.compile(NanoGPT(), "ancre-ingoing", example_inputs=(token_ids(),), validate=False)


def in_a_process(folder: Path, what: str, how: str, *topologies: str) -> dict[str, object]:
    here = Path(__file__).parent
    caches = {"TRITON_CACHE_DIR": str(folder / "triton"), "REWIRE_CACHE_DIR": str(folder / "rewire")}
    path = {"PYTHONPATH": os.pathsep.join([str(here), str(here.parent)])}
    done = subprocess.run(
        [sys.executable, str(here / "first_step_worker.py"), what, how, *topologies],
        env={**os.environ, **caches, **path}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "topologies"), [("eager", EVERY_KERNEL), ("compiled", ("ancre-ingoing", "hc-dynamic"))]
)
def test_a_first_step_compiles_nothing(tmp_path: Path, how: str, topologies: tuple[str, ...]) -> None:
    """In another process, in which Triton's own launcher asks for kernels; the first was on the meta device."""
    first, *_ = topologies
    counts = in_a_process(tmp_path, "ahead", how, *topologies)
    asked = in_a_process(tmp_path, "step", how, *topologies)
    assert {topology: missed for topology, (_, missed) in asked.items()} == {key: [] for key in topologies}
    assert asked[first][0] == counts[first]  # neither more: others share some of their kernels with it


@pytest.mark.slow
def test_without_it_all_are_compiled(tmp_path: Path) -> None:
    ((count, missed),) = in_a_process(tmp_path, "step", "eager", "hc-static").values()
    assert count == len(missed) > 0


@pytest.mark.parametrize("topology", ["ancre-ingoing", "hc-dynamic", "attnres"])
def test_all_devices_start_the_same(topology: str) -> None:
    model = rewire.compile(NanoGPT(depth=4), topology, example_inputs=(token_ids(),), validate=False)
    here = _launches(model, (token_ids(),) * 2)
    there = _launches(copy.deepcopy(model).to("meta"), (token_ids(),) * 2)
    numbers = [
        [(one.code.programs, dict(one.code.constants), {k: v for k, v in one.arguments.items() if type(v) is int})
         for one in launches]
        for launches in (here, there)
    ]  # fmt: skip
    assert here and numbers[0] == numbers[1]


def test_the_model_is_left_alone(rewired: nn.Module) -> None:
    before = {name: value.clone() for name, value in rewired.state_dict().items()}
    state = torch.get_rng_state()
    assert _launches(rewired, (token_ids(),) * 2)
    assert all(torch.equal(value, before[name]) for name, value in rewired.state_dict().items())
    assert all(p.grad is None for p in rewired.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert not switch.uses_kernels(torch.empty(1))


def test_forward_alone(rewired: nn.Module) -> None:
    with torch.no_grad():
        forward = _launches(rewired, (token_ids(),) * 2)
    assert 0 < len(forward) < len(_launches(rewired, (token_ids(),) * 2))


def test_precision_is_that_of_the_call(rewired: nn.Module) -> None:
    def dtypes() -> set[torch.dtype]:
        launches = _launches(rewired, (token_ids(),) * 2)
        return {x.dtype for one in launches for x in one.arguments.get("added", ())}

    assert dtypes() == {torch.float32}
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.bfloat16 in dtypes()


def test_what_notes_sees_unaligned_addresses() -> None:
    from rewire.kernels import operators

    memory = torch.zeros(4 * 8 + 1)
    with noted() as launches:
        operators.mix([memory[1:].view(4, 8), memory[:-1].view(4, 8)], torch.ones(2), [], [], None, torch.float32)
    (launch,) = launches
    assert [x.data_ptr() % 16 for x in launch.arguments["sources"]] == [4, 0]


def test_no_gpu_and_no_target(rewired: nn.Module) -> None:
    assert not torch.cuda.is_available(), "tests need no GPU"
    with pytest.raises(rewire.RewireError, match=r"no GPU here: .*target='sm_90'"):
        rewire.precompile(rewired, (token_ids(),))


@pytest.mark.parametrize(("target", "why"), [("h100", "has to be like 'sm_90'"), ("gfx942", "is built for other GPUs")])
def test_targets_that_are_none(rewired: nn.Module, target: str, why: str) -> None:
    with pytest.raises(rewire.RewireError, match=why):
        rewire.precompile(rewired, (token_ids(),), target=target)


def test_models_without_kernels(rewired: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = (token_ids(),)
    with pytest.raises(rewire.RewireError, match="NanoGPT is not rewired"):
        rewire.precompile(NanoGPT(), batch, target="sm_90")
    with pytest.raises(rewire.RewireError, match=r"NanoGPT.* starts no kernels"):
        rewire.precompile(copy.deepcopy(rewired).double(), batch, target="sm_90")
    with pytest.raises(ValueError, match="jobs=0"):
        rewire.precompile(rewired, batch, target="sm_90", jobs=0)
    monkeypatch.setattr(switch, "ON", False)
    with pytest.raises(rewire.RewireError, match="REWIRE_KERNELS=off"):
        rewire.precompile(rewired, batch, target="sm_90")


def test_batches_that_do_not_fit(rewired: nn.Module) -> None:
    with pytest.raises(rewire.BadExampleInputs, match="does not run on the batch"):
        rewire.precompile(rewired, (torch.zeros(2, 3),), target="sm_90")
    with pytest.raises(rewire.BadExampleInputs, match="pass batch="):
        rewire.precompile(rewired, target="sm_90")


def test_a_forward_that_asks_for_values_does_not_run_on_the_meta_device(rewired: nn.Module) -> None:
    model = copy.deepcopy(rewired).to("meta").train()
    model.register_forward_pre_hook(lambda _, args: args[0].sum().item() and None)
    with pytest.raises(rewire.BadExampleInputs, match=r"give the model on a CPU or a GPU"):
        rewire.precompile(model, (token_ids(),), target="sm_90")


def test_the_meta_device_has_no_autocast(rewired: nn.Module) -> None:
    model = copy.deepcopy(rewired).to("meta")
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(rewire.RewireError, match="no autocast"):
        rewire.precompile(model, (token_ids(),), target="sm_90")
