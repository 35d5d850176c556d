"""torchtitan's trainer on rewired models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import two_processes
from torch.nn import functional as F

import rewire

pytest.importorskip("torchtitan")
pytestmark = pytest.mark.slow

#: The default backend of torchtitan 0.3, "spmd_types", needs an FSDP2 that knows its annotations; torch 2.13 does not.
SEVERAL = ("--parallelism.spmd_backend", "partial_dtensor")


def train(tmp_path: Path, config: str, *arguments: str, ranks: int = 1) -> dict[str, dict[str, torch.Tensor]]:
    """Three steps, or as many as the arguments say; weights and gradients that the last one saw."""
    worker = Path(__file__).with_name("titan_worker.py")
    given = (str(tmp_path), "--config", config, *(SEVERAL if ranks > 1 else ()), *arguments)
    two_processes.run(worker, *given, ranks=ranks)
    seen: dict[str, dict[str, torch.Tensor]] = torch.load(tmp_path / "seen.pt")
    return seen


def check_by_hand(
    seen: dict[str, Any], config: str, topology: str, batches: list[tuple[int, int]], size: int = 4
) -> None:
    """The same weights in a model that is rewired by hand have the same gradients.

    Args:
        seen: by a training.
        config: its name.
        topology: its topology.
        batches: numbers of the batch, and the data-parallel rank that it was given to.
        size: sequences of a batch.
    """
    import titan_configs

    plain = getattr(titan_configs, config.replace("rewired", "plain"))()
    model = plain.model_spec.model.build()
    model.init_states()
    model = rewire.compile(model, topology, validate=False)
    saved = model.state_dict()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if isinstance(tensor, torch.nn.Parameter) or name in saved:
                tensor.copy_(seen["weights"][name])
    total = torch.zeros(())
    tokens = 0
    for number, rank in batches:
        loader = plain.dataloader.build(dp_rank=rank, seq_len=16, local_batch_size=size)
        loader.number = number
        inputs, labels = next(iter(loader))
        output = model(inputs["input"])
        total = total + F.cross_entropy(output.flatten(0, 1).float(), labels.flatten(), reduction="sum")
        tokens += labels.numel()
    (total / tokens).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert expected.keys() == seen["grads"].keys()
    largest = max(float(value.norm()) for value in expected.values())
    for name, value in expected.items():
        error = float((value - seen["grads"][name]).norm()) / max(float(value.norm()), 1e-3 * largest)
        # Those of a softmax at temperature 0.01 are small differences of large numbers.
        limit = 2e-4 if "depth_connections" in name else 5e-5
        assert error < limit, f"{name}: {error:.1e}"


@pytest.mark.filterwarnings("ignore:In CPU autocast")  # torchtitan's router asks for float32
@pytest.mark.parametrize("family", ["llama3", "qwen3", "deepseek_v3"])
def test_debug_models(tmp_path: Path, family: str) -> None:
    seen = train(tmp_path, f"{family}_rewired")
    check_by_hand(seen, f"{family}_rewired", "ancre-ingoing", [(2, 0)])


FSDP = ["--parallelism.data_parallel_shard_degree", "2"]
TP = ["--parallelism.data_parallel_shard_degree", "1", "--parallelism.tensor_parallel_degree", "2"]
COMPILED = ["--compile.enable", "--compile.backend", "aot_eager"]
CHECKPOINTED = ["activation-checkpoint:full"]


@pytest.mark.parametrize(
    ("topology", "arguments", "batches"),
    [
        ("ancre-ingoing", FSDP, [(2, 0), (2, 1)]),
        ("grn-v3", [*FSDP, *COMPILED, *CHECKPOINTED], [(2, 0), (2, 1)]),
        ("ancre-ingoing", TP, [(2, 0)]),
        ("hc-dynamic", TP, [(2, 0)]),
    ],
    ids=["fsdp", "fsdp-compiled-checkpointed", "tp", "tp-hc"],
)
def test_two_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, topology: str, arguments: list[str], batches: list[tuple[int, int]]
) -> None:
    monkeypatch.setenv("TOPOLOGY", topology)
    check_by_hand(train(tmp_path, "llama3_rewired", *arguments, ranks=2), "llama3_rewired", topology, batches)


@pytest.mark.filterwarnings("ignore:In CPU autocast")
def test_expert_and_context_parallelism(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With weights on the CPU between steps, and blocks that are checkpointed selectively, torchtitan's default."""
    monkeypatch.setenv("TOPOLOGY", "mhc")
    degrees = ("--parallelism.context_parallel_degree", "2", "--parallelism.expert_parallel_degree", "2")
    others = ("--training.enable_cpu_offload", "activation-checkpoint:selective")
    one = ("--parallelism.data_parallel_shard_degree", "1")
    seen = train(tmp_path, "qwen3_moe_rewired", *one, *degrees, *others, ranks=2)
    check_by_hand(seen, "qwen3_moe_rewired", "mhc", [(2, 0)])


