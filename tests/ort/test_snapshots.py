from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from graphopt.graph.weights import own_input, rewrite
from graphopt.ort.session import open_session
from graphopt.ort.snapshots import Snapshots
from tests.graph.weights.counting import CountingExpression
from tests.graphs import residual_model


def with_lazy_weight(name: str) -> ir.Model:
    model = residual_model()
    weight = own_input(next(node for node in model.graph if node.name == "up0"), 1)
    rewrite(weight, lambda expression: CountingExpression(expression, name=name))
    return model


def test_a_snapshot_is_a_whole_model_and_goes_with_its_block(tmp_path: Path) -> None:
    model = with_lazy_weight("whole")
    before = {name: value.const_value.numpy() for name, value in model.graph.initializers.items()}
    with Snapshots(tmp_path).write(model) as path:
        proto = onnx.load_model(path, load_external_data=False)
        onnx.load_external_data_for_model(proto, path.anchor)
        initializers = ir.from_proto(proto).graph.initializers
        assert {name: value.const_value.numpy().tobytes() for name, value in initializers.items()} == {
            name: array.tobytes() for name, array in before.items()
        }
    assert [file.name for file in tmp_path.iterdir()] == ["weights"]
    # the model reads nothing from the files that are gone
    assert {name: value.const_value.numpy().tobytes() for name, value in model.graph.initializers.items()} == {
        name: array.tobytes() for name, array in before.items()
    }


def test_weights_are_evaluated_once_for_a_model_and_its_copies(tmp_path: Path) -> None:
    model = with_lazy_weight("once")
    copy, snapshots = model.clone(), Snapshots(tmp_path)
    for version in (model, copy, model):
        with snapshots.write(version):
            pass
    assert CountingExpression.counts["once"] == 1


def test_two_snapshots_stand_side_by_side(tmp_path: Path) -> None:
    model, snapshots = residual_model(), Snapshots(tmp_path)
    with snapshots.write(model) as first, snapshots.write(model) as second:
        assert first != second
        assert first.is_file()
        assert second.is_file()
    with pytest.raises(RuntimeError, match="stop"), snapshots.write(model) as path:
        raise RuntimeError("stop")
    assert not path.parent.exists()


def test_weights_that_lie_in_files_stay_there(tmp_path: Path) -> None:
    """The graph is written, and what is in memory; onnxruntime reads the rest where it is."""
    ir.save(residual_model(), tmp_path / "source.onnx", external_data="source.data")
    model = ir.load(tmp_path / "source.onnx")
    rewrite(own_input(next(node for node in model.graph if node.name == "up0"), 1), lambda expression: expression)
    head = next(node for node in model.graph if node.name == "head").inputs[1]
    head.const_value = ir.tensor(head.const_value.numpy().copy(), name=head.name)
    folder = tmp_path / "snapshots"
    folder.mkdir()
    with Snapshots(folder).write(model) as path:
        assert (path.parent / "model.data").stat().st_size == head.const_value.nbytes
        tensors = onnx.load(path, load_external_data=False).graph.initializer
        locations = {entry.value for tensor in tensors for entry in tensor.external_data if entry.key == "location"}
        assert {Path(path.anchor, location).parent for location in locations} == {
            tmp_path,
            folder / "weights",
            path.parent,
        }
        outputs = open_session(path, in_place=True).run(None, {"input_ids": np.arange(6).reshape(1, 6)})
    ir.save(model, tmp_path / "copy.onnx", external_data="copy.data")
    expected = open_session(tmp_path / "copy.onnx").run(None, {"input_ids": np.arange(6).reshape(1, 6)})
    assert np.array_equal(outputs[0], expected[0])
