"""What makes a step of several tokens, of which some are taken back, leave no trace in pages.

    integers      a page that begins rounds an older one: only a token of the text may begin a page, never a guess
    rings         a page that begins takes the place of an older one: the same
    summaries     grow with each token: computed again from the keys that stay, where those are stored as they came;
                  else the page's summary is put back and the tokens that stay are fed once more
    retrieval     chooses among pages that are a page behind the newest token, so that guesses are not in any of them

KVAttention itself reads, for each query, the same pages cut at the same places, alone and among others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from graphopt.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from graphopt.analysis.structure.paged_caches import PagedLayer
    from graphopt.inference.states.buffers import Buffer
    from graphopt.tasks.ports import IntArray


class PageSummary(NamedTuple):
    """The summary of a page before a step.

    Attributes:
        layer: the index of the layer.
        row: of the batch.
        page: of the row's text.
        content: [KV heads, ...].
    """

    layer: int
    row: int
    page: int
    content: npt.NDArray[np.generic]


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


def sizes_of_sensitive_pages(layers: Sequence[PagedLayer]) -> list[int]:
    """Return the sizes of pages of which none may begin with a guess: it would change others, or has a summary."""
    sensitive = (layer for layer in layers if _is_sensitive(layer))
    return sorted({layer.attributes.page for layer in sensitive})


def _is_sensitive(layer: PagedLayer) -> bool:
    kv = layer.attributes
    return kv.levels is not None or kv.summarizes or layer.wraps


def limit_to_pages(room: IntArray, pages: Sequence[int], tokens: IntArray) -> None:
    """Lower, in place, how many tokens may be taken back behind the next one of each row.

    Args:
        room: so many as far as other reasons go, int64 [batch].
        pages: from :func:`sizes_of_sensitive_pages`.
        tokens: that each row has, int64 [batch].
    """
    for page in pages:
        np.minimum(room, page - 1 - tokens % page, out=room)


def rewinds_exactly(layer: PagedLayer) -> bool:
    """Return whether a summary can be computed again to the bit: its keys are stored as they came."""
    kv = layer.attributes
    return not kv.summarizes or kv.levels is not None or kv.storage == "float32"


def copy_summaries(index: int, layer: PagedLayer, summaries: Buffer, tokens: IntArray) -> Iterator[PageSummary]:
    """Yield the summaries of a layer that a step changes and that cannot be computed again.

    Args:
        index: of the layer.
        layer: the layer.
        summaries: of its pages.
        tokens: that each row has before the step, int64 [batch].
    """
    kv = layer.attributes
    for row, count in enumerate(tokens.tolist()):
        if count % kv.page:  # else the next token begins a page, whose summary begins with it
            page = count // kv.page
            physical = int(kv.physical_page(page, summaries.pages))
            yield PageSummary(index, row, page, summaries.get(row, physical).copy())


def put_summary_back(layer: PagedLayer, summaries: Buffer, summary: PageSummary) -> None:
    """Write a summary to where its page lies."""
    physical = int(layer.attributes.physical_page(summary.page, summaries.pages))
    summaries.write(summary.row, physical, summary.content[:, None])
