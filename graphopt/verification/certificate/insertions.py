"""Nodes ``ai.graphopt::Hadamard`` that only the graph after has: y = x (I (x) left (x) right) / sqrt(a b)."""

from __future__ import annotations

import onnx_ir as ir

from graphopt.verification.certificate.coordinates import Tag, in_blocks, same_coordinates
from graphopt.verification.certificate.correspondence import constant
from graphopt.verification.certificate.reasons import (
    HADAMARD_PORTS,
    HADAMARD_TYPE,
    HADAMARD_WIDTH,
    NO_HADAMARD,
    ROTATED_ALREADY,
)
from graphopt.verification.certificate.rotations import Orthogonal, Rotations, of_matrices
from graphopt.verification.certificate.site import Dims, RefusalError, static, text_of
from graphopt.verification.certificate.weights import apply_to_array


def matrices_of(node: ir.Node) -> tuple[Orthogonal, Orthogonal]:
    """Return the matrix that ``node`` multiplies each block by, and its inverse, once they are seen to be orthogonal.

    Raises:
        Refused: it does not have one input and two constant Hadamard matrices, int8 [a, a] and [b, b].
    """
    if len(node.inputs) != 3 or len(node.outputs) != 1 or node.attributes:
        raise RefusalError(HADAMARD_PORTS())
    matrices = []
    for value in node.inputs[1:]:
        tensor, name = constant(value), None if value is None else value.name
        if tensor is None or tensor.dtype != ir.DataType.INT8:
            raise RefusalError(HADAMARD_TYPE(), tensor=name)
        matrices.append(apply_to_array(tensor, lambda array: array.copy()))
        try:
            of_matrices(matrices[-1:])
        except ValueError as error:
            raise RefusalError(NO_HADAMARD(error=str(error)), tensor=name) from error
    return of_matrices(matrices), of_matrices([matrix.T for matrix in matrices])


def coordinates_behind(
    tag: Tag, dims: Dims | None, matrices: tuple[Orthogonal, Orthogonal], rotations: Rotations
) -> Tag:
    """Return the coordinates behind a node, from those of its input: rotated, or no longer where it undoes a rotation.

    Raises:
        Refused: its blocks do not divide the last axis, or the input is rotated in another way already.
    """
    width = matrices[0].width
    if not dims or not isinstance(dims[-1], int) or dims[-1] % width:
        raise RefusalError(HADAMARD_WIDTH(width=width, shape=text_of(dims)))
    size, shape = dims[-1], static(dims)
    if tag is not None and same_coordinates(tag, in_blocks(rotations.number(matrices[1]), width, size).spread(shape)):
        return None
    rotated_tag = in_blocks(rotations.number(matrices[0]), width, size).spread(shape)
    if tag is not None:
        raise RefusalError(ROTATED_ALREADY(), [rotated_tag])
    return rotated_tag
