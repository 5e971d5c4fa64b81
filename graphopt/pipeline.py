"""A recipe and a model in, an optimized model out: every pass is run, checked, and written down."""

from __future__ import annotations

import tempfile
from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes.common import NameFixPass

from graphopt import artifact as artifacts
from graphopt.analysis.cost import storage_formats, weight_totals
from graphopt.analysis.heads import ORIGIN
from graphopt.analysis.structure import makes_last_logits
from graphopt.artifact import Artifact
from graphopt.checks.equivalence import Verifier, context_of, prove
from graphopt.checks.kernels import FUSED, UNKNOWN, KernelReport, check_kernels, own_nodes, quantized_products
from graphopt.facts import Check, PassReport
from graphopt.genai import GENAI_CONFIG
from graphopt.manifest import Manifest, Precision, installed_versions
from graphopt.passes.lower.lower import Target
from graphopt.progress import Progress, silent
from graphopt.recipe import Recipe, load_recipe
from graphopt.runtime_ops import DOMAIN, OPERATORS
from graphopt.runtime_ops.round_trip.spec.op import ROUND_TRIP
from graphopt.weights import check_finite


def optimize(
    model: str | Path | Artifact,
    recipe: str | Path | Recipe = "rotate-int4",
    output: str | Path | None = None,
    *,
    target: Target | None = None,
    last_logits: bool = False,
    float16: bool = False,
    overwrite: bool = False,
    run: bool = True,
    on_stage: Progress = silent,
) -> Artifact:
    """Apply ``recipe`` to ``model``, check it pass by pass, and write it.

    Args:
        model: an artifact folder, an ``.onnx`` file, or what :func:`graphopt.read` made of one. It is not changed.
        recipe: the name of a preset, a YAML file, or a recipe.
        output: the folder to write; ``None`` keeps the result in memory and in a temporary folder that lives as long.
        target: what the model is to run on: the step ``lower`` of the recipe is for that, and is added where there is
            none, for any but ``portable`` with ``merge_products`` behind it. ``None`` leaves the recipe as it is.
        last_logits: add the step ``last_logits``: enough to generate, not to score a given text.
        float16: add the step ``float16``: compute in float16.
        overwrite: whether an artifact at ``output`` may be replaced.
        run: whether to run the model before and after each pass, where it fits into memory. Without it exact passes
            are still proved where they can be; the rest is reported as not covered.
        on_stage: called when a stage begins, with how many are done.

    Returns:
        The optimized model with its manifest. What each pass changed, and what it left alone and why, is in
        ``manifest.passes``; what was proved or measured after it in ``manifest.checks``.

    Raises:
        InputError: the model, the recipe or the output cannot be used.
        VerificationError: a check failed; nothing was written.
    """
    chosen = load_recipe(recipe)
    chosen = chosen.adding("last_logits") if last_logits else chosen
    chosen = chosen if target is None else chosen.lowered(target)
    chosen = chosen.adding("float16") if float16 else chosen
    if output is not None:
        artifacts.check_output(Path(output), overwrite=overwrite)
    source = model if isinstance(model, Artifact) else artifacts.read(model)
    folder = tempfile.TemporaryDirectory(prefix="graphopt-")
    graph = source.model.clone()

    passes = chosen.passes()
    total = len(passes) + 3
    on_stage("reading the weights", 0, total)
    check_finite(graph, None if isinstance(model, Artifact) else model)
    graph.metadata_props[ORIGIN] = artifacts.origin_of(source)
    on_stage("running the model as it is", 1, total)
    context = context_of(passes, source.manifest.model.max_positions)
    verifier = Verifier(Path(folder.name), chosen.session_entries(), run=run, context=context)
    verifier.start(graph)

    reports: list[PassReport] = []
    checks: list[Check] = []
    for done, step in enumerate(passes, start=2):
        on_stage(step.name, done, total)
        before = graph.clone()
        report = step(graph).report
        reports.append(report)
        if report.claims is not None:
            on_stage(f"proving {step.name}", done, total)
            checks.append(prove(before, graph, report.claims, step.name))
        on_stage(f"checking {step.name}", done, total)
        checks.append(verifier.check(graph, step.name, step.effect))

    NameFixPass()(graph)
    kernels: KernelReport | None = None
    if quantized_products(graph.graph) or own_nodes(graph.graph):
        on_stage("reading the graph that onnxruntime runs", total - 1, total)
        kernels = check_kernels(graph, verifier, chosen.session_entries())
        checks.append(kernels.check)

    manifest = Manifest(
        source=source.manifest.source,
        model=source.manifest.model,
        notes=list(dict.fromkeys([*source.manifest.notes, *notes_of(graph)])),
        recipe=chosen.model_dump(mode="json"),
        passes=[*source.manifest.passes, *reports],
        checks=[*source.manifest.checks, *checks],
        weights=weight_totals(graph),
        precision=precision_of(graph, kernels, chosen),
        session=chosen.session_entries() if quantized_products(graph.graph) else {},
        versions=source.manifest.versions | installed_versions(),
    )
    made = Artifact(graph, manifest, source.companions, keep=folder)
    if output is not None:
        made.manifest = artifacts.write(
            made, output, overwrite=overwrite, on_tensor=lambda done, of: on_stage("writing", done, of)
        )
    return made


