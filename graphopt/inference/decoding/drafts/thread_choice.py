"""Two models in turns on the same cores: how many threads the smaller one runs on.

The threads of a session go on spinning for a while when a run ends, so that the next one begins at once. In turns they
take the cores from the other model: on two cores both then take twice as long. A model that drafts therefore runs
either on one thread, which never waits for others, or on all, which stop when its run ends. Small models are as fast on
one, and so are those that wait for memory; it is measured at load, between steps of the model that checks, whose own
threads go on spinning: without drafts they pay.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from graphopt.inference.decoding.decoder import Decoder

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphopt.inference.session import Session
    from graphopt.ort.session import Entries

STOP = {"session.force_spinning_stop": "1"}
"""The session entry of onnxruntime by which threads stop spinning when a run ends."""

_BEGINNING = 4  # tokens before
_DRAFT = 3  # steps of the smaller model in a turn
_ROUNDS = (3, 10)
_PATIENCE = 0.1
"""Seconds after which no more than the least number of rounds is measured."""

_WORTH = 0.95
"""Of the time with one thread, that all threads must stay below."""


def in_turns(target: Session, opened: Callable[[int, Entries], Session]) -> Session:
    """Open a model that runs in turns with another one.

    Args:
        target: the other model, whose threads are asked for and which is run for the measurement.
        opened: opens the smaller model with so many threads, 0 for onnxruntime's choice, and with entries beside its
            own.

    Returns:
        The model with one thread or with as many as ``target`` has, whichever takes less time in turns.

    Raises:
        InputError: the model cannot be opened, or a step fails.
    """
    threads = target.inference.get_session_options().intra_op_num_threads
    if target.device != "cpu" or threads == 1:
        return opened(threads, {})
    alone = opened(1, {})
    if not all(_has_room(each) for each in (target, alone)):
        return alone
    together = opened(threads, STOP)
    seconds: list[list[float]] = [[], []]
    turns = [_Turn(target, each) for each in (alone, together)]
    for number in range(_ROUNDS[1]):
        for turn, found in zip(turns, seconds, strict=True):
            found.append(turn.seconds())
        if number + 1 >= _ROUNDS[0] and sum(map(sum, seconds)) > _PATIENCE:
            break
    medians = [float(np.median(found)) for found in seconds]
    return together if medians[1] < _WORTH * medians[0] else alone


def _has_room(session: Session) -> bool:
    room = session.max_positions
    return bool(session.interface.past) and (room is None or room > _BEGINNING + _DRAFT)


class _Turn:
    """Steps of the smaller model, token by token, and one of the other that checks them."""

    def __init__(self, target: Session, smaller: Session) -> None:
        self.smaller = smaller
        vocabulary = min(session.interface.vocabulary or 2 for session in (target, smaller))
        self._ids = np.random.default_rng(0).integers(0, vocabulary, (1, _BEGINNING + _DRAFT + 1))
        self._decoders = [Decoder(session, 1, expected=self._ids.shape[1]) for session in (target, smaller)]
        for decoder in self._decoders:
            decoder.step(self._ids[:, :_BEGINNING])
        self.seconds()

    def seconds(self) -> float:
        for decoder in self._decoders:
            decoder.rewind(_BEGINNING)
        checking, drafting = self._decoders
        began = time.perf_counter()
        for place in range(_BEGINNING, _BEGINNING + _DRAFT):
            drafting.step(self._ids[:, place : place + 1])
        checking.step(self._ids[:, _BEGINNING:])
        return time.perf_counter() - began
