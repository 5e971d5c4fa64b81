"""Positions inside the cache: sequences that exceed a model's positions, and what prevents that for others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from onnx_ir.passes import common

from graphopt.artifact import artifact
from graphopt.compile.pipeline import optimize
from graphopt.errors import InputError
from graphopt.inference.decoding.decoder import Decoder
from graphopt.inference.session import Session, load
from graphopt.passes.common.paging.positions import exact_angles
from graphopt.passes.recipe import Recipe
from graphopt.quality.evaluation import evaluate
from tests.families import HIDDEN, POSITIONS, VOCABULARY

SINKS, RECENT = 8, 40


def streaming(source: Path, folder: Path, **options: object) -> Session:
    step = {"step": "sparse_kv", "policy": "streaming", "sinks": SINKS, "recent": RECENT, "page": 16, **options}
    optimize(source, Recipe.model_validate({"name": "mine", "steps": [{"step": "canonicalize"}, step]}), folder)
    return load(folder)


@pytest.fixture(scope="module")
def one_layer(llama_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first layer of the Llama, whose keys and values depend on their own token alone."""
    made = artifact.read(llama_artifact)
    graph = made.model.graph

    def passed(layer: int, behind: str) -> ir.Value:
        """Return the residual behind a layer."""
        (found,) = (
            value
            for node in graph
            if (node.name or "").startswith(f"model.layers.{layer}.")
            for value in node.outputs
            if str(value.shape) == f"[batch,length,{HIDDEN}]"
            and any((reader.name or "").startswith(behind) for reader in value.consumers())
        )
        return found

    ir.convenience.replace_all_uses_with(passed(1, "model.norm."), passed(0, "model.layers.1."))
    for values in (graph.inputs, graph.outputs):
        values[:] = [value for value in values if ".1." not in (value.name or "")]
    common.RemoveUnusedNodesPass()(made.model)
    assert not any((node.name or "").startswith("model.layers.1.") for node in graph)
    folder = tmp_path_factory.mktemp("one") / "layer"
    artifact.write(made, folder)
    return folder


def last_logits(session: Session, ids: np.ndarray) -> np.ndarray:
    *_, (_, logits) = Decoder(session, 1).feed(ids[None])
    return np.array(logits[0, -1])


@pytest.mark.parametrize("length", [20, SINKS + RECENT, 100, 5 * POSITIONS])
def test_a_long_text_is_its_first_and_newest_tokens_side_by_side(one_layer: Path, tmp_path: Path, length: int) -> None:
    """StreamingLLM's definition: dropped tokens have no influence. It holds layer by layer."""
    session = streaming(one_layer, tmp_path / "made")
    assert session.endless
    assert session.max_positions is None
    ids = np.random.default_rng(0).integers(0, VOCABULARY, length)
    kept = ids if length <= SINKS + RECENT else np.concatenate((ids[:SINKS], ids[-RECENT:]))
    expected = last_logits(load(one_layer), kept)
    # float32: the angles of 640 positions are good to 640 * 6e-8 radians in the plain model
    np.testing.assert_allclose(last_logits(session, ids), expected, atol=1e-4 * np.abs(expected).max())


def test_text_longer_than_the_positions_is_scored_and_the_cache_stays(llama_artifact: Path, tmp_path: Path) -> None:
    text = "import os\n" * 120
    plain, session = load(llama_artifact), streaming(llama_artifact, tmp_path / "made")
    assert len(session.encode(text)) > POSITIONS
    found = evaluate(session, text)
    assert found.window > POSITIONS
    assert np.isfinite(found.nats)
    decoder, ids = Decoder(session, 1), np.zeros((1, POSITIONS), np.int64)
    decoder.step(ids)
    decoder.step(ids)  # beside what the first of these tokens still read
    size = decoder.states.bytes
    for _ in range(3):
        decoder.step(ids)
    assert decoder.states.bytes == size
    with pytest.raises(InputError, match=f"longer than the model's {POSITIONS} positions"):
        Decoder(plain, 1).step(np.zeros((1, POSITIONS + 1), np.int64))


def test_a_reach_that_was_never_trained_on_stays_bound(llama_artifact: Path, tmp_path: Path) -> None:
    session = streaming(llama_artifact, tmp_path / "made", recent=POSITIONS)
    assert not session.endless
    assert session.max_positions == POSITIONS


def test_learned_positions_end_where_they_end(make_artifact: Callable[[str], Path], tmp_path: Path) -> None:
    session = streaming(make_artifact("gpt2"), tmp_path / "made")
    assert session.max_positions == POSITIONS
    (record,) = [each for each in session.manifest.passes if each.name == "sparse_kv"]
    reasons = [str(skip.reason) for skip in record.skips]
    assert reasons
    assert all(reason.startswith("sequences end where the model's positions do: ") for reason in reasons)


def test_angles_of_a_billion_positions_are_right() -> None:
    frequencies = (10000.0 ** (-np.arange(0, 64, 2) / 64)).astype(np.float32)
    positions = ir.val("position_ids", ir.DataType.INT64, [1, "n"])
    weight = ir.Value(name="w", const_value=ir.tensor(frequencies), type=ir.TensorType(ir.DataType.FLOAT))
    axes = ir.Value(name="axes", const_value=ir.tensor(np.array([2])), type=ir.TensorType(ir.DataType.INT64))
    wide = ir.node("Unsqueeze", [positions, axes], name="wide")
    cast = ir.node("Cast", wide.outputs, {"to": ir.DataType.FLOAT}, name="cast")
    angle = ir.node("Mul", [cast.outputs[0], weight], name="angle")
    cos = ir.node("Cos", angle.outputs, name="cos")
    for node in (wide, cast, angle, cos):
        node.outputs[0].name, node.outputs[0].dtype = f"{node.name}.output", ir.DataType.FLOAT
    wide.outputs[0].dtype = ir.DataType.INT64
    graph = ir.Graph(
        [positions],
        cos.outputs,
        nodes=[wide, cast, angle, cos],
        initializers=[weight, axes],
        opset_imports={"": 23},
        name="angles",
    )
    p = np.array([[0, 1, 1000, 1_000_003, 1_000_000_007]])
    truth = np.cos(p[..., None].astype(np.float64) * frequencies.astype(np.float64))

    def error() -> float:
        session = onnxruntime.InferenceSession(ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString())
        return float(np.abs(session.run(None, {"position_ids": p})[0] - truth).max())

    assert error() > 0.1  # as exporters spell it out
    assert [node.name for node in exact_angles(graph)] == ["angle.angle"]
    # 1e9 in float64 is good to 1e-7 radians, and an angle below 2 pi in float32 to 5e-7
    assert error() < 1e-6
