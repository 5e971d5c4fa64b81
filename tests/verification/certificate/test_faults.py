"""Each planted fault is rejected, and the finding names the culprit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest

from graphopt.numerics.rotations.claims import Claims
from graphopt.numerics.rotations.hadamard import hadamard
from graphopt.verification.certificate.checker import check
from tests.graphs import residual_model
from tests.verification.certificate.rotated_models import (
    KEY,
    PACKED_COLUMNS,
    STARTS,
    VALUE,
    WIDTH,
    attention_model,
    claim,
    dense,
    edit,
    first_fault,
    insert_hadamard,
    node,
    rotated_attention,
    rotated_residual,
    rotation_of,
    without,
)

PlantedFault = tuple[ir.Model, ir.Model, Claims, str, str | None]


def forgotten_writer() -> PlantedFault:
    before, after, claims = rotated_residual()
    after.graph.initializers["down0.weight"].const_value = before.graph.initializers["down0.weight"].const_value
    return before, after, claims, "down0", "down0.weight"


def forgotten_writer_without_a_claim() -> PlantedFault:
    before, after, claims, _, _ = forgotten_writer()
    return before, after, without(claims, "down0.out"), "residual0", "down0.out"


def forgotten_reader() -> PlantedFault:
    before, after, claims = rotated_residual()
    after.graph.initializers["up1.weight"].const_value = before.graph.initializers["up1.weight"].const_value
    return before, after, claims, "up1", "up1.weight"


def forgotten_bias() -> PlantedFault:
    before, after, claims = rotated_residual(biases=True)
    after.graph.initializers["down1.bias"].const_value = before.graph.initializers["down1.bias"].const_value
    return before, after, claims, "down1.add_bias", "down1.bias"


def unfolded_gain() -> PlantedFault:
    before, after, claims = rotated_residual(gains=True)
    return before, after, claims, "norm0", "norm0.gain"


def mean_that_was_not_folded() -> PlantedFault:
    before, after, claims = rotated_residual(layer_norm=True)
    return before, after, claims, "norm0", "embedding.out"


def transposed_map() -> PlantedFault:
    before, after, claims = rotated_residual()
    original = before.graph.initializers["up0.weight"].const_value
    assert original is not None
    # Q instead of Q^T; the signs keep Q from being symmetric
    edit(after, "up0.weight", lambda _: dense(claims.rotations["r"]) @ original.numpy())
    return before, after, claims, "up0", "up0.weight"


def flipped_sign() -> PlantedFault:
    before, after, claims = rotated_residual()
    edit(after, "down1.weight", lambda W: W * np.where(np.arange(16) == 11, -1, 1))
    return before, after, claims, "down1", "down1.weight"


def flipped_entry() -> PlantedFault:
    before, after, claims = rotated_residual()

    def flip(W: np.ndarray) -> np.ndarray:
        W = W.copy()
        W[17, 5] *= -1
        return W

    edit(after, "table", flip)
    return before, after, claims, "embedding", "table"


def other_seed() -> PlantedFault:
    before, after, claims = rotated_residual()
    other_rotation = claims.rotations["r"].model_copy(update={"seed": 4})
    return before, after, claims.model_copy(update={"rotations": {"r": other_rotation}}), "embedding", "table"


def changed_weight_elsewhere() -> PlantedFault:
    before, after, claims = rotated_attention()
    edit(after, "sizes", lambda sizes: sizes[[2, 1, 0]])
    return before, after, claims, "split", "sizes"


def wrong_head() -> PlantedFault:
    """The second value head stays, but what reads attention thinks that it was rotated."""
    before, after, claims = rotated_attention(online=False)
    original = before.graph.initializers["packed.weight"].const_value
    assert original is not None
    last = slice(STARTS["value"] + WIDTH, None)
    Q, original_weight = dense(claims.rotations["residual"]), original.numpy().astype(np.float64)

    def undo(W: np.ndarray) -> np.ndarray:
        W = W.copy()
        W[:, last] = Q.T @ original_weight[:, last]
        return W

    edit(after, "packed.weight", undo)
    return before, after, claims, "packed", "packed.weight"


def wrong_head_claimed() -> PlantedFault:
    before, after, claims = rotated_attention(online=False)
    wrong_claim = claim("packed.out", "value", start=STARTS["value"] - WIDTH, copies=2, stride=WIDTH)
    claims = without(claims, "packed.out")
    return (
        before,
        after,
        claims.model_copy(update={"tensors": (*claims.tensors, wrong_claim)}),
        "packed",
        "packed.weight",
    )


def keys_without_queries() -> PlantedFault:
    before, after, claims = rotated_attention()
    rotation_node, heads = node(after, "query.turned"), node(after, "query.heads")
    rotation_node.outputs[0].replace_all_uses_with(heads.outputs[0])
    after.graph.remove(rotation_node, safe=True)
    return before, after, claims, "attention", "query.heads.out"


def swapped_attribute() -> PlantedFault:
    before, after, claims = rotated_attention()
    node(after, "value.heads").attributes["perm"] = ir.AttrInt64s("perm", [0, 2, 3, 1])
    return before, after, claims, "value.heads", None


def dropped_attribute() -> PlantedFault:
    before, after, claims = rotated_attention()
    node(after, "attention").attributes.pop("is_causal")
    return before, after, claims, "attention", None


def another_op() -> PlantedFault:
    before, after, claims = rotated_residual()
    old = node(after, "sigmoid0")
    new = ir.node("Relu", [old.inputs[0]], name="sigmoid0")
    after.graph.insert_before(old, new)
    old.outputs[0].replace_all_uses_with(new.outputs[0])
    after.graph.remove(old, safe=True)
    return before, after, claims, "sigmoid0", None


def extra_node() -> PlantedFault:
    before, after, claims = rotated_residual()
    hidden = node(after, "up1").outputs[0]
    extra = ir.node("Relu", [hidden], name="extra")
    hidden.replace_all_uses_with(extra.outputs[0])
    extra.replace_input_with(0, hidden)
    after.graph.insert_after(node(after, "up1"), extra)
    return before, after, claims, "extra", None


def missing_node() -> PlantedFault:
    before, after, claims = rotated_residual()
    activation = node(after, "sigmoid1")
    activation.outputs[0].replace_all_uses_with(activation.inputs[0])  # type: ignore[arg-type]
    after.graph.remove(activation, safe=True)
    return before, after, claims, "down1", "up1.out"


def crossed_inputs() -> PlantedFault:
    """An equal shape does not make the value of another layer the same."""
    before, after, claims = rotated_residual()
    node(after, "down1").replace_input_with(0, node(after, "sigmoid0").outputs[0])
    return before, after, claims, "down1", "sigmoid0.out"


def output_left_rotated() -> PlantedFault:
    before, after, claims = rotated_residual(residual_output=True)
    return before, after, claims, "residual1", "residual1.out"


def logits_left_rotated() -> PlantedFault:
    before, after, claims = rotated_residual()
    rotation = rotation_of(24, "random", 1)
    edit(after, "head.weight", lambda W: W @ dense(rotation))
    claims = claims.model_copy(
        update={"rotations": {**claims.rotations, "l": rotation}, "tensors": (*claims.tensors, claim("logits", "l"))}
    )
    return before, after, claims, "head", "logits"


def wrong_matrix_entry() -> PlantedFault:
    before, after, claims = rotated_attention()
    matrix = hadamard(12).copy()
    matrix[7, 3] *= -1
    after.graph.initializers["gated.turned.left"].const_value = ir.tensor(matrix)
    return before, after, claims, "gated.turned", "gated.turned.left"


def matrix_of_zeros_and_ones() -> PlantedFault:
    before, after, claims = rotated_attention()
    after.graph.initializers["key.turned.right"].const_value = ir.tensor(np.eye(2, dtype=np.int8))
    return before, after, claims, "key.turned", "key.turned.right"


def rotated_twice() -> PlantedFault:
    before, after, claims = rotated_attention()
    insert_hadamard(after, "value.heads", 2, 2, "again")
    return before, after, claims, "again", "value.heads.out"


def observed_rotation() -> PlantedFault:
    before, after, claims = rotated_attention()
    insert_hadamard(after, "up", 12, 1, "early")
    return before, after, claims, "gate", "early.out"


def cache_in_unlike_cache_out() -> PlantedFault:
    before, after, claims = rotated_attention()
    return before, after, without(claims, "past_key_values.0.key"), "attention", "past_key_values.0.key"


def cache_claimed_otherwise() -> PlantedFault:
    before, after, claims = rotated_attention()
    claims = claims.model_copy(update={"rotations": {**claims.rotations, "value": KEY.model_copy(update={"seed": 1})}})
    return before, after, claims, "packed", "packed.weight"


def cache_that_does_not_come_out() -> PlantedFault:
    models = rotated_attention()
    for model in models[:2]:
        model.graph.outputs.pop(1)
    return *models, "past_key_values.0.key", "past_key_values.0.key"


def claim_about_a_plain_input() -> PlantedFault:
    before, after = residual_model(gains=False), residual_model(gains=False)
    for model in (before, after):
        mask = ir.val("mask", ir.DataType.FLOAT, ["batch", "length", 16])
        model.graph.inputs.append(mask)
    claims = Claims(rotations={"r": rotation_of(16, "random", 1)}, tensors=(claim("mask", "r"),))
    return before, after, claims, "mask", "mask"


def other_opset() -> PlantedFault:
    before, after, claims = rotated_residual()
    after.opset_imports[""] = 24
    return before, after, claims, "model", None


def cut_rotation() -> PlantedFault:
    """A rotation of four coordinates, half of them keys and half of them values."""
    before, after = attention_model(), attention_model()
    start = STARTS["value"] - 2
    maps = np.eye(PACKED_COLUMNS)
    maps[start : start + WIDTH, start : start + WIDTH] = dense(VALUE)
    for name in ("packed.weight", "packed.bias"):
        edit(after, name, lambda W: W @ maps)
    claims = Claims(rotations={"value": VALUE}, tensors=(claim("packed.out", "value", start=start),))
    return before, after, claims, "split", "biased.out"


def blocks_that_do_not_divide() -> PlantedFault:
    before, after = attention_model(), attention_model()
    insert_hadamard(after, "gated", 4, 2, "turned")
    return before, after, Claims(), "turned", "gated.out"


def gain_that_the_app_may_replace() -> PlantedFault:
    before, after, claims = rotated_residual()
    for model in (before, after):
        model.graph.inputs.append(model.graph.initializers["norm1.gain"])
    return before, after, claims, "norm1", "norm1.gain"


def shape_that_is_not_so() -> PlantedFault:
    before, after, claims = rotated_residual()
    for model in (before, after):
        node(model, "residual0").outputs[0].shape = ir.Shape(["batch", "length", 8])
    return before, after, claims, "residual0", "embedding.out"


FAULTS = [
    cut_rotation,
    blocks_that_do_not_divide,
    gain_that_the_app_may_replace,
    shape_that_is_not_so,
    forgotten_writer,
    forgotten_writer_without_a_claim,
    forgotten_reader,
    forgotten_bias,
    unfolded_gain,
    mean_that_was_not_folded,
    transposed_map,
    flipped_sign,
    flipped_entry,
    other_seed,
    changed_weight_elsewhere,
    wrong_head,
    wrong_head_claimed,
    keys_without_queries,
    swapped_attribute,
    dropped_attribute,
    another_op,
    extra_node,
    missing_node,
    crossed_inputs,
    output_left_rotated,
    logits_left_rotated,
    wrong_matrix_entry,
    matrix_of_zeros_and_ones,
    rotated_twice,
    observed_rotation,
    cache_in_unlike_cache_out,
    cache_claimed_otherwise,
    cache_that_does_not_come_out,
    claim_about_a_plain_input,
    other_opset,
]


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_fault_is_rejected_and_named(plant: Callable[[], PlantedFault]) -> None:
    before, after, claims, node_name, tensor = plant()
    fault = first_fault(check(before, after, claims))
    assert (fault.node, fault.tensor) == (node_name, tensor), fault
