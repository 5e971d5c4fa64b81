from __future__ import annotations

import onnx_ir as ir
import pytest

from graphopt.analysis.bases.axes import Basis
from graphopt.analysis.bases.search import find_bases
from tests.graphs import residual_model


def basis_of(model: ir.Model, tensor: str) -> Basis:
    (basis,) = [b for b in find_bases(model.graph) if any(a.tensor == tensor and a.index == 2 for a in b.axes)]
    return basis


def test_the_residual_of_a_model_is_one_basis_with_its_weights() -> None:
    residual = basis_of(residual_model(gains=False), "embedding.out")
    assert residual.width == 16
    assert not residual.pins
    assert [(site.node.name, site.axis) for site in residual.writers] == [("embedding", 1), ("down0", 1), ("down1", 1)]
    assert [(site.node.name, site.axis) for site in residual.readers] == [("up0", 0), ("up1", 0), ("head", 0)]


def test_biases_write_too() -> None:
    residual = basis_of(residual_model(gains=False, biases=True), "embedding.out")
    assert {(site.node.name, site.input, site.axis) for site in residual.writers} >= {("down0.add_bias", 1, 0)}


def test_a_number_that_scales_the_stream_does_not_pin_it() -> None:
    residual = basis_of(residual_model(gains=False, multiplier=4.0), "scaled.out")
    assert not residual.pins
    assert residual.writers[0].node.name == "embedding"


@pytest.mark.parametrize(
    ("options", "node", "reason"),
    [
        ({"gains": True}, "norm0", "gain of its own"),
        ({"gains": False, "residual_output": True}, "residual1.out", "graph output"),
    ],
)
def test_pins_name_the_node_and_the_reason(options: dict[str, bool], node: str, reason: str) -> None:
    pins = basis_of(residual_model(**options), "embedding.out").pins  # type: ignore[arg-type]
    assert any(pin.node == node and reason in str(pin.reason) for pin in pins)


def test_a_nonlinearity_pins_what_it_reads_and_writes() -> None:
    model = residual_model(gains=False)
    for tensor in ("up0.out", "sigmoid0.out"):
        assert {pin.node for pin in basis_of(model, tensor).pins} == {"sigmoid0"}
    assert {pin.side for pin in basis_of(model, "up0.out").pins} == {"observed"}
    assert {pin.side for pin in basis_of(model, "sigmoid0.out").pins} == {"made"}


def test_a_vector_spread_over_the_stream_pins_it() -> None:
    model = residual_model(gains=False)
    add = next(node for node in model.graph if node.name == "residual0")
    unit = ir.val("one", const_value=ir.tensor([1.0], name="one", dtype=ir.DataType.FLOAT))
    model.graph.initializers["one"] = unit
    add.replace_input_with(1, unit)
    assert any("the same number is added" in str(pin.reason) for pin in basis_of(model, "embedding.out").pins)


def test_a_product_of_two_activations_pins() -> None:
    model = residual_model(gains=False, multiplier=2.0)
    product = next(node for node in model.graph if node.name == "scaled")
    product.replace_input_with(1, product.inputs[0])
    assert any(pin.node == "scaled" for pin in basis_of(model, "embedding.out").pins)


def test_every_weight_axis_lies_in_exactly_one_basis() -> None:
    bases = find_bases(residual_model(biases=True, gains=False).graph)
    sites = [(s.node.name, s.input, s.axis) for b in bases for s in (*b.writers, *b.readers)]
    assert len(sites) == len(set(sites))


def test_an_exported_llama_has_one_residual_basis(llama_canonical: ir.Model) -> None:
    free = [b for b in find_bases(llama_canonical.graph) if b.role == "residual" and not b.pins]
    assert [b.width for b in free] == [64]
    # embedding, and per layer the attention's and the MLP's output; per layer q, k, v, gate, up, and the head
    assert (len(free[0].writers), len(free[0].readers)) == (1 + 2 * 2, 2 * 5 + 1)
