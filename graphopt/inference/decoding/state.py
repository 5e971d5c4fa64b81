"""One state tensor of a cache in pages: its names in the graph, its memory, and how its pages move to a larger one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from graphopt.inference.decoding.buffer import Buffer, HostBuffer

if TYPE_CHECKING:
    from graphopt.analysis.structure.paged_caches import PagedLayer
    from graphopt.tasks.ports import IntArray


@dataclass
class State:
    """One state tensor.

    Attributes:
        past: the graph input.
        present: the graph output.
        paged: whether its places are pages, which grow; else slots, which do not.
        buffers: its memory, the newest first; a second buffer is written by the next step where it cannot be in place.
    """

    past: str
    present: str
    paged: bool
    buffers: list[Buffer] = field(default_factory=list)

    def row(self, row: int) -> State:
        """Return the state of one row, in the same memory, which must be that of the host."""
        rows: list[Buffer] = [buffer.row(row) for buffer in self.buffers if isinstance(buffer, HostBuffer)]
        return State(self.past, self.present, self.paged, rows)


def move_pages(layer: PagedLayer, old: Buffer, new: Buffer, stored: IntArray, oldest: IntArray) -> None:
    """Copy the pages that rows of ``stored`` tokens have in ``old`` to where they lie in ``new``, a larger one.

    Args:
        layer: whose pages they are.
        old: [batch, KV heads, pages, ...].
        new: the same with more pages.
        stored: tokens of each row, int64 [batch].
        oldest: of each row, the first page behind those of the sinks that is there still, int64 [batch].
    """
    kv = layer.attributes
    for row, (tokens, first) in enumerate(zip(stored.tolist(), oldest.tolist(), strict=True)):
        pages = np.arange(-(-tokens // kv.page))
        if not oldest.any():
            # No place has been reused, so page i lies at place i.
            new.copy(row, 0, old, row, 0, len(pages))
            continue
        pages = pages[(pages < kv.first_pages) | (pages >= first)]
        places = (kv.physical_page(pages, buffer.places).tolist() for buffer in (new, old))
        for to, place in zip(*places, strict=True):
            new.copy(row, to, old, row, place, 1)
