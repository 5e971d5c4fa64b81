"""How the next token is chosen from the logits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from graphopt.artifact.hf_config import GENERATION_CONFIG, json_object
from graphopt.errors import GraphoptError, InputError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@dataclass(frozen=True)
class Sampling:
    """Rules by which the next token is drawn: first the temperature, then ``top_k``, then ``top_p``.

    Attributes:
        temperature: divides the logits; 0 always takes the most likely token.
        top_k: how many of the most likely tokens may be drawn; ``None`` for all.
        top_p: the fewest most likely tokens that together reach this probability may be drawn (the "nucleus" of
            Holtzman et al., 2020, arXiv:1904.09751).
        seed: of the random numbers; the same seed gives the same tokens.

    Raises:
        InputError: a value is out of range, or ``top_k`` or ``top_p`` is given at temperature 0, where it does nothing.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, good, remedy in (
            ("temperature", math.isfinite(self.temperature) and self.temperature >= 0, "give a number from 0 up"),
            ("top_k", self.top_k is None or self.top_k >= 1, "give a whole number from 1 up, or leave it out"),
            ("top_p", 0 < self.top_p <= 1, "give a number above 0 and up to 1"),
            ("seed", self.seed >= 0, "give a whole number from 0 up"),
        ):
            if not good:
                raise InputError(f"{name} cannot be {getattr(self, name)}", remedy=remedy)
        if self.temperature == 0 and (self.top_k is not None or self.top_p < 1):
            raise InputError(
                "top_k and top_p do nothing at temperature 0, where the most likely token is always taken",
                remedy="give a temperature, such as 0.8",
            )

    @classmethod
    def of_folder(cls, folder: Path, seed: int = 0) -> Sampling:
        """Return what a model's maker recommends in ``generation_config.json``; greedy where nothing is said.

        Raises:
            InputError: the file is not JSON, or a value is out of range.
        """
        config = json_object(folder / GENERATION_CONFIG)
        if not config.get("do_sample"):
            return cls(seed=seed)
        top_k = config.get("top_k") or None  # 0 is all
        return cls(config.get("temperature", 1.0), top_k, config.get("top_p", 1.0), seed)

    def stream(self, prompt: Sequence[int], occurrence: int = 0) -> np.random.Generator:
        """Return the random generator of one row.

        They depend on the seed and on the row's own prompt, never on its neighbours or its place in the batch.

        Args:
            prompt: the tokens of the prompt.
            occurrence: how many rows before this one have the same prompt, so that equal prompts get different answers.
        """
        return np.random.default_rng([self.seed, occurrence, *prompt])

    def probabilities(self, logits: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
        """Return the probability of each token to be drawn.

        Args:
            logits: of one position, [vocabulary].

        Raises:
            GraphoptError: the logits are NaN.
        """
        candidates, weights = self._likely(logits)
        probabilities = np.zeros(logits.shape)
        probabilities[candidates] = weights / weights.sum()
        return probabilities

    def _likely(self, logits: npt.NDArray[np.floating]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Return the tokens that may be drawn, in the order of the vocabulary, and their weights, above 0."""
        values = logits.astype(np.float64)
        peak = values.max()
        if not np.isfinite(peak):
            raise GraphoptError(
                f"the model's largest logit is {peak}, so no token can be chosen",
                remedy="the weights or the precision are at fault: compare with the model it was made from",
            )
        if self.temperature == 0:
            return np.array([values.argmax()]), np.ones(1)
        with np.errstate(over="ignore"):  # a tiny temperature overflows to -inf, as it should
            weights = np.exp((values - peak) / self.temperature)
        threshold = 0.0
        if self.top_k is not None and self.top_k < len(weights):
            likely = np.zeros(weights.shape, np.bool_)
            likely[np.argpartition(values, -self.top_k)[-self.top_k :]] = True
            weights[~likely] = 0
        if self.top_p < 1:
            # All tokens up to this weight together weigh half of what top_p leaves out: only the others are sorted.
            threshold = 0.5 * (1 - self.top_p) * weights.sum() / len(weights)
        candidates = np.flatnonzero(weights > threshold)
        total, weights = weights.sum(), weights[candidates]
        if self.top_p < 1:
            ranks = np.argsort(-values[candidates])  # of logits, which still differ where weights no longer do
            mass = np.cumsum(weights[ranks])
            # The fewest tokens that reach top_p: a token is dropped when those before it already reach it.
            count = 1 + int(np.count_nonzero(mass[:-1] < self.top_p * total))
            nucleus = np.sort(ranks[:count])
            candidates, weights = candidates[nucleus], weights[nucleus]
        return candidates, weights

    def choose(self, logits: npt.NDArray[np.floating], random: np.random.Generator) -> int:
        """Draw a token; it takes one number from ``random``, or none at temperature 0.

        Args:
            logits: of one position, [vocabulary].
            random: the row's random numbers, from :meth:`stream`.

        Raises:
            GraphoptError: the logits are NaN.
        """
        if self.temperature == 0:
            best = int(logits.argmax())
            # argmax takes NaN for the largest.
            if np.isfinite(logits[best]):
                return best
        candidates, weights = self._likely(logits)
        # In the order of the vocabulary, not of likelihood: logits that differ in the last bit then rarely change it.
        reach = np.cumsum(weights)
        index = int(np.searchsorted(reach, random.random() * reach[-1], side="right"))
        return int(candidates[min(index, len(candidates) - 1)])


GREEDY = Sampling()
"""Always the most likely token."""
