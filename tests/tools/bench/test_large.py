"""The benchmark of large models: weights that lie nowhere, what stages cost, what is forecast of them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphopt.artifact.artifact import MODEL
from graphopt.passes.recipe import load_recipe
from graphopt.quantization.statistics.options import CalibrationOptions
from tools.bench.large import MODELS, compile_stages, forecast, print_run
from tools.bench.parts.random_checkpoint import RandomWeight, random_checkpoint
from tools.bench.parts.stages import Stages


def test_any_part_of_a_random_weight_is_that_of_the_whole_in_any_process() -> None:
    weight = RandomWeight("layers.0.up", 3, (700, 300))  # four blocks of rows, the last with less than the others
    whole = weight.numpy()
    part = pickle.loads(pickle.dumps(weight)).evaluate((slice(217, 699), slice(7, 290)))
    assert np.array_equal(part, whole[217:699, 7:290])
    other_seed, other_name = (RandomWeight(*key, weight.dims).numpy() for key in (("layers.0.up", 4), ("up", 3)))
    # 1 in 200 pairs of normal numbers of 8 bits are equal
    assert max(np.mean(whole == matrix) for matrix in (other_seed, other_name)) < 0.02
    numbers = whole.astype(np.float32)
    # of 210,000 numbers, within six standard errors
    assert abs(numbers.mean()) < 6 * 0.02 / 458
    assert abs(numbers.std() / 0.02 - 1) < 6 / 648
    gains = RandomWeight("norm", 0, (4096,)).numpy().astype(np.float32)
    assert abs(gains.mean() - 1) < 6 * 0.1 / 64


def test_a_checkpoint_has_a_random_weight_for_each_parameter(tmp_path: Path) -> None:
    small = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_hidden_layers": 3}
    checkpoint = random_checkpoint(MODELS["llama-3.1-8b"] | small, tmp_path, seed=1)
    assert checkpoint.weights["model.layers.2.mlp.up_proj.weight"].shape == (96, 64)
    assert len({weight.digest for weight in checkpoint.weights.values()}) == 3 * 9 + 3
    assert checkpoint.weights["lm_head.weight"].numpy().dtype == np.float32


def test_a_model_that_lies_nowhere_is_calibrated_compiled_and_verified(random_artifact: Any, tmp_path: Path) -> None:
    options = CalibrationOptions(windows=2, window=16)
    recipe = load_recipe("small").model_copy(update={"calibration": options})
    stages = Stages(tmp_path)
    with stages.watch():
        byte_count = compile_stages(random_artifact, recipe, tmp_path, stages)
    assert byte_count == sum(file.stat().st_size for file in (tmp_path / "output").iterdir())
    assert (tmp_path / "output" / MODEL).is_file()
    names = list(stages.costs)
    expected = [
        "optimize: collecting statistics",
        "optimize: rounding what was collected",
        "optimize: evaluating weights",
        "verify: collecting statistics",
        "verify: running lower again",
    ]
    assert [name for name in names if name in expected] == expected
    assert {name for name in stages.parts if "verify" not in name} == {
        f"optimize: {stage}, part 1 of 1" for stage in ("collecting statistics", "rounding what was collected")
    }
    assert sum(cost.seconds for cost in stages.costs.values()) > 0
    # what Python alone takes
    assert all(cost.memory > 10e6 for cost in stages.costs.values())
    assert max(cost.disk for cost in stages.costs.values()) > byte_count


def test_a_forecast_goes_on_with_what_a_layer_takes(capsys: pytest.CaptureFixture[str]) -> None:
    def run(layers: int, seconds: float, memory: int) -> dict[str, Any]:
        cost = {"seconds": seconds, "worked": 2 * seconds, "memory": memory, "disk": 10 * layers}
        return {
            "layers": layers,
            "parameters": 100 + 50 * layers,
            "written": 30 * layers,
            "others": 0.1,
            "progress": "",
        } | {"stages": {"export": cost}}

    result = forecast(run(1, 5.0, 70), run(3, 9.0, 60), 11)
    assert result["stages"]["export"] == {"seconds": 25.0, "worked": 50.0, "memory": 70, "disk": 110}
    assert (result["parameters"], result["written"]) == (650, 330)
    print_run(result, is_forecast=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("forecast: 11 layers")
    assert [line.split(" | ")[0] for line in lines[5:]] == ["| export", "| together", "", lines[-1]]
