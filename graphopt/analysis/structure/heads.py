"""What attention heads read in a measurement, and which of them are retrieval heads.

``graphopt heads`` measures (:mod:`graphopt.compile.calibration.heads`), the step ``sparse_kv`` uses the result. Both
meet here.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from graphopt.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

ORIGIN = "ai.graphopt.origin"
"""Key of a model's metadata: SHA-256 of the model that it was first made from, which every pass leaves as it is."""

Rank = Literal["razor", "mass"]

_ECHO_OF_ALL = 1 / 15
"""RazorAttention takes 1 echo head for 14 induction heads."""


class HeadScore(BaseModel):
    """Scores of one KV head, by which retrieval heads are found: the largest over the query heads that share it.

    Attributes:
        induction: share of attention on tokens that follow an earlier occurrence of the current one.
        echo: share of attention on earlier occurrences of the current token.
        lost: share of attention on real text that streaming does not read, mean over the query heads.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    induction: float = Field(ge=0, le=1)
    echo: float = Field(ge=0, le=1)
    lost: float = Field(ge=0, le=1)


class HeadScores(BaseModel):
    """The scores of a model's KV heads; the part of a calibration that a recipe needs.

    Attributes:
        origin: see :data:`ORIGIN`.
        layers: by the N of ``past_key_values.N``, a score for each KV head, without layers that have a window.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    origin: str
    layers: dict[int, tuple[HeadScore, ...]]

    def retrieval_heads(self, share: float, rank: Rank) -> set[tuple[int, int]]:
        """Return the retrieval heads as (layer, KV head), ``share`` of all, rounded up; of equal ones the first.

        Args:
            share: from 0 to 1.
            rank: "razor": those of the highest echo score, 1 in 15 of them rounded up, then those of the highest
                induction score (RazorAttention, Tang et al. 2024: 1% and 14% of all heads); "mass": those that lose
                most by streaming.
        """
        scores = {(number, head): score for number, layer in self.layers.items() for head, score in enumerate(layer)}
        count = math.ceil(share * len(scores) - 1e-9)

        def best(name: str, candidates: set[tuple[int, int]], limit: int) -> set[tuple[int, int]]:
            return set(sorted(candidates, key=lambda head: (-getattr(scores[head], name), head))[:limit])

        if rank == "mass":
            return best("lost", set(scores), count)
        heads = best("echo", set(scores), math.ceil(count * _ECHO_OF_ALL))
        return heads | best("induction", set(scores) - heads, count - len(heads))


class ReadPolicy(BaseModel):
    """What was measured of one policy.

    Attributes:
        attributes: of the operator ``KVAttention``: policies, sinks, recent and so on, as numbers and names.
        read: share of the tokens that a query sees which it reads, mean over all heads.
        kept: share of attention on these, mean over all heads.
    """

    attributes: dict[str, Any]
    read: float
    kept: float


class HeadFigures(BaseModel):
    """A KV head.

    Attributes:
        induction: see :class:`HeadScore`, of each query head.
        echo: see :class:`HeadScore`, of each query head.
        kept: by policy, the share of attention on what it reads, of each query head.
    """

    induction: tuple[float, ...]
    echo: tuple[float, ...]
    kept: dict[str, tuple[float, ...]]


class LayerFigures(BaseModel):
    """A layer: the N of its ``past_key_values.N``, and its KV heads."""

    number: int
    heads: tuple[HeadFigures, ...]


class Calibration(BaseModel):
    """What the heads of a model read of a text, and of random tokens that repeat.

    Attributes:
        format: version of this layout.
        origin: see :data:`ORIGIN`.
        model: what was measured.
        tokens: of the text that were run, in windows.
        window: tokens of a window.
        queries: of each head whose attention was measured on the text.
        block: random tokens that repeat.
        repeats: how often they stand in a sequence.
        policies: what was measured, by name; "streaming" is there.
        layers: the figures.
        windowed: layers that have a window of their own and were left out: they read no more than that already.
    """

    model_config = ConfigDict(extra="forbid")

    format: Literal[1] = 1
    origin: str
    model: str
    tokens: int
    window: int
    queries: int
    block: int
    repeats: int
    policies: dict[str, ReadPolicy]
    layers: tuple[LayerFigures, ...]
    windowed: tuple[int, ...] = ()

    @property
    def scores(self) -> HeadScores:
        """What a recipe needs of it."""
        layers = {
            layer.number: tuple(
                HeadScore(
                    induction=max(head.induction),
                    echo=max(head.echo),
                    lost=max(0.0, 1 - sum(head.kept["streaming"]) / len(head.kept["streaming"])),
                )
                for head in layer.heads
            )
            for layer in self.layers
        }
        return HeadScores(origin=self.origin, layers=layers)


def read_scores(file: Path) -> HeadScores:
    """Return the scores in a file that ``graphopt heads`` wrote.

    Raises:
        InputError: the file is not there, or not a calibration.
    """
    try:
        return Calibration.model_validate_json(file.read_text(encoding="utf-8")).scores
    except OSError as error:
        raise InputError(
            f"the calibration cannot be read: {error.strerror}", file=file, remedy="make it with `graphopt heads`"
        ) from error
    except (ValidationError, UnicodeDecodeError, KeyError) as error:
        raise InputError(
            f"the file is not a calibration of heads: {error}", file=file, remedy="make it with `graphopt heads`"
        ) from error
