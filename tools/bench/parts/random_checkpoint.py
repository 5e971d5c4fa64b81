"""A checkpoint of random weights that is not on the disk: a configuration, and a seed for each parameter."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import math
import shutil
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from graphopt.analysis.structure.cost import weight_totals
from graphopt.artifact.artifact import COMPANIONS, Artifact
from graphopt.artifact.hf_config import facts_of
from graphopt.artifact.manifest import Manifest, Source, installed_versions
from graphopt.graph.weights import Array, Cast, Expression, Node, Region, Shape, nodes_below
from graphopt.models.checkpoint_tensors import Parameter
from graphopt.models.export import shipped_models
from graphopt.models.loading import outline
from graphopt.models.trace import task_of_model
from graphopt.models.unrolling import trace_loaded

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphopt.models.loading import LoadedModel

# As transformers begins: `initializer_range` of most decoders. Vectors are gains of norms.
_DEVIATION, _GAIN_DEVIATION = 0.02, 0.1
# Numbers that one stream of random numbers makes.
_STREAM = 1 << 16
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


@dataclasses.dataclass(frozen=True, eq=False)
class RandomWeight(Expression):
    """Normal numbers in bfloat16, as a checkpoint would hold them; matrices around 0, vectors around 1.

    Rows come in blocks, each with a counter of its own (Philox, Salmon et al. 2011): any process makes the same bytes
    of any part, and makes little more than the part.

    Attributes:
        name: the parameter's, which is the key of its random numbers.
        seed: of the model.
        dims: dimensions.
    """

    name: str
    seed: int
    dims: Shape

    @property
    def dtype(self) -> ir.DataType:
        """bfloat16."""
        return ir.DataType.BFLOAT16

    @property
    def shape(self) -> Shape:
        """The parameter's."""
        return self.dims

    @property
    def whole(self) -> frozenset[int]:
        """All axes but the first."""
        return frozenset(range(1, len(self.dims)))

    def evaluate(self, region: Region) -> Array:
        """Make the blocks of rows that the region has a part in."""
        width = math.prod(self.dims[1:])
        step = max(1, _STREAM // width)
        rows = region[0]
        first, last = rows.start // step, -(-rows.stop // step)
        key = hashlib.sha256(f"{self.seed} {self.name}".encode()).digest()[:16]
        table = _normal_numbers(len(self.dims) == 1)
        numbers = np.empty((last - first, step * width), table.dtype)
        for index, block in enumerate(numbers, first):
            stream = np.random.Philox(key=int.from_bytes(key, "little"), counter=index << 128)
            codes = stream.random_raw(-(-len(block) // 4)).astype("<u8", copy=False).view("<u2")
            table.take(codes[: len(block)], out=block, mode="wrap")
        cut = numbers.reshape(-1, *self.dims[1:])[rows.start - first * step : rows.stop - first * step]
        return cut[(slice(None), *region[1:])]


@functools.cache
def _normal_numbers(is_gain: bool) -> Array:
    """Return 2^16 quantiles of a normal distribution: as many as 16 random bits choose from."""
    normal = statistics.NormalDist(*((1.0, _GAIN_DEVIATION) if is_gain else (0.0, _DEVIATION)))
    return np.array([normal.inv_cdf((code + 0.5) / 2**16) for code in range(2**16)]).astype(ml_dtypes.bfloat16)


def random_checkpoint(config: Mapping[str, Any], folder: Path, *, seed: int = 0) -> LoadedModel:
    """Return a model of random weights, each of which is made when it is read.

    Args:
        config: what ``config.json`` says. The tokenizer is the shipped model's, whose vocabulary must fit in.
        folder: where configuration and tokenizer go.
        seed: of the weights.
    """
    transformers = importlib.import_module("transformers")
    transformers.AutoConfig.for_model(**config).save_pretrained(folder)
    for name in _TOKENIZER:
        shutil.copy(shipped_models()["stdlib_lm"] / name, folder)
    checkpoint = outline(str(folder))
    weights = {name: _with_numbers(expression, seed) for name, expression in checkpoint.weights.items()}
    return dataclasses.replace(checkpoint, weights=weights, notes=[])


def make_artifact(config: Mapping[str, Any], folder: Path, *, seed: int = 0) -> Artifact:
    """Export a model of random weights, as `graphopt export` does; ``folder`` must stay as long as the artifact."""
    checkpoint = random_checkpoint(config, folder, seed=seed)
    task = task_of_model(checkpoint.model).name
    program, notes = trace_loaded(checkpoint, str(folder))
    manifest = Manifest(
        source=Source(kind="transformers", name=config["model_type"]),
        task=task,
        model=facts_of(folder, task),
        weights=weight_totals(program),
        notes=notes,
        versions=installed_versions("torch", "transformers"),
    )
    return Artifact(program, manifest, {name: folder / name for name in COMPANIONS if (folder / name).is_file()})


def _with_numbers(expression: Expression, seed: int) -> Expression:
    parameters = [node for node in nodes_below(expression) if isinstance(node, Parameter)]
    numbers: dict[Node, Node] = {
        parameter: Cast(RandomWeight(parameter.name, seed, parameter.dims), parameter.dtype) for parameter in parameters
    }
    return expression.replacing(numbers)
