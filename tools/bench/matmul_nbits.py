"""Times onnxruntime's ``MatMulNBits`` by bits, accuracy level and the form of zero points, in turn in one process.

python tools/bench/matmul_nbits.py [--rows 1] [--size 2048] [--repeats 15]
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

GROUP = 32


def product(bits: int, zeros: str, level: int, size: int) -> bytes:
    """Return a model of one product [size, size] with random codes."""
    random, groups = np.random.default_rng(0), size // GROUP
    weights = {
        "codes": random.integers(0, 256, (size, groups, GROUP * bits // 8), np.uint8),
        "scales": (random.random(size * groups) / 50).astype(np.float32),
    }
    numbers = random.integers(0, 1 << bits, (size, groups))
    if zeros == "floats":
        weights["zeros"] = numbers.astype(np.float32).reshape(-1)
    if zeros == "codes":
        parts = numbers.reshape(size, -1, 8 // bits) << (bits * np.arange(8 // bits))
        weights["zeros"] = np.bitwise_or.reduce(parts, -1).astype(np.uint8).reshape(-1)
    attributes: dict[str, Any] = {"K": size, "N": size, "bits": bits, "block_size": GROUP}
    if level:
        attributes["accuracy_level"] = level
    node = helper.make_node("MatMulNBits", ["x", *weights], ["y"], domain="com.microsoft", **attributes)
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", size]) for name in "xy"]
    tensors = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph([node], "product", ports[:1], ports[1:], tensors)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return bytes(model.SerializeToString())


def main() -> None:
    """Print a table: the fastest run of each, in milliseconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--size", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    x = np.random.default_rng(1).standard_normal((arguments.rows, arguments.size)).astype(np.float32)
    print("bits level zeros ms")
    for bits in (2, 4, 8):
        for level in (0, 4):
            for zeros in ("none", "floats", "codes"):
                content = product(bits, zeros, level, arguments.size)
                session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
                times = []
                try:
                    for _ in range(arguments.repeats):
                        start = time.perf_counter()
                        session.run(None, {"x": x})
                        times.append(time.perf_counter() - start)
                except Exception as error:  # whatever onnxruntime raises where it has no kernel
                    print(bits, level, zeros, f"does not run: {str(error)[-80:]}")
                    continue
                print(bits, level, zeros, f"{min(times) * 1e3:.2f}")


if __name__ == "__main__":
    main()
