"""A plain ``.onnx`` file becomes an artifact: the passes of the phase ``importing``, checked and recorded."""

from __future__ import annotations

import tempfile
from pathlib import Path

from graphopt.artifact import Artifact
from graphopt.checks.equivalence import Verifier
from graphopt.checks.steps import check_pass, run_passes
from graphopt.passes import imports_of
from graphopt.passes.context import Surroundings
from graphopt.progress import Progress, silent
from graphopt.tasks import task_of


def imported(source: Artifact, on_stage: Progress = silent) -> Artifact:
    """Return ``source`` behind the passes of the phase ``importing`` that its graph needs; itself where it needs none.

    Raises:
        InputError: onnxruntime cannot run the model as it is.
        VerificationError: a pass changed what the model computes.
    """
    passes = imports_of(source.model.graph)
    if not passes:
        return source
    model, manifest = source.model.clone(), source.manifest
    reports, checks = [], []
    with tempfile.TemporaryDirectory(prefix="graphopt-") as folder:
        verifier = Verifier(Path(folder), {})
        verifier.start(model)
        shared = Surroundings(task_of(model.graph), runner=verifier.runner)
        for ran in run_passes(model, passes, shared, earlier=manifest.passes, on_pass=lambda step: on_stage(step.name)):
            checks += check_pass(ran, verifier, ran.report.claims, on_stage=on_stage)
            reports.append(ran.report)
    passed = {"passes": [*manifest.passes, *reports], "checks": [*manifest.checks, *checks]}
    return Artifact(model, manifest.model_copy(update=passed), source.companions)
