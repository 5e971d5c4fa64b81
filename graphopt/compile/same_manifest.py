"""A manifest that was made again against the one of an artifact: every field but those that no replay can make again.

What is left out is listed by :func:`left_out` and in :func:`_outline`, each with its reason.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from graphopt.errors import VerificationError
from graphopt.ort.session import ACCURACY_LEVEL
from graphopt.verification.kernels import FUSED, UNKNOWN, KernelReport, activations_of

if TYPE_CHECKING:
    from pathlib import Path

    import onnx_ir as ir

    from graphopt.artifact.manifest import Manifest, Precision
    from graphopt.graph.diagnostics import Check
    from graphopt.passes.recipe import Recipe

LEFT_OUT = {
    "versions.*": "which packages were installed",
    "passes.*.seconds": "how long a pass took",
    "files.*": "sizes and hashes, which were compared with the files",
    "checks of quality": "what was measured on text before the artifact was written",
}
"""Fields that are not compared, as patterns of their names, and why."""

JUDGED = ("quality",)
"""Checks that are not compared, see :data:`LEFT_OUT`."""

# Figures of a certificate that depend on the processor.
_MEASURED = ("seconds", "largest_share_of_rounding")
_BY_LEVEL = {"0": "float32", "4": "int8"}


def left_out(before: Manifest) -> dict[str, str]:
    """Return the fields of a manifest that are not compared, as patterns of their names, and why.

    Args:
        before: the manifest of the model before.
    """
    source = {} if before.files else {"source.name": "the path of a plain file, which may be given in another way now"}
    return LEFT_OUT | source


def confirm_manifest(made: Manifest, stored: Manifest, file: Path, before: Manifest) -> None:
    """Confirm that ``stored`` says what ``made`` says.

    Args:
        made: the manifest that the recipe, run again, gives; nothing was run for it.
        stored: the manifest of the artifact.
        file: where that is.
        before: the manifest of the model before.

    Raises:
        VerificationError: a field differs; names the first.
    """
    ours, theirs = (manifest.model_dump(mode="json") for manifest in (made, stored))
    first_new = len(before.checks)
    for said, manifest in ((ours, made), (theirs, stored)):
        new = [check for check in manifest.checks[first_new:] if check.name not in JUDGED]
        said["checks"][first_new:] = [_outline(check) for check in new]
    found = _first_difference(ours, theirs, "", [*left_out(before)])
    if found is not None:
        place, mine, other = found
        raise VerificationError(
            f"the recipe, run again, makes another manifest: {place} is {other} in the file, and {mine} is made",
            file=file,
            remedy="was it changed after it was made?",
        )


def recorded_kernels(
    unread: KernelReport, precision: Precision | None, made: ir.Model, recipe: Recipe, file: Path
) -> KernelReport:
    """Return how the manifest says that quantized products run, if the graph can be run so.

    Args:
        unread: what the graph says without being run.
        precision: what the manifest says.
        made: the model.
        recipe: what it was made by; its session entries decide to what onnxruntime's kernel rounds its inputs.
        file: the manifest.

    Raises:
        VerificationError: the manifest says of these products what cannot be.
    """
    said = precision.products if precision is not None else []
    own = [(each.operator, each.activations, each.count) for each in said if each.operator != FUSED]
    fused = [each for each in said if each.operator == FUSED]
    stated = [(each.operator, each.activations, each.count) for each in unread.products if each.operator != FUSED]
    expected = sum(each.count for each in unread.products if each.operator == FUSED)
    there = [node for node in made.graph if node.op_type == FUSED]
    possible = {UNKNOWN, _BY_LEVEL[recipe.session_entries()[ACCURACY_LEVEL]], *(activations_of(node) for node in there)}
    right = sum(each.count for each in fused) in (expected, expected + len(there))
    if own != stated or not right or not {each.activations for each in fused} <= possible:
        raise VerificationError("the graph has other products than precision.products says", file=file)
    return KernelReport(unread.check, tuple(sorted({each.activations for each in said})), said)


def _outline(check: Check) -> dict[str, Any]:
    """Return what a check says that does not depend on the processor, or on whether the model could be run."""
    outline: dict[str, Any] = {"name": check.name, "after": check.after, "run": check.run}
    if check.name != "certificate":
        ran = check.status in ("measured", "not covered")
        return outline | {"status": "measured or not covered" if ran else check.status}
    figures = {name: value for name, value in check.figures.items() if name not in _MEASURED}
    findings = [[each.node, each.tensor, each.status, each.reason.code] for each in check.findings]
    return outline | {"status": check.status, "figures": figures, "reason": check.reason.code, "findings": findings}


def _first_difference(made: Any, stored: Any, place: str, left_out: list[str]) -> tuple[str, str, str] | None:
    if made == stored or any(fnmatchcase(place, pattern) for pattern in left_out):
        return None
    if isinstance(made, dict) and isinstance(stored, dict):
        pairs = [(key, made.get(key), stored.get(key)) for key in dict.fromkeys([*made, *stored])]
    elif isinstance(made, list) and isinstance(stored, list) and len(made) == len(stored):
        pairs = [(str(index), *pair) for index, pair in enumerate(zip(made, stored, strict=True))]
    else:
        return place, _shown(made), _shown(stored)
    below = (_first_difference(mine, other, f"{place}.{key}".lstrip("."), left_out) for key, mine, other in pairs)
    return next((found for found in below if found is not None), None)


def _shown(value: Any) -> str:
    text = f"{len(value)} elements" if isinstance(value, list) else repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
