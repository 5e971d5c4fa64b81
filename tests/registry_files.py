"""Adds one file to a folder that a registry searches, for the length of a test."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from graphopt.util.registry import Registry


@contextlib.contextmanager
def file_added(
    registry: Registry[object], package: str, folder: Path, files: Mapping[str, str] | str, name: str = "added_by_test"
) -> Iterator[None]:
    """Let ``package`` also hold a module ``name`` with the given text, or several by name, while the block runs."""
    texts = {name: files} if isinstance(files, str) else files
    for stem, text in texts.items():
        (folder / f"{stem}.py").write_text(text, encoding="utf-8")
    module = importlib.import_module(package)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(module, "__path__", [*module.__path__, str(folder)])
        importlib.invalidate_caches()
        registry.refresh()
        try:
            yield
        finally:
            registry.refresh()
            for stem in texts:
                sys.modules.pop(f"{package}.{stem}", None)
                if hasattr(module, stem):
                    delattr(module, stem)
