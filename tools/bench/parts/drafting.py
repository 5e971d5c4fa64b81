"""Texts to measure drafts with: completing new text, and editing, where the prompt holds the old file."""

from __future__ import annotations

import re
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from graphopt.inference.decoding.continuation import Continuation, Settings, StepOutput, start
from graphopt.inference.decoding.decoder import Decoder
from graphopt.inference.decoding.proposers import Guess, Proposer
from graphopt.inference.decoding.sampling import GREEDY, Sampling
from graphopt.inference.decoding.speculation import Speculation
from graphopt.inference.generation import room_for, run
from graphopt.inference.session import Session
from graphopt.util.stdlib_text import HELD_OUT, stdlib_folder

_NAME = re.compile(r"\b[a-z_]{4,}\b")


@dataclass(frozen=True)
class Task:
    """One text to write.

    Attributes:
        kind: ``completing``: the model's own text behind the first half of a held-out module's window. ``editing``: the
            window itself with a name changed, behind the old one; it is given, as a model would write it that edits
            well, so only costs and drafts are measured, not what this model would say. ``own editing``: the same
            prompt, the model's own text.
        name: the module.
        prompt: its tokens.
        given: the tokens of the text, where it is given.
    """

    kind: str
    name: str
    prompt: list[int]
    given: list[int] | None = None


class Given(Continuation):
    """A continuation whose tokens are known; each is chosen all the same, so that a step costs what it costs."""

    given: list[int]

    def step(self, logits: npt.NDArray[np.floating]) -> StepOutput:
        """Take the next given token in."""
        if self.stop_reason is not None:
            return StepOutput()
        self.settings.sampling.choose(logits, self.random)
        token = self.given[len(self.tokens)]
        self.tokens.append(token)
        if len(self.tokens) == min(self.limit, len(self.given)):
            self.stop_reason = "length"
        return StepOutput(token)


class Known(Proposer):
    """A drafter of a given acceptance: it knows the text, and is wrong by chance.

    Args:
        text: the tokens that come.
        chance: of each guess to be right.
        wrong: a token that the text does not have.
    """

    def __init__(self, text: Sequence[int], chance: float, wrong: int) -> None:
        self.text, self.chance, self.wrong = text, chance, wrong
        self.random = np.random.default_rng(0)

    def begin(self, rows: Sequence[Continuation]) -> None:
        """Begin with the one row whose text it knows."""
        (self.row,) = rows

    def propose(self, prefixes: Sequence[Sequence[int]], limits: Sequence[int]) -> list[list[Guess]]:
        """Return what comes, with its errors."""
        coming = self.text[len(self.row.tokens) : len(self.row.tokens) + limits[0]]
        right = self.random.random(len(coming)) < self.chance
        return [
            [
                Guess(token if good else self.wrong, self.chance, "known")
                for token, good in zip(coming, right, strict=True)
            ]
        ]

    def commit(self, row: int, tokens: Sequence[int]) -> None:
        """Nothing: the row tells."""


def tokens_of(chance: float, length: int) -> float:
    """Return E, the tokens of a step that checks ``length`` guesses, each right by chance if those before it are."""
    return sum(chance**place for place in range(length + 1))


def tasks(session: Session, window: int, modules: int) -> list[Task]:
    """Return the tasks of the first held-out modules that are long enough.

    Args:
        session: the model, whose tokenizer cuts them.
        window: tokens of a file.
        modules: how many.
    """
    found: list[Task] = []
    for name in HELD_OUT:
        text = (stdlib_folder() / f"{name}.py").read_text(encoding="utf-8")
        ids = session.encode(text)
        if len(ids) < 2 * window or len(found) >= 3 * modules:
            continue
        old = session.decode(ids[window // 2 : window // 2 + window])
        prompt = session.encode(f"{old}\n\n")
        found += [
            Task("completing", name, ids[:window]),
            Task("editing", name, prompt, session.encode(edited(old))[len(session.beginning) :]),
            Task("own editing", name, [*prompt, *session.encode(edited(old))[len(session.beginning) :][:16]]),
        ]
    return found


def edited(text: str) -> str:
    """Return a text whose most frequent name of four letters or more is another one everywhere."""
    names = Counter(_NAME.findall(text))
    if not names:
        return text
    name = max(sorted(names), key=names.__getitem__)
    return re.sub(rf"\b{name}\b", f"new_{name}", text)


def step_medians(session: Session, widths: Sequence[int], context: int = 64, rounds: int = 15) -> list[float]:
    """Return the seconds of steps of so many tokens behind ``context`` others, medians of rounds in turn."""
    ids = np.random.default_rng(0).integers(0, session.interface.vocabulary or 2, (1, context + max(widths)))
    decoder = Decoder(session, 1, room=ids.shape[1])
    decoder.step(ids[:, :context])
    found: list[list[float]] = [[] for _ in widths]
    for _ in range(rounds):
        for seconds, width in zip(found, widths, strict=True):
            decoder.rewind(context)
            began = time.perf_counter()
            decoder.step(ids[:, context : context + width])
            seconds.append(time.perf_counter() - began)
    return list(map(statistics.median, found))


def written(
    session: Session, task: Task, tokens: int, sampling: Sampling = GREEDY, speculation: Speculation | None = None
) -> tuple[list[int], float]:
    """Write the text of a task; return its tokens and the seconds behind the prompt."""
    row = start(session, task.prompt, Settings(tokens, sampling), name=task.name)
    if task.given is not None:
        row.__class__ = Given
        assert isinstance(row, Given)
        row.given = task.given
    drafts = None if speculation is None else speculation.start(session, [row])
    steps = run(Decoder(session, 1, room=room_for([row])), [row], np.array([task.prompt]), drafts=drafts)
    next(steps)
    began = time.perf_counter()
    for _ in steps:
        pass
    return row.tokens, time.perf_counter() - began
