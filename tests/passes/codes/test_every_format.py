"""Every format by every rounding method: one model with a matrix in each, from recipe to logits."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from graphopt.artifact.artifact import MODEL
from graphopt.compile.calibration.inputs import collect
from graphopt.compile.pipeline import optimize
from graphopt.compile.search.choices import stored_bytes
from graphopt.numerics.formats import FORMATS
from graphopt.passes.common.formats import LinearFormat
from graphopt.passes.recipe import Recipe
from graphopt.quantization.rounding.methods import METHODS

ROLES = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
KERNELS = sorted(name for name, format in FORMATS.items() if format.operator == "Dequantize")
TRELLISES = sorted(set(FORMATS) - set(KERNELS))
FORMAT_OF = {
    f"model.layers.{layer}.{role}.weight": LinearFormat(format=KERNELS[(5 * layer + i) % len(KERNELS)], group=64)
    for layer in range(6)
    for i, role in enumerate(ROLES)
}


TRELLIS_OF = {
    f"model.layers.{layer}.self_attn.k_proj.weight": LinearFormat(format=name, group=64)
    for layer, name in enumerate(TRELLISES)
}


def recipe(method: str, matrices: dict[str, LinearFormat] = FORMAT_OF) -> Recipe:
    others = {"linear": None, "lm_head": None, "embedding": None, "fewest_tokens": 0}
    steps = [
        {"step": "canonicalize"},
        {"step": "quantize_weights", "matrices": matrices, "rounding": method, **others},
        {"step": "lower", "target": "ort-cpu", "instructions": "avx512"},
    ]
    return Recipe.model_validate({"name": method, "calibration": {"windows": 2, "window": 128}, "steps": steps})


@pytest.fixture(scope="module")
def statistics(shipped_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("statistics")
    collect(shipped_artifact, recipe("gptq"), folder)
    return folder


@pytest.mark.parametrize("method", sorted(METHODS))
def test_it_is_stored_at_its_size_and_runs_in_its_kernels(
    method: str, shipped_artifact: Path, statistics: Path, tmp_path: Path
) -> None:
    assert {choice.format for choice in FORMAT_OF.values()} == set(KERNELS)
    # It runs after each pass, and a product outside its kernel would be refused.
    made = optimize(shipped_artifact, recipe(method), tmp_path, quality_tokens=0, statistics=statistics, force=True)
    (check,) = [check for check in made.manifest.checks if check.after == "quantize_weights"]
    assert check.status == "measured"
    # Codes of two bits are coarse, and the other formats are not: at most the size of the logits themselves.
    assert 1e-3 < check.figures["largest_change"] < 1
    check_sizes(shipped_artifact, tmp_path, FORMAT_OF)


def test_trellises_are_stored_at_their_size_and_run_in_their_kernels(
    shipped_artifact: Path, statistics: Path, tmp_path: Path
) -> None:
    steps = recipe("gptq", TRELLIS_OF)
    made = optimize(shipped_artifact, steps, tmp_path, quality_tokens=0, statistics=statistics, force=True)
    (check,) = [check for check in made.manifest.checks if check.after == "quantize_weights"]
    assert 1e-3 < check.figures["largest_change"] < 1
    operators = [node.op_type for node in onnx.load(tmp_path / MODEL, load_external_data=False).graph.node]
    assert operators.count("MatMulTable") == len(TRELLIS_OF) == 4
    assert "DequantizeTrellis" not in operators
    check_sizes(shipped_artifact, tmp_path, TRELLIS_OF)


def check_sizes(original: Path, folder: Path, choices: dict[str, LinearFormat]) -> None:
    shapes = {tensor.name: tuple(tensor.dims) for tensor in initializers(original)}
    sizes = {}
    for tensor in initializers(folder):
        external = {entry.key: entry.value for entry in tensor.external_data}
        sizes[tensor.name] = int(external.get("length", len(tensor.raw_data)))
    for name, choice in choices.items():
        stored = sum(size for tensor, size in sizes.items() if tensor.startswith(name))
        assert stored == pytest.approx(stored_bytes(choice, *shapes[name]), rel=0.05), (name, choice)


def initializers(folder: Path) -> list[onnx.TensorProto]:
    return list(onnx.load(folder / MODEL, load_external_data=False).graph.initializer)
