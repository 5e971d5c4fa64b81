"""Recordings are written down, letter by letter: connectionist temporal classification, as wav2vec 2.0 has it.

Output: ``logits`` [batch, frames, letters]; a frame says one letter or none, and letters that repeat count once (Graves
et al., ICML 2006). See :mod:`graphopt.tasks.signals` for the inputs.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from graphopt.analysis.structure.ports import LOGITS
from graphopt.tasks.signals import RECORDING_INPUTS, Signals


class SpeechCTC(Signals):
    """See the module for the ports."""

    name: ClassVar[str] = "speech_ctc"
    noun: ClassVar[str] = "a model that writes recordings down"
    quantity: ClassVar[str] = "logits of letters"
    output: ClassVar[str] = LOGITS
    rank: ClassVar[int | None] = 3
    reads: ClassVar[Literal["texts", "images", "recordings", "arrays"]] = "recordings"
    input_names: ClassVar[tuple[str, ...]] = RECORDING_INPUTS
    mappings: ClassVar[tuple[str, ...]] = ("MODEL_FOR_CTC_MAPPING",)
    files: ClassVar[tuple[str, ...]] = ("vocab.json", "added_tokens.json")


SPEECH_CTC = SpeechCTC()
