"""A model beside the one that it was made from, on the same tokens: what llama.cpp prints for ``--kl-divergence``.

The reference runs first, or beside other work; its log probabilities wait in a temporary file, so that memory need not
hold both models.
"""

from __future__ import annotations

import math
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from pydantic import BaseModel, ConfigDict

from graphopt.analysis.structure.products import reads_codes
from graphopt.artifact.artifact import MODEL
from graphopt.errors import InputError
from graphopt.inference.decoding.decoder import Decoder
from graphopt.inference.session import Session, open_folder, session_from
from graphopt.ort.session import entries_of_few_calls
from graphopt.quality.figures import Comparison, blocks, log_probabilities, standard_error
from graphopt.util.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from graphopt.tasks.ports import IntArray

WINDOW, TOKENS = 512, 1024
"""Tokens that are seen at once, and tokens that are scored, by default."""

_CHARACTERS = 16


class Quality(BaseModel):
    """How well a model does what its reference does, on text. Divergences are in nats per token.

    Attributes:
        tokens: tokens that were scored.
        bytes: UTF-8 bytes that they spell.
        window: tokens that the models saw at once.
        bits_per_byte: of the model.
        reference_bits_per_byte: of the reference.
        bits_per_byte_error: standard error of the difference of both.
        perplexity: of the model, by token.
        reference_perplexity: of the reference.
        kl_mean: mean Kullback-Leibler divergence of the model from the reference.
        kl_error: its standard error.
        kl_99: 99% of tokens are at or below it.
        kl_largest: the largest.
        same_first_choice: share of positions at which the likeliest token is the same.
        seconds: wall time of the model, without the reference.
    """

    model_config = ConfigDict(frozen=True)

    tokens: int
    bytes: int
    window: int
    bits_per_byte: float
    reference_bits_per_byte: float
    bits_per_byte_error: float
    perplexity: float
    reference_perplexity: float
    kl_mean: float
    kl_error: float
    kl_99: float
    kl_largest: float
    same_first_choice: float
    seconds: float


@dataclass(frozen=True)
class Piece:
    """One sequence of tokens that is fed by itself.

    Attributes:
        ids: the tokens; the first is a condition and is not scored.
        bytes: UTF-8 bytes of the others.
    """

    ids: IntArray
    bytes: int


@dataclass(frozen=True)
class ReferenceOutputs:
    """What a reference says about some texts.

    Attributes:
        texts: the texts.
        tokens: how many tokens of them were asked for.
        pieces: what was fed.
        window: tokens that were seen at once.
        log_probabilities: of each token that is scored, [tokens, vocabulary], in a temporary file.
    """

    texts: Sequence[str]
    tokens: int
    pieces: Sequence[Piece]
    window: int
    log_probabilities: npt.NDArray[np.float32]


def run_reference(
    reference: str | Path,
    texts: Sequence[str],
    *,
    tokens: int = TOKENS,
    window: int = WINDOW,
    on_stage: Progress = silent,
    is_stopped: Callable[[], bool] = lambda: False,
) -> ReferenceOutputs:
    """Run the reference of :func:`compare`; see there for the arguments and errors.

    Args:
        reference: see there.
        texts: see there.
        tokens: see there.
        window: see there.
        on_stage: see there.
        is_stopped: asked after each run of the model; where it says yes, the rest is left out, and nobody may read it.
    """
    first = _open(reference)
    width_ = min(bound for bound in (first.max_positions, window) if bound is not None)
    pieces = pieces_of(first, texts, tokens, width_)
    total = sum(len(piece.ids) - 1 for piece in pieces)
    if not total:
        raise InputError("the text is too short: no token of it can be predicted", remedy="give a longer text")
    # The mapping keeps the file, which has no name, as long as it is used.
    with tempfile.TemporaryFile(prefix="graphopt-reference-") as file:
        log_probs: npt.NDArray[np.float32] = np.memmap(file, np.float32, "w+", shape=(total, _width(first)))
    for begin, logits, _ in _logits(first, pieces, lambda count: on_stage("reference", count, total)):
        for rows in blocks(*logits.shape):
            log_probs[begin : begin + len(logits)][rows] = log_probabilities(logits[rows])
        if is_stopped():
            break
    return ReferenceOutputs(texts, tokens, pieces, width_, log_probs)


