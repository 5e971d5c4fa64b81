"""Texts that run apart add up to the bytes of texts that run one after the other."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphopt.analysis.structure.products import linear_nodes
from graphopt.errors import InputError
from graphopt.graph.weights.evaluator import DistantExecutor
from graphopt.ort.runner import Runner
from graphopt.quantization.statistics import windows
from graphopt.quantization.statistics.moments import Moments, terms_of
from tests.graphs import residual_model
from tests.quantization.statistics.test_collect import calibration, mean, texts


class OutOfOrder(DistantExecutor):
    """Runs nothing until it is asked for a result, and then everything in any order."""

    def __init__(self) -> None:
        self.tasks: list[tuple[Future[Any], Callable[[Any], Any], Any]] = []
        self.sizes: list[int] = []

    @property
    def state(self) -> str:
        return "1 worker"

    def prepare(self, folder: Path, files: Sequence[Path]) -> None:
        raise AssertionError("whoever made the executor has done that")

    def submit_sized(self, size: int, function: Callable[[Any], Any], task: Any) -> Future[Any]:
        self.sizes.append(size)
        future: Future[Any] = Future()
        self.tasks.append((future, function, task))
        if len(self.tasks) == 5:  # of the test's texts
            random.Random(3).shuffle(self.tasks)
            for result, call, argument in self.tasks:
                result.set_result(call(argument))
            self.tasks.clear()
        return future


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.rglob("*") if file.is_file() and file.name != "index.json"}


@pytest.mark.parametrize("limit", [1, 1 << 30])
def test_texts_that_run_apart_give_the_same_bytes(tmp_path: Path, limit: int) -> None:
    model, rows, stages = residual_model(layers=3), texts(5, 1030), []
    nodes, executor = linear_nodes(model.graph), OutOfOrder()
    plain = calibration(tmp_path / "plain", Runner(), texts=rows, limit=limit)
    expected = plain.inputs(model, nodes)
    distribution = calibration(
        tmp_path / "apart",
        Runner(),
        texts=rows,
        limit=limit,
        executor=executor,
        on_stage=lambda stage, count=0, total=None: stages.append(stage),
    )
    statistics = distribution.inputs(model, nodes)
    assert files(tmp_path / "apart") == files(tmp_path / "plain")
    for node in nodes:
        file_fields = {"hessian_file", "mean_file"}
        assert statistics[node].model_dump(exclude=file_fields) == expected[node].model_dump(exclude=file_fields)
    assert min(executor.sizes) > 0
    assert all(stage.endswith(", 1 worker") for stage in stages)


def test_terms_add_up_in_any_process_as_inputs_do() -> None:
    x = np.random.default_rng(0).standard_normal((2100, 520)).astype(np.float32)
    whole, sums = Moments(520), Moments(520)
    whole.add(x)
    for terms in [terms.copy() for terms in terms_of(x)]:
        sums.add_terms(terms)
    assert np.array_equal(mean(whole.squares, 2100), mean(sums.squares, 2100))
    assert np.array_equal(whole.total, sums.total)
    assert np.array_equal(whole.largest, sums.largest)
    assert (whole.tokens, whole.fourth, whole.coarse) == (sums.tokens, sums.fourth, sums.coarse)
    assert whole.tokens == 2100


def test_values_are_written_whole_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"a": np.arange(6.0), "b": np.ones((2, 3), np.int64)}
    windows.save_values(tmp_path / "deep" / "0", ("a", "b"), values)
    windows.save_values(tmp_path / "deep" / "0", ("a", "b"), {})  # it is there
    arrays = windows.load_values(tmp_path / "deep" / "0", ("a", "b"))
    assert all(np.array_equal(arrays[name], values[name]) for name in values)
    before = tmp_path / "deep" / "0"
    windows.save_values(tmp_path / "next", ("c", "b"), {"c": np.zeros(2)}, before, ("a", "b"))  # b has a file
    assert np.array_equal(windows.load_values(tmp_path / "next", ("c", "b"))["b"], values["b"])

    def no_links(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    with monkeypatch.context() as patch:
        patch.setattr(windows.os, "link", no_links)
        windows.save_values(tmp_path / "copies", ("b",), values, before, ("a", "b"))
    assert np.array_equal(windows.load_values(tmp_path / "copies", ("b",))["b"], values["b"])

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(windows.np, "save", full)
    with pytest.raises(InputError, match="the disk is full"):
        windows.save_values(tmp_path / "deep" / "1", ("a",), values)
    assert [folder.name for folder in (tmp_path / "deep").iterdir()] == ["0"]
