"""Classes of recordings. Output: ``logits`` [batch, classes]; see :mod:`graphopt.tasks.signals` for the inputs."""

from __future__ import annotations

from typing import ClassVar, Literal

from graphopt.analysis.structure.ports import LOGITS
from graphopt.tasks.signals import RECORDING_INPUTS, Signals


class AudioClassifier(Signals):
    """See the module for the ports."""

    name: ClassVar[str] = "audio_classifier"
    noun: ClassVar[str] = "a classifier of recordings"
    quantity: ClassVar[str] = "logits of classes"
    output: ClassVar[str] = LOGITS
    rank: ClassVar[int | None] = 2
    reads: ClassVar[Literal["texts", "images", "recordings", "arrays"]] = "recordings"
    input_names: ClassVar[tuple[str, ...]] = RECORDING_INPUTS
    mappings: ClassVar[tuple[str, ...]] = ("MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING",)


AUDIO_CLASSIFIER = AudioClassifier()
