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

ROOT = Path(__file__).parents[1]
CACHE = Path(os.environ.get("GRAPHOPT_TEST_CACHE", ROOT / "build" / "test-cache"))

_PACKAGES = ("torch", "transformers", "tokenizers", "onnx", "onnx-ir", "onnxscript", "onnxruntime")


def once(name: str, sources: Iterable[str], make: Callable[[Path], None]) -> Path:
    """Return a folder that ``make`` fills, made unless a worker or an earlier run has made it; treat it as read-only.

    Args:
        name: what it is, distinct for distinct arguments of ``make``.
        sources: globs, from the root of the repository, of the files whose change makes the folder anew.
        make: fills the folder that it is given, which does not exist yet.
    """
    folder = CACHE / f"{name}-{_hash_of(tuple(sources))}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            unfinished = folder.with_name(f"{folder.name}.unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            make(unfinished)
            unfinished.rename(folder)
    return folder


@cache
def _hash_of(sources: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for package in _PACKAGES:
        digest.update(f"{package} {importlib.metadata.version(package)}\n".encode())
    for pattern in sources:
        found = sorted(ROOT.glob(pattern))
        assert found, f"no file is called {pattern}"
        for file in found:
            digest.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return digest.hexdigest()[:16]
