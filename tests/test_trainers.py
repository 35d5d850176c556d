"""Other packages' trainers with FSDP2, in two real processes on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import two_processes

WORKER = Path(__file__).with_name("trainers_worker.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    "scenarios", [("accelerate", "accelerate_loading", "accelerate_bfloat16"), ("trainer",), ("lightning_fsdp",)]
)
def test_training_and_resuming_is_that_of_one_process(scenarios: tuple[str, ...], tmp_path: Path) -> None:
    for text in two_processes.run(WORKER, tmp_path, *scenarios):
        assert [f"{scenario} passed" for scenario in scenarios if f"{scenario} passed" not in text] == []
