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
    folded = fold(decoder(32).graph)
    assert shape_of(folded.parts) == [None, ATTENTION_AND_MLP, None, None]
    assert folded.layers() == [range(1 + 2 * number, 3 + 2 * number) for number in range(32)]
    # masks, angles and what they are made of; Shape, Cast and the like among them
    assert {"global_mask", "cos", "sin"} <= {node.name for node in folded.cuts.common_nodes}
    assert len(set(folded.parameters[1:-2])) == 2


def test_five_local_layers_and_a_global_one_are_nested_repeats() -> None:
    folded = fold(decoder([*(["local"] * 5 + ["global"]) * 4, "local", "local"]).graph)
    five = ([None, None], 5)
    assert shape_of(folded.parts) == [None, ([five, None, None], 4), ([None, None], 2), None, None]
    assert len(folded.layers()) == 26
    (outer,) = [part for part in folded.parts if isinstance(part, Repeat) and part.count == 4]
    local, wide = folded.structures[1], folded.structures[1 + 10]
    assert local != wide
    assert folded.structures[2] == folded.structures[1 + 11]  # their MLPs are alike
    assert [folded.structures[s] for s in range(outer.start, outer.start + 12, 2)] == [local] * 5 + [wide]


def test_first_and_last_layers_that_differ_are_no_instances() -> None:
    folded = fold(decoder(["local", *["global"] * 6, "local"]).graph)
    repeats = [part for part in folded.parts if isinstance(part, Repeat)]
    assert [(part.count, part.length, part.start) for part in repeats] == [(6, 2, 3)]
    assert len(folded.layers()) == 8
    structures = [folded.structures[layer.start] for layer in folded.layers()]
    assert structures[0] == structures[-1] != structures[1]
    assert len(set(structures[1:-1])) == 1


@pytest.mark.parametrize("layers", [3, ["local", "local", "global"] * 3])
def test_names_are_labels(layers: int | list[str]) -> None:
    before, after = decoder(layers), decoder(layers)
    shuffle_names(after)
    plain, shuffled = fold(before.graph), fold(after.graph)
    assert plain.parts == shuffled.parts
    assert plain.structures == shuffled.structures
    assert plain.parameters == shuffled.parameters
    places = [{node: number for number, node in enumerate(model.graph)} for model in (before, after)]
    for ours, others in zip(plain.order, shuffled.order, strict=True):
        assert [places[0][node] for node in ours] == [places[1][node] for node in others]


def test_isomorphic_layers_have_their_nodes_in_one_order() -> None:
    folded = fold(decoder(4).graph)
    for layer in folded.layers():
        words = [[(node.name or "").rstrip("0123456789") for node in folded.order[segment]] for segment in layer]
        assert words == [[(n.name or "").rstrip("0123456789") for n in folded.order[s]] for s in folded.layers()[0]]


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
    named = {node.name: node for node in model.graph}
    if change == "attribute":
        named["attention4"].attributes["scale"] = ir.Attr("scale", ir.AttributeType.FLOAT, 0.5)
    elif change == "wiring":
        named["gated4"].replace_input_with(0, named["gate4"].outputs[0])
    else:
        run_over = named["gated4"]
        extra = ir.node("Relu", [run_over.inputs[1]], name="extra")
        model.graph.insert_before(run_over, extra)
        run_over.replace_input_with(1, extra.outputs[0])
    folded = fold(model.graph)
    of_layer = [tuple(folded.structures[s] for s in layer) for layer in folded.layers()]
    assert len(of_layer) == 8
    assert [number for number, each in enumerate(of_layer) if each != of_layer[0]] == [4]


def mixed(depth: int = 6) -> ir.Model:
    """Return a decoder of int4 matrices; ``down`` is int8 in layers 1 and 4, and ``up`` still floats in layer 5."""
    model, wide, plain = decoder(depth), decoder(depth), decoder(depth)
    for each, format in ((model, "int4"), (wide, "int8")):
        run_pass(each, "quantize_weights", linear={"format": format, "group": 16})
    nodes, others = ({node.name: node for node in each.graph} for each in (model, wide))
    for number in (1, 4):
        ours, theirs = (found[f"down{number}"].inputs[1].producer() for found in (nodes, others))
        for mine, its in zip(ours.inputs, theirs.inputs, strict=True):
            if mine is not None:
                mine.const_value, mine.type = its.const_value, its.type
    weight = plain.graph.initializers["up5.weight"]
    copy = ir.val("up5.float", const_value=weight.const_value)
    model.graph.register_initializer(copy)
    dequantize = nodes["up5"].inputs[1].producer()
    nodes["up5"].replace_input_with(1, copy)
    model.graph.remove(dequantize, safe=True)
    return model


def test_layers_of_mixed_precision_fold_by_structure() -> None:
    folded = fold(mixed().graph)
    assert shape_of(folded.parts)[-3:] == [([None, None], 6), None, None]
    stored = [folded.parameters[layer.stop - 1] for layer in folded.layers()]
    assert [number for number, each in enumerate(stored) if each != stored[0]] == [1, 4, 5]
    assert stored[1] == stored[4] != stored[5]


