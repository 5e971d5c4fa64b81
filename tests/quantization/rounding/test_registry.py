"""A format is one file and a rounding method is one file: nothing else has to name them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from graphopt.compile.pipeline import optimize
from graphopt.errors import InputError
from graphopt.inference.generation import generate
from graphopt.inference.session import load
from graphopt.numerics.formats import FORMATS
from graphopt.passes.codes.quantize_weights import STORAGE, QuantizeWeights
from graphopt.passes.recipe import load_recipe
from graphopt.quantization.rounding.methods import METHODS
from tests.registry_files import file_added

CUBES = '''
"""Cubes."""
from graphopt.numerics.formats.table import TableFormat

CUBES = TableFormat("cubes", 3, (0.0, 1.0, 8.0, 27.0, -1.0, -8.0, -27.0))
'''

FILE = '''
"""Rounds down."""
from typing import Literal
import numpy as np
from graphopt.quantization.rounding import QuantizedMatrix, RoundingMethod

class Down(RoundingMethod):
    """Each weight becomes the largest code that is not above it."""
    method: Literal["down"] = "down"
    by: float = 0.5

    def round(self, matrix, table, group, scale, *, scale_type, statistics=None):
        """Subtract a share of the scale before rounding to nearest."""
        rows = np.arange(len(matrix)) // group
        groups = -(-len(matrix) // group)
        scales = np.full((groups, matrix.shape[1]), np.abs(matrix).max() / table.limit, scale_type)
        codes = table.encode(matrix / scales.astype(np.float64)[rows] - self.by)
        return QuantizedMatrix(table, group, codes, scales, None)
'''


def storages(result: object) -> set[tuple[object, object]]:
    """Return by which formats and methods an artifact says that its matrices are stored."""
    report = next(report for report in result.manifest.passes if report.name == "quantize_weights")  # type: ignore[attr-defined]
    facts = [change.what for change in report.changes if change.what.code == STORAGE.code]
    return {(fact.figures["format"], fact.figures.get("rounding")) for fact in facts}


def test_a_format_is_one_file(llama_artifact: Path, tmp_path: Path) -> None:
    with file_added(FORMATS, "graphopt.numerics.formats", tmp_path, CUBES):
        recipe = load_recipe("fp6-rtn", options=["quantize_weights.linear.format=cubes"])
        result = optimize(llama_artifact, recipe, tmp_path / "out")
        assert ("cubes", None) in storages(result)
        kernels = next(check for check in result.manifest.checks if check.name == "kernels")
        assert kernels.status == "measured"
        tables = [v.const_value for name, v in result.model.graph.initializers.items() if name == "cubes.table"]
        assert [tensor.numpy().tolist() for tensor in tables] == [list(FORMATS["cubes"].table)]
        assert generate(load(tmp_path / "out"), ["def"], max_new_tokens=4)[0].tokens


def test_a_rounding_method_is_one_file(llama_artifact: Path, tmp_path: Path) -> None:
    with file_added(METHODS, "graphopt.quantization.rounding.methods", tmp_path, FILE):
        options = ["quantize_weights.rounding=down", "quantize_weights.rounding.by=0.25"]
        recipe = load_recipe("int4-rtn", options=options)
        assert recipe == load_recipe("int4-rtn", options=["quantize_weights.rounding={method: down, by: 0.25}"])
        result = optimize(llama_artifact, recipe, tmp_path / "out")
        assert ("int4", "down") in storages(result)
        assert ("int8", "down") in storages(result)  # the lm_head, and the embedding, which is tied to it
        assert result.manifest.recipe is not None
        assert result.manifest.recipe["steps"][1]["rounding"] == {"method": "down", "by": 0.25}
        nearest_result = optimize(llama_artifact, "int4-rtn")
        codes = [outcome.model.graph.initializers for outcome in (result, nearest_result)]
        name = next(name for name in codes[1] if "down_proj" in name and name.endswith("codes"))
        down, nearest = (np.asarray(initializers[name].const_value.numpy(), np.int64) for initializers in codes)
        assert down.shape == nearest.shape
        assert down.mean() < nearest.mean()


def test_methods_are_found_by_name_and_say_which_there_are() -> None:
    assert all(METHODS[name]().method == name for name in METHODS)
    assert QuantizeWeights().rounding == METHODS["nearest"]()
    with pytest.raises(ValidationError, match=r"there is no rounding method 'up'; known are .*nearest"):
        QuantizeWeights(rounding="up")
    with pytest.raises(InputError, match=r"the step quantize_weights cannot be set so: rounding.*Extra inputs"):
        load_recipe("int4-rtn", options=["quantize_weights.rounding={method: nearest, damping: 1}"])
