"""What a recipe says about the text that statistics are collected on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class CalibrationOptions(BaseModel):
    """The text that statistics are collected on, for steps that need them.

    Attributes:
        text: a UTF-8 file, from the recipe's folder or the current one; by default source of the Python standard
            library, without the modules that models are judged by.
        window: tokens that the model reads at once; by default its positions, at most 1024.
        windows: how many such windows, spaced evenly over the text.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    text: Path | None = None
    window: Annotated[int, Field(ge=2)] | None = None
    windows: Annotated[int, Field(ge=1)] = 64

    def with_text_from(self, folder: Path) -> CalibrationOptions:
        """Return the options with the text taken from ``folder``, where the recipe was read, if it lies there."""
        if self.text is None or not (folder / self.text).is_file():
            return self
        return self.model_copy(update={"text": folder / self.text})
