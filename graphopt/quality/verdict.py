"""One word for how good a compressed model is, and a requirement that it must meet to be written.

Where the words lie, by the mean divergence from the model as it came in (nats per token), with what is known to stand
there: llama.cpp's Q6_K has 0.002 on Llama-2-7B, Q4_K_M 0.013 there and 0.041 on SmolLM2-135M, IQ4_XS 0.113 on SmolLM2,
Q2_K 0.109 on Llama-2-7B. An embedding model has no such figure: there it is the mean cosine of embeddings.
"""

from __future__ import annotations

import math
import operator
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from graphopt.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Verdict = Literal["as good", "usable", "damaged", "broken"]

KL_AS_GOOD, KL_USABLE, KL_DAMAGED = 0.02, 0.15, 1.0
"""Mean divergence up to which a model is as good, usable, damaged; one beyond the last, or not finite, is broken."""

COSINE_AS_GOOD, COSINE_USABLE, COSINE_DAMAGED = 0.999, 0.99, 0.9
"""Mean cosine down to which an encoder is as good, usable, damaged."""

METRICS = {
    "kl": "kl_mean",
    "kl_99": "kl_99",
    "kl_largest": "kl_largest",
    "same_first_choice": "same_first_choice",
    "bits_per_byte": "bits_per_byte",
    "perplexity": "perplexity",
    "cosine": "cosine_mean",
    "rank_correlation": "rank_correlation",
    "relative_error": "relative_error",
    "same_class": "same_class_share",
    "same_numbers": "same_numbers_share",
}
"""What a requirement may name, and the figure that it means."""

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    "<": operator.lt,
    ">=": operator.ge,
    ">": operator.gt,
}
_FORM = re.compile(r"\s*(\w+)\s*(<=|<|>=|>)\s*(\S+?)\s*")


def verdict_of(figures: Mapping[str, float]) -> Verdict:
    """Return the word for figures of a causal language model (``kl_mean``) or an encoder (``cosine_mean``)."""
    words: tuple[Verdict, Verdict, Verdict] = ("as good", "usable", "damaged")
    if "cosine_mean" in figures:
        cosine = figures["cosine_mean"]
        bounds = zip((COSINE_AS_GOOD, COSINE_USABLE, COSINE_DAMAGED), words, strict=True)
        return next((word for bound, word in bounds if cosine >= bound), "broken")
    divergence = figures.get("kl_mean", math.nan)
    limits = zip((KL_AS_GOOD, KL_USABLE, KL_DAMAGED), words, strict=True)
    return next((word for bound, word in limits if divergence <= bound), "broken")


@dataclass(frozen=True)
class Requirement:
    """What the figures of a model must be, such as ``kl<0.05`` or ``kl<0.05, same_first_choice>=0.9``.

    Attributes:
        text: as it was given.
        terms: name of the figure, comparison and bound of each part.
    """

    text: str
    terms: tuple[tuple[str, str, float], ...]

    @classmethod
    def parse(cls, text: str) -> Requirement:
        """Read a requirement.

        Raises:
            InputError: it has another form, names no known figure, or a bound is no number.
        """
        terms = []
        for part in text.split(","):
            match = _FORM.fullmatch(part)
            bound = math.nan if match is None else _number(match[3])
            if match is None or math.isnan(bound) or match[1] not in METRICS:
                raise InputError(
                    f"the requirement {part.strip()!r} cannot be read",
                    remedy=f"say NAME<NUMBER, such as kl<0.05; names are {', '.join(METRICS)}",
                )
            terms.append((match[1], match[2], bound))
        return cls(text, tuple(terms))

    def unmet(self, figures: Mapping[str, float]) -> list[str]:
        """Return the parts that the figures do not meet, with what they are.

        Raises:
            InputError: it names a figure that this kind of model does not have.
        """
        failures = []
        for name, comparison, bound in self.terms:
            if METRICS[name] not in figures:
                names = [short for short, long in METRICS.items() if long in figures]
                raise InputError(f"this kind of model has no figure {name}", remedy=f"it has {', '.join(names)}")
            value = figures[METRICS[name]]
            if not _COMPARISONS[comparison](value, bound):
                failures.append(f"{name} is {value:.4g}, not {comparison} {bound:g}")
        return failures


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
