"""Drafts of the layer that a checkpoint was trained with to predict one more token (:mod:`graphopt.tasks.mtp_head`).

    text:        t_0  t_1  ...  t_{n-1}  t_n        the newest token is known, and not read yet
    model:       h_0  h_1  ...  h_{n-1}             the state by which t_n was chosen
    head reads:  (h_0, t_1) ... (h_{n-1}, t_n)  ->  g1, and its own state y1
                 (y1, g1)                       ->  g2, y2; and so on

The head keeps a cache of its own. It reads states of the model as they are made, prompts included; where the model
starts from a saved prompt, whose states nobody kept, the head begins behind that, which costs guesses and no text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from graphopt.analysis.structure.ports import HIDDEN, PREVIOUS_HIDDEN
from graphopt.artifact.artifact import MTP
from graphopt.errors import InputError
from graphopt.inference.decoding.decoder import Decoder
from graphopt.inference.decoding.draft_verification import Columns
from graphopt.inference.decoding.proposer import Guess, Proposer
from graphopt.inference.decoding.proposers.model import Draft, draft_limit
from graphopt.inference.session import open_folder, session_from

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphopt.inference.decoding.batch_rows import Step
    from graphopt.inference.decoding.continuation import Continuation
    from graphopt.inference.decoding.decoder import Hidden, HiddenStep
    from graphopt.inference.session import Session
    from graphopt.tasks.ports import Array, IntArray

_MIN_CHANCE = 0.2
"""Chance below which a draft ends: what follows is hardly ever right."""

_PIECE = 256
"""Tokens of a row that the head reads at once."""


@dataclass
class _Row:
    """What the head has read of a text.

    Attributes:
        first: the position of the first state that it read.
        tokens: the tokens that it read, each with the state before it.
        states: of the model by position, those that it has not read, and the last that it has.
    """

    first: int = 0
    tokens: list[int] = field(default_factory=list)
    states: dict[int, Array] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """The position behind the last state that the head has read."""
        return self.first + len(self.tokens)


class Mtp(Proposer):
    """Proposes by the head of a model.

    Args:
        session: the model; it gives its hidden states.
        head: what drafts, by default the folder ``mtp`` of the model.
        min_chance: a draft ends with the first token that the head thinks less likely than this.

    Raises:
        InputError: the model has no such folder or gives no hidden states, or the head is for another width or
            vocabulary.
    """

    name = "mtp"
    usage = "mtp"
    summary = "the layer that the checkpoint was trained with to predict one more token, of `graphopt export --mtp`"
    reads_hidden = True

    def __init__(self, session: Session, head: Session | None = None, *, min_chance: float = _MIN_CHANCE) -> None:
        self._session, self._min_chance = session, min_chance
        self._head = _open_head(session) if head is None else head
        _check_fits(session, self._head)
        self._rows: Sequence[Continuation] = []
        self._histories: list[_Row] = []
        self._decoder: HeadDecoder | None = None

    @classmethod
    def open(cls, session: Session, options: str) -> Mtp:  # noqa: ARG003, it has none
        """See :class:`Proposer`."""
        return cls(session)

    def begin(self, rows: Sequence[Continuation]) -> None:
        """See :class:`Proposer`; one text that begins as the last one did goes on from there.

        Raises:
            InputError: the rows are another model's; or there are several, and the head's cache grows.
        """
        if rows and rows[0].session.file != self._session.file:
            raise InputError(
                f"this head reads the states of {self._session.file.parent}, and another model writes the text",
                file=rows[0].session.file.parent,
                remedy="draft with the head of that model",
            )
        if len(rows) > 1 and not self._head.interface.has_pages:
            raise InputError(
                "this head cannot draft for several rows: its cache grows by columns",
                file=self._head.file,
                remedy="add the step page_kv to the recipe, or run the prompts one by one",
            )
        self._rows = rows
        goes_on = len(rows) == len(self._histories) == 1 and self._decoder is not None
        if goes_on:
            (row,), (text,) = self._histories, (rows[0].prompt,)
            count = 0
            for token, text_token in zip(row.tokens, text[row.first + 1 :], strict=False):
                if token != text_token:
                    break
                count += 1
            row.tokens, row.states = row.tokens[:count], {}
        else:
            self._histories, self._decoder = [_Row() for _ in rows], None

    def observe(self, step: HiddenStep) -> None:
        """See :class:`Proposer`."""
        real = np.ones(step.ids.shape, bool) if step.mask is None else step.mask.astype(bool)
        offset = step.ids.shape[1] - step.hidden.shape[1]  # of graphs that give states of the last positions
        for number, row in enumerate(step.rows):
            columns = np.flatnonzero(real[number])
            positions = int(step.past[number]) + np.arange(len(columns))
            for position, column in zip(positions.tolist(), columns.tolist(), strict=True):
                if column >= offset:
                    self._histories[row].states[position] = step.hidden[number, column - offset].astype(np.float32)

    def commit(self, row: int, tokens: Sequence[int]) -> None:
        """See :class:`Proposer`; the texts are read when the next draft is asked for."""

    def propose(self, prefixes: Sequence[Sequence[int]], limits: Sequence[int]) -> list[list[Guess]]:
        """See :class:`Proposer`. The head reads guesses of another proposer with its own states."""
        drafts = [
            Draft(row, prefix, draft_limit(self._head, row, prefix, limit), self.name, self._min_chance)
            for row, prefix, limit in zip(self._rows, prefixes, limits, strict=True)
        ]
        pairs = [self._unread(number) if draft.limit > 0 else [] for number, draft in enumerate(drafts)]
        if not any(pairs):
            return [[] for _ in drafts]
        if self._decoder is None:
            self._decoder = HeadDecoder(self._head, len(drafts), room=max(len(draft.text) for draft in drafts))
        self._return_to([len(row.tokens) for row in self._histories])
        logits, states = self._decoder.feed_pairs([[token for token, _ in row] for row in pairs], _states(pairs))
        for row, new in zip(self._histories, pairs, strict=True):
            row.tokens += [token for token, _ in new]
            row.states = {position: state for position, state in row.states.items() if position >= row.end - 1}
        lengths = [len(row.tokens) for row in self._histories]
        logits, states = np.array(logits), np.array(states)

        def feed_rows(tokens: Sequence[Sequence[int]]) -> None:
            """Read one token of some rows, each behind the head's own state."""
            assert self._decoder is not None
            row_states = [states[n : n + len(row)] for n, row in enumerate(tokens)]
            new_logits, new_states = self._decoder.feed_pairs(tokens, row_states)
            is_active = np.array([bool(row) for row in tokens])
            logits[is_active], states[is_active] = new_logits[is_active], new_states[is_active]

        prefix_tokens = [list(draft.prefix) if new else [] for draft, new in zip(drafts, pairs, strict=True)]
        while any(prefix_tokens):  # what another proposer guessed is read one by one, since each state makes the next
            feed_rows([row[:1] for row in prefix_tokens])
            prefix_tokens = [row[1:] for row in prefix_tokens]
        while True:
            for draft, row_logits, new in zip(drafts, logits, pairs, strict=True):
                if new:
                    draft.extend(row_logits[None])
            tokens = [draft.next_tokens if new else [] for draft, new in zip(drafts, pairs, strict=True)]
            if not any(tokens):
                break
            feed_rows(tokens)
        self._return_to(lengths)
        return [draft.guesses for draft in drafts]

    def _unread(self, number: int) -> list[tuple[int, Array]]:
        """Return the tokens of a text that the head has not read, each with the state before it."""
        history, row = self._histories[number], self._rows[number]
        text = [*row.prompt, *row.tokens]
        newest = len(text) - 1
        missing = [position for position in range(history.end, newest) if position not in history.states]
        if missing:
            # The model began behind a part of the text whose states nobody kept.
            history.first, history.tokens = missing[-1] + 1, []
        return [(text[position + 1], history.states[position]) for position in range(history.end, newest)]

    def _return_to(self, lengths: Sequence[int]) -> None:
        """Let the head forget what it has read behind the first tokens of each row."""
        decoder = self._decoder
        assert decoder is not None
        if (decoder.tokens == lengths).all():
            return
        try:
            decoder.rewind(np.array(lengths, np.int64))
        except InputError:  # pages that it would read again are overwritten: it begins again at the newest states
            self._decoder = HeadDecoder(self._head, len(lengths), room=max(lengths))
            for row in self._histories:
                row.first, row.tokens = row.end - 1 if row.tokens else row.first, []


