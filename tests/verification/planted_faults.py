"""Faults planted in a protobuf message, one of each kind at each part that its type has, found by the descriptors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

Path = tuple[tuple[str, int | None], ...]

# A field with a number that no version of ONNX has, with the value 5.
UNKNOWN = b"\xf8\x7f\x05"


@dataclass(frozen=True)
class Fault:
    """One change to a message.

    Attributes:
        part: the field, named by all fields above it: ``functions.node.op_type``.
        kind: what is done to it.
        apply: does it, to a copy of the message that the fault was found in.
    """

    part: str
    kind: str
    apply: Callable[[Message], None]

    def __str__(self) -> str:
        return f"{self.kind} {self.part}"


def faults(message: Message) -> Iterator[Fault]:
    """Yield one fault of each kind at each part, at the first place where it is filled, or else where it could be."""
    names: set[str] = set()
    for is_filled in (True, False):
        for path, owner in walk(message):
            for fault, has_content in faults_at(path, owner):
                if has_content is is_filled and str(fault) not in names:
                    names.add(str(fault))
                    yield fault


def faults_at(path: Path, owner: Message) -> Iterator[tuple[Fault, bool]]:
    """Yield every fault of one message, and whether the field that it is in is filled there."""
    owners = [name for name, _ in path]
    for field in owner.DESCRIPTOR.fields:
        for kind, change in _changes(owner, field):
            yield Fault(".".join([*owners, field.name]), kind, _apply_at(path, change)), _content(owner, field)
    yield (
        Fault(".".join([*owners, "unknown"]), "an", _apply_at(path, lambda owner: owner.MergeFromString(UNKNOWN))),
        False,
    )


def walk(message: Message, path: Path = ()) -> Iterator[tuple[Path, Message]]:
    """Yield every message in ``message`` with the fields and indices that lead to it."""
    yield path, message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for index, part in enumerate(value) if field.is_repeated else [(None, value)]:
                yield from walk(part, (*path, (field.name, index)))


def _apply_at(path: Path, change: Callable[[Any], None]) -> Callable[[Message], None]:
    def apply(message: Any) -> None:
        for name, index in path:
            message = getattr(message, name) if index is None else getattr(message, name)[index]
        change(message)

    return apply


def _content(owner: Message, field: FieldDescriptor) -> bool:
    return bool(getattr(owner, field.name)) if field.is_repeated else owner.HasField(field.name)


def _changes(owner: Message, field: FieldDescriptor) -> Iterator[tuple[str, Callable[[Any], None]]]:
    """Yield the kinds of fault that a field can have, with what plants each into its owner."""
    name, is_filled = field.name, _content(owner, field)
    if field.is_repeated:
        yield "one more", lambda owner: _add(getattr(owner, name), field)
        if is_filled:
            yield "one less", lambda owner: getattr(owner, name).pop()
            first, last = getattr(owner, name)[0], getattr(owner, name)[-1]
            if first != last:
                yield "reversed", lambda owner: _reverse(owner, field)
            if field.message_type is None:
                yield "other", lambda owner: _replace(owner, field)
        return
    if is_filled:
        yield "no", lambda owner: owner.ClearField(name)
    if field.message_type is not None:
        if not is_filled:
            yield "empty", lambda owner: getattr(owner, name).SetInParent()
    else:
        yield "other", lambda owner: setattr(owner, name, _another_value(field, getattr(owner, name)))


def _another_value(field: FieldDescriptor, value: Any) -> Any:
    """Return another value of a field that is no message."""
    if field.enum_type is not None:
        return next(number for number in field.enum_type.values_by_number if number != value)
    if isinstance(value, bytes):
        return bytes([value[0] ^ 1]) + value[1:] if value else b"\x01"
    return value + "x" if isinstance(value, str) else value + 1


def _add(elements: Any, field: FieldDescriptor) -> None:
    if field.message_type is None:
        elements.append(elements[-1] if elements else _another_value(field, _zero(field)))
    elif elements:
        elements.add().CopyFrom(elements[-1])
    else:
        elements.add()


def _zero(field: FieldDescriptor) -> Any:
    kinds = {
        FieldDescriptor.CPPTYPE_STRING: "",
        FieldDescriptor.CPPTYPE_FLOAT: 0.0,
        FieldDescriptor.CPPTYPE_DOUBLE: 0.0,
    }
    return b"" if field.type == FieldDescriptor.TYPE_BYTES else kinds.get(field.cpp_type, 0)


def _reverse(owner: Any, field: FieldDescriptor) -> None:
    copies = list(getattr(owner, field.name))[::-1]
    if field.message_type is not None:
        copies = [type(message).FromString(message.SerializeToString()) for message in copies]
    del getattr(owner, field.name)[:]
    getattr(owner, field.name).extend(copies)


def _replace(owner: Any, field: FieldDescriptor) -> None:
    getattr(owner, field.name)[0] = _another_value(field, getattr(owner, field.name)[0])
