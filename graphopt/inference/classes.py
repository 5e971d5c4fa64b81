"""A classifier or a reranker, opened in onnxruntime and ready to be asked for classes and scores of texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from graphopt.artifact.tokens import TOKENIZER
from graphopt.errors import GraphoptError, InputError
from graphopt.inference.session import OpenModel, open_folder
from graphopt.ort.session import run
from graphopt.tasks import TASKS
from graphopt.tasks.classifier import Classifier
from graphopt.tasks.encoder import EncoderInterface

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tokenizers import Encoding

    from graphopt.util.targets import Device

Floats = npt.NDArray[np.float32]
Text = str | tuple[str, str]
"""One text, or a pair: a query with a document, a premise with a hypothesis."""

_BATCH = 32


@dataclass(frozen=True)
class ClassifierSession:
    """A classifier that is ready to run.

    Attributes:
        model: the model with its manifest and tokenizer.
        task: which kind of classifier it is.
        interface: how the graph is fed and read.
    """

    model: OpenModel
    task: Classifier
    interface: EncoderInterface

    @property
    def has_token_classes(self) -> bool:
        """Whether each token has classes, and not each text."""
        return len(self.task.outputs) > 1 or len(self.interface.outputs[self.task.output].shape or ()) == 3

    @property
    def class_count(self) -> int | None:
        """How many classes there are, ``None`` where the graph does not say; a reranker has one."""
        shape = self.interface.outputs[self.task.output].shape
        return shape[-1] if shape else None

    @property
    def has_independent_classes(self) -> bool:
        """Whether each class has a probability of its own: there is one, or a text may be of several."""
        return self.class_count == 1 or self.model.manifest.model.are_labels_independent

    @property
    def labels(self) -> list[str]:
        """The names of the classes; their numbers where the checkpoint has no names."""
        names = self.model.manifest.model.labels
        return names if len(names) == self.class_count else [str(number) for number in range(self.class_count or 0)]

    def encode(self, texts: Sequence[Text], *, cuts: bool = False) -> list[Encoding]:
        """Return the tokens of texts, with the special tokens of the tokenizer.

        Args:
            texts: texts or pairs.
            cuts: whether texts that are too long for the model are cut, and not refused.

        Raises:
            InputError: the folder has no tokenizer, a text has no token, or one is too long.
        """
        tokenizer, bound = self.model.tokenizer, self.model.manifest.model.max_positions
        if tokenizer is None:
            raise InputError(
                f"this model has no {TOKENIZER}, so it can read no text",
                file=self.model.file.parent,
                remedy=f"put the {TOKENIZER} of the model into the folder",
            )
        before = tokenizer.truncation
        if cuts and bound is not None:
            tokenizer.enable_truncation(bound)
        try:
            encodings: list[Encoding] = tokenizer.encode_batch(list(texts))
        finally:
            tokenizer.no_truncation() if before is None else tokenizer.enable_truncation(**before)
        longest = max(len(encoding.ids) for encoding in encodings)
        if bound is not None and longest > bound:
            raise InputError(
                f"a text of {longest} tokens is longer than the model's {bound} positions",
                file=self.model.file,
                remedy="shorten it",
            )
        if not all(encoding.ids for encoding in encodings):
            raise InputError("a text is empty: a classifier reads one token at least")
        return encodings

    def logits(self, encodings: Sequence[Encoding]) -> list[Floats]:
        """Return the logits of each text, [classes], or [tokens, classes] where each token has classes.

        Of a model that answers questions they are [tokens, 2]: to begin an answer, and to end it.

        Raises:
            InputError: the run fails.
            GraphoptError: a logit is NaN or infinite.
        """
        order = sorted(range(len(encodings)), key=lambda index: len(encodings[index].ids))
        size = _BATCH if self.interface.takes_padding else 1
        by_text: dict[int, Floats] = {}
        for first in range(0, len(order), size):
            indices = order[first : first + size]
            rows = self._run([encodings[index] for index in indices])
            if self.has_token_classes:
                rows = [row[: len(encodings[index].ids)] for index, row in zip(indices, rows, strict=True)]
            by_text |= dict(zip(indices, rows, strict=True))
        return [by_text[index] for index in range(len(encodings))]

    def _run(self, encodings: Sequence[Encoding]) -> list[Floats]:
        """Return the rows of the output for texts that share a batch, padded at the end."""
        length = max(len(encoding.ids) for encoding in encodings)
        shape = len(encodings), length
        ids = np.full(shape, self.model.manifest.model.pad_token_id or 0, np.int64)
        mask, types = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        for row, encoding in enumerate(encodings):
            count = len(encoding.ids)
            ids[row, :count], types[row, :count], mask[row, :count] = encoding.ids, encoding.type_ids, 1
        feeds = self.interface.feeds(ids, mask, types)
        try:
            arrays: list[npt.NDArray[Any]] = run(self.model.inference, self.task.outputs, feeds)
        except Exception as error:
            raise InputError(f"onnxruntime cannot run the model: {error}", file=self.model.file) from error
        output = arrays[0] if len(arrays) == 1 else np.stack(arrays, axis=-1)
        if not np.isfinite(output[mask.astype(bool)] if self.has_token_classes else output).all():
            raise GraphoptError(
                "the model's logits are not finite",
                file=self.model.file,
                tensor=self.task.output,
                remedy="the weights or the precision are at fault: compare with the model it was made from",
            )
        return list(output.astype(np.float32, copy=False))

    def probabilities(self, logits: Floats) -> npt.NDArray[np.float64]:
        """Return the probabilities of classes for ``logits`` [..., classes].

        One class, and classes that do not exclude one another, have a probability of their own: a sigmoid. Others share
        it: a softmax.
        """
        return probabilities_of(logits, are_independent=self.has_independent_classes)


def probabilities_of(logits: npt.NDArray[np.generic], *, are_independent: bool) -> npt.NDArray[np.float64]:
    """Return the probabilities of classes for ``logits`` [..., classes]: a sigmoid of each, or a softmax of all."""
    numbers = logits.astype(np.float64)
    if are_independent:
        return 1 / (1 + np.exp(-numbers))
    exponentials = np.exp(numbers - numbers.max(axis=-1, keepdims=True))
    shares: npt.NDArray[np.float64] = exponentials / exponentials.sum(axis=-1, keepdims=True)
    return shares


def load_classifier(
    path: str | Path, *, threads: int = 0, native: bool = True, device: Device = "cpu"
) -> ClassifierSession:
    """Open an artifact folder of a classifier or reranker, or a plain ``.onnx`` file with the names of its ports.

    Args:
        path: the folder, or the file; ``tokenizer.json`` and ``config.json`` are looked for beside the model.
        threads: threads that one operator may use; 0 lets onnxruntime choose.
        native: use graphopt's own kernels where they were built.
        device: what to compute on; ``cuda`` is an NVIDIA GPU.

    Raises:
        InputError: see :func:`graphopt.inference.session.load`; or the model is no classifier.
        MissingDependencyError: onnxruntime is not installed, or has no provider for the device.
    """
    return classifier_of(open_folder(path, threads=threads, native=native, device=device))


def classifier_of(model: OpenModel) -> ClassifierSession:
    """Return the classifier that was opened.

    Raises:
        InputError: it is none.
    """
    task = TASKS[model.manifest.task]
    if not isinstance(task, Classifier):
        raise InputError(
            f"this model is of the kind {task.name}, which has no classes",
            file=model.file,
            remedy="give a classifier or a reranker; graphopt.load and graphopt.load_encoder open other models",
        )
    return ClassifierSession(model, task, EncoderInterface.of_session(model.inference, task.output))
