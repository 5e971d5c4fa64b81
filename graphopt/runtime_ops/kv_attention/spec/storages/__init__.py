"""Storages of caches: one file, one storage; a new file is all that the Python side of a new storage takes."""

from graphopt.runtime_ops.kv_attention.spec.storages.storage import Storage
from graphopt.util.registry import Registry

STORAGE_OF: Registry[Storage] = Registry(
    __name__,
    kind="storage",
    name_of=lambda member: member.name if isinstance(member, Storage) else None,
    order=lambda storages: dict(sorted(storages.items(), key=lambda entry: entry[1].number)),
)
"""Every storage by the name that the attribute ``storage`` calls it, in the order of their numbers."""

__all__ = ["STORAGE_OF", "Storage"]
