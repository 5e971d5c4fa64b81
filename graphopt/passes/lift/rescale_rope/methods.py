"""How each method chooses frequencies for longer contexts, from those that the model was trained with.

A rotary embedding of D = 2 n coordinates turns pair i of a token at position p by the angle p w_i, i = 0, ..., n - 1,
with w_i = b^(-2 i / D) in most models (RoFormer, Su et al. 2021). L is the trained length, s the factor by which it is
to grow. r_i = L w_i / (2 pi) is how often pair i goes round within L tokens: a pair with r_i < 1 has not shown the
angles that it has beyond L.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from graphopt.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphopt.passes.lift.rescale_rope.rescale_rope import RescaleRope

Radians = npt.NDArray[np.float64]
Positive = Annotated[float, Field(gt=0, lt=math.inf)]
Method = Literal["linear", "ntk", "yarn", "llama3", "longrope", "truncated"]

_SAME_BASE = 1e-5
"""How far frequencies may be from powers of one base, relative: they are float32, from a base that is float32."""


def linear(w: Radians, options: RescaleRope, trained_length: int | None) -> Radians:
    """Return w_i / s: position interpolation (Chen et al. 2023), by which token p is turned as token p / s was."""
    return w / options.factor


def ntk(w: Radians, options: RescaleRope, trained_length: int | None) -> Radians:
    """Return the frequencies of the base b s^(D / (D - 2)), which are w_i s^(-2 i / (D - 2)).

    The first pair is kept and the last divided by s ("NTK-aware scaled RoPE", bloc97 2023; YaRN, section 3.1).
    """
    return w * options.factor ** (-np.arange(len(w)) / max(1, len(w) - 1))


def yarn(w: Radians, options: RescaleRope, trained_length: int | None) -> Radians:
    """Return "NTK by parts" (YaRN, Peng et al. 2023, section 3.2), w_i (1 - g_i) + (w_i / s) g_i.

    g goes from 0 to 1 in a line between two pairs, as in the authors' code: the last whole i with r_i >= beta_fast, and
    the first with r_i <= beta_slow, where i is taken as a real number to find them:

        r_i = beta    at    i = D ln(L / (2 pi beta)) / (2 ln b)
    """
    length, base = _require_length(trained_length, "yarn"), _base_of(w)

    def pair(rotations: float) -> float:
        return len(w) * math.log(length / (2 * math.pi * rotations)) / math.log(base)

    low = max(math.floor(pair(options.beta_fast)), 0)
    # The authors cut this off at D - 1, not at the last pair.
    high: float = min(math.ceil(pair(options.beta_slow)), 2 * len(w) - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(len(w)) - low) / (high - low), 0, 1)
    return w * (1 - ramp) + w / options.factor * ramp


def llama3(w: Radians, options: RescaleRope, trained_length: int | None) -> Radians:
    """Return w_i (1 - g_i) + (w_i / s) g_i, where g goes from 0 to 1 in a line in r_i (Llama 3.1, 2024).

    g_i = (high_freq_factor - r_i) / (high_freq_factor - low_freq_factor), cut off at 0 and 1.
    """
    low, high = options.low_freq_factor, options.high_freq_factor
    if not low < high:
        raise InputError(
            f"the step rescale_rope has low_freq_factor {low} and high_freq_factor {high}",
            remedy="give a larger high_freq_factor",
        )
    rounds = _require_length(trained_length, "llama3") * w / (2 * math.pi)
    ramp = np.clip((high - rounds) / (high - low), 0, 1)
    return w * (1 - ramp) + w / options.factor * ramp


def longrope(w: Radians, options: RescaleRope, trained_length: int | None) -> Radians:
    """Return w_i / factors_i (LongRoPE, Ding et al. 2024, section 3.1)."""
    if len(options.factors) != len(w):
        raise InputError(
            f"the step rescale_rope has {len(options.factors)} factors for longrope, and a head turns {len(w)} pairs",
            remedy=f"give {len(w)} numbers, or let `graphopt search-rope` find them",
        )
    return w / np.asarray(options.factors, np.float64)


def truncate(w: Radians, options: RescaleRope, trained_length: int | None) -> Radians:
    """Return the truncated basis of Giraffe (Pal et al. 2023, section 3.3).

    Pairs with r_i >= kept stay; those with r_i <= stopped get the frequency 0, those between 2 pi constant / L. So no
    pair comes to an angle that training did not show. The authors' numbers are 1, 1/8 and 1/16.
    """
    length = _require_length(trained_length, "truncated")
    rounds = length * w / (2 * math.pi)
    slow = np.where(rounds <= options.stopped, 0.0, 2 * math.pi * options.constant / length)
    return np.where(rounds >= options.kept, w, slow)


METHODS: dict[Method, Callable[[Radians, RescaleRope, int | None], Radians]] = {
    "linear": linear,
    "ntk": ntk,
    "yarn": yarn,
    "llama3": llama3,
    "longrope": longrope,
    "truncated": truncate,
}

READS: dict[str, Method] = {
    "beta_fast": "yarn",
    "beta_slow": "yarn",
    "low_freq_factor": "llama3",
    "high_freq_factor": "llama3",
    "factors": "longrope",
    "first": "longrope",
    "kept": "truncated",
    "stopped": "truncated",
    "constant": "truncated",
}
"""Which method reads an option."""


def attention_factor(options: RescaleRope, trained_length: int | None) -> float:
    """Return what cosines and sines are multiplied by.

    Scores of the rotated coordinates grow by its square: softmax of more tokens is flatter (YaRN, section 3.4, where it
    is sqrt(1 / t); LongRoPE uses the formula of Phi-3).
    """
    if options.attention_factor is not None:
        return options.attention_factor
    if options.factor > 1 and options.method == "yarn":
        return 0.1 * math.log(options.factor) + 1
    if options.factor > 1 and options.method == "longrope":
        return math.sqrt(1 + math.log(options.factor) / math.log(_require_length(trained_length, "longrope")))
    return 1.0


def check(options: RescaleRope) -> None:
    """Refuse options that contradict one another, or that the method does not read.

    Raises:
        InputError: names the option.
    """
    for name, method in READS.items():
        if method != options.method and getattr(options, name) != type(options).model_fields[name].default:
            raise InputError(
                f"the step rescale_rope has the option {name}, which the method {options.method} does not read",
                remedy=f"leave it out, or choose the method {method}",
            )
    if options.factor == 1 and any(candidate != 1 for candidate in options.factors):
        raise InputError(
            "the step rescale_rope has the factor 1, which changes nothing, and factors for longrope that do",
            remedy="give the factor by which the context is to grow",
        )


def _require_length(trained_length: int | None, method: str) -> int:
    if trained_length is None:
        raise InputError(
            f"the step rescale_rope by {method} needs the length that the model was trained on, and nothing says it",
            remedy="give it: --set rescale_rope.trained=4096",
        )
    return trained_length


def _base_of(w: Radians) -> float:
    """Return b of w_i = b^(-i / n); a whole number where that fits as well.

    Raises:
        InputError: the frequencies are no powers of one number.
    """
    pairs = np.arange(len(w))
    base = 0.0
    if len(w) > 1 and (w > 0).all():
        # The slope of a line through the logarithms and 0.
        base = math.exp(-len(w) * float(np.log(w) @ pairs) / float(pairs @ pairs))
    for candidate in (float(round(base)), base):
        if candidate > 1 and np.allclose(w, candidate ** (-pairs / len(w)), rtol=_SAME_BASE, atol=0):
            return candidate
    raise InputError(
        "the step rescale_rope by yarn needs frequencies that are powers of one base, and those of the model are not",
        remedy="they may have been rescaled already: give the model as it was before, or choose another method",
    )
