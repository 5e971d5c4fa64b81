"""Decoding step by step, with the states of the model kept in onnxruntime's memory.

    tokens ---+
              v
    states -> model -> logits of the new tokens
      ^         |
      +---------+  the states of this step are the past of the next: bound, never copied to NumPy

Rows (:mod:`graphopt.inference.decoding.batch_rows`) know tokens, masks and positions; states
(:mod:`graphopt.inference.states.store`) know only tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from graphopt.analysis.structure.ports import HIDDEN, LOGITS
from graphopt.errors import InputError
from graphopt.inference.decoding.batch_rows import CountedRows, MaskedRows, Rows, Step
from graphopt.inference.decoding.editing import REREAD, apply_edits, edit_row
from graphopt.inference.decoding.feeds import Feeds
from graphopt.inference.decoding.unpadded_prefill import feed_rows, is_faster_unpadded
from graphopt.inference.states.device_memory import memory_of
from graphopt.inference.states.growing import GrowingStates, RecurrentStates
from graphopt.inference.states.hybrid import HybridStates
from graphopt.inference.states.pages import PagedStates
from graphopt.inference.states.state_file import SavedPrompt, StateFile
from graphopt.quantization.rounding.single_thread import one_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from graphopt.inference.decoding.editing import Edit
    from graphopt.inference.session import Session
    from graphopt.inference.states.compression import Loss
    from graphopt.inference.states.eviction import Eviction
    from graphopt.inference.states.store import Ability, Mark, StateStore
    from graphopt.tasks.ports import Array, IntArray

Logits = npt.NDArray[np.floating]
Hidden = npt.NDArray[np.floating]

_PIECE = 256
"""Tokens per row that are fed at once. On the shipped model pieces of 128 to 512 took 0.8 times as long as a whole
window of 1024: the operator ``Attention`` computes what a causal mask then hides, and pieces have less of that."""

_LOGITS_BYTES = 1 << 26
"""Bytes of the logits of one piece, at most: a large vocabulary makes the pieces shorter."""


@dataclass(frozen=True)
class HiddenStep:
    """What a step of a decoder read, and the hidden states that it made of it.

    Attributes:
        rows: which rows of the batch these are.
        past: tokens of each row before, int64 [rows].
        ids: the tokens [rows, columns].
        mask: 1 for a token, 0 for padding; ``None`` where all are.
        hidden: [rows, positions, width], of the last positions; in the memory of onnxruntime.
    """

    rows: Sequence[int]
    past: IntArray
    ids: IntArray
    mask: IntArray | None
    hidden: Hidden


class Decoder:
    """A batch of sequences that grow together, with their states.

    Args:
        session: the model.
        batch: number of sequences.
        states: where they live; by default :class:`PagedStates` where the graph has pages, else
            :class:`GrowingStates`, and :class:`RecurrentStates` for those.
        room: tokens that a row will probably have: pages reserve room for them at once, as far as memory allows, and
            grow later if there are more.

    Attributes:
        session: the model.
        states: of the batch.
        hidden: the hidden states [batch, positions, width] of the last step, of the positions that have logits, in the
            memory of onnxruntime; ``None`` before the first, or where the graph does not give them.
        on_hidden: called behind each step whose graph gives them.

    Raises:
        InputError: the graph does not state the number of KV heads or the head size, or there is no memory for states.
    """

    def __init__(self, session: Session, batch: int, *, states: StateStore | None = None, room: int = 0) -> None:
        self.session, interface = session, session.interface
        self._rows: Rows
        if interface.has_pages:
            self._rows = CountedRows(interface, np.zeros(batch, np.int64))
        else:
            self._rows = MaskedRows(interface, batch)
        self.states: StateStore = _open_states(session, batch, room) if states is None else states
        self._binding = session.inference.io_binding()
        self._feeds = Feeds(self._binding, in_place=session.device == "cpu")
        self.hidden: Hidden | None = None
        self.on_hidden: Callable[[HiddenStep], None] | None = None
        self._numbers: Sequence[int] = range(batch)  # of the rows, in the batch that they belong to

    @property
    def rows(self) -> Rows:
        """How far the rows are."""
        return self._rows

    @property
    def length(self) -> int:
        """Columns per row so far, padding included."""
        return self._rows.columns

    def feed(self, input_ids: IntArray, mask: IntArray | None = None) -> Iterator[tuple[int, Logits]]:
        """Feed any number of new tokens piece by piece, so that memory holds the logits of one piece only.

        Where states are recurrent, the beginnings of pieces are kept: another text that shares them can start there.

        Args:
            input_ids: the new tokens, [batch, length].
            mask: as for :meth:`step`.

        First prompts that would have much padding are fed one after the other into pages, see
        :func:`graphopt.inference.decoding.unpadded_prefill.is_faster_unpadded`.

        Yields:
            Where in ``input_ids`` the piece begins, and its logits as from :meth:`step`: the last is always there, and
            is the only one where prompts are fed one after the other.

        Raises:
            InputError: as :meth:`step`.
        """
        batch, length = input_ids.shape
        if mask is not None and self.length == 0 and "split" in self.states.abilities and is_faster_unpadded(mask):
            yield from self._feed_rows(input_ids, mask)
            return
        begin = 0
        for end in self._ends(input_ids, self._piece(batch, length)):
            part = slice(begin, end)
            if begin:
                self.keep()
            yield begin, self.step(input_ids[:, part], None if mask is None else mask[:, part])
            begin = end

    def _feed_rows(self, input_ids: IntArray, mask: IntArray) -> Iterator[tuple[int, Logits]]:
        """Feed first prompts one after the other; whenever the caller stops, rows hold what they were fed."""
        batch, length = input_ids.shape
        lengths = mask.sum(axis=1)
        self.session.check_length(int(lengths.max()))
        self.states.reserve(self.tokens, lengths, min(_PIECE, length))
        decoders = (self._observed_row(row) for row in range(batch))
        for prefill in feed_rows(decoders, input_ids, mask):
            self._rows, self.hidden = CountedRows(self.session.interface, prefill.tokens, length), prefill.hidden
            yield length - 1, prefill.logits

    def _ends(self, input_ids: IntArray, piece: int) -> list[int]:
        """Return the columns in ``input_ids`` behind each piece of ``piece`` tokens."""
        length = input_ids.shape[1]
        return [*range(piece, length, piece), length]

    def _piece(self, batch: int, length: int) -> int:
        """Return how many tokens of each row are fed at once."""
        interface = self.session.interface
        if not interface.past:
            return length  # without states there is no second piece
        if interface.last_logits:
            return _PIECE
        width = interface.vocabulary or 1 << 17
        return min(_PIECE, max(1, _LOGITS_BYTES // (4 * width * batch)))

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
        session, interface, first = self.session, self.session.interface, self.length == 0
        if not first and not interface.past:
            raise InputError(
                "the graph has no past_key_values inputs, so it cannot continue a sequence",
                file=session.file,
                remedy="export the model with a KV cache: `graphopt export`",
            )
        step = self._rows.begin(input_ids, mask)
        session.check_length(int(step.end.max()))
        self.states.reserve(step.past, step.total, input_ids.shape[1])
        binding = self._binding
        self._feeds.bind(self._inputs(step, input_ids, mask))
        # Binding a name again replaces the earlier binding: the logits stay the first output.
        binding.bind_output(LOGITS, "cpu")
        gives_hidden = session.interface.gives_hidden
        if gives_hidden:
            binding.bind_output(HIDDEN, "cpu")
        self.states.bind(binding)
        try:
            session.inference.run_with_iobinding(binding)
        except Exception as error:
            raise session.failure(error) from error
        self.states.advance(binding)
        self._rows.finish()
        # Not get_outputs(): that would create an unused object for each state.
        outputs = binding.get_outputs_as_ortvaluevector()
        self.hidden = outputs[1].numpy() if gives_hidden else None
        if self.hidden is not None and self.on_hidden is not None:
            self.on_hidden(HiddenStep(self._numbers, step.past, input_ids, mask, self.hidden))
        logits: Logits = outputs[0].numpy()
        return logits

    def _inputs(self, step: Step, input_ids: IntArray, mask: IntArray | None) -> dict[str, Array]:
        """Return what the graph is fed for new tokens, beside its states."""
        del mask
        return {**step.feeds, **self.session.embeddings(input_ids)}

    def _observed_row(self, row: int) -> Decoder:
        decoder = self.row(row)
        decoder.on_hidden, decoder._numbers = self.on_hidden, [row]
        return decoder

    def row(self, row: int) -> Decoder:
        """Return a decoder of one row without tokens, whose states are a part of these."""
        return Decoder(self.session, 1, states=self.states.row(row))

    @property
    def tokens(self) -> IntArray:
        """Tokens that each row has, int64 [batch]."""
        return self._rows.tokens.copy()

    def rewind(self, tokens: int | IntArray) -> None:
        """Forget the newest tokens of each row.

        Args:
            tokens: how many to keep, of every row or int64 [batch].

        Raises:
            InputError: a row has fewer; what it would read again was overwritten; or states grow, and rows would lose
                different columns.
        """
        tokens_before = self._rows.tokens
        lengths = np.broadcast_to(np.asarray(tokens, np.int64), tokens_before.shape).copy()
        rows = self._rows.rewind(lengths)
        self.states.rewind(tokens_before, lengths)
        self._rows = rows

    def nearest(self, length: int) -> int:
        """Return the most tokens up to ``length`` that :meth:`rewind` can leave to every row."""
        tokens = self._rows.tokens
        return int(self.states.nearest(tokens, np.full_like(tokens, length)).min())

    def keep(self) -> None:
        """Let :meth:`rewind` come back to where the rows are now, also where states are recurrent."""
        self.states.keep(self.tokens)

    def room_for_drafts(self) -> IntArray:
        """Return how many tokens behind the next one of each row leave no trace when they are taken back."""
        return self.states.room_for_drafts(self._rows.tokens)

    def mark(self) -> Mark:
        """Return what :meth:`roll_back` needs, before a step of which some tokens may be taken back."""
        return self.states.mark(self.tokens)

    def roll_back(self, before: Mark, lengths: IntArray) -> None:
        """Take tokens of the last step back, as if they had never been fed; see :meth:`StateStore.roll_back`.

        Args:
            before: of that step.
            lengths: tokens that each row keeps, int64 [batch], as :meth:`room_for_drafts` allowed. A row that cannot
                keep just so many to the bit goes back to where it was ``before``; see :attr:`tokens`.
        """
        self._rows = self._rows.rewind(self.states.roll_back(before, self._rows.tokens, lengths))

    def fork(self, rows: Sequence[int]) -> Decoder:
        """Return a decoder whose rows continue from copies of these rows; a row may be named any number of times.

        A prompt that many texts share is fed once in a batch of one, then ``fork([0] * number)``.

        Raises:
            InputError: a row does not exist, memory is short, or the states of the graph cannot be copied.
        """
        self._require("fork")
        batch = self.states.batch
        if not rows or not all(0 <= row < batch for row in rows):
            raise InputError(f"rows {list(rows)} of a batch of {batch}", remedy=f"give rows below {batch}")
        decoder = Decoder(self.session, len(rows), states=self.states.fork(rows))
        decoder._rows = self._rows.fork(rows)
        return decoder

    def evict(self, eviction: Eviction) -> None:
        """Let rows keep ``eviction.keep`` tokens at most; those that come get the positions that they would have had.

        Rows cannot be rewound to before that, and are not saved.

        Raises:
            InputError: the graph makes positions by itself, its states cannot do this, or there is no memory for it.
        """
        self._require("evict")
        rows = self._rows
        if not isinstance(rows, CountedRows) or "position_ids" not in self.session.interface.inputs:
            raise InputError(
                "the graph has no input position_ids, so tokens behind evicted ones would get other positions",
                file=self.session.file,
                remedy="leave eviction out",
            )
        if (rows.tokens > eviction.keep).any():
            self._rows = rows.evict(self.states.evict(rows.tokens, eviction))

    def edit(self, tokens: Sequence[int], edits: Sequence[Edit], *, reread: int = REREAD) -> list[int]:
        """Replace spans of the text that the row has read, without reading what stands behind them again.

        The tokens of a span are read where they stand, and those behind it move: their keys turn to their new
        positions, and they still know what they had read before. Nothing changes where this fails.

        Args:
            tokens: all that the row has read.
            edits: what changes, in order; see :func:`graphopt.inference.decoding.editing.edits_between`.
            reread: tokens behind each span that are read again, since most of what they know may be of it.

        Returns:
            The tokens that the row has read then. The logits of its last one are known when a token is fed.

        Raises:
            InputError: there are several rows, or states that grow or are recurrent; tokens were evicted, or what a
                span's tokens would read is overwritten; positions are more than a turn of keys; or memory is short.
        """
        after = apply_edits(tokens, edits)
        row = edit_row(self, tokens, edits, reread)
        self.states, self._rows, self.hidden = row.states, row._rows, None
        return after

    def take_tokens(self, source: Decoder, first: int, end: int) -> None:
        """Append tokens that another decoder of one row has read, without reading them.

        Args:
            source: of the same model.
            first: the first of its tokens.
            end: behind the last one.

        Raises:
            InputError: keys do not turn alike at these positions, or memory is short.
        """
        rows, (tokens,), (source_tokens,) = self._rows, self._rows.tokens.tolist(), source.tokens.tolist()
        with one_thread():  # products of a head are small, and threads that wait take a processor each
            turns = self.session.key_shifts.matrices(first, end - first, tokens - first)
            self.states.move(source.states, source_tokens, first, end, tokens, turns)
        count = end - first
        self._rows = rows.at_length(rows.tokens + count, rows.columns + count)

    def save(
        self,
        file: str | Path,
        prompt: SavedPrompt | None = None,
        loss: Loss = "none",
        original: tuple[StateFile, int] | None = None,
    ) -> None:
        """Write the states to a file, from which :meth:`restore` continues.

        Args:
            file: where to.
            prompt: what the states were made of, for :class:`graphopt.inference.prompt_cache.PromptCache`.
            loss: what may be lost, see :mod:`graphopt.inference.states.compression`; nothing by default.
            original: the file that the states were restored from, and how many tokens each row has had ever since: what
                it says of these is taken over.

        Raises:
            InputError: the states of the graph cannot be saved.
        """
        self._require("save")
        if isinstance(self._rows, CountedRows) and self._rows.evicted_tokens.any():
            raise InputError("tokens were evicted, and a file does not say which", remedy="save before that")
        states, tokens = self.states, self._rows.tokens
        if not self.session.interface.has_pages and (tokens != self._rows.columns).any():
            raise InputError(
                "rows of a cache that grows are saved without padding, and a row has some",
                remedy="save prompts one by one, or add the step page_kv to the recipe",
            )
        StateFile.write(
            Path(file),
            states.save(tokens),
            model=self.session.fingerprint,
            layout=states.layout,
            tokens=tokens,
            columns=self._rows.columns,
            prompt=prompt,
            loss=loss,
            original=None if original is None else (original[0], np.full(len(tokens), original[1], np.int64)),
        )

    @classmethod
    def restore(cls, session: Session, file: str | Path) -> Decoder:
        """Return a decoder that continues from the states in ``file``.

        Raises:
            InputError: the file cannot be read, was changed, or is of another model.
        """
        content = StateFile.load(Path(file))
        decoder = cls(session, len(content.tokens)) if content.model == session.fingerprint else None
        if decoder is None or content.layout != decoder.states.layout:
            raise InputError("the cache is of another model", file=file, remedy=f"it was not written by {session.file}")
        decoder.states.restore(content.states())
        decoder._rows = decoder._rows.at_length(content.tokens, content.columns)
        return decoder

    def _require(self, ability: Ability) -> None:
        if ability not in self.states.abilities:
            raise InputError(
                f"the states of this graph cannot do this: {ability}",
                file=self.session.file,
                remedy="add the step page_kv to the recipe",
            )


def _open_states(session: Session, batch: int, room: int) -> StateStore:
    interface = session.interface
    stores: list[StateStore] = []
    if interface.has_pages:
        stores.append(
            PagedStates(
                interface,
                batch,
                in_place=session.in_place,
                max_tokens=session.max_positions,
                room=room,
                memory=memory_of(session),
            )
        )
    elif len(interface.recurrent) < len(interface.past) or not interface.past:
        later_outputs = len(interface.recurrent)
        stores.append(GrowingStates(interface, batch, device=session.device, later_outputs=later_outputs))
    if interface.recurrent:
        stores.append(RecurrentStates(interface, batch, device=session.device))
    return stores[0] if len(stores) == 1 else HybridStates(stores)
