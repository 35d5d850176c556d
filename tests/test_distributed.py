"""DDP and FSDP2 with two real processes on the CPU."""

from __future__ import annotations

from pathlib import Path

import two_processes


def run(tmp_path: Path, *scenarios: str) -> None:
    """Functions of distributed_worker.py, one after the other in the same two processes."""
    worker = Path(__file__).with_name("distributed_worker.py")
    for text in two_processes.run(worker, tmp_path / "meeting_point", *scenarios):
        assert [f"{scenario} passed" for scenario in scenarios if f"{scenario} passed" not in text] == []


def test_ddp_and_fsdp_train_like_one_process(tmp_path: Path) -> None:
    run(tmp_path, "ddp", "fsdp", "fsdp_checkpointed", "fsdp_resume")


def test_fsdp_in_bfloat16_and_mixed_precision(tmp_path: Path) -> None:
    run(tmp_path, "fsdp_bfloat16", "fsdp_mixed")


def test_fsdp_with_every_topology(tmp_path: Path) -> None:
    run(tmp_path, "fsdp_every_topology", "fsdp_penalty")


def test_fsdp_in_mixed_precision_with_every_topology(tmp_path: Path) -> None:
    run(tmp_path, "fsdp_mixed_every_topology")


def test_what_is_refused(tmp_path: Path) -> None:
    run(tmp_path, "sharded_before", "no_own_group")
