"""Decoding as onnxruntime-genai does it: past and present share buffers that have room for all tokens."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from graphopt.artifact.artifact import MODEL
from graphopt.artifact.genai import GENAI_CONFIG
from graphopt.ort.session import import_onnxruntime, open_session

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

    from graphopt.ort.session import Entries
    from graphopt.util.targets import Device

_PAST, _PRESENT, _LOGITS = "past_key_values.", "present.", "logits"
_TYPES = {"tensor(float16)": ir.DataType.FLOAT16, "tensor(float)": ir.DataType.FLOAT}


class SharedBufferModel:
    """A model of onnxruntime-genai's builder, opened in onnxruntime.

    Args:
        folder: where the builder wrote it.
        device: what to compute on.
        entries: session entries beside those of its configuration.
        profile: as for :func:`graphopt.ort.session.open_session`.
    """

    def __init__(self, folder: Path, device: Device, *, entries: Entries, profile: Path | None = None) -> None:
        decoder = json.loads((folder / GENAI_CONFIG).read_text())["model"]["decoder"]
        # Options of onnxruntime's sessions have dots in their names, those of onnxruntime-genai none.
        config_entries = {key: value for key, value in decoder["session_options"].items() if "." in key}
        self.device, self.head_size = device, int(decoder["head_size"])
        self.inference: Any = open_session(
            folder / MODEL, entries={**config_entries, **entries}, device=device, native=False, profile=profile
        )
        outputs = {output.name: output for output in self.inference.get_outputs()}
        self.vocabulary = int(outputs[_LOGITS].shape[-1])


class SharedBufferDecoder:
    """A batch of sequences that grow together; see :class:`graphopt.inference.decoding.decoder.Decoder`.

    Args:
        model: the model.
        batch: number of sequences.
        room: tokens that each may have.
    """

    def __init__(self, model: SharedBufferModel, batch: int, *, room: int) -> None:
        self._session, self._batch, self._room, self._length = model.inference, batch, room, 0
        self._binding = self._session.io_binding()
        self._binding.bind_output(_LOGITS, "cpu")
        inputs = self._session.get_inputs()
        self._reads_positions = any(value.name == "position_ids" for value in inputs)
        ort_value = import_onnxruntime().OrtValue
        for value in inputs:
            if value.name.startswith(_PAST):
                numbers = np.zeros((batch, value.shape[1], room, model.head_size), _TYPES[value.type].numpy())
                buffer = ort_value.ortvalue_from_numpy(numbers, model.device, 0)
                self._binding.bind_ortvalue_input(value.name, buffer)
                self._binding.bind_ortvalue_output(value.name.replace(_PAST, _PRESENT), buffer)

    def step(self, input_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.floating]:
        """Feed new tokens [batch, length] and return the logits of the last, [batch, 1, vocabulary].

        Raises:
            ValueError: there is no room for them.
        """
        end = self._length + input_ids.shape[1]
        if end > self._room:
            raise ValueError(f"{end} tokens do not fit in buffers for {self._room}")
        binding = self._binding
        binding.bind_cpu_input("input_ids", np.ascontiguousarray(input_ids))
        binding.bind_cpu_input("attention_mask", np.ones((self._batch, end), np.int64))
        if self._reads_positions:
            positions = np.tile(np.arange(self._length, end, dtype=np.int64), (self._batch, 1))
            binding.bind_cpu_input("position_ids", positions)
        # Binding a name again replaces the earlier binding: the logits stay the first output.
        binding.bind_output(_LOGITS, "cpu")
        self._session.run_with_iobinding(binding)
        self._length = end
        logits: npt.NDArray[np.floating] = binding.get_outputs_as_ortvaluevector()[0].numpy()
        return logits
