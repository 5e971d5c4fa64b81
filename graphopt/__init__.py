"""graphopt: the compiler that makes a language model small and fast in onnxruntime.

Example::

    manifest = graphopt.export("stdlib_lm", "float32")                   # needs graphopt[export]
    artifact = graphopt.optimize("float32", "rotate-int4", "int4")
    session = graphopt.load("int4")                                      # then graphopt.generate, graphopt.evaluate
"""

from graphopt.artifact import Artifact, read
from graphopt.decoding.sampling import Sampling
from graphopt.embeddings import EmbeddingEvaluation, EncoderSession, evaluate_embeddings, load_encoder
from graphopt.errors import GraphoptError, InputError, MissingDependencyError, VerificationError
from graphopt.evaluate import Evaluation, evaluate
from graphopt.generate import Completion, generate, stream
from graphopt.manifest import Manifest
from graphopt.models.export import export
from graphopt.pipeline import optimize
from graphopt.recipe import Recipe, load_recipe, presets
from graphopt.session import Session, load
from graphopt.version import VERSION

__version__ = VERSION

__all__ = [
    "Artifact",
    "Completion",
    "EmbeddingEvaluation",
    "EncoderSession",
    "Evaluation",
    "GraphoptError",
    "InputError",
    "Manifest",
    "MissingDependencyError",
    "Recipe",
    "Sampling",
    "Session",
    "VerificationError",
    "evaluate",
    "evaluate_embeddings",
    "export",
    "generate",
    "load",
    "load_encoder",
    "load_recipe",
    "optimize",
    "presets",
    "read",
    "stream",
]
