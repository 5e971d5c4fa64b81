"""An ``.onnx`` file is untrusted input: it is opened here, with every check that does not read weights."""

from __future__ import annotations

import itertools
from pathlib import Path

import onnx_ir as ir

from graphopt.errors import InputError
from graphopt.graph.weights import map_on_demand

NEWEST_OPSET = 26
"""The newest opset of the standard domain that onnxruntime 1.31 loads."""


def load(onnx_file: Path, *, weights: bool = True) -> ir.Model:
    """Open a model; its weights stay on disk until they are read.

    Args:
        onnx_file: the file.
        weights: whether files of weights must be there. Without them what a weight holds cannot be read.

    Raises:
        InputError: the file is truncated, its opset is newer than onnxruntime loads, or external data is missing,
            short, described wrongly, or elsewhere than beside the file.
    """
    try:
        model = ir.load(onnx_file)
    except Exception as error:
        raise InputError(
            f"the file cannot be read as ONNX ({error})", file=onnx_file, remedy="is it truncated?"
        ) from error
    _check_opset(model, onnx_file)
    _check_external_data(model, onnx_file, weights)
    map_on_demand(model)
    _fix_defaults(model.graph)
    _name_nodes(model.graph)
    return model


def _name_nodes(graph: ir.Graph) -> None:
    """Give each node without a name one, by which reports, provenance and errors speak of it."""
    names = {node.name for node in graph.all_nodes()}
    numbers = itertools.count()
    for node in graph.all_nodes():
        if not node.name:
            node.name = next(name for number in numbers if (name := f"{node.op_type}.{number}") not in names)


def _fix_defaults(graph: ir.Graph) -> None:
    """Make constants of inputs that have a default: files of IR version 3 list each weight as an input as well."""
    for value in [value for value in graph.inputs if value.name in graph.initializers]:
        graph.inputs.remove(value)


def _check_opset(model: ir.Model, onnx_file: Path) -> None:
    opset = model.opset_imports.get("")
    if opset is None:
        raise InputError("the file names no opset of standard ONNX", file=onnx_file, remedy="is it truncated?")
    if opset > NEWEST_OPSET:
        raise InputError(
            f"onnxruntime cannot load opset {opset}",
            file=onnx_file,
            remedy=f"export it with opset {NEWEST_OPSET} or older",
        )


def _check_external_data(model: ir.Model, onnx_file: Path, weights: bool) -> None:
    """Confirm that the external data of every tensor is complete and lies beside the file, which is untrusted."""
    folder = onnx_file.parent.resolve()
    for value in (value for graph in model.graphs() for value in graph.initializers.values()):
        tensor = value.const_value
        if not isinstance(tensor, ir.ExternalTensor):
            continue
        data = Path(tensor.path)
        if not data.resolve().is_relative_to(folder):
            raise InputError(
                "external data lies outside the model's folder, and is not read",
                file=data,
                tensor=value.name,
                remedy="copy the file itself, not a link, beside the model if you trust it",
            )
        if weights or data.exists():
            _check_extent(tensor, value.name, data, onnx_file)


def _check_extent(tensor: ir.ExternalTensor, name: str | None, data: Path, onnx_file: Path) -> None:
    """Confirm that the bytes that a tensor names are there."""
    if not data.is_file():
        raise InputError("external data is missing", file=data, tensor=name, remedy=f"{onnx_file.name} needs it")
    start, length = tensor.offset or 0, tensor.nbytes if tensor.length is None else tensor.length
    if start < 0 or length != tensor.nbytes:
        raise InputError(
            f"external data is declared as {length} bytes at offset {start}, but the tensor has {tensor.nbytes}",
            file=onnx_file,
            tensor=name,
            shape=list(tensor.shape),
            remedy="the file is damaged; export it again",
        )
    size = data.stat().st_size
    if size < start + length:
        raise InputError(
            f"external data is truncated: it has {size} bytes, the tensor ends at {start + length}",
            file=data,
            tensor=name,
            shape=list(tensor.shape),
        )
