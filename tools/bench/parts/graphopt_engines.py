"""graphopt's products, in onnxruntime through its library of kernels; a node's body never takes part."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from graphopt.errors import InputError
from graphopt.numerics.rotations import HadamardRotation
from graphopt.ort.session import open_session
from graphopt.runtime_ops import DOMAIN, OPERATORS, Operator, library_path
from tools.bench.parts.engine import TOLERANCES, Engine, Workload, optional
from tools.bench.parts.formats import RoundedMatrix, round_weights
from tools.bench.parts.onnxruntime_engines import STOP_SPINNING, Bound
from tools.bench.parts.problem import Array, Problem
from tools.bench.parts.unavailable import UnavailableError

_FORMATS = ("int4", "fp6", "fp6-e3m2", "int8", "nf4", "nl4", "nl5", "t2", "t3", "t4", "t5")
_MODES = ("int8", "bfloat16", "float32", "int16")
# Besides int8, the default of every format: the mode of prefill, the exact one, and those that are exact for E3M2.
_DEFAULTS = {("int4", "bfloat16"), ("int4", "float32"), ("fp6-e3m2", "bfloat16"), ("fp6-e3m2", "int16")}
_DYNAMIC = {"w8a8": ("int8", 8), "w4a8": ("int4", 8), "w4a4": ("int4", 4)}

# From the x of a copy and its number to the nodes of the copy, the last of which makes y.
Make = Callable[[ir.Value, int], Sequence[ir.Node]]


def engines() -> list[Engine]:
    """Return every format with every rounding of activations; no suffix means int8.

    ``hadamard-`` means a Hadamard before the product: a separate node, or within ``MatMulDynamic``.
    """
    candidates = []
    for name in _FORMATS:
        for mode in _MODES:
            suffix = "" if mode == "int8" else f"-{mode}"
            default = mode == "int8" or (name, mode) in _DEFAULTS
            prepare = partial(_table, name=name, mode=mode)
            candidates.append(Engine(f"graphopt-{name}{suffix}", _tolerance(name, mode), prepare, default=default))
    prepare_hadamard = partial(_table, name="int4", mode="int8", with_hadamard=True)
    candidates.append(Engine("graphopt-hadamard-int4", TOLERANCES["int8"], prepare_hadamard))
    for name, (weights, bits) in _DYNAMIC.items():
        for prefix in ("", "hadamard-"):
            prepare = partial(_dynamic, name=weights, bits=bits, with_hadamard=bool(prefix))
            candidates.append(Engine(f"graphopt-{prefix}{name}", TOLERANCES[f"int{bits}"], prepare))
    return candidates


def _tolerance(name: str, mode: str) -> float:
    # Under int16 a table of odd numbers is rounded to 16 bits as well, under bfloat16 to bfloat16.
    return 3e-4 if (name, mode) == ("nf4", "int16") else TOLERANCES[mode]


def operator(name: str) -> Operator:
    """Return one of graphopt's operators.

    Raises:
        UnavailableError: this graphopt has none of that name.
    """
    if name not in OPERATORS:
        raise UnavailableError(f"this graphopt has no operator {name}")
    return OPERATORS[name]


def open_copies(problem: Problem, copies: int, columns: int, make: Make) -> Bound:
    """Return a session on a graph of ``copies`` products with ``columns`` columns each.

    The graph does not carry the bodies of its operators: without kernels for them it does not open.

    Raises:
        UnavailableError: there is no library, or onnxruntime refuses the graph with it.
    """
    optional("onnxruntime")
    if library_path() is None:
        raise UnavailableError("graphopt's library of kernels is not built")
    inputs = [ir.val(f"x{copy}", ir.DataType.FLOAT, problem.x.shape) for copy in range(copies)]
    nodes = [make(x, copy) for copy, x in enumerate(inputs)]
    outputs = [product_nodes[-1].outputs[0] for product_nodes in nodes]
    for copy, y in enumerate(outputs):
        y.name, y.type = f"y{copy}", ir.TensorType(ir.DataType.FLOAT)
        y.shape = ir.Shape([*problem.x.shape[:-1], columns])
    flat = [node for product_nodes in nodes for node in product_nodes]
    constants = {value for node in flat for value in node.inputs if value is not None and value.const_value is not None}
    opsets = {"": 23, DOMAIN: max(OPERATORS[node.op_type].version for node in flat)}
    graph = ir.Graph(inputs, outputs, nodes=flat, initializers=list(constants), opset_imports=opsets, name="products")
    file = Path(tempfile.mkdtemp(dir=problem.settings.work)) / "model.onnx"
    ir.save(ir.Model(graph, ir_version=11), file, external_data="model.onnx.data")
    try:
        session = open_session(file, entries=STOP_SPINNING, threads=problem.settings.memory.threads)
    except InputError as error:
        raise UnavailableError(str(error).splitlines()[0]) from error
    return Bound(session, problem.x, columns)


def constant(name: str, array: Array) -> ir.Value:
    """Return an initializer."""
    tensor = ir.tensor(array, name=name)
    return ir.Value(name=name, const_value=tensor, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape))


def hadamard_pair(width: int) -> list[ir.Value]:
    """Return the two inputs that give the Hadamard matrix of ``width`` coordinates; those of none for 0."""
    pair = HadamardRotation(width, None).pair if width else (np.ones((1, 1), np.int8),) * 2
    return [constant(name, np.array(matrix)) for name, matrix in zip(("left", "right"), pair, strict=True)]


def _table(problem: Problem, name: str, mode: str, with_hadamard: bool = False) -> Workload:
    product = operator("MatMulTable")
    inputs = _weight_inputs(problem, name)
    pair = hadamard_pair(problem.case.inner) if with_hadamard else []

    def make(x: ir.Value, copy: int) -> list[ir.Node]:
        before = [operator("Hadamard").node([x, *pair])] if with_hadamard else []
        x = before[0].outputs[0] if before else x
        weight = [constant(f"{name}{copy}", problem.shuffle(array, copy)) for name, array in inputs.items()]
        return [*before, product.node([x, *weight, *neutral], {**attributes, "activations": mode})]

    weights = round_weights(problem, name, problem.case.group)
    neutral, attributes = _shared_inputs(weights, problem), _attributes(problem, weights)
    return _workload(problem, inputs, make, weights, with_hadamard)


def _dynamic(problem: Problem, name: str, bits: int, with_hadamard: bool) -> Workload:
    product = operator("MatMulDynamic")
    inputs = _weight_inputs(problem, name)
    pair = hadamard_pair(problem.case.inner if with_hadamard else 0)

    def make(x: ir.Value, copy: int) -> list[ir.Node]:
        weight = [constant(f"{name}{copy}", problem.shuffle(array, copy)) for name, array in inputs.items()]
        return [product.node([x, *weight, *neutral, *pair], {**attributes, "bits": bits, "clip": 1.0})]

    weights = round_weights(problem, name, problem.case.group)
    neutral, attributes = _shared_inputs(weights, problem), _attributes(problem, weights)
    return _workload(problem, inputs, make, weights, with_hadamard)


def _workload(
    problem: Problem, inputs: dict[str, Array], make: Make, weights: RoundedMatrix, with_hadamard: bool
) -> Workload:
    size = sum(array.nbytes for array in inputs.values())
    bound = open_copies(problem, problem.copies(size), problem.case.outer, make)
    x = problem.x.astype(np.float64)
    reference = weights.product(HadamardRotation(x.shape[-1], None).apply(x, -1) if with_hadamard else x)
    return Workload(bound.run, bound.outputs, reference, size + problem.bytes_of_activations)


def _weight_inputs(problem: Problem, name: str) -> dict[str, Array]:
    """Return codes and scales as the operators store them, tiles of output channels first."""
    from graphopt.runtime_ops.matmul_table.spec.packing import pack, tile

    weights = round_weights(problem, name, problem.case.group)

    def make() -> dict[str, Array]:
        return {
            "codes": pack(np.ascontiguousarray(weights.codes.T), weights.format.bits),
            "scales": tile(weights.scales.T),
        }

    return problem.weights.keep(("graphopt", name, problem.case.group), make)


def _shared_inputs(weights: RoundedMatrix, problem: Problem) -> list[ir.Value]:
    """Return table, zero points and bias, which all copies share."""
    return [
        constant("table", next(iter(weights.format.operands.values()))),
        constant("zero_points", np.zeros((1, 1, 1), np.float16)),
        constant("bias", np.zeros(1, np.float32)),
    ]


def _attributes(problem: Problem, weights: RoundedMatrix) -> dict[str, Any]:
    sizes = {"rows": problem.case.inner, "columns": problem.case.outer, "group": problem.case.group}
    return sizes if weights.format.operator == "Dequantize" else {**sizes, "trellis": 1}
