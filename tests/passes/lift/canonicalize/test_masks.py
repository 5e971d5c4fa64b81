from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from graphopt.artifact import artifact
from tests.passes.lift.canonicalize.common import canonicalize


def test_a_sliding_window_is_recognized_as_something_else(make_artifact: Callable[[str], Path]) -> None:
    model = artifact.read(make_artifact("gemma3")).model
    report = canonicalize(model)
    windows = [skip for skip in report.skips if "neither causal nor causal with padding" in str(skip.reason)]
    assert len(windows) == 1  # one layer of two slides
    causal = [n for n in model.graph if n.op_type == "Attention" and n.attributes.get_int("is_causal", 0)]
    assert len(causal) == 1


def test_a_mask_stays_where_keys_are_appended_outside_of_attention(make_artifact: Callable[[str], Path]) -> None:
    """Without past_key, is_causal counts from the first key: a step on a cache would see that one alone."""
    model = artifact.read(make_artifact("deepseek_v3")).model
    report = canonicalize(model)
    (reason,) = (str(skip.reason) for skip in report.skips if "stays as it is" in str(skip.reason))
    assert reason.endswith(
        "appended to the cache outside of Attention, where is_causal would count queries from the first key"
    )
    assert all(node.attributes.get_int("is_causal", 0) == 0 for node in model.graph if node.op_type == "Attention")


def windowed_model(window: int | None) -> ir.Model:
    """Return one Attention with its mask spelled out: causal, not padding, and within ``window`` keys if given."""
    ids = ir.val("input_ids", ir.DataType.INT64, ["batch", "length"])
    real = ir.val("attention_mask", ir.DataType.INT64, ["batch", "past + length"])
    caches = [
        ir.val(f"past_key_values.0.{part}", ir.DataType.FLOAT, ["batch", 2, "past", 4]) for part in ("key", "value")
    ]
    numbers = {"zero": 0, "one": 1, "axes": [1, 2], "last": [1], "window": window or 0}
    values = {n: ir.val(n, const_value=ir.tensor(np.array(v, np.int64), name=n)) for n, v in numbers.items()}
    table = np.random.default_rng(0).standard_normal((24, 8)).astype(np.float32)
    values["table"] = ir.val("table", const_value=ir.tensor(table, name="table"))
    values["heads"] = ir.val("heads", const_value=ir.tensor(np.array([0, 0, 2, 4], np.int64), name="heads"))
    values["flat"] = ir.val("flat", const_value=ir.tensor(np.array([0, 0, 8], np.int64), name="flat"))
    tape = ir.tape.Tape()

    def size(value: ir.Value, axis: int) -> ir.Value:
        return tape.op("Squeeze", [tape.op("Shape", [value], {"start": axis, "end": axis + 1})])

    past = size(caches[0], 2)
    keys = tape.op("Range", [values["zero"], size(real, 1), values["one"]])
    queries = tape.op("Add", [tape.op("Range", [values["zero"], size(ids, 1), values["one"]]), past])
    queries = tape.op("Unsqueeze", [queries, values["last"]])
    mask = tape.op("LessOrEqual", [keys, queries])
    if window is not None:
        mask = tape.op("And", [mask, tape.op("Greater", [keys, tape.op("Sub", [queries, values["window"]])])])
    padding = tape.op("Unsqueeze", [tape.op("Cast", [real], {"to": ir.DataType.BOOL}), values["axes"]])
    mask = tape.op("And", [mask, padding])
    x = tape.op("Reshape", [tape.op("Gather", [values["table"], ids]), values["heads"]])
    x = tape.op("Transpose", [x], {"perm": [0, 2, 1, 3]})
    x.shape = ir.Shape(["batch", 2, "length", 4])
    attention = ir.node("Attention", [x, x, x, mask, *caches], {"is_causal": 0}, num_outputs=3, name="attention")
    y, *presents = attention.outputs
    for value, name in zip(presents, ("present.0.key", "present.0.value"), strict=True):
        value.name, value.dtype, value.shape = name, ir.DataType.FLOAT, ir.Shape(["batch", 2, "past + length", 4])
    y.dtype = ir.DataType.FLOAT
    nodes = [*tape.nodes, attention]
    after = ir.tape.Tape()
    logits = after.op("Reshape", [after.op("Transpose", [y], {"perm": [0, 2, 1, 3]}), values["flat"]])
    logits.name, logits.dtype, logits.shape = "logits", ir.DataType.FLOAT, ir.Shape(["batch", "length", 8])
    graph = ir.Graph(
        [ids, real, *caches],
        [logits, *presents],
        nodes=[*nodes, *after.nodes],
        initializers=list(values.values()),
        opset_imports={"": 23},
        name="windowed",
    )
    return ir.Model(graph, ir_version=10)


