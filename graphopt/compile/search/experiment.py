"""Matrices alone, and mixtures of formats, measured by any process that sees the folder of an experiment."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from graphopt.compile.search.losses import CalibratedMatrix, Matrix, Replaceable, Rounder, Row, Sample
from graphopt.ort.session import open_session
from graphopt.util.processors import processors

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from graphopt.compile.search.choices import Choice
    from graphopt.compile.search.losses import Text
    from graphopt.graph.weights import Expression, Part, StoredBytes
    from graphopt.graph.weights.store import Store


@dataclass(frozen=True)
class Experiment:
    """What all matrices of a search share.

    Attributes:
        model: the file of a model whose matrices are inputs; its other weights stay where they are.
        weights: the matrices, by name.
        tables: token embeddings that are a matrix transposed and will be stored with it, by the name of the matrix;
            they are inputs of the model, too.
        units: the names of matrices that are measured at once: one, or those of all experts that read the same rows.
        hessians: X^T X / tokens of what each is multiplied with.
        tokens: how many of the calibration text each was multiplied with.
        rare: matrices of experts that few tokens reached, as ``fewest_tokens`` of the recipe says.
        samples: texts that the model is fed, by what they are for: inputs, and the tokens that come after each
            position.
        choices: formats.
        rounder: how matrices are rounded.
        store: where rounded matrices are kept.
    """

    model: str
    weights: Mapping[str, Expression]
    tables: Mapping[str, Sequence[str]]
    units: Sequence[Sequence[str]]
    hessians: Mapping[str, Expression]
    tokens: Mapping[str, int]
    rare: frozenset[str]
    samples: Mapping[Sample, Sequence[Text]]
    choices: Sequence[Choice]
    rounder: Rounder
    store: Store

    def rounded_matrix(self, name: str, choice: Choice) -> Part:
        """Return a matrix rounded to a format."""
        return self.rounder.rounded_matrix(self.weights[name], self.hessians[name], choice, is_rare=name in self.rare)

    def write(self, file: Path) -> None:
        """Write the experiment to a file."""
        file.write_bytes(pickle.dumps(self, protocol=5))


def measure(task: tuple[str, int]) -> list[Row]:
    """Return what each choice for each matrix of a unit costs.

    Args:
        task: the file of an experiment, and the number of the unit.
    """
    file, number = task
    experiment, weights, model = _open(file)
    names = experiment.units[number]

    def divergence_of(choice: Choice) -> float:
        parts = {name: experiment.store.obtain(experiment.rounded_matrix(name, choice)) for name in names}
        return model.divergence({name: part.numpy() for name, part in parts.items()}, "single")

    matrices = [
        CalibratedMatrix(
            name, weights[name], experiment.hessians[name].numpy(), experiment.tokens[name], name in experiment.rare
        )
        for name in names
    ]
    return experiment.rounder.rows(matrices, experiment.choices, divergence_of)


def judge(task: tuple[str, Mapping[str, StoredBytes], Sample]) -> float:
    """Return by how much a model of rounded matrices diverges, in nats per token.

    Args:
        task: the file of an experiment, all its matrices, rounded, and which texts the model reads.
    """
    file, matrices, sample = task
    _, _, model = _open(file)
    return model.divergence({name: matrix.numpy() for name, matrix in matrices.items()}, sample)


def close() -> None:
    """Forget the experiment that this process has open."""
    _open.cache_clear()


@lru_cache(maxsize=1)
def _open(file: str) -> tuple[Experiment, dict[str, Matrix], Replaceable]:
    experiment: Experiment = pickle.loads(Path(file).read_bytes())
    weights = {
        name: np.ascontiguousarray(expression.numpy(), np.float32) for name, expression in experiment.weights.items()
    }
    session = open_session(Path(experiment.model), threads=processors(), in_place=True)
    return experiment, weights, Replaceable(session, weights, experiment.tables, experiment.samples)
