"""The folder of generated modules, from whose files Triton reads the source of kernels, and of compiled libraries."""

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
    """Import the module with this source, once per process.

    Its file name has a hash of the source and of the versions of rewire and Triton.

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
    """A file in the folder, named after hashes of ``key`` with the version of rewire, and of its contents.

    A file whose contents do not match its name (truncated, for example), or that another user owns, is made again: a
    damaged library would not fail to load, but kill the process.

    Args:
        stem: beginning of the file's name.
        key: everything on which its contents depend.
        suffix: end of the file's name, such as ".so".
        make: called with a path to write the file to, if there is none yet.

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
    """The folder for generated modules: ``REWIRE_CACHE_DIR``, or ``rewire`` in the platform's cache directory.

    For a user without a home directory, it is in the directory for temporary files.

    Raises:
        PermissionError: other users could write to the folder, and so run code in this process; or it cannot be made.
    """
    path = Path(os.environ.get("REWIRE_CACHE_DIR") or _platform_cache() / "rewire")
    try:
        path = path.expanduser().absolute()
    except RuntimeError:  # a container's user without a home directory
        path = Path(tempfile.gettempdir(), f"rewire-{os.getuid()}").absolute()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if hasattr(os, "getuid"):  # on Windows, a user's folders are private
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
    except importlib.metadata.PackageNotFoundError:  # a build of Triton under another name
        return "unknown"


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:24]


def _is_ours(path: Path) -> bool:
    """Whether it is a file that this user owns, and not a link."""
    if not path.is_file() or path.is_symlink():
        return False
    return not hasattr(os, "getuid") or path.stat().st_uid == os.getuid()


def _import(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
