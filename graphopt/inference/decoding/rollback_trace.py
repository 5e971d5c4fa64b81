"""What makes a step of several tokens, of which some are taken back, leave no trace in a cache.

    integers      a page that begins rounds an older one: only a token of the text may begin a page, never a guess
    rings         a page that begins takes the place of an older one: the same
    summaries     grow with each token: computed again from the keys that stay, where those are stored as they came;
                  else the page's summary is put back and the tokens that stay are fed once more
    retrieval     chooses among pages that are a page behind the newest token, so that guesses are not in any of them

KVAttention itself reads, for each query, the same pages cut at the same places, alone and among others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from graphopt.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphopt.analysis.structure.paged_caches import PagedLayer
    from graphopt.inference.decoding.paged import PagedCache
    from graphopt.tasks.ports import IntArray

_ANY = 1 << 30


@dataclass(frozen=True)
class Mark:
    """A cache before a step.

    Attributes:
        tokens: of each row, int64 [batch].
        summaries: what cannot be computed again: layer, row, page of the row and its summary [KV heads, ...].
    """

    tokens: IntArray
    summaries: Sequence[tuple[int, int, int, npt.NDArray[np.generic]]] = ()

    def put_back(self, cache: PagedCache, row: int) -> None:
        """Put the summaries of a row back."""
        for layer, of_row, page, numbers in self.summaries:
            if of_row == row:
                buffer = cache.states[layer]["summaries"].buffers[0]
                place = int(cache.layers[layer].attributes.physical_page(page, buffer.places))
                buffer.write(row, place, numbers[:, None])


def check_drafts(layers: Sequence[PagedLayer]) -> None:
    """Refuse layers whose attention would see guesses that are wrong.

    Raises:
        InputError: retrieval chooses among pages by summaries that hold newer tokens than the query.
    """
    for layer in layers:
        kv = layer.attributes
        if kv.retrieves and kv.chooses and kv.recent < kv.page:
            raise InputError(
                f"layer {layer.number} chooses among pages of {kv.page} tokens and always reads the newest "
                f"{kv.recent}: drafts would change the summary of a page that it chooses by",
                remedy=f"let the step sparse_kv read {kv.page} recent tokens or more, or generate without drafts",
            )


def pages_that_mind(layers: Sequence[PagedLayer]) -> list[int]:
    """Return the sizes of pages of which none may begin with a guess: it would change others, or has a summary."""
    return sorted({each.attributes.page for each in layers if _minds(each)})


def room_for_drafts(pages: Sequence[int], tokens: IntArray) -> IntArray:
    """Return how many tokens may be taken back behind the next one of each row, int64 [batch].

    Args:
        pages: from :func:`pages_that_mind`.
        tokens: that each row has, int64 [batch].
    """
    room = np.full(len(tokens), _ANY, np.int64)
    for page in pages:
        np.minimum(room, page - 1 - tokens % page, out=room)
    return room


def mark(cache: PagedCache, tokens: IntArray) -> Mark:
    """Note what a step changes and :meth:`PagedCache.rewind` cannot compute again."""
    noted = []
    for number, (layer, states) in enumerate(zip(cache.layers, cache.states, strict=True)):
        if rewinds_exactly(layer):
            continue
        buffer, kv = states["summaries"].buffers[0], layer.attributes
        for row, count in enumerate(tokens.tolist()):
            page = count // kv.page
            if count % kv.page:  # else the next token begins a page, whose summary begins with it
                place = int(kv.physical_page(page, buffer.places))
                noted.append((number, row, page, buffer.read(row, place).copy()))
    return Mark(tokens, noted)


def rewinds_exactly(layer: PagedLayer) -> bool:
    """Return whether a summary can be computed again to the bit: its keys are stored as they came."""
    kv = layer.attributes
    return not kv.summarizes or kv.levels is not None or kv.storage == "float32"


def _minds(layer: PagedLayer) -> bool:
    """Return whether a page that begins changes others, or has a summary."""
    kv = layer.attributes
    return kv.levels is not None or kv.summarizes or layer.wraps
