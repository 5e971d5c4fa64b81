"""Drafts for a batch: who makes them, how long they are, and what became of them.

Speculation    a proposer with its policy and its counts; serves one batch after another
Drafting       the drafts of one batch while it grows
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from graphopt.errors import InputError
from graphopt.inference.decoding.draft_lengths import Lengths
from graphopt.inference.decoding.draft_statistics import DraftStats
from graphopt.inference.decoding.draft_verification import Columns, Verdict
from graphopt.inference.decoding.step_costs import LONGEST, Costs, costs_of
from graphopt.inference.states.rollback import check_drafts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphopt.inference.decoding.continuation import Continuation
    from graphopt.inference.decoding.decoder import Decoder
    from graphopt.inference.decoding.proposer import Guess, Proposer
    from graphopt.inference.session import Session
    from graphopt.inference.states.store import Mark

_STALL = 2.0
"""Times its usual time that a step is charged for, at most: what comes on top was another program's."""

_OBSERVE_INTERVAL = 4
"""Every so many steps without a draft the time of one is looked at: that takes a hundredth of a short step itself."""

_MAX_REPLAY = 4
"""Tokens that are fed once more, at most, before a step without a draft takes them in for good."""


class Speculation:
    """A proposer, and how it is used.

    Args:
        proposer: what guesses.
        tokens: guesses in each draft, as far as caches allow; ``None`` to let costs and success decide, 0 included.
        strict: do not draft where logits of several tokens in a step are not those of single tokens to the bit. By
            default drafts are made there too, and :attr:`stats` has a note that texts may differ.

    Attributes:
        stats: what drafts did, over all batches.

    Raises:
        InputError: ``tokens`` is not from 0 to 11.
    """

    def __init__(self, proposer: Proposer, tokens: int | None = None, *, strict: bool = False) -> None:
        if tokens is not None and not 0 <= tokens <= LONGEST:
            raise InputError(f"a draft cannot have {tokens} tokens", remedy=f"give a number from 0 to {LONGEST}")
        self.proposer, self.tokens, self.strict = proposer, tokens, strict
        self.stats, self.lengths = DraftStats(), Lengths()
        self._newest: Drafting | None = None

    def start(self, session: Session, rows: Sequence[Continuation]) -> Drafting | None:
        """Begin with new texts; the first time for a model and a size of batch, steps are measured.

        Returns:
            Their drafts; ``None`` where ``strict`` allows none, which a note explains.

        Raises:
            InputError: the model makes logits of too few positions, its caches cannot take drafts back, or the proposer
                refuses the rows; the first two are notes with ``strict``.
        """
        try:
            _check(session, len(rows))
        except InputError as error:
            if not self.strict:
                raise
            self.stats.note(f"no drafts: {error.message}")
            return None
        costs = costs_of(session, len(rows))
        if costs.different:
            widths = ", ".join(map(str, costs.different))
            difference = f"logits of {widths} tokens in a step differ in their last bits from those of single tokens"
            if self.strict:
                self.stats.note(f"no drafts: {difference}, so that texts could change")
                return None
            self.stats.note(f"{difference}: where two tokens are nearly alike, a text may differ from plain decoding")
        if self._newest is not None:
            self._newest.catch_up()  # a proposer may remember texts that have ended
        self._newest = Drafting(self, session, rows, costs)
        return self._newest


