"""How well a model predicts a text: perplexity, and bits per byte, over sliding windows.

The text is one sequence s[0], s[1], ...; s[0] is the BOS token where the tokenizer adds one (the last, where it adds
several). It is cut into windows of equal length, each ``stride`` further on; of a window only those tokens are scored
that no earlier window scored:

    window 1   [s0 ............. s1023]              scores s1 .. s1024
    window 2          [s512 ............. s1535]     scores      s1025 .. s1536
    last                 [... moved back to be full] scores the rest

So each token but s[0] is scored exactly once, and, from the second window on, in sight of more than
``window - stride`` tokens.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from graphopt.errors import GraphoptError, InputError
from graphopt.inference.decoding.decoder import Decoder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from graphopt.inference.session import Session
    from graphopt.tasks.ports import IntArray

LARGEST_DEFAULT_WINDOW = 2048
"""Tokens; a model may have 100 000 positions, but few texts and little memory are meant for that."""

_UNKNOWN_POSITIONS_WINDOW = 1024
_WINDOWS_PER_RUN = 4
_BLOCK_BYTES = 1 << 19  # of the logits that are exponentiated together: they stay in a core's own cache


class Evaluation(BaseModel):
    """How well a model predicts a text.

    Attributes:
        tokens: tokens that were scored.
        bytes: UTF-8 bytes of the text that they spell.
        nats: their negative log likelihood, summed, in nats.
        perplexity: exp(nats / tokens).
        bits_per_byte: nats / ln 2 / bytes; comparable between tokenizers, and with a file compressor.
        window: tokens that the model saw at once.
        stride: tokens from one window to the next.
        seconds: wall time.
    """

    model_config = ConfigDict(frozen=True)

    tokens: int
    bytes: int
    nats: float
    perplexity: float
    bits_per_byte: float
    window: int
    stride: int
    seconds: float


@dataclass(frozen=True)
class Window:
    """Inputs s[start : start + length]; of its targets, one token further on, the last ``scored_targets`` count."""

    start: int
    length: int
    scored_targets: int


def plan(tokens: int, window: int, stride: int) -> list[Window]:
    """Cut a sequence of ``tokens`` tokens (at least 2) into windows; all have the same length, ``window`` if it fits.

    Raises:
        InputError: ``stride`` is not from 1 to ``window``.
    """
    if not 1 <= stride <= window:
        raise InputError(
            f"a stride of {stride} tokens does not fit a window of {window}", remedy="1 <= stride <= window"
        )
    targets = tokens - 1
    length = min(window, targets)
    windows = [Window(0, length, length)]
    while (end := windows[-1].start + length) < targets:
        start = min(windows[-1].start + stride, targets - length)
        windows.append(Window(start, length, start + length - end))
    return windows


def evaluate(
    session: Session,
    text: str,
    *,
    window: int | None = None,
    stride: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Score ``text``.

    Where the tokenizer adds no BOS token nothing predicts the first token: it is not scored, and the bytes of its
    characters are not counted.

    Args:
        session: the model, with a tokenizer.
        text: the text.
        window: tokens that are fed as one sequence; by default the model's positions, at most
            :data:`LARGEST_DEFAULT_WINDOW`; of a model that streams without end, the whole text.
        stride: tokens from one window to the next; half a window by default. A smaller one gives each token more
            context and takes longer.
        on_progress: called with (tokens scored, tokens in all).

    Raises:
        InputError: there is no tokenizer, nothing to score, no such window, or the model makes logits of the last
            position only.
        GraphoptError: the model's logits are NaN.
    """
    start = time.perf_counter()
    session.check_all_logits()
    sequence, size = _sequence(session, text)
    if window is None and session.endless:
        window = len(sequence)
    elif window is None:
        window = min(session.max_positions or _UNKNOWN_POSITIONS_WINDOW, LARGEST_DEFAULT_WINDOW)
    elif session.max_positions is not None and window > session.max_positions:
        raise InputError(
            f"a window of {window} tokens is wider than the model's {session.max_positions} positions",
            file=session.file,
            remedy="choose a smaller window",
        )
    stride = max(1, window // 2) if stride is None else stride
    windows = plan(len(sequence), window, stride)
    nats, count, total = 0.0, 0, len(sequence) - 1
    for first in range(0, len(windows), _WINDOWS_PER_RUN):
        batch = windows[first : first + _WINDOWS_PER_RUN]
        nats += _nats_of(session, sequence, batch)
        if not math.isfinite(nats):
            raise GraphoptError(
                "the model's logits are not finite",
                file=session.file,
                remedy="the weights or the precision are at fault: compare with the model it was made from",
            )
        count += sum(part.scored_targets for part in batch)
        if on_progress is not None:
            on_progress(count, total)
    return Evaluation(
        tokens=total,
        bytes=size,
        nats=nats,
        perplexity=_exp(nats / total),
        bits_per_byte=nats / math.log(2) / size,
        window=window,
        stride=stride,
        seconds=time.perf_counter() - start,
    )


def _sequence(session: Session, text: str) -> tuple[IntArray, int]:
    """Return the tokens, the first of which is only a condition, and the UTF-8 bytes that the others spell."""
    beginning = session.beginning
    assert session.tokenizer is not None  # or session.beginning had refused
    # Without what the tokenizer adds: an EOS token after the text is not part of it.
    encoding = session.tokenizer.encode(text, add_special_tokens=False)
    body = text if beginning else text[encoding.offsets[0][1] :] if encoding.ids else ""
    ids = np.array([*beginning[-1:], *encoding.ids], np.int64)
    if len(ids) < 2 or not body:
        raise InputError(
            "the text is empty" if not text else "the text is too short: no token of it can be predicted",
            remedy="give a longer text",
        )
    session.check_tokens(ids)
    return ids, len(body.encode("utf-8"))


def _nats_of(session: Session, sequence: IntArray, batch: Sequence[Window]) -> float:
    """Run windows of equal length side by side, and return the summed negative log likelihood of what they score."""
    length = batch[0].length
    inputs = np.stack([sequence[part.start : part.start + length] for part in batch])
    nats = 0.0
    for begin, logits in Decoder(session, len(batch)).feed(inputs):
        for row, part in enumerate(batch):
            skip = max(0, length - part.scored_targets - begin)
            targets = sequence[part.start + begin + 1 :][: logits.shape[1]]
            nats += float(negative_log_likelihood(logits[row, skip:], targets[skip:]).sum())
    return nats


def negative_log_likelihood(logits: npt.NDArray[Any], targets: IntArray) -> npt.NDArray[np.float64]:
    """Return -log softmax(logits)[target] in nats, by position.

    The exponentials and their sum are float32, relative to the largest logit, and the rest is float64; against a
    computation wholly in float64 the result is off by about 1e-6 nats at most, and by less on average.

    Args:
        logits: [positions, vocabulary].
        targets: the tokens that came, [positions].
    """
    result = np.empty(len(targets), np.float64)
    rows = max(1, _BLOCK_BYTES // (4 * logits.shape[-1]))
    for begin in range(0, len(targets), rows):
        # By blocks: the exponentials never leave the processor's cache, which is several times as fast.
        block = logits[begin : begin + rows].astype(np.float32, copy=False)
        target_logits = np.take_along_axis(block, targets[begin : begin + rows, None], axis=-1)[:, 0].astype(np.float64)
        peak = block.max(axis=-1, keepdims=True)
        with np.errstate(invalid="ignore"):  # infinite logits: the result is NaN, as it should be
            exponents = np.subtract(block, peak)
        total = np.exp(exponents, out=exponents).sum(axis=-1)
        result[begin : begin + rows] = np.log(total.astype(np.float64)) + peak[:, 0].astype(np.float64) - target_logits
    return result


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
