"""What a model predicts after given states: log probabilities of the next tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from graphopt.inference.decoding.decoder import Decoder

PIECE = 16

Logs = npt.NDArray[np.float64]


def logs_behind(decoder: Decoder, ids: npt.NDArray[np.int64]) -> Logs:
    """Feed tokens [n] in pieces; return the log probabilities of the token after each, [n, vocabulary]."""
    logits = [
        np.array(decoder.step(ids[None, start : start + PIECE])[0], np.float64) for start in range(0, len(ids), PIECE)
    ]
    scores = np.concatenate(logits)
    scores -= scores.max(axis=1, keepdims=True)
    logs: Logs = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    return logs
