"""What onnxruntime really runs: read from the graph that it writes after its own optimizations."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.analysis.structure.convolutions import integer_convolutions, is_of_convolution
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
    from pathlib import Path

    from graphopt.ort.snapshots import Snapshots

FUSED_PRODUCT, FUSED_CONVOLUTION = "MatMulNBits", "QLinearConv"
UNKNOWN = "unknown"

RUN = Rule("kernels.run", "{runs}")
ALL_FUSED = Rule(
    "kernels.all-fused", "onnxruntime's own optimized graph holds one {operator} for each quantized product"
)
OWN_KERNEL = Rule("kernels.own-kernel", "{operator} runs by graphopt's kernel, each node is there still")
CONVOLUTIONS = Rule(
    "kernels.convolutions", "onnxruntime runs {fused} of {convolutions} convolutions of codes as {operator}"
)
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
    readers = ((node, dequantize_of(node)) for node in graph)
    return [node for node, reader in readers if reader is not None and not is_of_convolution(reader)]


def own_nodes(graph: ir.Graph) -> list[ir.Node]:
    """Return every node of an operator of ours."""
    return [node for node in graph if node.domain == DOMAIN]


def _running_kernels(nodes: Sequence[ir.Node]) -> frozenset[str]:
    """Return the operators that the library computes; none where it refuses a node: then bodies compute all."""
    parts = [(node.overload, part) for node in nodes for part in OPERATORS[node.op_type].without_kernel]
    return frozenset() if any(part in overload for overload, part in parts) else native_operators()


def activations_of(node: ir.Node) -> str:
    """Return what one of our products, or onnxruntime's ``MatMulNBits``, rounds its input to."""
    signature = signature_of(node)
    if signature is None or signature.data is None:
        return UNKNOWN
    precision = signature.precision(attributes_of(node))
    if precision is not None:
        return precision
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
    products, kernel_nodes = quantized_products(model.graph), own_nodes(model.graph)
    stated_products = [(node.op_type, activations_of(node)) for node in kernel_nodes if is_packed(node)]
    integers = len(integer_convolutions(model.graph))
    stated_products += [("Conv", "uint8")] * integers
    if why_not is not None:
        check = Check(name="kernels", after="the recipe", status="not covered", reason=why_not)
        return _report(check, [*[(FUSED_PRODUCT, UNKNOWN)] * len(products), *stated_products])
    with snapshots.write(model) as path:
        graph = _graph_that_runs(path, entries)
        runtime_products = [(node.op_type, activations_of(node)) for node in graph if node.op_type == FUSED_PRODUCT]
        unfused_products = quantized_products(graph)
        fused_convolutions = sum(node.op_type == FUSED_CONVOLUTION for node in graph)
        own_left = Counter(node.op_type for node in own_nodes(graph))
    fused_count = len(runtime_products) - sum(node.op_type == FUSED_PRODUCT for node in model.graph)
    if unfused_products or fused_count != len(products):
        raise UnfusedError(
            f"onnxruntime fuses {fused_count} of {len(products)} quantized products into {FUSED_PRODUCT}; "
            "the others would run on dequantized weights",
            [node.name or "?" for node in unfused_products or products],
            remedy="choose another group or format for this product in the recipe",
        )
    own_counts = Counter(node.op_type for node in kernel_nodes)
    _confirm_own_kernels(kernel_nodes, own_counts, own_left)
    figures: dict[str, float] = {"quantized_products": len(products), "fused_kernels": fused_count}
    if integers:
        figures |= {"integer_convolutions": integers, "fused_convolutions": fused_convolutions}
    figures |= {f"{name}_nodes": count for name, count in own_counts.items()}
    native = _running_kernels(own_nodes(model.graph))
    own_runs = [OWN_KERNEL(operator=name) if name in native else BODY(operator=name) for name in own_counts]
    runs: list[Fact] = [*([ALL_FUSED(operator=FUSED_PRODUCT)] if products else []), *own_runs]
    if integers:
        runs.append(CONVOLUTIONS(fused=fused_convolutions, convolutions=integers, operator=FUSED_CONVOLUTION))
    check = Check(name="kernels", after="the recipe", status="measured", reason=RUN(runs=runs), figures=figures)
    return _report(check, [*runtime_products, *stated_products])


def _graph_that_runs(path: Path, entries: Mapping[str, str]) -> ir.Graph:
    """Return the graph of a model that onnxruntime runs, after its own optimizations."""
    optimized_file = path.with_name("optimized.onnx")
    # The graph is written before weights are packed for its kernels, and nothing is run.
    open_session(path, entries={**entries, **AS_IT_LIES}, optimized_to=optimized_file, in_place=True)
    return ir.load(optimized_file).graph


def _confirm_own_kernels(nodes: Sequence[ir.Node], counts: Counter[str], left_counts: Counter[str]) -> None:
    """Refuse a graph in which onnxruntime folded nodes that have a kernel of ours."""
    for name, count in counts.items():
        if name in _running_kernels(nodes) and left_counts[name] != count:
            raise VerificationError(
                f"onnxruntime runs {left_counts[name]} of {count} nodes of {name} by graphopt's kernel, and folds the "
                "others",
                node=next(node.name for node in nodes if node.op_type == name),
                remedy="report this with the model; the library of kernels is not what the graph was made for",
            )


def _report(check: Check, products: list[tuple[str, str]]) -> KernelReport:
    counts = [
        ProductCount(operator=name, activations=activations, count=count)
        for (name, activations), count in Counter(products).items()
    ]
    return KernelReport(check, tuple(sorted({activations for _, activations in products})), counts)
