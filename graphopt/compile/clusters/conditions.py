"""What must hold on a worker so that it computes the bytes that this process would: versions, instructions, folders."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import secrets
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from graphopt.runtime_ops.instructions import instructions_here
from graphopt.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PACKAGES = ("numpy", "ml_dtypes", "onnx-ir", "onnxruntime")
"""Packages whose versions may change what is computed, or how expressions travel."""

_MARK = "cluster-"
# Bytes of a file that are compared, from its start.
_HEAD = 1 << 12


@dataclass(frozen=True)
class Conditions:
    """What must hold on a worker.

    Attributes:
        versions: of what decides the bytes, by name.
        folder: the shared folder for data.
        mark: a file in it that only this folder has.
        files: files and folders that are read, with what tells them from others of the same path.
    """

    versions: Mapping[str, str]
    folder: str = ""
    mark: str = ""
    files: Mapping[str, str] = field(default_factory=dict)

    def faults(self) -> list[str]:
        """Return what does not hold in this process, each with what to do; empty if all does."""
        faults = []
        for name, version in versions().items():
            if version != self.versions.get(name, ""):
                faults.append(
                    f"{name} is {version or 'missing'} here, and {self.versions.get(name) or 'missing'} there"
                )
        if self.folder:
            faults += self._folder_faults()
        for path, content in self.files.items():
            actual_content = content_of(Path(path))
            if not actual_content:
                faults.append(f"{path} is not here")
            elif actual_content != content:
                faults.append(f"{path} is another file than there")
        return faults

    def _folder_faults(self) -> list[str]:
        if not Path(self.folder, self.mark).is_file():
            return [f"the folder {self.folder} is not here, or it is another one than there"]
        try:
            with tempfile.TemporaryFile(dir=self.folder):
                return []
        except OSError as error:
            return [f"the folder {self.folder} cannot be written to: {error.strerror}"]


def conditions_for(folder: Path, files: Sequence[Path] = ()) -> Conditions:
    """Return what must hold on workers, and mark a folder so that they can tell it from another of the same path."""
    mark = folder / f"{_MARK}{secrets.token_hex(8)}"
    mark.touch()
    paths = (file.absolute() for file in files)
    return Conditions(versions(), str(folder.absolute()), mark.name, {str(path): content_of(path) for path in paths})


def forget(conditions: Conditions) -> None:
    """Remove the mark."""
    if conditions.folder:
        Path(conditions.folder, conditions.mark).unlink(missing_ok=True)


@cache
def versions() -> dict[str, str]:
    """Return what decides the bytes that this process computes: packages, Python, instructions, by name."""
    return {
        "graphopt": f"{VERSION} ({_source_digest()})",
        "Python": ".".join(platform.python_version_tuple()[:2]),
        **{name: _version_of(name) for name in PACKAGES},
        "linear algebra": _linear_algebra(),
        "instructions of kernels": instructions_here(),
    }


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _source_digest() -> str:
    """Return a digest of graphopt's Python files: two checkouts of one version may differ."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def _linear_algebra() -> str:
    """Return library, version and kernels of BLAS; the order in which they sum up decides last bits."""
    from threadpoolctl import threadpool_info

    # Not those of packages that bring their own: whether they are loaded differs from process to process.
    entries = (entry for entry in threadpool_info() if entry["user_api"] == "blas" and not _is_foreign(entry))
    names = (f"{entry['internal_api']} {entry['version']} {entry.get('architecture', '')}".strip() for entry in entries)
    return ", ".join(sorted(set(names)))


def _is_foreign(entry: Mapping[str, str]) -> bool:
    return any(name in entry["filepath"] for name in ("/scipy.libs/", "/torch/"))


def content_of(path: Path) -> str:
    """Return names, sizes and first bytes of a file, or of the files in a folder, as a digest; empty if not there."""
    files = sorted(entry for entry in path.iterdir() if entry.is_file()) if path.is_dir() else [path]
    digest = hashlib.sha256()
    try:
        for file in files:
            with file.open("rb") as stream:
                digest.update(f"{file.name} {os.fstat(stream.fileno()).st_size}\n".encode() + stream.read(_HEAD))
    except OSError:
        return ""
    return digest.hexdigest()