class Drafting:
    """The drafts of one batch.

    Args:
        by: whose drafts.
        session: the model.
        rows: the texts.
        costs: of steps of the batch.

    Raises:
        InputError: the proposer refuses the rows.
    """

    def __init__(self, speculation: Speculation, session: Session, rows: Sequence[Continuation], costs: Costs) -> None:
        self._speculation, self._rows, self._costs = speculation, rows, costs
        self._longest = LONGEST if speculation.tokens is None else speculation.tokens
        if session.interface.last_logits is not None:
            self._longest = min(self._longest, session.interface.last_logits - 1)
        self._texts: list[list[int]] = [[] for _ in rows]  # tokens of each row that go before its draft
        self._replays: list[list[int]] = [[] for _ in rows]  # those of them that were fed before
        self._no_drafts: list[list[Guess]] = [[] for _ in rows]
        self._no_guesses: list[list[int]] = [[] for _ in rows]
        self._drafts = self._no_drafts
        self._unseen: list[list[int]] = [[] for _ in rows]  # tokens of each row that the proposer does not know yet
        start = time.perf_counter()
        speculation.proposer.begin(rows)
        self._drafting = time.perf_counter() - start  # seconds since the last step
        self._settling = 0.0
        self._single = 0  # steps of one column
        self._new = True  # the first draft takes longer: the prompt is read

    def watch(self, decoder: Decoder) -> None:
        """Let the proposer see the hidden states that a decoder makes, where it reads them."""
        proposer = self._speculation.proposer
        decoder.on_hidden = proposer.observe if proposer.reads_hidden else None

    def next(self, tokens: Sequence[Sequence[int]], decoder: Decoder) -> Columns:
        """Return what to feed next.

        Args:
            tokens: the new tokens of each row: the last of them is its anchor.
            decoder: of the batch.
        """
        for row, new in enumerate(tokens):
            replay = self._replays[row]
            self._texts[row] = [*replay, *new[-1:]] if self._rows[row].stop_reason is None else []
            if replay:
                self._replays[row] = []
            self._unseen[row] += new
        length = self._longest
        if length and self._speculation.tokens is None:
            length = self._speculation.lengths.to_ask(self._costs, sum(map(bool, self._texts)))
        if not length:  # most steps of a text that drafts do not suit: they should cost what plain decoding costs
            self._drafts = self._no_drafts
            return Columns.from_rows(self._texts, self._no_guesses)
        start = time.perf_counter()
        self._drafts = self._propose(decoder, length)
        columns = Columns.from_rows(self._texts, [[guess.token for guess in draft] for draft in self._drafts])
        self._drafting += time.perf_counter() - start
        return columns

    def catch_up(self) -> None:
        """Tell the proposer the tokens that it does not know yet: while it is not asked, it need not follow."""
        for row, tokens in enumerate(self._unseen):
            if tokens:
                self._speculation.proposer.commit(row, tokens)
                self._unseen[row] = []

    def settle(self, verdict: Verdict, decoder: Decoder, before: Mark) -> None:
        """Take wrong guesses of a step out of the cache.

        Args:
            verdict: what became of the drafts.
            decoder: of the batch.
            before: its mark before the step.
        """
        start = time.perf_counter()
        lengths = before.tokens.copy()
        for row, text in enumerate(self._texts):
            if text:
                lengths[row] += len(text) + max(0, verdict.sample_counts[row] - 1)
        if (lengths < decoder.tokens).any():
            decoder.roll_back(before, lengths)
        # A row that went back further feeds its tokens once more.
        back = (lengths - decoder.tokens).tolist()
        for row, draft in enumerate(self._drafts):
            fed_tokens = [*self._texts[row], *(guess.token for guess in draft)]
            self._replays[row] = fed_tokens[: back[row]]
        self._settling = time.perf_counter() - start

    def learn(self, verdict: Verdict, columns: int, seconds: float) -> None:
        """Take in what became of a step.

        Args:
            verdict: what became of its drafts.
            columns: of the step.
            seconds: that the model took.
        """
        speculation, costs, drafting = self._speculation, self._costs, self._drafting
        live, token_count = sum(map(bool, verdict.sample_counts)), sum(verdict.sample_counts)
        tokens_per_row = token_count / max(1, live)
        self._drafting = 0.0
        if columns == 1:
            speculation.stats.count(1, token_count, seconds, drafting, tokens_per_row * costs.seconds_of(1))
            self._single += 1
            if self._single % _OBSERVE_INTERVAL == 0:
                costs.observe(1, seconds)
            speculation.lengths.record_step(drafting, 0.0, costs)
            return
        # For guesses, or for tokens that are fed once more because of them.
        start = time.perf_counter()
        seconds += self._settling
        typical = costs.seconds_of(columns)
        costs.observe(columns, seconds)
        speculation.stats.count(columns, token_count, seconds, drafting, tokens_per_row * costs.seconds_of(1))
        for draft, right, wrong in zip(self._drafts, verdict.right, verdict.wrong, strict=True):
            speculation.stats.record_verdict(draft, right, wrong)
            speculation.lengths.chances.learn(draft, right, wrong)
        speculation.lengths.record_step(drafting + min(seconds, _STALL * typical), tokens_per_row, costs)
        self._settling, self._drafting = 0.0, time.perf_counter() - start

    def _propose(self, decoder: Decoder, length: int) -> list[list[Guess]]:
        speculation = self._speculation
        limits = self._limits(decoder, length)
        if not any(limits):
            return self._no_drafts
        self.catch_up()
        start = time.perf_counter()
        drafts = speculation.proposer.propose([[] for _ in limits], limits)
        speculation.lengths.record_proposal(None if self._new else time.perf_counter() - start, sum(map(len, drafts)))
        self._new = False
        for row, limit in enumerate(limits):
            draft = drafts[row][:limit]
            drafts[row] = draft[: self._rows[row].count_allowed([guess.token for guess in draft])] if draft else draft
        if speculation.tokens is None and any(drafts):
            longest = speculation.lengths.to_check(drafts, list(map(len, self._texts)), self._costs)
            drafts = [draft[:longest] for draft in drafts]
        return drafts

    def _limits(self, decoder: Decoder, length: int) -> list[int]:
        """Return how long the draft of each row may be: up to ``length``, as states and the limit of the text allow."""
        limits = [0] * len(self._rows)
        for row, room in enumerate(decoder.room_for_drafts().tolist()):
            text, continuation = self._texts[row], self._rows[row]
            if 0 < len(text) <= _MAX_REPLAY:
                bounds = min(LONGEST, room) + 1 - len(text), continuation.limit - len(continuation.tokens) - 1
                limits[row] = max(0, min(length, self._longest, *bounds))
        return limits


def _check(session: Session, batch: int) -> None:
    interface = session.interface
    if not interface.past:
        raise InputError("a graph without a cache cannot check drafts", file=session.file, remedy="export it with one")
    if interface.last_logits == 1:
        raise InputError(
            "the model computes logits of the last position only, and drafts need those of each guess",
            file=session.file,
            tensor="logits",
            remedy=f"make it with --last-logits {LONGEST + 1}, or without that option",
        )
    if batch > 1 and not interface.has_pages:
        raise InputError(
            f"rows of a batch agree with different numbers of guesses, and this cache of {batch} rows grows by columns",
            file=session.file,
            remedy="add the step page_kv to the recipe, or run the prompts one by one",
        )
    check_drafts(interface.layers)
