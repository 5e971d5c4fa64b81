"""Decoding step by step, with the KV cache kept in onnxruntime's memory.

    tokens --+
             v
    cache -> model -> logits of the new tokens
      ^        |
      +--------+  the cache of this step is the past of the next: bound, never copied to NumPy

Rows (:mod:`graphopt.inference.decoding.batch_rows`) know tokens, masks and positions; a cache knows only buffers:
:class:`graphopt.inference.decoding.cache.GrowingCache`, or :class:`graphopt.inference.decoding.paged.PagedCache`
where the graph has pages.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from graphopt.analysis.structure.paged_caches import to_json
from graphopt.analysis.structure.ports import HIDDEN, LOGITS
from graphopt.errors import InputError
from graphopt.inference.decoding.batch_rows import CountedRows, MaskedRows, Rows
from graphopt.inference.decoding.cache import Cache, GrowingCache
from graphopt.inference.decoding.cache_file import CacheFile
from graphopt.inference.decoding.device import memory_of
from graphopt.inference.decoding.feeds import Feeds
from graphopt.inference.decoding.paged import PagedCache
from graphopt.inference.decoding.rollback_trace import Mark, mark, pages_that_mind, rewinds_exactly, room_for_drafts
from graphopt.inference.decoding.unpadded_prefill import feed_apart, pay_apart

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from graphopt.inference.session import Session
    from graphopt.tasks.ports import IntArray

Logits = npt.NDArray[np.floating]
Hidden = npt.NDArray[np.floating]

_PIECE = 256
"""Tokens per row that are fed at once. On the shipped model pieces of 128 to 512 took 0.8 times as long as a whole
window of 1024: the operator ``Attention`` computes what a causal mask then hides, and pieces have less of that."""

_LOGITS_BYTES = 1 << 26
"""Bytes of the logits of one piece, at most: a large vocabulary makes the pieces shorter."""


class Decoder:
    """A batch of sequences that grow together, with their cache.

    Args:
        session: the model.
        batch: number of sequences.
        cache: where keys and values live; by default a :class:`PagedCache` where the graph has pages, else a
            :class:`GrowingCache`.
        expected: tokens that a row will probably have: a :class:`PagedCache` reserves room for them at once, as far as
            memory allows, and grows later if there are more.

    Attributes:
        hidden: the hidden states [batch, positions, width] of the last step, of the positions that have logits, in the
            memory of onnxruntime; ``None`` before the first, or where the graph does not give them.

    Raises:
        InputError: the graph does not state the number of KV heads or the head size, or there is no memory for a cache.
    """

    def __init__(self, session: Session, batch: int, *, cache: Cache | None = None, expected: int = 0) -> None:
        self._session, interface = session, session.interface
        self._rows: Rows
        if interface.paged:
            self._rows = CountedRows(interface, np.zeros(batch, np.int64))
        else:
            self._rows = MaskedRows(interface, batch)
        self._cache: Cache = self._new_cache(batch, expected) if cache is None else cache
        self._binding = session.inference.io_binding()
        self._feeds = Feeds(self._binding, in_place=session.device == "cpu")
        self.hidden: Hidden | None = None
        self._minding = pages_that_mind(interface.layers)
        self._exact = all(map(rewinds_exactly, interface.layers))

    def _new_cache(self, batch: int, expected: int) -> Cache:
        session = self._session
        if not session.interface.paged:
            return GrowingCache(session.interface, batch, device=session.device)
        return PagedCache(
            session.interface,
            batch,
            in_place=session.in_place,
            max_tokens=session.max_positions,
            expected=expected,
            memory=memory_of(session),
        )

    @property
    def length(self) -> int:
        """Columns per row so far, padding included."""
        return self._rows.columns

    def feed(self, input_ids: IntArray, mask: IntArray | None = None) -> Iterator[tuple[int, Logits]]:
        """Feed any number of new tokens piece by piece, so that memory holds the logits of one piece only.

        Args:
            input_ids: the new tokens, [batch, length].
            mask: as for :meth:`step`.

        First prompts that would have much padding are fed one after the other into a cache in pages, see
        :func:`graphopt.inference.decoding.unpadded_prefill.pay_apart`.

        Yields:
            Where in ``input_ids`` the piece begins, and its logits as from :meth:`step`: the last is always there, and
            is the only one where prompts are fed one after the other.

        Raises:
            InputError: as :meth:`step`.
        """
        batch, length = input_ids.shape
        cache = self._cache
        if (
            mask is not None
            and self.length == 0
            and isinstance(cache, PagedCache)
            and cache.divides
            and pay_apart(mask)
        ):
            self._session.check_length(int(mask.sum(axis=1).max()))
            cache.reserve(self.tokens, mask.sum(axis=1), min(_PIECE, length))
            rows = (Decoder(self._session, 1, cache=cache.row(row)) for row in range(batch))
            for fed in feed_apart(rows, input_ids, mask):
                # Whenever the caller stops, rows hold what they were fed.
                self._rows, self.hidden = CountedRows(self._session.interface, fed.tokens, length), fed.hidden
                yield length - 1, fed.logits
            return
        piece = length  # without a cache there is no second piece
        if self._session.interface.past:
            width = self._session.interface.vocabulary or 1 << 17
            fitting = max(1, _LOGITS_BYTES // (4 * width * batch))
            piece = _PIECE if self._session.interface.last_logits else min(_PIECE, fitting)
        for begin in range(0, length, piece):
            part = slice(begin, begin + piece)
            yield begin, self.step(input_ids[:, part], None if mask is None else mask[:, part])

    def step(self, input_ids: IntArray, mask: IntArray | None = None) -> Logits:
        """Feed new tokens and return their logits.

        Args:
            input_ids: the new tokens, [batch, length].
            mask: 1 for a token, 0 for padding before a prompt or after the end of a row, [batch, length]; all 1 by
                default. A 0 takes no position, and no later token sees it.

        Returns:
            Logits [batch, length, vocabulary] in the graph's own float type, or [batch, 1, vocabulary], of the last
            position, where the graph computes no others. They share onnxruntime's memory, which stays allocated as long
            as the array lives: read what you need and drop it.

        Raises:
            InputError: a row runs past the model's positions, the graph has no cache for a second step, it has no mask,
                or the run fails.
        """
        session, interface, first = self._session, self._session.interface, self.length == 0
        if not first and not interface.past:
            raise InputError(
                "the graph has no past_key_values inputs, so it cannot continue a sequence",
                file=session.file,
                remedy="export the model with a KV cache: `graphopt export`",
            )
        step = self._rows.begin(input_ids, mask)
        session.check_length(int(step.tokens.max()))
        self._cache.reserve(step.stored, step.tokens, input_ids.shape[1])
        binding = self._binding
        self._feeds.bind(step.feeds)
        # Binding a name again replaces the earlier binding: the logits stay the first output.
        binding.bind_output(LOGITS, "cpu")
        gives_hidden = session.interface.gives_hidden
        if gives_hidden:
            binding.bind_output(HIDDEN, "cpu")
        self._cache.bind(binding, input_ids.shape[1])
        try:
            session.inference.run_with_iobinding(binding)
        except Exception as error:
            raise session.failure(error) from error
        self._cache.advance(binding)
        self._rows.finish()
        # Not get_outputs(): that would create an unused object for each state of the cache.
        made = binding.get_outputs_as_ortvaluevector()
        self.hidden = made[1].numpy() if gives_hidden else None
        logits: Logits = made[0].numpy()
        return logits

    @property
    def cache(self) -> PagedCache:
        """The cache in pages: what it holds, how large it is.

        Raises:
            InputError: the graph's caches are not in pages.
        """
        return self._paged()[0]

    @property
    def tokens(self) -> IntArray:
        """Tokens that each row has stored, int64 [batch]."""
        return self._rows.tokens.copy()

    def rewind(self, tokens: int | IntArray) -> None:
        """Forget the newest tokens of each row.

        Args:
            tokens: how many to keep, of every row or int64 [batch].

        Raises:
            InputError: a row has fewer; what it would read again was overwritten; or the caches are not in pages, and
                rows would lose different columns.
        """
        rows = self._rows
        kept = np.broadcast_to(np.asarray(tokens, np.int64), rows.tokens.shape).copy()
        if isinstance(self._cache, GrowingCache) and isinstance(rows, MaskedRows):
            self._cache.rewind(rows.rewind(kept))
            return
        cache, counted = self._paged()
        cache.rewind(counted.tokens, kept)
        self._rows = CountedRows(self._session.interface, kept, counted.columns)

    def room_for_drafts(self) -> IntArray:
        """Return how many tokens behind the next one of each row leave no trace when they are taken back."""
        return room_for_drafts(self._minding, self._rows.tokens)

    def mark(self) -> Mark:
        """Return what :meth:`take_back` needs, before a step of which some tokens may be taken back."""
        tokens = self.tokens
        return mark(self._cache, tokens) if isinstance(self._cache, PagedCache) and not self._exact else Mark(tokens)

    def take_back(self, before: Mark, kept: IntArray) -> None:
        """Take tokens of the last step back, as if they had never been fed.

        See :mod:`graphopt.inference.decoding.rollback_trace`.

        Args:
            before: of that step.
            kept: tokens that each row keeps, int64 [batch], of those that :meth:`room_for_drafts` allowed. A row that
                cannot keep just so many to the bit goes back to where it was ``before``; see :attr:`tokens`.
        """
        cache, rows = self._cache, self._rows
        if not isinstance(cache, PagedCache) or self._exact:
            return self.rewind(kept)
        back = kept < rows.tokens
        for row in np.flatnonzero(back).tolist():
            before.put_back(cache, row)
        assert isinstance(rows, CountedRows)
        self._rows = CountedRows(self._session.interface, np.where(back, before.tokens, kept), rows.columns)
        return None

    def fork(self, rows: Sequence[int]) -> Decoder:
        """Return a decoder whose rows continue from copies of these rows; a row may be named any number of times.

        A prompt that many texts share is fed once in a batch of one, then ``fork([0] * number)``.

        Raises:
            InputError: a row does not exist, memory is short, or the graph has no caches in pages.
        """
        cache, there = self._paged()
        if not rows or not all(0 <= row < cache.batch for row in rows):
            raise InputError(f"rows {list(rows)} of a batch of {cache.batch}", remedy=f"give rows below {cache.batch}")
        made = Decoder(self._session, len(rows), cache=cache.picked(rows))
        made._rows = CountedRows(self._session.interface, there.tokens[list(rows)], there.columns)
        return made

    def save(self, file: str | Path) -> None:
        """Write the cache to a file, from which :meth:`restore` continues.

        Raises:
            InputError: the graph has no caches in pages.
        """
        cache, rows = self._paged()
        session = self._session
        states = cache.contents(rows.tokens)
        oldest = [pages.tolist() for pages in cache.oldest]
        layers = to_json(cache.layers)
        CacheFile(session.fingerprint, layers, rows.tokens, rows.columns, oldest, states).write(Path(file))

    @classmethod
    def restore(cls, session: Session, file: str | Path) -> Decoder:
        """Return a decoder that continues from the cache in ``file``.

        Raises:
            InputError: the file cannot be read, was changed, or is of another model.
        """
        stored = CacheFile.read(Path(file))
        interface = session.interface
        if stored.model != session.fingerprint or stored.layers != to_json(interface.layers):
            raise InputError("the cache is of another model", file=file, remedy=f"it was not written by {session.file}")
        made = cls(session, len(stored.tokens))
        made.cache.take(stored.states)
        made.cache.oldest = [np.array(pages, np.int64) for pages in stored.oldest]
        made._rows = CountedRows(interface, stored.tokens, stored.columns)
        return made

    def _paged(self) -> tuple[PagedCache, CountedRows]:
        if not isinstance(self._cache, PagedCache) or not isinstance(self._rows, CountedRows):
            raise InputError(
                "the caches of this graph grow, and cannot be forked or saved",
                file=self._session.file,
                remedy="add the step page_kv to the recipe",
            )
        return self._cache, self._rows
