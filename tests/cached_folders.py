"""Folders that take long to make, such as exports: each is made once for all workers, and kept for the next run.

They lie in ``build/test-cache``, or where the environment variable ``GRAPHOPT_TEST_CACHE`` says, under a hash of all
that they are made by: the sources, the packages, the arguments. A change of any of these makes them anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
import shutil
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).parents[1]
CACHE = Path(os.environ.get("GRAPHOPT_TEST_CACHE", ROOT / "build" / "test-cache"))

_PACKAGES = ("torch", "transformers", "tokenizers", "onnx", "onnx-ir", "onnxscript", "onnxruntime")


def cached_folder(
    name: str,
    sources: Iterable[str],
    make: Callable[[Path], None],
    meanwhile: Callable[[], bool] = lambda: False,
) -> Path:
    """Return a folder that ``make`` fills, made unless a worker or an earlier run has made it; treat it as read-only.

    Args:
        name: what it is, distinct for distinct arguments of ``make``.
        sources: globs, from the root of the repository, of the files whose change makes the folder anew.
        make: fills the folder that it is given, which does not exist yet.
        meanwhile: called while another worker makes the folder, until it returns that there is nothing to do.
    """
    folder = folder_of(name, sources)
    CACHE.mkdir(parents=True, exist_ok=True)
    with _lock_of(folder).open("w") as lock:
        while not _try_lock(lock) and meanwhile():
            pass
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            draft = folder.with_name(f"{folder.name}.unfinished")
            shutil.rmtree(draft, ignore_errors=True)
            make(draft)
            draft.rename(folder)
    return folder


def folder_of(name: str, sources: Iterable[str]) -> Path:
    """Return the folder that :func:`cached_folder` returns, which may not be there."""
    return CACHE / f"{name}-{_hash_of(tuple(sources))}"


def is_to_do(name: str, sources: Iterable[str]) -> bool:
    """Return whether a folder is not there, and no worker is making it."""
    folder = folder_of(name, sources)
    if folder.exists():
        return False
    with _lock_of(folder).open("w") as lock:
        return _try_lock(lock)


def _lock_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _try_lock(lock: TextIO) -> bool:
    """Lock a file unless another process has; return whether it is ours now."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@cache
def _hash_of(sources: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for package in _PACKAGES:
        digest.update(f"{package} {importlib.metadata.version(package)}\n".encode())
    for pattern in sources:
        files = sorted(ROOT.glob(pattern))
        assert files, f"no file is called {pattern}"
        for file in files:
            digest.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return digest.hexdigest()[:16]
