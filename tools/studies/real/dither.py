"""A model whose weights lie on a grid of codes, made into a float model again by noise of half a step.

Rounding weights of 4 bits to 4 bits again costs less than rounding weights that were never rounded, so a table of
quality made of them would flatter it. With uniform noise of half a step on each side every code is as likely to be
rounded up as down, while activations stay those of the model.
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

STEPPED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
"""Types whose blocks begin with their step, a float16."""


def steps_of(tensor: Ggml) -> Array:
    """Return the distance between neighbouring codes for each number of a tensor, float32."""
    assert tensor.kind in STEPPED
    first = np.ascontiguousarray(tensor.blocks()[..., :2]).view(np.float16)[..., 0]
    return np.repeat(np.abs(first).astype(np.float32), block_of(tensor.kind)[0], axis=-1)


def dithered(file: GgufFile, seed: int) -> GgufFile:
    """Return ``file`` with uniform noise, of half a step on each side, added to each tensor of codes."""
    tensors: dict[str, Expression] = {}
    for number, (name, tensor) in enumerate(file.tensors.items()):
        tensors[name] = tensor
        if isinstance(tensor, Ggml) and tensor.kind in STEPPED:
            noise = np.random.default_rng((seed, number)).uniform(-0.5, 0.5, tensor.shape).astype(np.float32)
            tensors[name] = Sum(tensor, Inline.from_array(noise * steps_of(tensor)))
    return dataclasses.replace(file, tensors=tensors)


def dither(exported: Path, gguf: Path, output: Path, seed: int = 0) -> int:
    """Write the artifact ``exported``, made from the file ``gguf``, with dithered weights; return how many were.

    Raises:
        ValueError: a weight of the artifact is not that of the file.
    """
    file = open_gguf(gguf)
    return put_weights(exported, file, dithered(file, seed), f"{gguf.name}, dithered with seed {seed}", output)


def put_weights(exported: Path, file: GgufFile, other: GgufFile, name: str, output: Path) -> int:
    """Write the artifact ``exported``, made from ``file``, with the matrices of ``other``; return how many were.

    Args:
        exported: the artifact.
        file: what it was made from.
        other: a file with the same tensors in other numbers.
        name: what the new artifact says that it comes from.
        output: where it goes.

    Raises:
        ValueError: a weight of the artifact is not that of the file.
    """
    opened = artifact.read(exported)
    model = empty_model(file)
    before, after = (expressions_of(each, model) for each in (file, other))
    changed = 0
    for weight, value in opened.model.graph.initializers.items():
        if weight not in after or not value.shape or len(value.shape) != 2:
            continue
        old, new = before[weight], after[weight]
        stored = expression_of(value.const_value)
        if stored.shape != old.shape or not np.array_equal(stored.numpy(), old.numpy()):
            old, new = Transpose(old, (1, 0)), Transpose(new, (1, 0))
        if stored.shape != old.shape or not np.array_equal(stored.numpy(), old.numpy()):
            raise ValueError(f"{weight} of {exported} is not what {file.path} holds")
        value.const_value = WeightTensor(new, weight)
        changed += 1
    source = opened.manifest.source.model_copy(update={"name": name})
    opened.manifest = opened.manifest.model_copy(update={"source": source})
    artifact.write(opened, output, overwrite=True)
    return changed
