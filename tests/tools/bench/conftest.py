from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from graphopt.artifact.artifact import read
from graphopt.graph.weights import Cast, WeightTensor
from tools.bench.parts.random_checkpoint import RandomWeight


@pytest.fixture
def random_artifact(llama_artifact: Path) -> Any:
    """An artifact whose weights lie nowhere, as of a checkpoint that is never written."""
    artifact = read(llama_artifact)
    for name, value in artifact.model.graph.initializers.items():
        if name.endswith("weight") and value.const_value is not None:
            weight = RandomWeight(name, 0, tuple(value.const_value.shape.numpy()))
            value.const_value = WeightTensor(Cast(weight, ir.DataType.FLOAT), name)
    artifact.path, artifact.manifest = None, artifact.manifest.model_copy(update={"files": {}})
    return artifact
