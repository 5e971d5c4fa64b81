"""All examinations on one file, and the recipe that mends what they found."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from graphopt.artifact import artifact as artifacts
from graphopt.compile.doctor.examination import EXAMINATIONS, Patient, Symptom
from graphopt.compile.pipeline import optimize
from graphopt.errors import InputError
from graphopt.graph.diagnostics import Check, Fact, Rule
from graphopt.passes.phases import CANONICAL_OPSETS
from graphopt.passes.recipe import Recipe
from graphopt.util.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Sequence

NOT_RUN = Rule("doctor.not-run", "it was not run: {why}")
NOT_ASKED = Rule("doctor.not-asked", "that was not asked for")
FAILURE = Rule("doctor.failed", "the examination {name} could not be made: {error}")

REPEATS = 7
"""Runs of each file, one after the other in turn, of which the fastest counts."""


class Diagnosis(BaseModel):
    """What was found.

    Attributes:
        model: the folder or file.
        bytes: of the graph and its weights on disk.
        symptoms: faults first, then hints.
        notes: what was not examined, and why.
    """

    model_config = ConfigDict(extra="forbid")

    model: str
    bytes: int
    symptoms: list[Symptom]
    notes: list[Fact] = []

    @property
    def faults(self) -> list[Symptom]:
        """What the file could do with less."""
        return [symptom for symptom in self.symptoms if symptom.level == "fault"]

    @property
    def bytes_saved(self) -> int:
        """By how much the steps of all symptoms make the file smaller."""
        return sum(symptom.bytes_saved or 0 for symptom in self.symptoms if symptom.steps)

    @property
    def steps(self) -> list[str]:
        """The passes that mend it."""
        return list(dict.fromkeys(step for symptom in self.symptoms for step in symptom.steps))


class Mending(BaseModel):
    """What became of a file.

    Attributes:
        before: what was found in it.
        after: what is found in the mended one.
        steps: the passes that were applied.
        checks: what was proved or measured of them.
        figures: how far the mended file is from the other, both as they run; none where they were not run.
        seconds_before: of one run of the file, the fastest; ``None`` where it was not run.
        seconds_after: of the mended one, in turn with the other.
    """

    model_config = ConfigDict(extra="forbid")

    before: Diagnosis
    after: Diagnosis
    steps: list[str]
    checks: list[Check]
    figures: dict[str, float] = {}
    seconds_before: float | None = None
    seconds_after: float | None = None


def diagnose(
    path: str | Path, *, inputs: str | Path | None = None, run: bool = True, on_stage: Progress = silent
) -> Diagnosis:
    """Examine a file.

    Args:
        path: an artifact or an ``.onnx`` file, of any maker.
        inputs: of a graph that reads no text, what it is fed; ``None`` for random inputs.
        run: whether to open and run it in onnxruntime; without it some examinations are left out, and named.
        on_stage: called with each examination.

    Raises:
        InputError: it cannot be read.
    """
    patient = Patient(Path(path), None if inputs is None else Path(inputs), run=run)
    symptoms: list[Symptom] = []
    notes = [] if patient.is_run else [NOT_RUN(why=patient.why_not or NOT_ASKED())]
    for number, (name, kind) in enumerate(EXAMINATIONS.items()):
        on_stage(name, number, len(EXAMINATIONS))
        if kind.runs and not patient.is_run:
            continue
        try:
            symptoms += kind().find(patient)
        except Exception as error:  # whatever onnxruntime or a pass raises on a file of any maker: the others go on
            notes.append(FAILURE(name=name, error=str(error).split("\n")[0]))
    symptoms.sort(key=lambda symptom: symptom.level != "fault")
    return Diagnosis(model=str(path), bytes=_bytes_of(Path(path)), symptoms=symptoms, notes=notes)


def mend(
    path: str | Path,
    output: str | Path,
    *,
    inputs: str | Path | None = None,
    overwrite: bool = False,
    on_stage: Progress = silent,
) -> Mending:
    """Examine a file, apply the passes that mend it, each proved or measured, and write the result.

    Args:
        path: an artifact or an ``.onnx`` file, of any maker.
        output: the folder to write.
        inputs: as for :func:`diagnose`.
        overwrite: whether an artifact at ``output`` may be replaced.
        on_stage: called when a stage begins.

    Raises:
        InputError: the file cannot be read, nothing in it can be mended, or the output is taken.
        VerificationError: a pass moved what the file computes; nothing was written.
    """
    path, output = Path(path), Path(output)
    artifacts.check_output(output, overwrite=overwrite)
    before = diagnose(path, inputs=inputs, on_stage=on_stage)
    if not before.steps:
        raise InputError(
            "no pass mends what is found in this file" if before.symptoms else "nothing is wrong with this file",
            file=path,
            remedy="`graphopt doctor` without --fix says what is found",
        )
    recipe = recipe_of(before.steps, artifacts.read(path).model.opset_imports.get("", 0))
    result = optimize(path, recipe, output, overwrite=overwrite, quality_tokens=0, inputs=inputs, on_stage=on_stage)
    after = diagnose(output, inputs=inputs, on_stage=on_stage)
    return Mending(
        before=before,
        after=after,
        steps=[step.name for step in recipe.steps],
        checks=result.manifest.checks,
        **_compare([path, output], None if inputs is None else Path(inputs)),
    )


def recipe_of(steps: Sequence[str], opset: int) -> Recipe:
    """Return the recipe of some passes; an older opset is raised first, since passes share one range of them."""
    recipe = Recipe(name="doctor", description="what graphopt doctor mends", steps=())
    if opset not in CANONICAL_OPSETS:
        recipe = recipe.adding("canonicalize")
    for step in steps:
        recipe = recipe.adding(step)
    return recipe


def _compare(paths: Sequence[Path], inputs: Path | None) -> dict[str, Any]:
    """Run two files in turn, on the same samples: figures of :class:`Mending`; none where one is not run."""
    first, second = (Patient(path, inputs) for path in paths)
    if not (first.is_run and second.is_run):
        return {}
    probe = first.probe
    before, after = probe.run(first.session), probe.run(second.session)
    before = probe.matching_rows(before, after)
    seconds: tuple[list[float], list[float]] = [], []
    for _ in range(REPEATS):
        for patient, times in zip((first, second), seconds, strict=True):
            start = time.perf_counter()
            probe.run(patient.session)
            times.append(time.perf_counter() - start)
    change = float(np.abs(after - before).max() / (np.abs(before).max() or 1))
    figures = {"largest_change": change, **probe.figures(before, after)}
    return {"figures": figures, "seconds_before": min(seconds[0]), "seconds_after": min(seconds[1])}


def _bytes_of(path: Path) -> int:
    """Return the bytes of the graph and its weights."""
    file = path / artifacts.MODEL if path.is_dir() else path
    data = [part for part in file.parent.iterdir() if part.is_file() and artifacts.is_data(part.name)]
    if not path.is_dir():
        data = [part for part in data if part.name.startswith(file.name)]
    return file.stat().st_size + sum(part.stat().st_size for part in data)
