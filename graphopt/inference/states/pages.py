"""States in pages: allocated once, written in place by the graph, longer only when they are full.

    step:  bind the same buffers as input and as output  ->  the graph appends to them, nothing is copied
    full:  twice the pages, the old ones copied

Where every head of a layer streams, its pages are reused in turn and its states stay as long as what a query reads. A
graph whose ``KVAttention`` runs by its body of standard operators cannot write in place: it gets two sets of buffers in
turn.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from graphopt.analysis.structure.paged_caches import to_json
from graphopt.errors import InputError
from graphopt.inference.states.buffers import Buffer, HostBuffer, HostMemory, Memory, Row
from graphopt.inference.states.eviction import Eviction, check_layers, evict
from graphopt.inference.states.moving import move_tokens
from graphopt.inference.states.rewinding import check_length, group_layers, is_rewind_free, rewind_row
from graphopt.inference.states.rollback import (
    PageSummary,
    copy_summaries,
    limit_to_pages,
    put_summary_back,
    rewinds_exactly,
    sizes_of_sensitive_pages,
)
from graphopt.inference.states.store import Array, Mark, SavedStates, StateStore

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import onnxruntime

    from graphopt.analysis.structure.paged_caches import PagedLayer
    from graphopt.tasks.causal_lm.interface import Interface
    from graphopt.tasks.ports import IntArray

_SPARE = 1 << 26
"""Bytes of free memory that states leave for the rest of a step."""

_NO_LIMIT = 1 << 62


@dataclass
class PagedTensor:
    """One state tensor.

    Attributes:
        past: the graph input.
        present: the graph output.
        grows: whether it has a page for each page of the text; else it has slots for the newest ones.
        buffers: its memory, the newest first; a second buffer is written by the next step where it cannot be in place.
    """

    past: str
    present: str
    grows: bool
    buffers: list[Buffer] = field(default_factory=list)

    def row(self, row: int) -> PagedTensor:
        """Return the state of one row, in the same memory, which must be that of the host."""
        rows: list[Buffer] = [buffer.row(row) for buffer in self.buffers if isinstance(buffer, HostBuffer)]
        return PagedTensor(self.past, self.present, self.grows, rows)


class PagedStates(StateStore):
    """The states of all layers of a batch.

    Args:
        interface: names and layers of the graph.
        batch: number of sequences.
        in_place: whether the graph may read and write the same buffers; else there are two of each.
        max_tokens: the most tokens that a row will ever have, if known; capacity never exceeds them.
        memory_limit: bytes that the states may take; by default the memory that is free when they grow.
        room: tokens that a row will probably have: room for them is reserved at once, as far as memory allows.
        memory: where the states lie; host memory by default.

    Attributes:
        layers: of the graph.
        tensors: the state tensors of each layer, by their names.
        oldest: by layer: of each row, the oldest page behind those of the sinks that no newer one has overwritten.

    Raises:
        InputError: there is not enough memory for the first page of each row.
    """

    def __init__(
        self,
        interface: Interface,
        batch: int,
        *,
        in_place: bool,
        max_tokens: int | None = None,
        memory_limit: int | None = None,
        room: int = 0,
        memory: Memory | None = None,
    ) -> None:
        self._interface, self.batch = interface, batch
        self._memory: Memory = memory or HostMemory()
        self._sets = 1 if in_place else 2
        self._max_tokens, self._limit, self._room = max_tokens, memory_limit, room
        self.layers = interface.layers
        self._pages = [0] * len(self.layers)
        present = dict(zip(interface.past, interface.present, strict=True))
        self.tensors: list[dict[str, PagedTensor]] = [
            {
                name: PagedTensor(layer.port(name), present[layer.port(name)], grows=name != "recent")
                for name in layer.states(1, 1)
            }
            for layer in self.layers
        ]
        self.oldest: list[IntArray] = [np.zeros(batch, np.int64) for _ in self.layers]
        self._groups = group_layers(self.layers)
        self._sensitive_pages = sizes_of_sensitive_pages(self.layers)
        self._rewinds_exactly = all(map(rewinds_exactly, self.layers))
        self._bound: onnxruntime.IOBinding | None = None
        self._roomy = 0  # tokens for which no layer has to reuse pages
        self.reserve(np.zeros(batch, np.int64), np.ones(batch, np.int64), 1)
        splits = self._sets == 1 and all(isinstance(buffer, HostBuffer) for buffer in self._buffers())
        self.abilities = frozenset(("fork", "save", "evict", "edit", *(("split",) if splits else ())))

    @property
    def bytes(self) -> int:
        """See :class:`StateStore`."""
        return sum(buffer.nbytes for buffer in self._buffers())

    def _buffers(self) -> Iterator[Buffer]:
        return (buffer for tensors in self.tensors for tensor in tensors.values() for buffer in tensor.buffers)

    @property
    def capacity(self) -> int:
        """Tokens per row that it has room for; layers that reuse their pages in a ring have room for any number."""
        sizes = (
            count * layer.attributes.page
            for count, layer in zip(self._pages, self.layers, strict=True)
            if not layer.wraps
        )
        return min(sizes, default=_NO_LIMIT)

    @property
    def pages(self) -> tuple[int, ...]:
        """Pages of capacity, by layer."""
        return tuple(self._pages)

    def reserve(self, past: IntArray, total: IntArray, new_tokens: int) -> None:
        """See :class:`StateStore`."""
        longest = int(total.max())
        if longest <= self._roomy:
            return
        minimum = [layer.pages(longest, new_tokens) for layer in self.layers]
        if any(need > count for need, count in zip(minimum, self._pages, strict=True)):
            self._grow(minimum, past, longest, new_tokens)
            self._note_room()
        for layer, count, oldest in zip(self.layers, self._pages, self.oldest, strict=True):
            if longest > count * layer.attributes.page:
                text_pages = -(-total // layer.attributes.page)
                np.maximum(oldest, text_pages - (count - layer.attributes.first_pages), out=oldest)

    def _note_room(self) -> None:
        sizes = (layer.attributes.page * count for layer, count in zip(self.layers, self._pages, strict=True))
        self._roomy = min(sizes, default=0)

    def _grow(self, minimum: list[int], past: IntArray, longest: int, new_tokens: int) -> None:
        limit = max(longest, self._max_tokens or _NO_LIMIT)
        counts = [
            count
            if need <= count
            else max(need, min(max(2 * count, layer.pages(self._room, new_tokens)), layer.pages(limit, new_tokens)))
            for need, count, layer in zip(minimum, self._pages, self.layers, strict=True)
        ]
        # Extra pages are best effort: where memory is short, only those that are needed are allocated.
        if self._excess(counts) > 0:
            counts = [max(need, count) for need, count in zip(minimum, self._pages, strict=True)]
        self._check_memory(counts, f"{longest} tokens in each of {self.batch} rows")
        for index, (layer, count) in enumerate(zip(self.layers, counts, strict=True)):
            if count != self._pages[index]:
                self._resize(index, layer, count, past)

    def bind(self, binding: onnxruntime.IOBinding) -> None:
        """See :class:`StateStore`; nothing is done where ``binding`` already has the states at their addresses."""
        if self._bound is binding and self._sets == 1:
            return
        for tensors in self.tensors:
            for tensor in tensors.values():
                tensor.buffers[0].bind_input(binding, tensor.past)
                tensor.buffers[-1].bind_output(binding, tensor.present)
        self._bound = binding

    def advance(self, binding: onnxruntime.IOBinding) -> None:  # noqa: ARG002, it bound the buffers itself
        """See :class:`StateStore`."""
        if self._sets > 1:
            for tensors in self.tensors:
                for tensor in tensors.values():
                    tensor.buffers.reverse()

    def rewind(self, tokens: IntArray, lengths: IntArray) -> None:
        """See :class:`StateStore` and :mod:`graphopt.inference.states.rewinding`.

        Raises:
            InputError: pages that a row would read are overwritten; nothing has changed.
        """
        rows = list(enumerate(zip(tokens.tolist(), lengths.tolist(), strict=True)))
        for first, *_ in self._groups:
            for row, (count, length) in rows:
                check_length(self.layers[first], int(self.oldest[first][row]), count, length, row)
        for indices in self._groups:
            layer = self.layers[indices[0]]
            if layer.wraps:
                self.oldest[indices[0]][lengths == 0] = 0
            for row, (count, length) in rows:
                for index in () if is_rewind_free(layer, count, length) else indices:
                    state = {name: Row(tensor.buffers[0], row) for name, tensor in self.tensors[index].items()}
                    rewind_row(self.layers[index], state, count, length)

    def room_for_drafts(self, tokens: IntArray) -> IntArray:
        """See :class:`StateStore`."""
        room = super().room_for_drafts(tokens)
        limit_to_pages(room, self._sensitive_pages, tokens)
        return room

    def mark(self, tokens: IntArray) -> Mark:
        """See :class:`StateStore`."""
        if self._rewinds_exactly:
            return Mark(tokens)
        summaries: list[PageSummary] = []
        for index, (layer, tensors) in enumerate(zip(self.layers, self.tensors, strict=True)):
            if not rewinds_exactly(layer):
                summaries += copy_summaries(index, layer, tensors["summaries"].buffers[0], tokens)
        return Mark(tokens, summaries)

    def roll_back(self, mark: Mark, tokens: IntArray, lengths: IntArray) -> IntArray:
        """See :class:`StateStore`."""
        if self._rewinds_exactly:
            return super().roll_back(mark, tokens, lengths)
        goes_back = lengths < tokens
        for summary in mark.checkpoint:
            if goes_back[summary.row]:
                buffer = self.tensors[summary.layer]["summaries"].buffers[0]
                put_summary_back(self.layers[summary.layer], buffer, summary)
        return np.where(goes_back, mark.tokens, lengths)

    def row(self, row: int) -> PagedStates:
        """See :class:`StateStore`."""
        store = copy.copy(self)
        store.batch, store._bound, store._pages = 1, None, list(self._pages)
        store.oldest = [oldest[row : row + 1] for oldest in self.oldest]
        store.tensors = [{name: tensor.row(row) for name, tensor in tensors.items()} for tensors in self.tensors]
        return store

    def fork(self, rows: Sequence[int]) -> PagedStates:
        """See :class:`StateStore`."""
        store = PagedStates(
            self._interface,
            len(rows),
            in_place=self._sets == 1,
            max_tokens=self._max_tokens,
            memory_limit=self._limit,
            memory=self._memory,
        )
        store._allocate(self._pages, f"{len(rows)} rows")
        for tensors, copies in zip(self.tensors, store.tensors, strict=True):
            for name, tensor in tensors.items():
                source, target = tensor.buffers[0], copies[name].buffers[0]
                for row, source_row in enumerate(rows):
                    target.copy(row, 0, source, source_row, 0, source.pages)
        store.oldest = [oldest[list(rows)] for oldest in self.oldest]
        return store

    @property
    def layout(self) -> str:
        """See :class:`StateStore`."""
        return to_json(self.layers)

    def save(self, tokens: IntArray) -> SavedStates:
        """See :class:`StateStore`: pages in use only."""
        progress = json.dumps([pages.tolist() for pages in self.oldest])
        return SavedStates(self.contents(tokens), progress, self.layers)

    def evict(self, tokens: IntArray, eviction: Eviction) -> IntArray:
        """See :class:`StateStore`: the pages have room for what stays, and for what may come before the next eviction.

        Raises:
            InputError: a layer knows its tokens by their places, or there is no memory for both the old and new pages.
        """
        check_layers(self.layers)
        contents, room = self.contents(tokens), eviction.keep + eviction.slack + 1
        arrays: dict[str, Array] = {}
        for layer, tensors in zip(self.layers, self.tensors, strict=True):
            state = {name: contents[tensor.past] for name, tensor in tensors.items()}
            after = evict(layer, state, tokens, eviction, layer.pages(min(room, self._max_tokens or room), 1))
            arrays |= {tensors[name].past: array for name, array in after.items()}
        self._room = 0
        self.restore(SavedStates(arrays, json.dumps([[0] * self.batch] * len(self.layers))))
        return np.minimum(tokens, eviction.keep)

    def move(
        self,
        source: StateStore,
        source_tokens: int,
        first: int,
        end: int,
        tokens: int,
        turns: Sequence[npt.NDArray[np.float32] | None],
    ) -> None:
        """See :class:`StateStore`.

        Raises:
            InputError: there is no memory for them; nothing has changed.
        """
        assert isinstance(source, PagedStates)
        self.reserve(np.array([tokens]), np.array([tokens + end - first]), end - first)
        for layer, tensors, source_tensors, turn in zip(self.layers, self.tensors, source.tensors, turns, strict=True):
            rows, of_source = (
                {name: Row(tensor.buffers[0], 0) for name, tensor in of_layer.items()}
                for of_layer in (tensors, source_tensors)
            )
            move_tokens(layer, of_source, source_tokens, first, end, rows, tokens, turn)

    def restore(self, states: SavedStates) -> None:
        """See :class:`StateStore`; the store has as many pages then as the saved one had in use."""
        pages = self._pages_of(states.arrays)
        self._allocate(pages, "these contents")
        for tensors in self.tensors:
            for tensor in tensors.values():
                for row, content in enumerate(states.arrays[tensor.past]):
                    tensor.buffers[0].write(row, 0, content)
        self.oldest = [np.array(numbers, np.int64) for numbers in json.loads(states.progress)]

    def contents(self, tokens: IntArray | None = None) -> dict[str, Array]:
        """Return the states as they lie, by graph input, without copies where they lie in memory of the host.

        Args:
            tokens: of each row, int64 [batch]: only pages in use then.
        """
        contents: dict[str, Array] = {}
        for layer, count, tensors in zip(self.layers, self._pages, self.tensors, strict=True):
            in_use = count if tokens is None else max(1, -(-int(tokens.max()) // layer.attributes.page))
            for tensor in tensors.values():
                buffer = tensor.buffers[0]
                contents[tensor.past] = buffer.array_of(min(in_use, count) if tensor.grows else buffer.pages)
        return contents

    def _pages_of(self, arrays: Mapping[str, Array]) -> list[int]:
        """Return the pages of each layer in saved states.

        Raises:
            InputError: a state is missing or of another shape or type.
        """
        counts = []
        for layer in self.layers:
            keys = arrays.get(layer.port("keys"))
            counts.append(keys.shape[2] if keys is not None and keys.ndim == 4 else 0)
            for name, tensor in layer.states(self.batch, counts[-1]).items():
                array = arrays.get(layer.port(name))
                if array is None or array.shape != tensor.shape or array.dtype != tensor.dtype or not counts[-1]:
                    raise InputError(
                        "a state of the cache is missing or of another kind",
                        tensor=layer.port(name),
                        shape=None if array is None else array.shape,
                        remedy=f"it is {tensor.dtype} {list(tensor.shape)} for this model and batch",
                    )
        return counts

    def _allocate(self, pages: list[int], content: str) -> None:
        """Take new buffers of these pages, by layer, for a content that errors name."""
        self._check_memory(pages, content)
        self._bound, self._pages = None, list(pages)
        for layer, tensors, count in zip(self.layers, self.tensors, pages, strict=True):
            for name, tensor in layer.states(self.batch, count).items():
                tensors[name].buffers = [self._memory.zeros(tensor) for _ in range(self._sets)]
        self._note_room()

    def _check_memory(self, pages: list[int], content: str) -> None:
        """Refuse states of these pages where there is not enough memory."""
        excess = self._excess(pages)
        if excess > 0:
            bound = f"the limit is {self._limit / 1e9:.2f} GB" if self._limit is not None else "that much is not free"
            size = self._bytes(pages) / 1e9
            raise InputError(
                f"a cache for {content} takes {size:.2f} GB, and {bound}: {excess / 1e9:.2f} GB short",
                remedy="use a shorter context, fewer rows, or a smaller storage (the step quantize_kv)",
            )

    def _bytes(self, pages: list[int]) -> int:
        return self._sets * sum(layer.bytes(self.batch, count) for layer, count in zip(self.layers, pages, strict=True))

    def _excess(self, pages: list[int]) -> int:
        """Return by how many bytes states of these pages are too large; while a tensor is copied, both take memory."""
        if self._limit is not None:
            return self._bytes(pages) - self._limit
        largest = max((buffer.nbytes for buffer in self._buffers()), default=0)
        return self._bytes(pages) - self.bytes + largest + _SPARE - self._memory.available()

    def _resize(self, index: int, layer: PagedLayer, pages: int, past: IntArray) -> None:
        self._bound = None
        for name, state in layer.states(self.batch, pages).items():
            tensor = self.tensors[index][name]
            if tensor.buffers and not tensor.grows:
                continue
            buffers = [self._memory.zeros(state) for _ in range(self._sets)]
            if tensor.buffers:
                move_pages(layer, tensor.buffers[0], buffers[0], past, self.oldest[index])
            tensor.buffers = buffers
        self._pages[index] = pages


def move_pages(layer: PagedLayer, old: Buffer, new: Buffer, tokens: IntArray, oldest: IntArray) -> None:
    """Copy the pages of rows from ``old`` to where they lie in ``new``, a larger one.

    Args:
        layer: whose pages they are.
        old: [batch, KV heads, pages, ...].
        new: the same with more pages.
        tokens: of each row, int64 [batch].
        oldest: of each row, the first page behind those of the sinks that is there still, int64 [batch].
    """
    kv = layer.attributes
    for row, (count, first) in enumerate(zip(tokens.tolist(), oldest.tolist(), strict=True)):
        pages = np.arange(-(-count // kv.page))
        if not oldest.any():
            # No page has been overwritten, so page i of the text lies at page i.
            new.copy(row, 0, old, row, 0, len(pages))
            continue
        pages = pages[(pages < kv.first_pages) | (pages >= first)]
        targets, sources = (kv.physical_page(pages, buffer.pages).tolist() for buffer in (new, old))
        for target, source in zip(targets, sources, strict=True):
            new.copy(row, target, old, row, source, 1)
