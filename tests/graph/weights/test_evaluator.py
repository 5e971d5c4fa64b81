from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from graphopt.errors import GraphoptError
from graphopt.graph.weights import (
    Cast,
    Concat,
    Inline,
    Origin,
    Region,
    SameShape,
    Scale,
    StoredBytes,
    Transpose,
    WeightTensor,
    expression_of,
    origins_of,
    rewrite,
)
from graphopt.graph.weights import evaluator as evaluate
from graphopt.graph.weights.data_file import save_model
from graphopt.graph.weights.evaluator import Evaluator, group_expressions, run_tasks, workers
from graphopt.graph.weights.store import Store, StoreEntry
from graphopt.numerics.formats import FORMATS
from graphopt.passes.common.table_layout import PackCodes
from graphopt.quantization.rounding.lazy_codes import quantize_lazily
from tests.graph.weights.counting import CountingExpression, loaded_modules
from tests.graphs import residual_model


def rewritten() -> ir.Model:
    """Return a model with weights of each kind: in memory, scaled, codes, scales, packed, tiny."""
    model = residual_model(64, 32)
    initializers = model.graph.initializers
    rewrite(initializers["up0.weight"], lambda weight: Scale(weight, Inline.from_array(np.arange(1.0, 65)), 0))
    for name, tensor in quantize_lazily(
        initializers["up0.weight"].const_value, FORMATS["uint4"], 16, "extreme"
    ).items():
        initializers[f"up0.{name}"] = ir.val(f"up0.{name}", const_value=tensor)
    table = FORMATS["fp6-e3m2"]
    parts = quantize_lazily(initializers["up1.weight"].const_value, table, 16, "least_squares", standard=False)
    codes = WeightTensor(PackCodes(expression_of(parts["codes"]), table.bits))
    initializers["up1.codes"] = ir.val("up1.codes", const_value=codes)
    initializers["up1.scales"] = ir.val("up1.scales", const_value=parts["scales"])
    initializers["tiny"] = ir.val(
        "tiny", const_value=WeightTensor(Cast(Inline.from_array(np.ones(3)), ir.DataType.FLOAT))
    )
    return model


def save_bytes(model: ir.Model, folder: Path, **options: object) -> tuple[bytes, bytes]:
    folder.mkdir()
    save_model(model, folder / "model.onnx", "data", **options)  # type: ignore[arg-type]
    return (folder / "model.onnx").read_bytes(), (folder / "data").read_bytes()


def test_the_files_are_those_of_onnx_ir(tmp_path: Path) -> None:
    model = rewritten()
    tensors = [value.const_value for value in model.graph.initializers.values()]
    ir.save(model, tmp_path / "model.onnx", external_data="data")
    progress: list[tuple[int, int]] = []
    files = save_bytes(model, tmp_path / "ours", on_tensor=lambda *counts: progress.append(counts))
    assert files == ((tmp_path / "model.onnx").read_bytes(), (tmp_path / "data").read_bytes())
    assert [value.const_value for value in model.graph.initializers.values()] == tensors
    assert progress[-1][0] == progress[-1][1] == len(progress)


def test_any_workers_write_the_same_bytes(tmp_path: Path) -> None:
    expected = save_bytes(rewritten(), tmp_path / "here")
    with workers(1) as nobody:
        assert nobody is None
    with ThreadPoolExecutor(3) as threads:
        assert save_bytes(rewritten(), tmp_path / "threads", executor=threads) == expected
        settled_model = rewritten()
        Evaluator(Store(tmp_path / "store"), threads).settle(settled_model)
    with workers(2) as processes:
        assert save_bytes(rewritten(), tmp_path / "processes", executor=processes) == expected
        assert save_bytes(settled_model, tmp_path / "settled", executor=processes) == expected
        second_model = rewritten()
        Evaluator(Store(tmp_path / "other"), processes).settle(second_model)
        heavy = {"torch", "onnxruntime", "transformers"}
        assert processes is not None
        assert not heavy & set(processes.submit(loaded_modules).result())
    assert save_bytes(second_model, tmp_path / "again") == expected
    names = [{file.name: file.read_bytes() for file in (tmp_path / store).iterdir()} for store in ("store", "other")]
    assert names[0] == names[1]


def test_each_weight_is_evaluated_once(tmp_path: Path) -> None:
    model, name = residual_model(), str(tmp_path)
    value = model.graph.initializers["up0.weight"]
    rewrite(value, partial(CountingExpression, name=name))
    for part, tensor in quantize_lazily(value.const_value, FORMATS["int4"], 16, "extreme").items():
        model.graph.initializers[part] = ir.val(part, const_value=tensor)
    del model.graph.initializers["up0.weight"]
    save_bytes(model, tmp_path / "saved")
    assert CountingExpression.counts[name] == 1
    expressions = [expression_of(model.graph.initializers[part].const_value) for part in ("codes", "scales")]
    assert group_expressions(expressions) == [[0, 1]]
    evaluator = Evaluator(Store(tmp_path / "store"))
    evaluator.settle(model)
    evaluator.values(expressions)
    assert CountingExpression.counts[name] == 2


