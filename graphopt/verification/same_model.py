"""A model that was made again against the file of an artifact: every field of ``model.onnx``, every byte beside it.

Both are compared as protobuf messages, so nothing is left out by name. What may differ is where the bytes of a tensor
lie: in the file, in which of its fields, at which place of the external data. Instead the numbers are compared, and the
external data must be those numbers one after the other and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import onnx
import onnx_ir as ir

from graphopt.artifact.artifact import DATA, MODEL, is_data
from graphopt.errors import VerificationError
from graphopt.verification.protobuf import Difference, all_messages, first_difference

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_INSIDE = ("raw_data", "float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data")
_STORAGE = (*_INSIDE, "data_location", "external_data")
_LOCATION_KEYS = ["location", "offset", "length"]
# A writer may let large tensors begin at a page or at an allocation block; what lies between is zeros.
_ALIGNMENT = 1 << 16
_REMEDY = "was it changed after it was made, or made with other versions? see `versions` in its manifest"


@dataclass(frozen=True)
class Extent:
    """What was compared: how many nodes, functions and tensors, and how many of these are the same up to rounding."""

    nodes: int
    functions: int
    tensors: int
    rounded_tensors: int


def confirm_model(model: ir.Model, folder: Path, *, rounding_proved: bool = False) -> Extent:
    """Confirm that the model file in ``folder`` holds ``model`` and nothing else.

    Args:
        model: what the recipe makes; its weights are evaluated one by one. It is not changed.
        folder: the artifact. That its external data is there in full was checked when it was read.
        rounding_proved: whether a certificate holds for the floating-point weights of the file. Another processor
            rounds them differently, so they need not be equal to the last bit then.

    Raises:
        VerificationError: something differs; names the first place, what was made and what is stored.
    """
    file = folder / MODEL
    proto = onnx.ModelProto.FromString(file.read_bytes())
    initializers = _initializers(proto)
    for tensor in initializers:
        _check_location(tensor, file)
    outside = {tensor.name for tensor in initializers if tensor.data_location == onnx.TensorProto.EXTERNAL}
    new, tensors = _serialize(model, outside)
    bare = _number_initializers(proto)
    stored_indices = [int(tensor.external_data[0].value) for tensor in _initializers(bare)]
    new_indices = [int(tensor.external_data[0].value) for tensor in _initializers(new)]
    difference = first_difference(_without_numbers(new), _without_numbers(bare))
    if difference is not None:
        raise as_error(difference, file)
    rounded_count = sum(
        _same_numbers(tensors[new_index], initializers[stored_index], folder, rounding_proved)
        for new_index, stored_index in zip(new_indices, stored_indices, strict=True)
    )
    for name in {DATA, *(file_beside.name for file_beside in folder.iterdir() if is_data(file_beside.name))}:
        _check_layout(initializers, folder / name)
    nodes = sum(1 for _ in all_messages(bare, "NodeProto"))
    return Extent(nodes, len(bare.functions), len(stored_indices), rounded_count)


def as_error(difference: Difference, file: Path) -> VerificationError:
    """Return the error that a difference between a recipe run again and a stored file is."""
    return VerificationError(
        f"the recipe, run again, makes another model: {difference.field} is {difference.old} in the file, and "
        f"{difference.new} is made",
        file=file,
        node=difference.node,
        tensor=difference.tensor,
        remedy=_REMEDY,
    )


def _serialize(model: ir.Model, outside: set[str]) -> tuple[onnx.ModelProto, list[ir.TensorProtocol]]:
    """Return what the writer of artifacts makes of ``model``, with places in a list instead of numbers, and that list.

    Args:
        model: the model.
        outside: names of initializers that the file stores as external data: of those it keeps no more than name, type
            and shape.
    """
    values = [
        value for graph in _graphs(model) for value in graph.initializers.values() if value.const_value is not None
    ]
    tensors = [value.const_value for value in values if value.const_value is not None]
    try:
        for index, (value, tensor) in enumerate(zip(values, tensors, strict=True)):
            keeps_words = value.name not in outside and not isinstance(tensor, (ir.ExternalTensor, ir.LazyTensor))
            # onnx_ir writes a tensor of this kind without reading it; the location leads back to what it stands for
            value.const_value = ir.ExternalTensor(
                str(index),
                None,
                None,
                tensor.dtype,
                shape=ir.Shape(tensor.shape.numpy()),
                name=value.name or "",
                doc_string=tensor.doc_string if keeps_words else None,
                metadata_props=dict(tensor.metadata_props) if keeps_words else None,
                base_dir="",
            )
        proto = ir.to_proto(model)
    finally:
        for value, tensor in zip(values, tensors, strict=True):
            value.const_value = tensor
    return proto, tensors


def _graphs(model: ir.Model) -> Iterator[ir.Graph]:
    yield from model.graphs()
    for function in model.functions.values():
        yield from function.subgraphs()


def _initializers(proto: onnx.ModelProto) -> list[onnx.TensorProto]:
    return [tensor for graph in all_messages(proto, "GraphProto") for tensor in graph.initializer]


def _number_initializers(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy that has, instead of the numbers of each initializer, its place among all of them."""
    copy = _without_numbers(proto)
    for index, tensor in enumerate(_initializers(copy)):
        tensor.external_data.add(key="location", value=str(index))
    return copy