class HeadDecoder(Decoder):
    """A decoder of a head, whose tokens each have a hidden state beside them."""

    _previous: Array

    def feed_pairs(self, tokens: Sequence[Sequence[int]], states: Sequence[Array]) -> tuple[Array, Array]:
        """Feed tokens of each row, of some none.

        Args:
            tokens: of each row.
            states: the hidden states before them, [tokens, width] of each row.

        Returns:
            Logits [rows, vocabulary] and the head's own states [rows, width] at the last token of each row; of rows
            without tokens they mean nothing.
        """
        columns = Columns.from_rows(tokens, [()] * len(tokens))
        length = columns.ids.shape[1]
        port = self.session.interface.inputs[PREVIOUS_HIDDEN]
        hidden = np.zeros((len(tokens), length, port.shape[-1] or 0), port.dtype)
        for row, row_states in zip(hidden, states, strict=True):
            if len(row_states):
                row[-len(row_states) :] = row_states
        logits: Hidden | None = None
        for begin in range(0, length, _PIECE):
            part = slice(begin, begin + _PIECE)
            self._previous = np.ascontiguousarray(hidden[:, part])
            logits = self.step(columns.ids[:, part], None if columns.mask is None else columns.mask[:, part])
        assert logits is not None and self.hidden is not None
        return logits[:, -1], np.array(self.hidden[:, -1])

    def _inputs(self, step: Step, input_ids: IntArray, mask: IntArray | None) -> dict[str, Array]:
        return {**super()._inputs(step, input_ids, mask), PREVIOUS_HIDDEN: self._previous}


def _states(pairs: Sequence[Sequence[tuple[int, Array]]]) -> list[npt.NDArray[np.generic]]:
    return [np.stack([state for _, state in row]) if row else np.empty((0, 0), np.float32) for row in pairs]


def _open_head(session: Session) -> Session:
    folder = session.file.parent / MTP
    if not session.interface.gives_hidden or not folder.is_dir():
        raise InputError(
            "this model was exported without a layer that predicts one more token",
            file=session.file,
            remedy="`graphopt export --mtp` writes it, where the checkpoint has one; or draft with --speculate lookup",
        )
    # On one thread, as heads: a second pool of threads would wait beside the model's.
    model = open_folder(folder, threads=1, native=session.native, device=session.device)
    return session_from(model, session.native, session.device)


def _check_fits(session: Session, head: Session) -> None:
    for name, size, model_size in (
        (
            "a hidden state",
            head.interface.inputs[PREVIOUS_HIDDEN].shape[-1],
            session.interface.outputs[HIDDEN].shape[-1],
        ),
        ("a vocabulary", head.interface.vocabulary, session.interface.vocabulary),
    ):
        if size != model_size:
            raise InputError(
                f"the head is for {name} of {size}, and this model has one of {model_size}",
                file=head.file,
                remedy="export and optimize both together, with `graphopt export --mtp`",
            )
