"""Operators without a kernel, whose bodies of other operators run."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import onnx
import onnx_ir as ir

from graphopt.compile.doctor.examination import Examination, Level, Patient, Symptom
from graphopt.graph.diagnostics import Rule
from graphopt.ort.session import open_session
from graphopt.runtime_ops import DOMAIN

if TYPE_CHECKING:
    from collections.abc import Iterator

BODIES = Rule("doctor.missing-kernels", "{count} of {operators} have no kernel in this onnxruntime: their bodies run")

_LARGE = 4096


class MissingKernels(Examination):
    """onnxruntime replaces an operator that it has no kernel for by the operators that the standard defines it by."""

    name: ClassVar[str] = "missing-kernels"
    level: ClassVar[Level] = "hint"
    remedy: ClassVar[str] = (
        "run it by an onnxruntime that has the kernels, for ai.graphopt with graphopt's library, or export to an opset "
        "whose operators have them"
    )
    runs: ClassVar[bool] = True

    def find(self, patient: Patient) -> Iterator[Symptom]:
        """Look for what is defined by a body, and gone in the graph that runs before onnxruntime rewrites it."""
        opset = patient.model.opset_imports.get("", 0)
        with_body = [node for node in patient.nodes if _has_body(node, opset)]
        if not with_body:
            return
        with tempfile.TemporaryDirectory(prefix="graphopt-") as folder:
            file = Path(folder) / "bodies.onnx"
            content = _without_weights(patient.model)
            open_session(patient.file, content=content, entries=patient.entries, rewritten=False, optimized_to=file)
            kinds = {(node.domain, node.op_type) for node in ir.load(file).graph.all_nodes()}
        nodes = [node for node in with_body if (node.domain, node.op_type) not in kinds]
        if nodes:
            yield self.symptom(BODIES(count=len(nodes), operators=sorted({node.op_type for node in nodes})), nodes)


def _has_body(node: ir.Node, opset: int) -> bool:
    if node.domain == DOMAIN:
        return True
    if node.domain or not onnx.defs.has(node.op_type) or not opset:
        return False
    schema: Any = onnx.defs.get_schema(node.op_type, opset, "")
    return bool(schema.has_function or schema.has_context_dependent_function)


def _without_weights(model: ir.Model) -> bytes:
    """Return a model whose large constants are inputs: which kernels there are is no matter of their numbers."""
    copy = model.clone()
    for name, value in list(copy.graph.initializers.items()):
        tensor = value.const_value
        if tensor is None or tensor.nbytes <= _LARGE or value.is_graph_output():
            continue
        if any(use.node.domain for use in value.uses()):  # kernels for codes refuse codes that are no constants
            continue
        value.dtype, value.shape, value.const_value = tensor.dtype, ir.Shape(tensor.shape.numpy()), None
        del copy.graph.initializers[name]
        copy.graph.inputs.append(value)
    content: bytes = ir.to_proto(copy).SerializeToString()
    return content
