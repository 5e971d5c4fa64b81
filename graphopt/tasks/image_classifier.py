"""Classes of whole images. Output: ``logits`` [batch, classes]; see :mod:`graphopt.tasks.signals` for the inputs."""

from __future__ import annotations

from typing import ClassVar

from graphopt.analysis.structure.ports import LOGITS
from graphopt.tasks.signals import Signals


class ImageClassifier(Signals):
    """See the module for the ports."""

    name: ClassVar[str] = "image_classifier"
    noun: ClassVar[str] = "a classifier of images"
    quantity: ClassVar[str] = "logits of classes"
    output: ClassVar[str] = LOGITS
    rank: ClassVar[int | None] = 2
    mappings: ClassVar[tuple[str, ...]] = ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",)


IMAGE_CLASSIFIER = ImageClassifier()
