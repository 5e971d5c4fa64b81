from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphopt.compile.pipeline import optimize
from graphopt.compile.replay import verify
from graphopt.errors import InputError
from graphopt.inference.decoding.decoder import Decoder
from graphopt.inference.session import Session, load
from graphopt.passes.lower.float16 import Float16
from graphopt.passes.recipe import Recipe
from tests.families import VOCABULARY
from tests.graphs import Builder, canonical, graph_of, session

MakeArtifact = Callable[[str], Path]

# Relative to the largest logit. A number is rounded by 2^-11 of itself, through two layers some 40 times one after the
# other; errors add up like a random walk: sqrt(40) 2^-11 = 3e-3. Seen 0.7e-3 to 3.3e-3; times three for other draws.
FLOAT16 = 1e-2

FAMILIES = ("llama", "gpt2", "gemma3", "mixtral")


def narrow(model: ir.Model) -> Any:
    return Float16()(model).report


def types(model: ir.Model) -> Counter[str]:
    return Counter(value.dtype.name for value in model.graph.initializers.values() if value.dtype is not None)


@pytest.fixture(scope="module")
def both(make_artifact: MakeArtifact, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Session, ...]]:
    """Return a function that opens a family after some steps, and after the same steps and ``float16``."""
    made: dict[str, Path] = {}

    def open_after(family: str, steps: list[dict[str, Any]], native: bool) -> Session:
        key = f"{family} {steps}"
        if key not in made:
            folder = tmp_path_factory.mktemp("float16") / "model"
            recipe = Recipe.model_validate({"name": "r", "steps": steps})
            optimize(make_artifact(family), recipe, folder, run=steps[-1]["step"] == "float16", quality_tokens=0)
            made[key] = folder
        return load(made[key], native=native)

    def make(family: str, *steps: dict[str, Any], native: bool = True) -> tuple[Session, ...]:
        common = [{"step": "canonicalize"}, *steps]
        return tuple(open_after(family, [*common, *more], native) for more in ([], [{"step": "float16"}]))

    return make


def differences(before: Session, after: Session) -> np.ndarray:
    """Of each token, relative to the largest logit: of whole sequences, and of calls that continue from a cache."""
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (2, 40))
    expected = before.logits(ids)
    decoder = Decoder(after, 2)
    found = np.concatenate([decoder.step(ids[:, :21]), *(decoder.step(ids[:, [c]]) for c in range(21, 40))], axis=1)
    assert found.dtype == np.float32
    errors = [np.abs(expected - each).max(axis=-1) for each in (after.logits(ids), found)]
    return np.concatenate(errors) / np.abs(expected).max()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_computes_almost_the_same(family: str, both: Callable[..., tuple[Session, ...]]) -> None:
    before, after = both(family)
    errors = differences(before, after)
    # where two experts are all but equal, another one may be asked
    assert 1e-5 < (np.median(errors) if family == "mixtral" else errors.max()) < FLOAT16
    caches = {value.type for value in after.inference.get_inputs() if value.name.startswith("past_key_values.")}
    assert caches == {"tensor(float16)"}
    assert [each.manifest.precision.activations for each in (before, after) if each.manifest.precision] == [
        "float32",
        "float16",
    ]
    sizes = [sum(file.stat().st_size for file in each.file.parent.glob("model.onnx*")) for each in (before, after)]
    # half, but for names and nodes, which the toys have as many bytes of
    assert sizes[1] < 0.75 * sizes[0]


LOWER = {"step": "lower", "target": "ort-cpu", "instructions": "avx512"}
EXACT = {"activations": "float32"}
CODED = {
    "fp6": [{"step": "quantize_weights", "linear": {"format": "fp6-e2m3", "group": 64}} | EXACT],
    "int4 in our kernel": [{"step": "quantize_weights"}, {"step": "merge_products"}, LOWER | EXACT],
    "rotated": [{"step": "fold_norms"}, {"step": "rotate", "query_key": "hadamard", "weight_inputs": "hadamard"}],
    "pages of int8": [{"step": "quantize_kv", "storage": "int8", "page": 16}],
    "pages of float32, streaming": [{"step": "sparse_kv", "policy": "streaming", "sinks": 4, "recent": 24, "page": 16}],
}


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("steps", CODED)
def test_after_other_passes(steps: str, native: bool, both: Callable[..., tuple[Session, ...]]) -> None:
    before, after = both("llama", *CODED[steps], native=native)
    # rounding by what was rounded already adds no more
    assert differences(before, after).max() < FLOAT16


