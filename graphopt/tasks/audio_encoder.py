"""Recordings become states, as wav2vec 2.0 and HuBERT make them.

Output: ``last_hidden_state`` [batch, frames, width]. See :mod:`graphopt.tasks.signals` for the inputs.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from graphopt.tasks.base import classes_of
from graphopt.tasks.image_encoder import SignalEncoder
from graphopt.tasks.signals import RECORDING_INPUTS


class AudioEncoder(SignalEncoder):
    """See the module for the ports."""

    name: ClassVar[str] = "audio_encoder"
    noun: ClassVar[str] = "an encoder of recordings"
    reads: ClassVar[Literal["texts", "images", "recordings", "arrays"]] = "recordings"
    input_names: ClassVar[tuple[str, ...]] = RECORDING_INPUTS

    def _classes(self, config: Any, transformers: Any) -> set[str]:
        """Return the bare model of a family that has heads for recordings."""
        auto = transformers.models.auto.modeling_auto
        heads = (auto.MODEL_FOR_CTC_MAPPING, auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING)
        if not any(type(config) in mapping for mapping in heads) or getattr(config, "is_encoder_decoder", False):
            return set()
        names = set(getattr(config, "architectures", None) or ())
        return names & classes_of(type(config), auto.MODEL_MAPPING)


AUDIO_ENCODER = AudioEncoder()
