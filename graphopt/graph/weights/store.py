"""Evaluated tensors in a folder, each under the digest of its expression: what was evaluated once is found again."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from functools import cached_property
from typing import TYPE_CHECKING

from graphopt.graph.weights.disk import writing
from graphopt.graph.weights.expression import Array, Expression, Node, Part, Region
from graphopt.graph.weights.leaves import Inline, StoredBytes, write_array
from graphopt.graph.weights.same_shape import SameShape

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path


@dataclasses.dataclass(frozen=True, eq=False)
class StoreEntry(SameShape):
    """As ``source``, and its value is kept in the store: what is made of it later need not compute it again."""

    @cached_property
    def digest(self) -> str:
        """As the original: where a value is kept does not change it."""
        return self.source.digest

    def evaluate(self, region: Region) -> Array:
        """Evaluate the original."""
        return self.source.evaluate(region)


class Store:
    """A folder of evaluated tensors. Several processes may write into it: a file appears whole or not at all.

    Args:
        folder: the folder; it is made when the first tensor is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()

    def find(self, expression: Expression) -> StoredBytes | None:
        """Return the stored value of an expression, or ``None``. Leaves whose digests are not known are read for it."""
        digest = expression.digest
        file = self._file(digest)
        if not file.is_file() or file.stat().st_size != expression.nbytes:
            return None
        return StoredBytes(str(file), 0, expression.dtype, expression.shape, digest)

    def obtain(self, expression: Expression) -> StoredBytes:
        """Return the stored value of an expression, evaluated if it is not there yet.

        Each :class:`StoreEntry` below it, and all that is computed together with a part below it, is stored on the way.

        Raises:
            InputError: the disk is full.
        """
        existing = self.find(expression)
        if existing is not None:
            return existing
        if isinstance(expression, StoreEntry):
            return self.obtain(expression.source)
        entries: dict[Node, Node] = {node: self.obtain(node) for node in _entries_below(expression.children)}
        if isinstance(expression, Part):
            for name, array in expression.source.replacing(entries).evaluate().items():
                part = Part(expression.source, name)
                if self.find(part) is None:  # one that was cut off in between left some of them
                    self._write(part, array)
        else:
            self._write(expression, expression.replacing(entries).numpy())
        value = self.find(expression)
        assert value is not None
        return value

    def discard(self, expression: Expression) -> None:
        """Remove the stored value of an expression, if there is one; what is computed together with it stays."""
        self._file(expression.digest).unlink(missing_ok=True)

    def _write(self, expression: Expression, array: Array) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=self.folder, suffix=".new")
        try:
            with writing(self.folder, expression.nbytes), os.fdopen(descriptor, "wb") as stream:
                write_array(array, expression.dtype, stream)
            os.replace(name, self._file(expression.digest))
        except BaseException:
            os.unlink(name)
            raise

    def _file(self, digest: str) -> Path:
        return self.folder / f"{digest}.bin"


def with_parts_in_memory(roots: Sequence[Expression]) -> list[Expression]:
    """Return expressions in which parts of what is computed together are arrays; each group is evaluated once."""
    parts = list(dict.fromkeys(node for node in _entries_below(roots) if isinstance(node, Part)))
    replacements: dict[Node, Node] = {}
    for bundle in dict.fromkeys(part.source for part in parts):
        arrays = bundle.evaluate()
        replacements |= {part: Inline(arrays[part.name], part.dtype) for part in parts if part.source is bundle}
    return [root.replacing(replacements) for root in roots]


def _entries_below(nodes: Iterable[Node]) -> Iterator[Expression]:
    """Yield the topmost nodes that are kept, or a part of several, among ``nodes`` and what they are made of."""
    for node in nodes:
        if isinstance(node, (StoreEntry, Part)):
            yield node
        else:
            yield from _entries_below(node.children)
