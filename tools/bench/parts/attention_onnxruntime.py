"""onnxruntime's own attentions: ``GroupQueryAttention`` over caches of several types, and ONNX's ``Attention``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tools.bench.parts.attention_binding import Binding
from tools.bench.parts.attention_problem import AttentionProblem
from tools.bench.parts.attention_reference import Doubles, attend_flat
from tools.bench.parts.engine import AnyEngine, Workload, optional
from tools.bench.parts.onnxruntime_engines import STOP_SPINNING
from tools.bench.parts.problem import Array
from tools.bench.parts.unavailable import UnavailableError

_IR = 11

# By the norm of y, as graphopt's; in float16 y itself is rounded, and scores too, large ones to 1e-2.
_FLOAT32, _FLOAT16 = 2e-5, 5e-3


def engines() -> list[AnyEngine[AttentionProblem]]:
    """Return ``GroupQueryAttention`` by the type of its cache; ``Attention`` with a cache that it copies, or in place.

    In place needs opset 24: ``TensorScatter`` before it, and the number of tokens as an input. ``-grouped`` passes the
    query heads that share a KV head as queries of one head, which is the same where there is one new token.
    """
    engine = partial(AnyEngine[AttentionProblem], kind="attention")
    return [
        engine("onnxruntime-gqa-float32", _FLOAT32, partial(_gqa_float, dtype=np.float32)),
        engine("onnxruntime-gqa-float16", _FLOAT16, partial(_gqa_float, dtype=np.float16)),
        engine("onnxruntime-gqa-int8", _FLOAT32, partial(_gqa_integers, bits=8)),
        engine("onnxruntime-gqa-int4", _FLOAT32, partial(_gqa_integers, bits=4)),
        engine("onnxruntime-attention", _FLOAT32, partial(_attention, group_heads=False)),
        engine("onnxruntime-attention-grouped", _FLOAT32, partial(_attention, group_heads=True)),
        engine("onnxruntime-attention-copying", _FLOAT32, _copying),
    ]


def reference_of_floats(problem: AttentionProblem, dtype: type[np.floating[Any]]) -> Doubles:
    """Return y in float64, [S, Hq, D], from keys and values that were rounded to ``dtype``."""

    def read_tokens(head: int, part: slice) -> tuple[Array, Array]:
        keys, values = (array[0, head, part].astype(dtype) for array in problem.cache)
        return keys, values

    return problem.keep(("expected", dtype), lambda: _flat(problem, read_tokens))


def _flat(problem: AttentionProblem, read_tokens: Any) -> Doubles:
    return attend_flat(problem.query, problem.scale, problem.case.context, read_tokens, problem.case.kv_heads)


def _gqa_float(problem: AttentionProblem, dtype: type[np.floating[Any]]) -> Workload:
    # The caches of float32 are the problem's own: all engines append the same.
    cache = [array.astype(dtype, copy=False) for array in problem.cache]
    # A query of float16 is another query.
    query = problem.query.astype(dtype)

    def read_tokens(head: int, part: slice) -> tuple[Array, Array]:
        keys, values = (array[0, head, part] for array in cache)
        return keys, values

    case = problem.case
    reference = attend_flat(query, problem.scale, case.context, read_tokens, case.kv_heads)
    return _gqa(problem, dtype, cache, {}, {}, reference)


def _gqa_integers(problem: AttentionProblem, bits: int) -> Workload:
    limit = (1 << bits - 1) - 1
    codes, scales = [], []
    for array in problem.cache:
        scale = np.maximum(array.max(axis=2, keepdims=True), -array.min(axis=2, keepdims=True)) / np.float32(limit)
        scales.append(scale)
        array_codes = np.empty(array.shape, np.int8)
        for head in range(problem.case.kv_heads):
            levels = np.rint(array[0, head] / scale[0, head])
            array_codes[0, head] = np.clip(levels, -limit - 1, limit, out=levels)
        codes.append(array_codes)

    def read_tokens(head: int, part: slice) -> tuple[Array, Array]:
        keys, values = (
            array_codes[0, head, part] * scale[0, head].astype(np.float64)
            for array_codes, scale in zip(codes, scales, strict=True)
        )
        return keys, values

    kind = "PER_CHANNEL"
    attributes = {"kv_cache_bit_width": bits, "k_quant_type": kind, "v_quant_type": kind}
    cache = codes if bits == 8 else [_two_in_a_byte(array_codes) for array_codes in codes]
    scale_inputs = dict(zip(("k_scale", "v_scale"), scales, strict=True))
    return _gqa(problem, np.float32, cache, scale_inputs, attributes, _flat(problem, read_tokens))


def _two_in_a_byte(codes: Array) -> Array:
    """Return codes of 4 bits as the operator packs them: 8 more, the first of two in the low bits."""
    pairs: Array = codes[..., 0::2].view(np.uint8) + np.uint8(8)
    pairs |= (codes[..., 1::2].view(np.uint8) + np.uint8(8)) << np.uint8(4)
    return pairs


def _gqa(
    problem: AttentionProblem,
    dtype: type[np.floating[Any]],
    cache: list[Array],
    scales: Mapping[str, Array],
    attributes: Mapping[str, Any],
    reference: Doubles,
) -> Workload:
    case = problem.case
    size = sum(array.nbytes for array in (*cache, *scales.values()))
    copies = [cache, *([array.copy() for array in cache] for _ in range(problem.copies(size) - 1))]
    rows = (1, case.tokens, -1)
    step_inputs: dict[str, Array] = {"query": problem.query.astype(dtype).reshape(rows)}
    for name, array in zip(("key", "value"), problem.new, strict=True):
        step_inputs[name] = np.ascontiguousarray(array.swapaxes(1, 2).astype(dtype)).reshape(rows)
    last, total = np.array([case.context - 1], np.int32), np.array(case.context, np.int32)
    inputs: dict[str, Array] = {**step_inputs, "last": last, "total": total}
    outputs: dict[str, Array] = {}
    nodes = []
    y = [np.zeros((1, case.tokens, case.heads * case.size), dtype) for _ in copies]
    for copy, (keys, values) in enumerate(copies):
        past, present = ([f"{name}_{part}{copy}" for part in ("key", "value")] for name in ("past", "present"))
        inputs |= dict(zip(past, (keys, values), strict=True))
        outputs |= {f"y{copy}": y[copy], **dict(zip(present, (keys, values), strict=True))}
        absent_inputs = [""] * 5 if scales else []
        nodes.append(
            helper.make_node(
                "GroupQueryAttention",
                [*step_inputs, *past, "last", "total", *absent_inputs, *scales],
                [f"y{copy}", *present],
                domain="com.microsoft",
                num_heads=case.heads,
                kv_num_heads=case.kv_heads,
                scale=problem.scale,
                **attributes,
            )
        )
    binding = _bind(problem, nodes, inputs, outputs, scales, 23)
    activation_bytes = problem.bytes_of_activations * np.dtype(dtype).itemsize // 4
    return Workload(binding.run, lambda: y, reference, size + activation_bytes, keep=binding)


def _attention(problem: AttentionProblem, group_heads: bool) -> Workload:
    """``Attention`` of opset 24: new tokens are written into the cache in place, and the number of tokens is given."""
    case = problem.case
    if group_heads and case.tokens > 1:
        raise UnavailableError(
            "several new tokens cannot be grouped: queries that are heads of a group would see tokens after them"
        )
    size = sum(array.nbytes for array in problem.cache)
    copies = [problem.cache, *(tuple(array.copy() for array in problem.cache) for _ in range(problem.copies(size) - 1))]
    shape = (1, case.kv_heads, -1, case.size) if group_heads else (1, case.tokens, case.heads, case.size)
    query = problem.query.reshape(shape) if group_heads else problem.query.reshape(shape).swapaxes(1, 2)
    keys, values = problem.new
    inputs: dict[str, Array] = {"query": np.ascontiguousarray(query), "key": keys.copy(), "value": values.copy()}
    inputs |= {"past": np.array([case.past]), "total": np.array([case.context])}
    outputs: dict[str, Array] = {}
    y = [np.zeros(query.shape, np.float32) for _ in copies]
    nodes = []
    for copy, cache in enumerate(copies):
        for name, array in zip(("key", "value"), cache, strict=True):
            inputs[f"past_{name}{copy}"] = outputs[f"present_{name}{copy}"] = array
            scatter_inputs = [f"past_{name}{copy}", name, "past"]
            nodes.append(helper.make_node("TensorScatter", scatter_inputs, [f"present_{name}{copy}"], axis=2))
        outputs[f"y{copy}"] = y[copy]
        attention_inputs = ["query", f"present_key{copy}", f"present_value{copy}", "", "", "", "total"]
        is_causal = int(case.tokens > 1)
        nodes.append(
            helper.make_node("Attention", attention_inputs, [f"y{copy}"], scale=problem.scale, is_causal=is_causal)
        )
    binding = _bind(problem, nodes, inputs, outputs, {}, 24)
    reference = reference_of_floats(problem, np.float32)

    def read_outputs() -> list[Array]:
        return y if group_heads else [array.swapaxes(1, 2) for array in y]

    return Workload(binding.run, read_outputs, reference, size + problem.bytes_of_activations, keep=binding)


def _copying(problem: AttentionProblem) -> Workload:
    """``Attention`` of opset 23: it reads the cache before the step and writes the one after it to another tensor."""
    case = problem.case
    before = [np.ascontiguousarray(array[:, :, : case.past]) for array in problem.cache]
    after = [np.zeros_like(array) for array in problem.cache]
    size = sum(array.nbytes for array in problem.cache)
    copies = [(before, after)]
    for _ in range(problem.copies(size) - 1):
        copies.append(([array.copy() for array in before], [array.copy() for array in after]))
    query = np.ascontiguousarray(problem.query[None].swapaxes(1, 2))
    keys, values = problem.new
    inputs: dict[str, Array] = {"query": query, "key": keys.copy(), "value": values.copy()}
    outputs: dict[str, Array] = {}
    y = [np.zeros(query.shape, np.float32) for _ in copies]
    nodes = []
    for copy, (past, present) in enumerate(copies):
        names = [[f"{name}_{part}{copy}" for part in ("key", "value")] for name in ("past", "present")]
        inputs |= dict(zip(names[0], past, strict=True))
        outputs |= {f"y{copy}": y[copy], **dict(zip(names[1], present, strict=True))}
        node_inputs, node_outputs = ["query", "key", "value", "", *names[0]], [f"y{copy}", *names[1]]
        nodes.append(helper.make_node("Attention", node_inputs, node_outputs, scale=problem.scale, is_causal=1))
    binding = _bind(problem, nodes, inputs, outputs, {}, 23)
    reference = reference_of_floats(problem, np.float32)
    bytes_moved = size + problem.bytes_of_activations
    return Workload(binding.run, lambda: [array.swapaxes(1, 2) for array in y], reference, bytes_moved, keep=binding)


def _bind(
    problem: AttentionProblem,
    nodes: list[onnx.NodeProto],
    inputs: Mapping[str, Array],
    outputs: Mapping[str, Array],
    constants: Mapping[str, Array],
    opset: int,
) -> Binding:
    """Return a session of the nodes on the arrays.

    Raises:
        UnavailableError: onnxruntime refuses the graph.
    """
    ort = optional("onnxruntime")
    graph_inputs, graph_outputs = (
        [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
            for name, array in arrays.items()
        ]
        for arrays in (inputs, outputs)
    )
    initializers: list[TensorProto] = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "attention", graph_inputs, graph_outputs, initializer=initializers)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=_IR)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = problem.settings.memory.threads
    for key, value in STOP_SPINNING.items():
        options.add_session_config_entry(key, value)
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise UnavailableError(str(error).splitlines()[0]) from error
    return Binding(session, inputs, outputs)
