"""onnxruntime's own quantizers of weights, on the graph that graphopt starts from."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

Feeds = Sequence[Mapping[str, np.ndarray]]
Method = Callable[[int, Feeds], dict[str, Any]]

METHODS: dict[str, Method] = {}


def _method(name: str) -> Callable[[Method], Method]:
    def register(method: Method) -> Method:
        METHODS[name] = method
        return method

    return register


@_method("RTN")
def _nearest(group: int, feeds: Feeds) -> dict[str, Any]:
    """Round to nearest, with zero points."""
    return {"block_size": group, "is_symmetric": False, "op_types_to_quantize": ("MatMul",)}


@_method("HQQ")
def _half_quadratic(group: int, feeds: Feeds) -> dict[str, Any]:
    """Zero points by half-quadratic optimization; scales and zero points in float32."""
    from onnxruntime.quantization.matmul_nbits_quantizer import HQQWeightOnlyQuantConfig

    return {"algo_config": HQQWeightOnlyQuantConfig(block_size=group)}


@_method("k-quant")
def _k_quant(group: int, feeds: Feeds) -> dict[str, Any]:
    """llama.cpp's search of scales and minimums."""
    from onnxruntime.quantization.matmul_nbits_quantizer import KQuantWeightOnlyQuantConfig

    return {"block_size": group, "algo_config": KQuantWeightOnlyQuantConfig()}


@_method("GPTQ")
def _gptq(group: int, feeds: Feeds) -> dict[str, Any]:
    """GPTQ; it runs all of the model for each input of a product and each text."""
    from onnxruntime.quantization.calibrate import CalibrationDataReader
    from onnxruntime.quantization.matmul_nbits_quantizer import GPTQWeightOnlyQuantConfig

    class Texts(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.texts = list(feeds)

        def get_next(self) -> Mapping[str, np.ndarray] | None:
            return self.texts.pop(0) if self.texts else None

    config = GPTQWeightOnlyQuantConfig(calibration_data_reader=Texts())
    return {"block_size": group, "is_symmetric": False, "algo_config": config}


def with_matrices(model: onnx.ModelProto) -> onnx.ModelProto:
    """Give each transposed initializer, such as a tied lm_head, a tensor of its own: quantizers skip it otherwise."""
    graph = model.graph
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    for node in [node for node in graph.node if node.op_type == "Transpose" and node.input[0] in initializers]:
        order = next((list(attribute.ints) for attribute in node.attribute if attribute.name == "perm"), None)
        matrix = onnx.numpy_helper.to_array(initializers[node.input[0]]).transpose(order)
        graph.initializer.append(onnx.numpy_helper.from_array(np.ascontiguousarray(matrix), node.output[0]))
        graph.node.remove(node)
    return model


def with_tables(model: onnx.ModelProto, group: int) -> Any:
    """Round the table of tokens to nearest, and return the quantizer that holds the model then."""
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    tables = {"block_size": group, "is_symmetric": False, "op_types_to_quantize": ("Gather",)}
    quantizer = MatMulNBitsQuantizer(model, **tables)
    quantizer.process()
    return quantizer


def quantize(model: Path, method: str, group: int, output: Path, feeds: Feeds = ()) -> int:
    """Quantize the model in the folder ``model`` into the folder ``output``; return the bytes of its weights.

    ``feeds`` are the inputs of the model for the texts that a method calibrates on.

    No method but round to nearest takes the table of tokens, so it is always rounded to nearest.

    Raises:
        Exception: whatever onnxruntime raises where a method fails.
    """
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    float_model = with_matrices(onnx.load(model / "model.onnx"))
    quantizer = MatMulNBitsQuantizer(float_model, **METHODS[method](group, feeds))
    quantizer.process()
    quantizer = with_tables(quantizer.model.model, group)
    output.mkdir(parents=True, exist_ok=True)
    (output / "model.onnx.data").unlink(missing_ok=True)  # the library appends to it
    quantizer.model.save_model_to_file(str(output / "model.onnx"), use_external_data_format=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        if (model / name).is_file():
            shutil.copy(model / name, output / name)
    return (output / "model.onnx.data").stat().st_size
