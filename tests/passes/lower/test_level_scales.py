"""Scales in two levels: what they mean, what runs, and which stay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
from hypothesis import given
from hypothesis import strategies as st

from graphopt.compile.pipeline import optimize
from graphopt.graph.weights import Inline
from graphopt.ort.session import open_session
from graphopt.passes.codes.quantize_weights import LinearFormat
from graphopt.passes.common.leveled_scales import LeveledScales, Levels
from graphopt.passes.lower.level_scales import BYTE_SCALES, FEW_SCALES, NOT_CONSTANT
from graphopt.passes.recipe import load_recipe
from graphopt.runtime_ops import port
from graphopt.runtime_ops.matmul_table.spec.op import MATMUL_TABLE
from tests.graphs import logits, relative, residual_model, run_pass, save
from tests.native import needs_library
from tests.passes.lower.test_group_experts import logits as mixture_logits
from tests.passes.lower.test_group_experts import lowered


def packed(group: int = 16) -> ir.Model:
    model = residual_model(width=96, inner=128)
    linear = LinearFormat(format="nf4", group=group)
    run_pass(model, "canonicalize")
    run_pass(model, "quantize_weights", linear=linear, lm_head=linear, activations="float32")
    run_pass(model, "lower", target="ort-cpu")
    return model


@given(st.integers(0, 2**32 - 1), st.sampled_from([1e-6, 1.0, 1e3]), st.sampled_from([np.float16, np.float32]))
def test_a_level_is_off_by_half_a_step_at_most(seed: int, size: float, kind: type) -> None:
    scales = np.abs(np.random.default_rng(seed).standard_normal((2, 7, 16)) * size).astype(kind)
    made = Levels(Inline.from_array(scales)).evaluate()
    levels, steps = made["levels"].astype(np.float64), made["steps"].astype(np.float64)
    largest = scales.astype(np.float64).max(1, keepdims=True)
    # the largest scale is over 253 or more, and bfloat16 moves that by one
    assert levels.max() > 250
    # the largest over 253 to 255; bfloat16 is off by 2^-8 of it
    assert ((steps * 252 <= largest) & (largest <= steps * 256)).all()
    off = np.abs(levels * steps - scales)
    # half a step; a whole one where a scale is nearer to 0
    assert (off <= np.where(scales < steps / 2, steps, steps / 2) * (1 + 1e-6)).all()
    assert (levels >= 1).all()  # no scale is 0


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 7, 40]))
def test_what_was_leveled_stays_as_it_is(seed: int, groups: int) -> None:
    scales = np.abs(np.random.default_rng(seed).standard_normal((2, groups, 16))).astype(np.float16)
    for _ in range(2):
        parts = {name: Inline.from_array(array) for name, array in Levels(Inline.from_array(scales)).evaluate().items()}
        before, scales = scales, LeveledScales(parts["levels"], parts["steps"], ir.DataType.FLOAT16).numpy()
    assert np.array_equal(scales, before)


def test_zero_scales_are_no_error() -> None:
    made = Levels(Inline.from_array(np.zeros((1, 3, 16), np.float16))).evaluate()
    assert not (made["levels"] * made["steps"]).any()


def test_the_same_kernels_run_on_fewer_bytes(tmp_path: Path) -> None:
    model = packed()
    before = logits(model, tmp_path / "before")
    report = run_pass(model, "level_scales")
    assert {change.what.code for change in report.changes} == {BYTE_SCALES.code}
    after = logits(model, tmp_path / "after")
    # a scale is off by 1/510 of the largest of its column; the logits pass five products
    assert 0 < relative(before, after) < 0.02
    open_session(save(model, tmp_path), optimized_to=tmp_path / "optimized.onnx")
    kinds = [node.op_type for node in ir.load(tmp_path / "optimized.onnx").graph]
    assert "MatMulTable" in kinds
    assert "Cast" not in kinds  # folded


def test_they_are_one_constant_again_where_codes_are_unpacked(tmp_path: Path) -> None:
    model = packed()
    run_pass(model, "level_scales")
    before = logits(model, tmp_path / "before")
    report = run_pass(model, "unpack")
    assert not report.skips
    assert not [node for node in model.graph if node.op_type in ("Cast", "Mul") and "scales" in (node.name or "")]
    assert not [name for name in model.graph.initializers if name.endswith((".levels", ".steps"))]
    run_pass(model, "lower", target="ort-cpu")
    # the same kernels on the same numbers
    assert np.array_equal(logits(model, tmp_path / "after"), before)


@needs_library
def test_scales_of_a_stack_of_experts_are_bytes_of_each(make_artifact: Callable[[str], Path]) -> None:
    """What the kernel reads of each expert is what its own scales alone become."""
    model = lowered(make_artifact("mixtral"), "nf4-rtn", "quantize_weights.linear={format: nf4, group: 16}")
    run_pass(model, "group_experts")
    (first, *_) = experts = [node for node in model.graph if node.op_type == "MatMulExperts"]
    scales = port(first, "scales")
    assert scales is not None
    assert scales.const_value is not None
    before, numbers = mixture_logits(model), scales.const_value.numpy()
    report = run_pass(model, "level_scales")
    assert [skip.where for skip in report.skips] == ["lm_head.weight.packed.scales"]  # of a column as a whole
    assert len({change.what.figures["scales"] for change in report.changes}) >= len(experts) == 4
    levels, steps = (model.graph.initializers[f"{scales.name}.{part}"].const_value for part in ("levels", "steps"))
    assert levels is not None
    assert steps is not None
    assert (levels.shape, steps.shape) == (numbers.shape, (*numbers.shape[:2], 1, 16))
    for expert, alone in enumerate(numbers):
        made = Levels(Inline.from_array(alone)).evaluate()
        assert np.array_equal(levels.numpy()[expert], made["levels"])
        assert np.array_equal(steps.numpy()[expert], made["steps"])
    assert 0 < relative(before, mixture_logits(model)) < 0.02  # as in the test of single products


def test_scales_that_are_computed_stay_with_their_reason() -> None:
    model = packed()
    product = next(node for node in model.graph if node.op_type == "MatMulTable")
    index = MATMUL_TABLE.schema.index("scales")
    identity = ir.node("Identity", [product.inputs[index]])
    identity.outputs[0].name = "computed"
    model.graph.insert_before(product, identity)
    product.replace_input_with(index, identity.outputs[0])
    report = run_pass(model, "level_scales")
    assert [(skip.where, skip.reason.code) for skip in report.skips] == [("computed", NOT_CONSTANT.code)]


def test_few_scales_stay() -> None:
    report = run_pass(packed(group=256), "level_scales")
    assert {skip.reason.code for skip in report.skips} == {FEW_SCALES.code}
    assert not report.changes


def test_a_recipe_has_them_in_its_file(llama_artifact: Path, tmp_path: Path) -> None:
    chosen = load_recipe("nf4-rtn", options=["quantize_weights.linear={format: nf4, group: 16}"])
    sizes = []
    for name, recipe in (("half", chosen), ("levels", chosen.adding("level_scales"))):
        made = optimize(llama_artifact, recipe, tmp_path / name, target="ort-cpu")
        assert made.manifest.weights is not None
        sizes.append(made.manifest.weights.bytes)
        quality = next(check.figures for check in made.manifest.checks if check.name == "quality")
        assert quality["kl_mean"] < 0.1  # seen 0.046 with scales in float16; random weights
    assert sizes[1] < sizes[0]
    again = optimize(tmp_path / "levels", "kv4", tmp_path / "again", target="ort-cpu", quality_tokens=0)
    assert again.manifest.weights is not None
    assert again.manifest.weights.bytes == sizes[1]
    files = [sum(file.stat().st_size for file in (tmp_path / name).glob("*.data")) for name in ("half", "levels")]
    # the manifest counts levels and steps, but no room between tensors
    assert sizes[0] - sizes[1] <= files[0] - files[1]
