"""Sharded parameters get the values that they would have unsharded: two real processes on the CPU."""

from pathlib import Path

import two_processes


def test_sharded_like_whole(tmp_path: Path) -> None:
    printed = two_processes.run(Path(__file__).with_name("sharded_worker.py"), tmp_path / "meeting_point")
    assert all(text.endswith("passed\n") for text in printed)