def test_weights_in_nodes_and_branches_are_compared_by_shape() -> None:
    """As other exporters write them: a ``Constant`` for a weight, an ``If`` for a choice."""
    model = decoder(4)
    for number, node in enumerate([node for node in model.graph if node.op_type == "Sigmoid"]):
        value = np.random.default_rng(number).standard_normal((1, 48)).astype(np.float32)
        constant = ir.node("Constant", [], {"value": ir.tensor(value)}, name=f"c{number}")
        added = ir.node("Add", [node.inputs[0], constant.outputs[0]], name=f"add{number}")
        always = ir.node("Constant", [], {"value": ir.tensor(np.array(True))}, name=f"true{number}")
        inner = [ir.node(kind, [added.outputs[0]], name=f"{kind}{number}") for kind in ("Neg", "Abs")]
        branches = [ir.Graph([], each.outputs, nodes=[each], name=f"branch.{each.name}") for each in inner]
        chosen = ir.node(
            "If",
            [always.outputs[0]],
            {"then_branch": branches[0], "else_branch": branches[1]},
            name=f"if{number}",
        )
        model.graph.insert_before(node, [constant, added, always, chosen])
        node.replace_input_with(0, chosen.outputs[0])
    assert shape_of(fold(model.graph).parts) == [None, ([None, None], 4), None, None]


def crossed(layers: list[str] | int) -> ir.Model:
    """Return a decoder whose later layers read the values of the first one, too: no node between is on every path."""
    model = decoder(layers)
    nodes = {node.name: node for node in model.graph}
    first = nodes["v_heads0"].outputs[0]
    for number in range(1, sum("attention" in (name or "") for name in nodes)):
        cache = nodes[f"present_value{number}"]
        mixed = ir.node("Add", [cache.inputs[1], first], name=f"mixed{number}")
        mixed.outputs[0].name, mixed.outputs[0].type = f"mixed{number}.out", first.type
        mixed.outputs[0].shape = cache.inputs[1].shape
        model.graph.insert_before(cache, mixed)
        cache.replace_input_with(1, mixed.outputs[0])
    return model


@pytest.mark.parametrize("depth", [4, 32])
def test_layers_are_found_where_no_node_is_on_every_path(depth: int) -> None:
    model = crossed(depth)
    shuffle_names(model)
    folded = fold(model.graph)
    assert len(folded.layers()) == depth
    kinds = [tuple(folded.structures[segment] for segment in layer) for layer in folded.layers()]
    # the first has no node that mixes values; its MLP is that of the others
    assert len(set(kinds[1:])) == 1
    assert kinds[0] != kinds[1]
    assert kinds[0][-1] == kinds[1][-1]
    roles = Counter(roles_of(model.graph, folded).values())
    for role in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "attention"):
        assert roles[role] == depth, role
    assert (roles["embedding"], roles["lm_head"]) == (1, 1)


def test_alternations_are_found_where_no_node_is_on_every_path() -> None:
    folded = fold(crossed(["local", "local", "global"] * 3).graph)
    kinds = [folded.structures[layer.start] for layer in folded.layers()]
    assert len(kinds) == 9
    assert kinds[1] == kinds[3] == kinds[4] == kinds[6] == kinds[7]
    assert kinds[2] == kinds[5] == kinds[8] != kinds[1]


def test_a_chain_that_has_cuts_is_not_divided() -> None:
    graph = decoder(4).graph
    assert cut(graph, divide).segment_of == cut(graph).segment_of


def test_a_graph_without_attention_has_layers_too() -> None:
    folded = fold(residual_model(layers=5).graph)
    assert [len(layer) for layer in folded.layers()] == [1] * 5


@pytest.mark.parametrize(
    "family", ["llama", "gemma2", "gemma3", "gpt2", "gpt_neox", "phi3", "qwen2", "mixtral", "bert"]
)
def test_two_layers_of_each_family_are_found_with_names_shuffled(
    make_artifact: Callable[[str], Path], family: str
) -> None:
    model = artifact.read(make_artifact(family)).model
    plain = fold(model.graph)
    shuffle_names(model)
    folded = fold(model.graph)
    assert plain.structures == folded.structures
    assert len(folded.layers()) == 2
    kinds = [[folded.structures[segment] for segment in layer] for layer in folded.layers()]
    if family.startswith("gemma"):
        # the first reads a window: another mask, and in gemma3 other angles
        assert kinds[0][0] != kinds[1][0]
        assert kinds[0][1:] == kinds[1][1:]
    else:
        assert kinds[0] == kinds[1]
    # what is in no layer: embedding, final norm, lm_head, pooler, but no product of a layer
    inside = {segment for layer in folded.layers() for segment in layer}
    outside = [node for number, nodes in enumerate(folded.order) if number not in inside for node in nodes]
    # lm_head, or the pooler
    assert sum(node.op_type in ("MatMul", "Gemm") for node in outside) == 1
