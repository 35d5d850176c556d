from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from rewire.kernels import cache

TEXT = '"""Nothing."""\n\nVALUE = 42\n'


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cache, "_modules", {})
    monkeypatch.setenv("REWIRE_CACHE_DIR", str(tmp_path / "a" / "kernels"))
    return tmp_path / "a" / "kernels"


def test_loads_from_a_private_folder(own: Path) -> None:
    module = cache.load(TEXT)
    assert module.VALUE == 42
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    (file,) = own.glob("*.py")
    assert module.__file__ == str(file) and file.read_text() == TEXT
    assert cache.load(TEXT) is module
    assert cache.load(TEXT + "\n") is not module


def test_names_depend_on_versions(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = cache.load(TEXT)
    monkeypatch.setattr(cache, "_version", lambda package: "0")
    assert cache.load(TEXT) is not first
    assert len(list(own.glob("*.py"))) == 2


def test_a_damaged_file_is_replaced(own: Path) -> None:
    file = Path(str(cache.load(TEXT).__file__))
    file.write_text("VALUE = ")
    cache._modules.clear()
    assert cache.load(TEXT).VALUE == 42
    assert not list(own.glob("*.tmp"))


@pytest.mark.skipif(os.name != "posix", reason="POSIX permissions")
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_can_write_is_refused(own: Path, mode: int) -> None:
    own.mkdir(parents=True)
    own.chmod(mode)
    with pytest.raises(PermissionError, match="REWIRE_CACHE_DIR"):
        cache.load(TEXT)
    assert not list(own.iterdir())


@pytest.mark.skipif(os.name != "posix", reason="POSIX permissions")
def test_a_folder_of_another_user_is_refused(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(PermissionError, match="others own it"):
        cache.load(TEXT)


def test_the_default_is_the_platforms_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("REWIRE_CACHE_DIR", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.folder() == tmp_path / "rewire"


@pytest.mark.skipif(os.name != "posix", reason="POSIX users")
def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def expanduser(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("REWIRE_CACHE_DIR", raising=False)
    monkeypatch.setattr(Path, "expanduser", expanduser)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert cache.folder() == tmp_path / f"rewire-{os.getuid()}"
    assert cache.folder().stat().st_mode & 0o777 == 0o700


WORKER = """
import os, sys, time
from rewire.kernels import cache
start, texts = float(sys.argv[1]), [f"VALUE = {n}\\n" + "# filler\\n" * 20000 for n in range(20)]
time.sleep(max(0.0, start - time.time()))
print([cache.load(text).VALUE for text in texts] == list(range(20)))
"""


@pytest.mark.slow
def test_processes_can_share_it(own: Path) -> None:
    command = [sys.executable, "-c", WORKER, str(time.time() + 4)]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for worker in workers:
        out, err = worker.communicate(timeout=60)
        assert out.strip() == "True", err
    assert len(list(own.glob("*.py"))) == 20
    assert not list(own.glob("*.tmp"))
