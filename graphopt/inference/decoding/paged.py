"""A cache in pages: allocated once, written in place by the graph, longer only when it is full.

    step:  bind the same buffers as input and as output  ->  the graph appends to them, nothing is copied
    full:  twice the pages, the old ones copied

Where every head of a layer streams, its pages are reused in turn and its cache stays as long as what a query reads. A
graph whose ``KVAttention`` runs by its body of standard operators cannot write in place: it gets two sets of buffers in
turn.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from graphopt.errors import InputError
from graphopt.inference.decoding.buffer import Buffer, HostBuffer, HostMemory, Memory, Row
from graphopt.inference.decoding.rollback import alike, check_length, moves, rewind_row
from graphopt.inference.decoding.state import State, move_pages

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import onnxruntime

    from graphopt.analysis.structure.paged_caches import PagedLayer
    from graphopt.tasks.causal_lm.interface import Interface
    from graphopt.tasks.ports import IntArray

Array = npt.NDArray[Any]

_SPARE = 1 << 26
"""Bytes of free memory that a cache leaves for the rest of a step."""


class PagedCache:
    """The caches of all layers of a batch.

    Args:
        interface: names and layers of the graph.
        batch: number of sequences.
        in_place: whether the graph may read and write the same buffers; else there are two of each.
        max_tokens: the most tokens that a row will ever have, if known; capacity never exceeds them.
        memory_limit: bytes that the cache may take; by default the memory that is free when it grows.
        expected: tokens that a row will probably have: room for them is reserved at once, as far as memory allows.
        memory: where the cache lies; host memory by default.

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
        expected: int = 0,
        memory: Memory | None = None,
    ) -> None:
        self._interface, self.batch = interface, batch
        self._memory: Memory = memory or HostMemory()
        self._sets = 1 if in_place else 2
        self._max_tokens, self._limit, self._expected = max_tokens, memory_limit, expected
        self.layers = interface.layers
        self._pages = [0] * len(self.layers)
        present = dict(zip(interface.past, interface.present, strict=True))
        self.states: list[dict[str, State]] = [
            {
                name: State(layer.port(name), present[layer.port(name)], paged=name != "recent")
                for name in layer.states(1, 1)
            }
            for layer in self.layers
        ]
        # By layer: of each row, the oldest page behind those of the sinks that no newer one has overwritten.
        self.oldest: list[IntArray] = [np.zeros(batch, np.int64) for _ in self.layers]
        self._alike = alike(self.layers)
        self._bound: onnxruntime.IOBinding | None = None
        self._roomy = 0  # tokens for which no layer has to reuse pages
        self.reserve(np.zeros(batch, np.int64), np.ones(batch, np.int64), 1)

    @property
    def bytes(self) -> int:
        """Memory that the cache takes."""
        return sum(buffer.nbytes for buffer in self._buffers())

    def _buffers(self) -> Iterator[Buffer]:
        return (buffer for layer in self.states for state in layer.values() for buffer in state.buffers)

    @property
    def capacity(self) -> int:
        """Tokens per row that it has room for; layers that reuse their pages in a ring have room for any number."""
        fixed = [
            pages * each.attributes.page for pages, each in zip(self._pages, self.layers, strict=True) if not each.wraps
        ]
        return min(fixed, default=1 << 62)

    @property
    def pages(self) -> tuple[int, ...]:
        """Pages of capacity, by layer."""
        return tuple(self._pages)

    def reserve(self, stored: IntArray, tokens: IntArray, new_tokens: int) -> None:
        """Make room.

        Args:
            stored: tokens that each row has stored, int64 [batch].
            tokens: tokens that each row will have after the next call, int64 [batch].
            new_tokens: columns of that call.

        Raises:
            InputError: there is not enough memory; the cache is unchanged then.
        """
        longest = int(tokens.max())
        if longest <= self._roomy:
            return
        needed = [layer.pages(longest, new_tokens) for layer in self.layers]
        if any(need > have for need, have in zip(needed, self._pages, strict=True)):
            self._grow(needed, stored, longest, new_tokens)
            self._note_room()
        for layer, pages, oldest in zip(self.layers, self._pages, self.oldest, strict=True):
            if longest > pages * layer.attributes.page:
                whole = -(-tokens // layer.attributes.page)
                np.maximum(oldest, whole - (pages - layer.attributes.first_pages), out=oldest)

    def _note_room(self) -> None:
        self._roomy = min(
            (n * each.attributes.page for each, n in zip(self.layers, self._pages, strict=True)), default=0
        )

    def _grow(self, needed: list[int], stored: IntArray, longest: int, new_tokens: int) -> None:
        most = max(longest, self._max_tokens or 1 << 62)
        wished = [
            have
            if need <= have
            else max(need, min(max(2 * have, layer.pages(self._expected, new_tokens)), layer.pages(most, new_tokens)))
            for need, have, layer in zip(needed, self._pages, self.layers, strict=True)
        ]
        # Extra pages are best effort: where memory is short, only those that are needed are allocated.
        if self._excess(wished) > 0:
            wished = [max(need, have) for need, have in zip(needed, self._pages, strict=True)]
        self._demand(wished, f"{longest} tokens in each of {self.batch} rows")
        for index, (layer, pages) in enumerate(zip(self.layers, wished, strict=True)):
            if pages != self._pages[index]:
                self._resize(index, layer, pages, stored)

    def bind(self, binding: onnxruntime.IOBinding, new_tokens: int) -> None:
        """Bind all states as inputs and outputs, unless this ``binding`` already has them at their addresses."""
        if self._bound is binding and self._sets == 1:
            return
        for layer in self.states:
            for state in layer.values():
                state.buffers[0].bind_input(binding, state.past)
                state.buffers[-1].bind_output(binding, state.present)
        self._bound = binding

    def advance(self, binding: onnxruntime.IOBinding) -> None:
        """Adopt the states that the step just run has written."""
        if self._sets > 1:
            for layer in self.states:
                for state in layer.values():
                    state.buffers.reverse()

    def rewind(self, stored: IntArray, kept: IntArray) -> None:
        """Go back from ``stored`` tokens per row to ``kept``, both int64 [batch].

        See :mod:`graphopt.inference.decoding.rollback`.

        Raises:
            InputError: a row has fewer tokens, or pages that it would read are overwritten; nothing has changed.
        """
        lengths = list(enumerate(zip(stored.tolist(), kept.tolist(), strict=True)))
        for first, *_ in self._alike:
            for row, (tokens, length) in lengths:
                check_length(self.layers[first], int(self.oldest[first][row]), tokens, length, row)
        for numbers in self._alike:
            if self.layers[numbers[0]].wraps:
                self.oldest[numbers[0]][kept == 0] = 0
            for row, (tokens, length) in lengths:
                for number in numbers if moves(self.layers[numbers[0]], tokens, length) else ():
                    state = {name: Row(state.buffers[0], row) for name, state in self.states[number].items()}
                    rewind_row(self.layers[number], state, tokens, length)

    @property
    def divides(self) -> bool:
        """Whether :meth:`row` gives the cache of one row: its states lie by themselves in memory of the host."""
        return self._sets == 1 and all(isinstance(buffer, HostBuffer) for buffer in self._buffers())

    def row(self, row: int) -> PagedCache:
        """Return the cache of one row, in the same memory, which has room for all that is to come and may not grow."""
        made = copy.copy(self)
        made.batch, made._bound, made._pages = 1, None, list(self._pages)
        made.oldest = [oldest[row : row + 1] for oldest in self.oldest]
        made.states = [{name: state.row(row) for name, state in layer.items()} for layer in self.states]
        return made

    def picked(self, rows: Sequence[int]) -> PagedCache:
        """Return a cache that begins as a copy of these rows, each of which may be named any number of times.

        Raises:
            InputError: there is no memory for it.
        """
        made = PagedCache(
            self._interface,
            len(rows),
            in_place=self._sets == 1,
            max_tokens=self._max_tokens,
            memory_limit=self._limit,
            memory=self._memory,
        )
        made._take_pages(self._pages, f"{len(rows)} rows")
        for ours, theirs in zip(self.states, made.states, strict=True):
            for name, state in ours.items():
                source, target = state.buffers[0], theirs[name].buffers[0]
                for row, source_row in enumerate(rows):
                    target.copy(row, 0, source, source_row, 0, source.places)
        made.oldest = [oldest[list(rows)] for oldest in self.oldest]
        return made

    def contents(self, stored: IntArray | None = None) -> dict[str, Array]:
        """Return the states as they lie, by graph input, without copies where they lie in memory of the host.

        Args:
            stored: tokens of each row, int64 [batch]: only pages in use then.
        """
        found: dict[str, Array] = {}
        for layer, pages, states in zip(self.layers, self._pages, self.states, strict=True):
            whole = pages if stored is None else max(1, -(-int(stored.max()) // layer.attributes.page))
            for state in states.values():
                buffer = state.buffers[0]
                found[state.past] = buffer.whole(min(whole, pages) if state.paged else buffer.places)
        return found

    def take(self, contents: Mapping[str, Array]) -> None:
        """Copy ``contents``, as from :meth:`contents`, into this cache, which has as many pages then.

        Raises:
            InputError: a state is missing or of another shape or type, or there is no memory for it.
        """
        pages = []
        for layer in self.layers:
            keys = contents.get(layer.port("keys"))
            pages.append(keys.shape[2] if keys is not None and keys.ndim == 4 else 0)
            for name, tensor in layer.states(self.batch, pages[-1]).items():
                given = contents.get(layer.port(name))
                if given is None or given.shape != tensor.shape or given.dtype != tensor.dtype or not pages[-1]:
                    raise InputError(
                        "a state of the cache is missing or of another kind",
                        tensor=layer.port(name),
                        shape=None if given is None else given.shape,
                        remedy=f"it is {tensor.dtype} {list(tensor.shape)} for this model and batch",
                    )
        self._take_pages(pages, "these contents")
        for states in self.states:
            for state in states.values():
                for row, numbers in enumerate(contents[state.past]):
                    state.buffers[0].write(row, 0, numbers)

    def _take_pages(self, pages: list[int], what: str) -> None:
        """Take new buffers of these pages, by layer, in the place of what was there."""
        self._demand(pages, what)
        self._bound, self._pages = None, list(pages)
        for layer, states, count in zip(self.layers, self.states, pages, strict=True):
            for name, tensor in layer.states(self.batch, count).items():
                states[name].buffers = [self._memory.zeros(tensor) for _ in range(self._sets)]
        self._note_room()

    def _demand(self, pages: list[int], what: str) -> None:
        """Refuse caches of these pages where there is not enough memory."""
        excess = self._excess(pages)
        if excess > 0:
            bound = f"the limit is {self._limit / 1e9:.2f} GB" if self._limit is not None else "that much is not free"
            raise InputError(
                f"a cache for {what} takes {self._bytes(pages) / 1e9:.2f} GB, and {bound}: {excess / 1e9:.2f} GB short",
                remedy="use a shorter context, fewer rows, or a smaller storage (the step quantize_kv)",
            )

    def _bytes(self, pages: list[int]) -> int:
        return self._sets * sum(layer.bytes(self.batch, each) for layer, each in zip(self.layers, pages, strict=True))

    def _excess(self, pages: list[int]) -> int:
        """Return by how many bytes caches of these pages are too large; while a tensor is copied, both take memory."""
        if self._limit is not None:
            return self._bytes(pages) - self._limit
        held = max((buffer.nbytes for buffer in self._buffers()), default=0) + _SPARE
        return self._bytes(pages) - self.bytes + held - self._memory.available()

    def _resize(self, index: int, layer: PagedLayer, pages: int, stored: IntArray) -> None:
        self._bound = None
        for name, tensor in layer.states(self.batch, pages).items():
            state = self.states[index][name]
            if state.buffers and not state.paged:
                continue
            buffers = [self._memory.zeros(tensor) for _ in range(self._sets)]
            if state.buffers:
                move_pages(layer, state.buffers[0], buffers[0], stored, self.oldest[index])
            state.buffers = buffers
        self._pages[index] = pages
