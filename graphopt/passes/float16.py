"""The graph computes in float16: half the bytes, and the type that the matrix units of GPUs are made for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from graphopt.analysis.paged import OPERATOR as KV_ATTENTION
from graphopt.errors import InputError
from graphopt.passes.base import Effect, Ledger, Options, Pass
from graphopt.runtime_ops import DOMAIN
from graphopt.weights import lazy, new_weight

Weight = npt.NDArray[Any]

_LARGEST = float(np.finfo(np.float16).max)
_SMALLEST = float(np.finfo(np.float16).tiny)

_WIDE, _NARROW = ir.DataType.FLOAT, ir.DataType.FLOAT16

_PRESENT = "present."
_PAST = "past_key_values."

# Of an operator of ours: the inputs that are as wide as x, as its one output of that kind is; all others keep a type.
_OF_X = {"MatMulTable": (0,), "MatMulDynamic": (0,), "Hadamard": (0,), KV_ATTENTION: (0, 1, 2, 6)}

# What a number that only has to be low, as in masks, may be read by.
_BOUNDED = ("Where", "Add", "Sub", "Max", "Min", "Clip")

# Their standard has float16, and onnxruntime's kernels for the CPU fail in it when they run.
_NOT_IN_ONNXRUNTIME = ("ScatterElements", "ScatterND")


class Float16Options(Options):
    """This step has no options."""

    step: Literal["float16"] = "float16"


class Float16(Pass[Float16Options]):
    """Compute in float16 what was computed in float32.

    before::

        y = Op(x, W)                                        float32

    after::

        y = Op(x, W')    W' = float16(W)                    float16

    Caches that grow become float16 too; pages keep their storage. Logits and other outputs are float32 as before, by a
    ``Cast``. What sines and cosines are made of stays float32: a position beyond 2048 is no float16. So does what an
    operator takes in float32 alone, and a weight with a number beyond 65504, with its readers. A constant of one number
    beyond that which is added, chosen or compared, as masks have them, becomes 65504. Codes of weights stay as they
    are; scales of ``DequantizeLinear`` become float16 where they have its range, those of graphopt's operators stay.

    Rounding is 2^-11 of each number where float32 has 2^-24, so the pass is lossy, and measured. What overflows is not
    looked for: a model whose activations pass 65504 comes out as NaN, and the check after the recipe says so.

    The place of this step is the end of a recipe: passes before it see a graph of float32.
    """

    name: ClassVar[str] = "float16"
    effect: ClassVar[Effect] = "lossy"
    options_type: ClassVar[type[Options]] = Float16Options

    def rewrite(self, model: ir.Model, ledger: Ledger) -> None:
        """Choose what is narrow, convert constants and types, and set casts between both kinds."""
        graph, opset = model.graph, model.opset_imports[""]
        for node in graph:
            if any(each.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for each in node.attributes.values()):
                raise InputError(
                    f"{node.op_type} has graphs of its own, and the step float16 does not look into those",
                    node=node.name,
                    remedy="leave the step out, or take the branch that you need before it",
                )
            for value in node.outputs:
                if value.name and value.dtype is None:
                    raise InputError("the type of a value is not known", node=node.name, tensor=value.name)
        wide = _wide_nodes(graph, opset)
        for node, reason in wide.items():
            if any(each is not None and each.dtype == _WIDE for each in (*node.inputs, *node.outputs)):
                ledger.skipped(node, f"stays float32: {reason}")
        _convert_weights(graph, wide, ledger)
        narrow = _narrow_values(graph, wide)
        for value in narrow:
            value.dtype = _NARROW
        for node in graph:
            if any(each in narrow for each in node.outputs):
                _retype(node)
                ledger.changed(node, f"{node.op_type} in float16")
        casts = _Casts(graph, ledger)
        for reader in list(graph):
            for index, read in enumerate(reader.inputs):
                if read is not None and reader.op_type != "Cast":  # which takes any type
                    wanted = _NARROW if _follows(reader, index, wide) else _WIDE
                    if read.dtype == _WIDE != wanted or (read in narrow and wanted == _WIDE):
                        reader.replace_input_with(index, casts.of(read, wanted))
        _keep_outputs(graph, narrow, casts)


def _wide_nodes(graph: ir.Graph, opset: int) -> dict[ir.Node, str]:
    """Return the nodes that keep float32, each with the reason."""
    wide: dict[ir.Node, str] = {}
    waiting = [node for node in graph if node.op_type in ("Sin", "Cos")]
    while waiting:
        node = waiting.pop()
        if node not in wide:
            wide[node] = "sines and cosines of positions are made of it"
            made_by = (value.producer() for value in node.inputs if value is not None)
            waiting += [producer for producer in made_by if producer is not None]
    for node in graph:
        reason = _refusal(node, opset)
        if reason is not None:
            wide.setdefault(node, reason)
            if node.op_type == "DequantizeLinear" and (rows := _rows_of_scales(node)) is not None:
                wide.setdefault(rows, reason)
    return wide


def _refusal(node: ir.Node, opset: int) -> str | None:
    """Return why a node cannot compute in float16, or ``None``."""
    if node.domain == DOMAIN:
        return None if node.op_type in _OF_X else f"{node.op_type} takes float32 alone"
    if node.domain:
        return f"it is an operator of {node.domain}, whose types are not known here"
    if node.op_type == "Cast" and node.inputs[0] is not None and node.inputs[0].dtype == _NARROW:
        return "it widens what was float16 before"
    if node.op_type == "DequantizeLinear":
        return None if _scales_fit(node) else "its scales are not known to have float16's range"
    if node.op_type in _NOT_IN_ONNXRUNTIME:
        return f"onnxruntime's {node.op_type} has no float16 on a CPU"
    if node.op_type == "Constant" and "value" not in node.attributes:
        return "a number in an attribute is float32"
    schema = onnx.defs.get_schema(node.op_type, opset)
    allowed = {each.type_param_str: each.allowed_type_strs for each in schema.type_constraints}
    for values, formal in ((node.inputs, schema.inputs), (node.outputs, schema.outputs)):
        for index, value in enumerate(values):
            if value is not None and value.dtype == _WIDE:
                kind = formal[min(index, len(formal) - 1)].type_str
                if "tensor(float16)" not in allowed.get(kind, [kind]):
                    return f"{node.op_type} has no float16 in its place"
    return None


def _scales_fit(dequantize: ir.Node) -> bool:
    """Return whether float16 has all scales that a node may read, of which none becomes 0, subnormal or infinite."""
    rows = _rows_of_scales(dequantize)
    scales = dequantize.inputs[1] if rows is None else rows.inputs[0]
    if scales is None or not scales.is_initializer() or scales.const_value is None:
        return False
    numbers = np.abs(scales.const_value.numpy())
    return bool(np.all((numbers == 0) | ((numbers >= _SMALLEST) & (numbers <= _LARGEST))))


def _rows_of_scales(dequantize: ir.Node) -> ir.Node | None:
    """Return what takes the scales of an embedding, those of the tokens that are asked for; else ``None``."""
    made_by = None if dequantize.inputs[1] is None else dequantize.inputs[1].producer()
    return made_by if made_by is not None and made_by.op_type == "Gather" else None


def _follows(node: ir.Node, index: int, wide: Iterable[ir.Node]) -> bool:
    """Return whether input ``index`` of ``node`` is to be float16."""
    if node in wide:
        return False
    return node.domain != DOMAIN or index in _OF_X[node.op_type]


def _convert_weights(graph: ir.Graph, wide: dict[ir.Node, str], ledger: Ledger) -> None:
    """Give readers in float16 a float16 copy of each constant; where it has no such copy, they join ``wide``."""
    found = []
    for value in graph.initializers.values():
        tensor = value.const_value
        if value.dtype != _WIDE or tensor is None or not any(_follows(*use, wide) for use in value.uses()):
            continue
        numbers = np.abs(tensor.numpy())
        reach = float(np.max(numbers, initial=0, where=np.isfinite(numbers)))
        found.append((value, tensor, reach))
        hides = tensor.size == 1 and all(use.node.op_type in _BOUNDED for use in value.uses())
        if reach > _LARGEST and not hides:
            for node, _ in value.uses():
                if node not in wide:
                    wide[node] = f"{value.name} has a number of {reach:.3g}, beyond float16"
                    ledger.skipped(node, f"stays float32: {wide[node]}")
    for value, tensor, reach in found:
        uses = list(value.uses())
        followers = [use for use in uses if _follows(*use, wide)]
        if not followers:
            continue
        copy = value
        if len(followers) < len(uses):
            copy = new_weight(graph, f"{value.name}.float16", tensor)
            for node, index in followers:
                node.replace_input_with(index, copy)
        copy.const_value, copy.dtype = _halved(tensor, copy.name), _NARROW
        if reach > _LARGEST:
            ledger.changed(copy, f"{reach:.3g} becomes {_LARGEST:g}, the largest float16", [value])


def _halved(tensor: ir.TensorProtocol, name: str | None) -> ir.TensorProtocol:
    def rounded() -> Weight:
        numbers = tensor.numpy()
        return np.where(np.isfinite(numbers), np.clip(numbers, -_LARGEST, _LARGEST), numbers).astype(np.float16)

    return lazy(rounded, _NARROW, tuple(tensor.shape.numpy()), name)


def _narrow_values(graph: ir.Graph, wide: dict[ir.Node, str]) -> set[ir.Value]:
    """Return what becomes float16: results of nodes that are not wide, and caches that grow, which they read."""
    narrow = {
        value
        for node in graph
        for index, value in enumerate(node.outputs)
        if value.dtype == _WIDE and node not in wide and (node.domain != DOMAIN or index == 0)
    }
    for value in graph.inputs:
        grows = (value.name or "").startswith(_PAST) and value.dtype == _WIDE
        if grows and all(_follows(*use, wide) for use in value.uses()):
            narrow.add(value)
    return narrow


def _retype(node: ir.Node) -> None:
    """Let a node say float16 where an attribute says what type it makes."""
    for name in ("to", "dtype", "output_dtype"):
        if node.attributes.get_int(name, 0) == _WIDE:
            node.attributes[name] = ir.AttrInt64(name, _NARROW)
    if node.op_type in ("Constant", "ConstantOfShape") and "value" in node.attributes:
        tensor = node.attributes["value"].as_tensor()
        node.attributes["value"] = ir.AttrTensor("value", ir.tensor(_halved(tensor, tensor.name).numpy()))


class _Casts:
    """A cast of each value to a type, made where it is asked for first."""

    def __init__(self, graph: ir.Graph, ledger: Ledger) -> None:
        self._graph, self._ledger = graph, ledger
        self._made: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}

    def of(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """Return ``value`` as ``dtype``."""
        if (value, dtype) not in self._made:
            suffix = "float16" if dtype == _NARROW else "float32"
            node = ir.node("Cast", [value], {"to": dtype}, name=f"{value.name}.{suffix}")
            made = node.outputs[0]
            made.name, made.type, made.shape = f"{node.name}.output", ir.TensorType(dtype), value.shape
            producer = value.producer()
            if producer is None:
                self._graph.insert_before(self._graph[0], node)
            else:
                self._graph.insert_after(producer, node)
            self._ledger.changed(node, f"{value.name} as {suffix}", [value])
            self._made[value, dtype] = made
        return self._made[value, dtype]


def _keep_outputs(graph: ir.Graph, narrow: set[ir.Value], casts: _Casts) -> None:
    """Let outputs have the type that they had, and caches that of the input that they come back as."""
    caches = {value.name: value.dtype for value in graph.inputs}
    for index, value in enumerate(graph.outputs):
        name = value.name or ""
        past = caches.get(_PAST + name.removeprefix(_PRESENT)) if name.startswith(_PRESENT) else None
        wanted = past or (_WIDE if value in narrow else value.dtype)
        if value.dtype == wanted or wanted is None:
            continue
        cast = casts.of(value, wanted)
        value.name, cast.name = f"{name}.{'float16' if value.dtype == _NARROW else 'float32'}", name
        graph.outputs[index] = cast
