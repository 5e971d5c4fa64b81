"""OpenVINO's products with int4 weights: as it comes, and with activations rounded to int8."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from tools.bench.parts.engine import TOLERANCES, Engine, Workload, optional
from tools.bench.parts.formats import round_weights
from tools.bench.parts.problem import Array, Problem
from tools.bench.parts.unavailable import UnavailableError


def engines() -> list[Engine]:
    """Return the plugin's own choice of activations, and the two that can be requested."""
    return [
        Engine("openvino-int4", TOLERANCES["int8"], partial(_prepare, options={})),
        Engine(
            "openvino-int4-int8",
            TOLERANCES["int8"],
            partial(_prepare, options={"DYNAMIC_QUANTIZATION_GROUP_SIZE": "group"}),
        ),
        Engine(
            "openvino-int4-bf16",
            TOLERANCES["bfloat16"],
            partial(_prepare, options={"DYNAMIC_QUANTIZATION_GROUP_SIZE": "0", "INFERENCE_PRECISION_HINT": "bf16"}),
        ),
    ]


def _prepare(problem: Problem, options: dict[str, str]) -> Workload:
    ov = optional("openvino")
    ops = optional("openvino.opset13", package="openvino")
    case = problem.case
    if case.inner % case.group:
        raise UnavailableError(f"{case.inner} columns are no multiple of {case.group}")
    weights = round_weights(problem, "int4", case.group)
    code_bytes = weights.codes[:, 0::2] | weights.codes[:, 1::2] << 4
    size = code_bytes.nbytes + weights.scales.nbytes
    copies = problem.copies(size)
    inputs, results, weight_arrays = [], [], []
    for copy in range(copies):
        bytes_, scales = problem.shuffle(code_bytes, copy), problem.shuffle(weights.scales, copy)
        weight_arrays.append((bytes_, scales))
        inputs.append(ops.parameter([case.rows, case.inner], np.float32, name=f"x{copy}"))
        results.append(ops.matmul(inputs[-1], _weight(ov, ops, bytes_, scales, case.group), False, True))
    model = ov.Model(results, inputs, "products")
    config = {"INFERENCE_NUM_THREADS": problem.settings.memory.threads, "PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1}
    config |= {key: str(case.group) if value == "group" else value for key, value in options.items()}
    request = ov.Core().compile_model(model, "CPU", config).create_infer_request()
    buffers = [problem.x.copy() for _ in range(copies)]
    for index, buffer in enumerate(buffers):
        request.set_input_tensor(index, ov.Tensor(buffer, shared_memory=True))

    def outputs() -> list[Array]:
        return [request.get_output_tensor(index).data for index in range(copies)]

    reference = weights.product(problem.x)
    return Workload(
        request.infer, outputs, reference, size + problem.bytes_of_activations, keep=(weight_arrays, buffers)
    )


def _weight(ov: Any, ops: Any, code_bytes: Array, scales: Array, group: int) -> Any:
    """Return the nodes that OpenVINO's own compression writes, and that its plugin fuses into the product."""
    outer, inner = code_bytes.shape[0], 2 * code_bytes.shape[1]
    codes = ops.constant(ov.Tensor(code_bytes, [outer, inner // group, group], ov.Type.i4))
    weights = ops.multiply(ops.convert(codes, "f16"), ops.constant(scales[..., None]))
    flat = ops.reshape(weights, ops.constant(np.array([outer, inner], np.int64)), False)
    return ops.convert(flat, "f32")