def _without_numbers(proto: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    for tensor in _initializers(copy):
        for field in _STORAGE:
            tensor.ClearField(field)
    return copy


def _check_location(tensor: onnx.TensorProto, file: Path) -> None:
    """Refuse a tensor whose numbers may be read from two places: two programs could read two models."""
    fault = _storage_fault(tensor) or (_external_fault(tensor) if tensor.external_data else None)
    if fault is not None:
        raise VerificationError(f"the numbers of this tensor are stored {fault}", file=file, tensor=tensor.name)


def _storage_fault(tensor: onnx.TensorProto) -> str | None:
    """Return where the numbers of a tensor lie, if that is more than one place or another than it says."""
    fields = [field for field in _INSIDE if len(getattr(tensor, field))]
    has_external = bool(tensor.external_data)
    if len(fields) + has_external > 1 or has_external != (tensor.data_location == onnx.TensorProto.EXTERNAL):
        return f"in {' and '.join([*fields, *(['external data'] if has_external else [])])}"
    return None


def _external_fault(tensor: onnx.TensorProto) -> str | None:
    """Return what is wrong with the location of external data."""
    entries = [(entry.key, entry.value) for entry in tensor.external_data]
    keys = [key for key, _ in entries]
    plain = [onnx.StringStringEntryProto(key=key, value=value) for key, value in entries]
    if keys != _LOCATION_KEYS or list(tensor.external_data) != plain:
        return f"with the keys {', '.join(keys)}"
    location, *numbers = [value for _, value in entries]
    if not all(number.isdecimal() for number in numbers):
        return "at an offset or with a length that is not a number"
    return None if is_data(location) else f"in {location or 'no file'} instead of {DATA}"


def _same_numbers(new: ir.TensorProtocol, proto: onnx.TensorProto, folder: Path, rounding_proved: bool) -> bool:
    """Refuse other numbers than were made; return whether they are the same up to rounding only."""
    try:
        tensor = ir.serde.deserialize_tensor(proto, str(folder))
        is_same = _content(tensor) == _content(new)
    except Exception as error:  # whatever a library raises where a tensor has another size than its type and shape say
        raise VerificationError(
            f"its numbers cannot be read ({error})", file=folder / MODEL, tensor=proto.name
        ) from error
    if is_same:
        return False
    if rounding_proved and tensor.dtype.is_floating_point() and tensor.nbytes == new.nbytes:
        return True
    raise VerificationError(
        "the recipe, run again, makes other numbers of this weight",
        file=folder / MODEL,
        tensor=proto.name,
        shape=list(proto.dims),
        remedy=_REMEDY,
    )


def _content(tensor: ir.TensorProtocol) -> bytes | list[bytes]:
    return list(tensor.string_data()) if isinstance(tensor, ir.StringTensor) else tensor.tobytes()


def _check_layout(tensors: list[onnx.TensorProto], data: Path) -> None:
    """Confirm that tensors fill the external data: none overlaps another, zeros lie between them, nothing follows.

    Two tensors may be the same bytes, as the codes of a tied embedding are; each is compared with what is made for it.
    """
    locations = [{entry.key: entry.value for entry in tensor.external_data} for tensor in tensors]
    regions = {
        (int(location["offset"]), int(location["length"])): tensor.name
        for tensor, location in zip(tensors, locations, strict=True)
        if location and location["location"] == data.name
    }
    if not data.is_file():
        return
    end = 0
    with data.open("rb") as stream:
        for (begin, length), name in sorted(regions.items()):
            if begin < end:
                raise VerificationError("its external data overlaps that of another tensor", file=data, tensor=name)
            stream.seek(end)
            if begin - end >= _ALIGNMENT or any(stream.read(begin - end)):
                raise VerificationError(
                    f"{begin - end} bytes before its external data belong to no tensor", file=data, tensor=name
                )
            end = begin + length
    if (size := data.stat().st_size) != end:
        raise VerificationError(f"the last {size - end} bytes of the external data belong to no tensor", file=data)
