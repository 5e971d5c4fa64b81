"""Errors that say what is wrong, where, and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class GraphoptError(Exception):
    """Base of every error that graphopt raises on purpose.

    ``str(error)`` is ``message [file=..., node=..., tensor=..., shape=...]: remedy``; each part is an attribute too.

    Args:
        message: what is wrong, in a few words.
        file: the file that is wrong.
        node: the name of the graph node.
        tensor: the name of the tensor.
        shape: the shape of that tensor.
        remedy: what the reader can do about it.
    """

    exit_code: ClassVar[int] = 1

    def __init__(
        self,
        message: str,
        *,
        file: str | Path | None = None,
        node: str | None = None,
        tensor: str | None = None,
        shape: Sequence[object] | None = None,
        remedy: str | None = None,
    ) -> None:
        self.message, self.file, self.remedy = message, file, remedy
        self.node, self.tensor, self.shape = node, tensor, shape
        details = {"file": file, "node": node, "tensor": tensor, "shape": None if shape is None else list(shape)}
        location = ", ".join(f"{name}={value}" for name, value in details.items() if value is not None)
        super().__init__(message + (f" [{location}]" if location else "") + (f": {remedy}" if remedy else ""))


class InputError(GraphoptError):
    """The input cannot be used: a file, a model, a recipe, a prompt."""

    exit_code = 2


class MissingTokenizerError(InputError):
    """A model has no tokenizer, so it can be run on no text."""


class VerificationError(GraphoptError):
    """A rewritten model failed a check; nothing was written."""

    exit_code = 3


class MissingDependencyError(GraphoptError, ImportError):
    """An optional package is not installed; the message names the extra that brings it."""

    exit_code = 4
