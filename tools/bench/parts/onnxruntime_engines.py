"""onnxruntime's own products: float32, and ``MatMulNBits``; and what any model in onnxruntime needs to be timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tools.bench.parts.engine import TOLERANCES, Engine, Prepared, optional
from tools.bench.parts.formats import Rounded, rounded
from tools.bench.parts.problem import Array, Problem, aligned_copy
from tools.bench.parts.unavailable import UnavailableError

STOP_SPINNING = {"session.force_spinning_stop": "1"}
"""Threads spin between the nodes of a run, as in any model, but not behind it, where they would slow other engines."""

_OPSET, _IR = 23, 11


def engines() -> list[Engine]:
    """Return float32, and each width of ``MatMulNBits`` in two sizes of blocks; the last look tables up for 2 bits."""
    found = [Engine("onnxruntime-float", TOLERANCES["float32"], _float)]
    for bits in (2, 4, 8):
        for block in (32, 128):
            prepare = partial(_n_bits, bits=bits, block=block)
            found.append(Engine(f"onnxruntime-matmulnbits-{bits}-g{block}", TOLERANCES["int8"], prepare))
    lookup = partial(_n_bits, bits=2, block=128, entries={"mlas.use_lut_gemm": "1"})
    return [*found, Engine("onnxruntime-matmulnbits-2-g128-lut", TOLERANCES["int8"], lookup, default=False)]


class Bound:
    """A session whose inputs and outputs stay where they are, so that a call costs the same whatever it computes."""

    def __init__(self, session: Any, x: Array, columns: int) -> None:
        """Give every input of ``session`` a copy of ``x``, and every output room for as many rows of ``columns``."""
        ort = optional("onnxruntime")
        self.session = session
        self.binding = session.io_binding()
        room = np.zeros((*x.shape[:-1], columns), np.float32)
        self.inputs = [ort.OrtValue.ortvalue_from_numpy(aligned_copy(x)) for _ in session.get_inputs()]
        self.made = [ort.OrtValue.ortvalue_from_numpy(aligned_copy(room)) for _ in session.get_outputs()]
        for value, buffer in zip(session.get_inputs(), self.inputs, strict=True):
            self.binding.bind_ortvalue_input(value.name, buffer)
        for value, buffer in zip(session.get_outputs(), self.made, strict=True):
            self.binding.bind_ortvalue_output(value.name, buffer)

    def run(self) -> None:
        self.session.run_with_iobinding(self.binding)

    def outputs(self) -> list[Array]:
        return [buffer.numpy() for buffer in self.made]


Nodes = Callable[[int, str, str], tuple[list[onnx.NodeProto], list[onnx.TensorProto]]]


def _bound(problem: Problem, copies: int, make: Nodes, entries: dict[str, str]) -> Bound:
    """Return a session on a graph of ``copies`` products; ``make`` gives the nodes of one, from its x to its y."""
    ort = optional("onnxruntime")
    case = problem.case
    nodes: list[onnx.NodeProto] = []
    constants: list[onnx.TensorProto] = []
    for copy in range(copies):
        made, held = make(copy, f"x{copy}", f"y{copy}")
        nodes += made
        constants += held
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


def _float(problem: Problem) -> Prepared:
    W = problem.weights.values

    def make(copy: int, x: str, y: str) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
        turned = np.ascontiguousarray(problem.shuffle(W, copy).T)
        return [helper.make_node("MatMul", [x, f"w{copy}"], [y])], [numpy_helper.from_array(turned, f"w{copy}")]

    bound = _bound(problem, problem.copies(W.nbytes), make, {})
    expected = problem.x.astype(np.float64) @ W.T.astype(np.float64)
    return Prepared(bound.run, bound.outputs, expected, W.nbytes + problem.bytes_of_activations)


def _n_bits(problem: Problem, bits: int, block: int, entries: dict[str, str] | None = None) -> Prepared:
    case = problem.case
    if case.inner % block:
        raise UnavailableError(f"{case.inner} columns are no multiple of {block}")
    weights = rounded(problem, f"int{bits}", block)
    packed = problem.weights.keep(("matmulnbits", bits, block), partial(_packed, weights))
    scales = weights.scales.astype(np.float32)
    attributes: dict[str, Any] = {
        "K": case.inner,
        "N": case.outer,
        "bits": bits,
        "block_size": block,
        "accuracy_level": 4,
    }

    def make(copy: int, x: str, y: str) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
        held = [problem.shuffle(packed, copy), problem.shuffle(scales, copy)]
        names = [f"b{copy}", f"s{copy}"]
        node = helper.make_node("MatMulNBits", [x, *names], [y], domain="com.microsoft", **attributes)
        return [node], [numpy_helper.from_array(array, name) for array, name in zip(held, names, strict=True)]

    size = packed.nbytes + scales.nbytes
    bound = _bound(problem, problem.copies(size), make, entries or {})
    return Prepared(bound.run, bound.outputs, weights.product(problem.x), size + problem.bytes_of_activations)


def _packed(weights: Rounded) -> Array:
    """Return codes [outer, inner] as [outer, blocks, bytes], the first code in a byte's lowest bits.

    Without zero points the operator takes 2^(bits - 1) from each code: two's complement with its sign bit turned.
    """
    bits = weights.format.bits
    per_byte = 8 // bits
    shifts = np.arange(per_byte, dtype=np.uint8) * np.uint8(bits)
    outer, inner = weights.codes.shape
    digits = (weights.codes ^ np.uint8(1 << bits - 1)).reshape(
        outer, inner // weights.group, weights.group // per_byte, per_byte
    )
    packed: Array = np.bitwise_or.reduce(digits << shifts, axis=-1)
    return packed


__all__: Sequence[str] = ["STOP_SPINNING", "Bound", "engines"]
