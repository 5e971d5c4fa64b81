from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from graphopt.analysis.structure.products import linear_nodes
from graphopt.artifact.artifact import read
from graphopt.errors import InputError
from graphopt.graph.weights import Inline, Scale, rewrite
from graphopt.ort.runner import Runner
from graphopt.passes.recipe import load_recipe
from graphopt.quantization.statistics import Calibration, InputStatistics, moments
from graphopt.quantization.statistics.collect import PIECE_BYTES
from graphopt.quantization.statistics.moments import Moments, sums_of
from graphopt.quantization.statistics.partition import pieces_of
from graphopt.quantization.statistics.squares import Squares
from graphopt.quantization.statistics.symmetric import packed_size, unpack
from tests.families import POSITIONS, VOCABULARY
from tests.graphs import canonical, residual_model


def texts(number: int = 3, length: int = 20, vocabulary: int = 24) -> list[np.ndarray]:
    random = np.random.default_rng(7)
    return [random.integers(0, vocabulary, length + row // 2) for row in range(number)]


def calibration(folder: Path, runner: Runner | None, **options: Any) -> Calibration:
    rows = options.pop("texts", None) or texts()
    return Calibration(folder, lambda: rows, runner, **options)


def mean(squares: Squares, tokens: int = 1) -> np.ndarray:
    """Return the whole matrix of a sum, over a number of tokens."""
    return unpack(np.concatenate([panel.ravel() for panel in squares.panels_over(tokens)]), squares.diagonal().size)


def expected(model: ir.Model, value: ir.Value, rows: list[np.ndarray]) -> np.ndarray:
    """Run the whole model with one more output, and return all inputs [tokens, rows] in float64."""
    copy = model.clone()
    value_by_name = {output.name: output for node in copy.graph for output in node.outputs}
    value_by_name[value.name].dtype = ir.DataType.FLOAT
    copy.graph.outputs.append(value_by_name[value.name])
    with Runner().open_model(copy) as session:
        arrays = [session.run([value.name], {"input_ids": row[None]})[0] for row in rows]
    return np.concatenate([array.reshape(-1, array.shape[-1]) for array in arrays]).astype(np.float64)


@pytest.mark.parametrize("limit", [1, 8 * (16**2 + 12**2), PIECE_BYTES])
def test_hessians_are_those_of_the_inputs_however_the_graph_is_cut(tmp_path: Path, limit: int) -> None:
    model, rows = residual_model(layers=3), texts()
    nodes = linear_nodes(model.graph)
    pieces = pieces_of(model.graph, [node.inputs[0] for node in nodes], limit)
    assert len(pieces) == {1: 7, PIECE_BYTES: 1}.get(limit, 4)
    statistics = calibration(tmp_path, Runner(), texts=rows, limit=limit).inputs(model, nodes)
    assert list(statistics) == nodes
    for node, inputs in statistics.items():
        assert node.inputs[0] is not None
        X = expected(model, node.inputs[0], rows)
        H = X.T @ X / len(X)
        # products of 20 tokens in float32, and the result rounded to it
        assert np.abs(inputs.hessian().numpy() - H).max() < 1e-5 * np.abs(H).max()
        mean, largest = inputs.means_and_largest()
        assert np.allclose(mean, X.mean(0), atol=1e-6 * np.abs(X).max())
        assert np.allclose(largest, np.abs(X).max(0), rtol=1e-5)
        assert inputs.tokens == len(X) == sum(map(len, rows))
        assert inputs.kurtosis == pytest.approx((X**4).mean() / (X**2).mean() ** 2, rel=1e-4)
    assert not list(tmp_path.rglob("boundary-*")) + list(tmp_path.rglob("piece-*"))


def test_texts_stand_all_over_the_positions_that_a_model_has(llama_artifact: Path, tmp_path: Path) -> None:
    rows, llama = texts(number=6, length=20, vocabulary=VOCABULARY), read(llama_artifact).model
    placements = calibration(tmp_path, None, texts=rows).over_positions(llama, 101)
    firsts = [row[0] for sample in placements.texts for row in sample["position_ids"]]
    # the longest text ends with the last position
    assert firsts == np.linspace(0, 101 - 22, 6).astype(int).tolist()
    for sample in placements.texts:
        assert (np.diff(sample["position_ids"]) == 1).all()
        assert sample["input_ids"].shape == sample["position_ids"].shape
    assert np.concatenate([row for sample in placements.texts for row in sample["input_ids"]]).tolist() == (
        np.concatenate(rows).tolist()
    )
    # a model of fewer positions than a text has, as far as is known, reads it as it is
    still = calibration(tmp_path, None, texts=rows).over_positions(llama, 10)
    assert {row[0] for sample in still.texts for row in sample["position_ids"]} == {0}
    assert placements.text_digest != still.text_digest


def test_neighbours_of_one_length_share_a_run_of_1024_tokens(tmp_path: Path) -> None:
    lengths = (400, 400, 400, 7, 7, 2000, 7)
    batches = calibration(tmp_path, None, texts=[np.arange(length) for length in lengths]).batches
    assert [np.shape(batch) for batch in batches] == [(2, 400), (1, 400), (2, 7), (1, 2000), (1, 7)]


def test_what_is_kept_is_found_without_running_and_by_content_alone(tmp_path: Path) -> None:
    model = residual_model()
    first = calibration(tmp_path, Runner()).inputs(model, linear_nodes(model.graph))
    same_model = residual_model()
    statistics = calibration(tmp_path, None).inputs(same_model, linear_nodes(same_model.graph))
    assert list(statistics.values()) == list(first.values())
    for other_model in (residual_model(seed=1), residual_model(multiplier=2.0)):
        with pytest.raises(InputError, match=r"they are not kept.*graphopt calibrate MODEL"):
            calibration(tmp_path, None).inputs(other_model, linear_nodes(other_model.graph))
    with pytest.raises(InputError, match="they are not kept"):
        calibration(tmp_path, None, texts=texts(2)).inputs(same_model, linear_nodes(same_model.graph))


def test_weights_that_are_not_evaluated_yet_have_the_digest_that_they_will_have(tmp_path: Path) -> None:
    model = residual_model()
    rewrite(
        model.graph.initializers["up0.weight"], lambda weight: Scale(weight, Inline.from_array(np.arange(1.0, 17)), 0)
    )
    calibration(tmp_path, Runner()).inputs(model, linear_nodes(model.graph))
    value = model.graph.initializers["up0.weight"]
    value.const_value = ir.tensor(value.const_value.numpy(), name=value.name)
    with pytest.raises(InputError, match="they are not kept"):  # other bytes to begin with, though the same numbers
        calibration(tmp_path, None).inputs(model, linear_nodes(model.graph))


def test_what_was_cut_off_goes_on_at_the_piece_where_it_was(tmp_path: Path) -> None:
    model = residual_model(layers=3)
    nodes = linear_nodes(model.graph)
    whole = calibration(tmp_path / "whole", Runner(), limit=1).inputs(model, nodes)

    class StopError(Exception):
        pass

    stages: list[str] = []

    def stop(stage: str, pieces: int = 0, total: int | None = None) -> None:
        stages.append(stage)
        if "part 4" in stage and pieces == 1:
            raise StopError

    with pytest.raises(StopError):
        calibration(tmp_path / "cut", Runner(), limit=1, on_stage=stop).inputs(model, nodes)
    stages.clear()
    second_run = calibration(tmp_path / "cut", Runner(), limit=1, on_stage=lambda stage, *_: stages.append(stage))
    statistics = second_run.inputs(model, nodes)
    assert stages[0] == "collecting statistics, part 4 of 7"
    assert [inputs.digest for inputs in statistics.values()] == [inputs.digest for inputs in whole.values()]


class Copies:
    """Keeps Hessians in memory, and counts those on the disk; stops when it is called for the n-th time."""

    def __init__(self, folder: Path, stops_at: int = 0) -> None:
        self.hessians: dict[str, np.ndarray] = {}
        self.most_files = self.calls = 0
        self._folder, self._stops_at = folder, stops_at

    def is_done(self, inputs: Mapping[ir.Node, InputStatistics]) -> bool:
        return all(entry.value in self.hessians for entry in inputs.values())

    def run(self, inputs: Mapping[ir.Node, InputStatistics], on_tensor: Any = None) -> None:
        del on_tensor
        self.calls += 1
        if self.calls == self._stops_at:
            raise KeyboardInterrupt
        self.most_files = max(self.most_files, len(list(self._folder.rglob("*.hessian"))))
        self.hessians |= {
            entry.value: entry.hessian().numpy() for entry in inputs.values() if entry.value not in self.hessians
        }


def test_what_is_made_of_hessians_at_once_leaves_one_piece_on_the_disk(tmp_path: Path) -> None:
    model = residual_model(layers=2)
    nodes = linear_nodes(model.graph)
    reference = calibration(tmp_path / "kept", Runner(), limit=1).inputs(model, nodes)
    consumer = Copies(tmp_path / "dropped")
    statistics = calibration(tmp_path / "dropped", Runner(), limit=1).inputs(model, nodes, consumer)
    assert [entry.digest for entry in statistics.values()] == [entry.digest for entry in reference.values()]
    assert all(np.array_equal(consumer.hessians[entry.value], entry.hessian().numpy()) for entry in reference.values())
    assert (consumer.calls, consumer.most_files) == (5, 1)
    assert not list((tmp_path / "dropped").rglob("*.hessian"))
    # Means stay, and what was made of Hessians does: nothing runs again.
    second_run = calibration(tmp_path / "dropped", None).inputs(model, nodes, consumer)
    assert all(entry.means_and_largest()[0].size == entry.rows for entry in second_run.values())
    assert consumer.calls == 5
    # Whoever needs Hessians, or finds that something made of them is gone, has them collected again.
    with pytest.raises(InputError, match="they are not kept"):
        calibration(tmp_path / "dropped", None).inputs(model, nodes)
    calibration(tmp_path / "dropped", Runner(), limit=1).inputs(model, nodes, consumer)
    del consumer.hessians[statistics[nodes[0]].value]
    calibration(tmp_path / "dropped", Runner(), limit=1).inputs(model, nodes, consumer)
    assert consumer.is_done(statistics)


def test_what_was_cut_off_needs_no_hessian_that_is_gone(tmp_path: Path) -> None:
    model = residual_model(layers=3)
    nodes = linear_nodes(model.graph)
    consumer = Copies(tmp_path, stops_at=4)
    with pytest.raises(KeyboardInterrupt):
        calibration(tmp_path, Runner(), limit=1).inputs(model, nodes, consumer)
    assert len(list(tmp_path.rglob("*.hessian"))) == 1
    stages: list[str] = []
    second_run = calibration(tmp_path, Runner(), limit=1, on_stage=lambda stage, *_: stages.append(stage))
    statistics = second_run.inputs(model, nodes, consumer)
    # the fourth piece was collected; what is made of it was not there
    assert next(stage for stage in stages if "collecting" in stage) == "collecting statistics, part 5 of 7"
    assert consumer.is_done(statistics)
    assert consumer.calls == 4 + 4
    assert not list(tmp_path.rglob("*.hessian"))


def test_inputs_that_are_not_finite_are_named(tmp_path: Path) -> None:
    model = residual_model()
    weight = model.graph.initializers["down0.weight"]
    weight.const_value = ir.tensor(np.full_like(weight.const_value.numpy(), 3e38), name="down0.weight")
    first, last = (next(node for node in linear_nodes(model.graph) if node.name == name) for name in ("up0", "up1"))
    assert first.inputs[0] is not None
    with pytest.raises(InputError, match=r"infinite or too large, the first of them input 0.*to nearest") as error:
        calibration(tmp_path, Runner()).inputs(model, [first, last])
    assert last.inputs[0] is not None
    assert error.value.tensor == last.inputs[0].name


def test_an_index_that_lost_a_file_is_refused(tmp_path: Path) -> None:
    model = residual_model()
    statistics = calibration(tmp_path, Runner()).inputs(model, linear_nodes(model.graph))
    next(iter(statistics.values())).hessian_file.unlink()
    with pytest.raises(InputError, match="a file of statistics is missing or cut"):
        calibration(tmp_path, Runner()).inputs(model, linear_nodes(model.graph))


def test_seldom_chosen_experts_say_how_many_tokens_they_saw(
    make_artifact: Callable[[str], Path], tmp_path: Path
) -> None:
    model = canonical(make_artifact("mixtral"))
    nodes = linear_nodes(model.graph)
    rows = texts(2, 40, VOCABULARY)
    statistics = calibration(tmp_path, Runner(), texts=rows, limit=1).inputs(model, nodes)
    total = sum(map(len, rows))
    counts = {node.name: inputs.tokens for node, inputs in statistics.items()}
    assert set(counts.values()) - {total}  # experts
    assert all(count <= total for count in counts.values())


def test_online_rotations_run_in_pieces(llama_artifact: Path, tmp_path: Path) -> None:
    model = read(llama_artifact).model
    for step in load_recipe("rotate-online").passes():
        if step.phase() in ("lift", "algebra"):
            step(model)
    assert any(node.op_type == "Hadamard" for node in model.graph)
    rows, nodes = texts(2, POSITIONS - 8, VOCABULARY), linear_nodes(model.graph)
    cut = calibration(tmp_path / "cut", Runner(), texts=rows, limit=1).inputs(model, nodes)
    whole = calibration(tmp_path / "whole", Runner(), texts=rows).inputs(model, nodes)
    for node in nodes:
        a, b = cut[node].hessian().numpy(), whole[node].hessian().numpy()
        # the same float32 computation, fused in another way where it is cut
        assert np.abs(a - b).max() <= 1e-4 * np.abs(b).max()


@pytest.mark.parametrize("rows", [1, 511, 512, 513, 1100])
def test_blocks_make_the_whole_and_memory_of_another_sum_leaves_nothing(rows: int) -> None:
    random, spare = np.random.default_rng(rows), []
    for _ in range(2):
        x = random.standard_normal((2, 40, rows), np.float32)
        squares = Squares(rows, spare)
        assert not mean(squares).any()
        for part in x:
            squares.add(part)
        exact = sum(part.T.astype(np.float64) @ part for part in x)
        matrix = mean(squares)
        assert np.array_equal(matrix, matrix.T)
        # half of the numbers, and of each panel the other half of its square on the diagonal
        assert packed_size(rows) <= rows * (rows + min(rows, 512)) / 2
        # 40 products in float32, each off by half of 2^-23 of it, and the sum rounded to it
        bound = 42 * 2.0**-24 * sum(np.abs(part).T.astype(np.float64) @ np.abs(part) for part in x)
        assert (np.abs(matrix - exact) <= bound).all()
        assert np.allclose(squares.diagonal(), np.diagonal(exact), rtol=1e-5)
        squares.release()
        assert not mean(squares).any()
    assert len(spare) == {512: 1, 513: 1, 1100: 3}.get(rows, 0)


@pytest.mark.parametrize("shape", [(1, 1), (3, 33), (40, 64), (17, 100)])
def test_sums_have_the_same_bits_without_the_library(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    x = (1e3 * np.random.default_rng(0).standard_normal(shape)).astype(np.float32)
    x[0] = 0
    for scale in (1e-45, 1e-30, 1, 1e30):  # also where a step is no normal number
        numbers = x * np.float32(scale)
        with subtests.test(scale=scale):
            total, largest, fourth, error = sums_of(numbers)
            with monkeypatch.context() as without:
                without.setattr(moments, "library_path", lambda: None)
                expected = sums_of(numbers)
            assert np.array_equal(total, expected[0])
            assert np.array_equal(largest, expected[1])
            assert (fourth, error) == expected[2:]
    exact = x.astype(np.float64)
    total, largest, fourth, _ = sums_of(x)
    # sums in float64 of at most 40 tokens, or 1700 numbers
    assert np.allclose(total, exact.sum(0), rtol=1e-14, atol=1e-12 * np.abs(exact).max())
    assert np.array_equal(largest, np.abs(x).max(0))
    assert fourth == pytest.approx((exact**4).sum(), rel=1e-12)


def test_moments_add_up_in_any_portions() -> None:
    X = np.random.default_rng(0).standard_normal((2500, 6)).astype(np.float32)
    whole, two = Moments(6), Moments(6)
    whole.add(X)
    for part in np.split(X.reshape(50, 50, 6), 5):
        two.add(part)
    assert whole.tokens == two.tokens == 2500
    # sums of 1024 products in float32
    assert np.allclose(mean(whole.squares), X.T.astype(np.float64) @ X, atol=1e-3)
    assert np.allclose(mean(whole.squares), mean(two.squares), atol=1e-3)
    assert whole.kurtosis == pytest.approx(3, abs=0.3)
    assert Moments(4).kurtosis == 0
