"""How close the embeddings of a model are to those of a reference: the cosine, text by text."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from graphopt.errors import InputError
from graphopt.tasks.encoder import cosines

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphopt.inference.embeddings.session import EncoderSession


class EmbeddingEvaluation(BaseModel):
    """Cosines between the embeddings of a model and of its reference.

    Attributes:
        texts: distinct lines that were embedded.
        tokens: of all of them, special ones included.
        cut: lines that were cut to the positions of the model.
        cosine_mean: the mean.
        cosine_1_percent: 1% of the texts are at or below it.
        cosine_smallest: the smallest.
        width: numbers of an embedding.
        seconds: wall time of the model, without the reference.
    """

    model_config = ConfigDict(frozen=True)

    texts: int
    tokens: int
    cut: int
    cosine_mean: float
    cosine_1_percent: float
    cosine_smallest: float
    width: int
    seconds: float


def cosine_matrix(embeddings: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Return the cosine of each embedding [texts, width] with each, [texts, texts]."""
    lengths = np.linalg.norm(embeddings, axis=1, keepdims=True).astype(np.float64)
    units = embeddings / np.maximum(lengths, np.finfo(np.float64).tiny)
    cosines_of_pairs: npt.NDArray[np.float64] = units @ units.T
    return cosines_of_pairs


def evaluate_embeddings(
    session: EncoderSession,
    reference: EncoderSession,
    text: str,
    on_progress: Callable[[int, int], None] | None = None,
) -> EmbeddingEvaluation:
    """Embed each distinct line of ``text`` that is not blank with both models, and compare.

    Args:
        session: the model.
        reference: what it was made from, with the same tokens.
        text: the lines; one that is longer than the model's positions is cut.
        on_progress: called with (embeddings made, embeddings in all).

    Raises:
        InputError: there is no line, or the two models have another tokenizer, another width or no tokenizer.
        GraphoptError: a hidden state is NaN or infinite.
    """
    lines = _lines(text)
    texts = [session.encode(line) for line in lines]
    if texts != [reference.encode(line) for line in lines]:
        raise InputError(
            "the reference has another tokenizer: the two models read different tokens",
            file=reference.file.parent,
            remedy="give the artifact that the model was made from as the reference",
        )
    bounds = [encoder.max_positions for encoder in (session, reference) if encoder.max_positions is not None]
    sequences = [_cut(ids, min(bounds)) for ids in texts] if bounds else texts

    def say(offset: int) -> Callable[[int, int], None]:
        return lambda count, total: None if on_progress is None else on_progress(offset + count, 2 * total)

    reference_embeddings = reference.embed_tokens(sequences, say(0))
    start = time.perf_counter()
    embeddings = session.embed_tokens(sequences, say(len(sequences)))
    seconds = time.perf_counter() - start
    if embeddings.shape != reference_embeddings.shape:
        raise InputError(
            f"the reference makes embeddings of {reference_embeddings.shape[1]} numbers, "
            f"the model of {embeddings.shape[1]}",
            file=reference.file,
            remedy="give the artifact that the model was made from as the reference",
        )
    values = cosines(reference_embeddings, embeddings)
    return EmbeddingEvaluation(
        texts=len(lines),
        tokens=sum(map(len, sequences)),
        cut=sum(len(ids) < len(before) for ids, before in zip(sequences, texts, strict=True)),
        cosine_mean=float(values.mean()),
        cosine_1_percent=float(np.quantile(values, 0.01, method="lower")),
        cosine_smallest=float(values.min()),
        width=embeddings.shape[1],
        seconds=seconds,
    )


def _lines(text: str) -> list[str]:
    lines = list(dict.fromkeys(line.strip() for line in text.splitlines() if line.strip()))
    if not lines:
        raise InputError("the text has no line to embed", remedy="give a text with one sentence in a line")
    return lines


def _cut(ids: list[int], length: int) -> list[int]:
    """Return at most so many tokens; the last one ends a text in BERT and its kin, so it stays."""
    return ids if len(ids) <= length else [*ids[: length - 1], ids[-1]]
