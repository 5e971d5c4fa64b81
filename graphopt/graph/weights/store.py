"""Evaluated tensors in a folder, each under the digest of its expression: what was evaluated once is found again."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from functools import cached_property
from typing import TYPE_CHECKING

from graphopt.graph.weights.disk import writing
from graphopt.graph.weights.expression import Array, Expression, Node, Part, Region
from graphopt.graph.weights.leaves import Inline, Stored, write_array
from graphopt.graph.weights.same_shape import Like

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path


@dataclasses.dataclass(frozen=True, eq=False)
class Kept(Like):
    """As ``of``, and its value is kept in the store: what is made of it later need not compute it again."""

    @cached_property
    def digest(self) -> str:
        """As the original: where a value is kept does not change it."""
        return self.of.digest

    def evaluate(self, region: Region) -> Array:
        """Evaluate the original."""
        return self.of.evaluate(region)


class Store:
    """A folder of evaluated tensors. Several processes may write into it: a file appears whole or not at all.

    Args:
        folder: the folder; it is made when the first tensor is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()

    def find(self, expression: Expression) -> Stored | None:
        """Return the stored value of an expression, or ``None``. Leaves whose digests are not known are read for it."""
        digest = expression.digest
        file = self._file(digest)
        if not file.is_file() or file.stat().st_size != expression.nbytes:
            return None
        return Stored(str(file), 0, expression.dtype, expression.shape, digest)

    def obtain(self, expression: Expression) -> Stored:
        """Return the stored value of an expression, evaluated if it is not there yet.

        What is :class:`Kept` below it, and all that is computed together with a part below it, is stored on the way.

        Raises:
            InputError: the disk is full.
        """
        found = self.find(expression)
        if found is not None:
            return found
        if isinstance(expression, Kept):
            return self.obtain(expression.of)
        kept: dict[Node, Node] = {node: self.obtain(node) for node in _kept_below(expression.children)}
        if isinstance(expression, Part):
            for name, array in expression.of.replacing(kept).evaluate().items():
                part = Part(expression.of, name)
                if self.find(part) is None:  # one that was cut off in between left some of them
                    self._put(part, array)
        else:
            self._put(expression, expression.replacing(kept).numpy())
        stored = self.find(expression)
        assert stored is not None
        return stored

    def _put(self, expression: Expression, array: Array) -> None:
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
    parts = list(dict.fromkeys(node for node in _kept_below(roots) if isinstance(node, Part)))
    replacements: dict[Node, Node] = {}
    for several in dict.fromkeys(part.of for part in parts):
        made = several.evaluate()
        replacements |= {part: Inline(made[part.name], part.dtype) for part in parts if part.of is several}
    return [root.replacing(replacements) for root in roots]


def _kept_below(nodes: Iterable[Node]) -> Iterator[Expression]:
    """Yield the topmost nodes that are kept, or a part of several, among ``nodes`` and what they are made of."""
    for node in nodes:
        if isinstance(node, (Kept, Part)):
            yield node
        else:
            yield from _kept_below(node.children)
