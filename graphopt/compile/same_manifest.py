"""A manifest that was made again against the one of an artifact: every field but those that no replay can make again.

What is left out is listed by :func:`left_out` and in :func:`_outline`, each with its reason.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from graphopt.errors import VerificationError
from graphopt.ort.session import ACCURACY_LEVEL
from graphopt.passes.recipe import Recipe
from graphopt.verification.kernels import FUSED_PRODUCT, UNKNOWN, KernelReport, activations_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import onnx_ir as ir

    from graphopt.artifact.manifest import Manifest, Precision, ProductCount
    from graphopt.graph.diagnostics import Check

LEFT_OUT = {
    "versions.*": "installed packages",
    "passes.*.seconds": "how long a pass took",
    "files.*": "sizes and hashes, compared with the files",
    "parts.*": "other graphs, which are verified alone",
    "checks of quality": "measured on text before it was written",
}
"""Fields that are not compared, as patterns of their names, and why."""

QUALITY_CHECKS = ("quality",)
"""Checks that are not compared, see :data:`LEFT_OUT`."""

# Figures of a certificate that depend on the processor.
_PROCESSOR_FIGURES = ("seconds", "largest_share_of_rounding")
_BY_LEVEL = {"0": "float32", "4": "int8"}


def left_out(before: Manifest) -> dict[str, str]:
    """Return the fields of a manifest that are not compared, as patterns of their names, and why.

    Args:
        before: the manifest of the model before.
    """
    source = {} if before.files else {"source.name": "the path of a plain file, which may be given in another way now"}
    return LEFT_OUT | source


def confirm_manifest(new: Manifest, stored_manifest: Manifest, file: Path, before: Manifest) -> None:
    """Confirm that a manifest of an artifact says what the one that is made again says.

    Args:
        new: the manifest that the recipe, run again, gives; nothing was run for it.
        stored_manifest: the manifest of the artifact.
        file: where that is.
        before: the manifest of the model before.

    Raises:
        VerificationError: a field differs; names the first.
    """
    fields = [_comparable(manifest, len(before.checks)) for manifest in (new, stored_manifest)]
    difference = _first_difference(fields[0], fields[1], "", [*left_out(before)])
    if difference is not None:
        path, new_text, stored_text = difference
        raise VerificationError(
            f"the recipe, run again, makes another manifest: {path} is {stored_text} in the file, and {new_text} is "
            "made",
            file=file,
            remedy="was it changed after it was made?",
        )


def _comparable(manifest: Manifest, earlier_checks: int) -> dict[str, Any]:
    """Return the fields of a manifest: an outline of each check behind the earlier ones, the names of other graphs."""
    fields = manifest.model_dump(mode="json")
    checks = [check for check in manifest.checks[earlier_checks:] if check.name not in QUALITY_CHECKS]
    fields["checks"][earlier_checks:] = [_outline(check) for check in checks]
    if manifest.recipe is not None:
        # an option that is absent has its default: options of later passes change no artifact
        fields["recipe"] = Recipe.model_validate(manifest.recipe).model_dump(mode="json")
    fields["parts"] = ", ".join(sorted(manifest.parts))
    return fields


def recorded_kernels(
    unread: KernelReport, precision: Precision | None, model: ir.Model, recipe: Recipe, file: Path
) -> KernelReport:
    """Return how the manifest says that quantized products run, if the graph can be run so.

    Args:
        unread: what the graph says without being run.
        precision: what the manifest says.
        model: the model.
        recipe: what it was made by; its session entries decide to what onnxruntime's kernel rounds its inputs.
        file: the manifest.

    Raises:
        VerificationError: the manifest says of these products what cannot be.
    """
    products = [] if precision is None else precision.products
    own_products, fused_products = _split_products(products)
    graph_own, graph_fused = _split_products(unread.products)
    fused_nodes = [node for node in model.graph if node.op_type == FUSED_PRODUCT]
    level = _BY_LEVEL[recipe.session_entries()[ACCURACY_LEVEL]]
    is_possible = {product.activations for product in fused_products} <= {
        UNKNOWN,
        level,
        *map(activations_of, fused_nodes),
    }
    count, graph_count = (sum(product.count for product in part) for part in (fused_products, graph_fused))
    if own_products != graph_own or count not in (graph_count, graph_count + len(fused_nodes)) or not is_possible:
        raise VerificationError("the graph has other products than precision.products says", file=file)
    return KernelReport(unread.check, tuple(sorted({product.activations for product in products})), products)


def _split_products(products: Sequence[ProductCount]) -> tuple[list[ProductCount], list[ProductCount]]:
    """Return the products of operators of ours, and those of onnxruntime's fused one."""
    own_products, fused_products = (
        [product for product in products if (product.operator == FUSED_PRODUCT) is part] for part in (False, True)
    )
    return own_products, fused_products


def _outline(check: Check) -> dict[str, Any]:
    """Return what a check says that does not depend on the processor, or on whether the model could be run."""
    outline: dict[str, Any] = {"name": check.name, "after": check.after, "run": check.run}
    if check.name != "certificate":
        is_measurement = check.status in ("measured", "not covered")
        return outline | {"status": "measured or not covered" if is_measurement else check.status}
    figures = {name: value for name, value in check.figures.items() if name not in _PROCESSOR_FIGURES}
    findings = [[finding.node, finding.tensor, finding.status, finding.reason.code] for finding in check.findings]
    return outline | {"status": check.status, "figures": figures, "reason": check.reason.code, "findings": findings}


def _first_difference(new: Any, stored_value: Any, path: str, left_out: list[str]) -> tuple[str, str, str] | None:
    if new == stored_value or any(fnmatchcase(path, pattern) for pattern in left_out):
        return None
    pairs = _pairs(new, stored_value)
    if pairs is None:
        return path, _text_of(new), _text_of(stored_value)
    differences = (_first_difference(*pair, f"{path}.{key}".lstrip("."), left_out) for key, pair in pairs)
    return next((difference for difference in differences if difference is not None), None)


def _pairs(new: Any, stored_value: Any) -> list[tuple[str, tuple[Any, Any]]] | None:
    """Return the parts of two values by key or index; ``None`` where they do not have the same parts."""
    if isinstance(new, dict) and isinstance(stored_value, dict):
        return [(key, (new.get(key), stored_value.get(key))) for key in dict.fromkeys([*new, *stored_value])]
    if isinstance(new, list) and isinstance(stored_value, list) and len(new) == len(stored_value):
        return [(str(index), pair) for index, pair in enumerate(zip(new, stored_value, strict=True))]
    return None


def _text_of(value: Any) -> str:
    text = f"{len(value)} elements" if isinstance(value, list) else repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
