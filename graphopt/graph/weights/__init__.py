"""Weights as expressions: plain data that says how a tensor is made from stored bytes, and one evaluator of them.

    expression.py      what an expression is: type, shape, children, digest, evaluation in blocks
    leaves.py          bytes of a file, arrays in memory
    rearrangement.py   transpose, slice, reshape, concatenate, stack
    arithmetic.py      cast, scale, sum, exponential, center, rotate, vector times matrix
    tensor.py          a tensor of the graph that is an expression
    initializers.py    the weights of a graph: find, own, rewrite, make
    finite.py          NaN and infinity are refused; each stored tensor gets its digest
    evaluator.py       the evaluator: tasks, worker processes
    store.py           evaluated tensors on disk, found again by digest
    work_folder.py     the folder of one compilation, which goes on where it was cut off
    data_file.py       a model and the file of its weights
    safetensors_files.py  tensors of safetensors files: headers are parsed, nothing is read
    disk.py            a full disk is an error like any other

Expressions that need more than that live where it is: rounding to codes and packing in
:mod:`graphopt.quantization.rounding`.
"""

from graphopt.graph.weights.arithmetic import DOUBLE, Cast, Center, Exponential, Rotate, Scale, Sum, VectorTimes
from graphopt.graph.weights.expression import (
    Array,
    Bundle,
    Expression,
    Node,
    Origin,
    Part,
    Region,
    Shape,
    blocks_of,
    nodes_below,
)
from graphopt.graph.weights.finite import check_finite
from graphopt.graph.weights.initializers import new_weight, own_input, rewrite, weight_of
from graphopt.graph.weights.leaves import Inline, MappedTensor, StoredBytes, origins_of
from graphopt.graph.weights.rearrangement import Concat, Reshape, Slice, Transpose, stack
from graphopt.graph.weights.same_shape import SameShape
from graphopt.graph.weights.tensor import WeightTensor, expression_of, map_on_demand, source_of

__all__ = [
    "DOUBLE",
    "Array",
    "Bundle",
    "Cast",
    "Center",
    "Concat",
    "Exponential",
    "Expression",
    "Inline",
    "MappedTensor",
    "Node",
    "Origin",
    "Part",
    "Region",
    "Reshape",
    "Rotate",
    "SameShape",
    "Scale",
    "Shape",
    "Slice",
    "StoredBytes",
    "Sum",
    "Transpose",
    "VectorTimes",
    "WeightTensor",
    "blocks_of",
    "check_finite",
    "expression_of",
    "map_on_demand",
    "new_weight",
    "nodes_below",
    "origins_of",
    "own_input",
    "rewrite",
    "source_of",
    "stack",
    "weight_of",
]