def test_float8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOPOLOGY", "hc-dynamic")
    check_by_hand(train(tmp_path, "llama3_float8_rewired"), "llama3_float8_rewired", "hc-dynamic", [(2, 0)])


def test_four_ranks(tmp_path: Path) -> None:
    """HSDP."""
    degrees = ("--parallelism.data_parallel_replicate_degree", "2", *FSDP)
    seen = train(tmp_path, "llama3_rewired", *degrees, ranks=4)
    check_by_hand(seen, "llama3_rewired", "ancre-ingoing", [(2, rank) for rank in range(4)])


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_pipeline(tmp_path: Path, schedule: str) -> None:
    """Four micro-batches of one sequence each."""
    degrees = ("--parallelism.pipeline_parallel_degree", "2", "--parallelism.data_parallel_shard_degree", "1")
    seen = train(tmp_path, "llama3_rewired", *degrees, "--parallelism.pipeline_parallel_schedule", schedule, ranks=2)
    check_by_hand(seen, "llama3_rewired", "ancre-ingoing", [(8 + number, 0) for number in range(4)], size=1)


def test_a_checkpoint_is_resumed(tmp_path: Path) -> None:
    saving = ("--checkpoint.enable", "--checkpoint.interval", "2", *FSDP)
    whole = train(tmp_path, "llama3_rewired", *saving, ranks=2)
    resumed = train(tmp_path, "llama3_rewired", *saving, "--checkpoint.load_step", "2", ranks=2)
    for name, value in whole["after"].items():
        assert torch.equal(value, resumed["after"][name]), name


def test_hugging_faces_format(tmp_path: Path) -> None:
    """Names are those of a rewired Llama of transformers; a checkpoint without connections leaves them as they are."""
    import titan_configs
    from safetensors.torch import save_file

    from rewire.patterns.tiny import tiny_model

    spec = titan_configs.llama3_rewired().model_spec
    model = spec.model.build()
    model.init_states()
    state = model.state_dict()
    adapter = spec.state_dict_adapter(spec.model, None)
    converted = adapter.to_hf(state)
    added = {name for name in converted if "depth_connections" in name}
    theirs = rewire.compile(tiny_model("llama"), "ancre-ingoing", validate=False)
    assert added == {name for name in theirs.state_dict() if "depth_connections" in name}
    back = adapter.from_hf(dict(converted))
    assert {name for name in back if "depth_connections" in name} == {n for n in state if "depth_connections" in n}
    save_file({"model.norm.weight": state["norm.weight"]}, tmp_path / "model.safetensors")
    adapter.get_hf_storage_reader(str(tmp_path))
    assert not [name for name in converted if "depth_connections" in name]


def test_ranks_with_other_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOPOLOGY", "ancre-ingoing,ancre-outgoing")
    words = r"RewireError.*rank 1 has topology ancre-outgoing where rank 0 has ancre-ingoing"
    with pytest.raises(AssertionError, match=rf"(?s)rank 0 ended.*{words}.*rank 1 ended.*{words}"):
        train(tmp_path, "llama3_rewired", *FSDP, ranks=2)


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="'full_dtensor' has hidden states that are sharded"):
        train(tmp_path, "llama3_rewired", "--parallelism.spmd_backend", "full_dtensor")
