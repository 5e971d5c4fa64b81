"""onnxruntime's own quantizers of weights, on the graph that graphopt starts from."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx

METHODS: dict[str, Callable[[int], dict[str, Any]]] = {}


def _method(name: str) -> Callable[[Callable[[int], dict[str, Any]]], Callable[[int], dict[str, Any]]]:
    def register(made: Callable[[int], dict[str, Any]]) -> Callable[[int], dict[str, Any]]:
        METHODS[name] = made
        return made

    return register


@_method("RTN")
def _nearest(group: int) -> dict[str, Any]:
    """Round to nearest, with zero points; the table of tokens too, where it is of its own."""
    return {"block_size": group, "is_symmetric": False, "op_types_to_quantize": ("MatMul", "Gather")}


@_method("HQQ")
def _half_quadratic(group: int) -> dict[str, Any]:
    """Zero points by half-quadratic optimization; matrices only."""
    from onnxruntime.quantization.matmul_nbits_quantizer import HQQWeightOnlyQuantConfig

    return {"algo_config": HQQWeightOnlyQuantConfig(block_size=group)}


@_method("k-quant")
def _k_quant(group: int) -> dict[str, Any]:
    """llama.cpp's search of scales and minimums, in groups of 32 whatever is asked."""
    from onnxruntime.quantization.matmul_nbits_quantizer import KQuantWeightOnlyQuantConfig

    return {"algo_config": KQuantWeightOnlyQuantConfig()}


def quantized(model: Path, method: str, group: int, output: Path) -> int:
    """Quantize the model in the folder ``model`` into the folder ``output``; return the bytes of its weights.

    Raises:
        Exception: whatever onnxruntime raises where it cannot.
    """
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    loaded = onnx.load(model / "model.onnx")
    quantizer = MatMulNBitsQuantizer(loaded, **METHODS[method](group))
    quantizer.process()
    output.mkdir(parents=True, exist_ok=True)
    quantizer.model.save_model_to_file(str(output / "model.onnx"), use_external_data_format=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        if (model / name).is_file():
            shutil.copy(model / name, output / name)
    return (output / "model.onnx.data").stat().st_size
