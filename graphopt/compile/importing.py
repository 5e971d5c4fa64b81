"""A plain ``.onnx`` file becomes an artifact: the passes of the phase ``importing``, checked and recorded."""

from __future__ import annotations

import tempfile
from pathlib import Path

from graphopt.analysis.structure.heads import ORIGIN
from graphopt.artifact.artifact import Artifact
from graphopt.compile.compilation import Compilation
from graphopt.passes.recipe import Recipe, imports_of
from graphopt.util.progress import Progress, silent


def import_artifact(source: Artifact, on_stage: Progress = silent) -> Artifact:
    """Return ``source`` behind the passes of the phase ``importing`` that its graph needs; itself where it needs none.

    Raises:
        InputError: onnxruntime cannot run the model as it is.
        VerificationError: a pass changed what the model computes.
    """
    if not imports_of(source.model.graph):
        return source
    with tempfile.TemporaryDirectory(prefix="graphopt-") as folder:
        recipe = Recipe(name="import", steps=(), activations="float32")
        compilation = Compilation(source, recipe, work=Path(folder), on_stage=on_stage)
        verifier = compilation.verifier(Path(folder))
        verifier.start(compilation.model)
        checks = compilation.apply_checked(compilation.of_phases("importing"), verifier, on_stage)
    del compilation.model.metadata_props[ORIGIN]  # the origin of a model is what was imported
    manifest = source.manifest
    additions = {"passes": [*manifest.passes, *compilation.reports], "checks": [*manifest.checks, *checks]}
    return Artifact(compilation.model, manifest.model_copy(update=additions), source.companions)
