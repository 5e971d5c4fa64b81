"""Convolutions of codes: integers where inputs were given, weights alone elsewhere, and the reasons for what stays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

import graphopt
from graphopt.compile.replay import verify
from graphopt.errors import InputError
from graphopt.ort.session import open_session
from graphopt.passes.codes.quantize_convolutions import QuantizeConvolutions
from graphopt.quality.judge import quality_figures
from graphopt.tasks.encoder import cosines
from tests.graphs import run_pass, session
from tests.tasks.graph import graphs

IMAGES = np.random.default_rng(7).standard_normal((8, 3, 16, 16)).astype(np.float32)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return graphs.convolutions(tmp_path_factory.mktemp("convolutions") / "model.onnx")


@pytest.fixture(scope="module")
def inputs(file: Path) -> Path:
    np.savez(file.parent / "images.npz", images=IMAGES[:, None])
    return file.parent / "images.npz"


@pytest.fixture(scope="module")
def int8(file: Path, inputs: Path) -> Path:
    graphopt.optimize(file, "int8", file.parent / "int8", inputs=inputs)
    return file.parent / "int8"


def logits_of(model: ir.Model, folder: Path) -> np.ndarray:
    return session(model, folder).run(["logits"], {"images": IMAGES})[0]


def operators(path: Path, folder: Path) -> list[str]:
    """The operators of the graph that onnxruntime runs."""
    open_session(path, optimized_to=folder / "optimized.onnx")
    return [node.op_type for node in ir.load(folder / "optimized.onnx").graph]


def test_with_inputs_integers_are_multiplied(int8: Path, file: Path, inputs: Path, tmp_path: Path) -> None:
    manifest = graphopt.read(int8).manifest
    running = operators(int8 / "model.onnx", tmp_path)
    assert (running.count("QLinearConv"), running.count("QLinearAdd"), running.count("Conv")) == (4, 1, 0)
    products = {product.operator: (product.activations, product.count) for product in manifest.precision.products}
    assert products["Conv"] == ("uint8", 4)
    kernels = manifest.check("kernels")
    assert (kernels.figures["integer_convolutions"], kernels.figures["fused_convolutions"]) == (4, 4)
    # Codes of 8 bits of inputs and weights: each rounding is some 0.3% of what it rounds, and four are in a row.
    assert quality_figures(file, int8, "graph", inputs=inputs)["cosine_mean"] > 0.999


def test_the_manifest_holds_ranges_from_which_the_same_bytes_are_made(int8: Path, file: Path, inputs: Path) -> None:
    (step,) = [s for s in graphopt.read(int8).manifest.recipe["steps"] if s["step"] == "quantize_convolutions"]
    known = step["known_ranges"]
    assert (known["samples"], known["is_random"]) == (8, False)
    # What is behind Relu and Clip begins at 0; of images the percentiles cut off next to nothing.
    assert known["ranges"]["low"][0] == known["ranges"]["clipped"][0] == 0
    low, high = known["ranges"]["images"]
    assert IMAGES.min() <= low < -3
    assert 3 < high <= IMAGES.max()
    assert verify(file, int8, inputs=inputs).checks[0].status == "proved"


def test_without_inputs_weights_alone_become_codes(file: Path, tmp_path: Path) -> None:
    model = ir.load(file)
    before = logits_of(model, tmp_path / "before")
    weights = {name: model.graph.initializers[name].const_value.numpy() for name in ("first", "second", "last")}
    report = run_pass(model, "quantize_convolutions")
    skips = {skip.where: skip.reason.code for skip in report.skips}
    assert skips == {
        "single": "quantize_convolutions.taps",
        "activations": "quantize_convolutions.weights-alone",
    }
    for name, weight in weights.items():
        codes, scales = (model.graph.initializers[f"{name}.{part}"].const_value.numpy() for part in ("codes", "scales"))
        assert (codes.dtype, scales.shape) == (np.int8, weight.shape[:1])
        wide = scales.reshape(-1, 1, 1, 1)
        # Nearest to half a step; the least squares may cut off the largest numbers, by 40% at most.
        assert (np.abs(codes * wide - weight) <= np.maximum(wide / 2, 0.4 * np.abs(weight)) + 1e-6).all()
        assert name not in model.graph.initializers
    # weights alone, of 8 bits: each is off by 0.3% of its channel's largest
    assert cosines(before, logits_of(model, tmp_path / "after")).min() > 0.999


@pytest.mark.parametrize("weak", [1, 1e-9])
def test_weights_are_shared_pools_tell_places_and_a_channel_is_almost_dead(
    weak: float, inputs: Path, tmp_path: Path
) -> None:
    file = graphs.shared_heads(tmp_path / "model.onnx", weak=weak)
    recipe = graphopt.load_recipe("int8", options=["quantize_convolutions.ranges=minmax"])
    manifest = graphopt.optimize(file, recipe, tmp_path / "int8", inputs=inputs).manifest
    (report,) = [report for report in manifest.passes if report.name == "quantize_convolutions"]
    large = [skip.where for skip in report.skips if skip.reason.code == "quantize_convolutions.bias-too-large"]
    assert large == (["first"] if weak < 1 else [])
    names = set(graphopt.read(tmp_path / "int8").model.graph.initializers)
    assert {name for name in names if name.endswith(".codes") and "bias" not in name} == (
        {"shared.codes"} if weak < 1 else {"first.codes", "shared.codes"}
    )
    running = operators(tmp_path / "int8" / "model.onnx", tmp_path)
    assert running.count("QLinearConv") == 3 - len(large)
    paths = (file, tmp_path / "int8" / "model.onnx")
    before, after = (open_session(path).run(["logits"], {"images": IMAGES})[0] for path in paths)
    # Three roundings to 8 bits in a row, of 0.3% each.
    assert np.abs(after - before).max() < 0.02 * np.abs(before).max()


@pytest.mark.parametrize(("instructions", "reach"), [("avx2", 64), ("avx512", 127)])
def test_where_pairs_of_products_overflow_weights_have_7_bits(
    instructions: str, reach: int, inputs: Path, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphopt.passes.codes.quantize_convolutions.instructions_here", lambda: instructions)
    weights = {}
    for name, feeds in (("with inputs", inputs), ("without", None)):
        model = graphopt.optimize(file, "int8", tmp_path / name, inputs=feeds).model
        tensors = {key: value.const_value.numpy() for key, value in model.graph.initializers.items()}
        weights[name] = [codes for key, codes in tensors.items() if key.endswith(".codes") and codes.ndim == 4]
    assert {codes.dtype.name for codes in weights["with inputs"]} == {"int8"}
    # Each output channel reaches as far as codes go, give or take what the least squares cut off.
    assert reach - 3 <= max(np.abs(codes.astype(int)).max() for codes in weights["with inputs"]) <= reach + 1
    assert max(np.abs(codes.astype(int)).max() for codes in weights["without"]) > 100


def test_four_bits_have_scales_of_blocks_of_input_channels(file: Path, tmp_path: Path) -> None:
    model = ir.load(file)
    before = logits_of(model, tmp_path / "before")
    report = run_pass(model, "quantize_convolutions", format="int4", group=16)
    assert {skip.where: skip.reason.code for skip in report.skips} == {
        "first": "quantize_convolutions.no-blocks",
        "single": "quantize_convolutions.taps",
    }
    assert model.graph.initializers["second.scales"].shape == [16, 1, 3, 3]
    assert model.graph.initializers["second.codes"].dtype == ir.DataType.INT4
    # Two convolutions of codes of 4 bits, which are off by a tenth of what they round: seen 0.998.
    assert cosines(before, logits_of(model, tmp_path / "after")).mean() > 0.99


def test_ranges_of_random_inputs_are_used_where_they_are_asked_for(file: Path, tmp_path: Path) -> None:
    recipe = graphopt.load_recipe("int8", options=["quantize_convolutions.activations=static"])
    manifest = graphopt.optimize(file, recipe, tmp_path / "random").manifest
    (report,) = [report for report in manifest.passes if report.name == "quantize_convolutions"]
    assert any("random inputs" in str(change.what) for change in report.changes)


def test_what_the_recipe_names_stays(file: Path) -> None:
    model = ir.load(file)
    report = run_pass(model, "quantize_convolutions", floats=["second"])
    assert {skip.where: skip.reason.code for skip in report.skips}["second"] == "quantize_convolutions.left"
    with pytest.raises(InputError, match="names a weight that no convolution has"):
        run_pass(ir.load(file), "quantize_convolutions", floats=["third"])
    with pytest.raises(ValueError, match="integers are multiplied with int8 weights"):
        QuantizeConvolutions(format="int4", activations="static")
    with pytest.raises(ValueError, match="a multiple of 16"):
        QuantizeConvolutions(group=8)


def test_a_weight_that_is_computed_and_ranges_that_are_missing_are_named(file: Path) -> None:
    model = ir.load(file)
    node = next(node for node in model.graph if node.name == "second")
    twice = ir.node("Identity", [node.inputs[1]], name="twice")
    model.graph.insert_before(node, twice)
    node.replace_input_with(1, twice.outputs[0])
    report = run_pass(model, "quantize_convolutions")
    assert {skip.where: skip.reason.code for skip in report.skips}["second"] == "quantize_convolutions.not-constant"
    known = {"samples": 1, "digest": "", "is_random": False, "ranges": {"images": (0, 1)}}
    with pytest.raises(InputError, match="states no range of a tensor"):
        run_pass(ir.load(file), "quantize_convolutions", known_ranges=known)


def branches(path: Path) -> Path:
    """Two convolutions in each branch of an If: one of a constant in it, one whose weight both branches read."""
    random = np.random.default_rng(5)

    def branch(name: str) -> onnx.GraphProto:
        weight = numpy_helper.from_array((random.standard_normal((8, 3, 3, 3)) / 5).astype(np.float32), "own")
        nodes = [
            helper.make_node("Constant", [], [f"{name}.own"], value=weight),
            helper.make_node("Conv", ["images", f"{name}.own"], [f"{name}.first"], name=f"{name}.conv"),
            helper.make_node("Conv", [f"{name}.first", "both"], [f"{name}.second"], name=f"{name}.conv2"),
        ]
        output = helper.make_tensor_value_info(f"{name}.second", onnx.TensorProto.FLOAT, None)
        return helper.make_graph(nodes, name, [], [output])

    nodes = [
        helper.make_node(
            "If", ["is_large"], ["maps"], name="if", then_branch=branch("then"), else_branch=branch("else")
        ),
        helper.make_node("GlobalAveragePool", ["maps"], ["means"]),
        helper.make_node("Flatten", ["means"], ["logits"]),
    ]
    both = numpy_helper.from_array((random.standard_normal((10, 8, 3, 3)) / 8).astype(np.float32), "both")
    images = helper.make_tensor_value_info("images", onnx.TensorProto.FLOAT, ["batch", 3, 16, 16])
    is_large = helper.make_tensor_value_info("is_large", onnx.TensorProto.BOOL, [])
    logits = helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, ["batch", 10])
    return graphs.save_graph(path, helper.make_graph(nodes, "branches", [images, is_large], [logits], [both]), opset=23)


def test_convolutions_in_branches_get_codes_of_weights(tmp_path: Path) -> None:
    model = ir.load(branches(tmp_path / "model.onnx"))
    feeds = [{"images": IMAGES, "is_large": np.array(is_large)} for is_large in (True, False)]
    before = [session(model, tmp_path / "before").run(["logits"], each)[0] for each in feeds]
    report = run_pass(model, "quantize_convolutions")
    opened = session(model, tmp_path / "after")
    for each, expected in zip(feeds, before, strict=True):
        # two roundings to 8 bits in a row
        assert cosines(opened.run(["logits"], each)[0], expected).min() > 0.999
    assert sum("int8" in str(change.what) for change in report.changes) == 3
    dtypes = {name: value.dtype for name, value in model.graph.initializers.items() if name.endswith(".codes")}
    assert list(dtypes.values()) == [ir.DataType.INT8] * 3
    assert [node.op_type for node in model.graph.all_nodes()].count("DequantizeLinear") == 4
    assert "Constant" not in [node.op_type for node in model.graph.all_nodes()]
