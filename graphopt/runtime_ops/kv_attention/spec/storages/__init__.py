"""Storages of caches: one file, one storage; a new file is all that the Python side of a new storage takes."""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING

from graphopt.runtime_ops.kv_attention.spec.storages.storage import Storage

if TYPE_CHECKING:
    from collections.abc import Iterator


def _found() -> Iterator[Storage]:
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        storage = getattr(importlib.import_module(module.name), "STORAGE", None)
        if isinstance(storage, Storage):
            yield storage


STORAGE_OF: dict[str, Storage] = {each.name: each for each in sorted(_found(), key=lambda storage: storage.number)}
"""Every storage by the name that the attribute ``storage`` calls it, in the order of their numbers."""

__all__ = ["STORAGE_OF", "Storage"]
