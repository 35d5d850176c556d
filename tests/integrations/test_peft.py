"""LoRA of peft on rewired models: training, merging, unloading, saving."""

from __future__ import annotations

import copy
import subprocess
import sys
import sysconfig
from pathlib import Path

import peft
import pytest
import torch
from mixing import ids, learned, llama, mixed
from torch import Tensor, nn

import rewire
from rewire.patterns.tiny import tiny_model


def adapted(
    model: nn.Module, random: bool = True, targets: tuple[str, ...] = ("q_proj", "v_proj", "down_proj")
) -> nn.Module:
    torch.manual_seed(3)
    transposed = "c_attn" in targets  # GPT-2's Conv1D
    config = peft.LoraConfig(
        r=4,
        task_type="CAUSAL_LM",
        target_modules=list(targets),
        init_lora_weights=not random,
        fan_in_fan_out=transposed,
    )
    return peft.get_peft_model(model, config).eval()


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids()).logits


def train_connections(model: nn.Module) -> None:
    """peft freezes all but its adapters."""
    for connection in rewire.connections(model).values():
        connection.requires_grad_(True)


@pytest.mark.parametrize("topology", ["ancre-ingoing", "dca", "mhc", "attnres"])
def test_adapters_that_start_at_zero_change_nothing(topology: str) -> None:
    model = mixed(llama(), topology)
    expected = logits(model)
    tuned = adapted(model, random=False)
    torch.testing.assert_close(logits(tuned), expected)
    tuned(input_ids=ids()).logits.square().mean().backward()
    own = {name: p for name, p in tuned.named_parameters() if p.requires_grad}
    assert own and all("lora_" in name for name in own)
    assert all(p.grad is not None for p in own.values())


@pytest.mark.parametrize("topology", ["ancre-ingoing", "dca"])
def test_merge_and_unmerge(topology: str) -> None:
    model = mixed(llama(), topology)
    before = logits(model)
    tuned = adapted(model)
    expected = logits(tuned)
    assert not torch.allclose(expected, before, atol=1e-3)
    tuned.merge_adapter()
    torch.testing.assert_close(logits(tuned), expected, rtol=1e-4, atol=1e-5)
    tuned.unmerge_adapter()
    torch.testing.assert_close(logits(tuned), expected, rtol=1e-4, atol=1e-5)
    with tuned.disable_adapter():
        torch.testing.assert_close(logits(tuned), before, rtol=1e-4, atol=1e-5)
    plain = tuned.unload()
    torch.testing.assert_close(logits(plain), before, rtol=1e-4, atol=1e-5)


def test_a_merged_model_is_saved_and_frozen_like_any_other(tmp_path: Path) -> None:
    tuned = adapted(mixed(llama()))
    expected = logits(tuned)
    merged = tuned.merge_and_unload()
    rewire.save(merged, tmp_path)
    torch.testing.assert_close(
        logits(rewire.load(tmp_path, tiny_model("llama", seed=9).eval())), expected, rtol=1e-4, atol=1e-5
    )
    frozen, _ = rewire.freeze(merged, 0.0)
    torch.testing.assert_close(logits(frozen), expected, rtol=1e-4, atol=1e-5)


def test_a_fused_projection() -> None:
    """GPT-2's c_attn, which dca reads apart, as long as it is a plain linear map."""
    model = mixed(tiny_model("gpt2").eval(), "dca")
    before = logits(model)
    tuned = adapted(model, targets=("c_attn",))
    expected = logits(tuned)
    assert not torch.allclose(expected, before, atol=1e-3)
    torch.testing.assert_close(logits(tuned.merge_and_unload()), expected, rtol=1e-4, atol=1e-5)


def test_adapters_and_connections_are_saved_apart(tmp_path: Path) -> None:
    """The base stays where it is: its connection weights were trained along with the adapters."""
    tuned = adapted(mixed(llama()))
    train_connections(tuned)
    groups = rewire.parameter_groups(tuned, lr=1e-2, weight_decay=0.1)
    assert [len(group["params"]) for group in groups] == [18, 1]
    optimizer = torch.optim.AdamW(groups)
    start = [weight.detach().clone() for weight in learned(tuned).values()]
    tuned(input_ids=ids(), labels=ids()).loss.backward()
    optimizer.step()
    assert not torch.equal(start[0], next(iter(learned(tuned).values())))
    with pytest.warns(UserWarning, match=r"without the connection weights .* \(base_model.*layers\)"):
        tuned.save_pretrained(tmp_path / "adapter")
    rewire.save(tuned.get_base_model(), tmp_path / "connections", weights="connections")
    base = rewire.load(tmp_path / "connections", llama(), weights="connections")
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert torch.equal(logits(loaded), logits(tuned))


