"""How often a classifier decides as the one it was made from, and a reranker ranks as it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from graphopt.errors import InputError
from graphopt.graph.diagnostics import Fact, Rule
from graphopt.inference.classes import ClassifierSession, load_classifier
from graphopt.quality.judge import sentences_of
from graphopt.quality.texts import documentation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from graphopt.inference.classes import Text

CLASSES = Rule("quality.classes", "{verdict}: divergence {kl:.4f} nats, same class {same:.1%}, {texts} sentences")
RANKINGS = Rule(
    "quality.rankings",
    "{verdict}: divergence {kl:.4f} nats, same best document {same:.1%}, rank correlation {correlation:.4f}, "
    "{texts} pairs",
)

_QUERIES = 4
Floats = npt.NDArray[np.float64]
Logits = npt.NDArray[np.float32]


def class_quality(
    reference: Path, artifact: Path, *, texts: Sequence[str] | None, **_reading: object
) -> dict[str, float]:
    """Return the figures of a classifier or reranker beside its reference; see :func:`class_agreement`."""
    sentences = sentences_of(documentation() if texts is None else "\n".join(texts))
    return class_agreement(load_classifier(artifact), load_classifier(reference), sentences)


def class_agreement(
    session: ClassifierSession, reference: ClassifierSession, sentences: Sequence[str]
) -> dict[str, float]:
    """Return how close the decisions of a model are to those of its reference.

    Of a classifier each sentence is a text. Of a reranker the first few sentences are queries and all others documents.

    Args:
        session: the model.
        reference: what it was made from, with the same tokens and classes.
        sentences: what to read; one that is longer than the model's positions is cut.

    Returns:
        ``kl_mean``, the mean divergence of the probabilities of classes in nats; ``same_first_choice``, the share of
        texts (tokens, queries) with the same likeliest class (best document); of a reranker ``rank_correlation``,
        the mean of Spearman's over queries; ``texts``.

    Raises:
        InputError: there are too few sentences, or the two models have other classes or other tokenizers.
        GraphoptError: a logit is NaN or infinite.
    """
    if reference.class_count != session.class_count or reference.task is not session.task:
        raise InputError(
            f"the reference has {reference.class_count} classes, the model {session.class_count}",
            file=reference.model.file,
            remedy="give the artifact that the model was made from as the reference",
        )
    is_reranker = session.class_count == 1 and not session.has_token_classes
    queries = min(_QUERIES, len(sentences) - 2) if is_reranker else 0
    if not sentences or (is_reranker and queries < 1):
        raise InputError("there are too few sentences", remedy="a classifier needs one, a reranker three")
    texts: list[Text] = list(sentences)
    if is_reranker:
        texts = [(query, document) for query in sentences[:queries] for document in sentences[queries:]]
    encodings = [model.encode(texts, cuts=True) for model in (reference, session)]
    if [row.ids for row in encodings[0]] != [row.ids for row in encodings[1]]:
        raise InputError(
            "the reference has another tokenizer: the two models read different tokens",
            file=reference.model.file.parent,
            remedy="give the artifact that the model was made from as the reference",
        )
    before, after = (
        np.concatenate([np.atleast_2d(row) for row in model.logits(rows)])
        for model, rows in zip((reference, session), encodings, strict=True)
    )
    figures = {"kl_mean": _divergence(before, after, session)}
    if is_reranker:
        ranks = [scores.reshape(queries, -1).astype(np.float64) for scores in (before, after)]
        matches = ranks[0].argmax(-1) == ranks[1].argmax(-1)
        figures["rank_correlation"] = float(np.mean([_spearman(*rows) for rows in zip(*ranks, strict=True)]))
    elif session.has_independent_classes:
        matches = (before > 0) == (after > 0)
    else:
        matches = before.argmax(-1) == after.argmax(-1)
    return figures | {"same_first_choice": float(matches.mean()), "texts": float(len(texts))}


def _divergence(before: Logits, after: Logits, session: ClassifierSession) -> float:
    """Return the mean KL divergence of logits [rows, classes] in nats; of an independent class with its complement."""
    shares = [session.probabilities(logits) for logits in (before, after)]
    if session.has_independent_classes:
        shares = [np.stack([share, 1 - share], axis=-1) for share in shares]
    tiny = np.finfo(np.float64).tiny
    logarithms = [np.log(np.maximum(share, tiny)) for share in shares]
    return float((shares[0] * (logarithms[0] - logarithms[1])).sum(-1).mean())


def _spearman(before: Floats, after: Floats) -> float:
    """Return Spearman's correlation of two rows of scores, 1 - 6 sum d^2 / (n (n^2 - 1)) with d the changes of ranks.

    It is 1 for one score. Ties take the order they come in.
    """
    ranks = [scores.argsort(kind="stable").argsort(kind="stable").astype(np.float64) for scores in (before, after)]
    count = before.size
    return 1.0 if count < 2 else float(1 - 6 * np.square(ranks[0] - ranks[1]).sum() / (count * (count**2 - 1)))


def describe_class_quality(verdict: str, figures: Mapping[str, Any]) -> Fact:
    """Return the sentence about the figures of :func:`class_quality`."""
    values = {
        "verdict": verdict,
        "kl": figures["kl_mean"],
        "same": figures["same_first_choice"],
        "texts": int(figures["texts"]),
    }
    if "rank_correlation" in figures:
        return RANKINGS(correlation=figures["rank_correlation"], **values)
    return CLASSES(**values)
