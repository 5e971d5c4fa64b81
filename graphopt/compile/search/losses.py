"""What each choice for each matrix costs: the divergence of the model in which that matrix alone is rounded.

For the coarsest choice it is measured. For the others it is taken to grow as the error of the product does,

    KL(choice) = KL(coarsest) loss(choice) / loss(coarsest),      loss = trace (W - Q)^T H (W - Q)

on a sample of the columns, which do not know of one another. Divergence is quadratic in a small error, so the factor is
the curvature that the product meets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from graphopt.compile.search.choices import Choice, name_of, stored_bytes
from graphopt.compile.search.jsonl import Lines
from graphopt.numerics.formats import format_of
from graphopt.ort.session import Array, ort_value
from graphopt.quality.figures import Comparison, log_probabilities

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    import onnx_ir as ir

    from graphopt.quantization.rounding import QuantizedMatrix, RoundingMethod
    from graphopt.quantization.rounding.scales import Scale
    from graphopt.tasks.ports import IntArray

Matrix = npt.NDArray[np.float32]

_COLUMNS = 64


class Row(BaseModel):
    """One matrix in the database.

    Attributes:
        weight: its name.
        rows: its shape.
        columns: its shape.
        bytes: what it takes, by choice.
        losses: divergence in nats per token of the model in which it alone is rounded so, by choice.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    weight: str
    rows: int
    columns: int
    bytes: dict[str, int]
    losses: dict[str, float]


class Database(Lines[Row]):
    """What was measured of each matrix, by its name.

    Args:
        file: where the rows lie, see :class:`Lines`.
    """

    def __init__(self, file: Path) -> None:
        super().__init__(file, Row, lambda row: row.weight)


@dataclass(frozen=True)
class Rounder:
    """How a matrix is rounded.

    Attributes:
        method: the rounding method of the recipe.
        scale: how it chooses scales.
        has_level_scales: whether scales are stored as bytes.
    """

    method: RoundingMethod
    scale: Scale
    has_level_scales: bool = False

    def error(self, matrix: Matrix, hessian: Array, choice: Choice) -> tuple[Matrix, float]:
        """Return the rounded matrix, and its loss trace (W - Q)^T H (W - Q)."""
        group = min(choice.group or len(matrix), len(matrix))
        statistics = hessian if self.method.needs is not None else None
        codes: QuantizedMatrix = self.method.round(
            matrix, format_of(choice.format), group, self.scale, scale_type=np.float16, statistics=statistics
        )
        rounded_matrix = codes.dequantize().astype(np.float32)
        error = matrix.astype(np.float64) - rounded_matrix
        return rounded_matrix, float((error * (hessian.astype(np.float64) @ error)).sum())

    def row(self, name: str, matrix: Matrix, hessian: Array, choices: Sequence[Choice], model: Replaceable) -> Row:
        """Return what each choice for a matrix costs."""
        sizes = {
            choice: stored_bytes(choice, *matrix.shape, has_level_scales=self.has_level_scales) for choice in choices
        }
        by_size = sorted(choices, key=sizes.__getitem__)
        coarsest, _ = self.error(matrix, hessian, by_size[0])
        divergence = model.divergence({name: coarsest})
        sample = np.ascontiguousarray(matrix[:, :: max(1, matrix.shape[1] // _COLUMNS)])
        losses = [self.error(sample, hessian, choice)[1] for choice in by_size]
        first = losses[0] or 1.0
        return Row(
            weight=name,
            rows=matrix.shape[0],
            columns=matrix.shape[1],
            bytes={name_of(choice): sizes[choice] for choice in by_size},
            losses={name_of(c): divergence * loss / first for c, loss in zip(by_size, losses, strict=True)},
        )


class Replaceable:
    """A model whose matrices are inputs, so that any of them can be another one in the next run.

    Args:
        session: of what :func:`with_inputs` returns.
        weights: the matrices, by name.
        texts: what it is fed: inputs, and the tokens that come after each position.
    """

    def __init__(
        self,
        session: object,
        weights: Mapping[str, Matrix],
        texts: Sequence[tuple[Mapping[str, Array], IntArray]],
    ) -> None:
        self._session, self._texts = session, list(texts)
        self._weights = {name: ort_value(weight) for name, weight in weights.items()}
        self._reference = [log_probabilities(logits) for logits in self._logits({})]

    def divergence(self, replacements: Mapping[str, Matrix]) -> float:
        """Return the mean divergence from the model as it came, in nats per token, with some matrices replaced."""
        comparison = Comparison()
        for reference, logits, (_, targets) in zip(
            self._reference, self._logits(replacements), self._texts, strict=True
        ):
            comparison.add(reference, logits, targets)
        return float(comparison.columns()[2].mean())

    def _logits(self, replacements: Mapping[str, Matrix]) -> Iterator[Array]:
        weights = self._weights | {name: ort_value(np.ascontiguousarray(w)) for name, w in replacements.items()}
        for feeds, targets in self._texts:
            values = {name: ort_value(np.ascontiguousarray(array)) for name, array in feeds.items()}
            (logits,) = self._session.run_with_ort_values(["logits"], weights | values)  # type: ignore[attr-defined]
            yield logits.numpy()[0, : len(targets)]


def with_inputs(model: ir.Model, weights: Iterable[str]) -> ir.Model:
    """Return a copy of a model in which some initializers are inputs."""
    copy = model.clone()
    for name in weights:
        value = copy.graph.initializers.pop(name)
        value.const_value = None
        copy.graph.inputs.append(value)
    return copy
