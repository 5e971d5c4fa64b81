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
FORMAT_OF = {
    f"model.layers.{layer}.{role}.weight": LinearFormat(
        format=sorted(FORMATS)[(5 * layer + i) % len(FORMATS)], group=64
    )
    for layer in range(6)
    for i, role in enumerate(ROLES)
}


def recipe(method: str) -> Recipe:
    others = {"linear": None, "lm_head": None, "embedding": None, "fewest_tokens": 0}
    steps = [
        {"step": "canonicalize"},
        {"step": "quantize_weights", "matrices": FORMAT_OF, "rounding": method, **others},
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
    assert {choice.format for choice in FORMAT_OF.values()} == set(FORMATS)
    # It runs after each pass, and a product outside its kernel would be refused.
    made = optimize(shipped_artifact, recipe(method), tmp_path, quality_tokens=0, statistics=statistics, force=True)
    (check,) = [check for check in made.manifest.checks if check.after == "quantize_weights"]
    assert check.status == "measured"
    # Codes of two bits are coarse, and the other formats are not: at most the size of the logits themselves.
    assert 1e-3 < check.figures["largest_change"] < 1
    shapes = {tensor.name: tuple(tensor.dims) for tensor in initializers(shipped_artifact)}
    sizes = {}
    for tensor in initializers(tmp_path):
        external = {entry.key: entry.value for entry in tensor.external_data}
        sizes[tensor.name] = int(external.get("length", len(tensor.raw_data)))
    for name, choice in FORMAT_OF.items():
        stored = sum(size for tensor, size in sizes.items() if tensor.startswith(name))
        assert stored == pytest.approx(stored_bytes(choice, *shapes[name]), rel=0.05), (name, choice)


def initializers(folder: Path) -> list[onnx.TensorProto]:
    return list(onnx.load(folder / MODEL, load_external_data=False).graph.initializer)