def notes_of(model: ir.Model) -> list[str]:
    """Say what a user should know of the graph: operators of ours, an emulation, logits that are not made."""
    notes = []
    nodes = [node for node in own_nodes(model.graph) if node.op_type != ROUND_TRIP.name]
    ours = sorted({node.op_type for node in nodes})
    if ours:
        bodies = {(node.op_type, OPERATORS[node.op_type].overload_of(node)) for node in nodes}
        which = "any onnxruntime runs the bodies that they carry"
        if len(bodies) > len(ours):
            which = (
                "an onnxruntime that tells several bodies of one operator apart runs them (1.31 does, 1.24 does not)"
            )
        notes.append(
            f"operators of {DOMAIN} ({', '.join(ours)}): {which}; for kernels register graphopt's library, by "
            "SessionOptions.register_custom_ops_library or as custom_ops_library among the session_options of "
            f"{GENAI_CONFIG}"
        )
    count = sum(node.domain == DOMAIN and node.op_type == ROUND_TRIP.name for node in model.graph)
    if count:
        notes.append(
            f"{count} tensors are rounded and turned back in float32, to emulate codes: nothing is smaller or faster "
            "for it"
        )
    if makes_last_logits(model.graph):
        notes.append(
            "logits are [batch, 1, vocabulary], of the last position of each call: enough to generate, not to score a "
            "given text"
        )
    return notes


def precision_of(model: ir.Model, kernels: KernelReport | None, recipe: Recipe) -> Precision:
    """State storage and compute precision: of onnxruntime's kernels as it runs them, of ours as the graph says."""
    storage = storage_formats(model)
    products = [node.inputs[0] for node in model.graph if node.op_type.startswith("MatMul")]
    in_float16 = any(value is not None and value.dtype == ir.DataType.FLOAT16 for value in products)
    computed = "float16" if in_float16 else "float32"
    if kernels is None or not kernels.products:
        note = f"nothing is quantized; all products are {computed}"
        return Precision(storage=storage, activations=computed, note=note)
    notes = [] if computed == "float32" else [f"what is not said here is computed in {computed}"]
    theirs = [name.removeprefix(f"{FUSED}, inputs ") for name in kernels.products if name.startswith(FUSED)]
    if theirs:
        notes.append(_note_on_session(theirs, recipe))
    if any(not name.startswith(FUSED) for name in kernels.products):
        ours = ", ".join(f"{count} {name}" for name, count in kernels.products.items() if not name.startswith(FUSED))
        notes.append(f"the graph itself says what graphopt's products round their inputs to: {ours}")
    return Precision(
        storage=storage,
        activations=" and ".join(kernels.activations),
        note="; ".join(notes),
        products=kernels.products,
    )


def _note_on_session(activations: list[str], recipe: Recipe) -> str:
    entry, level = next(iter(recipe.session_entries().items()))
    if activations == [UNKNOWN]:
        return f"the recipe asks for {recipe.activations} ({entry}={level}); what onnxruntime runs was not read here"
    if activations == ["int8"]:
        return (
            f"onnxruntime rounds the inputs of quantized products to int8, with {entry}={level} as by default; "
            "for float32 inputs: `activations: float32` in the recipe, or the entry at 0"
        )
    return (
        f"the inputs of onnxruntime's quantized products are {' and '.join(activations)} with {entry}={level}; "
        "onnxruntime rounds them to int8 in a session without this entry"
    )
