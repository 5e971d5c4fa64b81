"""What each choice for each matrix costs: the divergence of the model in which that matrix alone is rounded.

For the coarsest choice it is measured. For the others it is taken to grow as the error of the product does,

    KL(choice) = KL(coarsest) loss(choice) / loss(coarsest),      loss = trace (W - Q)^T H (W - Q)

on a sample of the columns, rounded to nearest: what a rounding method takes off the loss, it takes off that of every
format, and it takes its time. Divergence is quadratic in a small error, so the factor is the curvature that the product
meets.

Of a mixture of experts the matrices that read the same rows are rounded at once, in one run for all experts, and the
divergence is shared out. H is a mean over the tokens of an expert, and n how many of all tokens reached it:

    KL(expert, choice) = KL(all, coarsest) n loss(choice) / sum over experts of n loss(coarsest)

so an expert counts as often as it is reached, told by the whole calibration text (the frequency of MC-MoE, Huang et
al., arXiv:2410.06270). An expert alone is seen on too few tokens of a run to be measured. One that few of all tokens
reached is not known to be cheap: it costs what a mean expert of its mixture costs.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from graphopt.compile.search.choices import Choice, name_of, stored_bytes
from graphopt.compile.search.jsonl import Lines
from graphopt.graph.weights import Inline
from graphopt.numerics.formats import format_of
from graphopt.ort.session import Array, ort_value
from graphopt.quality.figures import Comparison, log_probabilities
from graphopt.quantization.rounding.expressions import RoundingWithValues, parts_of
from graphopt.quantization.rounding.methods.nearest import NEAREST

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    import onnx_ir as ir
    import onnxruntime

    from graphopt.graph.weights import Expression, Part
    from graphopt.quantization.rounding import RoundingMethod
    from graphopt.quantization.rounding.scales import Scale
    from graphopt.tasks.ports import IntArray

    Text = tuple[Mapping[str, Array], IntArray]

Matrix = npt.NDArray[np.float32]
Sample = Literal["single", "all", "long", "held out"]
"""Which texts: those for single matrices, and for mixtures at first; all that a search reads; a longer one; others."""

_COLUMNS = 64


class Row(BaseModel):
    """One matrix in the database.

    Attributes:
        weight: its name.
        rows: its shape.
        columns: its shape.
        bytes: what it takes, by choice.
        losses: divergence in nats per token of the model in which it alone is rounded so, by choice: its share where it
            was measured with the other experts of a mixture.
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
class CalibratedMatrix:
    """A matrix, and what calibration saw of its inputs.

    Attributes:
        name: of the weight.
        matrix: [rows, columns].
        hessian: X^T X / tokens of its inputs, [rows, rows].
        tokens: how many reached it.
        is_rare: whether these are too few to tell what it costs.
    """

    name: str
    matrix: Matrix
    hessian: Array
    tokens: int
    is_rare: bool = False


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

    def rounded_matrix(self, matrix: Expression, hessian: Expression, choice: Choice, *, is_rare: bool = False) -> Part:
        """Return the rounded matrix as an expression, which a store keeps; to nearest where few tokens reached it."""
        if is_rare:
            return dataclasses.replace(self, method=NEAREST).rounded_matrix(matrix, hessian, choice)
        rounding = RoundingWithValues(
            matrix,
            format_of(choice.format),
            min(choice.group or matrix.shape[0], matrix.shape[0]),
            self.scale,
            half=True,
            standard=False,
            method=self.method,
            statistics=hessian if self.method.needs is not None else None,
        )
        return parts_of(rounding)["values"]

    def loss(self, matrix: Matrix, hessian: Array, choice: Choice) -> float:
        """Return trace (W - Q)^T H (W - Q) of a matrix rounded to nearest."""
        nearest = dataclasses.replace(self, method=NEAREST)
        values = nearest.rounded_matrix(Inline.from_array(matrix), Inline.from_array(hessian), choice).numpy()
        error = matrix.astype(np.float64) - values
        return float((error * (hessian.astype(np.float64) @ error)).sum())

    def rows(
        self, matrices: Sequence[CalibratedMatrix], choices: Sequence[Choice], divergence_of: Callable[[Choice], float]
    ) -> list[Row]:
        """Return what each choice for each of some matrices costs.

        Args:
            matrices: one, or those of all experts of a mixture that read the same rows.
            choices: formats.
            divergence_of: measures all of them in a format; it is called with the coarsest.
        """
        sizes = [
            {
                choice: stored_bytes(choice, *candidate.matrix.shape, has_level_scales=self.has_level_scales)
                for choice in choices
            }
            for candidate in matrices
        ]
        by_size = sorted(choices, key=sizes[0].__getitem__)
        divergence = divergence_of(by_size[0])
        losses = np.array([[self._loss_of_sample(candidate, choice) for choice in by_size] for candidate in matrices])
        losses *= np.array([[candidate.tokens] for candidate in matrices])
        is_rare = np.array([candidate.is_rare for candidate in matrices])
        losses[is_rare] = losses[~is_rare].mean(0) if not is_rare.all() else losses.mean(0)
        shares = losses / (losses[:, 0].sum() or 1.0)
        return [
            Row(
                weight=candidate.name,
                rows=candidate.matrix.shape[0],
                columns=candidate.matrix.shape[1],
                bytes={name_of(choice): size[choice] for choice in by_size},
                losses={name_of(choice): float(divergence * share) for choice, share in zip(by_size, row, strict=True)},
            )
            for candidate, size, row in zip(matrices, sizes, shares, strict=True)
        ]

    def _loss_of_sample(self, candidate: CalibratedMatrix, choice: Choice) -> float:
        sample = np.ascontiguousarray(candidate.matrix[:, :: max(1, candidate.matrix.shape[1] // _COLUMNS)])
        return self.loss(sample, candidate.hessian, choice)


class Replaceable:
    """A model whose matrices are inputs, so that any of them can be another one in the next run.

    Args:
        session: of what :func:`with_inputs` returns.
        weights: the matrices, by name.
        tables: token embeddings that are a matrix transposed, by the name of the matrix: they change with it.
        samples: texts that it is fed, by what they are for: inputs, and the tokens that come after each position.
    """

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        weights: Mapping[str, Matrix],
        tables: Mapping[str, Sequence[str]],
        samples: Mapping[Sample, Sequence[Text]],
    ) -> None:
        self._session, self._tables, self._samples = session, tables, samples
        self._values = self._values_of(weights)
        self._references: dict[Sample, list[Array]] = {}

    def divergence(self, replacements: Mapping[str, Matrix], sample: Sample) -> float:
        """Return the mean divergence from the model as it came, with some matrices replaced.

        Args:
            replacements: by name.
            sample: which texts the model reads.

        Returns:
            nats per token.
        """
        comparison, values = Comparison(), self._values_of(replacements)
        if sample not in self._references:
            self._references[sample] = [log_probabilities(self._logits({}, text)) for text in self._samples[sample]]
        for reference, text in zip(self._references[sample], self._samples[sample], strict=True):
            comparison.add(reference, self._logits(values, text), text[1])
        return float(comparison.columns()[2].mean())

    def _values_of(self, weights: Mapping[str, Matrix]) -> dict[str, onnxruntime.OrtValue]:
        """Return matrices, and the tables that change with them, as onnxruntime takes them."""
        values = {name: ort_value(np.ascontiguousarray(matrix)) for name, matrix in weights.items()}
        for name, tables in self._tables.items():
            if tables and name in weights:
                values |= dict.fromkeys(tables, ort_value(np.ascontiguousarray(weights[name].T)))
        return values

    def _logits(self, values: Mapping[str, onnxruntime.OrtValue], text: Text) -> Array:
        feeds, targets = text
        inputs = {name: ort_value(np.ascontiguousarray(array)) for name, array in feeds.items()}
        (logits,) = self._session.run_with_ort_values(["logits"], {**self._values, **values, **inputs})
        return np.asarray(logits.numpy()[0, : len(targets)])


def with_inputs(model: ir.Model, weights: Iterable[str]) -> ir.Model:
    """Return a copy of a model in which some initializers are inputs."""
    copy = model.clone()
    for name in weights:
        value = copy.graph.initializers.pop(name)
        value.const_value = None
        copy.graph.inputs.append(value)
    return copy
