"""How often a model gives the answers of the one it was made from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graphopt.errors import InputError
from graphopt.graph.diagnostics import Fact, Rule
from graphopt.inference.answers import best_span, question_answerer_of, text_shares
from graphopt.inference.session import open_folder
from graphopt.quality.judge import sentences_of
from graphopt.quality.texts import documentation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from graphopt.inference.classes import ClassifierSession, Text

ANSWERS = Rule("quality.answers", "{verdict}: divergence {kl:.4f} nats, same answer {same:.1%}, {texts} questions")


def answer_quality(
    reference: Path, artifact: Path, *, texts: Sequence[str] | None, **_reading: object
) -> dict[str, float]:
    """Return the figures of a model beside its reference; see :func:`answer_agreement`."""
    sentences = sentences_of(documentation() if texts is None else "\n".join(texts))
    session, original = (question_answerer_of(open_folder(file)) for file in (artifact, reference))
    return answer_agreement(session, original, sentences)


def answer_agreement(
    session: ClassifierSession, reference: ClassifierSession, sentences: Sequence[str]
) -> dict[str, float]:
    """Return how close the answers of a model are to those of its reference.

    The question is the first half of a sentence, and the text is the whole sentence.

    Args:
        session: the model.
        reference: what it was made from, with the same tokens.
        sentences: what to read; one that is longer than the model's positions is cut.

    Returns:
        ``kl_mean``, the mean divergence in nats of the probabilities of tokens to begin and to end the answer;
        ``same_first_choice``, the share of questions with the same answer; ``texts``.

    Raises:
        InputError: there is no sentence, or the two models have other tokenizers.
        GraphoptError: a logit is NaN or infinite.
    """
    if not sentences:
        raise InputError("there is no sentence", remedy="give a text with one sentence in a line")
    questions: list[Text] = [(sentence[: len(sentence) // 2], sentence) for sentence in sentences]
    encodings, reference_encodings = (model.encode(questions, cuts=True) for model in (session, reference))
    if [row.ids for row in encodings] != [row.ids for row in reference_encodings]:
        raise InputError(
            "the reference has another tokenizer: the two models read different tokens",
            file=reference.model.file.parent,
            remedy="give the artifact that the model was made from as the reference",
        )
    divergences, matches = [], []
    for encoding, after, before in zip(
        encodings, session.logits(encodings), reference.logits(reference_encodings), strict=True
    ):
        in_text = np.array([number == 1 for number in encoding.sequence_ids])
        shares = [text_shares(in_text, logits)[in_text] for logits in (before, after)]
        logarithms = [np.log(np.maximum(share, np.finfo(np.float64).tiny)) for share in shares]
        divergences.append((shares[0] * (logarithms[0] - logarithms[1])).sum(axis=0).mean())
        matches.append(best_span(encoding, before)[:2] == best_span(encoding, after)[:2])
    return {
        "kl_mean": float(np.mean(divergences)),
        "same_first_choice": float(np.mean(matches)),
        "texts": float(len(questions)),
    }


def describe_answer_quality(verdict: str, figures: Mapping[str, float]) -> Fact:
    """Return the sentence about the figures of :func:`answer_quality`."""
    return ANSWERS(
        verdict=verdict, kl=figures["kl_mean"], same=figures["same_first_choice"], texts=int(figures["texts"])
    )
