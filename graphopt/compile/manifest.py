"""The manifest of a model that a recipe made: stated when it is written, and again when it is verified."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphopt.analysis.structure.cost import weight_totals
from graphopt.artifact.hf_config import with_positions
from graphopt.artifact.manifest import Manifest, installed_versions
from graphopt.tasks.graph.task import RANDOM_STATISTICS
from graphopt.verification.kernels import KernelReport, quantized_products
from graphopt.verification.notes import OF_GRAPH, notes_of, precision_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnx_ir as ir

    from graphopt.artifact.artifact import Artifact
    from graphopt.graph.diagnostics import Check, Fact, PassReport
    from graphopt.passes.recipe import Recipe


def manifest_of(
    source: Artifact,
    model: ir.Model,
    recipe: Recipe,
    reports: Sequence[PassReport],
    checks: Sequence[Check],
    kernels: KernelReport | None,
) -> Manifest:
    """Return the manifest of ``model``, but for its files, which are known when they are written.

    Args:
        source: what it was made from.
        model: the model.
        recipe: what was applied.
        reports: what each pass of the recipe did.
        checks: what was proved or measured after them.
        kernels: how its quantized products run; ``None`` if it has none.
    """
    before = source.manifest
    earlier_notes = (note for note in before.notes if note.code not in OF_GRAPH)
    return Manifest(
        source=before.source,
        task=before.task,
        model=with_positions(before.model, model.metadata_props),
        notes=list(dict.fromkeys((*earlier_notes, *notes_of(model), *_of_statistics(reports)))),
        recipe=recipe.model_dump(mode="json"),
        passes=[*before.passes, *reports],
        checks=[*before.checks, *checks],
        weights=weight_totals(model),
        precision=precision_of(model, kernels, recipe),
        session=recipe.session_entries() if quantized_products(model.graph) else {},
        versions=before.versions | installed_versions(),
    )


def _of_statistics(reports: Sequence[PassReport]) -> list[Fact]:
    """Return what a reader should know of the inputs that statistics were collected on."""
    facts = (change.what for report in reports for change in report.changes)
    return list(dict.fromkeys(fact for fact in facts if fact.code == RANDOM_STATISTICS.code))
