"""Tensor and sequence parallelism with two real processes on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import two_processes


def run(tmp_path: Path, *scenarios: str) -> None:
    """Functions of parallel_worker.py, one after the other in the same two processes."""
    two_processes.play(Path(__file__).with_name("parallel_worker.py"), tmp_path, *scenarios)


def test_gradients_are_those_of_one_process(tmp_path: Path) -> None:
    run(tmp_path, "sequence")


@pytest.mark.slow
def test_what_is_wrong_is_refused(tmp_path: Path) -> None:
    refused = (
        "no_mesh",
        "undeclared",
        "sharded_channels",
        "not_rewired",
        "other_recipes",
    )  # last: they may leave a collective behind
    undeclared = ("silent", "drifting", "drifting_by_hand")
    run(tmp_path, "checkpointed", "collectives", *undeclared, *refused)


@pytest.mark.slow
def test_every_kind_of_topology_and_of_sharding(tmp_path: Path) -> None:
    run(tmp_path, "every_kind", "shards_of_different_sizes", "replicated", "with_fsdp", "sharded_connections")


@pytest.mark.slow
def test_compiled_blocks_and_plans_of_transformers(tmp_path: Path) -> None:
    run(tmp_path, "by_hand", "transformers_plan")


@pytest.mark.slow
def test_context_parallelism_of_torch(tmp_path: Path) -> None:
    worker = Path(__file__).with_name("parallel_worker.py")
    two_processes.play_despite_gloo(worker, tmp_path, "torchs_context_parallel")
