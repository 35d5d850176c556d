"""Generated modules and compiled libraries on disk: Triton reads the source of a kernel from its file."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import stat
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from rewire.files import staged
from rewire.logs import kernels as log
from rewire.version import __version__

_modules: dict[str, ModuleType] = {}
_lock = threading.Lock()


def load(text: str) -> ModuleType:
    """The module with this source, imported once per process.

    Its file is named after a hash of the text and of the versions of rewire and Triton.

    Raises:
        PermissionError: see `folder`.
    """
    path = folder() / f"{_name('rewire_mix', text, _version('triton'))}.py"
    with _lock:
        if path.stem not in _modules:
            known = _is_ours(path) and path.read_bytes() == text.encode()
            if not known:
                with staged(path.parent) as stage:
                    (stage / path.name).write_bytes(text.encode())
            log.info("%s: %s", "from the cache" if known else "generated", path)
            _modules[path.stem] = _import(path)
        return _modules[path.stem]


def kept(stem: str, key: str, suffix: str, make: Callable[[Path], object]) -> Path:
    """A file in the folder, named after hashes of ``key`` and the version of rewire, and of its contents.

    One that is not what its name says (cut off, say), or that another user owns, is made again: a damaged library would
    not fail to load, but kill the process.

    Args:
        stem: what its name begins with.
        key: all that its contents depend on.
        suffix: what its name ends with, as ".so".
        make: writes it, to the path that it is given; called if there is none.

    Raises:
        PermissionError: see `folder`.
    """
    name = _name(stem, key)
    for path in folder().glob(f"{name}_*{suffix}"):
        if _is_ours(path) and path.name == f"{name}_{_digest(path)}{suffix}":
            return path
    where = folder()
    with staged(where) as stage:
        make(stage / "made")
        path = (stage / "made").rename(stage / f"{name}_{_digest(stage / 'made')}{suffix}")
    return where / path.name


def folder() -> Path:
    """Where generated modules are kept: ``REWIRE_CACHE_DIR``, or ``rewire`` in the platform's cache directory.

    A user without a home directory has a folder among the temporary files.

    Raises:
        PermissionError: others could write to it, and so run code in this process; or it cannot be made.
    """
    path = Path(os.environ.get("REWIRE_CACHE_DIR") or _platform_cache() / "rewire")
    try:
        path = path.expanduser().absolute()
    except RuntimeError:  # a container whose user has no home
        path = Path(tempfile.gettempdir(), f"rewire-{os.getuid()}").absolute()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if hasattr(os, "getuid"):  # elsewhere (Windows) a user's folders are private
        status = path.stat()
        if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(
                f"Generated kernels are imported from {path}, but others own it or can write to it. Make it private "
                "(chmod 700), or set REWIRE_CACHE_DIR to a folder of your own."
            )
    return path


def _platform_cache() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or "~/AppData/Local")
    if sys.platform == "darwin":
        return Path("~/Library/Caches")
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")


def _name(stem: str, *key: str) -> str:
    digest = hashlib.sha256("\n".join([__version__, *key]).encode()).hexdigest()
    return f"{stem}_{digest[:24]}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # a build under another name
        return "unknown"


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:24]


def _is_ours(path: Path) -> bool:
    """Whether it is a file that this user wrote, and no link."""
    if not path.is_file() or path.is_symlink():
        return False
    return not hasattr(os, "getuid") or path.stat().st_uid == os.getuid()


def _import(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
