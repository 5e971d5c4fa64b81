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
        kind: ``completing``: the model continues the first half of a held-out module's window. ``editing``: the prompt
            is the window, the text is the window with a name changed. The text is forced, as a model that edits well
            would write it: this measures costs and drafts, not this model's text. ``own editing``: the same prompt, and
            the model's own text.
        name: the module.
        prompt: its tokens.
        text_tokens: the tokens of the text, where it is forced.
    """

    kind: str
    name: str
    prompt: list[int]
    text_tokens: list[int] | None = None


class ForcedContinuation(Continuation):
    """A continuation of forced tokens; it samples all the same, so that a step takes as long as any other."""

    text_tokens: list[int]

    def step(self, logits: npt.NDArray[np.floating]) -> StepOutput:
        """Append the next forced token."""
        if self.stop_reason is not None:
            return StepOutput()
        self.settings.sampling.choose(logits, self.random)
        token = self.text_tokens[len(self.tokens)]
        self.tokens.append(token)
        if len(self.tokens) == min(self.limit, len(self.text_tokens)):
            self.stop_reason = "length"
        return StepOutput(token)


class OracleProposer(Proposer):
    """A drafter of a chosen acceptance rate: it knows the text, and errs at random.

    Args:
        text: the tokens of the text.
        chance: probability that a guess is right.
        wrong_token: a token that the text does not contain.
    """

    def __init__(self, text: Sequence[int], chance: float, wrong_token: int) -> None:
        self.text, self.chance, self.wrong_token = text, chance, wrong_token
        self.random = np.random.default_rng(0)

    def begin(self, rows: Sequence[Continuation]) -> None:
        """Begin with the one row whose text it knows."""
        (self.row,) = rows

    def propose(self, prefixes: Sequence[Sequence[int]], limits: Sequence[int]) -> list[list[Guess]]:
        """Return the next tokens of the text, some of them wrong."""
        next_tokens = self.text[len(self.row.tokens) : len(self.row.tokens) + limits[0]]
        right_guesses = self.random.random(len(next_tokens)) < self.chance
        return [
            [
                Guess(token if is_right else self.wrong_token, self.chance, "known")
                for token, is_right in zip(next_tokens, right_guesses, strict=True)
            ]
        ]

    def commit(self, row: int, tokens: Sequence[int]) -> None:
        """Do nothing: the row holds its tokens."""


def tokens_of(chance: float, length: int) -> float:
    """Return the expected tokens of a step that checks ``length`` guesses, each right by chance if those before are."""
    return sum(chance**index for index in range(length + 1))


def tasks(session: Session, window: int, modules: int) -> list[Task]:
    """Return the tasks of the first held-out modules that are long enough.

    Args:
        session: the model, whose tokenizer cuts them.
        window: tokens of a file.
        modules: how many.
    """
    chosen_tasks: list[Task] = []
    for name in HELD_OUT:
        text = (stdlib_folder() / f"{name}.py").read_text(encoding="utf-8")
        ids = session.encode(text)
        if len(ids) < 2 * window or len(chosen_tasks) >= 3 * modules:
            continue
        old = session.decode(ids[window // 2 : window // 2 + window])
        prompt = session.encode(f"{old}\n\n")
        chosen_tasks += [
            Task("completing", name, ids[:window]),
            Task("editing", name, prompt, session.encode(rename_identifier(old))[len(session.beginning) :]),
            Task(
                "own editing", name, [*prompt, *session.encode(rename_identifier(old))[len(session.beginning) :][:16]]
            ),
        ]
    return chosen_tasks


def rename_identifier(text: str) -> str:
    """Return a text with its most frequent name of four letters or more renamed everywhere."""
    names = Counter(_NAME.findall(text))
    if not names:
        return text
    name = max(sorted(names), key=names.__getitem__)
    return re.sub(rf"\b{name}\b", f"new_{name}", text)


def step_medians(session: Session, widths: Sequence[int], context: int = 64, rounds: int = 15) -> list[float]:
    """Return the median seconds of a step of each width after ``context`` tokens; widths take turns in each round."""
    ids = np.random.default_rng(0).integers(0, session.interface.vocabulary or 2, (1, context + max(widths)))
    decoder = Decoder(session, 1, room=ids.shape[1])
    decoder.step(ids[:, :context])
    samples: list[list[float]] = [[] for _ in widths]
    for _ in range(rounds):
        for seconds, width in zip(samples, widths, strict=True):
            decoder.rewind(context)
            begin = time.perf_counter()
            decoder.step(ids[:, context : context + width])
            seconds.append(time.perf_counter() - begin)
    return list(map(statistics.median, samples))


def write_text(
    session: Session, task: Task, tokens: int, sampling: Sampling = GREEDY, speculation: Speculation | None = None
) -> tuple[list[int], float]:
    """Write the text of a task; return its tokens and the seconds after the prompt."""
    row = start(session, task.prompt, Settings(tokens, sampling), name=task.name)
    if task.text_tokens is not None:
        row.__class__ = ForcedContinuation
        assert isinstance(row, ForcedContinuation)
        row.text_tokens = task.text_tokens
    drafts = None if speculation is None else speculation.start(session, [row])
    steps = run(Decoder(session, 1, room=room_for([row])), [row], np.array([task.prompt]), drafts=drafts)
    next(steps)
    begin = time.perf_counter()
    for _ in steps:
        pass
    return row.tokens, time.perf_counter() - begin
