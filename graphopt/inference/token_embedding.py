"""The graph in front of a decoder that reads embeddings: tokens in, and features of images, embeddings out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from graphopt.analysis.structure.ports import IMAGE_FEATURES, INPUT_IDS, INPUTS_EMBEDS
from graphopt.artifact import artifact
from graphopt.artifact.manifest import read_manifest
from graphopt.errors import InputError
from graphopt.ort.session import open_session, run
from graphopt.tasks.ports import port_of_node

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import onnxruntime

    from graphopt.artifact.manifest import Manifest
    from graphopt.tasks.ports import Array, IntArray

PART = "embedding"
"""The folder of the graph in an artifact."""


@dataclass(frozen=True)
class TokenEmbedding:
    """A graph that looks tokens up, and puts features of images among them. It runs on the CPU.

    Attributes:
        file: the ``.onnx`` file.
        inference: the onnxruntime session on it.
    """

    file: Path
    inference: onnxruntime.InferenceSession

    @cached_property
    def no_features(self) -> Array:
        """Features of no image, [0, width]."""
        port = next(port for port in map(port_of_node, self.inference.get_inputs()) if port.name == IMAGE_FEATURES)
        return np.zeros((0, port.shape[1] or 0), port.dtype)

    @cached_property
    def has_marks(self) -> bool:
        """Whether embeddings end with marks, see :mod:`graphopt.tasks.vision_language.embedding`."""
        shape = port_of_node(self.inference.get_outputs()[0]).shape
        return bool(shape) and shape[-1] == self.no_features.shape[1] + 1

    def embed(self, input_ids: IntArray, features: Array | None = None) -> Array:
        """Return embeddings [batch, length, width].

        Args:
            input_ids: the tokens, [batch, length].
            features: of the images whose tokens are among these, [image tokens, width]; ``None`` for no image.

        Raises:
            InputError: the run fails.
        """
        images = self.no_features if features is None else features.astype(self.no_features.dtype, copy=False)
        feeds: Mapping[str, Array] = {INPUT_IDS: np.ascontiguousarray(input_ids), IMAGE_FEATURES: images}
        try:
            return run(self.inference, [INPUTS_EMBEDS], feeds)[0]
        except Exception as error:
            raise InputError(f"onnxruntime cannot run the model: {error}", file=self.file) from error


def embedding_beside(folder: Path, manifest: Manifest | None, threads: int, native: bool) -> TokenEmbedding | None:
    """Open the graph that makes embeddings for the decoder of an artifact; ``None`` where the artifact has none.

    Args:
        folder: the artifact.
        manifest: its manifest, where it has one.
        threads: as for :func:`graphopt.ort.session.open_session`.
        native: see there.

    Raises:
        InputError: its file is missing, or has another size than its manifest says.
    """
    if manifest is None or PART not in manifest.parts:
        return None
    part = read_manifest(folder / PART)
    artifact.check_sizes(folder / PART, part, part.files)
    file = folder / PART / artifact.MODEL
    return TokenEmbedding(file, open_session(file, entries=part.session, threads=threads, native=native))
