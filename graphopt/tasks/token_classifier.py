"""Encoders that name the class of each token, as recognizers of names do.

Inputs are those of an encoder, see :mod:`graphopt.tasks.encoder`. Output: ``token_logits`` [batch, length, classes].
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from graphopt.tasks.classifier import Classifier, LogitsClassifier

if TYPE_CHECKING:
    from collections.abc import Mapping

TOKEN_LOGITS = "token_logits"


class TokenClassifier(Classifier):
    """See the module for the ports."""

    name: ClassVar[str] = "token_classifier"
    noun: ClassVar[str] = "a classifier of tokens"
    quantity: ClassVar[str] = "logits of classes"
    output: ClassVar[str] = TOKEN_LOGITS
    auto_class: ClassVar[str] = "AutoModelForTokenClassification"
    framework_names: ClassVar[Mapping[str, str]] = {TOKEN_LOGITS: "logits"}
    mapping: ClassVar[str] = "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING"

    def compared_rows(self, real: Any) -> Any:
        """Return which tokens are compared: all that are not padding."""
        return real


class LogitsTokenClassifier(LogitsClassifier, TokenClassifier):
    """A classifier of tokens whose output is called ``logits``, as in files of other exporters; the name stays."""

    name: ClassVar[str] = "logits_token_classifier"
    noun: ClassVar[str] = TokenClassifier.noun
    rank: ClassVar[int] = 3


TOKEN_CLASSIFIER, LOGITS_TOKEN_CLASSIFIER = TokenClassifier(), LogitsTokenClassifier()
