"""Olive's quantizers of weights, on the graph that graphopt starts from.

It is ``olive-ai`` on PyPI. Its passes on ONNX graphs make codes that onnxruntime runs. Its GPTQ is a pass on PyTorch
models: here its code for one matrix rounds each matrix of the graph, on the Hessians that graphopt collected, and what
comes out runs as floats.
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


def quantized(model: Path, method: str, group: int, output: Path, hessians: Mapping[str, Array]) -> int:
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
    loaded = with_matrices(onnx.load(model / "model.onnx"))
    if method == "GPTQ":
        size = _gptq(loaded, group, hessians)
        _save(loaded, output / "model.onnx")
        return size
    module, kind, options = _PASSES[method]
    found = getattr(importlib.import_module(f"olive.passes.onnx.{module}"), kind)
    from olive.model import ONNXModelHandler
    from olive.passes.olive_pass import create_pass_from_dict

    plain, made = output / "plain", output / "made"
    for folder in (plain, made):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    _save(loaded, plain / "model.onnx")
    for name in ("olive", "onnxruntime"):
        logging.getLogger(name).setLevel(logging.WARNING)  # each writes a line for every node
    step = create_pass_from_dict(found, {"block_size": group, **options}, disable_search=True)
    done = step.run(ONNXModelHandler(str(plain / "model.onnx")), str(made))
    names = [value.name for value in loaded.graph.output]
    _save(with_tables(named(onnx.load(done.model_path), names), group).model.model, output / "model.onnx")
    for folder in (plain, made):
        shutil.rmtree(folder)
    return (output / "model.onnx.data").stat().st_size


def named(model: onnx.ModelProto, names: list[str]) -> onnx.ModelProto:
    """Give the outputs their names again: a pass calls that of a product that it changed otherwise."""
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
    stored, size = {tensor.name: tensor for tensor in model.graph.initializer}, 0
    coded: set[str] = set()
    for node in model.graph.node:
        place = {"MatMul": 1, "Gather": 0}.get(node.op_type)
        tensor = None if place is None else stored.get(node.input[place])
        if tensor is None or len(tensor.dims) != 2 or tensor.name in coded:
            continue
        weight = onnx.numpy_helper.to_array(tensor).astype(np.float32)
        if node.op_type == "MatMul":
            made = rounded(weight.T, hessians[node.input[0]], group).T
        else:
            made = rounded(weight, None, group)
        tensor.CopyFrom(onnx.numpy_helper.from_array(np.ascontiguousarray(made), tensor.name))
        coded.add(tensor.name)
        size += made.size // 2 + made.size // group * 5 // 2
    return size + sum(len(tensor.raw_data) for name, tensor in stored.items() if name not in coded)


def rounded(weight: Array, hessian: Array | None, group: int) -> Array:
    """Return a matrix [outputs, inputs] as Olive's GPTQ leaves it, or its rounding to nearest without a Hessian."""
    import torch
    from olive.common.quant.utils import WeightQuantizer
    from olive.passes.pytorch.gptq import Gptq

    quantizer = WeightQuantizer(bits=4, symmetric=False, group_size=group)
    values = torch.from_numpy(np.ascontiguousarray(weight))
    if hessian is None:
        made: Array = quantizer.fake_quantize(values, *quantizer.find_qparams(values)).numpy()
        return made
    module = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    module.weight.data = values
    # Twice the mean, as the pass sums it up.
    data = {"H": torch.from_numpy(2 * hessian), "N": 1}
    module.quant_info = SimpleNamespace(quantizer=quantizer, data=data, scales=None, zero_points=None)  # type: ignore[assignment]
    with torch.no_grad():
        Gptq.process_module(module)
    made = module.weight.data.numpy()
    return made