@pytest.mark.parametrize("more", [[], [{"step": "quantize_activations", "bits": 8}]])
def test_what_rounds_activations_to_codes_changes_less_than_that_rounding_did(
    more: list[dict[str, Any]], llama_artifact: Path, both: Callable[..., tuple[Session, ...]]
) -> None:
    # what is close to halfway between two codes falls to the other one
    before, after = both("llama", {"step": "quantize_weights"}, *more)
    assert differences(before, after).max() < 0.5 * differences(load(llama_artifact), before).max()


def test_what_stays_float32_is_reported(llama_artifact: Path) -> None:
    model = canonical(llama_artifact)
    report = narrow(model)
    wide = [node for node in model.graph if node.op_type in ("Cos", "Sin")]
    assert {node.outputs[0].dtype for node in wide} == {ir.DataType.FLOAT}
    # 2049 is no float16: what positions are made into must not pass through one
    angle = wide[0].inputs[0]
    assert angle is not None
    while (producer := angle.producer()) is not None:
        assert angle.dtype in (ir.DataType.FLOAT, ir.DataType.INT64)
        angle = next(value for value in producer.inputs if value is not None and not value.is_initializer())
    assert angle.name == "position_ids"
    assert types(model)["FLOAT"] == 1  # inverse frequencies
    reasons = {str(skip.reason) for skip in report.skips}
    assert reasons == {"stays float32: sines and cosines of positions are made of it"}
    assert all(value.dtype == ir.DataType.FLOAT for value in model.graph.outputs if value.name == "logits")


def test_a_second_time_changes_nothing(llama_artifact: Path) -> None:
    model = canonical(llama_artifact)
    narrow(model)
    before = [(node.name, node.op_type) for node in model.graph]
    assert not narrow(model).changes
    assert [(node.name, node.op_type) for node in model.graph] == before


def begin() -> tuple[Builder, ir.Value]:
    return Builder(np.random.default_rng(0), [], []), ir.val("x", ir.DataType.FLOAT, ["batch", "length", 8])


def test_a_constant_that_hides_stays_finite(tmp_path: Path) -> None:
    build, x = begin()
    hidden = build.constant("hidden", np.array(np.finfo(np.float32).min))
    is_read = build.constant("is_read", np.array([True] * 3 + [False] * 5))
    scores = build.op("Where", [is_read, x, hidden], 8, "scores")
    weights = build.op("Softmax", [scores], 8, "weights", axis=-1)
    all_hidden = build.op(
        "Softmax", [build.op("Where", [build.constant("no", np.array(False)), x, hidden], 8, "none")], 8, "flat"
    )
    model = graph_of(build, [x], [weights, all_hidden])
    report = narrow(model)
    assert [str(change.what) for change in report.changes if change.where == "hidden"] == [
        "3.4e+38 becomes 65504, the largest float16"
    ]
    numbers = np.random.default_rng(1).standard_normal((1, 2, 8)).astype(np.float32)
    y, flat = session(model, tmp_path).run(None, {"x": numbers})
    assert (y[..., 3:] == 0).all()
    assert np.abs(y[..., :3].sum(axis=-1) - 1).max() < 2.0**-9
    assert np.abs(flat - 1 / 8).max() < 2.0**-9


