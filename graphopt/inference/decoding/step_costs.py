"""What a step of several tokens costs, and whether its logits are those of single tokens: measured at load.

A few tokens are fed one by one, and then 2, 4, 8 and 12 in a step, each from the same beginning: their times, and their
logits bit by bit. Our own kernels have the same bits by construction, which tests hold them to; of others, such as
onnxruntime's matrix products, that is found here, for one sample of tokens.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np

from graphopt.inference.decoding.decoder import Decoder

if TYPE_CHECKING:
    from graphopt.inference.session import Session
    from graphopt.tasks.ports import IntArray

WIDTHS = (1, 2, 4, 8, 12)
"""Tokens of a row in a step: what kernels for several rows are made for."""

LONGEST = WIDTHS[-1] - 1
"""Guesses in a draft, at most: one token of the text goes before them."""

_BEGINNING = 4  # tokens before, so that all that is measured lies in the first page
_ROUNDS = (3, 12)
_PATIENCE = 0.1
"""Seconds of a width's steps after which it is measured no more than the least number of rounds; the least time counts,
and short steps are often interrupted by other programs."""

_PACE = 0.1
"""How much a new time counts in what is known of a width."""


@dataclass
class Costs:
    """Seconds of a step by its width, kept up to date.

    Attributes:
        seconds: for each width of :data:`WIDTHS` that the model's positions allow.
        different: the widths whose logits differ from those of single tokens.
    """

    seconds: dict[int, float]
    different: tuple[int, ...] = ()
    _drift: float = field(default=1.0, init=False)  # what all widths have become slower by

    def __post_init__(self) -> None:
        widest = max(self.seconds)
        self._width = [next(width for width in self.seconds if width >= columns) for columns in range(widest + 1)]

    def seconds_of(self, columns: int) -> float:
        """Return the seconds of a step of so many columns: those of the next width that was measured."""
        if columns < len(self._width):  # asked several times a token
            return self.seconds[self._width[columns]] * self._drift
        return self.seconds[self._width[-1]] * self._drift * columns / self._width[-1]

    def observe(self, columns: int, seconds: float) -> None:
        """Take in the time of a step; contexts grow, and other programs come and go."""
        if columns >= len(self._width) or seconds <= 0:
            return
        # A single time may be far off: the machine was busy.
        wrong = min(1.0, max(-1.0, math.log(seconds / self.seconds_of(columns))))
        self._drift *= math.exp(_PACE * wrong)
        if columns in self.seconds:
            self.seconds[columns] *= math.exp(_PACE / 2 * wrong)


_costs_of_session: WeakKeyDictionary[object, dict[int, Costs]] = WeakKeyDictionary()


def costs_of(session: Session, batch: int) -> Costs:
    """Return what steps of a batch cost on a session; measured once for each size of batch.

    Args:
        session: the model, with logits of as many of the last positions as drafts need.
        batch: rows.

    Raises:
        InputError: a step fails.
    """
    of_session = _costs_of_session.setdefault(session.inference, {})
    if batch not in of_session:
        of_session[batch] = _measure(session, batch)
    return of_session[batch]


def _measure(session: Session, batch: int) -> Costs:
    widths = _widths(session)
    vocabulary = session.interface.vocabulary or 2
    ids = np.random.default_rng(0).integers(0, vocabulary, (batch, _BEGINNING + widths[-1]))
    decoder = Decoder(session, batch, room=ids.shape[1])
    decoder.step(ids[:, :_BEGINNING])
    decoder.keep()
    begin = decoder.tokens
    ids = ids[:, _BEGINNING:]
    singles = [_time_step(decoder, ids[:, column : column + 1]) for column in range(ids.shape[1])]
    seconds, different = {1: min(time_of_step for _, time_of_step in singles)}, []
    for width in widths[1:]:
        logits, seconds[width] = _time_width(decoder, begin, ids[:, :width])
        expected_logits = np.concatenate([step_logits for step_logits, _ in singles[:width]], axis=1)
        if not np.array_equal(expected_logits[:, -logits.shape[1] :], logits, equal_nan=True):
            different.append(width)
    return Costs(seconds, tuple(different))


def _widths(session: Session) -> list[int]:
    room = WIDTHS[-1] if session.max_positions is None else session.max_positions - _BEGINNING
    return [width for width in WIDTHS if width <= room] or [1]


def _time_width(decoder: Decoder, begin: IntArray, ids: IntArray) -> tuple[np.ndarray, float]:
    """Feed tokens in one step, some rounds from the same beginning; return the first logits and the least seconds."""
    steps: list[tuple[np.ndarray, float]] = []
    total = 0.0
    for count in range(1, _ROUNDS[1] + 1):
        decoder.rewind(begin)
        steps.append(_time_step(decoder, ids))
        seconds = steps[-1][1]
        total += seconds
        if total > _PATIENCE and count >= (_ROUNDS[0] if seconds < _PATIENCE else 1):
            break
    return steps[0][0], min(seconds for _, seconds in steps)


def _time_step(decoder: Decoder, ids: IntArray) -> tuple[np.ndarray, float]:
    start = time.perf_counter()
    logits = decoder.step(ids)
    seconds = time.perf_counter() - start
    return logits.copy(), seconds
