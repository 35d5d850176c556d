"""Every Auto class of transformers makes the rewired model of an ejected folder, whatever the head, or refuses."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torchvision_stub  # noqa: F401
import transformers
from every_topology import mixed
from torch import Tensor, nn
from transformers import dynamic_module_utils

import rewire
from rewire.attributes import CONNECTIONS
from rewire.patterns import tiny
from rewire.patterns.transformers import example_inputs

FAMILIES = "llama gpt2 bert t5 bart whisper clip vit swin convnext albert deberta wav2vec2 mixtral opt llava gemma3"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files with code are copied here before they are imported."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        monkeypatch.delitem(sys.modules, name)


def ejected(model: nn.Module, folder: Path) -> dict[str, str]:
    """Eject a model; returns the class of each Auto class."""
    rewire.eject(model, folder)
    auto: dict[str, str] = json.loads((folder / "config.json").read_text())["auto_map"]
    return auto


def loaded(auto: str, folder: Path) -> Any:
    return getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True).eval()


def owners(model: nn.Module) -> dict[str, nn.Module]:
    """The modules whose calls run through a trunk, by its name."""
    found = {}
    for module in model.modules():
        for connection in [c for c in module._modules.get(CONNECTIONS, nn.Module()).children() if hasattr(c, "layout")]:
            found[connection.layout.trunk] = module
    return found  # type: ignore[return-value]


def calls(model: nn.Module) -> Iterator[tuple[str, Any, Any, Tensor]]:
    """For each trunk what its owner is called with, and what it returns."""
    seen: list[tuple[str, Any, Any, Tensor]] = []

    def note(trunk: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            seen.append((trunk, args, kwargs, first(output)))

        return hook

    hooks = [o.register_forward_hook(note(trunk), with_kwargs=True) for trunk, o in owners(model).items()]
    args, kwargs = example_inputs(model)
    with torch.no_grad():
        model(*args, **kwargs)
    for hook in hooks:
        hook.remove()
    yield from seen


def first(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def test_every_auto_class_makes_the_rewired_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    rewired: Any = mixed(tiny.tiny_model("llama"), "mhc").eval()
    auto = ejected(rewired, tmp_path / "llama")
    heads = ["AutoModel", "AutoModelForSequenceClassification", "AutoModelForTokenClassification"]
    assert set(auto) == {"AutoModelForCausalLM", "AutoModelForQuestionAnswering", *heads}
    ids = models.token_ids()
    with torch.no_grad():
        want, plain = rewired.model(ids)[0], rewire.restore(rewired).model(ids)[0]
        assert (want - plain).abs().max() > 0.1
        for name in heads:
            model = loaded(name, tmp_path / "llama")
            torch.testing.assert_close(model.base_model(ids)[0], want)
            collected = model.base_model(ids, output_hidden_states=True).hidden_states
            torch.testing.assert_close(collected, rewired(ids, output_hidden_states=True).hidden_states)
            assert type(model).__name__ == auto[name].rpartition(".")[2]  # by which the Trainer knows heads


def test_operators_of_ejected_models_are_their_own(tmp_path: Path) -> None:
    """Torch frees an operator that is registered again, under those who have it."""
    torch.manual_seed(0)
    rewired: Any = mixed(tiny.tiny_model("llama"), "mhc").eval()
    ours = torch.ops.rewire.sinkhorn.default
    ejected(rewired, tmp_path / "one")
    ejected(rewired, tmp_path / "two")
    found, others = set(), {name for name in sys.modules if name.endswith("rewire_runtime")}
    for folder in ("one", "two", "one"):
        model = loaded("AutoModelForCausalLM", tmp_path / folder)
        own = {name: module for name, module in sys.modules.items() if name.endswith("rewire_runtime")}
        found |= {own[name].sinkhorn._qualname for name in own.keys() - others}  # type: ignore[attr-defined]
        torch.testing.assert_close(model(models.token_ids()).logits, rewired(models.token_ids()).logits)
    assert len(found) == 2 and not any(name.startswith("rewire::") for name in found)
    assert torch.ops.rewire.sinkhorn.default is ours


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES.split())
def test_every_auto_class_of_every_family(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    rewired: Any = mixed(tiny.tiny_model(family), "ancre-ingoing").eval()
    found = {trunk: rest for trunk, *rest in calls(rewired)}
    auto = ejected(rewired, tmp_path / family)
    assert len(auto) > 2
    if family == "bart":  # transformers itself does not find the embeddings of the decoder alone
        del auto["AutoModelForCausalLM"]
    for name in auto.keys() - {"AutoBackbone"}:  # which takes models of a hub only
        model = loaded(name, tmp_path / family)
        assert owners(model), name
        if family in ("llama", "mixtral") and "Question" in name:
            continue  # their weights are under a name that transformers does not find
        for trunk, owner in owners(model).items():
            args, kwargs, want = found[trunk]
            with torch.no_grad():
                torch.testing.assert_close(first(owner(*args, **kwargs)), want, msg=f"{name}: {trunk}")


@pytest.mark.parametrize(("family", "head"), [("llama", "AutoModelForCausalLM"), ("bert", "AutoModelForMaskedLM")])
def test_a_base_model_gets_heads(family: str, head: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain: Any = tiny.tiny_model(family)
    rewired = mixed(plain.base_model, "denseformer").eval()
    auto = ejected(rewired, tmp_path / family)
    assert next(iter(auto)).startswith("AutoModel") and head in auto
    args, kwargs = example_inputs(rewired)
    with torch.no_grad():
        want = rewired(*args, **kwargs)[0]
        torch.testing.assert_close(loaded(head, tmp_path / family).base_model(*args, **kwargs)[0], want)
        torch.testing.assert_close(loaded("AutoModel", tmp_path / family)(*args, **kwargs)[0], want)


def test_saved_again_and_loaded_with_another_head(tmp_path: Path) -> None:
    torch.manual_seed(0)
    rewired: Any = mixed(tiny.tiny_model("llama"), "ancre-ingoing").eval()
    ejected(rewired, tmp_path / "once")
    loaded("AutoModelForSequenceClassification", tmp_path / "once").save_pretrained(tmp_path / "twice")
    again = loaded("AutoModel", tmp_path / "twice")
    with torch.no_grad():
        torch.testing.assert_close(again(models.token_ids())[0], rewired.model(models.token_ids())[0])


def test_pipelines_take_the_ejected_class(tmp_path: Path) -> None:
    torch.manual_seed(0)
    rewired: Any = mixed(tiny.tiny_model("vit"), "ancre-ingoing").eval()
    ejected(rewired, tmp_path / "vit")
    processor = transformers.ViTImageProcessor(size={"height": 16, "width": 16})
    pipe = transformers.pipeline(
        "image-classification", str(tmp_path / "vit"), image_processor=processor, trust_remote_code=True
    )
    assert list(owners(pipe.model)) == list(owners(rewired))


def test_a_part_of_a_trunk_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    rewired = rewire.compile(tiny.tiny_model("t5"), {"decoder.block": "denseformer"})
    ejected(rewired, tmp_path / "t5")
    loaded("AutoModel", tmp_path / "t5")
    # Its blocks could be those of the encoder, or of a decoder that is called otherwise here.
    with pytest.raises(Exception, match=r"T5EncoderModel has trunk 'decoder\.block'.*in part only, or blocks of its"):
        loaded("AutoModelForTextEncoding", tmp_path / "t5")


def test_the_code_of_configs_is_kept(tmp_path: Path) -> None:
    rewired: Any = rewire.compile(tiny.tiny_model("llama"), "denseformer")
    rewired.config.auto_map = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
    auto = ejected(rewired, tmp_path / "llama")
    assert auto["AutoConfig"] == "configuration_own.OwnConfig"
    assert auto["AutoModelForCausalLM"] == "rewired_modeling_llama.LlamaForCausalLM"


class OwnConfig(transformers.LlamaConfig):
    model_type = "own_llama"


class OwnLlama(transformers.LlamaForCausalLM):
    config_class = OwnConfig


def test_a_class_that_is_registered_here_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    transformers.AutoModelForCausalLM.register(OwnConfig, OwnLlama)
    try:
        own = OwnLlama(OwnConfig(**tiny.tiny_model("llama").config.to_diff_dict()))
        with caplog.at_level(logging.WARNING, "rewire.ejecting"):
            rewire.eject(rewire.compile(own, "denseformer"), tmp_path / "own")
    finally:
        MODEL_FOR_CAUSAL_LM_MAPPING._extra_content.pop(OwnConfig)
    assert "AutoModelForCausalLM makes OwnLlama, which was registered" in caplog.text
