"""Which angles of rotary embeddings are understood, and what is said of the others."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest

from graphopt.analysis.structure.rotary import rotary_angles
from graphopt.errors import InputError
from graphopt.graph.diagnostics import Skip
from graphopt.graph.editing import insert_behind
from tests.decoders import HEAD, decoder, matrix_product
from tests.graphs import residual_model, run_pass


def node(graph: ir.Graph, name: str) -> ir.Node:
    return next(candidate for candidate in graph if candidate.name == name)


def constant(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    graph.initializers[name] = ir.val(name, const_value=ir.tensor(array, name=name))
    return graph.initializers[name]


def test_all_layers_share_one_product() -> None:
    graph = decoder(2).graph
    (angles,) = rotary_angles(graph)
    assert (angles.product.name, angles.frequencies.name, angles.side, angles.path) == ("angles", "frequencies", 1, ())
    assert angles.positions.name == "floats.out"
    assert sorted(wave.name for wave in angles.waves) == ["cos", "sin"]
    assert sorted(rotary.name for rotary in angles.rotaries) == [
        f"{part}_turned{layer}" for part in "kq" for layer in (0, 1)
    ]
    np.testing.assert_allclose(angles.radians, 0.1 ** np.arange(HEAD // 2), rtol=1e-7)


def test_the_angles_of_an_export(llama_canonical: ir.Model) -> None:
    (angles,) = rotary_angles(llama_canonical.graph)
    assert len(angles.rotaries) == 4
    np.testing.assert_allclose(angles.radians, 10_000 ** (-np.arange(8) / 8), rtol=1e-6)


def test_a_product_of_matrices_between_nodes_that_move_numbers() -> None:
    """Frequencies [1, pairs, 1] times positions [batch, 1, length], as exporters of torch have it."""
    graph = decoder(1).graph
    matrix_product(graph)
    (angles,) = rotary_angles(graph)
    assert (angles.product.name, angles.side, [step.name for step in angles.path]) == ("outer", 0, ["spread_out"])
    np.testing.assert_allclose(angles.radians, 0.1 ** np.arange(HEAD // 2), rtol=1e-7)


def table(graph: ir.Graph) -> None:
    rotary = node(graph, "q_turned1")
    tables = [constant(graph, f"table_{wave}", np.ones((64, HEAD // 2), np.float32)) for wave in ("cos", "sin")]
    with_table = ir.node("RotaryEmbedding", [rotary.inputs[0], *tables, graph.inputs[2]], name="q_turned1")
    graph.insert_before(rotary, with_table)
    rotary.outputs[0].replace_all_uses_with(with_table.outputs[0])
    graph.remove(rotary, safe=True)


def fuse_attention(graph: ir.Graph) -> None:
    attention = node(graph, "attention0")
    inputs = [*attention.inputs[:3], None, None]
    graph.append(ir.node("GroupQueryAttention", inputs, {"do_rotary": 1}, domain="com.microsoft", name="fused"))


def learn_frequencies(graph: ir.Graph) -> None:
    product = node(graph, "angles")
    product.replace_input_with(1, ir.val("frequencies_given", ir.DataType.FLOAT, [HEAD // 2]))
    graph.inputs.append(product.inputs[1])


def offset(graph: ir.Graph) -> None:
    shift = constant(graph, "shift", np.ones(HEAD // 2, np.float32))
    insert_behind(
        node(graph, "angles").outputs[0], ir.node("Add", [node(graph, "angles").outputs[0], shift], name="on")
    )


def sum_angles(graph: ir.Graph) -> None:
    product = node(graph, "angles")
    wide = constant(graph, "wide", np.ones((HEAD // 2, HEAD // 2), np.float32))
    product_node = ir.node("MatMul", [product.inputs[0], wide], name="summed")
    wide.shape = ir.Shape([HEAD // 2, HEAD // 2])
    graph.insert_after(product, product_node)
    for name in ("cos", "sin"):
        node(graph, name).replace_input_with(0, product_node.outputs[0])


def other_wave(graph: ir.Graph) -> None:
    node(graph, "q_turned0").replace_input_with(2, node(graph, "cos").outputs[0])


def other_angle(graph: ir.Graph) -> None:
    product = node(graph, "angles")
    second_product = ir.node(
        "Mul", [product.inputs[0], constant(graph, "twice", np.full(HEAD // 2, 2, np.float32))], name="other"
    )
    graph.insert_after(product, second_product)
    node(graph, "sin").replace_input_with(0, second_product.outputs[0])


def spelled_out(graph: ir.Graph) -> None:
    product = node(graph, "angles")
    local_product = ir.node(
        "Mul", [product.inputs[0], constant(graph, "local", np.ones(HEAD // 2, np.float32))], name="other"
    )
    concat = ir.node("Concat", [local_product.outputs[0], local_product.outputs[0]], {"axis": -1}, name="twice")
    cos = ir.node("Cos", [concat.outputs[0]], name="other_cos")
    rotation = ir.node("Mul", [node(graph, "embedding").outputs[0], cos.outputs[0]], name="turned")
    graph.insert_after(node(graph, "embedding"), [local_product, concat, cos, rotation])


def show_angles(graph: ir.Graph) -> None:
    graph.outputs.append(node(graph, "angles").outputs[0])


def read_too(graph: ir.Graph) -> None:
    graph.append(ir.node("Softmax", [node(graph, "cos").outputs[0]], name="reader"))


def fewer(graph: ir.Graph) -> None:
    node(graph, "angles").replace_input_with(1, constant(graph, "one", np.ones(1, np.float32)))


@pytest.mark.parametrize(
    ("change", "node_name", "message"),
    [
        (table, "q_turned1", "looks its angles up in a table by positions"),
        (fuse_attention, "fused", "com.microsoft::GroupQueryAttention turns queries and keys itself"),
        (learn_frequencies, "q_turned0", "its angles angles are no product of positions with constant frequencies"),
        (offset, "q_turned0", "its angles on.output are no product"),
        (sum_angles, "q_turned0", "its angles summed are no product"),
        (other_wave, "q_turned0", "its input cos.out is no Sin of an angle, but comes from Cos cos"),
        (other_angle, "q_turned0", "of different angles, angles and other"),
        (spelled_out, "other_cos", "its Cos is of an angle that no RotaryEmbedding turns by"),
        (show_angles, "q_turned0", "read by the output angles.out too"),
        (read_too, "q_turned0", "read by Softmax reader too"),
        (fewer, "q_turned0", r"one has 1 numbers"),
    ],
)
def test_what_is_not_understood_is_refused_by_name_and_the_graph_stays(
    change: Callable[[ir.Graph], None], node_name: str, message: str
) -> None:
    model = decoder(2)
    change(model.graph)
    for name in ("cos", "sin"):
        node(model.graph, name).outputs[0].shape = ir.Shape(["batch", "length", HEAD // 2])
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    skip = rotary_angles(model.graph)
    assert isinstance(skip, Skip)
    assert skip.where == node_name
    assert message in str(skip.reason)
    with pytest.raises(InputError, match=rf"cannot be rescaled: .*node={node_name}.*canonicalize"):
        run_pass(model, "rescale_rope", trained=64)
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


def test_a_model_without_rotary_positions_is_refused() -> None:
    with pytest.raises(InputError, match="the graph has no RotaryEmbedding: it has no rotary positions"):
        run_pass(residual_model(), "rescale_rope", trained=64)
