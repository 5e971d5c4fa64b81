"""Answers to questions, each a part of a text: the likeliest pair of a token that begins it and one that ends it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from graphopt.errors import InputError
from graphopt.inference.classes import classifier_of
from graphopt.tasks.question_answering import QuestionAnswering

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenizers import Encoding

    from graphopt.inference.classes import ClassifierSession, Floats
    from graphopt.inference.session import OpenModel

LONGEST = 30
"""Tokens of an answer at most."""


@dataclass(frozen=True)
class Answer:
    """A part of a text.

    Attributes:
        text: the part.
        begin: its first character.
        end: the character behind its last one.
        probability: that of its first token times that of its last, among the tokens of the text.
    """

    text: str
    begin: int
    end: int
    probability: float


def question_answerer_of(model: OpenModel) -> ClassifierSession:
    """Return the model that was opened.

    Raises:
        InputError: it answers no questions.
    """
    session = classifier_of(model)
    if not isinstance(session.task, QuestionAnswering):
        raise InputError(
            f"this model is of the kind {session.task.name}, which answers no questions",
            file=model.file,
            remedy="graphopt.load_classifier opens it",
        )
    return session


def answers(session: ClassifierSession, questions: Sequence[tuple[str, str]]) -> list[Answer]:
    """Return the answer to each question.

    Args:
        session: as from :func:`question_answerer_of`.
        questions: pairs of a question and the text that it is about.

    Raises:
        InputError: see :meth:`ClassifierSession.encode`; or a text has no token.
    """
    encodings = session.encode(list(questions))
    return [
        _answer(text, encoding, logits)
        for (_, text), encoding, logits in zip(questions, encodings, session.logits(encodings), strict=True)
    ]


def best_span(encoding: Encoding, logits: Floats) -> tuple[int, int, float]:
    """Return the first and the last token of the likeliest answer, and its probability.

    Args:
        encoding: a pair of question and text.
        logits: [tokens, 2].

    Raises:
        InputError: the text has no token.
    """
    in_text = np.array([number == 1 for number in encoding.sequence_ids])
    if not in_text.any():
        raise InputError("the text that a question is about is empty", remedy="give QUESTION, a tab, and the text")
    shares = text_shares(in_text, logits)
    products = np.triu(np.outer(shares[:, 0], shares[:, 1]))
    products -= np.triu(products, LONGEST)
    first, last = np.unravel_index(products.argmax(), products.shape)
    return int(first), int(last), float(products.max())


def text_shares(in_text: npt.NDArray[np.bool_], logits: Floats) -> npt.NDArray[np.float64]:
    """Return the probabilities [tokens, 2] of beginning and end among the tokens of the text; 0 for all others."""
    numbers = np.where(in_text[:, None], logits.astype(np.float64), -np.inf)
    exponentials = np.exp(numbers - numbers.max(axis=0))
    shares: npt.NDArray[np.float64] = exponentials / exponentials.sum(axis=0)
    return shares


def _answer(text: str, encoding: Encoding, logits: Floats) -> Answer:
    first, last, probability = best_span(encoding, logits)
    begin, end = encoding.offsets[first][0], encoding.offsets[last][1]
    return Answer(text[begin:end], begin, end, probability)
