"""How well the shipped model predicts held-out text: what tools share that score its variants."""

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


def open_shipped_model(folder: Path, tokens: int) -> tuple[Session, HeldOut]:
    """Export the shipped model to ``folder``; return it and the first ``tokens`` tokens of the text, at most."""
    graphopt.export("stdlib_lm", folder)
    session = graphopt.load(folder)
    ids = np.array(session.encode(held_out_text())[:tokens], np.int64)
    return session, HeldOut(ids, len(session.decode(ids.tolist()).encode()) / len(ids))


def optimize_artifact(source: Path, target: Path, *steps: Step, run: bool = True) -> Session:
    """Apply ``steps`` to the artifact ``source``, write the artifact ``target``, and open it."""
    graphopt.optimize(source, Recipe(name=steps[-1].name, steps=steps), target, run=run)
    return graphopt.load(target)


def without_limit(session: Session) -> Session:
    """Return the model without its limit of positions, which is the length that it was trained on."""
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
    """Return the text in windows that overlap by half, each with the token after it."""
    return [ids[start : start + window + 1] for start in range(0, max(1, len(ids) - window // 2 - 1), window // 2)]


def nats_in_windows(session: Session, ids: IntArray, window: int) -> Nats:
    """Return the nats of every token but the first, each with half a window of context at least, where there is one."""
    nats = [np.empty(0)]
    for index, part in enumerate(windows(ids, window)):
        pieces = Decoder(session, 1).feed(part[None, :-1])
        part_nats = np.concatenate(
            [negative_log_likelihood(logits[0], part[start + 1 :][: logits.shape[1]]) for start, logits in pieces]
        )
        nats.append(part_nats if index == 0 else part_nats[window - window // 2 :])
    return np.concatenate(nats)
