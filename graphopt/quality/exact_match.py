"""Whether a model still completes short exercises: copying, looking up, adding, writing JSON; judged by exact match.

Divergence looks at one token behind a text that is given. What a model writes is read by itself, so one wrong token
spoils all that follow: a model of few bits may keep its likelihood and lose this.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from graphopt.inference.generation import generate
from graphopt.inference.session import load
from graphopt.quality.texts import documentation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

_NEW_TOKENS = 48
_EXAMPLES = 3
_ENTRIES = 6
_FIELDS = ("name", "module", "value")


@dataclass(frozen=True)
class Exercise:
    """What a model is to complete in one line.

    Attributes:
        prompt: some solved examples, and the beginning of one that is not.
        answer: what belongs behind it.
    """

    prompt: str
    answer: str


class _Text:
    """Words and sentences of the documentation of Python, drawn by a generator of random numbers."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        text = documentation()
        self._words = sorted(set(re.findall(r"\b[a-z]{4,9}\b", text)))
        lines = re.findall(r"[A-Z][a-z]+(?: [a-z]+){3,7}(?=[.,;:])", text)
        self._sentences = sorted(set(lines))

    def words(self, count: int) -> list[str]:
        return [str(word) for word in self.random.choice(self._words, count, replace=False)]

    def sentences(self, count: int) -> list[str]:
        return [str(line) for line in self.random.choice(self._sentences, count, replace=False)]

    def numbers(self, low: int, high: int, count: int) -> list[int]:
        return [int(number) for number in self.random.integers(low, high, count)]


def _copy(text: _Text) -> list[tuple[str, str]]:
    """Write a sentence again."""
    return [(f"Text: {line}\nCopy:", line) for line in text.sentences(_EXAMPLES + 1)]


def _lookup(text: _Text) -> list[tuple[str, str]]:
    """Find the number of a word in a list."""
    examples = []
    for _ in range(_EXAMPLES):
        words, numbers = text.words(_ENTRIES), text.numbers(10, 100, _ENTRIES)
        entries = "\n".join(f"{word} = {number}" for word, number in zip(words, numbers, strict=True))
        (index,) = text.numbers(0, _ENTRIES, 1)
        examples.append((f"{entries}\nThe value of {words[index]} is", str(numbers[index])))
    return examples


def _arithmetic(text: _Text) -> list[tuple[str, str]]:
    """Add two numbers below 50."""
    sums = np.reshape(text.numbers(2, 50, 2 * (2 * _EXAMPLES + 1)), (-1, 2)).tolist()
    return [(f"{first} + {second} =", str(first + second)) for first, second in sums]


def _json(text: _Text) -> list[tuple[str, str]]:
    """Write what a sentence says as JSON of a given schema."""
    examples = []
    for _ in range(_EXAMPLES + 1):
        (name, module), (value,) = text.words(2), text.numbers(1, 1000, 1)
        record = dict(zip(_FIELDS, (name, module, value), strict=True))
        schema = json.dumps({"name": "string", "module": "string", "value": "integer"})
        sentence = f"The constant {name} of the module {module} is {value}."
        examples.append((f"Schema: {schema}\nSentence: {sentence}\nJSON:", json.dumps(record)))
    return examples


KINDS: Mapping[str, Callable[[_Text], list[tuple[str, str]]]] = {
    "copy": _copy,
    "lookup": _lookup,
    "arithmetic": _arithmetic,
    "json": _json,
}
"""What makes the examples of each kind of exercise: questions with their answers."""


def exercises(kind: str, count: int, seed: int = 0) -> Iterator[Exercise]:
    """Yield exercises of a kind, made of the text that ships with Python; the same for the same seed.

    Args:
        kind: one of :data:`KINDS`.
        count: how many.
        seed: of what is drawn.

    Raises:
        FileNotFoundError: this Python was installed without the text.
    """
    text = _Text(seed)
    for _ in range(count):
        *examples, (question, answer) = KINDS[kind](text)
        beginning = "".join(f"{example} {solution}\n\n" for example, solution in examples)
        yield Exercise(beginning + question, answer)


def is_exact(kind: str, completion: str, answer: str) -> bool:
    """Return whether a completion is the answer; JSON may have other spaces."""
    line = completion.strip().split("\n")[0].strip()
    if kind != "json":
        return line == answer
    try:
        return bool(json.loads(line) == json.loads(answer))
    except json.JSONDecodeError:
        return False


def exact_matches(model: str | Path, count: int, kinds: Sequence[str] = tuple(KINDS)) -> dict[str, float]:
    """Return which share of exercises a causal language model completes exactly, greedily: ``exact_copy`` and so on.

    Args:
        model: its folder, or an ``.onnx`` file.
        count: exercises of each kind.
        kinds: which kinds.

    Raises:
        InputError: it is no causal language model, has no tokenizer, or too few positions.
        FileNotFoundError: this Python was installed without the text.
    """
    session, shares = load(model), {}
    for kind in kinds:
        matches = 0
        for exercise in exercises(kind, count):
            (completion,) = generate(session, exercise.prompt, max_new_tokens=_NEW_TOKENS, stop=["\n"])
            matches += is_exact(kind, completion.text or "", exercise.answer)
        shares[f"exact_{kind}"] = matches / count
    return shares
