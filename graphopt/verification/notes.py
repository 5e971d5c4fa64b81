"""What a user should know of a finished graph and no figure of the manifest says."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.analysis.structure.cost import INTEGER_PRODUCTS, storage_formats
from graphopt.analysis.structure.products import makes_last_logits
from graphopt.artifact.genai import GENAI_CONFIG
from graphopt.artifact.manifest import Precision
from graphopt.graph.diagnostics import Fact, Rule
from graphopt.runtime_ops import DOMAIN, OPERATORS
from graphopt.verification.kernels import FUSED_PRODUCT, UNKNOWN, KernelReport, own_nodes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphopt.passes.recipe import Recipe

NEEDS_OPERATORS = Rule(
    "notes.needs-operators",
    f"operators of {DOMAIN} ({{operators}}): {{bodies}}; for kernels register graphopt's library, by "
    "SessionOptions.register_custom_ops_library or as custom_ops_library among the session_options of "
    f"{GENAI_CONFIG}",
)
BODIES_RUN = Rule("notes.bodies-run", "any onnxruntime runs the bodies that they carry")
BODIES_DIFFER = Rule(
    "notes.bodies-differ",
    "an onnxruntime that tells several bodies of one operator apart runs them (1.31 does, 1.24 does not)",
)
LAST_LOGITS = Rule(
    "notes.last-logits",
    "logits are [batch, 1, vocabulary], of the last position of each call: enough to generate, not to score a given "
    "text",
)
LAST_SOME_LOGITS = Rule(
    "notes.last-some-logits",
    "logits are of the last {count} positions of each call: enough to generate and to check drafts, not to score a "
    "given text",
)
OF_GRAPH = {rule.code for rule in (NEEDS_OPERATORS, LAST_LOGITS, LAST_SOME_LOGITS)}
"""The notes that :func:`notes_of` makes anew for each graph; those that an artifact had before are replaced."""

NOT_QUANTIZED = Rule("precision.not-quantized", "nothing is quantized; all products are {dtype}")
INTEGERS_BEFORE = Rule(
    "precision.integers-before",
    "{count} product(s) of integers were in the file before ({operators}): they stay as they are",
)
OTHER_COMPUTATION = Rule("precision.rest", "what is not said here is computed in {dtype}")
UNREAD = Rule(
    "precision.unread",
    "the recipe asks for {activations} ({entry}={level}); what onnxruntime runs was not read here",
)
ROUNDED_BY_RUNTIME = Rule(
    "precision.rounded",
    "onnxruntime rounds the inputs of quantized products to int8, with {entry}={level} as by default; "
    "for float32 inputs: `activations: float32` in the recipe, or the entry at 0",
)
BY_ENTRY = Rule(
    "precision.by-entry",
    "the inputs of onnxruntime's quantized products are {activations} with {entry}={level}; "
    "onnxruntime rounds them to int8 in a session without this entry",
)
STATED_BY_GRAPH = Rule("precision.stated", "the graph itself says what its products round their inputs to: {products}")
PRODUCTS = Rule("precision.products", "{count} {operator}, inputs {activations}")


def notes_of(model: ir.Model) -> list[Fact]:
    """Return what a user should know of the graph: operators of ours, logits that are not made."""
    notes: list[Fact] = []
    nodes = own_nodes(model.graph)
    operators = sorted({node.op_type for node in nodes})
    if operators:
        bodies = {(node.op_type, OPERATORS[node.op_type].overload_of(node)) for node in nodes}
        bodies_note = BODIES_DIFFER() if len(bodies) > len(operators) else BODIES_RUN()
        notes.append(NEEDS_OPERATORS(operators=[*operators], bodies=bodies_note))
    positions = makes_last_logits(model.graph)
    if positions is not None:
        notes.append(LAST_LOGITS() if positions == 1 else LAST_SOME_LOGITS(count=positions))
    return notes


def precision_of(model: ir.Model, kernels: KernelReport | None, recipe: Recipe) -> Precision:
    """State storage and compute precision: of onnxruntime's kernels as it runs them, of ours as the graph says."""
    storage, dtype = storage_formats(model), _dtype_of_products(model.graph)
    integers = Counter(node.op_type for node in model.graph.all_nodes() if node.op_type in INTEGER_PRODUCTS)
    notes = [INTEGERS_BEFORE(count=integers.total(), operators=sorted(integers))] if integers else []
    if kernels is None or not kernels.products:
        notes.append(OTHER_COMPUTATION(dtype=dtype) if integers else NOT_QUANTIZED(dtype=dtype))
        return Precision(storage=storage, activations=dtype, notes=notes)
    if dtype != "float32":
        notes.append(OTHER_COMPUTATION(dtype=dtype))
    runtime_products = [product.activations for product in kernels.products if product.operator == FUSED_PRODUCT]
    if runtime_products:
        notes.append(_of_session(runtime_products, recipe))
    own_products = [
        PRODUCTS(count=product.count, operator=product.operator, activations=product.activations)
        for product in kernels.products
        if product.operator != FUSED_PRODUCT
    ]
    if own_products:
        notes.append(STATED_BY_GRAPH(products=own_products))
    return Precision(
        storage=storage, activations=" and ".join(kernels.activations), notes=notes, products=kernels.products
    )


def _dtype_of_products(graph: ir.Graph) -> str:
    """Return ``float16`` where a product reads it, else ``float32``."""
    inputs = [node.inputs[0] for node in graph if node.op_type.startswith("MatMul")]
    has_float16 = any(value is not None and value.dtype == ir.DataType.FLOAT16 for value in inputs)
    return "float16" if has_float16 else "float32"


def _of_session(activations: Sequence[str], recipe: Recipe) -> Fact:
    entry, level = next(iter(recipe.session_entries().items()))
    if list(activations) == [UNKNOWN]:
        return UNREAD(activations=recipe.activations, entry=entry, level=level)
    if list(activations) == ["int8"]:
        return ROUNDED_BY_RUNTIME(entry=entry, level=level)
    return BY_ENTRY(activations=[*activations], entry=entry, level=level)
