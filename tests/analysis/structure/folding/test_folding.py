"""Repeated layers are found by structure: in graphs of any depth, of every family, whatever the names are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from graphopt.analysis.structure.folding import Part, Repeat, fold
from graphopt.analysis.structure.folding.lockstep import divide
from graphopt.analysis.structure.folding.trunk import cut
from graphopt.analysis.structure.roles import roles_of
from graphopt.artifact import artifact
from tests.decoders import decoder, shuffle_names
from tests.graphs import residual_model, run_pass


def shape_of(parts: list[Part] | tuple[Part, ...]) -> list[object]:
    """Return repeats as (shape of the unit, count), and what is in none as ``None``."""
    return [(shape_of(part.unit), part.count) if isinstance(part, Repeat) else None for part in parts]


ATTENTION_AND_MLP = ([None, None], 32)


def test_32_layers_are_one_repeat_of_attention_and_mlp() -> None:
    layer_fold = fold(decoder(32).graph)
    assert shape_of(layer_fold.parts) == [None, ATTENTION_AND_MLP, None, None]
    assert layer_fold.layers() == [range(1 + 2 * number, 3 + 2 * number) for number in range(32)]
    # masks, angles and what they are made of; Shape, Cast and the like among them
    assert {"global_mask", "cos", "sin"} <= {node.name for node in layer_fold.cuts.common_nodes}
    assert len(set(layer_fold.parameters[1:-2])) == 2


def test_five_local_layers_and_a_global_one_are_nested_repeats() -> None:
    layer_fold = fold(decoder([*(["local"] * 5 + ["global"]) * 4, "local", "local"]).graph)
    five = ([None, None], 5)
    assert shape_of(layer_fold.parts) == [None, ([five, None, None], 4), ([None, None], 2), None, None]
    assert len(layer_fold.layers()) == 26
    (outer,) = [part for part in layer_fold.parts if isinstance(part, Repeat) and part.count == 4]
    local, wide = layer_fold.structures[1], layer_fold.structures[1 + 10]
    assert local != wide
    assert layer_fold.structures[2] == layer_fold.structures[1 + 11]  # their MLPs are alike
    assert [layer_fold.structures[s] for s in range(outer.start, outer.start + 12, 2)] == [local] * 5 + [wide]


def test_first_and_last_layers_that_differ_are_no_instances() -> None:
    layer_fold = fold(decoder(["local", *["global"] * 6, "local"]).graph)
    repeats = [part for part in layer_fold.parts if isinstance(part, Repeat)]
    assert [(part.count, part.length, part.start) for part in repeats] == [(6, 2, 3)]
    assert len(layer_fold.layers()) == 8
    structures = [layer_fold.structures[layer.start] for layer in layer_fold.layers()]
    assert structures[0] == structures[-1] != structures[1]
    assert len(set(structures[1:-1])) == 1


@pytest.mark.parametrize("layers", [3, ["local", "local", "global"] * 3])
def test_names_are_labels(layers: int | list[str]) -> None:
    before, after = decoder(layers), decoder(layers)
    shuffle_names(after)
    plain, shuffled_fold = fold(before.graph), fold(after.graph)
    assert plain.parts == shuffled_fold.parts
    assert plain.structures == shuffled_fold.structures
    assert plain.parameters == shuffled_fold.parameters
    positions = [{node: number for number, node in enumerate(model.graph)} for model in (before, after)]
    for nodes, other_nodes in zip(plain.order, shuffled_fold.order, strict=True):
        assert [positions[0][node] for node in nodes] == [positions[1][node] for node in other_nodes]


def test_isomorphic_layers_have_their_nodes_in_one_order() -> None:
    layer_fold = fold(decoder(4).graph)
    for layer in layer_fold.layers():
        words = [[(node.name or "").rstrip("0123456789") for node in layer_fold.order[segment]] for segment in layer]
        assert words == [
            [(n.name or "").rstrip("0123456789") for n in layer_fold.order[s]] for s in layer_fold.layers()[0]
        ]


def test_attributes_are_compared_as_a_file_holds_them() -> None:
    model = decoder(4)
    # both are 1e-5 in the 32 bits that a file has for a float
    for number, epsilon in enumerate((1e-5, 9.999999747378748e-06, 9.99999974737875e-06, 1e-5)):
        (norm,) = [node for node in model.graph if node.name == f"input_norm{number}"]
        norm.attributes["epsilon"] = ir.AttrFloat32("epsilon", epsilon)
    assert shape_of(fold(model.graph).parts) == [None, ([None, None], 4), None, None]


@pytest.mark.parametrize("change", ["attribute", "wiring", "node"])
def test_one_changed_layer_of_eight_is_an_exception(change: str) -> None:
    model = decoder(8)
    node_by_name = {node.name: node for node in model.graph}
    if change == "attribute":
        node_by_name["attention4"].attributes["scale"] = ir.Attr("scale", ir.AttributeType.FLOAT, 0.5)
    elif change == "wiring":
        node_by_name["gated4"].replace_input_with(0, node_by_name["gate4"].outputs[0])
    else:
        run_over = node_by_name["gated4"]
        extra = ir.node("Relu", [run_over.inputs[1]], name="extra")
        model.graph.insert_before(run_over, extra)
        run_over.replace_input_with(1, extra.outputs[0])
    layer_fold = fold(model.graph)
    of_layer = [tuple(layer_fold.structures[s] for s in layer) for layer in layer_fold.layers()]
    assert len(of_layer) == 8
    assert [number for number, structures in enumerate(of_layer) if structures != of_layer[0]] == [4]


def mixed_precision(depth: int = 6) -> ir.Model:
    """Return a decoder of int4 matrices; ``down`` is int8 in layers 1 and 4, and ``up`` still floats in layer 5."""
    model, wide, plain = decoder(depth), decoder(depth), decoder(depth)
    for decoder_model, format in ((model, "int4"), (wide, "int8")):
        run_pass(decoder_model, "quantize_weights", linear={"format": format, "group": 16})
    nodes, wide_nodes = ({node.name: node for node in decoder_model.graph} for decoder_model in (model, wide))
    for number in (1, 4):
        node, wide_node = (node_by_name[f"down{number}"].inputs[1].producer() for node_by_name in (nodes, wide_nodes))
        for value, wide_value in zip(node.inputs, wide_node.inputs, strict=True):
            if value is not None:
                value.const_value, value.type = wide_value.const_value, wide_value.type
    weight = plain.graph.initializers["up5.weight"]
    copy = ir.val("up5.float", const_value=weight.const_value)
    model.graph.register_initializer(copy)
    dequantize = nodes["up5"].inputs[1].producer()
    nodes["up5"].replace_input_with(1, copy)
    model.graph.remove(dequantize, safe=True)
    return model


def test_layers_of_mixed_precision_fold_by_structure() -> None:
    layer_fold = fold(mixed_precision().graph)
    assert shape_of(layer_fold.parts)[-3:] == [([None, None], 6), None, None]
    parameters = [layer_fold.parameters[layer.stop - 1] for layer in layer_fold.layers()]
    assert [number for number, layer_parameters in enumerate(parameters) if layer_parameters != parameters[0]] == [
        1,
        4,
        5,
    ]
    assert parameters[1] == parameters[4] != parameters[5]


def test_weights_in_nodes_and_branches_are_compared_by_shape() -> None:
    """As other exporters write them: a ``Constant`` for a weight, an ``If`` for a choice."""
    model = decoder(4)
    for number, node in enumerate([node for node in model.graph if node.op_type == "Sigmoid"]):
        value = np.random.default_rng(number).standard_normal((1, 48)).astype(np.float32)
        constant = ir.node("Constant", [], {"value": ir.tensor(value)}, name=f"c{number}")
        sum_node = ir.node("Add", [node.inputs[0], constant.outputs[0]], name=f"add{number}")
        always = ir.node("Constant", [], {"value": ir.tensor(np.array(True))}, name=f"true{number}")
        inner = [ir.node(kind, [sum_node.outputs[0]], name=f"{kind}{number}") for kind in ("Neg", "Abs")]
        branches = [
            ir.Graph([], branch_node.outputs, nodes=[branch_node], name=f"branch.{branch_node.name}")
            for branch_node in inner
        ]
        choice = ir.node(
            "If",
            [always.outputs[0]],
            {"then_branch": branches[0], "else_branch": branches[1]},
            name=f"if{number}",
        )
        model.graph.insert_before(node, [constant, sum_node, always, choice])
        node.replace_input_with(0, choice.outputs[0])
    assert shape_of(fold(model.graph).parts) == [None, ([None, None], 4), None, None]


def cross_layers(layers: list[str] | int) -> ir.Model:
    """Return a decoder whose later layers read the values of the first one, too: no node between is on every path."""
    model = decoder(layers)
    nodes = {node.name: node for node in model.graph}
    first = nodes["v_heads0"].outputs[0]
    for number in range(1, sum("attention" in (name or "") for name in nodes)):
        cache = nodes[f"present_value{number}"]
        sum_node = ir.node("Add", [cache.inputs[1], first], name=f"mixed{number}")
        sum_node.outputs[0].name, sum_node.outputs[0].type = f"mixed{number}.out", first.type
        sum_node.outputs[0].shape = cache.inputs[1].shape
        model.graph.insert_before(cache, sum_node)
        cache.replace_input_with(1, sum_node.outputs[0])
    return model


@pytest.mark.parametrize("depth", [4, 32])
def test_layers_are_found_where_no_node_is_on_every_path(depth: int) -> None:
    model = cross_layers(depth)
    shuffle_names(model)
    layer_fold = fold(model.graph)
    assert len(layer_fold.layers()) == depth
    kinds = [tuple(layer_fold.structures[segment] for segment in layer) for layer in layer_fold.layers()]
    # the first has no node that mixes values; its MLP is that of the others
    assert len(set(kinds[1:])) == 1
    assert kinds[0] != kinds[1]
    assert kinds[0][-1] == kinds[1][-1]
    roles = Counter(roles_of(model.graph, layer_fold).values())
    for role in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "attention"):
        assert roles[role] == depth, role
    assert (roles["embedding"], roles["lm_head"]) == (1, 1)


def test_alternations_are_found_where_no_node_is_on_every_path() -> None:
    layer_fold = fold(cross_layers(["local", "local", "global"] * 3).graph)
    kinds = [layer_fold.structures[layer.start] for layer in layer_fold.layers()]
    assert len(kinds) == 9
    assert kinds[1] == kinds[3] == kinds[4] == kinds[6] == kinds[7]
    assert kinds[2] == kinds[5] == kinds[8] != kinds[1]


def test_a_chain_that_has_cuts_is_not_divided() -> None:
    graph = decoder(4).graph
    assert cut(graph, divide).segment_of == cut(graph).segment_of


def test_a_graph_without_attention_has_layers_too() -> None:
    layer_fold = fold(residual_model(layers=5).graph)
    assert [len(layer) for layer in layer_fold.layers()] == [1] * 5


@pytest.mark.parametrize(
    "family", ["llama", "gemma2", "gemma3", "gpt2", "gpt_neox", "phi3", "qwen2", "mixtral", "bert"]
)
def test_two_layers_of_each_family_are_found_with_names_shuffled(
    make_artifact: Callable[[str], Path], family: str
) -> None:
    model = artifact.read(make_artifact(family)).model
    plain = fold(model.graph)
    shuffle_names(model)
    layer_fold = fold(model.graph)
    assert plain.structures == layer_fold.structures
    assert len(layer_fold.layers()) == 2
    kinds = [[layer_fold.structures[segment] for segment in layer] for layer in layer_fold.layers()]
    if family.startswith("gemma"):
        # the first reads a window: another mask, and in gemma3 other angles
        assert kinds[0][0] != kinds[1][0]
        assert kinds[0][1:] == kinds[1][1:]
    else:
        assert kinds[0] == kinds[1]
    # what is in no layer: embedding, final norm, lm_head, pooler, but no product of a layer
    inside = {segment for layer in layer_fold.layers() for segment in layer}
    outside = [node for number, nodes in enumerate(layer_fold.order) if number not in inside for node in nodes]
    # lm_head, or the pooler
    assert sum(node.op_type in ("MatMul", "Gemm") for node in outside) == 1
