"""Other packages' trainers with FSDP2, in two real processes on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import two_processes
from mixing import mixed
from models import PreNorm, Stack, vectors

import rewire

WORKER = Path(__file__).with_name("trainers_worker.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    "scenarios", [("accelerate", "accelerate_loading", "accelerate_bfloat16"), ("trainer",), ("lightning_fsdp",)]
)
def test_training_and_resuming_is_that_of_one_process(scenarios: tuple[str, ...], tmp_path: Path) -> None:
    two_processes.play(WORKER, tmp_path, *scenarios)


def test_parameters_that_zero_3_partitions_are_refused() -> None:
    """What DeepSpeed makes of a parameter, by its mark: its own code takes a compiler."""
    model = mixed(Stack(PreNorm))
    (connection,) = rewire.connections(model).values()
    for weight in connection.parameters():
        weight.ds_id = 0
    with pytest.raises(rewire.RewireError, match="ZeRO-3 partitions connection weight 'logits' of trunk 'layers'"):
        model(vectors())
