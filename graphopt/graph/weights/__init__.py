"""Weights as expressions: plain data that says how a tensor is made from stored bytes, and one evaluator of them.

    expression.py   what an expression is: type, shape, children, digest, evaluation in blocks
    leaves.py       bytes of a file, arrays in memory
    layout.py       transposed, sliced, reshaped, joined, stacked
    like.py         what keeps the type and shape of another expression
    arithmetic.py   cast, scaled, added, centered, rotated, vector times matrix
    tensor.py       a tensor of the graph that is an expression
    graph.py        the weights of a graph: find, own, rewrite, make
    finite.py       NaN and infinity are refused; each stored tensor gets its digest
    evaluate.py     the evaluator: tasks, worker processes
    store.py        evaluated tensors on disk, found again by digest
    work.py         the folder of one compilation, which goes on where it was cut off
    data_file.py    a model and the file of its weights
    disk.py         a full disk is an error like any other

Expressions that need more than that live where it is: rounding to codes and packing in
:mod:`graphopt.quantization.rounding`.
"""

from graphopt.graph.weights.arithmetic import DOUBLE, Added, Cast, Centered, Rotated, Scaled, VectorTimes
from graphopt.graph.weights.expression import (
    Array,
    Expression,
    Node,
    Part,
    Region,
    Several,
    Shape,
    blocks_of,
    nodes_below,
)
from graphopt.graph.weights.finite import check_finite
from graphopt.graph.weights.initializers import new_weight, own, rewrite, weight_of
from graphopt.graph.weights.leaves import Inline, MappedTensor, Stored
from graphopt.graph.weights.rearrangement import Joined, Reshaped, Sliced, Transposed, stacked
from graphopt.graph.weights.same_shape import Like
from graphopt.graph.weights.tensor import WeightTensor, expression_of, map_on_demand, source_of

__all__ = [
    "DOUBLE",
    "Added",
    "Array",
    "Cast",
    "Centered",
    "Expression",
    "Inline",
    "Joined",
    "Like",
    "MappedTensor",
    "Node",
    "Part",
    "Region",
    "Reshaped",
    "Rotated",
    "Scaled",
    "Several",
    "Shape",
    "Sliced",
    "Stored",
    "Transposed",
    "VectorTimes",
    "WeightTensor",
    "blocks_of",
    "check_finite",
    "expression_of",
    "map_on_demand",
    "new_weight",
    "nodes_below",
    "own",
    "rewrite",
    "source_of",
    "stacked",
    "weight_of",
]
