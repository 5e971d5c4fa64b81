"""Drafts of a smaller model with the same tokenizer, or of the same weights read with less.

It keeps states of its own, which hold the text and its last draft. What it proposes is its most likely token; where the
target draws, it draws with the very numbers that the target will use, so that both choose alike where they think alike.

It may itself have a proposer, and check several tokens in a step; see
:mod:`graphopt.inference.decoding.proposers.cascade`.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from graphopt.errors import InputError
from graphopt.inference.decoding.decoder import Decoder, Logits
from graphopt.inference.decoding.draft_verification import Columns
from graphopt.inference.decoding.proposer import Guess, Proposer
from graphopt.inference.decoding.proposers.draft_threads import choose_threads
from graphopt.inference.session import Session, open_folder, session_from

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphopt.inference.decoding.continuation import Continuation
    from graphopt.ort.session import Entries

_MIN_CHANCE = 0.2
"""Chance below which a draft ends: what follows is hardly ever right."""

_AHEAD = 3
"""Guesses that the drafting model checks in a step, where it has a proposer: 4 tokens are a width that kernels like."""

_RESERVE = 512
"""Tokens behind the first texts that its states reserve room for."""


class ModelProposer(Proposer):
    """Proposes by running another model.

    Args:
        session: the model that drafts.
        source: what its guesses are counted as.
        min_chance: a draft ends with the first token that the model thinks less likely than this.
        proposer: what proposes to the model that drafts, if anything does; it never changes what that guesses.
    """

    def __init__(
        self,
        session: Session,
        *,
        source: str = "model",
        min_chance: float = _MIN_CHANCE,
        proposer: Proposer | None = None,
    ) -> None:
        self._session, self._source, self._min_chance, self._proposer = session, source, min_chance, proposer
        self._rows: Sequence[Continuation] = []
        self._texts = FollowedTexts(session, 0)

    @classmethod
    def open(cls, session: Session, options: str, proposer: Proposer | None = None) -> ModelProposer:
        """See :class:`Proposer`; the option is the folder of a model."""
        return ModelProposer(open_draft_model(session, Path(options)), proposer=proposer)

    def begin(self, rows: Sequence[Continuation]) -> None:
        """See :class:`Proposer`.

        Raises:
            InputError: the models have other tokenizers; or there are several rows, and this model's states grow.
        """
        if rows:
            check_same_tokens(rows[0].session, self._session)
        if len(rows) > 1 and not self._session.interface.has_pages:
            raise InputError(
                "this model cannot draft for several rows: its cache grows by columns",
                file=self._session.file,
                remedy="add the step page_kv to its recipe, or run the prompts one by one",
            )
        self._rows, self._texts = rows, FollowedTexts(self._session, len(rows))
        if self._proposer is not None:
            self._proposer.begin(rows)

    def commit(self, row: int, tokens: Sequence[int]) -> None:
        """See :class:`Proposer`; the texts are read when the next draft is asked for."""
        if self._proposer is not None:
            self._proposer.commit(row, tokens)

    def propose(self, prefixes: Sequence[Sequence[int]], limits: Sequence[int]) -> list[list[Guess]]:
        """See :class:`Proposer`."""
        drafts = [
            Draft(row, prefix, draft_limit(self._session, row, prefix, limit), self._source, self._min_chance)
            for row, prefix, limit in zip(self._rows, prefixes, limits, strict=True)
        ]
        if any(draft.limit > 0 for draft in drafts):
            self._complete(drafts)
        return [draft.guesses for draft in drafts]

    def _complete(self, drafts: Sequence[Draft]) -> None:
        logits = self._texts.catch_up([draft.text for draft in drafts], [draft.limit for draft in drafts])
        while True:
            for draft, row_logits in zip(drafts, logits, strict=True):
                draft.extend(row_logits)
            lengths = [draft.length for draft in drafts]
            if not any(draft.is_open for draft in drafts) or not self._texts.truncate(lengths):
                return
            self._look_ahead(drafts)
            logits = self._texts.feed([draft.next_tokens for draft in drafts])

    def _look_ahead(self, drafts: Sequence[Draft]) -> None:
        """Let its own proposer continue the drafts that are open."""
        limits = [min(_AHEAD, draft.limit - len(draft.guesses) - 1) if draft.is_open else 0 for draft in drafts]
        for draft in drafts:
            draft.ahead = []
        if self._proposer is None or not any(limits):
            return
        prefixes = [[*draft.prefix, *(guess.token for guess in draft.guesses)] for draft in drafts]
        proposals = self._proposer.propose(prefixes, limits)
        for draft, proposal, limit in zip(drafts, proposals, limits, strict=True):
            draft.ahead = [guess.token for guess in proposal[:limit]]


class FolderProposer(ModelProposer):
    """Proposes by the model in a folder, whose name is all that there is to say."""

    name = "FOLDER"
    usage = "the folder of a smaller model"
    summary = "a model with the same tokenizer, which reads the text for itself"

    @classmethod
    def options_in(cls, name: str) -> str | None:
        """See :class:`Proposer`."""
        return name if Path(name).exists() else None


@dataclass
class Draft:
    """The draft of a row while it grows.

    Attributes:
        row: the text.
        prefix: guesses behind it that this draft goes on from.
        limit: its tokens, at most.
        source: what its guesses are counted as.
        min_chance: it ends with a token that the model thinks less likely.
        guesses: so far.
        ahead: the tokens of the model's own proposer that were fed behind the newest guess.
    """

    row: Continuation
    prefix: Sequence[int]
    limit: int
    source: str
    min_chance: float
    guesses: list[Guess] = field(default_factory=list)
    ahead: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.text = [*self.row.prompt, *self.row.tokens, *self.prefix]
        self._random = self.row.random
        if self.limit > 0 and self.row.settings.sampling.temperature:
            # A copy, which draws ahead of the row: one number for each token.
            self._random = copy.deepcopy(self.row.random)
            for _ in self.prefix:
                self._random.random()

    @property
    def is_open(self) -> bool:
        """Whether it may have more guesses."""
        return len(self.guesses) < self.limit and not (self.guesses and self.guesses[-1].chance < self.min_chance)

    @property
    def length(self) -> int | None:
        """Tokens of the text and of the draft before its newest guess; ``None`` where the draft has ended."""
        return len(self.text) + len(self.guesses) - 1 if self.is_open else None

    @property
    def next_tokens(self) -> list[int]:
        """What is fed next: the newest guess and what was proposed behind it; nothing where the draft has ended."""
        return [self.guesses[-1].token, *self.ahead] if self.is_open else []

    def extend(self, logits: npt.NDArray[np.floating]) -> None:
        """Add guesses by the logits [positions, vocabulary] of what was fed last, as long as it is what is guessed."""
        first = len(logits) - 1 - len(self.ahead)
        for offset, proposal in enumerate([*self.ahead, None]):
            if not self.is_open:
                return
            values = logits[first + offset]
            token = self.row.settings.sampling.choose(values, self._random)
            values = values.astype(np.float32, copy=False)
            chance = float(1 / np.exp(values - values[token]).sum())
            self.guesses.append(Guess(token, chance, self.source))
            if token != proposal:
                return


class FollowedTexts:
    """What the states of the drafting model hold of each text.

    Args:
        session: the model that drafts.
        batch: rows.
    """

    def __init__(self, session: Session, batch: int) -> None:
        self._session = session
        self._decoder: Decoder | None = None
        self._tokens: list[list[int]] = [[] for _ in range(batch)]  # that the states hold
        self._common = [0] * batch  # how many of them are known to be those of the text

    def catch_up(self, texts: Sequence[Sequence[int]], limits: Sequence[int]) -> Logits:
        """Feed what the states do not hold of the texts whose drafts have a limit above 0; return the logits."""
        longest = max(map(len, texts))
        if self._decoder is None:
            self._decoder = Decoder(self._session, len(texts), room=longest + max(limits) + _RESERVE)
        if not self.truncate([self._common_length(row, text, limits[row]) for row, text in enumerate(texts)]):
            self._decoder = Decoder(self._session, len(texts), room=longest)
            self._tokens = [[] for _ in texts]
        rows = zip(texts, self._tokens, limits, strict=True)
        return self.feed([list(text[len(tokens) :]) if limit > 0 else [] for text, tokens, limit in rows])

    def _common_length(self, row: int, text: Sequence[int], limit: int) -> int:
        tokens, position = self._tokens[row], self._common[row]
        # The last token of a text is fed in any case: its logits are the first guess.
        end = min(len(tokens), len(text) - (limit > 0))
        while position < end and tokens[position] == text[position]:
            position += 1
        self._common[row] = min(position, end)
        return self._common[row]

    def truncate(self, lengths: Sequence[int | None]) -> bool:
        """Keep the first tokens of each row, ``None`` for all; return whether the states allow that."""
        counts = [len(tokens) for tokens in self._tokens]
        remaining = [
            count if length is None else min(count, length) for count, length in zip(counts, lengths, strict=True)
        ]
        if remaining == counts:
            return True
        assert self._decoder is not None
        try:
            self._decoder.rewind(np.array(remaining, np.int64))
        except InputError:  # pages that it would read again are overwritten
            return False
        self._tokens = [tokens[:length] for tokens, length in zip(self._tokens, remaining, strict=True)]
        return True

    def feed(self, tokens: Sequence[Sequence[int]]) -> Logits:
        """Feed tokens of each row, of some none; return the logits of the last piece, a row's own at its right end."""
        columns = Columns.from_rows(tokens, [()] * len(tokens))
        assert self._decoder is not None
        newest: Logits = np.empty((0, 0, 0), np.float32)
        for _, logits in self._decoder.feed(columns.ids, columns.mask):
            newest = logits
        for row_tokens, new in zip(self._tokens, tokens, strict=True):
            row_tokens += new
        return newest


