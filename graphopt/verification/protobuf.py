"""Two protobuf messages of one type, compared field by field, whatever fields the type has.

The walk asks the descriptors which fields there are, so a field that nobody thought of is compared too, and so are
fields that the descriptors do not know.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

if TYPE_CHECKING:
    from collections.abc import Iterator

    from google.protobuf.descriptor import Descriptor, FieldDescriptor

# What tells the elements of a repeated field apart for a reader, the first that an element has.
_NAMES = ("name", "key", "domain", "tensor_name", "op_type")
_LONGEST_TEXT = 60


@dataclass(frozen=True)
class Difference:
    """Where two messages differ first, and how.

    Attributes:
        field: the field, such as ``graph.node[norm].attribute[epsilon].f``.
        new: what the first message has there; ``nothing`` where the field is absent.
        old: what the second has there.
        node: the name of the innermost node on the way, if there is one.
        tensor: the name of the initializer, value or tensor on the way, if there is one.
    """

    field: str
    new: str
    old: str
    node: str | None = None
    tensor: str | None = None


def first_difference(new: Message, old: Message) -> Difference | None:
    """Return where two messages of one type differ first, in the order of their descriptors, or ``None``.

    Presence counts: a field that is set to its default differs from one that is absent. So does the order of repeated
    fields, the sign of a zero, and every unknown field.
    """
    return _Walk(()).messages(new, old)


@dataclass(frozen=True)
class _Walk:
    """A place in both messages.

    Attributes:
        steps: name of each field on the way, its element's label where it is repeated, and the element's type.
    """

    steps: tuple[tuple[str, str | None, str], ...]

    def messages(self, new: Message, old: Message) -> Difference | None:
        if new.SerializeToString(deterministic=True) == old.SerializeToString(deterministic=True):
            return None
        for field in new.DESCRIPTOR.fields:
            difference = (
                self._repeated_field(field, new, old) if field.is_repeated else self._single_field(field, new, old)
            )
            if difference is not None:
                return difference
        return self._differ("unknown fields", _unknown(new), _unknown(old))

    def _single_field(self, field: FieldDescriptor, new: Message, old: Message) -> Difference | None:
        presence = [_present(message, field) for message in (new, old)]
        if presence == [False, False]:
            return None
        values = [
            getattr(message, field.name) if is_present else None
            for message, is_present in zip((new, old), presence, strict=True)
        ]
        if None not in values and field.message_type is not None:
            return self._descend(field, None).messages(*values)
        is_same = presence[0] == presence[1] and repr(values[0]) == repr(values[1])
        return None if is_same else self._differ(field.name, *(_text_of(field, value) for value in values))

    def _repeated_field(self, field: FieldDescriptor, new: Message, old: Message) -> Difference | None:
        new_elements, old_elements = getattr(new, field.name), getattr(old, field.name)
        for index in range(max(len(new_elements), len(old_elements))):
            pair = [elements[index] if index < len(elements) else None for elements in (new_elements, old_elements)]
            labels = [None if element is None else _label(element, index) for element in pair]
            if field.message_type is None or labels[0] != labels[1] or None in pair:
                if repr(pair[0]) != repr(pair[1]):
                    texts = [label or _text_of(field, element) for label, element in zip(labels, pair, strict=True)]
                    return self._differ(f"{field.name}[{index}]", *texts)
                continue
            difference = self._descend(field, labels[0] or str(index)).messages(*pair)
            if difference is not None:
                return difference
        return None

    def _descend(self, field: FieldDescriptor, label: str | None) -> _Walk:
        return _Walk((*self.steps, (field.name, label, field.message_type.name)))

    def _differ(self, last: str, new: str, old: str) -> Difference | None:
        if new == old:
            # what both have and cannot be told apart in words
            new, old = "one value", "another"
        steps = [name if label is None else f"{name}[{label}]" for name, label, _ in self.steps]
        names = {kind: label for _, label, kind in self.steps if label is not None}
        tensor = names.get("TensorProto", names.get("ValueInfoProto", names.get("TensorAnnotation")))
        return Difference(".".join([*steps, last]), new, old, names.get("NodeProto"), tensor)


def all_messages(message: Message, name: str) -> Iterator[Any]:
    """Yield every message of the type called ``name``, such as ``GraphProto``, in ``message``, outer ones first."""
    if message.DESCRIPTOR.name == name:
        yield message
    for field, is_repeated in _fields_above(message.DESCRIPTOR, name):
        if is_repeated:
            for element in getattr(message, field):
                yield from all_messages(element, name)
        elif message.HasField(field):
            yield from all_messages(getattr(message, field), name)


@functools.cache
def _fields_above(kind: Descriptor, name: str) -> tuple[tuple[str, bool], ...]:
    """Return the fields that may hold a message of the type called ``name``, however deep; and which are repeated."""
    fields = (field for field in kind.fields if field.message_type is not None and name in _inside(field.message_type))
    return tuple((field.name, field.is_repeated) for field in sorted(fields, key=lambda field: field.number))


@functools.cache
def _inside(kind: Descriptor) -> frozenset[str]:
    """Return the names of the types that a message may hold, however deep, its own included."""
    kinds, pending = {kind.name: kind}, [kind]
    while pending:
        inner_kinds = [field.message_type for field in pending.pop().fields if field.message_type is not None]
        pending += [inner for inner in inner_kinds if inner.name not in kinds]
        kinds |= {inner.name: inner for inner in inner_kinds}
    return frozenset(kinds)


def _present(message: Message, field: FieldDescriptor) -> bool:
    return message.HasField(field.name) if field.has_presence else bool(getattr(message, field.name))


def _label(element: Any, index: int) -> str | None:
    """Return what a reader calls an element of a repeated field of messages, or ``None`` for a number or text."""
    if not isinstance(element, Message):
        return None
    candidates = (getattr(element, name, None) for name in _NAMES)
    return next((str(name) for name in candidates if name), str(index))


def _text_of(field: FieldDescriptor, value: Any) -> str:
    if value is None:
        return "nothing"
    if field.enum_type is not None:
        return str(field.enum_type.values_by_number[value].name) if value in field.enum_type.values_by_number else "?"
    if isinstance(value, Message):
        return f"a {field.message_type.name}"
    text = repr(value)
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}... ({len(value)} in all)"


def _unknown(message: Message) -> str:
    texts = [f"number {field.field_number}: {field.data!r}" for field in UnknownFieldSet(message)]
    text = ", ".join(texts) or "nothing"
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."