def test_what_is_kept_is_found_again_under_the_digest_of_what_it_keeps(tmp_path: Path) -> None:
    store, name = Store(tmp_path / "store"), str(tmp_path)
    counting = CountingExpression(Inline.from_array(np.arange(6.0).reshape(2, 3)), name)
    product = Scale(StoreEntry(counting), Inline.from_array(np.array([2.0, 3.0])), 0)
    assert product.digest == Scale(counting, Inline.from_array(np.array([2.0, 3.0])), 0).digest
    value = store.obtain(product)
    assert np.array_equal(value.numpy(), [[0, 2, 4], [9, 12, 15]])
    assert np.array_equal(store.obtain(Cast(counting, ir.DataType.FLOAT)).numpy(), counting.source.numpy())
    assert CountingExpression.counts[name] == 2  # once for what is kept; the cast asks for it without keeping it
    assert store.find(counting) is not None
    assert value.digest == product.digest


@dataclasses.dataclass(frozen=True, eq=False)
class MarkedOrigin(Origin, SameShape):
    """Numbers whose making is remembered."""

    def evaluate(self, region: Region) -> np.ndarray:
        return self.source.evaluate(region)


def test_what_is_stored_remembers_the_origins_of_its_numbers(tmp_path: Path) -> None:
    """In the order of its fields, through one store behind another, and its digest is what it would be without."""
    origins = [MarkedOrigin(Inline.from_array(np.full((2, 3), number, np.float32))) for number in range(2)]
    model = residual_model()
    weight = next(value for value in model.graph.initializers.values() if value.dtype == ir.DataType.FLOAT)
    weight.const_value = WeightTensor(Transpose(Concat(tuple(reversed(origins)), 0), (1, 0)))
    evaluator = Evaluator(Store(tmp_path / "store"))
    for _ in range(2):
        before = expression_of(weight.const_value)
        evaluator.settle(model)
        stored_weight = expression_of(weight.const_value)
        assert isinstance(stored_weight, StoredBytes)
        assert stored_weight.digest == before.digest
        assert not stored_weight.children
        assert origins_of(stored_weight) == tuple(reversed(origins))
        weight.const_value = WeightTensor(Transpose(stored_weight, (1, 0)))


def test_a_file_that_was_cut_off_is_not_a_value(tmp_path: Path) -> None:
    store, expression = Store(tmp_path), Cast(Inline.from_array(np.ones(8)), ir.DataType.FLOAT)
    file = Path(store.obtain(expression).path)
    file.write_bytes(file.read_bytes()[:-1])
    assert store.find(expression) is None
    assert np.array_equal(store.obtain(expression).numpy(), np.ones(8))


def test_errors_of_workers_arrive_and_end_the_others() -> None:
    with ThreadPoolExecutor(1) as executor, pytest.raises(ZeroDivisionError):
        list(run_tasks(executor, partial(int.__floordiv__, 1), [1, 0, 1]))


@pytest.mark.parametrize(("room", "largest_total"), [(0, 8), (12, 12)])
def test_threads_share_the_memory_of_the_largest_task(
    room: int, largest_total: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "processors", lambda: 3)
    monkeypatch.setattr(evaluate, "_ROOM", room)
    sizes, running, totals, lock = [8, 8, 5, 3, 3, 2, 2, 1], Counter[int](), [], threading.Lock()

    def work(number: int) -> int:
        with lock:
            running[number] = sizes[number]
            totals.append((running.total(), len(+running)))
        time.sleep(0.01)
        with lock:
            del running[number]
        return -number

    results = list(run_tasks(None, work, list(range(len(sizes))), sizes))
    assert sorted(results) == [(number, -number) for number in range(len(sizes))]
    # threads share the memory that the largest task takes, or the room that small tasks have in any case
    assert max(total for total, _ in totals) <= largest_total
    assert max(count for _, count in totals) == 3
    with pytest.raises(ZeroDivisionError):
        list(run_tasks(None, partial(int.__floordiv__, 1), [1, 0, 1], [1, 1, 1]))


def test_threads_write_what_one_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = save_bytes(rewritten(), tmp_path / "one")
    monkeypatch.setattr(evaluate, "processors", lambda: 4)
    model = rewritten()
    assert save_bytes(model, tmp_path / "several") == expected
    Evaluator(Store(tmp_path / "store")).settle(model)
    assert save_bytes(model, tmp_path / "settled") == expected


def test_a_worker_that_dies_is_said_to_have_died() -> None:
    with (
        ProcessPoolExecutor(1, get_context("spawn")) as executor,
        pytest.raises(GraphoptError, match="a worker process ended before it was done.*fewer --jobs"),
    ):
        list(run_tasks(executor, _die, [1]))


def _die(_: int) -> None:
    import os

    os._exit(1)


def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    script = """
import os, pathlib, signal, sys, time
from graphopt.graph.weights.evaluator import workers
with workers(1 + 1) as executor:
    print(executor.submit(os.getpid).result(), flush=True)
    time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{worker}/stat").exists() and " Z " not in Path(f"/proc/{worker}/stat").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_error_of_ours_survives_the_way_from_a_worker() -> None:
    error = pickle.loads(pickle.dumps(GraphoptError("what", file="a", shape=[2], remedy="that")))
    assert (str(error), error.file, error.shape, error.remedy) == ("what [file=a, shape=[2]]: that", "a", [2], "that")
