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

Expressions that need more than that live where it is: rounding to codes and packing in :mod:`graphopt.rounding`.
"""

from graphopt.weights.arithmetic import DOUBLE, Added, Cast, Centered, Rotated, Scaled, VectorTimes
from graphopt.weights.expression import (
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
from graphopt.weights.finite import check_finite
from graphopt.weights.graph import new_weight, own, rewrite, weight_of
from graphopt.weights.layout import Joined, Reshaped, Sliced, Transposed, stacked
from graphopt.weights.leaves import Inline, MappedTensor, Stored
from graphopt.weights.like import Like
from graphopt.weights.tensor import WeightTensor, expression_of, map_on_demand, source_of

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
