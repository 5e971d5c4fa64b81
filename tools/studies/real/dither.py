"""Make a float model of one whose weights are on a grid of codes, by noise of half a step.

Rounding weights of 4 bits to 4 bits again loses less than rounding weights that were never rounded, so a table of
quality on them would be too good. With uniform noise of half a step on each side every code is as likely to be rounded
up as down, while activations stay those of the model.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from graphopt.artifact import artifact
from graphopt.graph.weights import Array, Expression, Inline, Sum, Transpose, WeightTensor, expression_of
from graphopt.models.gguf.checkpoint import empty_model, expressions_of
from graphopt.quantization.gguf.blocks import Ggml, block_of
from graphopt.quantization.gguf.file import GgufFile, open_gguf

STEP_KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
"""Types whose blocks begin with their step, a float16."""


def steps_of(tensor: Ggml) -> Array:
    """Return the distance between neighbouring codes for each number of a tensor, float32."""
    assert tensor.kind in STEP_KINDS
    first = np.ascontiguousarray(tensor.blocks()[..., :2]).view(np.float16)[..., 0]
    return np.repeat(np.abs(first).astype(np.float32), block_of(tensor.kind)[0], axis=-1)


def add_noise(file: GgufFile, seed: int) -> GgufFile:
    """Return ``file`` with uniform noise, of half a step on each side, added to each tensor of codes."""
    tensors: dict[str, Expression] = {}
    for number, (name, tensor) in enumerate(file.tensors.items()):
        tensors[name] = tensor
        if isinstance(tensor, Ggml) and tensor.kind in STEP_KINDS:
            noise = np.random.default_rng((seed, number)).uniform(-0.5, 0.5, tensor.shape).astype(np.float32)
            tensors[name] = Sum(tensor, Inline.from_array(noise * steps_of(tensor)))
    return dataclasses.replace(file, tensors=tensors)


def dither(exported_folder: Path, gguf: Path, output: Path, seed: int = 0) -> int:
    """Write the artifact ``exported_folder``, made from the file ``gguf``, with dithered weights; return how many were.

    Raises:
        ValueError: a weight of the artifact is not that of the file.
    """
    file = open_gguf(gguf)
    return put_weights(exported_folder, file, add_noise(file, seed), f"{gguf.name}, dithered with seed {seed}", output)


def put_weights(exported_folder: Path, file: GgufFile, other_file: GgufFile, name: str, output: Path) -> int:
    """Write the artifact ``exported_folder``, made from ``file``, with the matrices of ``other_file``; return how many.

    Args:
        exported_folder: the artifact.
        file: what it was made from.
        other_file: a file with the same tensors in other numbers.
        name: of the source, for the manifest of the new artifact.
        output: where it goes.

    Raises:
        ValueError: a weight of the artifact is not that of the file.
    """
    result = artifact.read(exported_folder)
    model = empty_model(file)
    before, after = (expressions_of(gguf_file, model) for gguf_file in (file, other_file))
    count = 0
    for weight, value in result.model.graph.initializers.items():
        if weight not in after or not value.shape or len(value.shape) != 2:
            continue
        old, new = before[weight], after[weight]
        current = expression_of(value.const_value)
        if current.shape != old.shape or not np.array_equal(current.numpy(), old.numpy()):
            old, new = Transpose(old, (1, 0)), Transpose(new, (1, 0))
        if current.shape != old.shape or not np.array_equal(current.numpy(), old.numpy()):
            raise ValueError(f"{weight} of {exported_folder} is not what {file.path} holds")
        value.const_value = WeightTensor(new, weight)
        count += 1
    source = result.manifest.source.model_copy(update={"name": name})
    result.manifest = result.manifest.model_copy(update={"source": source})
    artifact.write(result, output, overwrite=True)
    return count
