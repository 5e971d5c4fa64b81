"""graphopt: the compiler that makes a language model small and fast in onnxruntime.

Example::

    manifest = graphopt.export("stdlib_lm", "float32")                   # needs graphopt[export]
    artifact = graphopt.optimize("float32", "small", "made")
    session = graphopt.load("made")                                      # then graphopt.generate, graphopt.evaluate
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from graphopt.version import VERSION

if TYPE_CHECKING:
    from graphopt.artifact.artifact import Artifact as Artifact
    from graphopt.artifact.artifact import read as read
    from graphopt.artifact.manifest import Manifest as Manifest
    from graphopt.compile.pipeline import optimize as optimize
    from graphopt.errors import GraphoptError as GraphoptError
    from graphopt.errors import InputError as InputError
    from graphopt.errors import MissingDependencyError as MissingDependencyError
    from graphopt.errors import VerificationError as VerificationError
    from graphopt.inference.classes import load_classifier as load_classifier
    from graphopt.inference.conversation.conversation import Conversation as Conversation
    from graphopt.inference.conversation.conversation import chat as chat
    from graphopt.inference.decoding.continuation import Settings as Settings
    from graphopt.inference.decoding.grammar import Grammar as Grammar
    from graphopt.inference.decoding.sampling import Sampling as Sampling
    from graphopt.inference.embeddings import EmbeddingEvaluation as EmbeddingEvaluation
    from graphopt.inference.embeddings import EncoderSession as EncoderSession
    from graphopt.inference.embeddings import evaluate_embeddings as evaluate_embeddings
    from graphopt.inference.embeddings import load_encoder as load_encoder
    from graphopt.inference.generation import Completion as Completion
    from graphopt.inference.generation import generate as generate
    from graphopt.inference.generation import stream as stream
    from graphopt.inference.seq2seq import load_seq2seq as load_seq2seq
    from graphopt.inference.session import Session as Session
    from graphopt.inference.session import load as load
    from graphopt.inference.signals import SignalSession as SignalSession
    from graphopt.inference.signals import load_signals as load_signals
    from graphopt.models.export import export as export
    from graphopt.passes.recipe import Recipe as Recipe
    from graphopt.passes.recipe import load_recipe as load_recipe
    from graphopt.passes.recipe import presets as presets
    from graphopt.quality.evaluation import Evaluation as Evaluation
    from graphopt.quality.evaluation import evaluate as evaluate

__version__ = VERSION

# Where each name is: it is imported when it is first used, so that `graphopt --help` starts at once.
_HOMES = {
    "Artifact": "graphopt.artifact.artifact",
    "Completion": "graphopt.inference.generation",
    "Conversation": "graphopt.inference.conversation.conversation",
    "EmbeddingEvaluation": "graphopt.inference.embeddings",
    "EncoderSession": "graphopt.inference.embeddings",
    "Evaluation": "graphopt.quality.evaluation",
    "GraphoptError": "graphopt.errors",
    "Grammar": "graphopt.inference.decoding.grammar",
    "InputError": "graphopt.errors",
    "Manifest": "graphopt.artifact.manifest",
    "MissingDependencyError": "graphopt.errors",
    "Recipe": "graphopt.passes.recipe",
    "Sampling": "graphopt.inference.decoding.sampling",
    "Session": "graphopt.inference.session",
    "Settings": "graphopt.inference.decoding.continuation",
    "SignalSession": "graphopt.inference.signals",
    "VerificationError": "graphopt.errors",
    "chat": "graphopt.inference.conversation.conversation",
    "evaluate": "graphopt.quality.evaluation",
    "evaluate_embeddings": "graphopt.inference.embeddings",
    "export": "graphopt.models.export",
    "generate": "graphopt.inference.generation",
    "load": "graphopt.inference.session",
    "load_classifier": "graphopt.inference.classes",
    "load_encoder": "graphopt.inference.embeddings",
    "load_recipe": "graphopt.passes.recipe",
    "load_seq2seq": "graphopt.inference.seq2seq",
    "load_signals": "graphopt.inference.signals",
    "optimize": "graphopt.compile.pipeline",
    "presets": "graphopt.passes.recipe",
    "read": "graphopt.artifact.artifact",
    "stream": "graphopt.inference.generation",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


if "IPython" in sys.modules:
    importlib.import_module("graphopt.report.notebook").register()