@pytest.mark.parametrize(("kind", "shape"), [("MatMul", (8, 8)), ("Mul", ())])
def test_a_weight_beyond_float16_keeps_its_readers_wide(kind: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    build, x = begin()
    large = build.constant("large", np.full(shape, 1e5, np.float32))
    y = build.op(kind, [x, large], 8, "y")
    small = build.constant("small", np.full((8,), 1e-5, np.float32))
    z = build.op("Mul", [y, small], 8, "z")
    model = graph_of(build, [x], [z])
    report = narrow(model)
    assert report.skips[0].where == "y"
    assert str(report.skips[0].reason) == "stays float32: large has a number of 1e+05, beyond float16"
    assert types(model) == {"FLOAT": 1, "FLOAT16": 1}
    assert np.isfinite(session(model, tmp_path).run(None, {"x": np.ones((1, 1, 8), np.float32) / 64})[0]).all()


@pytest.mark.parametrize(("scale", "kept"), [(1e-3, False), (1e-6, True), (1e5, True)])
def test_scales_that_float16_has_not_stay(scale: float, kept: bool, tmp_path: Path) -> None:
    build, x = begin()
    codes = build.constant("codes", np.arange(-32, 32, dtype=np.int8).reshape(8, 8))
    scales = build.constant("scales", np.full((1, 8), scale, np.float32))
    weight = build.op("DequantizeLinear", [codes, scales], 8, "weight", axis=0, block_size=8)
    weight.shape = ir.Shape([8, 8])
    model = graph_of(build, [x], [build.op("MatMul", [x, weight], 8, "y")])
    expected = session(model, tmp_path).run(None, {"x": np.ones((1, 1, 8), np.float32) / 64})[0]
    report = narrow(model)
    assert (model.graph.initializers["scales"].dtype == ir.DataType.FLOAT) == kept
    assert [str(skip.reason) for skip in report.skips] == [
        "stays float32: its scales are not known to have float16's range"
    ] * kept
    if scale < 1:  # else it overflows, as a product in float16 does
        found = session(model, tmp_path).run(None, {"x": np.ones((1, 1, 8), np.float32) / 64})[0]
        # eight products, a scale and a result that are rounded, and what is below the least float16
        assert np.abs(found - expected).max() <= 10 * 2.0**-11 * np.abs(expected).max() + 8 * 2.0**-25


@pytest.mark.parametrize("scale", [1e-3, 1e-6])
def test_scales_of_an_embedding_are_taken_as_they_are_stored(scale: float, tmp_path: Path) -> None:
    build = Builder(np.random.default_rng(0), [], [])
    ids = ir.val("ids", ir.DataType.INT64, ["batch", "length"])
    codes = build.constant("codes", np.arange(-64, 64, dtype=np.int8).reshape(16, 8))
    rows = build.op("Gather", [codes, ids], 8, "rows")
    rows.dtype = ir.DataType.INT8
    scales = build.constant("scales", np.linspace(1, 2, 16, dtype=np.float32)[:, None] * np.float32(scale))
    of_rows = build.op("Gather", [scales, ids], 1, "of_rows")
    embedded = build.op("DequantizeLinear", [rows, of_rows], 8, "embedded", axis=2, block_size=8)
    large = build.op("Mul", [embedded, build.constant("large", np.array(1 / (64 * scale), np.float32))], 8, "large")
    model = graph_of(build, [ids], [build.op("Identity", [large], 8, "y")])
    tokens = np.arange(16)[None]
    expected = session(model, tmp_path).run(None, {"ids": tokens})[0]
    narrow(model)
    assert model.graph.initializers["scales"].dtype == (ir.DataType.FLOAT16 if scale == 1e-3 else ir.DataType.FLOAT)
    found = session(model, tmp_path).run(None, {"ids": tokens})[0]
    # four roundings, and that of numbers that are below the least normal float16 where the scale is 1e-6
    lost = 3 * 2.0**-25 / (64 * scale) if scale == 1e-6 else 0
    assert np.abs(found - expected).max() <= 5 * 2.0**-11 * np.abs(expected).max() + lost


def test_a_weight_that_both_kinds_read_is_there_in_both(tmp_path: Path) -> None:
    build, x = begin()
    shared = build.constant("shared", np.array([[0.1] * 8], np.float32))
    angle = build.op("Mul", [x, shared], 8, "angle")
    sine = build.op("Sin", [angle], 8, "sine")
    y = build.op("Add", [build.op("Mul", [x, shared], 8, "scaled"), sine], 8, "y")
    model = graph_of(build, [x], [y])
    narrow(model)
    assert {name: value.dtype.name for name, value in model.graph.initializers.items() if value.dtype} == {
        "shared": "FLOAT",
        "shared.float16": "FLOAT16",
    }
    numbers = np.random.default_rng(0).standard_normal((1, 2, 8)).astype(np.float32)
    found = session(model, tmp_path).run(None, {"x": numbers})[0]
    # four numbers are rounded on the way, none of them above the sum of magnitudes
    expected = 0.1 * numbers + np.sin(0.1 * numbers)
    assert np.abs(found - expected).max() < 5 * 2.0**-11 * np.abs(0.2 * numbers).max()


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.sampled_from(["Add", "Mul", "Sigmoid", "Sin", "Cast", "Where", "RMSNormalization"]), max_size=8),
    st.data(),
)
def test_any_mixture_of_both_kinds_has_one_type_at_each_place(kinds: list[str], data: st.DataObject) -> None:
    """The graph stays one that onnxruntime takes, and computes about the same."""
    build, x = begin()
    values = [x]
    for number, kind in enumerate(kinds):
        a, b = (values[data.draw(st.integers(0, len(values) - 1))] for _ in range(2))
        weight = build.constant(f"w{number}", np.linspace(0.5, 1, 8, dtype=np.float32))
        inputs: list[ir.Value | None] = {"Add": [a, b], "Mul": [a, weight], "RMSNormalization": [a, weight]}.get(
            kind, [a]
        )
        options: dict[str, Any] = {"Cast": {"to": ir.DataType.FLOAT}}.get(kind, {})
        if kind == "Where":
            inputs = [build.constant(f"is{number}", np.arange(8) % 2 == 0), a, b]
        values.append(build.op(kind, inputs, 8, f"n{number}", **options))
    y = build.op("Identity", [values[-1]], 8, "y")
    model = graph_of(build, [x], [y, *values[1:2]])
    numbers = np.random.default_rng(0).uniform(-1, 1, (1, 2, 8)).astype(np.float32)
    with TemporaryDirectory() as folder:
        expected = session(model, Path(folder)).run(None, {"x": numbers})
        narrow(model)
        found = session(model, Path(folder)).run(None, {"x": numbers})
    for one, other in zip(expected, found, strict=True):
        assert other.dtype == np.float32
        # each step at most doubles what there was of an error, and adds 2^-11 of numbers up to 2^8; a norm of numbers
        # near 0 may scale errors by more, so only its range is looked at
        bound = 4.0 if "RMSNormalization" in kinds else 2.0 ** (len(kinds) + 1) * 2.0**-11 * max(1, np.abs(one).max())
        assert np.abs(one - other).max() <= bound


