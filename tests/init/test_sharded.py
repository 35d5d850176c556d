"""Sharded parameters get the values that they would have unsharded: two real processes on the CPU."""

from pathlib import Path

import pytest
import two_processes


@pytest.mark.slow
def test_sharded_like_whole(tmp_path: Path) -> None:
    two_processes.play(Path(__file__).with_name("sharded_worker.py"), tmp_path, "like_whole")
