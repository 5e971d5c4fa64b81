"""The first graph of a vision-language model: images in, features in the width of the decoder out, projector included.

Inputs: ``pixel_values`` float [tiles, channels, height, width], where an image is one tile or several of a fixed size;
or [patches, numbers of a patch] of one image of any size, with ``image_grid_thw`` int64 [1, 3], how many patches it has
in time, height and width; or tiles, with ``feature_index`` int64 and ``feature_weight`` float [image tokens, terms],
which say how features of tiles become those of images (:mod:`graphopt.tasks.vision_language.tiles`). Output:
``image_features`` [image tokens, width], of all tiles or images one behind the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from graphopt.analysis.structure.ports import FEATURE_INDEX, FEATURE_WEIGHT, IMAGE_FEATURES, IMAGE_GRID, PIXEL_VALUES
from graphopt.errors import InputError
from graphopt.tasks.base import upper
from graphopt.tasks.signals import DIMENSIONS, Signals

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from graphopt.tasks.ports import Array, IntArray, Port

_OTHER_INPUTS = (IMAGE_GRID, FEATURE_INDEX, FEATURE_WEIGHT)
_TERMS = (6, 2)
"""Image tokens of a random arrangement, and how many features each is made of."""

GRID = (1, 8, 12)
"""Patches in time, height and width of a random image, where it may have any size; models merge 2 x 2 or 4 x 4."""


class VisionTower(Signals):
    """See the module for the ports."""

    name: ClassVar[str] = "vision_tower"
    noun: ClassVar[str] = "the vision tower of a vision-language model"
    quantity: ClassVar[str] = "image features"
    output: ClassVar[str] = IMAGE_FEATURES
    has_classes: ClassVar[bool] = False
    dimensions: ClassVar[Mapping[str, tuple[str, ...]]] = {
        PIXEL_VALUES: ("tiles", *DIMENSIONS[PIXEL_VALUES][1:]),
        IMAGE_GRID: ("images",),
        FEATURE_INDEX: ("image_tokens", "terms"),
        FEATURE_WEIGHT: ("image_tokens", "terms"),
    }

    def matches(self, inputs: Collection[str], outputs: Collection[str]) -> bool:
        """See :class:`graphopt.tasks.base.Task`."""
        is_known = PIXEL_VALUES in inputs and set(inputs) <= {PIXEL_VALUES, *_OTHER_INPUTS}
        return is_known and set(outputs) == {IMAGE_FEATURES}

    def takes_config(self, config: Any, transformers: Any) -> bool:
        """Take none: the configuration is of the whole model."""
        del config, transformers
        return False

    def signal_port(self, ports: Iterable[Port]) -> Port:
        """See :class:`Signals`."""
        return super().signal_port(port for port in ports if port.name not in _OTHER_INPUTS)

    def random_feeds(self, ports: Sequence[Port], batch: int, random: np.random.Generator) -> dict[str, Array]:
        """See :class:`Signals`; of images of any size one."""
        grid = next((port for port in ports if port.name == IMAGE_GRID), None)
        if grid is None:
            feeds = super().random_feeds(ports, batch, random)
            if any(port.name == FEATURE_INDEX for port in ports):
                feeds[FEATURE_INDEX], feeds[FEATURE_WEIGHT] = random_arrangement()
            return feeds
        port = self.signal_port(ports)
        if len(port.shape) != 2 or port.shape[1] is None:
            raise InputError("patches must be [patches, numbers of a patch]", tensor=port.name, shape=list(port.shape))
        patches = random.standard_normal((int(np.prod(GRID)), port.shape[1])).astype(port.dtype or np.float32)
        return {port.name: patches, grid.name: np.array([GRID], grid.dtype or np.int64)}

    def feeds_of(self, ports: Sequence[Port], signals: Array) -> dict[str, Array]:
        """See :class:`Signals`; of tiles only."""
        port = self.signal_port(ports)
        return {port.name: np.ascontiguousarray(signals, port.dtype or np.float32)}

    def export_parts(self, model: Any, source: str) -> tuple[Any, dict[str, Any]]:
        """Return what makes features of images, and two images of the size that the processor makes."""
        part: tuple[Any, dict[str, Any]] = upper("graphopt.models.vision_part:vision_part")(model, source)
        return part

    def varying_axes(self, model: Any, source: str) -> Mapping[str, Collection[int]]:
        """See :class:`graphopt.tasks.base.Task`: the number of tiles, or of patches."""
        del model, source
        return {PIXEL_VALUES: (0,), IMAGE_GRID: (), FEATURE_INDEX: (0, 1), FEATURE_WEIGHT: (0, 1)}


def random_arrangement() -> tuple[IntArray, Array]:
    """Return rows of the first tile, int64, and weights, float32 [image tokens, terms]."""
    index = np.arange(_TERMS[0])[:, None] + np.arange(_TERMS[1])
    return index, np.full(_TERMS, 1 / _TERMS[1], np.float32)


VISION_TOWER = VisionTower()
