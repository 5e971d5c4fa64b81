"""Classes of pixels, as SegFormer makes them.

Output: ``logits`` [batch, classes, height, width], perhaps of fewer pixels than the image. See
:mod:`graphopt.tasks.signals` for the inputs.
"""

from __future__ import annotations

from typing import ClassVar

from graphopt.analysis.structure.ports import LOGITS
from graphopt.tasks.signals import Signals


class ImageSegmenter(Signals):
    """See the module for the ports."""

    name: ClassVar[str] = "image_segmenter"
    noun: ClassVar[str] = "a segmenter of images"
    quantity: ClassVar[str] = "logits of pixels"
    output: ClassVar[str] = LOGITS
    rank: ClassVar[int | None] = 4
    mappings: ClassVar[tuple[str, ...]] = ("MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING",)


IMAGE_SEGMENTER = ImageSegmenter()
