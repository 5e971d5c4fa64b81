"""Drafts of a smaller model with the same tokenizer, or of the same weights read with less.

It keeps a cache of its own, which holds the text and its last draft. What it drafts is its most likely token; where the
target draws, it draws with the very numbers that the target will use, so that both choose alike where they think alike.

It may itself be drafted for, and check several tokens in a step: so three models of rising size write one text
(TriForce, Sun et al., 2024, section 4.2; Staged Speculative Decoding, Spector and Re, 2023).
"""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from graphopt.errors import InputError
from graphopt.inference.decoding.decoder import Decoder, Logits
from graphopt.inference.decoding.draft_verification import Columns
from graphopt.inference.decoding.drafts.drafter import Drafter, Guess
from graphopt.inference.decoding.drafts.thread_choice import in_turns
from graphopt.inference.session import Session, open_folder, session_from

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from graphopt.inference.decoding.continuation import Continuation
    from graphopt.ort.session import Entries

_LEAST = 0.2
"""Chance below which a draft ends: what follows is hardly ever right."""

_AHEAD = 3
"""Guesses that the drafting model checks in a step, where it is drafted for: 4 tokens are a width that kernels like."""


class ModelDrafter:
    """Drafts by running another model.

    Args:
        session: the model that drafts.
        source: what its guesses are counted as.
        least: a draft ends with the first token that the model thinks less likely than this.
        drafter: what drafts for the model that drafts, if anything does; it never changes what that guesses.
    """

    def __init__(
        self, session: Session, *, source: str = "model", least: float = _LEAST, drafter: Drafter | None = None
    ) -> None:
        self._session, self._source, self._least, self._drafter = session, source, least, drafter
        self._rows: Sequence[Continuation] = []
        self._held: list[list[int]] = []  # tokens of each row that the cache holds
        self._agreed: list[int] = []  # how many of them are known to be those of the text
        self._decoder: Decoder | None = None

    def begin(self, rows: Sequence[Continuation]) -> None:
        """See :class:`Drafter`.

        Raises:
            InputError: the models have other tokenizers; or there are several rows, and this model's cache grows.
        """
        if rows:
            check_same_tokens(rows[0].session, self._session)
        if len(rows) > 1 and not self._session.interface.paged:
            raise InputError(
                "this model cannot draft for several rows: its cache grows by columns",
                file=self._session.file,
                remedy="add the step page_kv to its recipe, or run the prompts one by one",
            )
        self._rows, self._decoder = rows, None
        self._held, self._agreed = [[] for _ in rows], [0] * len(rows)
        if self._drafter is not None:
            self._drafter.begin(rows)

    def commit(self, row: int, tokens: Sequence[int]) -> None:
        """See :class:`Drafter`; the texts are read when the next draft is asked for."""
        if self._drafter is not None:
            self._drafter.commit(row, tokens)

    def propose(self, begun: Sequence[Sequence[int]], limits: Sequence[int]) -> list[list[Guess]]:
        """See :class:`Drafter`."""
        texts = [self._text(row, begun[row]) for row in range(len(self._rows))]
        most = self._session.max_positions
        left = [
            limit if most is None else min(limit, most - len(text)) for limit, text in zip(limits, texts, strict=True)
        ]
        drafts: list[list[Guess]] = [[] for _ in left]
        if max(left, default=0) < 1:
            return drafts
        drawn = [_draws(row) for row in self._rows]
        for row, first in enumerate(begun):
            for _ in first:
                _skip(self._rows[row], drawn[row])
        logits = self._catch_up(texts, left)
        ahead: list[list[int]] = [[] for _ in left]  # guesses of its own drafter among what was fed last
        while True:
            going = []
            for row, limit in enumerate(left):
                draft, first = drafts[row], logits.shape[1] - 1 - len(ahead[row])
                for place, checked in enumerate([*ahead[row], None]):
                    if not self._goes_on(draft, limit):
                        break
                    draft.append(self._guess(self._rows[row], logits[row, first + place], drawn[row]))
                    if draft[-1].token != checked:
                        break
                if self._goes_on(draft, limit):
                    going.append(row)
            if not going or not self._dropped([len(texts[row]) + len(drafts[row]) - 1 for row in going], going):
                return drafts
            ahead = self._ahead(begun, drafts, left, going)
            new = [[drafts[row][-1].token, *ahead[row]] if row in going else [] for row in range(len(left))]
            logits = self._feed(new)

    def _goes_on(self, draft: Sequence[Guess], limit: int) -> bool:
        return len(draft) < limit and not (draft and draft[-1].chance < self._least)

    def _ahead(
        self,
        begun: Sequence[Sequence[int]],
        drafts: Sequence[Sequence[Guess]],
        left: Sequence[int],
        going: Sequence[int],
    ) -> list[list[int]]:
        """Return what its own drafter guesses behind the drafts of the rows ``going``."""
        if self._drafter is None:
            return [[] for _ in left]
        so_far = [[*first, *(guess.token for guess in draft)] for first, draft in zip(begun, drafts, strict=True)]
        limits = [min(_AHEAD, limit - len(drafts[row]) - 1) if row in going else 0 for row, limit in enumerate(left)]
        guesses = self._drafter.propose(so_far, limits) if any(limits) else [[] for _ in left]
        return [[guess.token for guess in each[:limit]] for each, limit in zip(guesses, limits, strict=True)]

    def _dropped(self, counts: Sequence[int], going: Sequence[int]) -> bool:
        """Take wrong guesses of its own drafter out of the cache; return whether that was possible.

        Args:
            counts: how many tokens each of the rows ``going`` keeps.
            going: the rows.
        """
        assert self._decoder is not None
        kept = [len(held) for held in self._held]
        for row, count in zip(going, counts, strict=True):
            kept[row] = min(kept[row], count)
        if kept == [len(held) for held in self._held]:
            return True
        try:
            self._decoder.rewind(np.array(kept, np.int64))
        except InputError:  # pages that it would read again are overwritten
            return False
        self._held = [held[:count] for held, count in zip(self._held, kept, strict=True)]
        return True

    def _text(self, row: int, begun: Sequence[int]) -> list[int]:
        each = self._rows[row]
        return [*each.prompt, *each.tokens, *begun]

    def _catch_up(self, texts: Sequence[Sequence[int]], left: Sequence[int]) -> Logits:
        """Feed what the cache does not hold of the texts of rows that draft; return the logits behind them."""
        if self._decoder is None:
            longest = max(map(len, texts))
            self._decoder = Decoder(self._session, len(texts), expected=longest + max(left) + 512)
        kept = []
        for row, text in enumerate(texts):
            held, place = self._held[row], self._agreed[row]
            end = min(len(held), len(text) - (left[row] > 0))
            while place < end and held[place] == text[place]:
                place += 1
            kept.append(min(place, end))
            self._agreed[row] = min(place, end)
        if any(count < len(held) for count, held in zip(kept, self._held, strict=True)):
            try:
                self._decoder.rewind(np.array(kept, np.int64))
            except InputError:  # pages that it would read again are overwritten
                self._decoder = Decoder(self._session, len(texts), expected=max(map(len, texts)))
                kept = [0] * len(texts)
        self._held = [list(text[:count]) for text, count in zip(texts, kept, strict=True)]
        return self._feed(
            [list(text[count:]) if limit > 0 else [] for text, count, limit in zip(texts, kept, left, strict=True)]
        )

    def _feed(self, tokens: Sequence[Sequence[int]]) -> Logits:
        columns = Columns.of(tokens, [()] * len(tokens))
        assert self._decoder is not None
        newest: Logits = np.empty((0, 0, 0), np.float32)
        for _, logits in self._decoder.feed(columns.ids, columns.mask):
            newest = logits
        for held, new in zip(self._held, tokens, strict=True):
            held += new
        return newest

    def _guess(self, row: Continuation, logits: npt.NDArray[np.floating], random: np.random.Generator) -> Guess:
        token = row.settings.sampling.choose(logits, random)
        values = logits.astype(np.float32, copy=False)
        chance = float(1 / np.exp(values - values[token]).sum())
        return Guess(token, chance, self._source)