def compare(
    reference: str | Path | ReferenceOutputs,
    model: str | Path,
    texts: Sequence[str],
    *,
    tokens: int = TOKENS,
    window: int = WINDOW,
    on_stage: Progress = silent,
) -> Quality:
    """Compare a model with the one that it was made from.

    Args:
        reference: the artifact folder, or ``.onnx`` file, that the model was made from, or what it said about the same
            texts.
        model: the artifact folder, or ``.onnx`` file, of the model.
        texts: what they read; each gets an equal share of the tokens, from its beginning.
        tokens: tokens to score in all; fewer where the texts are shorter. A model that makes logits of the last
            position only is fed token by token.
        window: tokens that are seen at once, fewer where a model has fewer positions.
        on_stage: called when a stage begins, with tokens done, of all.

    Raises:
        InputError: one of them has no tokenizer or is no causal language model, they have another tokenizer or another
            vocabulary, or there is nothing to score.
    """
    options: dict[str, Any] = {"tokens": tokens, "window": window, "on_stage": on_stage}
    predictions = reference if isinstance(reference, ReferenceOutputs) else run_reference(reference, texts, **options)
    pieces, (total, width) = predictions.pieces, predictions.log_probabilities.shape
    second = _open(model)
    _check_same(second, pieces_of(second, predictions.texts, predictions.tokens, predictions.window), pieces, width)
    start, comparison = time.perf_counter(), Comparison()
    for begin, logits, targets in _logits(second, pieces, lambda count: on_stage("model", count, total)):
        comparison.add(np.asarray(predictions.log_probabilities[begin : begin + len(logits)]), logits, targets)
    seconds = time.perf_counter() - start
    return _quality(comparison, sum(piece.bytes for piece in pieces), predictions.window, seconds)


def _open(model: str | Path) -> Session:
    path = Path(model)
    file = path / MODEL if path.is_dir() else path
    return session_from(open_folder(model, entries=entries_of_few_calls(packs=_may_read_codes(file))))


def _may_read_codes(file: Path) -> bool:
    try:
        return reads_codes(ir.load(file).graph)
    except Exception:
        return True  # onnxruntime will report what is wrong with the file


def pieces_of(session: Session, texts: Sequence[str], tokens: int, window: int) -> list[Piece]:
    """Cut texts into sequences of at most ``window`` tokens, ``tokens`` to score in all.

    Each begins with the BOS token where the tokenizer has one, else its first token is not scored.
    """
    beginning, pieces = list(session.beginning[-1:]), []
    for text in texts:
        # No token spells more than a few characters on average; reading all of a long text takes longer than the model.
        text = text[: _CHARACTERS * max(1, tokens // len(texts))]
        encoding = session.tokenizer.encode(text, add_special_tokens=False) if session.tokenizer else None
        ids, offsets = (encoding.ids, encoding.offsets) if encoding is not None else ([], [])
        session.check_tokens(ids)
        end = min(len(ids), tokens // len(texts))
        size = max(1, window - len(beginning))
        for start in range(0, end, size):
            stop, first_scored = min(start + size, end), start + (not beginning)
            if stop <= first_scored:
                continue
            spelling = text[offsets[first_scored][0] : offsets[stop - 1][1]]
            pieces.append(Piece(np.array([*beginning, *ids[start:stop]], np.int64), len(spelling.encode("utf-8"))))
    return pieces


def _logits(
    session: Session, pieces: Sequence[Piece], say: Callable[[int], None]
) -> Iterator[tuple[int, npt.NDArray[Any], IntArray]]:
    """Yield, for runs of positions that are scored: how many came before, their logits, and the tokens that came."""
    count = 0
    for piece in pieces:
        decoder, inputs = Decoder(session, 1), piece.ids[None, :-1]
        runs: Iterable[tuple[int, npt.NDArray[Any]]] = decoder.feed(inputs)
        if session.interface.last_logits:
            runs = ((position, decoder.step(inputs[:, position : position + 1])) for position in range(inputs.shape[1]))
        for begin, logits in runs:
            say(count + begin)
            yield count + begin, logits[0], piece.ids[begin + 1 : begin + 1 + logits.shape[1]]
        count += inputs.shape[1]


def _check_same(model: Session, pieces: Sequence[Piece], reference_pieces: Sequence[Piece], width: int) -> None:
    if [piece.ids.tolist() for piece in pieces] != [piece.ids.tolist() for piece in reference_pieces]:
        raise InputError(
            "the two models have another tokenizer: they read different tokens",
            file=model.file.parent,
            remedy="compare a model with the one that it was made from",
        )
    if _width(model) != width:
        raise InputError(
            f"the reference has a vocabulary of {width} tokens, the model one of {_width(model)}", file=model.file
        )


def _width(session: Session) -> int:
    """Return the width of the logits; where the graph does not state it, one token is run."""
    return session.interface.vocabulary or Decoder(session, 1).step(np.zeros((1, 1), np.int64)).shape[-1]


def _quality(comparison: Comparison, size: int, window: int, seconds: float) -> Quality:
    reference_nats, nats, divergences, agreements = comparison.columns()
    per_bit = math.log(2) * size
    return Quality(
        tokens=len(nats),
        bytes=size,
        window=window,
        bits_per_byte=float(nats.sum()) / per_bit,
        reference_bits_per_byte=float(reference_nats.sum()) / per_bit,
        bits_per_byte_error=standard_error(nats - reference_nats) * len(nats) / per_bit,
        perplexity=_exp(float(nats.mean())),
        reference_perplexity=_exp(float(reference_nats.mean())),
        kl_mean=float(divergences.mean()),
        kl_error=standard_error(divergences),
        kl_99=float(np.quantile(divergences, 0.99)),
        kl_largest=float(divergences.max()),
        same_first_choice=float(agreements.mean()),
        seconds=seconds,
    )


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
