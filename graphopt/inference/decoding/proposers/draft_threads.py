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

_PREFIX = 4  # tokens before
_DRAFT = 3  # steps of the smaller model in a turn
_MIN_ROUNDS, _MAX_ROUNDS = 3, 10
_PATIENCE = 0.1
"""Seconds after which no more than the least number of rounds is measured."""

_WORTH = 0.95
"""Of the time with one thread, that all threads must stay below."""


def choose_threads(target: Session, open_with: Callable[[int, Entries], Session]) -> Session:
    """Open a model that runs in turns with another one, with the threads that suit both.

    Args:
        target: the other model, whose threads are asked for and which is run for the measurement.
        open_with: opens the smaller model with so many threads, 0 for onnxruntime's choice, and with entries beside its
            own.

    Returns:
        The model with one thread or with as many as ``target`` has, whichever takes less time in turns.

    Raises:
        InputError: the model cannot be opened, or a step fails.
    """
    threads = target.inference.get_session_options().intra_op_num_threads
    if target.device != "cpu" or threads == 1:
        return open_with(threads, {})
    single = open_with(1, {})
    if not (_has_room(target) and _has_room(single)):
        return single
    parallel = open_with(threads, STOP)
    times: tuple[list[float], list[float]] = [], []
    turns = _Turn(target, single), _Turn(target, parallel)
    for number in range(1, _MAX_ROUNDS + 1):
        for turn, seconds in zip(turns, times, strict=True):
            seconds.append(turn.seconds())
        if number >= _MIN_ROUNDS and sum(map(sum, times)) > _PATIENCE:
            break
    return parallel if np.median(times[1]) < _WORTH * np.median(times[0]) else single


def _has_room(session: Session) -> bool:
    room = session.max_positions
    return bool(session.interface.past) and (room is None or room > _PREFIX + _DRAFT)


class _Turn:
    """Steps of the smaller model, token by token, and one of the other that checks them."""

    def __init__(self, target: Session, smaller: Session) -> None:
        self.smaller = smaller
        vocabulary = min(session.interface.vocabulary or 2 for session in (target, smaller))
        self._ids = np.random.default_rng(0).integers(0, vocabulary, (1, _PREFIX + _DRAFT + 1))
        self._decoders = [Decoder(session, 1, room=self._ids.shape[1]) for session in (target, smaller)]
        for decoder in self._decoders:
            decoder.step(self._ids[:, :_PREFIX])
            decoder.keep()
        self.seconds()

    def seconds(self) -> float:
        for decoder in self._decoders:
            decoder.rewind(_PREFIX)
        checking, drafting = self._decoders
        start = time.perf_counter()
        for column in range(_PREFIX, _PREFIX + _DRAFT):
            drafting.step(self._ids[:, column : column + 1])
        checking.step(self._ids[:, _PREFIX:])
        return time.perf_counter() - start