def model_beside(target: Session, folder: Path) -> Session:
    """Open a smaller model that drafts for another one, with the threads that suit both; see :func:`in_turns`.

    Raises:
        InputError: it cannot be opened, or its tokens are not the target's.
    """

    def opened(threads: int, entries: Entries) -> Session:
        native, device = target.native, target.device
        model = open_folder(folder, threads=threads, native=native, device=device, entries=entries)
        smaller = session_from(model, native, device)
        check_same_tokens(target, smaller)
        return smaller

    return in_turns(target, opened)


def check_same_tokens(target: Session, drafter: Session) -> None:
    """Refuse a drafter whose tokens are not the target's.

    Raises:
        InputError: the tokenizers differ, one has none, or the vocabularies have other sizes.
    """
    ours, theirs = (json.loads(session.require_tokenizer().to_str()) for session in (target, drafter))
    for part in ("model", "added_tokens", "normalizer", "pre_tokenizer"):
        if ours.get(part) != theirs.get(part):
            raise InputError(
                f"its tokenizer is not that of {target.file.parent}: its {part.replace('_', ' ')} differs",
                file=drafter.file.parent,
                remedy="draft with a model of the same family, or with --speculate lookup",
            )
    widths = target.interface.vocabulary, drafter.interface.vocabulary
    if None not in widths and widths[0] != widths[1]:
        raise InputError(
            f"it has {widths[1]} tokens, and {target.file.parent} has {widths[0]}",
            file=drafter.file.parent,
            remedy="draft with a model of the same family, or with --speculate lookup",
        )


def _draws(row: Continuation) -> np.random.Generator:
    """Return a copy of a row's random numbers, which draws ahead of the row."""
    return copy.deepcopy(row.random) if row.settings.sampling.temperature else row.random


def _skip(row: Continuation, random: np.random.Generator) -> None:
    if row.settings.sampling.temperature:
        random.random()
