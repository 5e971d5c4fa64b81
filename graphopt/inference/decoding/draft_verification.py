"""Checking drafts: each position is sampled as plain decoding would, and a guess counts while it is what was sampled.

    fed:      anchor  g1    g2    g3          the newest token of the text, and a draft
    sampled:  t1      t2    t3                from the logits of each, in this order
    kept:     t1 = g1 t2 = g2 t3 != g3        t3 is the next anchor; g3 is taken back

A token is sampled from the same logits, with the same draw, as if it came alone. So the text depends on the model, the
prompt and the seed, and not on the drafts. That logits of several tokens in a step are the same to the bit as of one
is what :mod:`graphopt.inference.states.rollback` and :mod:`graphopt.inference.decoding.step_costs` look after.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from graphopt.inference.decoding.continuation import Continuation, StepOutput

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from graphopt.inference.decoding.decoder import Hidden, Logits
    from graphopt.tasks.ports import IntArray


@dataclass(frozen=True)
class Columns:
    """What is fed in one step.

    Attributes:
        ids: tokens [batch, columns], at the right of each row.
        mask: 1 for a token; ``None`` where all are.
        drafts: by row, the guesses among them: the last ones.
    """

    ids: IntArray
    mask: IntArray | None
    drafts: Sequence[Sequence[int]]

    @classmethod
    def from_rows(cls, texts: Sequence[Sequence[int]], drafts: Sequence[Sequence[int]]) -> Columns:
        """Return the columns of the tokens of each row, and its draft behind them; an empty row is padding."""
        rows = [[*text, *draft] for text, draft in zip(texts, drafts, strict=True)]
        width = max(map(len, rows))
        if min(map(len, rows)) == width:
            return cls(np.array(rows, np.int64), None, drafts)
        ids, mask = np.zeros((2, len(rows), width), np.int64)
        for number, row in enumerate(rows):
            if row:
                ids[number, -len(row) :] = row
                mask[number, -len(row) :] = 1
        return cls(ids, mask, drafts)

    @property
    def sample_count(self) -> int:
        """How many of the last positions are sampled from."""
        return 1 + max(map(len, self.drafts))


@dataclass
class Verdict:
    """What became of the drafts of a step.

    Attributes:
        sample_counts: by row, how many positions were sampled from; one more than guesses were right, unless the
            text ended.
        right: by row, how many guesses were right.
        wrong: by row, whether a guess was wrong.
    """

    sample_counts: list[int]
    right: list[int]
    wrong: list[bool]

    @classmethod
    def for_rows(cls, rows: Sequence[Continuation]) -> Verdict:
        """Return the verdict of a step before anything is sampled."""
        return cls([0] * len(rows), [0] * len(rows), [False] * len(rows))

    def check(
        self,
        rows: Sequence[Continuation],
        drafts: Sequence[Sequence[int]],
        logits: Logits,
        hidden: Hidden | None = None,
    ) -> Iterator[list[StepOutput]]:
        """Sample position by position, and yield by row what each position adds: nothing behind a wrong guess.

        Nothing is sampled before it is asked for: where the caller stops, the rows are as far as it has seen.

        Args:
            rows: the texts.
            drafts: guesses of each row.
            logits: of the last positions, [batch, positions, vocabulary].
            hidden: hidden states of the last positions [batch, positions, width], which rows then keep, where the
                model gives them.
        """
        number = len(rows)
        going = [row.stop_reason is None for row in rows]
        position = 0
        while position == 0 or any(going):
            outputs = [StepOutput()] * number
            for index, row in enumerate(rows):
                if not going[index]:
                    continue
                draft = drafts[index]
                offset = len(draft) + 1 - position  # positions from this one to the end
                if hidden is not None:
                    row.hidden = hidden[index, -offset]
                outputs[index] = output = row.step(logits[index, -offset])
                self.sample_counts[index] += 1
                if position < len(draft) and output.token is not None:
                    self.right[index] += output.token == draft[position]
                    self.wrong[index] = output.token != draft[position]
                going[index] = row.stop_reason is None and position < len(draft) and not self.wrong[index]
            position += 1
            yield outputs
