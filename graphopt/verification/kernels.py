"""What onnxruntime really runs: read from the graph that it writes after its own optimizations."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.analysis.structure.product_codes import dequantize_of
from graphopt.analysis.structure.products import is_packed
from graphopt.artifact.manifest import ProductCount
from graphopt.errors import VerificationError
from graphopt.graph.diagnostics import Check, Fact, Rule
from graphopt.ort.session import AS_IT_LIES, native_operators, open_session
from graphopt.runtime_ops import DOMAIN, OPERATORS, port, signature_of
from graphopt.runtime_ops.schema import attributes_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from graphopt.ort.snapshots import Snapshots

FUSED = "MatMulNBits"
UNKNOWN = "unknown"

RUN = Rule("kernels.run", "{runs}")
ALL_FUSED = Rule(
    "kernels.all-fused", "onnxruntime's own optimized graph holds one {operator} for each quantized product"
)
OWN_KERNEL = Rule("kernels.own-kernel", "{operator} runs by graphopt's kernel, each node is there still")
BODY = Rule("kernels.body", "{operator} runs by the function body: no kernel here")


class UnfusedError(VerificationError):
    """onnxruntime leaves quantized products on dequantized weights; ``products`` are the names of their nodes."""

    def __init__(self, message: str, products: Sequence[str], remedy: str) -> None:
        super().__init__(message, node=products[0], remedy=remedy)
        self.products = tuple(products)


@dataclass(frozen=True)
class KernelReport:
    """How the quantized products of a model run.

    Attributes:
        check: whether each became the fused kernel, or is the operator that the pass made.
        activations: what the inputs of quantized products are rounded to, sorted; of onnxruntime's kernels as read from
            the graph that it runs, of ours as their attributes say.
        products: how many products each operator computes, by what it rounds their inputs to.
    """

    check: Check
    activations: tuple[str, ...]
    products: list[ProductCount] = field(default_factory=list)


def quantized_products(graph: ir.Graph) -> list[ir.Node]:
    """Return every ``MatMul`` that reads a ``DequantizeLinear`` of stored codes."""
    return [node for node in graph if dequantize_of(node) is not None]


def own_nodes(graph: ir.Graph) -> list[ir.Node]:
    """Return every node of an operator of ours."""
    return [node for node in graph if node.domain == DOMAIN]


def activations_of(node: ir.Node) -> str:
    """Return what one of our products, or onnxruntime's ``MatMulNBits``, rounds its input to."""
    signature = signature_of(node)
    if signature is None or signature.data is None:
        return UNKNOWN
    stated = signature.precision(attributes_of(node))
    if stated is not None:
        return stated
    x = port(node, signature.data.name)
    return "float16" if x is not None and x.dtype == ir.DataType.FLOAT16 else "float32"


def check_kernels(
    model: ir.Model, snapshots: Snapshots, entries: Mapping[str, str], why_not: Fact | None = None
) -> KernelReport:
    """Open the model in onnxruntime and confirm that each quantized product runs as the kernel that it is meant for.

    A ``DequantizeLinear -> MatMul`` must become ``MatMulNBits``. A node of our operators must be there still where the
    library has its kernel; where it has not, or there is no library, onnxruntime runs the body, and the check says so.

    Args:
        model: the model.
        snapshots: writes it.
        entries: session entries to open it with.
        why_not: why the model cannot be opened here; then only what the graph says is reported.

    Raises:
        UnfusedError: a product would run on dequantized weights; names the first.
        VerificationError: onnxruntime folds nodes that graphopt's kernels are for.
    """
    expected, ours = quantized_products(model.graph), own_nodes(model.graph)
    stated = [node for node in ours if is_packed(node)]
    if why_not is not None:
        check = Check(name="kernels", after="the recipe", status="not covered", reason=why_not)
        unread = [(FUSED, UNKNOWN)] * len(expected)
        return _report(check, [*unread, *((node.op_type, activations_of(node)) for node in stated)])
    there = sum(node.op_type == FUSED for node in model.graph)
    with snapshots.of(model) as path:
        optimized = path.with_name("optimized.onnx")
        # The graph is written before weights are packed for its kernels, and nothing is run.
        open_session(path, entries={**entries, **AS_IT_LIES}, optimized_to=optimized, in_place=True)
        graph = ir.load(optimized).graph
        kernels = [node for node in graph if node.op_type == FUSED]
        unfused = quantized_products(graph)
        left = Counter(node.op_type for node in own_nodes(graph))
        running = [(node.op_type, activations_of(node)) for node in kernels]
    fused = len(kernels) - there
    if unfused or fused != len(expected):
        raise UnfusedError(
            f"onnxruntime fuses {fused} of {len(expected)} quantized products into {FUSED}; "
            "the others would run on dequantized weights",
            [node.name or "?" for node in unfused or expected],
            remedy="choose another group or format for this product in the recipe",
        )
    needs_bodies = any(part in node.overload for node in ours for part in OPERATORS[node.op_type].without_kernel)
    native = frozenset() if needs_bodies else native_operators()
    for name, count in Counter(node.op_type for node in ours).items():
        if name in native and left[name] != count:
            raise VerificationError(
                f"onnxruntime runs {left[name]} of {count} nodes of {name} by graphopt's kernel, and folds the others",
                node=next(node.name for node in ours if node.op_type == name),
                remedy="report this with the model; the library of kernels is not what the graph was made for",
            )
    figures: dict[str, float] = {"quantized_products": len(expected), "fused_kernels": fused}
    figures |= {f"{name}_nodes": count for name, count in Counter(node.op_type for node in ours).items()}
    names = list(dict.fromkeys(node.op_type for node in ours))
    by_kernel = [OWN_KERNEL(operator=name) if name in native else BODY(operator=name) for name in names]
    runs: list[Fact] = [*([ALL_FUSED(operator=FUSED)] if expected else []), *by_kernel]
    check = Check(name="kernels", after="the recipe", status="measured", reason=RUN(runs=runs), figures=figures)
    return _report(check, [*running, *((node.op_type, activations_of(node)) for node in stated)])


def _report(check: Check, products: list[tuple[str, str]]) -> KernelReport:
    counted = [
        ProductCount(operator=name, activations=rounded, count=count)
        for (name, rounded), count in Counter(products).items()
    ]
    return KernelReport(check, tuple(sorted({rounded for _, rounded in products})), counted)
