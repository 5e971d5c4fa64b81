"""What a model of images or recordings is traced with: signals of the size that its processor makes.

Two signals of unlike sizes go through the processor. An axis on which they still differ varies in the graph, and so
does the batch; all others have the size that the processor gives them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import numpy as np

from graphopt.analysis.structure.ports import INPUT_FEATURES, PIXEL_VALUES
from graphopt.errors import InputError
from graphopt.inference.recordings import has_processor
from graphopt.inference.signals import image_numbers, recording_numbers
from graphopt.models.checkpoint import quiet, reason_of
from graphopt.tasks.base import SAMPLE_BATCH
from graphopt.tasks.signals import random_signals

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

# Heights and widths in pixels, and lengths in samples, of signals in front of the processor.
_IMAGES, _LENGTHS = ((480, 640), (640, 512)), (16000, 24000)
# A size that torch does not take for a special case, where images of any size are read.
_SIDES = (160, 192)


def sample_of(model: Any, source: str) -> tuple[dict[str, Any], Mapping[str, Collection[int]]]:
    """Return inputs to trace a model with, torch tensors by name, and which of their axes vary.

    Args:
        model: a model of transformers.
        source: the folder of its checkpoint, or its id on the hub.

    Raises:
        InputError: nothing says how large its inputs are.
    """
    torch = importlib.import_module("torch")
    name = model.main_input_name
    first, second = _shapes(model, source)
    varying = [axis for axis in range(1, len(first)) if first[axis] != second[axis]]
    sizes = [SAMPLE_BATCH, *first[1:]]
    if name == PIXEL_VALUES:
        # Images of any size are traced by small ones: a trace computes.
        sizes = [size if axis not in varying else _SIDES[axis - 2] for axis, size in enumerate(sizes)]
    numbers = random_signals(sizes, np.random.default_rng(0))
    return {name: torch.from_numpy(numbers)}, {name: (0, *varying)}


def _shapes(model: Any, source: str) -> Sequence[tuple[int, ...]]:
    """Return the shapes that two signals of unlike size have when they come in."""
    name, config, random = model.main_input_name, model.config, np.random.default_rng(0)
    if has_processor(source):
        with quiet():
            try:
                if name == PIXEL_VALUES:
                    images = [random.integers(0, 256, (*size, 3), np.uint8) for size in _IMAGES]
                    return [image_numbers(source, [image])[name].shape for image in images]
                noises = [random.standard_normal(length).astype(np.float32) for length in _LENGTHS]
                return [recording_numbers(source, [noise])[name].shape for noise in noises]
            except InputError:
                raise
            except Exception as error:
                raise InputError(
                    f"the processor of the checkpoint fails on a random signal ({reason_of(error)})",
                    file=source,
                    remedy="is its preprocessor_config.json that of this model?",
                ) from error
    size = getattr(config, "image_size", None)
    if name == PIXEL_VALUES and size:
        height, width = (size, size) if isinstance(size, int) else size
        return [(1, getattr(config, "num_channels", 3), height, width)] * 2
    if name == PIXEL_VALUES:
        return [(1, getattr(config, "num_channels", 3), *size) for size in _IMAGES]
    if name != INPUT_FEATURES and getattr(config, "conv_kernel", None):
        return [(1, length) for length in _LENGTHS]
    raise InputError(
        f"nothing says how large the {name} of {type(model).__name__} are",
        file=source,
        remedy="put the preprocessor_config.json of the checkpoint there",
    )
