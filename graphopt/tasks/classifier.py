"""Encoders and decoders with a head: classes of texts, scores of pairs (rerankers, cross-encoders).

Inputs are those of an encoder, see :mod:`graphopt.tasks.encoder`. Output: ``class_logits`` [batch, classes]. A
reranker has one class, whose logit is the score of a query with a document.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from graphopt.analysis.structure.ports import ATTENTION_MASK, INPUT_IDS, LOGITS
from graphopt.errors import InputError
from graphopt.graph.diagnostics import Fact, Rule
from graphopt.ort.session import run
from graphopt.tasks.base import LENGTH, PADDING, Floats, Probe, classes_of, upper
from graphopt.tasks.encoder import Encoder, EncoderProbe, vocabulary_of
from graphopt.tasks.ports import class_rank

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    import onnx_ir as ir
    import onnxruntime

CLASS_LOGITS = "class_logits"
NO_GENERATION = Rule("classifier.no-text", "{noun} makes no text, as onnxruntime-genai does")
TEXTS = Rule("classifier.tokens", "{batch} x {length} random tokens with padding")

_BATCH = 8


@dataclass(frozen=True)
class HeadProbe(EncoderProbe):
    """Random tokens; what is compared are logits of classes.

    Attributes:
        outputs: the graph outputs that hold them; several stand side by side.
    """

    outputs: tuple[str, ...]

    @property
    def tokens(self) -> Fact:
        """See :class:`graphopt.tasks.base.Probe`."""
        return TEXTS(batch=_BATCH, length=LENGTH)

    def run(self, session: onnxruntime.InferenceSession) -> Floats:
        """Return the logits that are compared, [texts or tokens, classes]."""
        arrays = run(session, list(self.outputs), self.feeds)
        logits = arrays[0] if len(arrays) == 1 else np.stack(arrays, axis=-1)
        rows: Floats = logits[self.real].astype(np.float64)
        return rows

    def figures(self, first: Floats, after: Floats) -> dict[str, float]:
        """Return the share of rows with the likeliest class of the model before any pass; nothing for one class."""
        if first.shape[-1] == 1:
            return {}
        return {"same_class_share": float((first.argmax(-1) == after.argmax(-1)).mean())}


class Classifier(Encoder):
    """Classes of whole texts, and the base of other heads.

    Attributes:
        mapping: the table of transformers that lists such models.
        probe_class: how two graphs of this kind are compared.
    """

    name: ClassVar[str] = "classifier"
    noun: ClassVar[str] = "a classifier"
    quantity: ClassVar[str] = "logits of classes"
    output: ClassVar[str] = CLASS_LOGITS
    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"
    framework_names: ClassVar[Mapping[str, str]] = {CLASS_LOGITS: "logits"}
    probe_class: ClassVar[type[HeadProbe]] = HeadProbe
    mapping: ClassVar[str] = "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING"

    def matches(self, inputs: Collection[str], outputs: Collection[str]) -> bool:
        """See :class:`graphopt.tasks.base.Task`."""
        return INPUT_IDS in inputs and self.output in outputs

    def probe(self, graph: ir.Graph, *, context: int = 0) -> Probe:
        """See :class:`graphopt.tasks.base.Task`."""
        del context
        interface = self.interface(graph)
        ids = np.random.default_rng(0).integers(0, vocabulary_of(graph) or 2, (_BATCH, LENGTH))
        mask = np.ones_like(ids)
        if ATTENTION_MASK in interface.inputs:
            mask[0, -PADDING:] = 0
        return self.probe_class(interface.feeds(ids, mask), self.compared_rows(mask.astype(bool)), self.outputs)

    def compared_rows(self, real: Any) -> Any:
        """Return which rows of the output are compared, for ``real`` tokens [batch, length]: one for each text."""
        return np.ones(len(real), bool)

    def takes_config(self, config: Any, transformers: Any) -> bool:
        """Take what ``architectures`` name such a head, on an encoder or a decoder."""
        is_other = getattr(config, "is_decoder", False) or getattr(config, "is_encoder_decoder", False)
        bodies = (transformers.MODEL_FOR_MASKED_LM_MAPPING, transformers.MODEL_FOR_CAUSAL_LM_MAPPING)
        if is_other or not any(type(config) in mapping for mapping in bodies):
            return False
        return bool(self._heads(config, transformers).intersection(getattr(config, "architectures", None) or ()))

    def _heads(self, config: Any, transformers: Any) -> set[str]:
        return classes_of(type(config), getattr(transformers, self.mapping))

    def class_of(self, config: Any, transformers: Any) -> Any:
        """Return the class that the configuration names."""
        names = self._heads(config, transformers).intersection(config.architectures)
        return getattr(transformers, names.pop())

    def sample(self, model: Any) -> dict[str, Any]:
        """See :class:`graphopt.tasks.base.Task`; a decoder must say which token is padding.

        Raises:
            InputError: it does not, so that it would take the class of a text from its padding.
        """
        transformers = importlib.import_module("transformers")
        is_decoder = type(model.config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        if is_decoder and self.output == CLASS_LOGITS and getattr(model.config, "pad_token_id", None) is None:
            raise InputError(
                f"{type(model).__name__} finds the last token of a text by its padding, and has no pad_token_id",
                remedy="set pad_token_id in its config.json to a token that no text holds",
            )
        return super().sample(model)

    def facts(self, folder: Path) -> Any:
        """See :class:`graphopt.tasks.base.Task`; the names of classes too."""
        return upper("graphopt.artifact.hf_config:facts_of_classifier")(folder)

    def why_no_genai(self) -> Fact:
        """See :class:`graphopt.tasks.base.Task`."""
        return NO_GENERATION(noun=self.noun)

    def print_run(self, model: Any, inputs: list[str], as_json: bool) -> None:
        """Print classes, or documents by their scores."""
        upper("graphopt.cli.classes:print_classes")(model, inputs, as_json)

    def print_evaluation(self, model: Any, reference: Path | None, text: str, threads: int, as_json: bool) -> None:
        """Print how often the classes and rankings are those of a reference."""
        upper("graphopt.cli.classes:print_class_agreement")(model, reference, text, threads, as_json)

    def measure_quality(self, reference: Any, artifact: Path, **reading: Any) -> dict[str, float]:
        """Compare classes of sentences, or rankings of pairs."""
        figures: dict[str, float] = upper("graphopt.quality.classes:class_quality")(reference, artifact, **reading)
        return figures

    def describe_quality(self, verdict: str, figures: Mapping[str, float]) -> Fact:
        """See :class:`graphopt.tasks.base.Task`."""
        fact: Fact = upper("graphopt.quality.classes:describe_class_quality")(verdict, figures)
        return fact


class LogitsClassifier(Classifier):
    """A classifier whose output is called ``logits``, as in files of other exporters; the name stays."""

    name: ClassVar[str] = "logits_classifier"
    output: ClassVar[str] = LOGITS
    framework_names: ClassVar[Mapping[str, str]] = {}
    rank: ClassVar[int] = 2

    def matches(self, inputs: Collection[str], outputs: Collection[str]) -> bool:
        """Take logits [batch, classes] of a graph without a cache."""
        return super().matches(inputs, outputs) and class_rank(inputs, outputs) == self.rank

    def takes_config(self, config: Any, transformers: Any) -> bool:
        """Take none: what is exported has an output of its own name."""
        del config, transformers
        return False


CLASSIFIER, LOGITS_CLASSIFIER = Classifier(), LogitsClassifier()