@pytest.mark.parametrize("window", [5, 100, 4096, 131072])
def test_a_window_longer_than_any_test_sequence_is_still_seen(window: int) -> None:
    model = windowed_model(window)
    report = canonicalize(model)
    assert any("neither causal nor" in str(skip.reason) for skip in report.skips)
    assert [n.attributes.get_int("is_causal", 0) for n in model.graph if n.op_type == "Attention"] == [0]


def test_the_same_mask_without_a_window_is_causal() -> None:
    model = windowed_model(None)
    assert not canonicalize(model).skips
    assert [n.attributes.get_int("is_causal") for n in model.graph if n.op_type == "Attention"] == [1]


def test_a_number_too_long_to_try_leaves_the_mask_alone() -> None:
    report = canonicalize(windowed_model(1 << 23))
    assert any("8388608, too long a sequence to try" in str(skip.reason) for skip in report.skips)


def test_a_mask_that_cannot_be_run_on_its_own_is_left_alone_with_the_reason() -> None:
    # It looks into the cache, at a head that the thin stand-in for long caches does not have.
    model = windowed_model(None)
    cache = next(value for value in model.graph.inputs if value.name == "past_key_values.0.key")
    attention = next(node for node in model.graph if node.op_type == "Attention")
    tape = ir.tape.Tape()
    one = next(v for n, v in model.graph.initializers.items() if n == "one")
    total = tape.op("ReduceSum", [tape.op("Gather", [cache, one], {"axis": 1})], {"keepdims": 0})
    anything = tape.op("GreaterOrEqual", [tape.op("Mul", [total, total]), tape.op("Sub", [total, total])])
    mask = tape.op("And", [attention.inputs[3], anything])
    for node in tape.nodes:
        node.outputs[0].dtype = ir.DataType.FLOAT if node.op_type in ("Gather", "ReduceSum", "Mul", "Sub") else None
    model.graph.insert_before(attention, tape.nodes)
    attention.replace_input_with(3, mask)
    report = canonicalize(model)
    assert any("cannot be run on its own" in str(skip.reason) for skip in report.skips)
    assert attention.attributes.get_int("is_causal") == 0


def windows_of_pixels() -> ir.Model:
    """Return one Attention over patches of a picture that see those of their own half: no order, nothing to feed."""
    patches = ir.val("patches", ir.DataType.FLOAT, ["batch", 2, 6, 4])
    numbers = {"zero": np.array(0), "one": np.array(1), "half": np.array(3), "last": np.array([-1]), "first": [0]}
    values = {n: ir.val(n, const_value=ir.tensor(np.array(v, np.int64), name=n)) for n, v in numbers.items()}
    tape = ir.tape.Tape()
    length = tape.op("Squeeze", [tape.op("Shape", [patches], {"start": 2, "end": 3})])
    halves = tape.op("Div", [tape.op("Range", [values["zero"], length, values["one"]]), values["half"]])
    rows, columns = (tape.op("Unsqueeze", [halves, values[axis]]) for axis in ("last", "first"))
    mask = tape.op("Equal", [rows, columns])
    y = tape.op("Attention", [patches, patches, patches, mask], {"is_causal": 0}, name="attention")
    y.name, y.dtype, y.shape = "features", ir.DataType.FLOAT, ir.Shape(["batch", 2, 6, 4])
    graph = ir.Graph(
        [patches], [y], nodes=tape.nodes, initializers=values.values(), opset_imports={"": 23}, name="pixels"
    )
    return ir.Model(graph, ir_version=10)


def test_a_mask_of_a_graph_that_nothing_tells_how_to_feed_stays() -> None:
    """Every meaning agrees with no calls: the mask of a picture must not become that of a text."""
    model = windows_of_pixels()
    report = canonicalize(model)
    (reason,) = (str(skip.reason) for skip in report.skips if "stays as it is" in str(skip.reason))
    assert reason.endswith("nothing tells how a graph is fed in sizes that would show what the mask means")
    (attention,) = (node for node in model.graph if node.op_type == "Attention")
    assert attention.attributes.get_int("is_causal") == 0
    assert attention.inputs[3] is not None
