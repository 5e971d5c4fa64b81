"""Olive's quantizers of weights, on the graph that graphopt starts from.

It is ``olive-ai`` on PyPI. Its passes on ONNX graphs make codes that onnxruntime runs. Its GPTQ is a pass on PyTorch
models: here its code for one matrix rounds each matrix of the graph, on the Hessians that graphopt collected, and the
result runs as floats.
"""

from __future__ import annotations

import importlib
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from tools.bench.peers.nbits import with_matrices, with_tables

Array = npt.NDArray[np.float32]

_PASSES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "RTN": ("rtn_quantization", "OnnxBlockWiseRtnQuantization", {"is_symmetric": False}),
    "k-quant": ("kquant_quantization", "OnnxKQuantQuantization", {}),
    "HQQ": ("hqq_quantization", "OnnxHqqQuantization", {}),
}
METHODS = (*_PASSES, "GPTQ")


def quantize(model: Path, method: str, group: int, output: Path, hessians: Mapping[str, Array]) -> int:
    """Quantize the model in the folder ``model`` to 4 bits into the folder ``output``; return the bytes of its weights.

    Args:
        model: a folder with ``model.onnx``.
        method: one of :data:`METHODS`.
        group: weights that share a scale.
        output: where it goes.
        hessians: X^T X of the input of each product, by the name of the value; read by GPTQ alone.

    Raises:
        ImportError: Olive is not installed.
    """
    output.mkdir(parents=True, exist_ok=True)
    (output / "model.onnx.data").unlink(missing_ok=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        if (model / name).is_file():
            shutil.copy(model / name, output / name)
    float_model = with_matrices(onnx.load(model / "model.onnx"))
    if method == "GPTQ":
        size = _gptq(float_model, group, hessians)
        _save(float_model, output / "model.onnx")
        return size
    module, kind, options = _PASSES[method]
    pass_type = getattr(importlib.import_module(f"olive.passes.onnx.{module}"), kind)
    from olive.model import ONNXModelHandler
    from olive.passes.olive_pass import create_pass_from_dict

    plain, target = output / "plain", output / "made"
    for folder in (plain, target):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    _save(float_model, plain / "model.onnx")
    for name in ("olive", "onnxruntime"):
        logging.getLogger(name).setLevel(logging.WARNING)  # each writes a line for every node
    step = create_pass_from_dict(pass_type, {"block_size": group, **options}, disable_search=True)
    result = step.run(ONNXModelHandler(str(plain / "model.onnx")), str(target))
    names = [value.name for value in float_model.graph.output]
    _save(with_tables(rename_outputs(onnx.load(result.model_path), names), group).model.model, output / "model.onnx")
    for folder in (plain, target):
        shutil.rmtree(folder)
    return (output / "model.onnx.data").stat().st_size


def rename_outputs(model: onnx.ModelProto, names: list[str]) -> onnx.ModelProto:
    """Restore the names of outputs: a pass renames the output of a product that it changes."""
    new = dict(zip([value.name for value in model.graph.output], names, strict=True))
    for node in model.graph.node:
        node.input[:] = [new.get(name, name) for name in node.input]
        node.output[:] = [new.get(name, name) for name in node.output]
    for value in model.graph.output:
        value.name = new[value.name]
    return model


def _save(model: onnx.ModelProto, file: Path) -> None:
    onnx.save_model(model, file, save_as_external_data=True, location="model.onnx.data")


def _gptq(model: onnx.ModelProto, group: int, hessians: Mapping[str, Array]) -> int:
    """Round every product by GPTQ and the table of tokens to nearest; return the bytes of codes, scales and the rest.

    Olive keeps a scale in the type of the model, here counted as float16, and a zero point of 4 bits for each group.
    """
    initializers, size = {tensor.name: tensor for tensor in model.graph.initializer}, 0
    coded_names: set[str] = set()
    for node in model.graph.node:
        index = {"MatMul": 1, "Gather": 0}.get(node.op_type)
        tensor = None if index is None else initializers.get(node.input[index])
        if tensor is None or len(tensor.dims) != 2 or tensor.name in coded_names:
            continue
        weight = onnx.numpy_helper.to_array(tensor).astype(np.float32)
        if node.op_type == "MatMul":
            matrix = round_matrix(weight.T, hessians[node.input[0]], group).T
        else:
            matrix = round_matrix(weight, None, group)
        tensor.CopyFrom(onnx.numpy_helper.from_array(np.ascontiguousarray(matrix), tensor.name))
        coded_names.add(tensor.name)
        size += matrix.size // 2 + matrix.size // group * 5 // 2
    return size + sum(len(tensor.raw_data) for name, tensor in initializers.items() if name not in coded_names)


def round_matrix(weight: Array, hessian: Array | None, group: int) -> Array:
    """Return a matrix [outputs, inputs] as Olive's GPTQ leaves it, or its rounding to nearest without a Hessian."""
    import torch
    from olive.common.quant.utils import WeightQuantizer
    from olive.passes.pytorch.gptq import Gptq

    quantizer = WeightQuantizer(bits=4, symmetric=False, group_size=group)
    values = torch.from_numpy(np.ascontiguousarray(weight))
    if hessian is None:
        matrix: Array = quantizer.fake_quantize(values, *quantizer.find_qparams(values)).numpy()
        return matrix
    module = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    module.weight.data = values
    # Twice the mean, as the pass sums it up.
    data = {"H": torch.from_numpy(2 * hessian), "N": 1}
    module.quant_info = SimpleNamespace(quantizer=quantizer, data=data, scales=None, zero_points=None)  # type: ignore[assignment]
    with torch.no_grad():
        Gptq.process_module(module)
    matrix = module.weight.data.numpy()
    return matrix
