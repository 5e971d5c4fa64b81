"""Two models' predictions of the same tokens, compared position by position."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

_BLOCK_BYTES = 1 << 21


def log_probabilities(logits: npt.NDArray[Any]) -> Floats:
    """Return log softmax(logits) over the last axis, float32, in nats."""
    result = logits.astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):  # NaN stays NaN: the caller looks for it
        result -= result.max(axis=-1, keepdims=True)
        result -= np.log(np.exp(result).sum(axis=-1, keepdims=True))
    return result


@dataclass
class Comparison:
    """Figures of each position, gathered piece by piece.

    Attributes:
        reference_nats: nats that the reference spends on the token that came.
        model_nats: nats that the model spends on it.
        divergences: Kullback-Leibler divergence of the model from the reference, in nats.
        agreements: whether the likeliest token is the same.
    """

    reference_nats: list[Doubles] = field(default_factory=list)
    model_nats: list[Doubles] = field(default_factory=list)
    divergences: list[Doubles] = field(default_factory=list)
    agreements: list[npt.NDArray[np.bool_]] = field(default_factory=list)

    def add(self, reference: Floats, logits: npt.NDArray[Any], targets: npt.NDArray[np.int64]) -> None:
        """Compare some positions.

        KL(p || q) = sum p (ln p - ln q), with p the reference's distribution and q the model's. Terms are float32 and
        their sum is float64.

        Args:
            reference: log probabilities of the reference, [positions, vocabulary].
            logits: logits of the model, the same shape.
            targets: the tokens that came, [positions].
        """
        for rows in blocks(len(targets), logits.shape[-1]):
            p, q, targets_ = reference[rows], log_probabilities(logits[rows]), targets[rows, None]
            self.reference_nats.append(-np.take_along_axis(p, targets_, -1)[:, 0].astype(np.float64))
            self.model_nats.append(-np.take_along_axis(q, targets_, -1)[:, 0].astype(np.float64))
            chance = np.exp(p)
            # A token without a chance adds nothing, also where a mask made its logits infinite.
            with np.errstate(invalid="ignore"):
                terms = np.where(chance > 0, chance * (p - q), 0)
            self.divergences.append(np.maximum(terms.sum(axis=-1, dtype=np.float64), 0))
            self.agreements.append(p.argmax(-1) == q.argmax(-1))

    def columns(self) -> tuple[Doubles, Doubles, Doubles, npt.NDArray[np.bool_]]:
        """Return all figures, each [positions]."""
        return (
            _concatenate(self.reference_nats),
            _concatenate(self.model_nats),
            _concatenate(self.divergences),
            np.concatenate(self.agreements) if self.agreements else np.empty(0, bool),
        )


def _concatenate(parts: Sequence[Doubles]) -> Doubles:
    return np.concatenate(parts) if parts else np.empty(0)


def blocks(rows: int, width: int) -> Iterator[slice]:
    """Yield blocks of rows that stay in a core's own cache, or nearly."""
    size = max(1, _BLOCK_BYTES // (4 * width))
    return (slice(begin, begin + size) for begin in range(0, rows, size))


def standard_error(values: Doubles) -> float:
    """Return the standard error of the mean; neighbouring tokens are taken as independent, which they nearly are."""
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("nan")
