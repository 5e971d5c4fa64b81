"""Expressions for hypothesis, each with the array that NumPy says it is."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from hypothesis import strategies as st

from graphopt.graph.weights import (
    DOUBLE,
    Array,
    Cast,
    Center,
    Concat,
    Expression,
    Inline,
    Reshape,
    Rotate,
    Scale,
    Slice,
    Sum,
    Transpose,
    stack,
)
from graphopt.numerics.rotations import HadamardRotation

KINDS = ("transposed", "reshaped", "sliced", "joined", "stacked", "scaled", "added", "centered", "rotated", "float16")


@st.composite
def expressions(draw: st.DrawFn, step_limit: int = 4) -> tuple[Expression, Array]:
    """Return an expression of up to ``step_limit`` steps on a float64 matrix, and its value."""
    shape = draw(st.tuples(st.integers(1, 6), st.integers(1, 6)))
    seed = draw(st.integers(0, 3))
    array = np.random.default_rng(seed).standard_normal(shape)
    pair: tuple[Expression, Array] = (Inline.from_array(array), array.copy())
    for kind in draw(st.lists(st.sampled_from(KINDS), max_size=step_limit)):
        pair = step(kind, *pair, draw(st.integers(0, 10)))
    return pair


def step(kind: str, source: Expression, array: Array, number: int) -> tuple[Expression, Array]:
    """Return one expression more, and its value; ``number`` chooses axes and the like."""
    rank = array.ndim
    axis = number % rank
    size = array.shape[axis]
    if kind == "transposed":
        order = tuple(np.roll(range(rank), number).tolist())
        return Transpose(source, order), array.transpose(order)
    if kind == "reshaped":
        dims = [(-1,), (1, *array.shape), (*array.shape, 1), (array.shape[0], -1)][number % 4]
        return Reshape.to_dims(source, dims), array.reshape(dims)
    if kind == "sliced":
        piece = [slice(0, size), slice(None, None, -1), slice(size // 2, None), slice(0, size, 2)][number % 4]
        return Slice.cut(source, {axis: piece}), array[(*[slice(None)] * axis, piece)]
    if kind == "joined":
        return Concat((source, source), axis), np.concatenate([array, array], axis)
    if kind == "stacked":
        return stack([source, source], axis), np.stack([array, array], axis)
    if kind == "scaled":
        factors = np.arange(1.0, size + 1)
        spread = factors.reshape([-1 if index == axis else 1 for index in range(rank)])
        return Scale(source, Inline.from_array(factors), axis), spread * array
    if kind == "added":
        return Sum(source, source), array + array
    if kind == "centered":
        return Center(source, axis, (0,), size), array - array.mean(axis, keepdims=True)
    if kind == "rotated":
        rotation = HadamardRotation(size, number)
        return Rotate(source, axis, (0,), rotation.claim()), rotation.apply(array, axis)
    return Cast(Cast(source, ir.DataType.FLOAT16), DOUBLE), array.astype(np.float16).astype(np.float64)
