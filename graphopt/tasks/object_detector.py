"""Boxes around things in images, as DETR and YOLOS make them.

Outputs: ``logits`` [batch, queries, classes], of which the last may be that of no thing, and ``pred_boxes`` [batch,
queries, 4]: middle, width and height as shares of the image. See :mod:`graphopt.tasks.signals` for the inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from graphopt.analysis.structure.ports import LOGITS
from graphopt.tasks.signals import Signals

if TYPE_CHECKING:
    from collections.abc import Collection

BOXES = "pred_boxes"


class ObjectDetector(Signals):
    """See the module for the ports."""

    name: ClassVar[str] = "object_detector"
    noun: ClassVar[str] = "a detector of things"
    quantity: ClassVar[str] = "logits and boxes"
    output: ClassVar[str] = LOGITS
    extra_outputs: ClassVar[tuple[str, ...]] = (BOXES,)
    rank: ClassVar[int | None] = 3
    mappings: ClassVar[tuple[str, ...]] = ("MODEL_FOR_OBJECT_DETECTION_MAPPING",)

    def first_output(self, outputs: Collection[str]) -> str | None:
        """See :class:`Signals`."""
        return super().first_output(outputs) if BOXES in outputs else None


OBJECT_DETECTOR = ObjectDetector()