def test_graphs_within_nodes_and_unknown_types_are_refused() -> None:
    build, x = begin()
    y = build.op("Identity", [x], 8, "y")
    y.dtype = None
    y.type = None
    with pytest.raises(InputError, match="the type of a value is not known.*node=y"):
        narrow(graph_of(build, [x], [y]))
    build, x = begin()
    inner = ir.node("Constant", [], {"value": ir.tensor(np.ones(8, np.float32))})
    inner.outputs[0].name, inner.outputs[0].type = "inner", x.type
    branch = ir.Graph([], inner.outputs, nodes=[inner], opset_imports={"": 23}, name="branch")
    condition = build.constant("condition", np.array(True))
    made = build.op("If", [condition], 8, "either", then_branch=branch, else_branch=branch.clone())
    with pytest.raises(InputError, match="If has graphs of its own.*take the branch"):
        narrow(graph_of(build, [x], [made]))


def test_the_model_before_keeps_its_types(llama_artifact: Path, tmp_path: Path) -> None:
    model = canonical(llama_artifact)
    copy = model.clone()
    types = [value.dtype for node in model.graph for value in node.outputs]
    narrow(copy)
    assert [value.dtype for node in model.graph for value in node.outputs] == types
    optimize(llama_artifact, "float16", tmp_path / "made", quality_tokens=0)
    found = verify(llama_artifact, tmp_path / "made").checks
    assert [(check.name, check.status) for check in found] == [("replay", "proved"), ("logits", "measured")]
