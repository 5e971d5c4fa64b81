"""Models that find the answer to a question in a text: which token begins it, and which ends it.

Inputs are those of an encoder, see :mod:`graphopt.tasks.encoder`: a pair of question and text. Outputs:
``start_logits`` and ``end_logits`` [batch, length].
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from graphopt.tasks.base import Floats, upper
from graphopt.tasks.classifier import HeadProbe
from graphopt.tasks.token_classifier import TokenClassifier

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from graphopt.graph.diagnostics import Fact

START_LOGITS, END_LOGITS = "start_logits", "end_logits"


class SpanProbe(HeadProbe):
    """Random tokens; what is compared are the logits of beginnings and ends, side by side."""

    def figures(self, first: Floats, after: Floats) -> dict[str, float]:
        """Return the share of texts whose likeliest beginning (end) is that of the model before any pass."""
        ends = self.real.sum(-1).cumsum()[:-1]
        pairs = zip(np.split(first, ends), np.split(after, ends), strict=True)
        return {"same_class_share": float(np.mean([row.argmax(0) == row_after.argmax(0) for row, row_after in pairs]))}


class QuestionAnswering(TokenClassifier):
    """See the module for the ports."""

    name: ClassVar[str] = "question_answering"
    noun: ClassVar[str] = "a model that answers questions"
    quantity: ClassVar[str] = "logits of answers"
    output: ClassVar[str] = START_LOGITS
    auto_class: ClassVar[str] = "AutoModelForQuestionAnswering"
    framework_names: ClassVar[Mapping[str, str]] = {}
    mapping: ClassVar[str] = "MODEL_FOR_QUESTION_ANSWERING_MAPPING"
    probe_class: ClassVar[type[HeadProbe]] = SpanProbe

    @property
    def outputs(self) -> tuple[str, ...]:
        """Logits of the token that begins an answer, and of the one that ends it."""
        return START_LOGITS, END_LOGITS

    def matches(self, inputs: Collection[str], outputs: Collection[str]) -> bool:
        """See :class:`graphopt.tasks.base.Task`."""
        return super().matches(inputs, outputs) and END_LOGITS in outputs

    def print_run(self, model: Any, inputs: list[str], as_json: bool) -> None:
        """Print the answer to each question."""
        upper("graphopt.cli.answers:print_answers")(model, inputs, as_json)

    def print_evaluation(self, model: Any, reference: Path | None, text: str, threads: int, as_json: bool) -> None:
        """Print how often the answers are those of a reference."""
        upper("graphopt.cli.answers:print_answer_agreement")(model, reference, text, threads, as_json)

    def measure_quality(self, reference: Any, artifact: Path, **reading: Any) -> dict[str, float]:
        """Compare answers to questions about sentences."""
        figures: dict[str, float] = upper("graphopt.quality.answers:answer_quality")(reference, artifact, **reading)
        return figures

    def describe_quality(self, verdict: str, figures: Mapping[str, float]) -> Fact:
        """See :class:`graphopt.tasks.base.Task`."""
        fact: Fact = upper("graphopt.quality.answers:describe_answer_quality")(verdict, figures)
        return fact


QUESTION_ANSWERING = QuestionAnswering()
