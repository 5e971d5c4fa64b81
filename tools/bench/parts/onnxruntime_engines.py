"""onnxruntime's own products: float32, and ``MatMulNBits``; and what any model in onnxruntime needs to be timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tools.bench.parts.engine import TOLERANCES, Engine, Workload, optional
from tools.bench.parts.formats import RoundedMatrix, round_weights
from tools.bench.parts.problem import Array, Problem, aligned_copy
from tools.bench.parts.unavailable import UnavailableError

STOP_SPINNING = {"session.force_spinning_stop": "1"}
"""Threads spin between the nodes of a run, as in any model, but not after it, where they would slow other engines."""

_OPSET, _IR = 23, 11


def engines() -> list[Engine]:
    """Return float32, and each width of ``MatMulNBits`` in two sizes of blocks; the last uses tables for 2 bits."""
    candidates = [Engine("onnxruntime-float", TOLERANCES["float32"], _float)]
    for bits in (2, 4, 8):
        for block in (32, 128):
            prepare = partial(_n_bits, bits=bits, block=block)
            candidates.append(Engine(f"onnxruntime-matmulnbits-{bits}-g{block}", TOLERANCES["int8"], prepare))
    lookup = partial(_n_bits, bits=2, block=128, entries={"mlas.use_lut_gemm": "1"})
    return [*candidates, Engine("onnxruntime-matmulnbits-2-g128-lut", TOLERANCES["int8"], lookup, default=False)]


class Bound:
    """A session whose inputs and outputs stay where they are, so that a call costs the same whatever it computes."""

    def __init__(self, session: Any, x: Array, columns: int) -> None:
        """Give every input of ``session`` a copy of ``x``, and every output room for as many rows of ``columns``."""
        ort = optional("onnxruntime")
        self.session = session
        self.binding = session.io_binding()
        room = np.zeros((*x.shape[:-1], columns), np.float32)
        self.inputs = [ort.OrtValue.ortvalue_from_numpy(aligned_copy(x)) for _ in session.get_inputs()]
        self.results = [ort.OrtValue.ortvalue_from_numpy(aligned_copy(room)) for _ in session.get_outputs()]
        for value, buffer in zip(session.get_inputs(), self.inputs, strict=True):
            self.binding.bind_ortvalue_input(value.name, buffer)
        for value, buffer in zip(session.get_outputs(), self.results, strict=True):
            self.binding.bind_ortvalue_output(value.name, buffer)

    def run(self) -> None:
        self.session.run_with_iobinding(self.binding)

    def outputs(self) -> list[Array]:
        return [buffer.numpy() for buffer in self.results]


Nodes = Callable[[int, str, str], tuple[list[onnx.NodeProto], list[onnx.TensorProto]]]


def _bound(problem: Problem, copies: int, make: Nodes, entries: dict[str, str]) -> Bound:
    """Return a session on a graph of ``copies`` products; ``make`` gives the nodes of one, from its x to its y."""
    ort = optional("onnxruntime")
    case = problem.case
    nodes: list[onnx.NodeProto] = []
    constants: list[onnx.TensorProto] = []
    for copy in range(copies):
        copy_nodes, copy_constants = make(copy, f"x{copy}", f"y{copy}")
        nodes += copy_nodes
        constants += copy_constants
    inputs, outputs = (
        [helper.make_tensor_value_info(f"{name}{copy}", TensorProto.FLOAT, [case.rows, size]) for copy in range(copies)]
        for name, size in (("x", case.inner), ("y", case.outer))
    )
    graph = helper.make_graph(nodes, "products", inputs, outputs, initializer=constants)
    opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=_IR)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = problem.settings.memory.threads
    for key, value in {**STOP_SPINNING, **entries}.items():
        options.add_session_config_entry(key, value)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return Bound(session, problem.x, case.outer)


def _float(problem: Problem) -> Workload:
    W = problem.weights.values

    def make(copy: int, x: str, y: str) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
        matrix = np.ascontiguousarray(problem.shuffle(W, copy).T)
        return [helper.make_node("MatMul", [x, f"w{copy}"], [y])], [numpy_helper.from_array(matrix, f"w{copy}")]

    bound = _bound(problem, problem.copies(W.nbytes), make, {})
    reference = problem.x.astype(np.float64) @ W.T.astype(np.float64)
    return Workload(bound.run, bound.outputs, reference, W.nbytes + problem.bytes_of_activations)


def _n_bits(problem: Problem, bits: int, block: int, entries: dict[str, str] | None = None) -> Workload:
    case = problem.case
    if case.inner % block:
        raise UnavailableError(f"{case.inner} columns are no multiple of {block}")
    weights = round_weights(problem, f"int{bits}", block)
    blocks = problem.weights.keep(("matmulnbits", bits, block), partial(_pack, weights))
    scales = weights.scales.astype(np.float32)
    attributes: dict[str, Any] = {
        "K": case.inner,
        "N": case.outer,
        "bits": bits,
        "block_size": block,
        "accuracy_level": 4,
    }

    def make(copy: int, x: str, y: str) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
        arrays = [problem.shuffle(blocks, copy), problem.shuffle(scales, copy)]
        names = [f"b{copy}", f"s{copy}"]
        node = helper.make_node("MatMulNBits", [x, *names], [y], domain="com.microsoft", **attributes)
        return [node], [numpy_helper.from_array(array, name) for array, name in zip(arrays, names, strict=True)]

    size = blocks.nbytes + scales.nbytes
    bound = _bound(problem, problem.copies(size), make, entries or {})
    return Workload(bound.run, bound.outputs, weights.product(problem.x), size + problem.bytes_of_activations)


def _pack(weights: RoundedMatrix) -> Array:
    """Return codes [outer, inner] as [outer, blocks, bytes], the first code in a byte's lowest bits.

    Without zero points the operator subtracts 2^(bits - 1) from each code: two's complement with its sign bit flipped.
    """
    bits = weights.format.bits
    per_byte = 8 // bits
    shifts = np.arange(per_byte, dtype=np.uint8) * np.uint8(bits)
    outer, inner = weights.codes.shape
    digits = (weights.codes ^ np.uint8(1 << bits - 1)).reshape(
        outer, inner // weights.group, weights.group // per_byte, per_byte
    )
    blocks: Array = np.bitwise_or.reduce(digits << shifts, axis=-1)
    return blocks


__all__: Sequence[str] = ["STOP_SPINNING", "Bound", "engines"]
