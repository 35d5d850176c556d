"""DDP, FSDP2 and HSDP with two and four real processes on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import two_processes


def run(tmp_path: Path, *scenarios: str, ranks: int = 2) -> None:
    """Functions of distributed_worker.py, one after the other in the same processes."""
    worker = Path(__file__).with_name("distributed_worker.py")
    two_processes.play_despite_gloo(worker, tmp_path, *scenarios, ranks=ranks)


def test_training_is_that_of_one_process_and_ranks_that_differ_are_noticed(tmp_path: Path) -> None:
    run(tmp_path, "ddp", "fsdp", "other_values", "other_recipes")


@pytest.mark.slow
def test_compiled_models_of_ranks_that_differ(tmp_path: Path) -> None:
    run(tmp_path, "compiled")


@pytest.mark.slow
def test_every_topology_and_every_way_to_train(tmp_path: Path) -> None:
    trains = ("fsdp_bfloat16", "fsdp_mixed", "fsdp_checkpointed", "fsdp_resume", "fsdp_penalty", "fsdp_hooks")
    others = ("fsdp_collectives", "fsdp_loads_whole", "sharded_before", "no_own_group", "extra_forwards")
    run(tmp_path, "fsdp_every_topology", "fsdp_mixed_every_topology", *trains, *others)


@pytest.mark.slow
def test_every_kind_of_topology_on_four_ranks(tmp_path: Path) -> None:
    run(tmp_path, "hsdp_every_kind", ranks=4)


@pytest.mark.slow
def test_kernels_get_in_float32_what_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 casts all tensors that it finds in a block's inputs."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    run(tmp_path, "fsdp_mixed_kernels")
