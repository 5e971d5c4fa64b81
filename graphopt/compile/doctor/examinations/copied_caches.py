"""Caches of keys and values that are copied in each step."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from graphopt.analysis.structure.ports import past_port
from graphopt.compile.doctor.examination import Examination, Level, Patient, Symptom
from graphopt.graph.diagnostics import Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    import onnx_ir as ir

CACHE_COPY = Rule(
    "doctor.copied-caches",
    "{count} caches grow by a copy: a step behind {context} tokens copies {megabytes:.1f} MB for each sequence",
)

_CONTEXT, _AXES = 1024, 4


class CopiedCaches(Examination):
    """A cache that comes in as ``past`` and goes out longer as ``present`` is written anew for each token."""

    name: ClassVar[str] = "copied-caches"
    level: ClassVar[Level] = "hint"
    remedy: ClassVar[str] = (
        "graphopt optimize FILE --target ort-cpu, or --add page_kv: caches lie in pages and are written in place; "
        "ports change, so programs that feed them must, too"
    )

    def find(self, patient: Patient) -> Iterator[Symptom]:
        """Read the ports."""
        caches = [value for value in patient.model.graph.inputs if _grows(value)]
        if caches:
            size = sum(map(_bytes_of, caches))
            yield self.symptom(CACHE_COPY(count=len(caches), context=_CONTEXT, megabytes=size / 1e6), caches)


def _grows(value: ir.Value) -> bool:
    port = past_port(value.name or "")
    shape = value.shape
    is_cache = port is not None and port.part in ("key", "value") and shape is not None and len(shape) == _AXES
    return is_cache and shape is not None and not isinstance(shape[2], int)


def _bytes_of(value: ir.Value) -> int:
    assert value.shape is not None
    assert value.dtype is not None
    heads, width = value.shape[1], value.shape[3]
    sizes = [size if isinstance(size, int) else 1 for size in (heads, width)]
    return int(sizes[0] * sizes[1] * _CONTEXT * value.dtype.itemsize)
