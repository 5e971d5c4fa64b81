"""The files beside the model: tokenizer and configuration as they were, and what is made of the graph."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from graphopt.artifact.artifact import MODEL, Artifact, is_data, write_companions
from graphopt.artifact.manifest import MANIFEST
from graphopt.errors import VerificationError

if TYPE_CHECKING:
    from graphopt.graph.diagnostics import Fact


def confirm_companions(artifact: Artifact, folder: Path) -> list[Fact]:
    """Confirm that beside the model lies what would be written beside ``artifact``, byte by byte, and nothing else.

    Args:
        artifact: the model that the recipe makes, the manifest, and the companions of the model before.
        folder: the artifact.

    Returns:
        The notes of the manifest, with the reason if there is no ``genai_config.json``.

    Raises:
        VerificationError: a file is missing, differs or should not be there; names it.
    """
    with tempfile.TemporaryDirectory(prefix="graphopt-") as temporary:
        notes = write_companions(artifact, Path(temporary))
        new_files = {file.name: file.read_bytes() for file in Path(temporary).iterdir()}
    # files of weights are compared with the tensors that lie in them
    stored_names = {file.name for file in folder.iterdir() if file.is_file() and not is_data(file.name)} - {
        MODEL,
        MANIFEST,
    }
    for name in sorted(new_files.keys() | stored_names):
        if name not in new_files:
            raise VerificationError(
                "the recipe, run again, writes no such file", file=folder / name, remedy="move it out of the artifact"
            )
        if name not in stored_names or (folder / name).read_bytes() != new_files[name]:
            raise VerificationError(
                "the recipe, run again, writes another file" if name in stored_names else "this file is missing",
                file=folder / name,
                remedy="the tokenizer and the configuration are copies of those of the model before",
            )
    return notes