def open_draft_model(target: Session, folder: Path) -> Session:
    """Open a smaller model that drafts for another one, with the threads that suit both; see :func:`choose_threads`.

    Raises:
        InputError: it cannot be opened, or its tokens are not the target's.
    """

    def open_with(threads: int, entries: Entries) -> Session:
        native, device = target.native, target.device
        model = open_folder(folder, threads=threads, native=native, device=device, entries=entries)
        smaller = session_from(model, native, device)
        check_same_tokens(target, smaller)
        return smaller

    return choose_threads(target, open_with)


def check_same_tokens(target: Session, model: Session) -> None:
    """Refuse a drafting model whose tokens are not the target's.

    Raises:
        InputError: the tokenizers differ, one has none, or the vocabularies have other sizes.
    """
    if model.file == target.file:
        return  # the model itself, read with less
    remedy = "draft with a model of the same family, or with --speculate lookup"
    target_parts, parts = (json.loads(session.require_tokenizer().to_str()) for session in (target, model))
    for part in ("model", "added_tokens", "normalizer", "pre_tokenizer"):
        if target_parts.get(part) != parts.get(part):
            raise InputError(
                f"its tokenizer is not that of {target.file.parent}: its {part.replace('_', ' ')} differs",
                file=model.file.parent,
                remedy=remedy,
            )
    widths = target.interface.vocabulary, model.interface.vocabulary
    if None not in widths and widths[0] != widths[1]:
        raise InputError(
            f"it has {widths[1]} tokens, and {target.file.parent} has {widths[0]}",
            file=model.file.parent,
            remedy=remedy,
        )


def draft_limit(session: Session, row: Continuation, prefix: Sequence[int], limit: int) -> int:
    """Return how many tokens a model has positions for behind a text and guesses, at most ``limit``.

    Args:
        session: the model that drafts.
        row: the text.
        prefix: guesses behind it.
        limit: tokens at most.
    """
    positions = session.max_positions
    length = len(row.prompt) + len(row.tokens) + len(prefix)
    return limit if positions is None else min(limit, positions - length)
