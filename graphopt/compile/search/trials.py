"""Measures matrices and judges mixtures, by any executor, what was measured before left out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from graphopt.compile.search.experiment import judge, measure
from graphopt.compile.search.mixtures import Judgement
from graphopt.graph.weights.evaluator import run_tasks, stage_of
from graphopt.util.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Executor

    from graphopt.compile.search.experiment import Experiment
    from graphopt.compile.search.losses import Database, Sample
    from graphopt.compile.search.mixtures import Judgements, Mixture
    from graphopt.graph.weights import StoredBytes
    from graphopt.graph.weights.evaluator import Evaluator


class Trials:
    """Runs the tasks of an experiment.

    Args:
        experiment: the experiment; its file is written beside its model.
        evaluator: rounds matrices into the experiment's store.
        executor: what runs tasks; ``None`` for this process.
        on_stage: called for each task.

    Attributes:
        judged_mixtures: mixtures that were judged, now or by a search that was cut off.
    """

    def __init__(
        self, experiment: Experiment, evaluator: Evaluator, executor: Executor | None, on_stage: Progress = silent
    ) -> None:
        self._experiment, self._evaluator, self._executor, self._on_stage = experiment, evaluator, executor, on_stage
        self._names = list(experiment.weights)
        self._file = str(Path(experiment.model).with_name("experiment"))
        experiment.write(Path(self._file))
        self._rounded_matrices: dict[tuple[str, int], StoredBytes] = {}
        self.judged_mixtures: set[Mixture] = set()

    def measure(self, database: Database) -> None:
        """Measure each matrix that is not in the database."""
        units = self._experiment.units
        tasks = [(self._file, number) for number, names in enumerate(units) if not set(names) <= database.rows.keys()]
        for _, rows in run_tasks(self._executor, measure, tasks):
            for row in rows:
                if row.weight not in database.rows:
                    database.add(row)
            stage = stage_of(f"rounding {rows[0].weight}", self._executor)
            self._on_stage(stage, len(database.rows), len(self._names))

    def judge(self, mixtures: Sequence[Mixture], judgements: Judgements, sample: Sample) -> list[float]:
        """Return the divergence of each mixture on some texts."""
        missing = [mixture for mixture in mixtures if judgements.key(mixture, sample) not in judgements.rows]
        self._round(missing)
        tasks = [(self._file, self._matrices_of(mixture), sample) for mixture in missing]
        for number, divergence in run_tasks(self._executor, judge, tasks):
            judgements.add(Judgement(mixture=missing[number], sample=sample, divergence=divergence))
        self.judged_mixtures.update(mixtures)
        return [judgements.rows[judgements.key(mixture, sample)].divergence for mixture in mixtures]

    def _matrices_of(self, mixture: Mixture) -> dict[str, StoredBytes]:
        return {name: self._rounded_matrices[name, choice] for name, choice in zip(self._names, mixture, strict=True)}

    def _round(self, mixtures: Sequence[Mixture]) -> None:
        """Round the matrices of mixtures that are not rounded yet."""
        pairs = (pair for mixture in mixtures for pair in zip(self._names, mixture, strict=True))
        missing = [pair for pair in dict.fromkeys(pairs) if pair not in self._rounded_matrices]
        choices = self._experiment.choices
        values = self._evaluator.values(
            [self._experiment.rounded_matrix(name, choices[number]) for name, number in missing],
            lambda count, total: self._on_stage(stage_of("rounding matrices", self._executor), count, total),
        )
        self._rounded_matrices |= dict(zip(missing, values, strict=True))
