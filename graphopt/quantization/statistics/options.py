"""What a recipe says about the text, or the inputs, that statistics are collected on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class CalibrationOptions(BaseModel):
    """The text, or the inputs, that statistics are collected on, for steps that need them.

    Attributes:
        text: a UTF-8 file, from the recipe's folder or the current one; by default source of the Python standard
            library, without the modules that models are judged by.
        window: tokens that the model reads at once; by default 256, or the positions of a model that has fewer. Many
            short windows say more of a text than few long ones (docs/rounding.md, "Windows of calibration").
        windows: how many such windows, spaced evenly over the text; samples of inputs at most.
        inputs: of a graph that reads no text: an ``.npz`` file, or a folder, see :mod:`graphopt.tasks.graph.files`. It
            is also what passes are compared on. Without it, inputs are random.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    text: Path | None = None
    window: Annotated[int, Field(ge=2)] | None = None
    windows: Annotated[int, Field(ge=1)] = 64
    inputs: Path | None = None

    def with_files_from(self, folder: Path) -> CalibrationOptions:
        """Return the options with text and inputs from ``folder``, where the recipe was read, if they lie there."""
        files = {"text": self.text, "inputs": self.inputs}
        paths = {name: folder / file for name, file in files.items() if file is not None}
        return self.model_copy(update={name: path for name, path in paths.items() if path.exists()})
