"""Ejected folders in serving engines: made, filled and called as vLLM's backend for transformers does it, without it.

Its steps, as its source has them: the base model is made by ``AutoModel.from_config``, its parameters on the meta
device and its buffers not; linear maps and norms are replaced, and what is left gets parameters anew, in the model's
dtype; weights are loaded module by module, by ``load_weights`` of the modules that have one; the attention is a
function registered by name, which finds its cache in an argument that the model only hands on.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
import torchvision_stub  # noqa: F401
import transformers
from every_topology import mixed
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AttentionInterface

import rewire
from rewire.patterns import tiny

#: Those that read queries, keys and values apart have copies of norms, which engines replace.
SERVED = ["ancre-ingoing", "mhc", "attnres", "hc-dynamic", "denseformer"]


def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
    """What an engine's attention does with a single sequence; its "cache" counts calls."""
    kwargs["attention_instances"][module.layer_idx].append(tuple(query.shape))
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).contiguous(), None


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: Any) -> None:
        register(module, name, parameter)
        if parameter is not None:
            own = vars(parameter) | {"requires_grad": parameter.requires_grad}  # accelerate's way, which engines share
            module._parameters[name] = type(parameter)(parameter.to("meta"), **own)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def load(module: nn.Module, weights: list[tuple[str, Tensor]]) -> None:
    """Load weights in the order in which they come, in groups of one child."""
    own = dict(module.named_parameters(recurse=False))
    for name, value in weights:
        child, _, rest = name.partition(".")
        if name in own:
            own[name].data.copy_(value)
        elif hasattr(module.get_submodule(child), "load_weights"):
            assert module.get_submodule(child).load_weights([(rest, value)]) == {rest}
        else:
            load(module.get_submodule(child), [(rest, value)])


def served(folder: Path, dtype: torch.dtype, cls: Any) -> Any:
    """The base model, as the engine has it."""
    config = transformers.AutoConfig.from_pretrained(folder)
    config._attn_implementation = "engine"
    with parameters_on_meta():
        model = cls._from_config(config, dtype=dtype)
    for module in model.modules():
        for name, parameter in [*module.named_parameters(recurse=False)]:
            setattr(module, name, nn.Parameter(torch.empty_like(parameter, dtype=dtype, device="cpu")))
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        names = [name for name in file.keys() if name.startswith("model.")]  # noqa: SIM118
        load(model, [(name.removeprefix("model."), file.get_tensor(name)) for name in names])
    return model.eval()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    AttentionInterface.register("engine", attention)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / f"served_{abs(hash(tmp_path))}"


@pytest.mark.each_once
@pytest.mark.parametrize("topology", SERVED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_served_states_are_those_of_the_rewired_model(topology: str, dtype: torch.dtype, folder: Path) -> None:
    torch.manual_seed(0)
    rewired: Any = mixed(tiny.tiny_model("llama"), topology).to(dtype).eval()
    path = rewire.eject(rewired, folder)
    model = served(folder, dtype, importlib.import_module(f"{folder.name}.{path.stem}").LlamaModel)
    connections = [p for name, p in model.named_parameters() if "depth_connections" in name]
    assert connections and all(p.dtype == torch.float32 for p in connections)
    ids = models.token_ids()[:1]
    caches: dict[int, list[Any]] = {layer: [] for layer in range(rewired.config.num_hidden_layers)}
    call = {"use_cache": False, "position_ids": torch.arange(ids.shape[1])[None], "return_dict": False}
    with torch.no_grad():
        want = rewired.model(ids)[0]
        by_ids = model(input_ids=ids, inputs_embeds=None, attention_instances=caches, **call)
        embedded = model.get_input_embeddings()(ids)
        by_embeds = model(input_ids=None, inputs_embeds=embedded, attention_instances=caches, **call)
    assert isinstance(by_ids, tuple) and all(len(cache) == 2 for cache in caches.values())
    tolerance = {"atol": 2e-5, "rtol": 2e-5} if dtype == torch.float32 else {"atol": 0.06, "rtol": 0.06}
    torch.testing.assert_close(by_ids[0], want, **tolerance)
    torch.testing.assert_close(by_embeds[0], by_ids[0], atol=0, rtol=0)


def test_frozen_weights_need_no_loading(folder: Path) -> None:
    torch.manual_seed(0)
    rewired: Any = mixed(tiny.tiny_model("llama"), "ancre-ingoing").eval()
    frozen, _ = rewire.freeze(rewired)
    path = rewire.eject(frozen, folder)
    model = importlib.import_module(f"{folder.name}.{path.stem}").LlamaModel(
        transformers.AutoConfig.from_pretrained(folder)
    )
    assert not [name for name, _ in model.named_parameters() if "depth_connections" in name]
    torch.testing.assert_close(*(rewire.coefficients(m)["model.layers"] for m in (frozen, rewired)))
    model.load_state_dict(
        {k.removeprefix("model."): v for k, v in rewired.state_dict().items() if "depth" not in k}, False
    )
    with torch.no_grad():
        torch.testing.assert_close(model(models.token_ids())[0], rewired.model(models.token_ids())[0])


def test_weights_that_were_not_loaded_are_refused(folder: Path) -> None:
    rewired: Any = mixed(tiny.tiny_model("llama"), "mhc").eval()
    path = rewire.eject(rewired, folder)
    module = importlib.import_module(f"{folder.name}.{path.stem}")
    model = module.LlamaModel(transformers.AutoConfig.from_pretrained(folder))
    (connection,) = (m for m in model.modules() if hasattr(m, "load_weights"))
    with pytest.raises(Exception, match=r"'nothing' \[2\] is no weight of trunk 'model\.layers'"):
        connection.load_weights([("nothing", torch.zeros(2))])
    with pytest.raises(Exception, match="belong to two models"):
        connection.load_weights([("_extra_state", torch.zeros(32, dtype=torch.uint8))])
    name, parameter = next(connection.named_parameters())
    connection.load_weights([(name, parameter + 1)])
    assert connection.get_parameter(name) is parameter  # which a CUDA graph may read
    setattr(connection, name, nn.Parameter(parameter.bfloat16()))
    with pytest.raises(Exception, match="weights have to stay float32"):
        model(models.token_ids())


@pytest.mark.slow
def test_served_models_compile_whole(folder: Path) -> None:
    torch.manual_seed(0)
    rewired: Any = mixed(tiny.tiny_model("llama"), "mhc").eval()
    path = rewire.eject(rewired, folder)
    model = served(folder, torch.float32, importlib.import_module(f"{folder.name}.{path.stem}").LlamaModel)
    ids, caches = models.token_ids()[:1], {layer: [] for layer in range(3)}
    call = {"use_cache": False, "attention_instances": caches, "return_dict": False}
    with torch.no_grad():
        want = model(ids, **call)[0]
        torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="eager")(ids, **call)[0], want)
