"""How close the texts of an encoder-decoder are to those of the one it was made from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graphopt.errors import InputError
from graphopt.graph.diagnostics import Fact, Rule
from graphopt.inference.seq2seq import Seq2SeqSession, SourceDecoder, load_seq2seq
from graphopt.quality.judge import sentences_of
from graphopt.quality.texts import documentation
from graphopt.tasks.seq2seq.encoder import recordings_port

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt

SOURCES = Rule(
    "quality.sources",
    "{verdict}: divergence {kl:.4f} nats, same first choice {same:.1%}, {tokens} tokens behind {sources}",
)
SENTENCES = Rule("quality.sentences", "{texts} sentences")
NOISE = Rule("quality.noise", "{texts} recordings of noise")

_BATCH = 8


def seq2seq_quality(
    reference: Path, artifact: Path, *, texts: Sequence[str] | None, **_reading: object
) -> dict[str, float]:
    """Return the figures of an encoder-decoder beside its reference; see :func:`text_agreement`."""
    sentences = sentences_of(documentation() if texts is None else "\n".join(texts))
    return text_agreement(load_seq2seq(artifact), load_seq2seq(reference), sentences)


def text_agreement(session: Seq2SeqSession, reference: Seq2SeqSession, sentences: Sequence[str]) -> dict[str, float]:
    """Return how close the logits of a model are to those of its reference.

    Each sentence is a source and the text that is made of it, token by token as it stands. Where sources are
    recordings, they are noise, so that what is measured is how the text goes on.

    Args:
        session: the model.
        reference: what it was made from, with the same tokenizer.
        sentences: what to read.

    Returns:
        ``kl_mean``, the mean divergence of the next token in nats; ``same_first_choice``, the share of positions with
        the same likeliest token; ``tokens``; ``texts``; ``is_noise``, 1 where sources are noise.

    Raises:
        InputError: there is no sentence, or no tokenizer.
    """
    if not sentences:
        raise InputError("there is no sentence", remedy="give a text with one sentence in a line")
    divergences, matches = [], []
    for begin in range(0, len(sentences), _BATCH):
        rows = [
            _logarithms(model, sentences[begin : begin + _BATCH], np.random.default_rng(begin))
            for model in (reference, session)
        ]
        before, after = rows
        divergences.append((np.exp(before) * (before - after)).sum(-1))
        matches.append(before.argmax(-1) == after.argmax(-1))
    return {
        "kl_mean": float(np.concatenate(divergences).mean()),
        "same_first_choice": float(np.concatenate(matches).mean()),
        "tokens": float(sum(map(len, matches))),
        "texts": float(len(sentences)),
        "is_noise": float(reference.reads_recordings),
    }


def _logarithms(
    session: Seq2SeqSession, sentences: Sequence[str], random: np.random.Generator
) -> npt.NDArray[np.float64]:
    """Return the logarithms of the probabilities of the next token, [tokens of all sentences, vocabulary]."""
    sequences = [
        [*session.beginning, *session.decoder.encode(sentence)][: session.decoder.max_positions]
        for sentence in sentences
    ]
    ids = np.zeros((len(sequences), max(map(len, sequences))), np.int64)
    real = np.zeros(ids.shape, bool)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)], real[row, : len(sequence)] = sequence, True
    if session.reads_recordings:
        port = recordings_port(session.encoder.inference.get_inputs())
        assert port is not None
        noise = random.standard_normal((len(sequences), *(size or 1 for size in port.shape[1:])))
        source = session.source_of_recordings(noise)
    else:
        source = session.source_of_texts(*session.encode(sentences))
    decoder = SourceDecoder(session.decoder, source, len(sequences))
    logits = np.concatenate([piece.astype(np.float64) for _, piece in decoder.feed(ids)], axis=1)[real]
    # A suppressed token has no probability in either model.
    logits -= logits.max(-1, keepdims=True)
    shares = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    finite: npt.NDArray[np.float64] = np.maximum(shares, np.log(np.finfo(np.float64).tiny))
    return finite


def describe_source_quality(verdict: str, figures: Mapping[str, float]) -> Fact:
    """Return the sentence about the figures of :func:`seq2seq_quality`."""
    sources = (NOISE if figures["is_noise"] else SENTENCES)(texts=int(figures["texts"]))
    return SOURCES(
        verdict=verdict,
        kl=figures["kl_mean"],
        same=figures["same_first_choice"],
        tokens=int(figures["tokens"]),
        sources=sources,
    )
