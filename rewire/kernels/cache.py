"""Generated modules on disk: Triton reads the source of a kernel from its file."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import stat
import sys
import tempfile
import threading
from pathlib import Path
from types import ModuleType

_modules: dict[str, ModuleType] = {}
_lock = threading.Lock()


def load(text: str) -> ModuleType:
    """The module with this source, imported once per process.

    Its file is named after a hash of the text and of the versions of rewire and Triton. It is written under another
    name and renamed, so that other processes see all of it or nothing.

    Raises:
        PermissionError: see `folder`.
    """
    name = _name(text)
    with _lock:
        if name not in _modules:
            _modules[name] = _import(name, _written(folder() / f"{name}.py", text))
        return _modules[name]


def folder() -> Path:
    """Where generated modules are kept: ``REWIRE_CACHE_DIR``, or ``rewire`` in the platform's cache directory.

    Raises:
        PermissionError: others could write to it, and so run code in this process; or it cannot be made.
    """
    path = Path(os.environ.get("REWIRE_CACHE_DIR") or _platform_cache() / "rewire").expanduser().absolute()
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


def _name(text: str) -> str:
    key = "\n".join([_version("rewire"), _version("triton"), text])
    return f"rewire_mix_{hashlib.sha256(key.encode()).hexdigest()[:24]}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # run from a source tree, or a build under another name
        return "unknown"


def _written(path: Path, text: str) -> Path:
    """``path``, with ``text`` in it."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return path
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path


def _import(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
