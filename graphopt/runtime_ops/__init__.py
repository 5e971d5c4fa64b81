"""Operators of the domain ``ai.graphopt``: one folder, one operator.

Each folder holds what the operator means (its schema and its body in standard ONNX operators), a NumPy reference
written from the definition, and its kernels. A model carries the body, so it runs in any onnxruntime; where graphopt's
library is registered, the kernel takes the node.

A folder with a part ``spec`` is an operator: ``spec/op.py`` holds it. Nothing else names it.
"""

from graphopt.runtime_ops.bodies import bodies_aside, calls_of, declare
from graphopt.runtime_ops.foreign import FOREIGN
from graphopt.runtime_ops.library import library_path
from graphopt.runtime_ops.operator import DOMAIN, Operator
from graphopt.runtime_ops.operators import OPERATORS, port, port_at, ports_of, schema_of, signature_of
from graphopt.runtime_ops.schema import DECODING, Coordinates, Cost, Port, Role, Schema, Signature

__all__ = (
    "DECODING", "DOMAIN", "FOREIGN", "OPERATORS", "Coordinates", "Cost", "Operator", "Port", "Role", "Schema",
    "Signature", "bodies_aside", "calls_of", "declare", "library_path", "port", "port_at", "ports_of", "schema_of",
    "signature_of",
)  # fmt: skip
