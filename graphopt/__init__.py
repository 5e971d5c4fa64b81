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
    from graphopt.artifact import Artifact as Artifact
    from graphopt.artifact import read as read
    from graphopt.conversation.conversation import Conversation as Conversation
    from graphopt.conversation.conversation import chat as chat
    from graphopt.decoding.continuation import Settings as Settings
    from graphopt.decoding.grammar import Grammar as Grammar
    from graphopt.decoding.sampling import Sampling as Sampling
    from graphopt.embeddings import EmbeddingEvaluation as EmbeddingEvaluation
    from graphopt.embeddings import EncoderSession as EncoderSession
    from graphopt.embeddings import evaluate_embeddings as evaluate_embeddings
    from graphopt.embeddings import load_encoder as load_encoder
    from graphopt.errors import GraphoptError as GraphoptError
    from graphopt.errors import InputError as InputError
    from graphopt.errors import MissingDependencyError as MissingDependencyError
    from graphopt.errors import VerificationError as VerificationError
    from graphopt.evaluation import Evaluation as Evaluation
    from graphopt.evaluation import evaluate as evaluate
    from graphopt.generation import Completion as Completion
    from graphopt.generation import generate as generate
    from graphopt.generation import stream as stream
    from graphopt.manifest import Manifest as Manifest
    from graphopt.models.export import export as export
    from graphopt.pipeline import optimize as optimize
    from graphopt.recipe import Recipe as Recipe
    from graphopt.recipe import load_recipe as load_recipe
    from graphopt.recipe import presets as presets
    from graphopt.session import Session as Session
    from graphopt.session import load as load

__version__ = VERSION

# Where each name is: it is imported when it is first used, so that `graphopt --help` starts at once.
_HOMES = {
    "Artifact": "graphopt.artifact",
    "Completion": "graphopt.generation",
    "Conversation": "graphopt.conversation.conversation",
    "EmbeddingEvaluation": "graphopt.embeddings",
    "EncoderSession": "graphopt.embeddings",
    "Evaluation": "graphopt.evaluation",
    "GraphoptError": "graphopt.errors",
    "Grammar": "graphopt.decoding.grammar",
    "InputError": "graphopt.errors",
    "Manifest": "graphopt.manifest",
    "MissingDependencyError": "graphopt.errors",
    "Recipe": "graphopt.recipe",
    "Sampling": "graphopt.decoding.sampling",
    "Session": "graphopt.session",
    "Settings": "graphopt.decoding.continuation",
    "VerificationError": "graphopt.errors",
    "chat": "graphopt.conversation.conversation",
    "evaluate": "graphopt.evaluation",
    "evaluate_embeddings": "graphopt.embeddings",
    "export": "graphopt.models.export",
    "generate": "graphopt.generation",
    "load": "graphopt.session",
    "load_encoder": "graphopt.embeddings",
    "load_recipe": "graphopt.recipe",
    "optimize": "graphopt.pipeline",
    "presets": "graphopt.recipe",
    "read": "graphopt.artifact",
    "stream": "graphopt.generation",
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
    importlib.import_module("graphopt.view.notebook").register()
