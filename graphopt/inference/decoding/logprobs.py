"""Log probabilities of chosen tokens, and of those that the model found most likely in their place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from graphopt.errors import InputError

if TYPE_CHECKING:
    from graphopt.inference.session import Session

Floats = npt.NDArray[np.floating]


class Likely(BaseModel):
    """A token with its log probability.

    Attributes:
        token: its number.
        text: what it stands for, with U+FFFD for bytes that are no whole character; ``None`` without a tokenizer.
        logprob: natural logarithm of its probability.
    """

    model_config = ConfigDict(frozen=True)

    token: int
    text: str | None
    logprob: float


class TokenLogprob(Likely):
    """The token that was chosen, and the most likely ones in its place.

    The probabilities are those of the model: before temperature, ``top_k``, ``top_p`` and grammars.

    Attributes:
        top: the most likely tokens, the most likely first.
    """

    top: list[Likely]


def check_top(top: int | None) -> None:
    """Refuse a number of most likely tokens below 0.

    Raises:
        InputError: it is.
    """
    if top is not None and top < 0:
        raise InputError(
            f"logprobs cannot be {top}", remedy="give how many of the most likely tokens to list, from 0 up"
        )


def token_logprob(session: Session, logits: Floats, token: int, top: int) -> TokenLogprob:
    """Return the log probability of a token.

    Args:
        session: the model.
        logits: of one position, [vocabulary].
        token: the one that was chosen.
        top: how many of the most likely tokens to list.
    """
    values = logits.astype(np.float64)
    peak = values.max()
    values -= peak + np.log(np.exp(values - peak).sum())
    count = min(top, len(values))
    likely = np.argpartition(-values, count - 1)[:count] if count else np.empty(0, np.int64)
    # Equal ones in the order of the vocabulary.
    ranking = sorted(likely.tolist(), key=lambda candidate: (-values[candidate], candidate))
    return TokenLogprob(
        token=token,
        text=_text(session, token),
        logprob=float(values[token]),
        top=[
            Likely(token=candidate, text=_text(session, candidate), logprob=float(values[candidate]))
            for candidate in ranking
        ],
    )


def _text(session: Session, token: int) -> str | None:
    if session.tokenizer is None:
        return None
    return str(session.tokenizer.decode([token], skip_special_tokens=False))
