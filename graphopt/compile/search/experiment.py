"""A matrix measured by any process that sees the folder: what the model is, and what it is fed, lies in a file."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from graphopt.compile.search.losses import Matrix, Replaceable, Rounder, Row
from graphopt.ort.session import open_session
from graphopt.util.processors import processors

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from graphopt.compile.search.choices import Choice
    from graphopt.graph.weights import Expression
    from graphopt.ort.session import Array
    from graphopt.tasks.ports import IntArray


@dataclass(frozen=True)
class Experiment:
    """What all matrices of a search share.

    Attributes:
        model: the file of a model whose matrices are inputs; its other weights stay where they are.
        weights: the matrices, by name.
        hessians: X^T X of what each is multiplied with.
        texts: what the model is fed: inputs, and the tokens that come after each position.
        choices: formats.
        rounder: how matrices are rounded.
    """

    model: str
    weights: Mapping[str, Expression]
    hessians: Mapping[str, Expression]
    texts: Sequence[tuple[Mapping[str, Array], IntArray]]
    choices: Sequence[Choice]
    rounder: Rounder

    def write(self, file: Path) -> None:
        """Write the experiment to a file."""
        file.write_bytes(pickle.dumps(self, protocol=5))


def measure(task: tuple[str, str]) -> Row:
    """Return what each choice for a matrix costs.

    Args:
        task: the file of an experiment, and the name of the matrix.
    """
    file, name = task
    experiment, weights, model = _open(file)
    hessian = experiment.hessians[name].numpy()
    return experiment.rounder.row(name, weights[name], hessian, experiment.choices, model)


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
    return experiment, weights, Replaceable(session, weights, experiment.texts)
