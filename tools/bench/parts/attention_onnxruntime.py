"""onnxruntime's own attentions: ``GroupQueryAttention`` over caches of several types, and ONNX's ``Attention``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tools.bench.parts.attention_binding import Binding
from tools.bench.parts.attention_expected import Doubles, attend_flat
from tools.bench.parts.attention_problem import AttentionProblem
from tools.bench.parts.engine import AnyEngine, Prepared, optional
from tools.bench.parts.onnxruntime_engines import STOP_SPINNING
from tools.bench.parts.problem import Array
from tools.bench.parts.unavailable import UnavailableError

_IR = 11

# By the norm of y, as graphopt's; in float16 y itself is rounded, and scores too, large ones to 1e-2.
_FLOAT32, _FLOAT16 = 2e-5, 5e-3


def engines() -> list[AnyEngine[AttentionProblem]]:
    """Return ``GroupQueryAttention`` by the type of its cache; ``Attention`` with a cache that it copies, or in place.

    In place is opset 24, ``TensorScatter`` in front and the number of tokens given. ``-grouped`` gives it the query
    heads that share a KV head as so many queries of one head, which is the same where there is one new token.
    """
    made = partial(AnyEngine[AttentionProblem], kind="attention")
    return [
        made("onnxruntime-gqa-float32", _FLOAT32, partial(_gqa_float, dtype=np.float32)),
        made("onnxruntime-gqa-float16", _FLOAT16, partial(_gqa_float, dtype=np.float16)),
        made("onnxruntime-gqa-int8", _FLOAT32, partial(_gqa_integers, bits=8)),
        made("onnxruntime-gqa-int4", _FLOAT32, partial(_gqa_integers, bits=4)),
        made("onnxruntime-attention", _FLOAT32, partial(_attention, grouped=False)),
        made("onnxruntime-attention-grouped", _FLOAT32, partial(_attention, grouped=True)),
        made("onnxruntime-attention-copying", _FLOAT32, _copying),
    ]


def expected_of_floats(problem: AttentionProblem, dtype: type[np.floating[Any]]) -> Doubles:
    """Return y in float64, [S, Hq, D], from keys and values that were rounded to ``dtype``."""

    def read(head: int, part: slice) -> tuple[Array, Array]:
        keys, values = (array[0, head, part].astype(dtype) for array in problem.cache)
        return keys, values

    return problem.keep(("expected", dtype), lambda: _flat(problem, read))


def _flat(problem: AttentionProblem, read: Any) -> Doubles:
    return attend_flat(problem.query, problem.scale, problem.case.context, read, problem.case.kv_heads)


def _gqa_float(problem: AttentionProblem, dtype: type[np.floating[Any]]) -> Prepared:
    # The caches of float32 are the problem's own: all engines append the same.
    cache = [array.astype(dtype, copy=False) for array in problem.cache]
    # A query of float16 is another query.
    query = problem.query.astype(dtype)

    def read(head: int, part: slice) -> tuple[Array, Array]:
        keys, values = (array[0, head, part] for array in cache)
        return keys, values

    case = problem.case
    expected = attend_flat(query, problem.scale, case.context, read, case.kv_heads)
    return _gqa(problem, dtype, cache, {}, {}, expected)


def _gqa_integers(problem: AttentionProblem, bits: int) -> Prepared:
    limit = (1 << bits - 1) - 1
    codes, scales = [], []
    for array in problem.cache:
        scale = np.maximum(array.max(axis=2, keepdims=True), -array.min(axis=2, keepdims=True)) / np.float32(limit)
        scales.append(scale)
        made = np.empty(array.shape, np.int8)
        for head in range(problem.case.kv_heads):
            rounded = np.rint(array[0, head] / scale[0, head])
            made[0, head] = np.clip(rounded, -limit - 1, limit, out=rounded)
        codes.append(made)

    def read(head: int, part: slice) -> tuple[Array, Array]:
        keys, values = (
            made[0, head, part] * scale[0, head].astype(np.float64) for made, scale in zip(codes, scales, strict=True)
        )
        return keys, values

    kind = "PER_CHANNEL"
    attributes = {"kv_cache_bit_width": bits, "k_quant_type": kind, "v_quant_type": kind}
    cache = codes if bits == 8 else [_two_in_a_byte(made) for made in codes]
    named = dict(zip(("k_scale", "v_scale"), scales, strict=True))
    return _gqa(problem, np.float32, cache, named, attributes, _flat(problem, read))


def _two_in_a_byte(codes: Array) -> Array:
    """Return codes of 4 bits as the operator packs them: 8 more, the first of two in the low bits."""
    packed: Array = codes[..., 0::2].view(np.uint8) + np.uint8(8)
    packed |= (codes[..., 1::2].view(np.uint8) + np.uint8(8)) << np.uint8(4)
    return packed


def _gqa(
    problem: AttentionProblem,
    dtype: type[np.floating[Any]],
    cache: list[Array],
    scales: Mapping[str, Array],
    attributes: Mapping[str, Any],
    expected: Doubles,
) -> Prepared:
    case = problem.case
    size = sum(array.nbytes for array in (*cache, *scales.values()))
    copies = [cache, *([array.copy() for array in cache] for _ in range(problem.copies(size) - 1))]
    rows = (1, case.tokens, -1)
    asked: dict[str, Array] = {"query": problem.query.astype(dtype).reshape(rows)}
    for name, array in zip(("key", "value"), problem.new, strict=True):
        asked[name] = np.ascontiguousarray(array.swapaxes(1, 2).astype(dtype)).reshape(rows)
    last, total = np.array([case.context - 1], np.int32), np.array(case.context, np.int32)
    inputs: dict[str, Array] = {**asked, "last": last, "total": total}
    outputs: dict[str, Array] = {}
    nodes = []
    y = [np.zeros((1, case.tokens, case.heads * case.size), dtype) for _ in copies]
    for copy, (keys, values) in enumerate(copies):
        past, present = ([f"{name}_{which}{copy}" for which in ("key", "value")] for name in ("past", "present"))
        inputs |= dict(zip(past, (keys, values), strict=True))
        outputs |= {f"y{copy}": y[copy], **dict(zip(present, (keys, values), strict=True))}
        unused = [""] * 5 if scales else []
        nodes.append(
            helper.make_node(
                "GroupQueryAttention",
                [*asked, *past, "last", "total", *unused, *scales],
                [f"y{copy}", *present],
                domain="com.microsoft",
                num_heads=case.heads,
                kv_num_heads=case.kv_heads,
                scale=problem.scale,
                **attributes,
            )
        )
    binding = _bind(problem, nodes, inputs, outputs, scales, 23)
    moved = problem.bytes_of_activations * np.dtype(dtype).itemsize // 4
    return Prepared(binding.run, lambda: y, expected, size + moved, keep=binding)


def _attention(problem: AttentionProblem, grouped: bool) -> Prepared:
    """``Attention`` of opset 24: new tokens are written into the cache in place, and the number of tokens is given."""
    case = problem.case
    if grouped and case.tokens > 1:
        raise UnavailableError("several new tokens cannot be so many heads: a query would see what is behind it")
    size = sum(array.nbytes for array in problem.cache)
    copies = [problem.cache, *(tuple(array.copy() for array in problem.cache) for _ in range(problem.copies(size) - 1))]
    shape = (1, case.kv_heads, -1, case.size) if grouped else (1, case.tokens, case.heads, case.size)
    query = problem.query.reshape(shape) if grouped else problem.query.reshape(shape).swapaxes(1, 2)
    keys, values = problem.new
    inputs: dict[str, Array] = {"query": np.ascontiguousarray(query), "key": keys.copy(), "value": values.copy()}
    inputs |= {"past": np.array([case.past]), "total": np.array([case.context])}
    outputs: dict[str, Array] = {}
    y = [np.zeros(query.shape, np.float32) for _ in copies]
    nodes = []
    for copy, cache in enumerate(copies):
        for name, array in zip(("key", "value"), cache, strict=True):
            inputs[f"past_{name}{copy}"] = outputs[f"present_{name}{copy}"] = array
            written = [f"past_{name}{copy}", name, "past"]
            nodes.append(helper.make_node("TensorScatter", written, [f"present_{name}{copy}"], axis=2))
        outputs[f"y{copy}"] = y[copy]
        read = ["query", f"present_key{copy}", f"present_value{copy}", "", "", "", "total"]
        is_causal = int(case.tokens > 1)
        nodes.append(helper.make_node("Attention", read, [f"y{copy}"], scale=problem.scale, is_causal=is_causal))
    binding = _bind(problem, nodes, inputs, outputs, {}, 24)
    expected = expected_of_floats(problem, np.float32)

    def made() -> list[Array]:
        return y if grouped else [each.swapaxes(1, 2) for each in y]

    return Prepared(binding.run, made, expected, size + problem.bytes_of_activations, keep=binding)


def _copying(problem: AttentionProblem) -> Prepared:
    """``Attention`` of opset 23: the cache before the step is an input, the one behind it another tensor."""
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
        names = [[f"{name}_{which}{copy}" for which in ("key", "value")] for name in ("past", "present")]
        inputs |= dict(zip(names[0], past, strict=True))
        outputs |= {f"y{copy}": y[copy], **dict(zip(names[1], present, strict=True))}
        read, written = ["query", "key", "value", "", *names[0]], [f"y{copy}", *names[1]]
        nodes.append(helper.make_node("Attention", read, written, scale=problem.scale, is_causal=1))
    binding = _bind(problem, nodes, inputs, outputs, {}, 23)
    expected = expected_of_floats(problem, np.float32)
    moved = size + problem.bytes_of_activations
    return Prepared(binding.run, lambda: [each.swapaxes(1, 2) for each in y], expected, moved, keep=binding)


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
    given, made = (
        [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
            for name, array in arrays.items()
        ]
        for arrays in (inputs, outputs)
    )
    held: list[TensorProto] = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "attention", given, made, initializer=held)
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
