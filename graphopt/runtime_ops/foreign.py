"""Operators of others that hold weights as codes: what onnxruntime and ONNX call which of their inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphopt.runtime_ops.schema import Coordinates, Dims, Port, Role, Signature

if TYPE_CHECKING:
    from collections.abc import Mapping

_ACTIVATIONS = {0: "float32", 1: "float32", 2: "float16", 3: "bfloat16", 4: "int8"}


def _by_accuracy_level(attributes: Mapping[str, Any]) -> str:
    level = attributes.get("accuracy_level", 0)
    return _ACTIVATIONS.get(level, f"level {level}")


def _stated_bits(shape: Dims, attributes: Mapping[str, Any]) -> int:
    del shape
    bits: int = attributes.get("bits", 4)
    return bits


FOREIGN: dict[tuple[str, str], Signature] = {
    (signature.domain, signature.name): signature
    for signature in (
        Signature(
            domain="",
            name="DequantizeLinear",
            inputs=(
                Port("x", Role.CODES, columns=1),
                Port("x_scale", Role.SCALES, columns=1),
                Port("x_zero_point", Role.ZERO_POINTS, same_type_as="x", columns=1),
            ),
            outputs=(Port("y", Role.DATA, same_type_as="x_scale"),),
            coordinates=Coordinates.DECODES,
        ),
        Signature(
            domain="com.microsoft",
            name="MatMulNBits",
            inputs=(
                Port("A", Role.DATA),
                Port("B", Role.CODES, bits=_stated_bits),
                Port("scales", Role.SCALES, same_type_as="A"),
                Port("zero_points", Role.ZERO_POINTS),
                Port("g_idx", Role.GROUPS),
                Port("bias", Role.BIAS, same_type_as="A"),
            ),
            outputs=(Port("Y", Role.DATA, same_type_as="A"),),
            coordinates=Coordinates.MULTIPLIES,
            precision=_by_accuracy_level,
        ),
        Signature(
            domain="com.microsoft",
            name="GatherBlockQuantized",
            inputs=(
                Port("data", Role.CODES, bits=_stated_bits),
                Port("indices", Role.INDICES),
                Port("scales", Role.SCALES),
                Port("zero_points", Role.ZERO_POINTS, same_type_as="data"),
            ),
            outputs=(Port("output", Role.DATA, same_type_as="scales"),),
            coordinates=Coordinates.DECODES,
        ),
    )
}
"""By domain and type. The columns of ``DequantizeLinear`` are those of a matrix [rows, columns] in groups of rows."""
