"""Padding is left out of products: tokens compute what they computed, and what cannot be packed says why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from graphopt.analysis.structure.ports import ATTENTION_MASK, HIDDEN, INPUT_IDS
from graphopt.compile.pipeline import optimize
from graphopt.inference.embeddings import load_encoder
from graphopt.passes.interface.pack_tokens.pack_tokens import PackTokens
from graphopt.passes.recipe import load_recipe
from tests.graphs import canonical, residual_model, run_pass, session

LENGTHS = (3, 11, 1, 7)
# Two layers in float32, rows in other blocks of a product: seen 3e-7.
FLOAT32 = 1e-5


def batch(*, on_the_left: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and mask of texts of mixed lengths."""
    columns = np.arange(max(LENGTHS))
    mask = np.stack([columns < length for length in LENGTHS]).astype(np.int64)
    mask = mask[:, ::-1].copy() if on_the_left else mask
    return np.random.default_rng(1).integers(5, 60, mask.shape), mask


def outputs_of(model: ir.Model, ids: np.ndarray, mask: np.ndarray, folder: Path) -> dict[str, np.ndarray]:
    """Run an encoder on a batch."""
    opened = session(model, folder)
    feeds = {port.name: np.zeros_like(ids) for port in opened.get_inputs()} | {INPUT_IDS: ids, ATTENTION_MASK: mask}
    names = [port.name for port in opened.get_outputs()]
    return dict(zip(names, opened.run(names, feeds), strict=True))


@pytest.mark.parametrize(
    ("family", "on_the_left"), [("bert", False), ("bert", True), ("modernbert_reranker", False)], ids=str
)
def test_tokens_compute_what_they_computed(
    family: str, on_the_left: bool, make_artifact: Callable[[str], Path], tmp_path: Path
) -> None:
    model = canonical(make_artifact(family))
    ids, mask = batch(on_the_left=on_the_left)
    before = outputs_of(model, ids, mask, tmp_path / "before")
    products = sum(node.op_type == "MatMul" for node in model.graph)
    report = run_pass(model, "pack_tokens")
    (change,) = report.changes
    after = outputs_of(model, ids, mask, tmp_path / "after")
    assert list(before) == list(after)
    # all products but those behind the pooling
    count = change.what.figures["products"]
    assert isinstance(count, int)
    assert products - count <= 2
    for name, expected in before.items():
        found = after[name]
        if expected.ndim == 3:
            assert not found[mask == 0].any()
            expected, found = expected[mask > 0], found[mask > 0]
        elif on_the_left:  # of the first column, which is padding
            continue
        assert np.abs(found - expected).max() <= FLOAT32 * np.abs(expected).max(), name


def test_products_see_as_many_rows_as_there_are_tokens(bert_artifact: Path, tmp_path: Path) -> None:
    model = canonical(bert_artifact)
    run_pass(model, "pack_tokens")
    outputs = [node.outputs[0] for node in model.graph if node.op_type == "MatMul"]
    packed = [value for value in outputs if str(value.shape).startswith("[1,tokens,")]
    model.graph.outputs.extend(packed)
    found = outputs_of(model, *batch(), tmp_path)
    # six of each of the two layers
    assert [found[str(value.name)].shape[:2] for value in packed] == [(1, sum(LENGTHS))] * 12


def test_a_batch_without_padding_and_a_single_token_run(bert_artifact: Path, tmp_path: Path) -> None:
    model = canonical(bert_artifact)
    feeds = [(np.full(shape, 7), np.ones(shape, np.int64)) for shape in ((2, 5), (1, 1))]
    before = [outputs_of(model, *each, tmp_path / "before")[HIDDEN] for each in feeds]
    run_pass(model, "pack_tokens")
    after = [outputs_of(model, *each, tmp_path / "after")[HIDDEN] for each in feeds]
    for expected, found in zip(before, after, strict=True):
        assert np.abs(found - expected).max() <= FLOAT32 * np.abs(expected).max()


def test_an_encoder_of_codes_is_packed_and_embeds_the_same(bert_artifact: Path, tmp_path: Path) -> None:
    texts = ["import os", "def read_lines(path): return open(path).read()", "class Stack:"]
    embeddings = []
    for name, steps in (("padded", []), ("packed", ["pack_tokens"])):
        recipe = load_recipe("rotate-int4-rtn", add=steps)
        made = optimize(bert_artifact, recipe, tmp_path / name, quality_tokens=0)
        embeddings.append(load_encoder(tmp_path / name).embed(texts))
        assert ("pack_tokens" in [report.name for report in made.manifest.passes]) == bool(steps)
    padded, packed = embeddings
    assert np.abs(packed - padded).max() <= FLOAT32 * np.abs(padded).max()


def test_refusals_say_why(bert_artifact: Path) -> None:
    assert refusals(residual_model()) == ["the graph has no input of this name, so nothing tells tokens from padding"]
    model = canonical(bert_artifact)
    mask = next(value for value in model.graph.inputs if value.name == ATTENTION_MASK)
    mask.shape = ir.Shape([2, "length"])
    assert refusals(model) == ["it is [2,length], and not [batch, length] with two names"]
    mask.shape = ir.Shape(["rows", "columns"])
    assert refusals(model) == ["no product treats the tokens [rows, columns] of this mask one by one"]


def refusals(model: ir.Model) -> list[str]:
    """Run the pass on what it must leave alone, and return why it did."""
    report = PackTokens()(model).report
    assert not report.changes
    return [str(skip.reason) for skip in report.skips]
