"""A plain ``.onnx`` file becomes an artifact: the passes of the phase ``importing``, checked and recorded."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphopt.artifact.artifact import Artifact
from graphopt.passes import imports_of
from graphopt.passes.context import Surroundings
from graphopt.tasks import task_of
from graphopt.util.progress import Progress, silent
from graphopt.verification.equivalence import Verifier
from graphopt.verification.steps import Checks, run_passes

if TYPE_CHECKING:
    from graphopt.passes.base import Pass


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
    reports = []
    with tempfile.TemporaryDirectory(prefix="graphopt-") as folder:
        verifier = Verifier(Path(folder), {})
        verifier.start(model)
        shared = Surroundings(task_of(model.graph), runner=verifier.runner)
        with Checks(verifier, on_stage) as checks:

            def begin(step: Pass[Any]) -> None:
                checks.before(step, model)
                on_stage(step.name)

            for ran in run_passes(model, passes, shared, earlier=manifest.passes, on_pass=begin):
                checks.behind(ran, ran.report.claims)
                reports.append(ran.report)
            found = checks.finish(model)
    passed = {"passes": [*manifest.passes, *reports], "checks": [*manifest.checks, *found]}
    return Artifact(model, manifest.model_copy(update=passed), source.companions)
