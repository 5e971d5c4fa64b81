"""What onnxruntime really runs: read from the graph that it writes after its own optimizations."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from graphopt.errors import VerificationError
from graphopt.runtime import open_session
from graphopt.verify import Check, Verifier

FUSED = "MatMulNBits"
UNKNOWN = "unknown"

_ACTIVATIONS = {0: "float32", 1: "float32", 2: "float16", 3: "bfloat16", 4: "int8"}


@dataclass(frozen=True)
class KernelReport:
    """How the quantized products of a model run.

    Attributes:
        check: whether each became the fused kernel.
        activations: the formats to which the kernels round their activations, sorted; empty without such a kernel.
    """

    check: Check
    activations: tuple[str, ...]


def quantized_products(graph: ir.Graph) -> list[ir.Node]:
    """Return every ``MatMul`` that reads a ``DequantizeLinear`` of stored codes."""
    return [
        node
        for node in graph
        if node.op_type == "MatMul"
        and (right := node.inputs[1]) is not None
        and (producer := right.producer()) is not None
        and producer.op_type == "DequantizeLinear"
    ]


def check_kernels(model: ir.Model, verifier: Verifier, entries: Mapping[str, str]) -> KernelReport:
    """Open the model in onnxruntime and confirm that each quantized product runs as its fused kernel.

    Args:
        model: the model; it must have quantized products.
        verifier: knows whether the model fits into memory, and where to write it.
        entries: session entries to open it with.

    Raises:
        VerificationError: a product would run on dequantized weights; names the first.
    """
    if verifier.why_not is not None:
        check = Check(name="kernels", after="the recipe", status="not covered", reason=verifier.why_not)
        return KernelReport(check, (UNKNOWN,))
    expected = quantized_products(model.graph)
    there = sum(node.op_type == FUSED for node in model.graph)
    path = verifier.settle(model)
    with tempfile.TemporaryDirectory(prefix="graphopt-") as folder:
        optimized = Path(folder) / "optimized.onnx"
        open_session(path, entries=entries, optimized_to=optimized)
        graph = ir.load(optimized).graph
        kernels = [node for node in graph if node.op_type == FUSED]
        unfused = quantized_products(graph)
        levels = sorted({node.attributes.get_int("accuracy_level", 0) for node in kernels})
    fused = len(kernels) - there
    if unfused or fused != len(expected):
        first = (unfused or expected)[0]
        raise VerificationError(
            f"onnxruntime fuses {fused} of {len(expected)} quantized products into {FUSED}; "
            "the others would run on dequantized weights",
            node=first.name,
            remedy="choose another group or format for this product in the recipe",
        )
    check = Check(
        name="kernels",
        after="the recipe",
        status="measured",
        reason=f"onnxruntime's own optimized graph holds one {FUSED} for each quantized product",
        figures={"quantized_products": len(expected), "fused_kernels": fused},
    )
    return KernelReport(check, tuple(_ACTIVATIONS.get(level, f"level {level}") for level in levels))
