from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphopt.analysis.structure.paged_caches import (
    METADATA,
    PagedLayer,
    from_json,
    layers_from_metadata,
    layers_of,
    to_json,
)
from graphopt.errors import InputError
from graphopt.ort.session import session_of
from graphopt.runtime_ops.kv_attention.spec.attributes import FLOATS, KVAttributes
from graphopt.tasks.causal_lm.interface import Interface
from tests.graphs import canonical, run_pass


def quantize_caches(llama: Path, **options: str) -> ir.Model:
    model = canonical(llama)
    run_pass(model, "quantize_kv", **options)
    return model


@pytest.fixture
def paged_model(make_artifact: Callable[[str], Path]) -> ir.Model:
    return quantize_caches(make_artifact("llama"))


def test_graph_and_session_say_the_same(paged_model: ir.Model) -> None:
    of_graph = Interface.of_graph(paged_model.graph)
    with session_of(paged_model) as session:
        assert Interface.of_session(session) == of_graph
    assert of_graph.has_pages
    assert of_graph.takes_padding
    assert [name.rpartition(".")[2] for name in of_graph.past] == ["keys", "values", "scales", "recent"] * 2
    assert from_json(to_json(of_graph.layers)) == of_graph.layers


@pytest.mark.parametrize("storage", ["bfloat16", "float8"])
def test_a_session_knows_the_types_of_narrow_caches(storage: str, make_artifact: Callable[[str], Path]) -> None:
    model = quantize_caches(make_artifact("llama"), storage=storage)
    with session_of(model) as session:
        interface = Interface.of_session(session)
    assert interface == Interface.of_graph(model.graph)
    assert {interface.inputs[name].dtype for name in interface.past} == {FLOATS[storage]}


def test_a_session_without_the_metadata_is_refused(paged_model: ir.Model) -> None:
    del paged_model.metadata_props[METADATA]
    with session_of(paged_model) as session, pytest.raises(InputError, match="not what its metadata says"):
        Interface.of_session(session)


@pytest.mark.parametrize(
    "text", ["{", "[1]", '[{"number": 0}]', '[{"number": 0, "head_size": 16, "kv_heads": 0, "scale": 1}]']
)
def test_metadata_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="metadata ai.graphopt.kv"):
        layers_from_metadata({METADATA: text})


def test_attributes_out_of_range_name_the_node(paged_model: ir.Model) -> None:
    node = next(node for node in paged_model.graph if node.op_type == "KVAttention")
    node.attributes["page"] = ir.AttrInt64("page", 17)
    with pytest.raises(InputError, match="page is one of") as caught:
        layers_of(paged_model.graph)
    assert caught.value.node == node.name


@given(
    tokens=st.integers(1, 3000),
    new=st.integers(1, 300),
    sinks=st.integers(0, 200),
    recent=st.integers(1, 400),
    window=st.integers(0, 500),
)
def test_pages_of_streaming_layers_hold_what_the_operator_asks_for(
    tokens: int, new: int, sinks: int, recent: int, window: int
) -> None:
    kv = KVAttributes(2, 1.0, window=window, page=16, policies=(1,), sinks=sinks, recent=recent)
    layer = PagedLayer(0, 16, kv)
    pages = layer.pages(tokens, new)
    # either all tokens fit, or new ones may take the place of old ones
    assert pages * 16 >= tokens or kv.may_wrap(pages, new)
    assert pages <= -(-tokens // 16)
