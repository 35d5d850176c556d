"""save_pretrained, from_pretrained, the Trainer and generation of transformers, on rewired models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from every_topology import EVERY, kinds_first
from every_topology import mixed as mixed_by_key
from mixing import ids, learned, llama, mixed
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig
from transformers.distributed.pipeline_parallel import PipelineIdentityLayer

import rewire
from rewire.patterns.tiny import tiny_model


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(ids()).logits


@pytest.mark.parametrize("key", kinds_first(EVERY))
def test_round_trip_of_every_topology(key: str, tmp_path: Path) -> None:
    model = mixed_by_key(llama(), key)
    model.save_pretrained(tmp_path)
    loaded = rewire.from_pretrained(tmp_path)
    assert type(loaded) is LlamaForCausalLM and not loaded.training
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("model_type", ["gpt2", "bert", "t5", "vit", "clip", "mixtral"])
def test_round_trip_of_other_architectures(model_type: str, tmp_path: Path) -> None:
    model = mixed(tiny_model(model_type)).eval()
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    loaded = rewire.from_pretrained(tmp_path)
    state = loaded.state_dict()
    assert type(loaded) is type(model) and model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(not value.is_meta for value in (*loaded.parameters(), *loaded.buffers()))
    assert rewire.coefficients(loaded).keys() == rewire.coefficients(model).keys()


def test_pipelines_of_transformers(tmp_path: Path) -> None:
    """They hand on hidden states alone: refused, of a rewired model and of one that was cut before."""
    mixed(llama()).save_pretrained(tmp_path)
    with pytest.raises(rewire.RewireError, match=r"\(pp_size\) send one hidden state .* call rewire.pipeline_stage"):
        rewire.from_pretrained(tmp_path, distributed_config=DistributedConfig(pp_size=2))
    cut: Any = llama()
    cut.model.layers[1] = PipelineIdentityLayer()
    with pytest.raises(rewire.WrappedModel, match=r"'model.layers.1' stands for a layer of another pipeline stage"):
        rewire.compile(cut)


def test_a_frozen_model(tmp_path: Path) -> None:
    model, _ = rewire.freeze(mixed(llama()), 0.02)
    model.save_pretrained(tmp_path)
    loaded = rewire.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded), logits(model)) and rewire.source(loaded, "model.layers.1")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_leave_the_connections_in_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    model = mixed(llama())
    model.save_pretrained(tmp_path)
    loaded = rewire.from_pretrained(tmp_path, dtype=dtype, device_map={"": "cpu"})
    assert {p.dtype for n, p in loaded.named_parameters() if "depth_connections" not in n} == {dtype}
    assert all(torch.equal(value, learned(model)[name]) for name, value in learned(loaded).items())
    error = (logits(loaded).float() - logits(model)).norm() / logits(model).norm()
    assert error < 0.02
    loaded.save_pretrained(tmp_path / "again")
    again = rewire.from_pretrained(tmp_path / "again", dtype=dtype)
    assert torch.equal(logits(again), logits(loaded))


def test_a_class_of_the_user(tmp_path: Path) -> None:
    class Mine(LlamaForCausalLM):
        pass

    model = mixed(Mine(llama().config)).eval()
    model.save_pretrained(tmp_path)
    with pytest.raises(rewire.UnknownName, match=r"no model class 'Mine'.*pass model_class"):
        rewire.from_pretrained(tmp_path)
    loaded = rewire.from_pretrained(tmp_path, Mine)
    assert type(loaded) is Mine and torch.equal(logits(loaded), logits(model))


def test_what_is_loaded_trains_and_generates(tmp_path: Path) -> None:
    model = mixed(llama())
    model.save_pretrained(tmp_path)
    loaded = rewire.from_pretrained(tmp_path)
    made = [m.generate(ids(), max_new_tokens=4, do_sample=False) for m in (model, loaded)]
    assert torch.equal(*made)
    loaded(ids(), labels=ids()).loss.backward()
    assert all(bool(value.grad.any()) for value in learned(loaded).values())


def test_what_is_refused(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "plain")
    with pytest.raises(rewire.RewireError, match="holds no rewired model"):
        rewire.from_pretrained(tmp_path / "plain")
    with pytest.raises(rewire.RewireError, match=r"no folder '.*missing' here"):
        rewire.from_pretrained(tmp_path / "missing")
    mixed(llama()).save_pretrained(tmp_path / "saved")
    file = tmp_path / "saved" / "model.safetensors"
    state = load_file(file)
    for name, message in (("_extra_state", "holds no rewired model"), ("logits", r"logits is missing")):
        save_file({key: value for key, value in state.items() if not key.endswith(name)}, file, {"format": "pt"})
        with pytest.raises(rewire.RewireError, match=message):
            rewire.from_pretrained(tmp_path / "saved")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topology": "os.system"}, "not known here"),
        ({"options": {"temperature": "__import__('os')"}}, "do not fit"),
        ({"units": [1, 2, 3]}, "does not fit this model"),
    ],
)
def test_hostile_recipes(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    mixed(llama()).save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    (name,) = [key for key in state if key.endswith("_extra_state")]
    recipe = json.loads(bytes(state[name].tolist())) | change
    state[name] = torch.tensor(list(json.dumps(recipe).encode()), dtype=torch.uint8)
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(rewire.RewireError, match=message):
        rewire.from_pretrained(tmp_path)


def test_hostile_class_names(tmp_path: Path) -> None:
    mixed(llama()).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for name in ("__import__('os')", "Trainer", "os", ""):
        (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [name]}))
        with pytest.raises(rewire.UnknownName, match="no model class"):
            rewire.from_pretrained(tmp_path)


def trainer(model: nn.Module, folder: Path, **options: Any) -> Trainer:
    data = [{"input_ids": row, "labels": row} for row in ids(batch=16)]
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=4,
        save_steps=2,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        **options,
    )
    groups = rewire.parameter_groups(model, lr=1e-2, weight_decay=0.1, connection_lr=1e-3)
    return Trainer(model, arguments, train_dataset=data, optimizers=(torch.optim.AdamW(groups), None))


@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "gradient-checkpointing"])
def test_the_trainer_saves_and_resumes(checkpointed: bool, tmp_path: Path) -> None:
    model = mixed(llama())
    start = {name: value.detach().clone() for name, value in learned(model).items()}
    options = {"gradient_checkpointing": checkpointed, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    trainer(model, tmp_path, **options).train()
    assert all(not torch.equal(value, start[name]) for name, value in learned(model).items())

    halfway = rewire.from_pretrained(tmp_path / "checkpoint-2")
    assert not torch.equal(logits(halfway), logits(model.eval()))
    assert torch.equal(logits(rewire.from_pretrained(tmp_path / "checkpoint-4")), logits(model))

    resumed = mixed(tiny_model("llama", seed=3))
    trainer(resumed, tmp_path, **options).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    torch.testing.assert_close(logits(resumed.eval()), logits(model))