def trained(tuned: nn.Module) -> Tensor:
    """Logits after three large steps on all that is trained."""
    optimizer = torch.optim.SGD([p for p in tuned.parameters() if p.requires_grad], lr=5.0)
    for _ in range(3):
        optimizer.zero_grad()
        tuned(input_ids=ids(), labels=ids()).loss.backward()
        optimizer.step()
    return logits(tuned.eval())


@pytest.mark.each_once
@pytest.mark.parametrize("saved", ["depth_connections", "depth_connections.layers"])
@pytest.mark.parametrize("topology", ["ancre-ingoing", "muddformer"])
def test_connections_are_modules_to_save(topology: str, saved: str, tmp_path: Path) -> None:
    """They are trained, saved, switched off and merged with the adapters."""
    config = peft.LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj"], modules_to_save=[saved])
    model, again = mixed(llama(), topology), mixed(llama(), topology)
    before = logits(model)
    tuned = peft.get_peft_model(model, config)
    start = {name: p.detach().clone() for name, p in tuned.named_parameters() if "depth_connections" in name}
    after = trained(tuned)
    moved = [name for name, p in tuned.named_parameters() if name in start and not torch.equal(start[name], p)]
    assert moved and all("modules_to_save.default" in name for name in moved)
    with tuned.disable_adapter():
        torch.testing.assert_close(logits(tuned), before)
    tuned.save_pretrained(tmp_path / "adapter")  # no warning
    torch.testing.assert_close(logits(peft.PeftModel.from_pretrained(again, tmp_path / "adapter").eval()), after)
    merged = tuned.merge_and_unload()
    torch.testing.assert_close(logits(merged), after, rtol=1e-4, atol=1e-5)
    rewire.save(merged, tmp_path / "merged")
    torch.testing.assert_close(logits(rewire.load(tmp_path / "merged", llama()).eval()), logits(merged))


def test_a_copied_block_does_not_take_the_trunk_along() -> None:
    model = mixed(llama())
    block, (connection,) = model.model.layers[0], rewire.connections(model).values()
    assert sum(p.numel() for p in copy.deepcopy(block).parameters()) == sum(p.numel() for p in block.parameters())
    entry = copy.deepcopy(block)._depth.entries[0]
    assert entry.held[0] is model.model and entry.in_use is entry.connection is connection


#: An ejected model is adapted, trained, merged and loaded again where there is no rewire.
EJECTED = """
import sys
sys.path += sys.argv[1:3]
import os
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_MODULES_CACHE"] = sys.argv[3] + "/modules"
import torch
import torchvision_stub
import peft
from transformers import AutoModelForCausalLM

folder = sys.argv[3]
case = torch.load(folder + "/case.pt")

def ejected():
    return AutoModelForCausalLM.from_pretrained(folder + "/model", trust_remote_code=True)

torch.manual_seed(3)
config = peft.LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj", "down_proj"])
tuned = peft.get_peft_model(ejected(), config)
optimizer = torch.optim.SGD([p for p in tuned.parameters() if p.requires_grad], lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    tuned(input_ids=case["ids"], labels=case["ids"]).loss.backward()
    optimizer.step()
tuned.eval()
tuned.save_pretrained(folder + "/adapter")
again = peft.PeftModel.from_pretrained(ejected(), folder + "/adapter").eval()
merged = tuned.merge_and_unload()
with torch.no_grad():
    for model in (again, merged):
        torch.testing.assert_close(model(input_ids=case["ids"]).logits, case["logits"], rtol=1e-4, atol=1e-5)
assert not any(name.partition(".")[0] == "rewire" for name in sys.modules)
"""


@pytest.mark.slow
def test_adapters_on_an_ejected_model_train_as_on_the_rewired_one(tmp_path: Path) -> None:
    model = mixed(llama(), "ancre-ingoing")
    rewire.eject(model, tmp_path / "model")
    tuned = adapted(model, random=False).train()
    before = logits(tuned)
    optimizer = torch.optim.SGD([p for p in tuned.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        tuned(input_ids=ids(), labels=ids()).loss.backward()
        optimizer.step()
    after = logits(tuned.eval())
    assert (after - before).abs().max() > 1e-3
    torch.save({"ids": ids(), "logits": after}, tmp_path / "case.pt")
    paths = [Path(__file__).parents[1], sysconfig.get_paths()["purelib"], tmp_path]
    command = [sys.executable, "-I", "-S", "-c", EJECTED, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
