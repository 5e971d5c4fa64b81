from __future__ import annotations

from pathlib import Path

import pytest

from graphopt.quantization.statistics.options import CalibrationOptions
from tools.studies.rounding_table import main, recipe_of, title


def test_a_row_has_the_divergence_of_each_method(
    llama_artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("def add(a, b):\n    return a + b\n" * 60)
    methods = ["nearest", "{method: gptq, order: natural}"]
    main(llama_artifact, ["int4,quantize_weights.linear.format=int3"], methods, None, 128, 4, text, 1)
    head, rule, row = capsys.readouterr().out.splitlines()
    assert head == "| recipe | MB | nearest | gptq, order: natural |"
    assert rule == "| --- | --- | --- | --- |"
    name, size, *cells = (cell.strip() for cell in row.strip("|").split("|"))
    assert name == "int4 int3"
    assert float(size) > 0
    assert all(float(cell) > 0 for cell in cells)
    assert cells[0] != cells[1]


def test_methods_are_named_as_a_recipe_has_them() -> None:
    assert [title(method) for method in ("gptq", "{method: gptq, sweeps: 2}")] == ["gptq", "gptq, sweeps: 2"]
    recipe = recipe_of("int4", "gptq", CalibrationOptions(windows=2))
    assert recipe.calibration.windows == 2
    assert recipe.steps[1].model_dump()["rounding"]["method"] == "gptq"
