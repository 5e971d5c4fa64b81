"""How well the shipped model predicts text that it never saw: what the tools share that score its variants."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

import graphopt
from graphopt.inference.decoding.decoder import Decoder
from graphopt.inference.session import Session
from graphopt.passes.recipe import Recipe, Step
from graphopt.quality.evaluation import negative_log_likelihood
from graphopt.tasks.ports import IntArray
from graphopt.util.stdlib_text import held_out_text

Nats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class HeldOut:
    """The text, as tokens.

    Attributes:
        ids: the tokens, int64.
        bytes_of_token: UTF-8 bytes that a token has on average.
    """

    ids: IntArray
    bytes_of_token: float

    def bits_per_byte(self, nats: Nats) -> float:
        """Return bits per token over the bytes that a token has on average."""
        return float(nats.mean()) / math.log(2) / self.bytes_of_token


def shipped(folder: Path, tokens: int) -> tuple[Session, HeldOut]:
    """Export the shipped model to ``folder``; return it and the first ``tokens`` tokens of the text, at most."""
    graphopt.export("stdlib_lm", folder)
    session = graphopt.load(folder)
    ids = np.array(session.encode(held_out_text())[:tokens], np.int64)
    return session, HeldOut(ids, len(session.decode(ids.tolist()).encode()) / len(ids))


def optimized(source: Path, made: Path, *steps: Step, run: bool = True) -> Session:
    """Apply ``steps`` to the artifact ``source``, write the artifact ``made``, and open it."""
    graphopt.optimize(source, Recipe(name=steps[-1].name, steps=steps), made, run=run)
    return graphopt.load(made)


def without_limit(session: Session) -> Session:
    """Return the model such that nothing stops a sequence where its training did."""
    facts = session.manifest.model.model_copy(update={"max_positions": None})
    return replace(session, manifest=session.manifest.model_copy(update={"model": facts}))


def as_one(session: Session, ids: IntArray) -> tuple[Nats, int]:
    """Return the nats of every token but the first of one sequence, and the bytes of its cache in pages."""
    decoder = Decoder(session, 1)
    nats, largest = [], 0
    for begin, logits in decoder.feed(ids[None, :-1]):
        nats.append(negative_log_likelihood(logits[0], ids[begin + 1 :][: logits.shape[1]]))
        largest = max(largest, decoder.states.bytes)
    return np.concatenate(nats), largest


def windows(ids: IntArray, window: int) -> list[IntArray]:
    """Return the text in windows of half a window's distance, each with the token behind it."""
    return [ids[start : start + window + 1] for start in range(0, max(1, len(ids) - window // 2 - 1), window // 2)]


def nats_in_windows(session: Session, ids: IntArray, window: int) -> Nats:
    """Return the nats of every token but the first, each with half a window of context at least, where there is one."""
    nats = [np.empty(0)]
    for index, part in enumerate(windows(ids, window)):
        pieces = Decoder(session, 1).feed(part[None, :-1])
        scored = np.concatenate(
            [negative_log_likelihood(each[0], part[at + 1 :][: each.shape[1]]) for at, each in pieces]
        )
        nats.append(scored if index == 0 else scored[window - window // 2 :])
    return np.concatenate(nats)
