"""Two models that differ in names only are the same; two that differ in anything that computes are not."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphopt.artifact.artifact import MODEL, Artifact
from graphopt.errors import VerificationError
from graphopt.verification.protobuf import all_messages, first_difference
from graphopt.verification.same_model import confirm_model
from graphopt.verification.up_to_names import without_names
from tests.verification.planted import faults
from tests.verification.test_same_model import FROZEN
from tests.verification.test_same_model import made as made

# What says nothing about what a model computes: parts whose last field, or one above it, is one of these.
WORDS = {"metadata_props", "doc_string", "value_info", "producer_name", "producer_version", "model_version"}
UNORDERED = ("opset_import", "functions", "node", "attribute", "initializer")
NAMES = ("domain", "graph.name", "graph.node.name", "functions.node.name")


def renamed(model: onnx.ModelProto, seed: int) -> onnx.ModelProto:
    """Return a copy with other names of nodes and inner values, nodes in another order that works, other metadata."""
    draw, copy = random.Random(seed), onnx.ModelProto.FromString(model.SerializeToString())
    ports = {port.name for port in (*copy.graph.input, *copy.graph.output)}
    names: dict[str, str] = {}

    def other(name: str) -> str:
        if not name or name in ports:
            return name
        return names.setdefault(name, f"renamed_{draw.randrange(1 << 40)}_{len(names)}")

    for node in copy.graph.node:
        node.name = f"node_{draw.randrange(1 << 40)}"
        node.input[:], node.output[:] = map(other, node.input), map(other, node.output)
        node.metadata_props.add(key="by", value="somebody")
    for tensor in (*copy.graph.initializer, *copy.graph.value_info):
        tensor.name = other(tensor.name)
    waiting, ordered = list(copy.graph.node), []
    made_by = {name for node in waiting for name in node.output}
    while waiting:
        ready = [node for node in waiting if not made_by & set(node.input)]
        chosen = draw.choice(ready)
        waiting.remove(chosen)
        made_by -= set(chosen.output)
        ordered.append(onnx.NodeProto.FromString(chosen.SerializeToString()))
    del copy.graph.node[:]
    copy.graph.node.extend(ordered)
    draw.shuffle(tensors := [onnx.TensorProto.FromString(t.SerializeToString()) for t in copy.graph.initializer])
    del copy.graph.initializer[:]
    copy.graph.initializer.extend(tensors)
    return copy


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 30))
def test_other_names_and_orders_are_the_same_model(made: tuple[Artifact, Path], tmp_path: Path, seed: int) -> None:
    artifact, folder = made
    copy = shutil.copytree(folder, tmp_path / "copy", dirs_exist_ok=True)
    proto = renamed(onnx.ModelProto.FromString((folder / MODEL).read_bytes()), seed)
    (copy / MODEL).write_bytes(proto.SerializeToString())
    extent = confirm_model(artifact.model, copy, up_to_names=True)
    assert extent.tensors == len(artifact.model.graph.initializers)
    with pytest.raises(VerificationError):
        confirm_model(artifact.model, copy)


def test_whatever_computes_is_compared() -> None:
    stored = onnx.ModelProto.FromString((FROZEN / "rotate" / MODEL).read_bytes())
    bare, compared, missed = without_names(stored), 0, []
    for fault in faults(stored):
        steps = fault.part.split(".")
        is_order = fault.kind == "reversed" and steps[-1] in UNORDERED
        # the same node or weight once more, which nothing reads
        is_twice = fault.kind == "one more" and steps[-1] in ("node", "initializer")
        is_name = fault.part in NAMES or steps[-2:] == ["t", "name"]
        if WORDS & set(steps) or is_order or is_twice or is_name:
            continue
        proto = onnx.ModelProto.FromString(stored.SerializeToString())
        fault.apply(proto)
        compared += 1
        if first_difference(bare, without_names(proto)) is None:
            missed.append(str(fault))
    assert compared > 100
    assert missed == []


def test_nodes_that_read_each_other_s_inputs_are_another_model(made: tuple[Artifact, Path], tmp_path: Path) -> None:
    artifact, folder = made
    copy = shutil.copytree(folder, tmp_path / "copy")
    proto = onnx.ModelProto.FromString((folder / MODEL).read_bytes())
    products = [node for node in all_messages(proto, "NodeProto") if node.op_type == "MatMulTable"]
    one, other = products[0], products[1]
    one.input[0], other.input[1] = other.input[0], one.input[1]
    (copy / MODEL).write_bytes(proto.SerializeToString())
    with pytest.raises(VerificationError):
        confirm_model(artifact.model, copy, up_to_names=True)
