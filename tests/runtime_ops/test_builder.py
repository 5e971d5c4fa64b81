"""What writes bodies in less time than onnxscript's builder writes the same bytes."""

from __future__ import annotations

import onnx_ir as ir
import pytest
from onnxscript import GraphBuilder

from graphopt.runtime_ops import builder
from graphopt.runtime_ops.kv_attention.spec.body import function
from tests.runtime_ops.kv_cases import attributes_of


@pytest.mark.parametrize("storage", ["float16", "int4"])
def test_a_body_is_what_the_builder_of_onnxscript_writes(storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attributes = attributes_of(storage=storage, policies=(2, 1), budget=2, recent=10, mass=0.7)

    def written() -> bytes:
        body: bytes = ir.to_proto(function(23, **attributes.for_node())).SerializeToString(deterministic=True)
        return body

    made = written()
    monkeypatch.setattr(builder, "_Builder", GraphBuilder)
    assert written() == made
    assert b"not known" in made  # else it would not be tried what is said of a type that nobody knows
