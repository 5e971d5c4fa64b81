"""Nodes ``ai.graphopt::Hadamard`` that only the graph after has: y = x (I (x) left (x) right) / sqrt(a b)."""

from __future__ import annotations

import onnx_ir as ir

from graphopt.checks.certificate.coordinates import Tag, in_blocks, same
from graphopt.checks.certificate.correspondence import constant
from graphopt.checks.certificate.rotations import Orthogonal, Rotations, of_matrices
from graphopt.checks.certificate.site import Dims, Refused, static, text_of
from graphopt.checks.certificate.weights import read


def matrices_of(node: ir.Node) -> tuple[Orthogonal, Orthogonal]:
    """Return the matrix that ``node`` multiplies each block by, and its inverse, once they are seen to be orthogonal.

    Raises:
        Refused: it does not have one input and two constant Hadamard matrices, int8 [a, a] and [b, b].
    """
    if len(node.inputs) != 3 or len(node.outputs) != 1 or node.attributes:
        raise Refused("it should have an input, two matrices, one output and no attributes")
    matrices = []
    for value in node.inputs[1:]:
        tensor, name = constant(value), None if value is None else value.name
        if tensor is None or tensor.dtype != ir.DataType.INT8:
            raise Refused("its matrix is no constant of type int8", tensor=name)
        matrices.append(read(tensor, lambda array: array.copy()))
        try:
            of_matrices(matrices[-1:])
        except ValueError as error:
            raise Refused(f"it is no Hadamard matrix: {error}", tensor=name) from error
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
        raise Refused(f"it rotates {width} coordinates at once, of a tensor of shape {text_of(dims)}")
    size, shape = dims[-1], static(dims)
    if tag is not None and same(tag, in_blocks(rotations.number(matrices[1]), width, size).spread(shape)):
        return None
    turned = in_blocks(rotations.number(matrices[0]), width, size).spread(shape)
    if tag is not None:
        raise Refused("what it rotates is in rotated coordinates already", [turned])
    return turned
